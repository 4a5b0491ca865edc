"""A local stand-in for the Hugging Face Hub: what `snapshot_download`, `create_repo` and `upload_folder` request.

Downloads and uploads use plain HTTP and LFS, not Xet. A write needs the token TOKEN.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_test"
OWNER = "wader"
"""The account of TOKEN; it may write to its own models only."""
ORGANIZATION = "curlews"
"""An organization of that account."""
LFS_SUFFIXES = (".safetensors", ".bin")


class HubError(Exception):
    """An error response; `code` is the header X-Error-Code, by which the client chooses an exception."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Repo:
    """A model: the files of each commit, and the commit of each branch."""

    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make `files` the content of a branch; returns the id of the commit."""
        digest = hashlib.sha1(f"{branch} {len(self.commits)}".encode())
        for name, content in sorted(files.items()):
            digest.update(name.encode() + b"\0" + content)
        self.commits[digest.hexdigest()] = files
        self.branches[branch] = digest.hexdigest()
        return digest.hexdigest()

    def resolve(self, revision: str) -> str:
        """The id of a commit, or the newest commit of a branch."""
        commit = self.branches.get(revision, revision)
        if commit not in self.commits:
            raise HubError(404, f"no revision {revision}", "RevisionNotFound")
        return commit

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """The files of a revision."""
        return self.commits[self.resolve(revision)]


class HubServer(ThreadingHTTPServer):
    """Models by id, and the requests so far as `METHOD path`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.role = "write"
        """The role of TOKEN, as in the settings of an account."""
        self.down = False
        """Answer every request with status 503."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, name: str, directory: Path, *, private: bool = False, gated: bool = False) -> Repo:
        """Publish the files of a directory."""
        repo = self.repos[name] = Repo(private=private, gated=gated)
        repo.commit(
            {
                file.relative_to(directory).as_posix(): file.read_bytes()
                for file in directory.rglob("*")
                if file.is_file()
            }
        )
        return repo


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        try:
            if self.server.down:
                raise HubError(503, "maintenance")
            for method, pattern, answer in ROUTES:
                if method == self.command and (match := re.fullmatch(pattern, path)):
                    answer(self, body, **match.groupdict())
                    return
            raise HubError(404, f"unknown endpoint {self.command} {path}")
        except HubError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)} if error.code else {}
            self._send(error.status, json.dumps({"error": str(error)}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = _handle  # noqa: N815

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(content))} | (headers or {})
        ).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode())

    @property
    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _repo(self, name: str, *, write: bool = False) -> Repo:
        if self._token not in (None, TOKEN):
            raise HubError(401, "Invalid credentials in Authorization header")
        repo = self.server.repos.get(name)
        is_owner = self._token == TOKEN and name.startswith(f"{OWNER}/")
        if repo is None or (repo.private and not is_owner):
            raise HubError(404 if self._token else 401, "Repository not found", "RepoNotFound")
        if repo.gated and not is_owner:
            raise HubError(403, f"Access to model {name} is restricted", "GatedRepo")
        if write and not is_owner:
            raise HubError(403, "no write access")
        return repo

    # Reading

    def whoami(self, body: bytes) -> None:
        if self._token != TOKEN:
            raise HubError(401, "Invalid username or password.")
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": self.server.role}}
        self._send_json({"type": "user", "name": OWNER, "orgs": [{"name": ORGANIZATION}], "auth": auth})

    def info(self, body: bytes, name: str, revision: str | None = None) -> None:
        repo = self._repo(name)
        commit = repo.resolve(revision or "main")
        siblings = [{"rfilename": file} for file in repo.commits[commit]]
        self._send_json({"id": name, "modelId": name, "sha": commit, "private": repo.private, "siblings": siblings})

    def tree(self, body: bytes, name: str, revision: str) -> None:
        self._send_json([_entry(path, content) for path, content in self._repo(name).files(revision).items()])

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        commit = repo.resolve(revision)
        content = repo.commits[commit].get(path)
        if content is None:
            raise HubError(404, f"no file {path}", "EntryNotFound")
        etag = _entry(path, content).get("lfs", {}).get("oid") or _blob_id(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Content-Type": "application/octet-stream"}
        self._send(200, content, headers)

    # Writing

    def create(self, body: bytes) -> None:
        request = json.loads(body)
        name = f"{request['organization']}/{request['name']}"
        if self._token != TOKEN:
            raise HubError(401, "Invalid username or password.")
        if request["organization"] != OWNER:
            raise HubError(403, f"You don't have the rights to create a model under {request['organization']}")
        if name in self.server.repos:
            self._send_json({"url": f"{self.server.url}/{name}", "error": "exists"}, 409)
            return
        is_private = request.get("visibility") == "private" or request.get("private", False)
        repo = self.server.repos[name] = Repo(private=is_private)
        repo.commit({".gitattributes": b""})
        self._send_json({"url": f"{self.server.url}/{name}", "name": name})

    def branch(self, body: bytes, name: str, branch: str) -> None:
        repo = self._repo(name, write=True)
        if branch in repo.branches:
            raise HubError(409, "branch exists")
        repo.branches[branch] = repo.branches["main"]
        self._send_json({})

    def validate_card(self, body: bytes) -> None:
        """Check what the Hub checks of `base_model`: it must be an id."""
        content = json.loads(body)["content"]
        base = re.search(r"^base_model: (.*)$", content, re.MULTILINE)
        valid = base is None or re.fullmatch(r"[\w.-]+/[\w.-]+", base[1])
        errors = [] if valid else [{"message": f'"base_model" with value "{base and base[1]}" is not valid'}]
        self._send_json({"errors": errors, "warnings": []}, 200 if valid else 400)

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        self._repo(name, write=True).resolve(revision)
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(LFS_SUFFIXES) else "regular" for path in paths}
        files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        self._send_json({"files": files})

    def lfs_batch(self, body: bytes, name: str) -> None:
        self._repo(name, write=True)
        objects = [
            item | {"actions": {"upload": {"href": f"{self.server.url}/objects/{item['oid']}"}}}
            for item in json.loads(body)["objects"]
        ]
        self._send_json({"transfer": "basic", "objects": objects})

    def put_object(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        self._send_json({})

    def commit(self, body: bytes, name: str, revision: str) -> None:
        repo = self._repo(name, write=True)
        files = dict(repo.files(revision))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = repo.commit(files, revision)
        self._send_json({"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})


NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("GET", f"/api/models/{NAME}", _Handler.info),
    ("GET", f"/api/models/{NAME}/revision/(?P<revision>.+)", _Handler.info),
    ("GET", f"/api/models/{NAME}/tree/(?P<revision>[^/]+)", _Handler.tree),
    ("HEAD", f"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
    ("GET", f"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", f"/api/models/{NAME}/branch/(?P<branch>.+)", _Handler.branch),
    ("POST", "/api/validate-yaml", _Handler.validate_card),
    ("POST", f"/api/models/{NAME}/preupload/(?P<revision>.+)", _Handler.preupload),
    ("POST", f"/{NAME}.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", "/objects/(?P<oid>[0-9a-f]+)", _Handler.put_object),
    ("POST", f"/api/models/{NAME}/commit/(?P<revision>.+)", _Handler.commit),
]


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


@contextmanager
def hub_server(cache: Path) -> Iterator[HubServer]:
    """Start a hub, and make it the one of huggingface_hub in this process, with an empty cache and no token."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    settings = {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN_PATH": str(cache / "token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setattr(f"huggingface_hub.constants.{name}", value)
            patch.setattr("huggingface_hub.hf_api.api.endpoint", server.url)  # of functions such as file_exists
            patch.delenv("HF_TOKEN", raising=False)
            yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
