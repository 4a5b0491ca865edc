"""Runs the CUDA C++ kernel of the decoder on a CPU (`cuda_emulator.h`)."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from torch import Tensor

from whimbrel.inference.cuda_decoder import GpuLimits, Launch
from whimbrel.ops.compiler import find_compiler

__all__ = ["EMULATED", "compile_for_cpu"]

EMULATED = GpuLimits(blocks=3, shared_bytes=200 * 1024)
HEADER = Path(__file__).with_name("cuda_emulator.h")
ENTRY = """
extern "C" void launch(unsigned blocks, unsigned threads, const char* pointers, int* tokens, const int* tables,
                       int table_stride, int* starts, const int* counts) {
  run_grid(blocks, threads, SHARED_BYTES, [&] { decode_step(pointers, tokens, tables, table_stride, starts, counts); });
}
"""


def compile_for_cpu(directory: Path, source: str) -> Launch:
    """A function that runs the kernel, for `CudaDecoder`."""
    path, library = directory / "kernel.cpp", directory / "kernel.so"
    path.write_text(f'#include "{HEADER}"\n{source}\n{ENTRY}', encoding="utf-8")
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared"]
    command = [find_compiler() or "c++", *flags, "-o", str(library), str(path)]
    subprocess.run(command, check=True)
    kernel = ctypes.CDLL(str(library)).launch

    def launch(blocks: int, threads: int, *arguments: Tensor | int) -> None:
        pointers = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
        kernel(blocks, threads, *pointers)

    return launch
