"""The fused output layer and loss against the reference."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.support.devices import TRITON_DEVICES
from torch import Tensor

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.ops import cross_entropy, linear_cross_entropy, linear_cross_entropy_reference

N, C, V, PADDED = 300, 32, 1000, 1024


def case(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, C, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(PADDED, C, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::7] = -100
    return hidden, weight, targets.to(device)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("rows", [1, 64, 130, 1000])
def test_loss_and_gradients_match_the_reference(
    softcap: float | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", rows * PADDED * 4)
    hidden, weight, targets = case()
    expected = linear_cross_entropy_reference(hidden, weight, targets, vocab_size=V, softcap=softcap)
    expected_grads = torch.autograd.grad(expected / 3, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets, vocab_size=V, softcap=softcap)
    grads = torch.autograd.grad(loss / 3, (hidden, weight))
    torch.testing.assert_close(loss, expected)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert grads[1][V:].abs().max() == 0


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("rows", [64, 1000])
def test_replaced_rows_have_the_gradients_of_rows_of_the_weight(
    softcap: float | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", rows * PADDED * 4)
    hidden, weight, targets = case()
    targets[:20] = 7
    indices, frozen = torch.tensor([7, 999, 0]), weight.detach().clone()
    values = weight.detach()[indices].requires_grad_()
    frozen[indices] = 100.0  # must not be used
    options = {"vocab_size": V, "softcap": softcap}
    expected = linear_cross_entropy_reference(hidden, weight, targets, **options)
    expected_grads = torch.autograd.grad(expected / 3, (hidden, weight))
    loss = linear_cross_entropy(hidden, frozen, targets, replaced_rows=(indices, values), **options)
    grads = torch.autograd.grad(loss / 3, (hidden, values))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads[0], expected_grads[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads[1], expected_grads[1][indices], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden, frozen, targets, replaced_rows=(indices, values), **options)
    torch.testing.assert_close(evaluated, expected)
    with pytest.raises(ConfigError, match="expected a frozen weight"):
        linear_cross_entropy(hidden, weight, targets, replaced_rows=(indices, values), **options)


def test_fp64_matmuls_stay_fp64() -> None:
    hidden, weight, targets = case(dtype=torch.float64)
    hidden, targets = hidden[:5].detach().requires_grad_(), targets[:5]

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, targets, vocab_size=V, softcap=3.0)

    gh, gw = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    reference = linear_cross_entropy_reference(hidden, weight, targets, vocab_size=V, softcap=3.0)
    for a, b in zip((gh, gw), torch.autograd.grad(reference, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_all_logits_are_never_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 64 * PADDED * 4)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight, targets = case()
    with Watch():
        linear_cross_entropy(hidden, weight, targets, vocab_size=V).backward()
    assert largest <= 64 * PADDED < N * PADDED


def test_without_gradients_nothing_is_saved() -> None:
    hidden, weight, targets = case()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, vocab_size=V)
    assert not loss.requires_grad
    frozen = linear_cross_entropy(hidden, weight.detach(), targets, vocab_size=V)
    (gradient,) = torch.autograd.grad(frozen, hidden)
    assert gradient.shape == hidden.shape


def test_all_targets_ignored_gives_zero() -> None:
    hidden, weight, targets = case()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100), vocab_size=V)
    assert loss.item() == 0
    assert all(g.abs().max() == 0 for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("target", [V, PADDED - 1, PADDED, -1])
def test_targets_outside_the_vocabulary_are_rejected(target: int) -> None:
    hidden, weight, targets = case()
    targets[3] = target
    with pytest.raises(DataError, match=f"expected target ids from 0 to vocab_size - 1 = {V - 1}, .* got {target}"):
        linear_cross_entropy(hidden, weight, targets, vocab_size=V)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # warning by dynamo
def test_the_compiled_loss_rejects_targets_outside_the_vocabulary() -> None:
    """Without a graph break."""
    hidden, weight, targets = case()
    loss = torch.compile(
        lambda h, w, t: linear_cross_entropy(h, w, t, vocab_size=V), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(
        loss(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets, vocab_size=V)
    )
    targets[3] = V
    with pytest.raises(RuntimeError, match=f"outside the vocabulary of {V} tokens"):
        loss(hidden, weight, targets)


@pytest.mark.gpu
def test_targets_outside_the_vocabulary_fail_on_the_device() -> None:
    """In a separate process, since a device-side assertion destroys the CUDA context."""
    code = (
        "import torch; from whimbrel.ops import linear_cross_entropy as f\n"
        "h, w = torch.ones(8, 4, device='cuda'), torch.ones(16, 4, device='cuda')\n"
        "t = torch.full((8,), 12, device='cuda')\n"
        "torch.cuda.set_sync_debug_mode('error')\n"
        "f(h, w, t - 1, vocab_size=12), print('inside', flush=True)\n"
        "f(h, w, t, vocab_size=12)\n"
        "torch.cuda.set_sync_debug_mode('default'); torch.cuda.synchronize(); print('outside')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "inside\n"
    assert done.returncode != 0
    assert "device-side assert" in done.stderr


def test_weight_gradients_are_fp32_under_autocast() -> None:
    hidden, weight, targets = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, vocab_size=V)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    expected = linear_cross_entropy_reference(hidden, weight, targets, vocab_size=V)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_matches_the_reference(softcap: float | None, dtype: torch.dtype) -> None:
    hidden, weight, targets = case("cuda", dtype)
    reference = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = linear_cross_entropy_reference(*reference, targets, vocab_size=V, softcap=softcap)
    loss = linear_cross_entropy(hidden, weight, targets, vocab_size=V, softcap=softcap)
    rtol = 1e-3 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(loss, expected.float(), rtol=rtol, atol=0)
    expected_grads = torch.autograd.grad(expected, reference)
    for a, b in zip(torch.autograd.grad(loss, (hidden, weight)), expected_grads, strict=True):
        assert (a.double() - b).norm() / b.norm() < (2e-3 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_kernel_replaces_logits_by_the_gradient_of_the_reference(device: str, softcap: float | None) -> None:
    from whimbrel.ops import cross_entropy_triton

    hidden, weight, targets = case(device)
    found = (hidden @ weight.T).detach()
    expected = found.cpu().clone()
    arguments = V, softcap, -100, True
    losses = cross_entropy.loss_and_gradient_(expected, targets.cpu(), *arguments)
    strided = torch.stack([targets, targets], dim=1)[:, 0]
    found_losses = cross_entropy_triton.loss_and_gradient_(found, strided, *arguments)
    torch.testing.assert_close(found_losses.cpu(), losses, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-4)
