"""Verifying a checkpoint against its manifest, and reading the state of its components."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import parse_json
from whimbrel.checkpoint.manifest import FileEntry, Manifest, parse_step, read_manifest

__all__ = [
    "has_all_files",
    "missing_components",
    "missing_on_this_rank",
    "read_component",
    "verify_checkpoint",
    "verify_component",
]


def verify_checkpoint(path: Path, optional: Collection[str] | None = None) -> Manifest:
    """Check that all files of a checkpoint exist and are unchanged. Raises CheckpointError for the first that is not.

    Files of `optional` components (default: those that were optional when it was written) may be absent, but not
    changed.
    """
    manifest = read_manifest(path)
    named = parse_step(path)
    if named is not None and named != manifest.step:
        raise CheckpointError(f"{path} is damaged: expected step {named} from its name, got {manifest.step}")
    if optional is None:
        optional = [key for key, entry in manifest.components.items() if not entry.required]
    may_be_absent = {name for key in optional if key in manifest.components for name in manifest.components[key].files}
    for name, expected in manifest.files.items():
        if name not in may_be_absent or (path / name).is_file():
            _check_file(path, name, expected)
    _check_unlisted_files(path, manifest)
    return manifest


def verify_component(path: Path, key: str) -> None:
    """Check that the files of one component are unchanged. Raises CheckpointError for the first that is not."""
    manifest = read_manifest(path)
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
    gone = {name for name in manifest.files if not (path / name).is_file()}
    return [key for key, entry in manifest.components.items() if gone.intersection(entry.files)]


def missing_on_this_rank(path: Path, manifest: Manifest, stems: Mapping[str, str]) -> set[str]:
    """Keys of the components in `stems` whose files (named after the stem) are not all present."""
    absent = set()
    for key, stem in stems.items():
        files = manifest.components[key].files if key in manifest.components else []
        own = [name for name in files if name.startswith((f"{stem}.json", f"{stem}.safetensors", f"{stem}/"))]
        if not own or not all((path / name).is_file() for name in own):
            absent.add(key)
    return absent


def read_component(path: Path, stem: str) -> Any:
    """The state of one component of a verified checkpoint; as `KEY.rank-00001`, the state of one rank."""
    from whimbrel.checkpoint.serialization import read_tensors, unpack  # imports torch, which verifying does not need

    try:
        tree = parse_json((path / f"{stem}.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read the component '{stem}' ({error})") from error
    file = path / f"{stem}.safetensors"
    tensors = read_tensors(file) if file.exists() else {}
    try:
        return unpack(tensors, tree)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the component '{stem}' is malformed ({error})") from error


def _check_file(path: Path, name: str, expected: FileEntry) -> None:
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"{path} is damaged: {name} is missing")
    try:
        found = FileEntry(file.stat().st_size, "")
        if found.size == expected.size:  # a file of the wrong size need not be hashed
            found = FileEntry.from_file(file)
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {name} cannot be read ({error.strerror})") from error
    if found != expected:
        raise CheckpointError(f"{path} is damaged: {name} has changed since it was written")


def _check_unlisted_files(path: Path, manifest: Manifest) -> None:
    """Raise for files in the directory of a component that are not in the manifest: they would be loaded unchecked."""
    directories = {name.partition("/")[0] for name in manifest.files if "/" in name}
    for directory in sorted(directories):
        for file in sorted((path / directory).rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_file() and name not in manifest.files:
                raise CheckpointError(f"{path} is damaged: {name} is not in its manifest")
