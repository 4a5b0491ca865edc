"""Check that the compiler for `torch.compile` is installed, before it fails in the middle of a run."""

from __future__ import annotations

import torch

from whimbrel.base.errors import ConfigError

__all__ = ["check_compiler", "find_compiler", "missing_compiler"]


def check_compiler(device: torch.device, setting: str) -> None:
    """Raise if `setting` needs a compiler for `device` that torch does not find."""
    missing = missing_compiler(device.type)
    if missing is not None:
        raise ConfigError(f"{setting} needs {missing}, which was not found: install it, or remove {setting}")


def missing_compiler(device_type: str) -> str | None:
    """The missing compiler for a device type and how to install it; None if nothing is missing."""
    if device_type == "cpu" and find_compiler() is None:
        return "a working C++ compiler (Debian: apt install g++; macOS: xcode-select --install; or set CXX)"
    if device_type == "cuda":
        from torch.utils._triton import has_triton_package

        return None if has_triton_package() else "triton (pip install triton)"
    return None


def find_compiler() -> str | None:
    """The C++ compiler that torch would use ($CXX or a default); None if it does not run."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second to import
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):  # OSError: not an executable file
        return None
