"""Tensors of other frameworks at the border of the cache: read as torch tensors, handed back as the kind they were.

A tensor comes in without a copy wherever its memory can be read in place; the cache only reads it. What goes out is a
view of the cache's own memory, valid until the next update, and a copy only where the other type cannot alias it (JAX,
for one, has no strided arrays; another device is always a copy). No framework is imported here: the way in and the way
back are found on the value that was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError

__all__ = ["register_foreign", "to_torch"]

Back = Callable[[Tensor], Any]
"""Makes the kind of tensor that was given of one of ours."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """The two ways between a foreign type and torch."""

    to_torch: Callable[[Any], Tensor]
    from_torch: Back


_BRIDGES: dict[type, Bridge] = {}
_ADVICE = (
    "give a torch.Tensor, a NumPy array, a type with __dlpack__, .to_torch() or an array interface, "
    "or name both ways with whimbrel.cache.register_foreign(type, to_torch, from_torch)"
)
_NUMPY_BITS = {1: np.uint8, 2: np.uint16}
_TORCH_BITS = {1: torch.uint8, 2: torch.uint16}


def register_foreign(foreign: type, to_torch: Callable[[Any], Tensor], from_torch: Back) -> None:
    """Cross between `foreign` and torch by these two functions, before any protocol that the type may also speak.

    Subclasses count, the most specific registered type first; registering a type again replaces its functions.
    """
    if foreign is Tensor or not isinstance(foreign, type):
        raise ConfigError(
            f"register_foreign takes a class other than torch.Tensor, not {foreign!r}: give the type itself"
        )
    for name, function in (("to_torch", to_torch), ("from_torch", from_torch)):
        if not callable(function):
            raise ConfigError(
                f"register_foreign takes a function as {name}, not {function!r}: give one of one argument"
            )
    _BRIDGES[foreign] = Bridge(to_torch, from_torch)


def to_torch(value: Any) -> tuple[Tensor, Back]:
    """`value` as a torch tensor, to be read and never written to, and the function that makes its kind of another.

    Everything that can be refused is refused here, so a caller that has the pair may change its state.
    """
    if type(value) is Tensor:
        return value, _same
    bridge = _find_bridge(value)
    if bridge is None:
        return value, _same
    tensor = bridge.to_torch(value)
    if not isinstance(tensor, Tensor):
        raise CacheError(f"{_name(value)} became {_name(tensor)}, not a torch.Tensor: {_ADVICE}")
    device = tensor.device
    return tensor, lambda ours: bridge.from_torch(ours.detach().to(device))


def _find_bridge(value: Any) -> Bridge | None:
    """The first way that fits `value`; None where it is a torch tensor and needs none."""
    if (registered := _registered(value)) is not None:
        return registered
    if isinstance(value, Tensor):
        return None
    if isinstance(value, np.ndarray):
        return _numpy_bridge(value)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return Bridge(_read_dlpack, _way_back(value))
    if callable(getattr(value, "to_torch", None)):
        return Bridge(lambda given: given.to_torch(), _way_back(value))
    if hasattr(value, "__cuda_array_interface__"):
        return Bridge(lambda given: torch.as_tensor(given, device="cuda"), _way_back(value))
    if hasattr(value, "__array_interface__"):
        return Bridge(lambda given: _read_numpy(np.asarray(given)), _way_back(value))
    raise CacheError(f"{_name(value)} is no tensor that can be read: {_ADVICE}")


def _registered(value: Any) -> Bridge | None:
    for cls in type(value).__mro__:
        if cls in _BRIDGES:
            return _BRIDGES[cls]
    return next((bridge for cls, bridge in _BRIDGES.items() if isinstance(value, cls)), None)  # a virtual subclass


def _way_back(value: Any) -> Back:
    """What makes the type of `value`: its own `from_torch`; for one that speaks DLPack, its library's `from_dlpack`."""
    if callable(own := getattr(type(value), "from_torch", None)):
        return own  # type: ignore[no-any-return]
    if hasattr(value, "__dlpack__"):
        package = sys.modules.get(type(value).__module__.partition(".")[0])
        library = value.__array_namespace__() if hasattr(value, "__array_namespace__") else package
        if callable(read := getattr(library, "from_dlpack", None)):
            return lambda ours: _write_dlpack(ours, read)
    raise CacheError(
        f"{_name(value)} has no way back from torch: give it a classmethod `from_torch(tensor)`, "
        "or name both ways with whimbrel.cache.register_foreign(type, to_torch, from_torch)"
    )


def _read_dlpack(value: Any) -> Tensor:
    strides = getattr(value, "strides", None)
    if isinstance(strides, tuple) and min(strides, default=0) < 0:  # torch would end the process over them
        raise CacheError(f"{_name(value)} has negative strides, which torch cannot read: give a copy of it")
    try:
        return torch.from_dlpack(value)  # type: ignore[attr-defined]
    except (BufferError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise CacheError(f"{_name(value)} cannot be read as a torch tensor ({reason}): {_ADVICE}") from error


def _write_dlpack(ours: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """`ours` in place where the library takes its strides, and packed where it does not."""
    try:
        return read(ours)
    except (BufferError, RuntimeError):
        return read(ours.contiguous())  # raises as before where strides were not the reason


def _numpy_bridge(value: np.ndarray[Any, Any]) -> Bridge:
    kind, dtype = type(value), value.dtype
    return Bridge(_read_numpy, lambda ours: _write_numpy(ours, dtype).view(kind))


def _read_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Any array that torch has a dtype for; numbers that NumPy has from ml_dtypes alone cross as their bits."""
    dtype = getattr(torch, array.dtype.name, None)
    if isinstance(array, np.ma.MaskedArray) or not isinstance(dtype, torch.dtype) or not array.dtype.isnative:
        what = "masks" if isinstance(array, np.ma.MaskedArray) else f"dtype {array.dtype.str!r}"
        raise CacheError(
            f"a NumPy array with {what} has no like in torch: give a plain one, as of array.astype('float32')"
        )
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()  # torch has no such strides
    if array.dtype.isbuiltin != 1:
        return _read_numpy(array.view(_NUMPY_BITS[array.itemsize])).view(dtype)
    return torch.from_dlpack(array)  # type: ignore[attr-defined]  # from_numpy would warn of read-only ones


def _write_numpy(ours: Tensor, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype.isbuiltin != 1 and str(ours.dtype) == f"torch.{dtype.name}":
        return ours.view(_TORCH_BITS[dtype.itemsize]).numpy().view(dtype)
    return ours.numpy()


def _same(ours: Tensor) -> Tensor:
    return ours


def _name(value: Any) -> str:
    cls = type(value)
    return f"a value of type {cls.__module__}.{cls.__qualname__}"
