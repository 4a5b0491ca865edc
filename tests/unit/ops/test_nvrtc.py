"""CUDA C++ is compiled at run time, once per machine; errors are reported."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from whimbrel.base.errors import ConfigError
from whimbrel.ops import nvrtc
from whimbrel.ops.nvrtc import CudaKernel

SCALE = """
extern "C" __global__ void scale(float* x, int count, const float* factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] *= *factor;
}
"""


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"libnvrtc\.so\.13 was not found: install PyTorch"):
        nvrtc._library.__wrapped__()  # without its cache


class FakeLibrary:
    """As much of NVRTC as the cache needs."""

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        return 0


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were compiled, with an empty cache and no GPU."""
    sources: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_library", FakeLibrary)
    monkeypatch.setattr(nvrtc, "_compile", lambda _, source, __: sources.append(source) or source.encode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return sources


def test_code_is_compiled_once_per_source_and_gpu(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [nvrtc._cubin(source) for source in ("a", "b", "a")] == [b"a", b"b", b"a"]
    assert compiled == ["a", "b"]
    assert len(list((tmp_path / "whimbrel").iterdir())) == 2
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    nvrtc._cubin("a")
    assert compiled == ["a", "b", "a"]


def test_a_cache_that_others_can_write_is_not_read(compiled: list[str], tmp_path: Path) -> None:
    nvrtc._cubin("a")
    (tmp_path / "whimbrel").chmod(0o777)
    nvrtc._cubin("a")
    assert compiled == ["a", "a"]


def test_a_cache_that_cannot_be_written_is_reported(
    compiled: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "whimbrel").write_text("a file where the directory would be")
    with caplog.at_level(logging.WARNING):
        assert nvrtc._cubin("a") == b"a"
    assert "compiled again in every process" in caplog.text


@pytest.mark.gpu
def test_kernels_run_with_tensors_and_integers() -> None:
    x = torch.arange(1000.0, device="cuda")
    CudaKernel(SCALE, "scale")(4, 256, x, 999, torch.tensor(2.0, device="cuda"))
    assert x.tolist() == [2.0 * i for i in range(999)] + [999.0]


@pytest.mark.gpu
def test_compile_errors_are_reported() -> None:
    with pytest.raises(ConfigError, match="NVRTC cannot compile a kernel.*nothing"):
        CudaKernel('extern "C" __global__ void broken() { nothing(); }', "broken")
