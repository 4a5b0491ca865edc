"""Losses per token of the fused output layer against references that materialize all logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from whimbrel.base.errors import DataError
from whimbrel.ops import (
    cross_entropy,
    distillation_loss_reference,
    linear_distillation_loss,
    linear_log_probs,
    linear_log_probs_reference,
    linear_top_k,
)

N, C, V, PADDED = 150, 16, 200, 256


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 64 * PADDED * 4)


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets, and a gradient for each token."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, C, generator=generator).requires_grad_()
    weight = torch.randn(PADDED, C, generator=generator).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::7] = -100
    return hidden, weight, targets, torch.randn(N, generator=generator)


def teacher(k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """All log-probabilities of a teacher, and ids and log-probabilities of its most probable tokens."""
    logits = 2 * torch.randn(N, V, generator=torch.Generator().manual_seed(1))
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    top = log_probs.topk(k)
    return log_probs, top.indices.int(), top.values


def largest_tensor(function: Any) -> int:
    """The most elements of a tensor that `function` computes."""
    largest = 0

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = op(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else (out,):
                largest = max(largest, value.numel() if isinstance(value, Tensor) else 0)
            return out

    with Record():  # type: ignore[no-untyped-call]
        function()
    return largest


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_log_probs_and_gradients_match_the_reference(softcap: float | None) -> None:
    hidden, weight, targets, scale = case()
    expected = linear_log_probs_reference(hidden, weight, targets, vocab_size=V, softcap=softcap)
    found = linear_log_probs(hidden, weight, targets, vocab_size=V, softcap=softcap)
    assert (found[::7] == 0).all()
    torch.testing.assert_close(found, expected)
    expected_grads = torch.autograd.grad(expected @ scale, (hidden, weight))
    grads = torch.autograd.grad(found @ scale, (hidden, weight))
    torch.testing.assert_close(grads, expected_grads, atol=1e-4, rtol=1e-5)
    assert grads[1][V:].abs().max() == 0


def test_a_frozen_head_needs_no_second_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, scale = case()
    expected = torch.autograd.grad(linear_log_probs(hidden, weight, targets, vocab_size=V) @ scale, hidden)
    found = linear_log_probs(hidden, weight.detach(), targets, vocab_size=V) @ scale
    monkeypatch.setattr("whimbrel.ops.token_losses.loss_and_gradient_", None)
    torch.testing.assert_close(torch.autograd.grad(found, hidden), expected, atol=1e-5, rtol=1e-5)


def test_only_the_gradient_of_the_head_is_computed_for_frozen_layers() -> None:
    hidden, weight, targets, scale = case()
    expected = torch.autograd.grad(linear_log_probs(hidden, weight, targets, vocab_size=V) @ scale, weight)
    found = linear_log_probs(hidden.detach(), weight, targets, vocab_size=V) @ scale
    torch.testing.assert_close(torch.autograd.grad(found, weight), expected)


def test_autocast_computes_matmuls_in_its_dtype_and_losses_in_fp32() -> None:
    hidden, weight, targets, scale = case()
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_log_probs(hidden, weight, targets, vocab_size=V)
    logits = (hidden.detach().bfloat16() @ weight.detach().bfloat16().T)[:, :V].float()
    torch.testing.assert_close(found, -F.cross_entropy(logits, targets, reduction="none"))
    grads = torch.autograd.grad(found @ scale, (hidden, weight))
    reference = linear_log_probs_reference(hidden, weight, targets, vocab_size=V) @ scale
    for a, b in zip(grads, torch.autograd.grad(reference, (hidden, weight)), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()  # bf16 has 8 bits


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("k", [1, 20, V])
def test_distillation_loss_and_gradients_match_the_reference(k: int, temperature: float, softcap: float | None) -> None:
    hidden, weight, _, scale = case()
    _, ids, log_probs = teacher(k, temperature)
    logits = F.linear(hidden, weight)[:, :V]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = distillation_loss_reference(logits, ids, log_probs, temperature=temperature)
    found = linear_distillation_loss(
        hidden, weight, ids, log_probs, vocab_size=V, softcap=softcap, temperature=temperature
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    expected_grads = torch.autograd.grad(expected @ scale, (hidden, weight))
    grads = torch.autograd.grad(found @ scale, (hidden, weight))
    torch.testing.assert_close(grads, expected_grads, atol=2e-4, rtol=1e-4)
    assert grads[1][V:].abs().max() == 0


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_distillation_from_all_tokens_is_the_full_kl_divergence(temperature: float) -> None:
    hidden, weight, *_ = case()
    log_p, ids, log_probs = teacher(V, temperature)
    log_q = torch.log_softmax(F.linear(hidden, weight)[:, :V] / temperature, dim=-1)
    expected = temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    found = linear_distillation_loss(hidden, weight, ids, log_probs, vocab_size=V, temperature=temperature)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), hidden), torch.autograd.grad(expected.sum(), hidden), atol=1e-5, rtol=1e-5
    )


def test_distillation_from_the_top_k_is_a_lower_bound_that_rises_with_k() -> None:
    hidden, weight, *_ = case()
    losses = []
    for k in (1, 4, 50, V):
        _, ids, log_probs = teacher(k, 1.0)
        losses.append(linear_distillation_loss(hidden, weight, ids, log_probs, vocab_size=V))
    assert (losses[0] >= -1e-5).all()
    for fewer, more in itertools.pairwise(losses):
        assert (fewer <= more + 1e-5).all()


def test_distillation_from_a_teacher_that_is_certain() -> None:
    """Rounding leaves no probability for the rest, whose logarithm is then not defined."""
    hidden, weight, *_ = case()
    log_p = torch.log_softmax(50.0 * torch.randn(N, V, generator=torch.Generator().manual_seed(2)), dim=-1)
    top = log_p.topk(2)
    found = linear_distillation_loss(hidden, weight, top.indices, top.values, vocab_size=V)
    grads = torch.autograd.grad(found.sum(), (hidden, weight))
    assert all(value.isfinite().all() for value in (found, *grads))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_top_k_is_that_of_all_logits(softcap: float | None) -> None:
    hidden, weight, *_ = case()
    logits = F.linear(hidden, weight).detach()[:, :V]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = torch.log_softmax(logits / 2, dim=-1).topk(7)
    ids, log_probs = linear_top_k(hidden, weight, 7, vocab_size=V, softcap=softcap, temperature=2.0)
    assert torch.equal(ids.long(), expected.indices)
    assert (ids.dtype, log_probs.dtype) == (torch.int32, torch.float32)
    torch.testing.assert_close(log_probs, expected.values)


def test_all_logits_are_never_materialized() -> None:
    hidden, weight, targets, scale = case()
    _, ids, log_probs = teacher(3, 1.0)
    for function in (
        lambda: (linear_log_probs(hidden, weight, targets, vocab_size=V) @ scale).backward(),
        lambda: (linear_log_probs(hidden, weight.detach(), targets, vocab_size=V) @ scale).backward(),
        lambda: (linear_distillation_loss(hidden, weight, ids, log_probs, vocab_size=V) @ scale).backward(),
        lambda: linear_top_k(hidden, weight, 3, vocab_size=V),
    ):
        assert largest_tensor(function) <= 64 * PADDED < N * V


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of dynamo, after a graph break
def test_log_probs_compile() -> None:
    hidden, weight, targets, scale = case()

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return linear_log_probs(h, w, targets, vocab_size=V) @ scale

    compiled: Any = torch.compile(loss, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, weight), loss(hidden, weight))
    grads = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(loss(hidden, weight), (hidden, weight)))


def test_ids_outside_the_vocabulary_raise() -> None:
    hidden, weight, targets, _ = case()
    targets[3] = V
    with pytest.raises(DataError, match=f"target ids .* got {V}"):
        linear_log_probs(hidden, weight, targets, vocab_size=V)
    _, ids, log_probs = teacher(3, 1.0)
    with pytest.raises(DataError, match=f"teacher with the model's vocabulary .* got token id {int(ids.max())}"):
        linear_distillation_loss(hidden, weight, ids, log_probs, vocab_size=int(ids.max()))
    with pytest.raises(DataError, match="expected k from 1 to"):
        linear_top_k(hidden, weight, V + 1, vocab_size=V)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_match_the_reference(dtype: torch.dtype) -> None:
    hidden, weight, targets, scale = (value.detach().cuda() for value in case())
    _, ids, log_probs = (value.cuda() for value in teacher(5, 2.0))
    inputs = [value.to(dtype).requires_grad_() for value in (hidden, weight)]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    logits = F.linear(*exact)[:, :V]
    for found, expected in (
        (
            linear_log_probs(*inputs, targets, vocab_size=V),
            linear_log_probs_reference(*exact, targets, vocab_size=V),
        ),
        (
            linear_distillation_loss(*inputs, ids, log_probs, vocab_size=V, temperature=2.0),
            distillation_loss_reference(logits, ids, log_probs, temperature=2.0),
        ),
    ):
        tolerance = 2e-3 if dtype == torch.float32 else 2e-2
        assert (found - expected).norm() < tolerance * expected.norm()
        grads = torch.autograd.grad(found @ scale, inputs, retain_graph=True)
        expected_grads = torch.autograd.grad(expected.float() @ scale, exact, retain_graph=True)
        for a, b in zip(grads, expected_grads, strict=True):
            assert (a.double() - b).norm() < tolerance * b.norm()
