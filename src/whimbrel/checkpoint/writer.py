"""Writing a checkpoint: copy the state to host memory, write all files to a temporary directory, then rename it.

A save survives a crash at any point: files are written to a directory with a temporary name and fsynced, the manifest
with their checksums is written last, and one atomic rename makes the checkpoint visible. With several ranks, each
writes its own files into the same directory; rank 0 creates it, collects the checksums of all ranks, and renames it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from whimbrel import __version__
from whimbrel.base.errors import CheckpointError, ParallelError, WriteError
from whimbrel.base.files import atomic_directory
from whimbrel.checkpoint.component import DirectoryStateful, Location, SharingPattern, StateComponent
from whimbrel.checkpoint.manifest import MANIFEST_FILE, ComponentEntry, FileEntry, Manifest
from whimbrel.checkpoint.serialization import sorted_by_alignment, tensor_bytes, unpack, write_tensors
from whimbrel.checkpoint.sharded import merge_trees, own_tensors, rank_file
from whimbrel.distributed.state import LazyGather, gather_full
from whimbrel.distributed.world import World

__all__ = ["ComponentSnapshot", "HostBuffers", "Snapshot", "check_replication", "write_checkpoint"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a component's state: tensors in host memory, and the JSON tree that refers to them (see `pack`)."""

    tensors: dict[str, Tensor]
    tree: Any
    lazy: Mapping[str, LazyGather] = field(default_factory=dict)
    """Tensors with only this rank's part copied; `gather` assembles them on rank 0."""

    def gather(self, world: World) -> Snapshot:
        """The snapshot with full tensors on rank 0. Collective."""
        return Snapshot(self.tensors | gather_full(self.lazy, world), self.tree) if self.lazy else self

    def state(self) -> Any:
        """The state as `state_dict()` returned it."""
        return unpack(self.tensors, self.tree)


class HostBuffers:
    """One host memory buffer per component, reused by every save; pinned if the tensors are on a CUDA device.

    `copy` only enqueues the copies from a device, in order with the work already queued there, so that training can
    continue immediately. `synchronize` must have returned before a snapshot is read. A snapshot is valid until the next
    one of the same component.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copies: list[torch.cuda.Event] = []

    def reserve(self, key: str, tensors: Mapping[str, Tensor | LazyGather]) -> None:
        """Allocate the buffer for a state with tensors of these sizes."""
        self._buffer(key, tensors)

    def copy(self, key: str, tensors: Mapping[str, Tensor | LazyGather], tree: Any) -> Snapshot:
        """Copy a state (see `pack`). Its tensors may be modified as soon as this returns."""
        local = _local_tensors(tensors)
        buffer, offset, copies, devices = self._buffer(key, tensors), 0, {}, set()
        for name in sorted_by_alignment(local):
            tensor = local[name]
            target = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = target.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
            offset += tensor.nbytes
        for device in devices:
            self._copies.append(torch.cuda.current_stream(device).record_event())
        lazy = {name: t for name, t in tensors.items() if isinstance(t, LazyGather)}
        return Snapshot(copies, tree, {name: replace(source, local=copies[name]) for name, source in lazy.items()})

    def synchronize(self) -> None:
        """Wait until all copies are in host memory."""
        for event in self._copies:
            event.synchronize()
        self._copies.clear()

    def release(self) -> None:
        """Free the buffers."""
        self._buffers.clear()

    def _buffer(self, key: str, tensors: Mapping[str, Tensor | LazyGather]) -> Tensor:
        local = _local_tensors(tensors).values()
        size, pinned = sum(tensor.nbytes for tensor in local), any(tensor.is_cuda for tensor in local)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size or (pinned and not buffer.is_pinned()):
            self._buffers.pop(key, None)  # free the old buffer before the new one is allocated
            del buffer
            buffer = self._buffers[key] = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        return buffer


def _local_tensors(tensors: Mapping[str, Tensor | LazyGather]) -> dict[str, Tensor]:
    return {name: tensor.local if isinstance(tensor, LazyGather) else tensor for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class ComponentSnapshot:
    """A component on this rank. `snapshot` is None if this rank has nothing to write, compare or gather."""

    component: StateComponent
    location: Location
    snapshot: Snapshot | None

    def gather(self, world: World) -> ComponentSnapshot:
        """The component with full tensors on the rank that writes it. Collective."""
        snapshot = None if self.snapshot is None else self.snapshot.gather(world)
        return replace(self, snapshot=snapshot)


FilesByComponent = dict[str, dict[str, FileEntry]]
"""The files that one rank wrote, by component."""


def write_checkpoint(
    target: Path,
    step: int,
    snapshots: Sequence[ComponentSnapshot],
    metric: float | None,
    metadata: dict[str, Any],
    world: World,
) -> None:
    """Write the components of all ranks. An existing `target` is replaced once the new checkpoint is on disk."""
    with ExitStack() as stack:

        def create() -> Path | None:
            return stack.enter_context(atomic_directory(target, replace=True)) if world.is_main else None

        def write_components() -> FilesByComponent:
            if not directory.is_dir():
                raise CheckpointError(f"expected {target.parent} on a file system shared by all nodes, got a local one")
            return {
                item.component.key: _write_component(directory, item, plans.get(item.component.key), world)
                for item in snapshots
                if item.location.is_writer and item.snapshot is not None
            }

        def write_manifest() -> None:
            if world.is_main:
                (directory / MANIFEST_FILE).write_bytes(manifest.to_json())

        directory = world.run(create)[0] or target
        plans = {
            item.component.key: merge_trees(world.all_gather_object(item.snapshot.tree))
            for item in snapshots
            if item.component.sharing_pattern is SharingPattern.SHARDED and item.snapshot is not None
        }
        written = world.run(write_components)
        manifest = _manifest(step, [item.component for item in snapshots], written, metric, metadata)
        world.run(write_manifest)
        rename = stack.pop_all()
    world.run(rename.close)


def _write_component(directory: Path, item: ComponentSnapshot, plan: Any, world: World) -> dict[str, FileEntry]:
    stem, stateful, snapshot = item.location.stem, item.component.stateful, item.snapshot
    assert snapshot is not None
    if isinstance(stateful, DirectoryStateful):
        try:
            stateful.save_directory(snapshot.state(), directory / stem)
        except SafetensorError as error:  # safetensors reports a full disk with this error
            raise WriteError(f"cannot write {directory / stem}: {error}") from error
        files = sorted(path for path in (directory / stem).rglob("*") if path.is_file())
    else:
        tree, tensors, tensor_file = snapshot.tree, snapshot.tensors, f"{stem}.safetensors"
        if plan is not None:
            own = own_tensors(plan, world.rank)
            tree, tensor_file = plan, rank_file(stem, world.rank)
            tensors = {name: tensor for name, tensor in tensors.items() if name in own}
        files = []
        if plan is None or world.is_main:
            files.append(directory / f"{stem}.json")
            files[0].write_text(json.dumps(tree), encoding="utf-8")
        if tensors:
            files.append(directory / tensor_file)
            write_tensors(files[-1], tensors)
    return {path.relative_to(directory).as_posix(): FileEntry.from_file(path) for path in files}


def _manifest(
    step: int,
    components: Sequence[StateComponent],
    written: Sequence[FilesByComponent],
    metric: float | None,
    metadata: dict[str, Any],
) -> Manifest:
    entries = {
        component.key: ComponentEntry(
            pattern=component.sharing_pattern.value,
            required=component.required,
            ranks=[rank for rank, files in enumerate(written) if component.key in files],
            files=[name for files in written for name in files.get(component.key, {})],
            metadata=dict(component.metadata),
        )
        for component in components
    }
    files = {name: entry for rank in written for part in rank.values() for name, entry in part.items()}
    versions = {"whimbrel": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return Manifest(step, entries, files, metric, versions, metadata)


def check_replication(component: StateComponent, snapshot: Snapshot, world: World) -> None:
    """Raise ParallelError if a component differs between ranks, compared at its `validation_level`."""
    if component.validation_level == "none":
        return
    own, tree_digest = {}, None
    for name, tensor in snapshot.tensors.items():
        own[name] = f"{tensor.dtype} {list(tensor.shape)}"
        if component.validation_level in ("tensor", "full"):
            own[name] += f" {hashlib.sha256(tensor_bytes(tensor)).hexdigest()}"
    if component.validation_level == "full":
        tree_digest = hashlib.sha256(json.dumps(snapshot.tree).encode()).hexdigest()
    (first, first_tree), *others = world.all_gather_object((own, tree_digest))
    for rank, (other, other_tree) in enumerate(others, 1):
        different = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if first_tree != other_tree:
            different.append("values")
        if different:
            raise ParallelError(
                f"component '{component.key}' must be equal on all ranks, but '{different[0]}' differs between rank 0 "
                f"and rank {rank}: resume from the last checkpoint"
            )
