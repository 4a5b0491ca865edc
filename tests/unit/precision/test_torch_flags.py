"""Global torch flags and SDPA backends are set within a context and restored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.attention import SDPBackend

from whimbrel.base.errors import ConfigError, PrecisionError, TrainingError
from whimbrel.precision import sdpa_backend_names, sdpa_backends, torch_flags


def state() -> dict[str, Any]:
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "newer": (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "limit": torch._dynamo.config.recompile_limit,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "dtype": torch.get_default_dtype(),
    }


ALL: dict[str, Any] = {
    "matmul_precision": "high",
    "detect_anomaly": True,
    "recompile_limit": 3,
    "deterministic": True,
    "default_dtype": "bfloat16",
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")  # warning by torch whenever it is enabled
@pytest.mark.parametrize("fails", [False, True])
def test_flags_are_set_within_the_context_and_restored_afterwards(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    try:
        with torch_flags(**ALL):
            assert state() == {
                "matmul": "high", "newer": ("tf32", "tf32"), "anomaly": (True, True), "limit": 3,
                "deterministic": True, "cublas": ":4096:8",
                "dtype": torch.bfloat16,
            }  # fmt: skip
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert state() == before


def test_without_flags_nothing_changes() -> None:
    before = state()
    with torch_flags():
        assert state() == before


def test_an_existing_cublas_workspace_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with torch_flags(deterministic=True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_an_unsupported_default_dtype_is_rejected(name: str) -> None:
    before = state()
    with pytest.raises(ConfigError, match=f"default_dtype: expected one of float32.* got '{name}'"):
        with torch_flags(matmul_precision="high", default_dtype=name):
            pass
    assert state() == before


@pytest.fixture
def newer_switch() -> Iterator[None]:
    """A program that uses torch's newer matmul precision flag."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("newer_switch")
def test_a_conflicting_fp32_precision_is_rejected_and_unchanged() -> None:
    with pytest.raises(ConfigError, match=r"matmul_precision = 'medium' conflicts .* \(tf32, \w+\)"):
        with torch_flags(matmul_precision="medium"):
            pass
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


# Warning by torch with the line of the forward call
@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
@pytest.mark.parametrize("outer", [False, True])
def test_an_anomaly_error_names_the_operation(outer: bool) -> None:
    x = torch.zeros(2, requires_grad=True)
    with torch_flags(detect_anomaly=outer):
        before = state()
        with pytest.raises(TrainingError, match="NaN in gradient 0 of SqrtBackward0"):
            with torch_flags(detect_anomaly=True):
                (x.sqrt() * 0).sum().backward()
        assert state() == before
    assert not torch.is_anomaly_enabled()


def test_other_errors_under_anomaly_detection_pass_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch_flags(detect_anomaly=True):
        torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.mark.parametrize(
    ("backends", "names"),
    [
        ("flash", ("flash",)),
        (SDPBackend.CUDNN_ATTENTION, ("cudnn",)),
        (["math", SDPBackend.EFFICIENT_ATTENTION], ("math", "efficient")),
    ],
)
def test_backends_accept_names_members_and_lists(backends: Any, names: tuple[str, ...]) -> None:
    assert sdpa_backend_names(backends) == names


def allowed() -> set[str]:
    enabled = {
        "math": torch.backends.cuda.math_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
    }
    return {name for name, on in enabled.items() if on}


def test_only_the_given_backends_are_enabled_within_the_context() -> None:
    before = allowed()
    with sdpa_backends("math"):
        assert allowed() == {"math"}
    with sdpa_backends(["flash", "math"]):
        assert allowed() == {"math", "flash"}
    with sdpa_backends(None):
        assert allowed() == before
    assert allowed() == before


def test_set_priority_uses_the_given_order() -> None:
    before = torch._C._get_sdp_priority_order()
    with sdpa_backends(["efficient", "math"], set_priority=True):
        order = torch._C._get_sdp_priority_order()
    assert order[:2] == [int(SDPBackend.EFFICIENT_ATTENTION.value), int(SDPBackend.MATH.value)]
    assert torch._C._get_sdp_priority_order() == before


def test_all_backends_are_restored_after_an_error() -> None:
    before = allowed(), torch._C._get_sdp_priority_order()
    with pytest.raises(KeyError), sdpa_backends(["efficient", "math"], set_priority=True):
        raise KeyError
    assert (allowed(), torch._C._get_sdp_priority_order()) == before


def test_unsupported_attention_is_reported() -> None:
    before, x = allowed(), torch.ones(1, 2, 8, 16)
    with pytest.raises(PrecisionError, match="efficient, cudnn does not support .* add math"):
        with sdpa_backends(["efficient", "cudnn"]):
            nn.functional.scaled_dot_product_attention(x, x, x)  # on a CPU
    assert allowed() == before


@pytest.mark.gpu
def test_unsupported_attention_is_reported_on_a_gpu() -> None:
    x = torch.ones(1, 2, 8, 16, device="cuda")
    with (
        pytest.raises(PrecisionError, match="flash does not support this attention"),
        sdpa_backends("flash"),
    ):
        nn.functional.scaled_dot_product_attention(x, x, x)  # flash does not support fp32


def test_other_errors_within_sdpa_backends_pass_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), sdpa_backends("math"):
        torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.mark.parametrize(
    ("backends", "message"),
    [
        ("flas", r"sdpa_backend: expected one of math, flash, efficient, cudnn.* got 'flas': did you mean 'flash'\?"),
        (["math", "x"], "sdpa_backend: expected one of .* got 'x'"),
        ([], "expected at least one of"),
        (SDPBackend.OVERRIDEABLE, "expected one of math"),
    ],
)
def test_unknown_backends_are_rejected(backends: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sdpa_backends(backends)
