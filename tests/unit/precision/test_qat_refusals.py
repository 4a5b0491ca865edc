"""What QAT and the other recipes refuse to be asked for."""

from __future__ import annotations

import pytest
import torch

from whimbrel.base.errors import PrecisionError
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import prepare, recipe_names

pytest.importorskip("torchao", reason="needs the package 'torchao': pip install 'whimbrel[lowbit]'")


def model() -> GPT:
    return GPT(GPTConfig(vocab_size=64, context_length=16, num_layers=1, embd_size=128, num_heads=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", recipe_names("qat"))
def test_weights_of_16_bits_are_not_rounded_in_training(name: str, dtype: torch.dtype) -> None:
    """What they would be rounded to in training is not what they would be stored as."""
    made = model().to(dtype)
    with pytest.raises(PrecisionError, match=rf"{name} rounds weights of fp32, and those of .*c_attn are of {dtype}"):
        prepare(made, name)
    assert all(type(module).__module__.startswith(("torch.nn", "whimbrel")) for module in made.modules())


@pytest.mark.parametrize("name", [*recipe_names("qat"), "int8", "bf16"])
def test_an_alignment_is_for_fp8_alone(name: str) -> None:
    with pytest.raises(PrecisionError, match="alignment = 32 is for fp8 recipes, not for"):
        prepare(model(), name, alignment=32)
