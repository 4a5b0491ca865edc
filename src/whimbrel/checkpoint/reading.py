"""Checking a checkpoint against its manifest, and reading its components."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import parse_json
from whimbrel.checkpoint.layout import step_of
from whimbrel.checkpoint.manifest import FileEntry, Manifest, read_manifest
from whimbrel.checkpoint.tensors import read_tensors
from whimbrel.checkpoint.tree import unpack

__all__ = [
    "absent_components",
    "has_all_files",
    "missing_components",
    "read_component",
    "verify_checkpoint",
    "verify_component",
]


def verify_checkpoint(path: Path, optional: Collection[str] | None = None) -> Manifest:
    """The manifest of a checkpoint whose every file is there and unchanged; else an error naming the first fault.

    Files of `optional` components may be absent (by default: of those that were optional when it was written), but
    not changed.
    """
    manifest = read_manifest(path)
    named = step_of(path)
    if named is not None and named != manifest.step:
        raise CheckpointError(f"{path} is damaged: it holds step {manifest.step}, not the {named} of its name")
    if optional is None:
        optional = [key for key, part in manifest.components.items() if not part.required]
    spared = {name for key in optional if key in manifest.components for name in manifest.components[key].files}
    for name, expected in manifest.files.items():
        if name not in spared or (path / name).is_file():
            _check_file(path, name, expected)
    _refuse_strangers(path, manifest)
    return manifest


def verify_component(path: Path, key: str) -> None:
    """Check the files of one component; an error names the first that is not as it was written."""
    manifest = read_manifest(path)
    for name in manifest.components[key].files:
        _check_file(path, name, manifest.files[name])


def absent_components(path: Path, manifest: Manifest, stems: Mapping[str, str]) -> set[str]:
    """The components of which there is no piece with the given stem, or not all of its files."""
    absent = set()
    for key, stem in stems.items():
        files = manifest.components[key].files if key in manifest.components else []
        own = [name for name in files if name.startswith((f"{stem}.json", f"{stem}.safetensors", f"{stem}/"))]
        if not own or not all((path / name).is_file() for name in own):
            absent.add(key)
    return absent


def missing_components(path: Path, manifest: Manifest) -> list[str]:
    """The components of which a file that was written is gone; a sound checkpoint may lack optional ones."""
    gone = {name for name in manifest.files if not (path / name).is_file()}
    return [key for key, part in manifest.components.items() if gone.intersection(part.files)]


def has_all_files(path: Path) -> bool:
    """Whether a checkpoint looks whole: a sound manifest, and files of the sizes it says. Reads none of them."""
    try:
        manifest = read_manifest(path)
        return all((path / name).stat().st_size == entry.size for name, entry in manifest.files.items())
    except (CheckpointError, OSError):
        return False


def read_component(path: Path, stem: str) -> Any:
    """The state of one component of a verified checkpoint, or, as `KEY.rank-00001`, one rank's piece of it."""
    try:
        tree = parse_json((path / f"{stem}.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read the component '{stem}' ({error})") from error
    tensors = path / f"{stem}.safetensors"
    held = read_tensors(tensors) if tensors.exists() else {}
    try:
        return unpack(held, tree)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the component '{stem}' is malformed ({error})") from error


def _check_file(path: Path, name: str, expected: FileEntry) -> None:
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"{path} is damaged: {name} is missing")
    try:
        found = FileEntry(file.stat().st_size, "")
        if found.size == expected.size:  # a short file need not be read
            found = FileEntry.of(file)
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {name} cannot be read ({error.strerror})") from error
    if found != expected:
        raise CheckpointError(f"{path} is damaged: {name} has changed since it was written")


def _refuse_strangers(path: Path, manifest: Manifest) -> None:
    """A file that is in the folder of a component but not in the manifest would be loaded unchecked."""
    folders = {name.partition("/")[0] for name in manifest.files if "/" in name}
    for folder in sorted(folders):
        for file in sorted((path / folder).rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_file() and name not in manifest.files:
                raise CheckpointError(f"{path} is damaged: {name} was not written with it")
