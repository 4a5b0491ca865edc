"""MLPs and head in fp8 with delayed scaling: gradients, scales, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from whimbrel.base.errors import PrecisionError
from whimbrel.distributed import apply_activation_checkpointing
from whimbrel.models import GPT, GPTConfig
from whimbrel.models import gpt as gpt_module
from whimbrel.ops.fp8 import HISTORY
from whimbrel.precision import finalize, prepare

SIZE = {"context_length": 32, "vocab_size": 250, "num_layers": 3, "embd_size": 64, "num_heads": 2}
SETTINGS = [{"residual_scale": "attention"}, {"activation": "gelu_tanh", "logit_softcap": 10.0, "tied_head": False}]


def make(**settings: Any) -> GPT:
    """A small model in fp8, whose norms and biases are not at their initial values."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(SIZE | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.zero_padding()
    model.set_delayed_fp8(enabled=True)
    return model


def batch(seed: int = 1, device: str = "cpu") -> tuple[Tensor, Tensor]:
    ids = torch.randint(250, (2, 4, 32), generator=torch.Generator().manual_seed(seed)).to(device)
    ids[1, 0, 5] = -100
    return ids[0], ids[1]


def loss_and_gradients(model: GPT, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    device = next(model.parameters()).device.type
    inputs, targets = batch(device=device)
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        loss = model(inputs, targets=targets).loss
    assert loss is not None
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), dict(zip([name for name, _ in model.named_parameters()], gradients, strict=True))


def check_close(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within what rounding explains: the relative error of e5m2 is 0.05 (root mean square), that of e4m3 0.026.

    A gradient passes through up to 7 casts to e5m2, one in the head and two per block, with independent errors:
    0.05 * sqrt(7) = 0.13. Activations and weights add to that.
    """
    for name, g in expected.items():
        error = float((gradients[name] - g).norm() / g.norm())
        cosine = float(torch.nn.functional.cosine_similarity(gradients[name].flatten(), g.flatten(), dim=0))
        assert error < 0.2, (name, error)
        assert cosine > 0.98, (name, cosine)
        assert gradients[name].isfinite().all()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks with the references of the kernels, on a CPU."""
    monkeypatch.setattr(gpt_module, "can_fuse", lambda *_: True)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_are_close_to_those_in_fp32(settings: dict[str, Any], dtype: torch.dtype | None) -> None:
    model = make(**settings)
    model.eval()
    expected_loss, expected = loss_and_gradients(model)
    model.train()
    for _ in range(HISTORY + 2):  # scales of the tensors themselves at first, then those of the casts before
        loss, gradients = loss_and_gradients(model, dtype)
    assert model.fp8 is not None
    assert not model.fp8.uses_current_scales
    torch.testing.assert_close(loss, expected_loss, rtol=0.01, atol=0)
    check_close(gradients, expected)
    assert not any(torch.equal(gradients[name], g) for name, g in expected.items() if "weight" in name)


@pytest.mark.usefixtures("fused")
def test_evaluation_is_not_in_fp8() -> None:
    model, (inputs, targets) = make(), batch()
    assert model.fp8 is not None
    with torch.no_grad():
        in_training = model(inputs, targets=targets).loss
    model.eval()
    assert torch.equal(model(inputs, targets=targets).loss, in_training)
    assert model.fp8.micro_batches == 0


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("factor", [0.0, 1e-12, 1e4])
def test_extreme_weights_do_not_produce_nan(factor: float) -> None:
    model = make()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.c_fc.weight.mul_(factor)
            block.mlp.c_proj.weight.mul_(factor)
    for _ in range(HISTORY + 2):
        loss, gradients = loss_and_gradients(model)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients.values())


@pytest.mark.usefixtures("fused")
def test_a_sudden_increase_saturates() -> None:
    """The norms grow tenfold after the history was filled: values saturate, and later scales fit again."""
    model = make()
    for _ in range(HISTORY + 1):
        loss_and_gradients(model)
    with torch.no_grad():
        for block in model.blocks:
            block.ln_2.weight.mul_(10)
    model.eval()
    _, expected = loss_and_gradients(model)
    model.train()
    _, saturated = loss_and_gradients(model)
    assert all(g.isfinite().all() for g in saturated.values())
    for _ in range(2 * len(list(model.blocks)) + 1):  # a tensor of saturated inputs is too small
        _, adapted = loss_and_gradients(model)
    name = "transformer.h.0.mlp.c_fc.weight"

    def error(gradients: dict[str, Tensor]) -> float:
        return float((gradients[name] - expected[name]).norm() / expected[name].norm())

    assert error(adapted) < 0.2 < 0.5 < error(saturated)


@pytest.mark.usefixtures("fused")
def test_a_batch_of_an_odd_number_of_tokens_is_refused() -> None:
    model, (inputs, targets) = make(), batch()
    with pytest.raises(PrecisionError, match=r"multiple of 16 tokens.* got 124: change"):
        model(inputs[:, :31], targets=targets[:, :31])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"norm": "rms"}, "GPT-2, got norm = rms"),
        ({"embd_size": 72}, "multiples of 16, got embd_size = 72"),
        ({"activation": "silu", "gated_mlp": True}, "GPT-2, got activation = silu"),
    ],
)
def test_unsupported_models_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(PrecisionError, match=f"fp8_recipe = delayed: expected .*{expected}: use"):
        make(**settings)


def test_training_that_cannot_be_fused_is_refused() -> None:
    model, (inputs, targets) = make(), batch()
    with pytest.raises(PrecisionError, match="delayed: expected an NVIDIA GPU, got cpu"):
        model(inputs, targets=targets)
    model.fuses_blocks = False
    with pytest.raises(PrecisionError, match="fp8_recipe = delayed"):
        model(inputs, targets=targets)


def test_prepare_needs_a_gpu() -> None:
    model = GPT(GPTConfig(**SIZE))
    with pytest.raises(PrecisionError, match="fp8_recipe = delayed is not supported on cpu"):
        prepare(model, "delayed", precision="bf16")
    with pytest.raises(PrecisionError, match="expected a GPT, got Sequential"):
        prepare(torch.nn.Sequential(torch.nn.Linear(16, 16)), "delayed", precision="bf16")


def test_prepare_and_finalize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model = GPT(GPTConfig(**SIZE))
    with pytest.raises(PrecisionError, match="expected bf16 .* got fp32"):
        prepare(model, "delayed", device="cuda")
    with pytest.raises(PrecisionError, match="fp8_dim_alignment = 32 has no effect"):
        prepare(model, "delayed", device="cuda", precision="bf16", fp8_dim_alignment=32)
    selection = prepare(model, "delayed", device="cuda", precision="bf16")
    assert len(selection.selected) == 2 * 3 + 1
    assert all("attn" in name for name in selection.skipped)
    assert model.fp8 is not None
    assert finalize(model, "delayed").fp8 is None


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS)
def test_on_a_gpu(settings: dict[str, Any]) -> None:
    model = make(**settings, embd_size=192, num_heads=3).cuda()
    model.eval()
    expected_loss, expected = loss_and_gradients(model)
    model.train()
    for _ in range(HISTORY + 2):
        loss, gradients = loss_and_gradients(model, torch.bfloat16)
        torch.testing.assert_close(loss, expected_loss, rtol=0.01, atol=0)
        check_close(gradients, expected)


@pytest.mark.gpu
def test_activation_checkpointing_is_refused() -> None:
    model = make().cuda()
    apply_activation_checkpointing(model, "full")
    with pytest.raises(PrecisionError, match="expected plain blocks"):
        loss_and_gradients(model, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_short_run_has_the_loss_of_bf16(accumulation: int) -> None:
    """20 steps of a model of a useful width; delayed scales from step 17 or 6 on."""
    losses = {}
    for enabled in (False, True):
        model = make(embd_size=768, num_heads=12, num_layers=4).cuda()
        model.set_delayed_fp8(enabled=enabled)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        losses[enabled] = []
        for step in range(20):
            total = 0.0
            for part in range(accumulation):
                inputs, targets = batch(step * accumulation + part, "cuda")
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(inputs, targets=inputs.roll(-1, 1).where(targets >= 0, -100)).loss
                assert loss is not None
                (loss / accumulation).backward()
                total += loss.item() / accumulation
            optimizer.step()
            optimizer.zero_grad()
            losses[enabled].append(total)
    assert losses[True][-1] < losses[True][0]
    torch.testing.assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=0.01, atol=0)
