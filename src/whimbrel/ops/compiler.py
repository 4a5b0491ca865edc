"""What `torch.compile` needs of a machine. torch itself is asked, before it would fail in the midst of something."""

from __future__ import annotations

import torch

from whimbrel.base.errors import ConfigError

__all__ = ["check_compiler", "find_compiler", "missing_compiler"]


def check_compiler(device: torch.device, setting: str) -> None:
    """Refuse a setting that compiles for a device for which torch could not."""
    missing = missing_compiler(device.type)
    if missing is not None:
        raise ConfigError(f"{setting} needs {missing}, which torch does not find: install it, or leave {setting} out")


def missing_compiler(kind: str) -> str | None:
    """What torch would compile with for a kind of device and does not find, and how to install it."""
    if kind == "cpu" and find_compiler() is None:
        return "a C++ compiler that runs (Debian: apt install g++; macOS: xcode-select --install; CXX names another)"
    if kind == "cuda":
        from torch.utils._triton import has_triton_package

        return None if has_triton_package() else "triton (pip install triton)"
    return None


def find_compiler() -> str | None:
    """The C++ compiler that torch would call: what CXX names, else a usual one; None if it does not run."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second: only where it is needed
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):  # OSError: a file that may not be run
        return None
