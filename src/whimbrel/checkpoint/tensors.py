"""Tensors by name in one safetensors file: written from host memory as it lies, read by the library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from whimbrel.base.errors import CheckpointError
from whimbrel.base.tensorfile import DTYPES, TensorEntry, write_tensor_file

__all__ = ["by_alignment", "bytes_of", "is_storable", "read_tensors", "write_tensors"]


def is_storable(tensor: Tensor) -> bool:
    """Whether the format has a name for such a tensor: dense, of a known dtype, with memory behind it."""
    return tensor.layout is torch.strided and not tensor.is_meta and _dtype_name(tensor) in DTYPES


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row order; no copy where it lies so in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def by_alignment(names: Iterable[str], tensors: Mapping[str, Tensor]) -> list[str]:
    """The order of a file in which every tensor begins at a multiple of its item size, without gaps."""
    return sorted(names, key=lambda name: (-tensors[name].itemsize, name))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device and stride; one that must be brought to the host is there only while written."""
    names = by_alignment(tensors, tensors)
    entries = [
        TensorEntry(name, _dtype_name(tensors[name]), tuple(tensors[name].shape), tensors[name].nbytes)
        for name in names
    ]
    write_tensor_file(path, entries, (bytes_of(tensors[name]) for name in names), {"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, on the CPU."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
