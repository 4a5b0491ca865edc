"""CUDA C++ kernels, compiled at run time with NVRTC, which comes with PyTorch: no CUDA toolkit is needed."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError, WriteError
from whimbrel.base.files import atomic_file, cache_directory, is_private

__all__ = ["CudaKernel"]

OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--extra-device-vectorization")
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""The number of a function attribute in the CUDA driver."""

logger = logging.getLogger(__name__)


class CudaKernel:
    """A kernel for the current device. Its arguments are tensors, passed as pointers, and 32-bit integers."""

    def __init__(self, source: str, name: str, shared_bytes: int = 0) -> None:
        self._shared_bytes, self._driver = shared_bytes, ctypes.CDLL("libcuda.so.1")
        self._device = torch.cuda.current_device()
        torch.cuda.current_stream().synchronize()  # creates the context that the module is loaded into
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), _cubin(source)))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        attribute = self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
        self._check(self._driver.cuFuncSetAttribute(*attribute))

    def __call__(self, blocks: int, threads: int, *arguments: Tensor | int) -> None:
        """Launch the kernel on the current stream of its device."""
        values = [
            ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else ctypes.c_int32(each)
            for each in arguments
        ]  # fmt: skip
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = blocks, 1, 1, threads, 1, 1
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self._check(
                self._driver.cuLaunchKernel(self._function, *shape, self._shared_bytes, stream, pointers, None)
            )  # fmt: skip

    def _check(self, status: int) -> None:
        if status:
            message = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(message))
            raise RuntimeError(f"CUDA error: {(message.value or b'unknown').decode()}")


def _cubin(source: str) -> bytes:
    """The compiled source, from the cache on disk if it has been compiled before."""
    nvrtc = _library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = (*OPTIONS, "--gpu-architecture=sm_{}{}".format(*torch.cuda.get_device_capability()))
    key = hashlib.sha256(repr((source, options, major.value, minor.value)).encode()).hexdigest()[:16]
    path = cache_directory() / f"cuda-{key}.cubin"
    with contextlib.suppress(OSError):
        if is_private(path):
            return path.read_bytes()
    cubin = _compile(nvrtc, source, options)
    try:
        with atomic_file(path) as file:
            file.write(cubin)
        for each in (path, path.parent):
            if each.stat().st_uid == os.getuid():
                each.chmod(0o700)
    except (WriteError, OSError) as error:
        logger.warning("CUDA kernels are compiled again in every process: %s", error)
    return cubin


def _compile(nvrtc: Any, source: str, options: tuple[str, ...]) -> bytes:
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    assert created == 0, "NVRTC cannot create a program"
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ConfigError(f"NVRTC cannot compile a kernel: {log.value.decode().strip()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


@cache
def _library() -> Any:
    """NVRTC, for the CUDA version that torch was built for."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    packages = Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}")
    for candidate in (name, *packages, Path(torch.__file__).parent / "lib" / name):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(candidate))
    raise ConfigError(f"{name} was not found: install PyTorch with its CUDA packages")
