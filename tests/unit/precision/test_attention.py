"""Attention kernels by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from whimbrel.base.errors import ConfigError, PrecisionError
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
    before = torch._C._get_sdp_priority_order()
    with sdpa_backends(["efficient", "math"], set_priority=True):
        order = torch._C._get_sdp_priority_order()
    assert order[:2] == [int(SDPBackend.EFFICIENT_ATTENTION.value), int(SDPBackend.MATH.value)]
    assert torch._C._get_sdp_priority_order() == before


def test_all_kernels_are_back_after_an_error() -> None:
    before = allowed(), torch._C._get_sdp_priority_order()
    with pytest.raises(KeyError), sdpa_backends(["efficient", "math"], set_priority=True):
        raise KeyError
    assert (allowed(), torch._C._get_sdp_priority_order()) == before


def test_attention_that_no_asked_kernel_takes_is_named() -> None:
    before, x = allowed(), torch.ones(1, 2, 8, 16)
    with pytest.raises(PrecisionError, match="sdpa_backend = efficient, cudnn has no kernel .*: add math, which takes"):
        with sdpa_backends(["efficient", "cudnn"]):
            nn.functional.scaled_dot_product_attention(x, x, x)  # on a CPU
    assert allowed() == before


@pytest.mark.gpu
def test_attention_that_no_asked_kernel_takes_is_named_on_a_gpu() -> None:
    x = torch.ones(1, 2, 8, 16, device="cuda")
    with (
        pytest.raises(PrecisionError, match="sdpa_backend = flash has no kernel for this attention"),
        sdpa_backends("flash"),
    ):
        nn.functional.scaled_dot_product_attention(x, x, x)  # fp32, of which flash has none


def test_other_errors_of_torch_are_its_own() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), sdpa_backends("math"):
        torch.ones(2, 3) @ torch.ones(2, 3)


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
