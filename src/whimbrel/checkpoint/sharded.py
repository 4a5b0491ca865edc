"""Components that several ranks save together: each writes its parts of the tensors, and a plan says where they are.

The plan, `KEY.json`, is the JSON tree of `pack`; the tensors are in a file per rank, `KEY.rank-00001.safetensors`:

    {"stored": [rank, name]}                                    a complete tensor
    {"parts": {"shape": [...], "dtype": ..., "parts": [...]}}   a sharded one

A part [rank, name, start, stop, offset] says that rows start:stop of a stored tensor begin at `offset` in the complete
one. A rank that loads it reads only what it needs: `SavedTensor.read` copies any box, however the tensor was split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import parse_json
from whimbrel.checkpoint.serialization import DTYPES, unpack_with
from whimbrel.distributed.state import from_local_like, local_part

__all__ = ["SavedTensor", "merge_trees", "own_tensors", "rank_file", "read_full_state", "read_saved"]

TORCH_DTYPES = {stored: getattr(torch, name) for name, stored in DTYPES.items() if hasattr(torch, name)}


# The plan


def merge_trees(trees: Sequence[Any]) -> Any:
    """The plan of a component from the trees of all ranks (see `pack`).

    Dicts are united, since a rank has the parameters of its pipeline stage only. Whatever is not sharded comes from the
    first rank that has it.
    """
    return _merge(list(enumerate(trees)))


def _merge(nodes: list[tuple[int, Any]]) -> Any:
    rank, first = nodes[0]
    if not isinstance(first, dict):
        return first
    ((kind, value),) = first.items()
    match kind:
        case "tensor":
            return {"stored": [rank, value]}
        case "part":
            parts: dict[tuple[int, ...], list[Any]] = {}  # ranks of another mesh dimension may have the same part
            for rank, node in nodes:
                for start, stop, offset in node["part"]["pieces"] if node["part"]["tensor"] is not None else ():
                    parts.setdefault(tuple(offset), [rank, node["part"]["tensor"], start, stop, offset])
            return {"parts": {"shape": value["shape"], "dtype": value["dtype"], "parts": list(parts.values())}}
        case "dict":
            children: dict[Any, list[tuple[int, Any]]] = {}
            for rank, node in nodes:
                for key, child in node["dict"]:
                    children.setdefault(key, []).append((rank, child))
            return {"dict": [[key, _merge(items)] for key, items in children.items()]}
        case "list" | "tuple":
            items = zip(*([(rank, child) for child in node[kind]] for rank, node in nodes), strict=True)
            return {kind: [_merge(list(item)) for item in items]}
    return first


def own_tensors(plan: Any, rank: int) -> set[str]:
    """The names of the tensors that `rank` writes."""
    if isinstance(plan, list):
        return set().union(*(own_tensors(node, rank) for node in plan))
    if not isinstance(plan, dict):
        return set()
    ((kind, value),) = plan.items()
    if kind == "stored":
        return {value[1]} if value[0] == rank else set()
    if kind == "parts":
        return {name for owner, name, *_ in value["parts"] if owner == rank}
    return own_tensors([child for _, child in value] if kind == "dict" else value, rank)


# Reading


class SavedPart(NamedTuple):
    """Rows `start` to `stop` of the tensor `name` in a file; `offset` is the index of their first element."""

    file: str
    name: str
    start: int
    stop: int
    offset: tuple[int, ...]


class SavedTensor:
    """A tensor of a checkpoint; any part of it can be read."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[SavedPart], file: Callable[[str], Any]
    ) -> None:
        self.shape, self.dtype, self._parts, self._file = torch.Size(shape), dtype, parts, file

    def full(self) -> Tensor:
        """The complete tensor."""
        if len(self._parts) == 1 and self._stored_shape(self._parts[0]) == self.shape:
            return self._file(self._parts[0].file).get_tensor(self._parts[0].name)  # type: ignore[no-any-return]
        return self.read((0,) * len(self.shape), self.shape)

    def like(self, target: Tensor, order: Tensor | None = None) -> Tensor:
        """The tensor sharded like `target`, a DTensor; `order` is the order of the rows of `target`."""
        part = local_part(target)
        rows = [
            self.read(piece.offset, (piece.stop - piece.start, *part.local.shape[1:])) for piece in part.pieces(order)
        ]
        local = torch.cat(rows) if rows else part.local.new_empty(part.local.shape, dtype=self.dtype)
        return from_local_like(target, local)

    def read(self, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of `shape` that starts at `offset`."""
        box = torch.empty(tuple(shape), dtype=self.dtype)
        if not box.numel():
            return box
        num_read = 0
        for part in self._parts:
            size = (part.stop - part.start, *self._stored_shape(part)[1:])
            low = [max(a, b) for a, b in zip(offset, part.offset, strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(offset, shape, part.offset, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            origin = (part.offset[0] - part.start, *part.offset[1:])  # where the stored tensor would begin
            source = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
            target = box[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
            target.copy_(self._file(part.file).get_slice(part.name)[source])
            num_read += target.numel()
        if num_read != box.numel():
            raise CheckpointError(f"expected {box.numel()} elements of a tensor in the checkpoint, got {num_read}")
        return box

    def _stored_shape(self, part: SavedPart) -> torch.Size:
        return torch.Size(self._file(part.file).get_slice(part.name).get_shape())


def read_saved(path: Path, stem: str) -> Any:
    """The state of a component of a verified checkpoint, with a `SavedTensor` for each tensor."""
    files: dict[str, Any] = {}

    def file(name: str) -> Any:
        if name not in files:
            files[name] = safe_open(path / name, framework="pt")
        return files[name]

    def complete(owner: str, name: str) -> SavedTensor:
        entry = file(owner).get_slice(name)
        shape = entry.get_shape()
        part = SavedPart(owner, name, 0, shape[0] if shape else 1, (0,) * len(shape))
        return SavedTensor(shape, TORCH_DTYPES[entry.get_dtype()], [part], file)

    def tensor(kind: str, value: Any) -> SavedTensor | None:
        if kind == "tensor":
            return complete(f"{stem}.safetensors", value)
        if kind == "stored":
            return complete(rank_file(stem, value[0]), value[1])
        if kind != "parts":
            return None
        parts = [
            SavedPart(rank_file(stem, rank), name, start, stop, tuple(offset))
            for rank, name, start, stop, offset in value["parts"]
        ]
        return SavedTensor(value["shape"], getattr(torch, value["dtype"]), parts, file)

    try:
        return unpack_with(tensor, parse_json((path / f"{stem}.json").read_bytes()))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read the component '{stem}' ({error})") from error


def rank_file(key: str, rank: int) -> str:
    """The name of the file with the tensors of one rank."""
    return f"{key}.rank-{rank:05d}.safetensors"


def read_full_state(state: Any) -> Any:
    """A nested state with each `SavedTensor` read completely."""
    match state:
        case SavedTensor():
            return state.full()
        case Mapping():
            return {key: read_full_state(value) for key, value in state.items()}
        case list() | tuple():
            return type(state)(read_full_state(value) for value in state)
    return state
