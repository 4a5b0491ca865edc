"""Hand-written blocks: equal to the model's own blocks, and used only where they apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from whimbrel.distributed import apply_activation_checkpointing
from whimbrel.models import GPT, GPTConfig, preset
from whimbrel.models import gpt as gpt_module
from whimbrel.models.fused_blocks import is_unmodified, unsupported_setting
from whimbrel.models.lora import LoraConfig, apply_lora

SMALL = {"context_length": 32, "vocab_size": 120, "num_layers": 3, "embd_size": 48, "num_heads": 3}


def make(**settings: Any) -> GPT:
    """A small model whose norms and biases are not at their initial values."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(SMALL | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.zero_padding()
    return model


def batch(device: str = "cpu") -> tuple[Tensor, Tensor]:
    ids = torch.randint(120, (2, 4, 32), generator=torch.Generator().manual_seed(1)).to(device)
    ids[1, 0, 5] = -100
    return ids[0], ids[1]


def loss_and_gradients(model: GPT, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    device = next(model.parameters()).device.type
    inputs, targets = batch(device)
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        loss = model(inputs, targets=targets).loss
    assert loss is not None
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), dict(zip(names, gradients, strict=True))


def relative_errors(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> list[float]:
    return [float((gradients[name] - g).norm() / g.norm()) for name, g in expected.items()]


@pytest.mark.parametrize(
    "settings",
    [{"activation": "gelu", "residual_scale": "attention"}, {"activation": "gelu_tanh"}],
    ids=["baseline", "gpt2"],
)
def test_equals_the_blocks_of_the_model(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(**settings)
    loss, gradients = loss_and_gradients(model)
    monkeypatch.setattr(gpt_module, "can_fuse", lambda *_: True)
    fused_loss, fused_gradients = loss_and_gradients(model)
    torch.testing.assert_close(fused_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_attends_within_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (inputs, _) = make(), batch()
    documents = (torch.arange(32) // 10).expand(4, 32)
    expected = model.hidden_states(inputs, documents=documents)
    monkeypatch.setattr(gpt_module, "can_fuse", lambda *_: True)
    torch.testing.assert_close(model.hidden_states(inputs, documents=documents), expected, rtol=1e-4, atol=1e-5)


def test_not_used_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_module, "fused_blocks", None)
    loss_and_gradients(make(), torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"norm": "rms"}, "norm = rms"),
        ({"position": "rope"}, "position = rope"),
        ({"num_kv_heads": 1}, "num_kv_heads = 1"),
        ({"activation": "silu", "gated_mlp": True}, "activation = silu"),
        ({"bias": "none"}, "bias = none"),
        ({"value_embeddings": 1}, "value_embeddings = 1"),
    ],
)
def test_unsupported_settings(settings: dict[str, Any], expected: str) -> None:
    assert unsupported_setting(GPTConfig(**(SMALL | settings))) == expected


@pytest.mark.parametrize("name", ["gpt2", "gpt2-baseline"])
def test_supported_presets(name: str) -> None:
    assert unsupported_setting(preset(name)) is None


def add_hook(model: GPT) -> None:
    next(model.blocks).mlp.register_forward_hook(lambda *_: None)


def freeze(model: GPT) -> None:
    next(model.blocks).attn.c_attn.bias.requires_grad_(requires_grad=False)


def checkpoint(model: GPT) -> None:
    apply_activation_checkpointing(model, "full")


def add_adapters(model: GPT) -> None:
    apply_lora(model, LoraConfig(rank=2))


def replace_forward(model: GPT) -> None:
    mlp: nn.Module = next(model.blocks).mlp
    mlp.forward = lambda x: x  # type: ignore[method-assign]


@pytest.mark.parametrize("modify", [add_hook, freeze, checkpoint, add_adapters, replace_forward])
def test_modified_blocks_are_not_replaced(modify: Callable[[GPT], None]) -> None:
    model = make()
    assert is_unmodified(model.blocks)
    modify(model)
    assert not is_unmodified(model.blocks)


@pytest.mark.gpu
def test_gradients_do_not_depend_on_the_attention_kernel() -> None:
    """The math kernel returns the gradient of k with other strides."""
    model = make(embd_size=192).cuda()
    _, expected = loss_and_gradients(model)
    with sdpa_kernel(SDPBackend.MATH):
        _, fused = loss_and_gradients(model, torch.bfloat16)
    assert max(relative_errors(fused, expected)) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_on_a_gpu(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accurate as autocast: both round activations and gradients to bf16, in different places."""
    model = make(embd_size=192, activation=activation, residual_scale="attention").cuda()
    loss, gradients = loss_and_gradients(model)
    fused_loss, fused_gradients = loss_and_gradients(model, torch.bfloat16)
    monkeypatch.setattr(gpt_module, "can_fuse", lambda *_: False)
    plain_loss, plain_gradients = loss_and_gradients(model, torch.bfloat16)
    assert not all(torch.equal(fused_gradients[name], gradient) for name, gradient in plain_gradients.items())
    assert abs(fused_loss - loss) <= abs(plain_loss - loss) + 2e-3
    assert max(relative_errors(fused_gradients, gradients)) <= 2 * max(relative_errors(plain_gradients, gradients))
