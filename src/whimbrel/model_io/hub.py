"""Models on the Hugging Face Hub: resolving `owner/name` through the local cache, downloading, and uploading.

Needs the extra `hub`. Cached models are used without a request to the Hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from whimbrel.base.errors import CheckpointError, ConfigError, MissingExtraError
from whimbrel.base.files import broken_link
from whimbrel.config import did_you_mean_path
from whimbrel.model_io.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from whimbrel.model_io.weights import CONFIG, INDEX, WEIGHTS, read_json

__all__ = ["cached_model", "check_write_access", "is_hub_id", "resolve_path", "upload_model"]

HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
LOCAL_SUFFIXES = (".bin", ".gguf", ".json", ".safetensors", ".toml")
"""Paths with these suffixes are local files, never Hub ids."""
DOWNLOADED = ("*.json", "*.jinja", "*.safetensors", "merges.txt", "tokenizer.model")
IGNORED = ("*/*.json", "*/*.safetensors", "consolidated*")
"""Weights in other formats, and checkpoints in subdirectories."""
RUN_OR_MODEL = (ADAPTER_CONFIG, "checkpoints", CONFIG, "config.toml")
"""What a run, a model or an adapter has at least one of."""
EXPECTED_PATH = (
    "expected a run, a checkpoint, a model directory, a PEFT adapter, a llama2.c .bin file, or owner/name on the "
    "Hugging Face Hub"
)


def is_hub_id(name: str | os.PathLike[str]) -> bool:
    """Whether this could be the id of a model on the Hub, with or without @revision; a local path takes precedence."""
    text = Path(name).as_posix()
    return HUB_ID.fullmatch(text) is not None and not text.endswith(LOCAL_SUFFIXES)


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """The path itself if it exists, else the local directory of the Hub model `owner/name` or `owner/name@revision`.

    The model is downloaded unless it is in the cache. If there is a local directory `owner`, a missing path is assumed
    to be a typo, and nothing is downloaded.
    """
    source = Path(path)
    if source.exists():
        return source
    if not is_hub_id(source):
        remedy = broken_link(source) or did_you_mean_path(source, RUN_OR_MODEL) or f": {EXPECTED_PATH}"
        raise CheckpointError(f"no run or model at {source}{remedy}")
    name, revision = _split(source)
    cached = cached_model(name, revision)
    if cached is not None and ((cached / ADAPTER_CONFIG).is_file() or (cached / "tokenizer.json").is_file()):
        return cached
    owner = name.partition("/")[0]
    if Path(owner).is_dir():
        remedy = did_you_mean_path(source, RUN_OR_MODEL) or (
            f": check the path (to use the Hub model of that name despite the local directory {owner}, run `hf "
            f"download {name}` first)"
        )
        raise CheckpointError(f"no run or model at {source}{remedy}")
    return _download(name, revision)


def cached_model(name: str, revision: str | None = None) -> Path | None:
    """The directory of a Hub model in the local cache; None if it was not downloaded, or not completely."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        directory = _snapshot(name, revision, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return directory if _is_complete(directory) else None


def _snapshot(name: str, revision: str | None, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=list(DOWNLOADED),
            ignore_patterns=list(IGNORED),
        )
    )


def _split(path: Path) -> tuple[str, str | None]:
    match = HUB_ID.fullmatch(path.as_posix())
    assert match is not None  # checked by is_hub_id
    return match[1], match[2]


def _is_complete(directory: Path) -> bool:
    """Whether config and weights are there: another program may have downloaded only some of the files."""
    if (directory / ADAPTER_CONFIG).is_file() and not (directory / CONFIG).is_file():
        return (directory / ADAPTER_WEIGHTS).is_file()
    files = {WEIGHTS}
    if not (directory / WEIGHTS).is_file() and (directory / INDEX).is_file():
        files = set(read_json(directory / INDEX).get("weight_map", {}).values()) or files
    return all((directory / file).is_file() for file in (CONFIG, *files))


def _download(name: str, revision: str | None) -> Path:
    _check_installed(f"{name} does not exist locally; downloading it from the Hugging Face Hub")
    try:
        directory = _snapshot(name, revision, local_files_only=False)
    except Exception as error:  # including those of its HTTP client
        raise CheckpointError(
            f"{name} does not exist locally, and cannot be downloaded from the Hugging Face Hub: "
            f"{_reason(error, name, revision)}"
        ) from error
    if not _is_complete(directory):
        raise CheckpointError(
            f"{name} on the Hugging Face Hub has no {CONFIG} or no {WEIGHTS}: expected a transformers model or a PEFT "
            "adapter with weights in safetensors files"
        )
    return directory


def _check_installed(what: str) -> None:
    if find_spec("huggingface_hub") is None:
        raise MissingExtraError(what, "huggingface_hub", "hub")


def check_write_access(name: str) -> None:
    """Raise ConfigError unless the Hub accepts the user's token, and the user may write to the model `owner/name`.

    Only tokens with the role `write` list all organizations of their user; others are refused by the upload.
    """
    _check_installed("pushing a model")
    from huggingface_hub import HfApi

    try:
        user = HfApi().whoami()
    except Exception as error:
        raise ConfigError(f"cannot push to the Hugging Face Hub: {_reason(error)}") from error
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    owners = {user["name"], *(organization["name"] for organization in user.get("orgs", ()))}
    if role == "read":
        raise ConfigError(f"cannot push to {name}: the token is read-only: create one with write access")
    if role == "write" and name.partition("/")[0].lower() not in map(str.lower, owners):
        raise ConfigError(
            f"cannot push to {name}: the token has no write access to it (expected the owner to be one of "
            f"{', '.join(sorted(owners))})"
        )


def upload_model(
    directory: Path, patterns: Sequence[str], name: str, *, private: bool = False, revision: str | None = None
) -> str:
    """Upload the files of a directory that match a pattern to the model `owner/name`; returns its URL.

    Creates the model and the branch `revision` if necessary. Files in the repository that match a pattern, but are not
    in the directory, are deleted: they belong to another version of the model.
    """
    from huggingface_hub import HfApi

    files = [file.relative_to(directory).as_posix() for file in sorted(directory.rglob("*")) if file.is_file()]
    api = HfApi()
    try:
        url = str(api.create_repo(name, private=private or None, exist_ok=True))
        if private and not api.model_info(name).private:
            raise ConfigError(
                f"{name} exists and is public: omit --private, or change its visibility at {url}/settings"
            )
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        uploaded = _matching(files, patterns)
        stale = set(_matching(api.list_repo_files(name, revision=revision), patterns)) - set(uploaded)
        api.upload_folder(
            repo_id=name,
            folder_path=directory,
            revision=revision,
            allow_patterns=uploaded,
            delete_patterns=sorted(stale) or None,
            commit_message="Upload model with whimbrel",
        )
    except ConfigError:
        raise
    except Exception as error:  # as in _download
        raise ConfigError(f"cannot push to {name}: {_reason(error, name)}") from error
    return url if revision is None else f"{url}/tree/{revision}"


def _matching(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The files that match a pattern; * does not match a slash."""
    return [
        file
        for file in files
        if any(fnmatchcase(file, pattern) and file.count("/") == pattern.count("/") for pattern in patterns)
    ]


def _reason(error: Exception, name: str | None = None, revision: str | None = None) -> str:
    """Why a request to the Hub failed, in one line."""
    from huggingface_hub import constants, errors

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return f"accept its terms at {constants.ENDPOINT}/{name}, then {login}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision '{revision}'"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return login
    if status == 403:
        return f"the token has no write access to {name}"
    if name is not None and isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no such model (check the spelling), or it is private ({login})"
    if status == 401:
        return f"the token is invalid: {login}"
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if cause is None or (status is None and type(cause).__name__ in ("ConnectError", "ConnectTimeout")):
        return f"no connection to {constants.ENDPOINT}: check the network"
    lines = [str(each).strip().partition("\n")[0] or type(each).__name__ for each in (cause, cause.__cause__) if each]
    return ": ".join(dict.fromkeys(lines))
