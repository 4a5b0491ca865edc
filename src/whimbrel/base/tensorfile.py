"""Writing safetensors files straight from memory: no copy, no interpreter lock while bytes flow, plain disk errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["DTYPES", "TensorEntry", "write_tensor_file"]

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Every dtype that can be stored, and how the format spells it."""

CHUNK = 32 * 2**20
"""Bytes handed to the system at a time."""


class TensorEntry(NamedTuple):
    """What the header of a file says about one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


def write_tensor_file(
    path: str | os.PathLike[str],
    entries: Sequence[TensorEntry],
    contents: Iterable[memoryview],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors in the order given; the bytes of each are asked for only when the one before has been written."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), len(text).to_bytes(8, "little") + text)
        for entry, content in zip(entries, contents, strict=True):
            if content.nbytes != entry.size:
                raise ValueError(f"'{entry.name}' has {content.nbytes} bytes where its entry says {entry.size}")
            _write_all(file.fileno(), content)


def _write_all(handle: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(handle, left[:CHUNK]) :]
