"""`manifest.json`: what a checkpoint consists of, and a digest of every file, itself included."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Any

import torch

from whimbrel import __version__
from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import parse_json, sha256_file

__all__ = ["FORMAT", "FileEntry", "MANIFEST", "Manifest", "Part", "read_manifest", "tool_versions"]

FORMAT = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a file must be."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """What a file is."""
        return cls(path.stat().st_size, sha256_file(path))


@dataclass(frozen=True, slots=True)
class Part:
    """One component: how it was shared, which ranks wrote it, and into which files."""

    pattern: str
    required: bool
    ranks: list[int]
    files: list[str]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says about itself. `about` is what the run wanted to be remembered, its config hash too."""

    step: int
    components: dict[str, Part]
    files: dict[str, FileEntry]
    metric: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def config_hash(self) -> str | None:
        """The hash of the settings that made it, where the run gave one."""
        found = self.about.get("config_hash")
        return found if isinstance(found, str) else None

    def render(self) -> bytes:
        """The bytes of manifest.json."""
        return _render({"format": FORMAT, **asdict(self)})


def tool_versions() -> dict[str, str]:
    """What this process runs on."""
    return {"whimbrel": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, which must be byte for byte what was written."""
    try:
        content = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint: its {MANIFEST} cannot be read ({error.strerror})"
        ) from error
    try:
        table = parse_json(content)
        found = table.get("format")
        digest = table.pop("digest", None)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: its {MANIFEST} is not what was written ({error})") from error
    if found != FORMAT and (digest is None or _render(table) == content):
        raise CheckpointError(f"{path} has checkpoint format {found}; this version reads {FORMAT}")
    if _render(table) != content:
        raise CheckpointError(f"{path} is damaged: its {MANIFEST} has changed since it was written")
    try:
        return _from_table(table)
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: a field of its {MANIFEST} is wrong ({error})") from error


def _from_table(table: dict[str, Any]) -> Manifest:
    """The manifest in a parsed table; a TypeError, KeyError or AttributeError names what does not fit."""
    components = {key: Part(**part) for key, part in table["components"].items()}
    files = {name: FileEntry(**entry) for name, entry in table["files"].items()}
    rest = {name: value for name, value in table.items() if name not in ("format", "components", "files")}
    manifest = Manifest(components=components, files=files, **rest)
    _expect(manifest.step, int, "step")
    _expect(manifest.metric, (float, int, NoneType), "metric")
    _expect(manifest.about, dict, "about")
    _expect(manifest.versions, dict, "versions")
    for name, entry in files.items():
        _expect(entry.size, int, f"size of {name}")
        _expect(entry.sha256, str, f"sha256 of {name}")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise TypeError(f"file name {name!r} leads out of the checkpoint")
    for key, part in components.items():
        _expect(part.pattern, str, f"pattern of {key}")
        _expect(part.required, bool, f"required of {key}")
        _expect(part.metadata, dict, f"metadata of {key}")
        for rank in _expect(part.ranks, list, f"ranks of {key}"):
            _expect(rank, int, f"ranks of {key}")
        for name in _expect(part.files, list, f"files of {key}"):
            if name not in files:
                raise KeyError(f"file {name!r} of {key} has no entry")
    return manifest


def _expect(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {value!r}")
    return value


def _render(table: Mapping[str, Any]) -> bytes:
    """`table` as JSON, with the digest of all the rest at its end."""
    digest = hashlib.sha256(json.dumps(table).encode()).hexdigest()
    return json.dumps({**table, "digest": digest}, indent=1).encode() + b"\n"
