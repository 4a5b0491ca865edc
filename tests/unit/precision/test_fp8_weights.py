"""Weights of fp8, for which a GPU must have products: refused where it has none, emulated on a CPU."""

from __future__ import annotations

import pytest
import torch

from whimbrel.base.errors import PrecisionError
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import QuantizedWeight, finalize, load_into
from whimbrel.precision.recipes import _tell_of_emulation


def model() -> GPT:
    return GPT(GPTConfig(vocab_size=64, context_length=16, num_layers=1, embd_size=64, num_heads=2))


def test_weights_of_fp8_ask_for_a_gpu_that_has_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with torch.device("meta"):
        empty = model()
    with pytest.raises(PrecisionError, match=r"weights = fp8 needs .* 8.9, and this one has 8.0: use weights = int8"):
        load_into(empty, lambda _: None, "fp8", device="cuda")
    assert not any(isinstance(parameter, QuantizedWeight) for parameter in empty.parameters())
    _tell_of_emulation.cache_clear()
    with caplog.at_level("WARNING"):
        finalize(model(), "fp8")
        finalize(model(), "fp8")
    assert [record.getMessage() for record in caplog.records] == [
        "weights = fp8 is emulated on a CPU: the numbers are those of fp8, the speed is not"
    ]
