"""Putting the parts of a checkpoint into a folder that appears only when all of it is on disk, on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from whimbrel.base.errors import WriteError
from whimbrel.base.files import atomic_directory
from whimbrel.checkpoint.component import DirectoryStateful, StateComponent
from whimbrel.checkpoint.layout import Place
from whimbrel.checkpoint.manifest import MANIFEST, FileEntry, Manifest, Part, tool_versions
from whimbrel.checkpoint.ranks import Ranks
from whimbrel.checkpoint.snapshot import Snapshot
from whimbrel.checkpoint.tensors import write_tensors

__all__ = ["Piece", "write_checkpoint"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank has of a component, and its state where this rank writes or compares it."""

    component: StateComponent
    place: Place
    snapshot: Snapshot | None


Written = dict[str, dict[str, FileEntry]]
"""The files that a rank wrote, by component."""


def write_checkpoint(
    target: Path, step: int, pieces: Sequence[Piece], metric: float | None, about: dict[str, Any], ranks: Ranks
) -> None:
    """Write every piece of every rank; what has the name `target` already gives way once all of it is on disk."""
    with ExitStack() as stack:

        def begin() -> Path | None:
            return stack.enter_context(atomic_directory(target, replace=True)) if ranks.first else None

        def finish() -> None:
            if ranks.first:
                (folder / MANIFEST).write_bytes(manifest.render())

        folder = ranks.together(begin)[0] or target
        written = ranks.together(lambda: _write_pieces(folder, pieces))
        manifest = _manifest(step, [piece.component for piece in pieces], written, metric, about)
        ranks.together(finish)
        closing = stack.pop_all()
    ranks.together(closing.close)


def _write_pieces(folder: Path, pieces: Sequence[Piece]) -> Written:
    return {
        piece.component.key: _write_piece(folder, piece.place.stem, piece.component, piece.snapshot)
        for piece in pieces
        if piece.place.writes and piece.snapshot is not None
    }


def _write_piece(folder: Path, stem: str, component: StateComponent, snapshot: Snapshot) -> dict[str, FileEntry]:
    if isinstance(component.stateful, DirectoryStateful):
        try:
            component.stateful.save_directory(snapshot.state(), folder / stem)
        except SafetensorError as error:  # how that library tells of a full disk
            raise WriteError(f"cannot write {folder / stem}: {error}") from error
        files = sorted(path for path in (folder / stem).rglob("*") if path.is_file())
    else:
        files = [folder / f"{stem}.json"]
        files[0].write_text(json.dumps(snapshot.tree), encoding="utf-8")
        if snapshot.tensors:
            files.append(folder / f"{stem}.safetensors")
            write_tensors(files[1], snapshot.tensors)
    return {path.relative_to(folder).as_posix(): FileEntry.of(path) for path in files}


def _manifest(
    step: int,
    components: Sequence[StateComponent],
    written: Sequence[Written],
    metric: float | None,
    about: dict[str, Any],
) -> Manifest:
    parts = {
        component.key: Part(
            pattern=component.sharing_pattern.value,
            required=component.required,
            ranks=[rank for rank, files in enumerate(written) if component.key in files],
            files=[name for files in written for name in files.get(component.key, {})],
            metadata=dict(component.metadata),
        )
        for component in components
    }
    files = {name: entry for rank in written for part in rank.values() for name, entry in part.items()}
    return Manifest(step, parts, files, metric, tool_versions(), about)
