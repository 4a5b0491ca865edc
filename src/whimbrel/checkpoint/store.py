"""The folder `RUN/checkpoints/step-00000500`: written whole under a temporary name, then renamed; verified before use.

Each component is `KEY.json` and, where it has tensors, `KEY.safetensors`; the model is a Hugging Face directory
`model/` that a callable writes. `manifest.json`, written last, holds the size and SHA-256 of every file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from whimbrel.base.errors import CheckpointError, WriteError
from whimbrel.base.files import atomic_directory, remove_stale, sha256_file
from whimbrel.checkpoint.tree import pack, unpack

__all__ = [
    "checkpoint_path",
    "latest_checkpoint",
    "list_checkpoints",
    "prune_checkpoints",
    "read_component",
    "verify_checkpoint",
    "write_checkpoint",
]

FORMAT = 1


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, lowest first."""
    found = {}
    for path in (run / "checkpoints").glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit() and (path / "manifest.json").is_file():
            found[int(number)] = path
    return dict(sorted(found.items()))


def latest_checkpoint(run: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next(reversed(list_checkpoints(run).values()), None)


def write_checkpoint(
    run: Path, step: int, states: Mapping[str, Any], write_model: Callable[[Path], None], about: Mapping[str, Any]
) -> Path:
    """Write every component of `states` and the model; the folder appears only when all of it is on disk."""
    target = checkpoint_path(run, step)
    if target.is_dir() and not (target / "manifest.json").exists():
        shutil.rmtree(target)  # what an interrupted removal left
    if target.exists():
        raise CheckpointError(f"{target} exists already: a checkpoint is never written over")
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target.parent)
    with atomic_directory(target) as folder:
        write_model(folder / "model")
        for key, state in states.items():
            tensors, tree = pack(state)
            if tensors:
                _save_tensors(folder / f"{key}.safetensors", tensors)
            (folder / f"{key}.json").write_text(json.dumps(tree), encoding="utf-8")
        files = {str(p.relative_to(folder)): _describe(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        manifest = {"format": FORMAT, "step": step, "components": sorted(states), "files": files, **about}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return target


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is there and unchanged; else an error naming the first fault."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint: its manifest.json cannot be read ({error})"
        ) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {manifest.get('format')}; this version reads {FORMAT}")
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing; remove it to go on from the one before")
        if _describe(file) != expected:
            raise CheckpointError(
                f"{path} is damaged: {name} has changed since it was written; remove it to go on from the one before"
            )
    return dict(manifest)


def read_component(path: Path, key: str) -> Any:
    """The state of one component of a verified checkpoint."""
    try:
        tree = json.loads((path / f"{key}.json").read_text(encoding="utf-8"))
        tensors = load_file(path / f"{key}.safetensors") if (path / f"{key}.safetensors").exists() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot read the component '{key}' ({error})") from error
    return unpack(tensors, tree)


def prune_checkpoints(run: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest checkpoints; say which."""
    old = list(list_checkpoints(run).values())[:-keep]
    for path in old:
        (path / "manifest.json").unlink()  # from here on it is no checkpoint, whatever happens next
        shutil.rmtree(path)
    return old


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # how it tells of a full disk
        raise WriteError(f"cannot write {path.name}: {error}") from error


def _describe(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256_file(path)}
