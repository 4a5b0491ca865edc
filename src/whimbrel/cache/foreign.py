"""Tensors of other frameworks in `Cache.update`: read as torch tensors, returned as the type they came in.

Inputs are read without a copy if possible, and never written to. Outputs are views of the cache's memory, valid until
the next update; they are copied only if the other type cannot alias it (JAX has no strided arrays, for example, and
another device always needs a copy). No framework is imported here: conversions are looked up on the type of the value.
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

FromTorch = Callable[[Tensor], Any]
"""Converts a torch tensor to the type of the input."""


@dataclass(frozen=True, slots=True)
class Converter:
    """Converts between a foreign type and torch."""

    to_torch: Callable[[Any], Tensor]
    from_torch: FromTorch


_REGISTERED: dict[type, Converter] = {}
_SUPPORTED = (
    "pass a torch.Tensor, a NumPy array, a type with __dlpack__, .to_torch() or an array interface, "
    "or register it with whimbrel.cache.register_foreign(type, to_torch, from_torch)"
)
_NUMPY_BITS = {1: np.uint8, 2: np.uint16}
_TORCH_BITS = {1: torch.uint8, 2: torch.uint16}


def register_foreign(foreign: type, to_torch: Callable[[Any], Tensor], from_torch: FromTorch) -> None:
    """Convert between `foreign` and torch with these functions, in preference to any protocol that the type supports.

    This applies to subclasses too; the most specific type wins. Registering a type again replaces its functions.
    """
    if foreign is Tensor or not isinstance(foreign, type):
        raise ConfigError(f"register_foreign: expected a class other than torch.Tensor, got {foreign!r}")
    for name, function in (("to_torch", to_torch), ("from_torch", from_torch)):
        if not callable(function):
            raise ConfigError(f"register_foreign: expected a function of one argument as {name}, got {function!r}")
    _REGISTERED[foreign] = Converter(to_torch, from_torch)


def to_torch(value: Any) -> tuple[Tensor, FromTorch]:
    """`value` as a torch tensor, which must not be written to, and the function that converts results back.

    Raises for unsupported values, even if only the way back is unsupported; so call it before changing any state.
    """
    if type(value) is Tensor:
        return value, _unchanged
    converter = _find_converter(value)
    if converter is None:
        return value, _unchanged
    tensor = converter.to_torch(value)
    if not isinstance(tensor, Tensor):
        raise CacheError(
            f"to_torch of {_type_name(value)}: expected a torch.Tensor, got {_type_name(tensor)}: {_SUPPORTED}"
        )
    device = tensor.device
    return tensor, lambda result: converter.from_torch(result.detach().to(device))


def _find_converter(value: Any) -> Converter | None:
    """The first converter that supports `value`; None for torch tensors."""
    if (registered := _registered(value)) is not None:
        return registered
    if isinstance(value, Tensor):
        return None
    if isinstance(value, np.ndarray):
        cls, dtype = type(value), value.dtype
        return Converter(_read_numpy, lambda tensor: _write_numpy(tensor, dtype).view(cls))
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return Converter(_read_dlpack, _from_torch(value))
    if callable(getattr(value, "to_torch", None)):
        return Converter(lambda array: array.to_torch(), _from_torch(value))
    if hasattr(value, "__cuda_array_interface__"):
        return Converter(lambda array: torch.as_tensor(array, device="cuda"), _from_torch(value))
    if hasattr(value, "__array_interface__"):
        return Converter(lambda array: _read_numpy(np.asarray(array)), _from_torch(value))
    raise CacheError(f"expected a tensor, got {_type_name(value)}: {_SUPPORTED}")


def _registered(value: Any) -> Converter | None:
    for cls in type(value).__mro__:
        if cls in _REGISTERED:
            return _REGISTERED[cls]
    virtual = (converter for cls, converter in _REGISTERED.items() if isinstance(value, cls))  # ABC.register
    return next(virtual, None)


def _from_torch(value: Any) -> FromTorch:
    """`from_torch` of the type of `value`, or `from_dlpack` of its library."""
    if callable(from_torch := getattr(type(value), "from_torch", None)):
        return from_torch  # type: ignore[no-any-return]
    if hasattr(value, "__dlpack__"):
        package = sys.modules.get(type(value).__module__.partition(".")[0])
        library = value.__array_namespace__() if hasattr(value, "__array_namespace__") else package
        if callable(read := getattr(library, "from_dlpack", None)):
            return lambda tensor: _write_dlpack(tensor, read)
    raise CacheError(
        f"{_type_name(value)} cannot be created from a torch tensor: add a classmethod `from_torch(tensor)`, "
        "or register it with whimbrel.cache.register_foreign(type, to_torch, from_torch)"
    )


def _read_dlpack(value: Any) -> Tensor:
    strides = getattr(value, "strides", None)
    if isinstance(strides, tuple) and min(strides, default=0) < 0:  # torch would abort the process
        raise CacheError(f"{_type_name(value)} has negative strides, which torch does not support: pass a copy")
    try:
        return torch.from_dlpack(value)  # type: ignore[attr-defined]
    except (BufferError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise CacheError(f"{_type_name(value)} cannot be read as a torch tensor ({reason}): {_SUPPORTED}") from error


def _write_dlpack(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """Without a copy if the library supports the strides."""
    try:
        return read(tensor)
    except (BufferError, RuntimeError):
        return read(tensor.contiguous())  # raises again if strides were not the reason


def _read_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Any array whose dtype torch supports; ml_dtypes (such as bfloat16) are reinterpreted from their bits."""
    dtype = getattr(torch, array.dtype.name, None)
    if isinstance(array, np.ma.MaskedArray) or not isinstance(dtype, torch.dtype) or not array.dtype.isnative:
        what = "masks" if isinstance(array, np.ma.MaskedArray) else f"dtype {array.dtype.str!r}"
        raise CacheError(
            f"torch does not support a NumPy array with {what}: convert it, for example with array.astype('float32')"
        )
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()  # strides that torch does not support
    if array.dtype.isbuiltin != 1:
        return _read_numpy(array.view(_NUMPY_BITS[array.itemsize])).view(dtype)
    return torch.from_dlpack(array)  # type: ignore[attr-defined]  # from_numpy warns about read-only arrays


def _write_numpy(tensor: Tensor, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype.isbuiltin != 1 and str(tensor.dtype) == f"torch.{dtype.name}":
        return tensor.view(_TORCH_BITS[dtype.itemsize]).numpy().view(dtype)
    return tensor.numpy()


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _type_name(value: Any) -> str:
    cls = type(value)
    return f"a value of type {cls.__module__}.{cls.__qualname__}"
