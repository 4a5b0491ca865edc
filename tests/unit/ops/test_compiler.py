"""A missing compiler is reported before torch.compile fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor
from torch.utils._triton import has_triton_package

from whimbrel.base.errors import ConfigError
from whimbrel.ops.compiler import check_compiler, find_compiler

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MISSING = r"compile needs a working C\+\+ compiler .* not found"


def script(path: Path, text: str, mode: int = 0o755) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return str(path)


def test_a_working_compiler_is_found(tmp_path: Path):
    works = script(tmp_path / "works", "exit 0")
    with inductor.patch({"cpp.cxx": (None, works)}):
        assert find_compiler() == works
        check_compiler(CPU, "compile")


@pytest.mark.parametrize(("text", "mode"), [("exit 1", 0o755), ("exit 0", 0o644)], ids=["fails", "not executable"])
def test_a_broken_compiler_is_rejected(tmp_path: Path, text: str, mode: int):
    with inductor.patch({"cpp.cxx": script(tmp_path / "cxx", text, mode)}), pytest.raises(ConfigError, match=MISSING):
        check_compiler(CPU, "compile")


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "triton", None)
    has_triton_package.cache_clear()
    yield
    has_triton_package.cache_clear()


@pytest.mark.usefixtures("no_triton")
@inductor.patch({"cpp.cxx": "no-such-compiler"})
def test_a_gpu_needs_triton():
    with pytest.raises(ConfigError, match=r"compile needs triton .*not found"):
        check_compiler(CUDA, "compile")


@pytest.mark.gpu
@inductor.patch({"cpp.cxx": "no-such-compiler"})
def test_a_gpu_with_triton_needs_nothing_else():
    check_compiler(CUDA, "compile")
