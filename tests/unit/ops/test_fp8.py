"""fp8 with delayed scaling: scales, saturation, and the kernels compared with their references."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tests.support.devices import TRITON_DEVICES
from torch import Tensor

from whimbrel.base.errors import CheckpointError
from whimbrel.ops import fp8, linear_cross_entropy_reference
from whimbrel.ops.cross_entropy_fp8 import linear_cross_entropy_fp8
from whimbrel.ops.fp8 import AMAX_LANES, E4M3, E5M2, HISTORY, DelayedScaling, Fp8, cast_weights, fp8_linear

REFERENCE = fp8._Reference
ROWS, WIDTH = 144, 272
"""Not multiples of a tile, but of 16."""


def random(*shape: int, seed: int = 0) -> Tensor:
    """Values over many binades."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(2 * torch.randn(*shape, generator=generator))


def lanes(device: str = "cpu") -> Tensor:
    return torch.zeros(AMAX_LANES, device=device)


def micro_batch(scaling: DelayedScaling, *tensors: Tensor) -> list[Tensor]:
    """Cast and restore tensors."""
    scaling.advance(tensors[0].device)
    restored = []
    for index, x in enumerate(tensors):
        dtype = scaling._dtypes[index]
        (codes, transposed), inverse = scaling.cast(
            index, lambda scale, lanes, x=x, dtype=dtype: REFERENCE.cast(x, dtype, scale, lanes)
        )
        assert torch.equal(codes.view(torch.uint8).t(), transposed.view(torch.uint8))
        restored.append(codes.float() * inverse)
    return restored


def relative_error(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).double().norm() / expected.double().norm())


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_scales_fit_any_magnitude(size: float) -> None:
    scaling = DelayedScaling([E4M3, E5M2])
    x = torch.randn(64, 64) * size
    for _ in range(HISTORY + 2):
        a, b = micro_batch(scaling, x, x)
        assert relative_error(a, x) < 0.035
        assert relative_error(b, x) < 0.07
    assert not scaling.uses_current_scales


def test_scales_depend_on_earlier_micro_batches() -> None:
    scaling = DelayedScaling([E4M3])
    x = torch.full((16, 16), 3.0)
    for _ in range(HISTORY + 1):
        micro_batch(scaling, x)
    (saturated,) = micro_batch(scaling, 10 * x)
    assert torch.equal(saturated, torch.full_like(x, 448 / 64))  # 3 is scaled by 64, to less than 256
    for _ in range(HISTORY):
        (fits,) = micro_batch(scaling, 10 * x)
        assert torch.equal(fits, 10 * x)
    (zeros,) = micro_batch(scaling, 0 * x)
    (after,) = micro_batch(scaling, x)
    assert not zeros.any()
    assert torch.equal(after, x)


def test_a_tensor_that_is_not_finite_does_not_change_later_scales() -> None:
    scaling = DelayedScaling([E4M3])
    x = torch.randn(32, 32)
    for _ in range(HISTORY + 1):
        (expected,) = micro_batch(scaling, x)
    for value in (torch.inf, torch.nan):
        (bad,) = micro_batch(scaling, x.index_fill(0, torch.tensor(3), value))
        assert bad[3].isnan().all() if value != value else bad[3].isfinite().all()
        (after,) = micro_batch(scaling, x)
        assert torch.equal(after, expected)


def test_state_is_restored_exactly() -> None:
    scaling, restored = DelayedScaling([E4M3, E5M2]), DelayedScaling([E4M3, E5M2])
    for step in range(HISTORY + 3):
        micro_batch(scaling, random(16, 16, seed=step), random(16, 16, seed=step + 100))
    restored.load_state_dict(scaling.state_dict())
    for step in range(3):
        x = random(16, 16, seed=step) * 100.0**step
        assert all(map(torch.equal, micro_batch(scaling, x, x), micro_batch(restored, x, x)))
    with pytest.raises(CheckpointError, match="fp8 scales: expected the history of 1 tensors"):
        DelayedScaling([E4M3]).load_state_dict(scaling.state_dict())


def test_weights_of_zeros_and_of_large_values() -> None:
    weights = [torch.zeros(16, 32), torch.full((32, 16), 1e30), random(16, 16)]
    for weight, (cast, transposed) in zip(weights, cast_weights(weights), strict=True):
        restored = cast.codes.float() * cast.inverse_scale
        torch.testing.assert_close(restored, weight, rtol=0.07, atol=float(weight.abs().max()) * 2**-17)
        assert torch.equal(transposed.codes.float().t(), cast.codes.float())


def test_scales_are_aligned() -> None:
    """cuBLASLt does not support scales at other addresses."""
    scaling, x = DelayedScaling([E4M3] * 3), random(16, 16)
    inverse_scales = [fp8.inverse_scale for pair in cast_weights([x] * 3) for fp8 in pair]
    for _ in range(HISTORY + 2):
        scaling.advance(x.device)
        inverse_scales += [
            scaling.cast(index, lambda scale, lanes: REFERENCE.cast(x, E4M3, scale, lanes))[1] for index in range(3)
        ]
    assert not any(scale.data_ptr() % 16 for scale in inverse_scales)


@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize("tokens", [48, 1056])
def test_head_and_loss(tokens: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk, and several with a remainder."""
    monkeypatch.setattr("whimbrel.ops.cross_entropy.CHUNK_BYTES", {"cpu": 256 * 256 * 4})
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 64, generator=generator).requires_grad_()
    weight = (0.1 * torch.randn(256, 64, generator=generator)).requires_grad_()
    targets = torch.randint(250, (tokens,), generator=generator).index_fill(0, torch.tensor([3, 20]), -100)
    settings: dict[str, Any] = {"vocab_size": 250, "softcap": softcap}
    expected = linear_cross_entropy_reference(hidden, weight, targets, **settings)
    expected_gradients = torch.autograd.grad(expected / tokens, (hidden, weight))
    scaling = DelayedScaling([E4M3])
    for _ in range(HISTORY + 1):
        scaling.advance(hidden.device)
        loss = linear_cross_entropy_fp8(hidden, weight, targets, scaling, 0, **settings)
        gradients = torch.autograd.grad(loss / tokens, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=0.005, atol=0)
    for gradient, g in zip(gradients, expected_gradients, strict=True):
        assert relative_error(gradient, g) < 0.1  # e5m2 0.05, e4m3 0.026 twice
    assert not gradients[1][250:].any()
    assert not gradients[0][3].any()


# Kernels. A cast to fp8 in Triton's interpreter loses the carry into the exponent (7.9 becomes 4 instead of 8) and NaN,
# and rounds ties differently.


@pytest.fixture
def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the kernels; in the interpreter, without inline assembly."""
    module = importlib.import_module("whimbrel.ops.fp8_triton")
    if device == "cpu":
        encode, reciprocal = without_assembly()
        monkeypatch.setattr(module, "_encode", encode)
        monkeypatch.setattr(importlib.import_module("whimbrel.ops.fused_block_triton"), "reciprocal", reciprocal)
    return module


def without_assembly() -> tuple[Any, Any]:
    """Kernel functions that cast and compute 1 / x."""
    globals()["tl"] = tl = importlib.import_module("triton.language")  # the interpreter looks for it
    jit = importlib.import_module("triton").jit

    def encode(x, scale, IS_E5M2):  # type: ignore[no-untyped-def]
        limit = 57344.0 if IS_E5M2 else 448.0
        x = tl.minimum(tl.maximum(x * scale, -limit), limit)
        return x.to(tl.float8e5 if IS_E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)

    def reciprocal(x):  # type: ignore[no-untyped-def]
        return 1.0 / x

    return jit(encode), jit(reciprocal)


def check_codes(codes: Tensor, expected: Tensor, *, rounded: float = 0.0) -> None:
    """Equal; a share `rounded` may differ, because the values before the cast differ in their last bit."""
    assert codes.dtype == expected.dtype
    a, b = codes.cpu().float(), expected.cpu().float()
    same = (a == b) | (a.isnan() & b.isnan())
    if not codes.is_cuda:
        same |= (2 * a - b).abs() <= 2.0**-9
        rounded = max(rounded, 0.05)
    step = 0.25 if codes.dtype == E5M2 else 0.125
    assert ((a - b).abs()[~same] <= step * b.abs()[~same] + 1e-2).all()
    assert (~same).float().mean() <= rounded


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (16, 16), (64, 128)])
def test_cast(kernels: Any, device: str, dtype: torch.dtype, source: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(*shape).to(source).to(device)
    x[0, :3] = torch.tensor([1e30, -1e30, 0.0])
    x[1, 1] = torch.inf
    if device == "cuda":
        x[2, 2] = torch.nan
    scale, amax = torch.tensor(16.0, device=device), lanes(device)
    codes, transposed = kernels.cast(x, dtype, scale, amax)
    expected, _ = REFERENCE.cast(x.cpu(), dtype, scale.cpu(), None)
    check_codes(codes, expected)
    assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())
    assert torch.equal(kernels.transpose(codes).view(torch.uint8), transposed.view(torch.uint8))
    assert amax.max() == torch.inf
    x[1, 1] = 1.0
    kernels.cast(x, dtype, scale, amax.zero_())
    assert amax.max() == x.float().nan_to_num(0).abs().max()


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (528, 64)])
def test_gelu(kernels: Any, device: str, tanh: bool, shape: tuple[int, int]) -> None:
    a, dg = (random(*shape, seed=seed).clamp(-8, 8).to(device) for seed in (0, 1))
    amax, expected_amax, scale = lanes(device), lanes(), torch.tensor(8.0, device=device)
    codes, transposed = kernels.gelu(a, tanh=tanh, scale=scale, lanes=amax)
    expected, _ = REFERENCE.gelu(a.cpu(), tanh=tanh, scale=scale.cpu(), lanes=expected_amax)
    check_codes(codes, expected, rounded=0.002)
    assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())
    torch.testing.assert_close(amax.max().cpu(), expected_amax.max())
    codes, transposed, sums = kernels.gelu_backward(dg, a, tanh=tanh, scale=scale, lanes=amax.zero_())
    arguments = dg.cpu(), a.cpu()
    expected, _, expected_sums = REFERENCE.gelu_backward(
        *arguments, tanh=tanh, scale=scale.cpu(), lanes=expected_amax.zero_()
    )
    check_codes(codes, expected, rounded=0.05)  # near zero, the derivative is a difference of similar numbers
    assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())
    torch.testing.assert_close(sums.cpu(), expected_sums, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(amax.max().cpu(), expected_amax.max())


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_add_norm(kernels: Any, device: str) -> None:
    x, y = (random(3, 16, 48, seed=seed).to(device) for seed in (0, 1))
    y_bias, weight, bias = random(3, 48, seed=2).to(device)
    amax, expected_amax, scale = lanes(device), lanes(), torch.tensor(4.0, device=device)
    outputs = kernels.add_norm(x, y, y_bias, weight, bias, 1e-5, scale=scale, lanes=amax)
    arguments = (t.cpu() for t in (x, y, y_bias, weight, bias))
    expected = REFERENCE.add_norm(*arguments, 1e-5, scale=scale.cpu(), lanes=expected_amax)
    check_codes(outputs[0], expected[0], rounded=0.002)
    for own, other in zip(outputs[1:], expected[1:], strict=True):
        torch.testing.assert_close(own.cpu(), other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(amax.max().cpu(), expected_amax.max())


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("softcap", [None, 10.0])
def test_loss_kernels(kernels: Any, device: str, softcap: float | None) -> None:
    logits = random(80, 2064).clamp(-20, 20).to(device)
    targets = torch.randint(2050, (80,), device=device)
    targets[3] = -100
    settings = (2050, softcap, -100)
    losses, lse = kernels.row_losses(logits, targets, *settings)
    expected_losses, expected_lse = REFERENCE.row_losses(logits.cpu(), targets.cpu(), *settings)
    torch.testing.assert_close(losses.cpu(), expected_losses, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)
    buffers = [torch.zeros(2064, 96, device=d, dtype=torch.uint8).view(E5M2) for d in (device, "cpu")]
    codes = kernels.logits_gradient(logits, targets, lse, *settings, 2.0**15, buffers[0][:, 16:])
    arguments = logits.cpu(), targets.cpu(), lse.cpu()
    expected = REFERENCE.logits_gradient(*arguments, *settings, 2.0**15, buffers[1][:, 16:])
    check_codes(codes, expected, rounded=0.01)
    raw = buffers[0].view(torch.uint8)
    assert torch.equal(raw[:, 16:], codes.view(torch.uint8).t())
    assert not raw[:, :16].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_matmul(dtypes: tuple[torch.dtype, torch.dtype], out: torch.dtype) -> None:
    """Also with a bias."""
    a, b = (random(*shape, seed=i).cuda().clamp(-50, 50) for i, shape in enumerate([(96, 272), (48, 272)]))
    inverse = fp8._unbind_aligned(torch.tensor([1.0, 0.5, 0.25], device="cuda"))
    x, weight = Fp8(a.to(dtypes[0]), inverse[1]), Fp8(b.to(dtypes[1]), inverse[2])
    bias = torch.randn(48, device="cuda", dtype=torch.bfloat16) if out is torch.bfloat16 else None
    on_cpu = [Fp8(*(t.cpu() for t in pair)) for pair in (x, weight)]
    expected = fp8_linear(*on_cpu, None if bias is None else bias.cpu(), dtype=torch.float32)
    for fast in (False, True):
        product = fp8_linear(x, weight, bias, dtype=out, fast_accumulation=fast)
        assert product.dtype == out
        assert relative_error(product.cpu().float(), expected) < 5e-3
