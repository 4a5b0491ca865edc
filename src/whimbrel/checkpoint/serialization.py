"""Nested state (dicts, lists, tuples, numbers, strings, bytes, tensors) as JSON plus one safetensors file, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import parse_json
from whimbrel.distributed.state import LazyGather, Reordered, is_dtensor, local_part

__all__ = ["pack", "read_component", "read_tensors", "sorted_by_alignment", "tensor_bytes", "unpack", "write_tensors"]

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Names of the supported dtypes in the safetensors format."""
WRITE_CHUNK = 32 * 2**20
"""Bytes per write call."""


def pack(state: Any) -> tuple[dict[str, Tensor | LazyGather], Any]:
    """Separate the tensors of `state` from the rest: named tensors, and a JSON tree that refers to them by name.

    A tensor that occurs twice is stored once. Subclasses of dict become dicts, NumPy scalars become Python numbers;
    everything else is restored exactly by `unpack`. Raises CheckpointError for types that cannot be. For a
    sharded tensor, the tree has this rank's part (see checkpoint/sharded.py). A `LazyGather` is not gathered yet.
    """
    tensors: dict[str, Tensor | LazyGather] = {}
    names: dict[tuple[Any, ...], str] = {}

    def add(tensor: Tensor | LazyGather, path: str) -> dict[str, str]:
        if isinstance(tensor, LazyGather):
            tensors.setdefault(name := names.setdefault((id(tensor),), path), tensor)
            return {"tensor": name}
        storable = tensor.layout is torch.strided and not tensor.is_meta and _dtype_name(tensor) in DTYPES
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or not storable:
            raise _unsupported(path, f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}")
        memory = tensor.untyped_storage().data_ptr()
        identity = (memory, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() == 0 or identity not in names:
            while path in tensors:  # {"a/b": ...} next to {"a": {"b": ...}}, or 1 next to "1"
                path += "'"
            names[identity] = path
            tensors[path] = tensor.detach()
        return {"tensor": names[identity]}

    def add_part(node: Tensor | Reordered, path: str) -> dict[str, Any]:
        tensor, order = node if isinstance(node, Reordered) else (node, None)
        part = local_part(tensor)
        stored = add(part.local, path)["tensor"] if part.is_writer and part.local.numel() else None
        shape, dtype = list(tensor.shape), _dtype_name(part.local)
        return {"part": {"tensor": stored, "pieces": part.pieces(order), "shape": shape, "dtype": dtype}}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Reordered) or is_dtensor(node):
            return add_part(node, path)
        match node:
            case Tensor() | LazyGather():
                return add(node, path)
            case dict():
                _check_keys(node, path)
                return {"dict": [[key, walk(value, _join(path, key))] for key, value in node.items()]}
            case list() | tuple() if type(node) in (list, tuple):
                return {type(node).__name__: [walk(value, _join(path, i)) for i, value in enumerate(node)]}
        return _pack_leaf(node, path)

    return tensors, walk(state, "")


def unpack(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """The inverse of `pack`."""
    return unpack_with(lambda kind, value: tensors[value] if kind == "tensor" else None, tree)


def unpack_with(tensor: Callable[[str, Any], Any], tree: Any) -> Any:
    """The state with this tree; `tensor` returns the tensor of a node, None for a kind that it does not know."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    match kind:
        case "dict":
            return {key: unpack_with(tensor, node) for key, node in value}
        case "list":
            return [unpack_with(tensor, node) for node in value]
        case "tuple":
            return tuple(unpack_with(tensor, node) for node in value)
        case "bytes":
            return bytes.fromhex(value)
    if (found := tensor(kind, value)) is not None:
        return found
    raise CheckpointError(
        f"unknown node type '{kind}' in the state: it was written by a newer version of Whimbrel, upgrade to load it"
    )


def _check_keys(node: Mapping[Any, Any], path: str) -> None:
    if bad := [key for key in node if type(key) not in (str, int)]:
        raise CheckpointError(f"expected state keys of type str or int, got {bad[0]!r} at '{path}'")


def _pack_leaf(node: Any, path: str) -> Any:
    if isinstance(node, np.generic):
        node = node.item()
    if type(node) is bytes:
        return {"bytes": node.hex()}
    if type(node) in (type(None), bool, int, float, str):
        return node
    raise _unsupported(path, type(node).__name__)


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _unsupported(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"expected numbers, strings, bytes, dense tensors, lists, tuples and dicts in the state, got {what} at '{path}'"
    )


# Safetensors files. Ours are written directly from host memory: no copy, no GIL while bytes are written, and disk
# errors are plain OSErrors. The safetensors library reads them.


class TensorEntry(NamedTuple):
    """One tensor in the header of a file; `size` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device and stride. At most one tensor at a time is copied to the host."""
    names = sorted_by_alignment(tensors)
    entries = [
        TensorEntry(name, _dtype_name(tensors[name]), tuple(tensors[name].shape), tensors[name].nbytes)
        for name in names
    ]
    write_tensor_file(path, entries, (tensor_bytes(tensors[name]) for name in names), {"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def read_component(path: Path, stem: str) -> Any:
    """The state of one component of a verified checkpoint; `stem` is its key, or `KEY.rank-00001` for one rank."""
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


def sorted_by_alignment(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names in an order in which every tensor starts at a multiple of its item size, without gaps."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; no copy if it is contiguous in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensor_file(
    path: str | os.PathLike[str],
    entries: Sequence[TensorEntry],
    contents: Iterable[memoryview],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file with `entries` in order; `contents` is consumed lazily, one tensor at a time."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the first tensor
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), len(text).to_bytes(8, "little") + text)
        for entry, content in zip(entries, contents, strict=True):
            if content.nbytes != entry.size:
                raise ValueError(f"expected {entry.size} bytes for '{entry.name}', got {content.nbytes}")
            _write_all(file.fileno(), content)


def _write_all(fd: int, content: bytes | memoryview) -> None:
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(fd, remaining[:WRITE_CHUNK]) :]


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
