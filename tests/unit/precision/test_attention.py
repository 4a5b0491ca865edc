"""Attention kernels by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from whimbrel.base.errors import ConfigError
from whimbrel.precision import backend_names, sdpa_backends


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("flash", ("flash",)),
        (SDPBackend.CUDNN_ATTENTION, ("cudnn",)),
        (["math", SDPBackend.EFFICIENT_ATTENTION], ("math", "efficient")),
    ],
)
def test_names_and_members_one_or_several(asked: Any, names: tuple[str, ...]) -> None:
    assert backend_names(asked) == names


def allowed() -> set[str]:
    enabled = {
        "math": torch.backends.cuda.math_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
    }
    return {name for name, on in enabled.items() if on}


def test_only_the_asked_kernels_may_run_inside() -> None:
    before = allowed()
    with sdpa_backends("math"):
        assert allowed() == {"math"}
    with sdpa_backends(["flash", "math"]):
        assert allowed() == {"math", "flash"}
    with sdpa_backends(None):
        assert allowed() == before
    assert allowed() == before


def test_priority_is_the_order_given() -> None:
    with sdpa_backends(["efficient", "math"], set_priority=True):
        order = torch._C._get_sdp_priority_order()
    assert order[:2] == [int(SDPBackend.EFFICIENT_ATTENTION.value), int(SDPBackend.MATH.value)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("flas", r"sdpa_backend = 'flas' is not one of math, flash, efficient, cudnn: did you mean 'flash'\?"),
        (["math", "x"], "sdpa_backend = 'x' is not one of"),
        ([], "sdpa_backend is empty"),
        (SDPBackend.OVERRIDEABLE, "is not one of math"),
    ],
)
def test_bad_names_are_refused(asked: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sdpa_backends(asked)
