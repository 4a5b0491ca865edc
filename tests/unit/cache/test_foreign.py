"""Tensors of other frameworks are read without a copy, returned as their type, or rejected in one line."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache import foreign
from whimbrel.cache.foreign import register_foreign, to_torch


@pytest.fixture(autouse=True)
def no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo registrations after each test."""
    monkeypatch.setattr(foreign, "_REGISTERED", {})


class Wrapper:
    """A tensor type without any protocol."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inside = tensor


class Exporting(Wrapper):
    """Has to_torch only."""

    def to_torch(self) -> torch.Tensor:
        return self.inside


class RoundTrip(Exporting):
    """Has to_torch and from_torch."""

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> RoundTrip:
        return cls(tensor)


class DLPackTensor(Wrapper):
    """Supports DLPack; its `.to_torch()` must not be called."""

    def __dlpack__(self, **kwargs: object) -> object:
        return self.inside.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.inside.__dlpack_device__()

    def to_torch(self) -> torch.Tensor:
        raise AssertionError("DLPack comes before .to_torch()")

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> DLPackTensor:
        return cls(tensor)


class ArrayInterfaceTensor:
    """Has the array interface only."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> dict:
        return self.array.__array_interface__

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> ArrayInterfaceTensor:
        return cls(tensor.numpy())


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def error_of(value: object) -> str:
    with pytest.raises(CacheError) as refused:
        to_torch(value)
    return one_line(refused)


def test_a_torch_tensor_is_returned_unchanged():
    tensor = torch.randn(2, 3, requires_grad=True)
    read, back = to_torch(tensor)
    other = torch.randn(4)
    assert read is tensor
    assert back(other) is other
    parameter = torch.nn.Parameter(torch.ones(2))
    assert to_torch(parameter)[0] is parameter


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int64", "bool", "complex64"])
def test_numpy_is_read_and_returned_without_copies(dtype: str):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    read, back = to_torch(array)
    assert read.dtype is getattr(torch, dtype)
    assert read.data_ptr() == array.ctypes.data
    assert np.array_equal(read.numpy(), array)
    ours = torch.zeros(2, 6, 4, dtype=read.dtype)
    returned = back(ours[:, :3])
    assert type(returned) is np.ndarray
    assert returned.dtype == array.dtype
    assert returned.ctypes.data == ours.data_ptr()
    assert returned.strides == tuple(stride * array.itemsize for stride in ours.stride())


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_ml_dtypes_arrays_are_reinterpreted(name: str):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs the package 'ml_dtypes'")
    dtype = getattr(ml_dtypes, name)
    array = np.linspace(-3, 3, 24).reshape(2, 3, 4).astype(dtype)
    array.flags.writeable = False
    read, back = to_torch(array[:, ::2])
    assert read.dtype is getattr(torch, name)
    assert read.data_ptr() == array.ctypes.data
    assert np.array_equal(read.float().numpy(), array[:, ::2].astype(np.float32))
    ours = torch.linspace(-1, 1, 12).to(read.dtype).view(2, 6)[:, :3]
    returned = back(ours)
    assert returned.dtype == dtype
    assert returned.ctypes.data == ours.data_ptr()
    assert np.array_equal(returned.astype(np.float32), ours.float().numpy())


def test_a_read_only_array_is_read_without_a_copy_or_warning():
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read, _ = to_torch(array)
    assert read.data_ptr() == array.ctypes.data


def test_unsupported_strides_are_copied():
    """torch aborts the process for negative strides from DLPack, so they must not reach it."""
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for value in (array[::-1], array[:, ::-1, ::-2], np.zeros(4, dtype=[("a", "f4"), ("b", "i1")])["a"]):
        assert np.array_equal(to_torch(value)[0].numpy(), value)
    spread = np.broadcast_to(array[:1], (2, 3, 4))
    assert to_torch(spread)[0].stride() == (0, 4, 1)


def test_ndarray_subclasses_are_preserved(tmp_path):
    class Marked(np.ndarray):
        pass

    _, back = to_torch(np.ones(3, dtype=np.float32).view(Marked))
    assert type(back(torch.zeros(2))) is Marked
    np.ones(4, dtype=np.float32).tofile(tmp_path / "states")
    mapped = np.memmap(tmp_path / "states", dtype=np.float32, mode="r")
    assert to_torch(mapped)[0].data_ptr() == mapped.ctypes.data


@pytest.mark.parametrize(
    "array",
    [
        np.ones(3, dtype=np.dtype("float32").newbyteorder(">" if sys.byteorder == "little" else "<")),
        np.array(["text"]),
        np.array([object()]),
        np.ones(3, dtype=[("a", "f4")]),
        np.ones(3, dtype=np.longdouble),
        np.array(["2026-01-01"], dtype="datetime64[s]"),
        np.ma.masked_less(np.arange(3.0), 1),
    ],
    ids=["other-endian", "text", "object", "fields", "longdouble", "dates", "masked"],
)
def test_an_array_of_an_unsupported_dtype_is_rejected(array: np.ndarray):
    message = error_of(array)
    assert "astype" in message
    assert "mask" in message if isinstance(array, np.ma.MaskedArray) else array.dtype.str in message


def test_dlpack_takes_precedence_over_to_torch():
    value = DLPackTensor(torch.arange(6.0).view(2, 3))
    read, back = to_torch(value)
    assert read.data_ptr() == value.inside.data_ptr()
    assert torch.equal(read, value.inside)
    ours = torch.ones(2)
    returned = back(ours)
    assert type(returned) is DLPackTensor
    assert returned.inside.data_ptr() == ours.data_ptr()


def test_a_dlpack_type_is_created_by_its_own_library():
    class Library:
        @staticmethod
        def from_dlpack(value: torch.Tensor) -> Named:
            if not value.is_contiguous():
                raise BufferError("packed arrays only")
            return Named(torch.from_dlpack(value))

    class Named(Wrapper):
        __dlpack__ = DLPackTensor.__dlpack__
        __dlpack_device__ = DLPackTensor.__dlpack_device__

        def __array_namespace__(self) -> type[Library]:
            return Library

    _, back = to_torch(Named(torch.ones(2, 2)))
    packed, strided = torch.arange(4.0).view(2, 2), torch.arange(8.0).view(2, 4)[:, :2]
    assert type(back(packed)) is Named
    assert back(packed).inside.data_ptr() == packed.data_ptr()
    assert torch.equal(back(strided).inside, strided)
    assert back(strided).inside.data_ptr() != strided.data_ptr()


def test_errors_of_the_library_are_raised():
    class Library:
        @staticmethod
        def from_dlpack(value: torch.Tensor) -> None:
            raise BufferError("no room")

    class Named(DLPackTensor):
        from_torch = None

        def __array_namespace__(self) -> type[Library]:
            return Library

    _, back = to_torch(Named(torch.ones(2)))
    with pytest.raises(BufferError, match="no room"):
        back(torch.ones(2))
    with pytest.raises(BufferError, match="no room"):
        back(torch.ones(4, 4).t())


def test_a_failed_dlpack_export_is_reported_with_its_reason():
    class FailingExport(DLPackTensor):
        def __dlpack__(self, **kwargs: object) -> object:
            raise BufferError("spread over two devices\nand more")

    message = error_of(FailingExport(torch.ones(2)))
    assert "spread over two devices" in message
    assert "FailingExport" in message

    class NegativeStrides(DLPackTensor):
        strides = (-4,)

    assert "negative strides" in error_of(NegativeStrides(torch.ones(2)))


def test_a_type_with_to_torch_needs_from_torch():
    value = RoundTrip(torch.arange(3.0))
    read, back = to_torch(value)
    assert read is value.inside
    ours = torch.ones(2)
    assert type(back(ours)) is RoundTrip
    assert back(ours).inside.data_ptr() == ours.data_ptr()
    message = error_of(Exporting(torch.arange(3.0)))
    assert "Exporting" in message
    assert "from_torch" in message
    assert "register_foreign" in message


def test_the_array_interface_has_the_lowest_precedence():
    array = np.arange(6, dtype=np.float32)
    read, back = to_torch(ArrayInterfaceTensor(array))
    assert read.data_ptr() == array.ctypes.data
    assert type(back(torch.ones(2))) is ArrayInterfaceTensor

    class Both(ArrayInterfaceTensor):
        def to_torch(self) -> torch.Tensor:
            return torch.full((1,), 7.0)

    assert to_torch(Both(array))[0].tolist() == [7.0]


@pytest.mark.parametrize("value", [None, 1.5, [1.0, 2.0], "keys", np.float32(1), Wrapper(torch.ones(1))])
def test_other_values_are_rejected(value: object):
    message = error_of(value)
    assert type(value).__qualname__ in message
    assert "register_foreign" in message


def test_registered_functions_take_precedence():
    register_foreign(Wrapper, lambda box: box.inside, Wrapper)
    read, back = to_torch(Wrapper(torch.arange(3.0)))
    assert read.tolist() == [0, 1, 2]
    assert type(back(read)) is Wrapper
    assert to_torch(DLPackTensor(torch.arange(2.0)))[1](read).__class__ is Wrapper  # a subclass counts, before DLPack
    register_foreign(DLPackTensor, lambda box: box.inside + 1, DLPackTensor)
    assert to_torch(DLPackTensor(torch.arange(2.0)))[0].tolist() == [1, 2]  # the most specific type wins
    register_foreign(Wrapper, lambda box: box.inside + 5, Wrapper)
    assert to_torch(Wrapper(torch.arange(2.0)))[0].tolist() == [5, 6]
    register_foreign(np.ndarray, lambda array: torch.zeros(1), lambda tensor: "mine")
    assert to_torch(np.ones(3))[1](read) == "mine"


def test_virtual_subclasses_and_tensor_subclasses_can_be_registered():
    import abc

    class Any(abc.ABC):  # noqa: B024
        pass

    Any.register(Wrapper)
    register_foreign(Any, lambda box: box.inside, Wrapper)
    assert to_torch(Wrapper(torch.ones(3)))[0].tolist() == [1, 1, 1]

    class Wrapped(torch.Tensor):
        pass

    wrapped = torch.ones(2).as_subclass(Wrapped)
    assert to_torch(wrapped)[0] is wrapped
    register_foreign(Wrapped, lambda value: value.as_subclass(torch.Tensor), lambda ours: ours.as_subclass(Wrapped))
    read, back = to_torch(wrapped)
    assert type(read) is torch.Tensor
    assert type(back(read)) is Wrapped


def test_invalid_registrations_are_rejected():
    for arguments in (
        ("jax.Array", Wrapper, Wrapper),
        (torch.Tensor, Wrapper, Wrapper),
        (Wrapper, None, Wrapper),
        (Wrapper, Wrapper, 3),
    ):
        with pytest.raises(ConfigError) as refused:
            register_foreign(*arguments)
        assert "register_foreign" in one_line(refused)
    register_foreign(Wrapper, lambda box: [1.0], Wrapper)
    assert "list" in error_of(Wrapper(torch.ones(1)))


def test_results_are_detached():
    _, back = to_torch(np.ones(2, dtype=np.float32))
    assert back(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_no_framework_is_imported():
    code = "import sys, whimbrel.cache.foreign; print({'jax', 'cupy', 'ml_dtypes', 'tensorflow'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.gpu
def test_results_are_on_the_device_of_the_input():
    _, back = to_torch(np.ones(2, dtype=np.float32))
    assert back(torch.arange(3.0, device="cuda")).tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_cupy_is_read_and_returned_without_copies():
    cupy = pytest.importorskip("cupy", reason="needs the package 'cupy'")
    array = cupy.arange(24, dtype=cupy.float32).reshape(2, 3, 4)
    read, back = to_torch(array[:, ::2])
    assert read.is_cuda
    assert read.data_ptr() == array.data.ptr
    assert np.array_equal(read.cpu().numpy(), cupy.asnumpy(array[:, ::2]))
    ours = torch.arange(24.0, device="cuda").view(2, 3, 4)[:, :2]
    returned = back(ours)
    assert isinstance(returned, cupy.ndarray)
    assert returned.data.ptr == ours.data_ptr()
    assert np.array_equal(cupy.asnumpy(returned), ours.cpu().numpy())
    assert "negative strides" in error_of(array[::-1])


@pytest.mark.gpu
def test_the_cuda_array_interface_is_read_without_a_copy():
    class Device(Wrapper):
        @property
        def __cuda_array_interface__(self) -> dict:
            return self.inside.__cuda_array_interface__

        @classmethod
        def from_torch(cls, tensor: torch.Tensor) -> Device:
            return cls(tensor)

    value = Device(torch.arange(3.0, device="cuda"))
    read, back = to_torch(value)
    assert read.data_ptr() == value.inside.data_ptr()
    assert type(back(read)) is Device
