"""Torch's switches hold inside and are as before afterwards."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch._dynamo

from whimbrel.base.errors import ConfigError
from whimbrel.precision import torch_switches


def state() -> dict[str, Any]:
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
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
                "matmul": "high", "anomaly": True, "limit": 3, "deterministic": True, "cublas": ":4096:8",
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
