"""The directory of a checkpoint, `RUN/checkpoints/step-00000500/`, and its `manifest.json` with a digest of every file.

A checkpoint is complete if it has a manifest: the manifest is written last and removed first. Listing and verifying
checkpoints needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Any, NamedTuple

from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import parse_json, restore_replaced, sha256_file

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_FILE",
    "TEMPORARY",
    "ComponentEntry",
    "FileEntry",
    "Manifest",
    "Retention",
    "RetentionEntry",
    "checkpoint_path",
    "has_all_files",
    "latest_checkpoint",
    "list_checkpoints",
    "missing_components",
    "missing_on_this_rank",
    "parse_manifest",
    "parse_step",
    "read_manifest",
    "remove_checkpoint",
    "step_directories",
    "verify_checkpoint",
    "verify_component",
]

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
TEMPORARY = "temporary"
"""Key in a manifest's `metadata` that marks a checkpoint to remove once a newer one exists."""


def checkpoint_path(run: Path, step: int) -> Path:
    """The directory of the checkpoint of `step`."""
    return run / "checkpoints" / f"step-{step:08d}"


def parse_step(path: Path) -> int | None:
    """The step in the name of a checkpoint directory; None if the name is not of that form."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return None if match is None else int(match[1])


def step_directories(run: Path) -> dict[int, Path]:
    """All checkpoint directories of a run by step, ascending, including incomplete ones.

    A checkpoint whose replacement was interrupted by a kill is restored first.
    """
    restore_replaced(run / "checkpoints")
    paths = {step: path for path in (run / "checkpoints").glob("step-*") if (step := parse_step(path)) is not None}
    return dict(sorted(paths.items()))


def list_checkpoints(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, ascending."""
    return {step: path for step, path in step_directories(run).items() if (path / MANIFEST_FILE).is_file()}


def latest_checkpoint(run: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next(reversed(list_checkpoints(run).values()), None)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. The manifest goes first, so that an interrupted removal leaves no seemingly complete one."""
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(path)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and hash of a file."""

    size: int
    sha256: str

    @classmethod
    def from_file(cls, path: Path) -> FileEntry:
        """Read and hash the file."""
        return cls(path.stat().st_size, sha256_file(path))


@dataclass(frozen=True, slots=True)
class ComponentEntry:
    """One component: its sharing pattern, the ranks that wrote it, and its files."""

    pattern: str
    required: bool
    ranks: list[int]
    files: list[str]
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    components: dict[str, ComponentEntry]
    files: dict[str, FileEntry]
    metric: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    """Stored by the run with the checkpoint, such as the hash of its config; `about` in the file."""

    @property
    def config_hash(self) -> str | None:
        """Hash of the run's settings, if the run stored one."""
        config_hash = self.metadata.get("config_hash")
        return config_hash if isinstance(config_hash, str) else None

    def to_json(self) -> bytes:
        """The bytes of `manifest.json`."""
        fields = asdict(self)
        fields["about"] = fields.pop("metadata")
        return _to_json({"format": FORMAT_VERSION, **fields})


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises CheckpointError unless it is byte for byte as written."""
    try:
        content = (path / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: its {MANIFEST_FILE} cannot be read ({error.strerror})"
        ) from error
    return parse_manifest(content, path)


def parse_manifest(content: bytes, path: Path | str) -> Manifest:
    """The manifest with this content; `path` names the checkpoint in errors."""
    try:
        fields = parse_json(content)
        version = fields.get("format")
        digest = fields.pop("digest", None)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: its {MANIFEST_FILE} is not valid ({error})") from error
    if version != FORMAT_VERSION and (digest is None or _to_json(fields) == content):
        raise CheckpointError(
            f"{path} has checkpoint format {version}, expected {FORMAT_VERSION}: use the Whimbrel version that wrote it"
        )
    if _to_json(fields) != content:
        raise CheckpointError(f"{path} is damaged: its {MANIFEST_FILE} has changed since it was written")
    try:
        return _from_fields(fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: a field of its {MANIFEST_FILE} is invalid ({error})") from error


def _to_json(fields: Mapping[str, Any]) -> bytes:
    """`fields` as JSON, with their digest as the last field."""
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return json.dumps({**fields, "digest": digest}, indent=1).encode() + b"\n"


def _from_fields(fields: dict[str, Any]) -> Manifest:
    """The manifest with these JSON fields. Raises TypeError, KeyError or AttributeError for a wrong field."""
    components = {key: ComponentEntry(**entry) for key, entry in fields["components"].items()}
    files = {name: FileEntry(**entry) for name, entry in fields["files"].items()}
    rest = {name: value for name, value in fields.items() if name not in ("format", "components", "files", "about")}
    manifest = Manifest(components=components, files=files, metadata=fields["about"], **rest)
    _check_type(manifest.step, int, "step")
    _check_type(manifest.metric, (float, int, NoneType), "metric")
    _check_type(manifest.metadata, dict, "about")
    _check_type(manifest.versions, dict, "versions")
    for name, file in files.items():
        _check_type(file.size, int, f"size of {name}")
        _check_type(file.sha256, str, f"sha256 of {name}")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise TypeError(f"file name {name!r} is outside the checkpoint")
    for key, component in components.items():
        _check_type(component.pattern, str, f"pattern of {key}")
        _check_type(component.required, bool, f"required of {key}")
        _check_type(component.metadata, dict, f"metadata of {key}")
        for rank in _check_type(component.ranks, list, f"ranks of {key}"):
            _check_type(rank, int, f"ranks of {key}")
        for name in _check_type(component.files, list, f"files of {key}"):
            if name not in files:
                raise KeyError(f"file {name!r} of {key} has no entry")
    return manifest


def _check_type(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"unexpected {name}: {value!r}")
    return value


# Retention


class RetentionEntry(NamedTuple):
    """What decides whether a checkpoint is retained."""

    metric: float | None = None
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept: the newest `keep` (None: all) and the top `best` by metric."""

    keep: int | None = None
    best: int = 0
    greater_is_better: bool = False

    @staticmethod
    def entry(manifest: Manifest | None) -> RetentionEntry:
        """The entry of a checkpoint; None: its manifest cannot be read."""
        if manifest is None:
            return RetentionEntry()
        return RetentionEntry(manifest.metric, bool(manifest.metadata.get(TEMPORARY)))

    def dropped(self, checkpoints: Mapping[int, RetentionEntry]) -> list[int]:
        """The steps that are not retained, of complete checkpoints by step.

        Temporary ones are dropped as soon as there is a newer one.
        """
        steps = sorted(checkpoints)
        permanent = [step for step in steps if not checkpoints[step].temporary]
        retained = {*steps[-1:], *(permanent if self.keep is None else permanent[-self.keep :])}
        retained |= set(self.ranked(checkpoints)[: self.best])
        return [step for step in steps if step not in retained]

    def ranked(self, checkpoints: Mapping[int, RetentionEntry]) -> list[int]:
        """The steps with a metric that is not NaN, best first; among equals the older first."""
        sign = -1 if self.greater_is_better else 1
        metrics = {step: entry.metric for step, entry in checkpoints.items() if entry.metric is not None}
        found = sorted((sign * metric, step) for step, metric in metrics.items() if not math.isnan(metric))
        return [step for _, step in found]


# Verification


def verify_checkpoint(path: Path, optional: Collection[str] | None = None) -> Manifest:
    """Check that all files of a checkpoint exist and are unchanged. Raises CheckpointError for the first that is not.

    Files of `optional` components (default: those that were optional when it was written) may be absent, but not
    changed.
    """
    manifest = read_manifest(path)
    expected_step = parse_step(path)
    if expected_step is not None and expected_step != manifest.step:
        raise CheckpointError(f"{path} is damaged: expected step {expected_step} from its name, got {manifest.step}")
    if optional is None:
        optional = [key for key, entry in manifest.components.items() if not entry.required]
    may_be_absent = {name for key in optional if key in manifest.components for name in manifest.components[key].files}
    for name, expected in manifest.files.items():
        if name not in may_be_absent or (path / name).is_file():
            _check_file(path, name, expected)
    # Files in the directory of a component that are not in the manifest would be loaded unchecked.
    for directory in sorted({name.partition("/")[0] for name in manifest.files if "/" in name}):
        for file in sorted((path / directory).rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_file() and name not in manifest.files:
                raise CheckpointError(f"{path} is damaged: {name} is not in its manifest")
    return manifest


def verify_component(path: Path, key: str) -> None:
    """Check that the files of one component are unchanged. Raises CheckpointError if not, or if it is missing."""
    manifest = read_manifest(path)
    if key not in manifest.components:
        raise CheckpointError(f"{path} was written without the component '{key}'")
    for name in manifest.components[key].files:
        _check_file(path, name, manifest.files[name])


def has_all_files(path: Path) -> bool:
    """Whether a checkpoint has a valid manifest and files of the right sizes. Does not read the files."""
    try:
        manifest = read_manifest(path)
        return all((path / name).stat().st_size == entry.size for name, entry in manifest.files.items())
    except (CheckpointError, OSError):
        return False


def missing_components(path: Path, manifest: Manifest) -> list[str]:
    """The components with at least one missing file; a valid checkpoint may lack optional ones."""
    missing = {name for name in manifest.files if not (path / name).is_file()}
    return [key for key, entry in manifest.components.items() if missing.intersection(entry.files)]


def missing_on_this_rank(path: Path, manifest: Manifest, stems: Mapping[str, str]) -> set[str]:
    """Components whose files for one rank are missing; `stems` maps each key to the stem of that rank's files."""
    missing = set()
    for key, stem in stems.items():
        files = manifest.components[key].files if key in manifest.components else []
        rank_files = [name for name in files if name.startswith((f"{stem}.json", f"{stem}.safetensors", f"{stem}/"))]
        if not rank_files or not all((path / name).is_file() for name in rank_files):
            missing.add(key)
    return missing


def _check_file(path: Path, name: str, expected: FileEntry) -> None:
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"{path} is damaged: {name} is missing")
    try:
        actual = FileEntry(file.stat().st_size, "")
        if actual.size == expected.size:  # a file of the wrong size need not be hashed
            actual = FileEntry.from_file(file)
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {name} cannot be read ({error.strerror})") from error
    if actual != expected:
        raise CheckpointError(f"{path} is damaged: {name} has changed since it was written")
