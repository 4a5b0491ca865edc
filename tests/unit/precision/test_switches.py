"""Torch's switches hold inside and are as before afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from whimbrel.base.errors import ConfigError, TrainingError
from whimbrel.precision import torch_switches


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


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")  # torch says so whenever it is
@pytest.mark.parametrize("fails", [False, True])
def test_all_hold_inside_and_none_afterwards(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    try:
        with torch_switches(**ALL):
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


def test_nothing_given_changes_nothing() -> None:
    before = state()
    with torch_switches():
        assert state() == before


def test_a_workspace_of_ones_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with torch_switches(deterministic=True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_dtype_that_no_model_is_built_in_is_refused() -> None:
    before = state()
    with pytest.raises(ConfigError, match="default_dtype = 'int8' is not one of float32"):
        with torch_switches(matmul_precision="high", default_dtype="int8"):
            pass
    assert state() == before


@pytest.fixture
def newer_switch() -> Iterator[None]:
    """A program that uses torch's newer switch for the precision of products."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("newer_switch")
def test_a_precision_of_products_that_was_set_the_other_way_is_left_alone() -> None:
    with pytest.raises(
        ConfigError, match=r"matmul_precision = 'medium' cannot be set beside .* \(tf32, \w+\): leave one"
    ):
        with torch_switches(matmul_precision="medium"):
            pass
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")  # torch's, with the line that called it
@pytest.mark.parametrize("outer", [False, True])
def test_an_anomaly_names_its_operation(outer: bool) -> None:
    x = torch.zeros(2, requires_grad=True)
    with torch_switches(detect_anomaly=outer):
        before = state()
        with pytest.raises(
            TrainingError, match=r"found NaN in gradient 0 that SqrtBackward0 gives: .* torch's warning"
        ):
            with torch_switches(detect_anomaly=True):
                (x.sqrt() * 0).sum().backward()
        assert state() == before
    assert not torch.is_anomaly_enabled()


def test_other_errors_under_anomaly_detection_are_their_own() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch_switches(detect_anomaly=True):
        torch.ones(2, 3) @ torch.ones(2, 3)
