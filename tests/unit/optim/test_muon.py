"""Muon: its equation, groups, state and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from whimbrel.base.errors import OptimizerError
from whimbrel.optim import Muon
from whimbrel.optim.rules import orthogonalize


def matrix(rows: int, columns: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))


def test_two_steps_match_the_equation() -> None:
    p, gradients = matrix(24, 8), [matrix(24, 8, seed).detach() for seed in (1, 2)]
    lr, b, wd = 0.1, 0.9, 0.2
    expected, momentum = p.detach().clone(), torch.zeros(24, 8)
    optimizer = Muon([p], lr=lr, momentum=b, weight_decay=wd)
    for g in gradients:
        momentum = b * momentum + (1 - b) * g
        update = (1 - b) * g + b * momentum
        expected = (1 - lr * wd) * expected - lr * (24 / 8) ** 0.5 * orthogonalize(update)
        p.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(p.detach(), expected, atol=1e-6, rtol=1e-5)


def test_updates_agree_with_torch_muon() -> None:
    """torch uses other Newton-Schulz coefficients, so only directions agree."""
    ours, theirs = matrix(32, 32), matrix(32, 32)
    mine = Muon([ours], lr=0.02, momentum=0.95)
    peer = torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.0, nesterov=True)
    start = ours.detach().clone()
    for seed in range(5):
        ours.grad = theirs.grad = matrix(32, 32, seed + 10).detach()
        mine.step()
        peer.step()
    a, b = ours.detach() - start, theirs.detach() - start
    assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.98
    assert 0.8 < a.norm() / b.norm() < 1.25


@pytest.mark.parametrize("settings", [{}, {"neuron_beta": 0.9, "weight_decay": 0.1, "cautious_decay": True}])
def test_splits_of_fused_matrices_are_orthogonalized_separately(settings: dict[str, Any]) -> None:
    fused, parts = matrix(24, 16), [nn.Parameter(piece.clone()) for piece in matrix(24, 16).detach().split([8, 8, 8])]
    gradient = matrix(24, 16, 5).detach()
    fused.grad = gradient.clone()
    for part, piece in zip(parts, gradient.split([8, 8, 8]), strict=True):
        part.grad = piece.clone()
    Muon([{"params": [fused], "splits": [(8, 8, 8)]}], **settings).step()
    Muon(parts, **settings).step()
    torch.testing.assert_close(fused.detach(), torch.cat([part.detach() for part in parts]))


def test_adam_groups_equal_torch_adamw() -> None:
    ours, theirs = matrix(6, 4), matrix(6, 4)
    mine = Muon([{"params": [ours], "rule": "adam"}], lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    peer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    for seed in range(4):
        ours.grad = theirs.grad = matrix(6, 4, seed).detach()
        mine.step()
        peer.step()
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_normuon_matches_a_loop_over_rows(shape: tuple[int, int]) -> None:
    """Li et al., 2025; with a row without gradients, whose update stays zero."""
    p, gradients = matrix(*shape), [matrix(*shape, seed).detach() for seed in (1, 2, 3)]
    lr, b, beta = 0.1, 0.9, 0.7
    expected, momentum, moments = p.detach().clone(), torch.zeros(shape), [0.0] * shape[0]
    optimizer = Muon([p], lr=lr, momentum=b, neuron_beta=beta)
    for g in gradients:
        g[2] = 0.0
        momentum = b * momentum + (1 - b) * g
        factor = orthogonalize((1 - b) * g + b * momentum)
        update = factor.clone()
        for row in range(shape[0]):
            moments[row] = beta * moments[row] + (1 - beta) * float(factor[row].square().mean())
            update[row] = factor[row] / (moments[row] ** 0.5 + 1e-10)
        update *= factor.norm() / update.norm()
        expected -= lr * max(1.0, shape[0] / shape[1]) ** 0.5 * update
        p.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(p.detach(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(p[2], matrix(*shape)[2])
    torch.testing.assert_close(optimizer.state[p]["second_moment"].flatten(), torch.tensor(moments))


def test_normuon_takes_no_step_without_gradients() -> None:
    p = matrix(6, 4)
    p.grad = torch.zeros_like(p)
    Muon([p], neuron_beta=0.95).step()
    assert torch.equal(p, matrix(6, 4))


def test_cautious_decay_applies_where_the_update_shrinks_the_weight() -> None:
    p, plain, cautious = matrix(12, 8), matrix(12, 8), matrix(12, 8)
    for parameter, settings in (
        (p, {}), (plain, {"weight_decay": 0.3}), (cautious, {"weight_decay": 0.3, "cautious_decay": True})
    ):  # fmt: skip
        parameter.grad = matrix(12, 8, 1).detach()
        Muon([parameter], lr=0.1, **settings).step()  # type: ignore[arg-type]
    start = matrix(12, 8).detach()
    shrinks = (start - p) * start > 0
    assert 0.2 < shrinks.float().mean() < 0.8
    torch.testing.assert_close(cautious, torch.where(shrinks, plain, p))


def test_momentum_warms_up() -> None:
    p = matrix(4, 4)
    optimizer = Muon([p], lr=0.0, momentum=0.95, momentum_start=0.85, momentum_warmup=2)
    buffer = torch.zeros(4, 4)
    for momentum in (0.85, 0.90, 0.95, 0.95):
        p.grad = torch.ones(4, 4)
        optimizer.step()
        buffer = momentum * buffer + (1 - momentum)
        torch.testing.assert_close(optimizer.state[p]["momentum"], buffer)


@pytest.mark.parametrize("neuron_beta", [None, 0.9])
def test_state_resumes_bit_for_bit(neuron_beta: float | None) -> None:
    def make() -> tuple[nn.Parameter, nn.Parameter, Muon]:
        a, b = matrix(8, 8), nn.Parameter(torch.ones(8))
        return a, b, Muon([{"params": [a]}, {"params": [b], "rule": "adam"}], lr=0.1, neuron_beta=neuron_beta)

    def step(a: nn.Parameter, b: nn.Parameter, optimizer: Muon, seed: int) -> None:
        a.grad, b.grad = matrix(8, 8, seed).detach(), matrix(1, 8, seed).detach()[0]
        optimizer.step()

    a, b, optimizer = make()
    for seed in range(3):
        step(a, b, optimizer, seed)
    c, d, other = make()
    c.data, d.data = a.detach().clone(), b.detach().clone()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3, 6):
        step(a, b, optimizer, seed)
        step(c, d, other, seed)
    assert torch.equal(a, c)
    assert torch.equal(b, d)


def test_closures_and_missing_gradients() -> None:
    a, b = matrix(4, 4), matrix(4, 4)
    before = b.detach().clone()
    optimizer = Muon([a, b])

    def closure() -> float:
        loss = (a**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == pytest.approx(float((matrix(4, 4).detach() ** 2).sum()))
    assert torch.equal(b.detach(), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr: expected .* got -1.0"),
        ({"momentum": 1.0}, "momentum: expected .* got 1.0"),
        ({"betas": (0.9, 1.5)}, r"betas: expected two numbers .* got \(0.9, 1.5\)"),
        ({"neuron_beta": 1.0}, "neuron_beta: expected .* got 1.0"),
        ({"rule": "sgd"}, "rule: expected muon or adam, got 'sgd'"),
    ],
)
def test_invalid_options_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        Muon([matrix(4, 4)], **settings)  # type: ignore[arg-type]


def test_misspelled_group_option_is_rejected_and_the_group_not_added() -> None:
    optimizer = Muon([matrix(4, 4)])
    with pytest.raises(OptimizerError, match="unknown option 'momentun' .* did you mean 'momentum'"):
        optimizer.add_param_group({"params": [matrix(4, 4)], "momentun": 0.9})
    with pytest.raises(OptimizerError, match="use rule = 'adam'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    assert len(optimizer.param_groups) == 1


def test_state_without_second_moments_is_rejected_by_normuon() -> None:
    p = matrix(4, 4)
    p.grad = torch.ones_like(p)
    optimizer = Muon([p])
    optimizer.step()
    with pytest.raises(OptimizerError, match="with second_moment"):
        Muon([p], neuron_beta=0.9).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("rule", ["muon", "adam"])
def test_empty_parameters_are_skipped(rule: str) -> None:
    empty, full = nn.Parameter(torch.zeros(4, 0)), matrix(4, 4)
    optimizer = Muon([empty, full], rule=rule)
    before = full.detach().clone()
    empty.grad, full.grad = torch.zeros(4, 0), torch.ones(4, 4)
    optimizer.step()
    assert not torch.equal(full, before)


def test_empty_splits_are_skipped() -> None:
    one, other = matrix(8, 4), matrix(8, 4)
    one.grad = other.grad = matrix(8, 4, 1).detach()
    Muon([{"params": [one], "splits": [(4, 0, 4)]}]).step()
    Muon([{"params": [other], "splits": [(4, 4)]}]).step()
    assert torch.equal(one, other)


@pytest.mark.parametrize("rule", ["muon", "adam"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3])
def test_fp16_parameters_have_fp32_moments(rule: str, size: float) -> None:
    """In fp16 eps = 1e-8 and the squares of small gradients are zero, and squares above 65504 infinite."""
    half, single = nn.Parameter(matrix(8, 6).detach().half()), nn.Parameter(matrix(8, 6).detach().half().float())
    for p in (half, single):
        optimizer = Muon([p], lr=0.01, rule=rule)
        for seed in range(4):
            p.grad = (size * matrix(8, 6, seed).detach()).half().to(p.dtype)
            optimizer.step()
        moments = [tensor for name, tensor in optimizer.state[p].items() if name != "step"]
        assert {tensor.dtype for tensor in moments} == {torch.float32}
    torch.testing.assert_close(half.float(), single, atol=8e-3, rtol=0)  # 4 roundings of weights below 4: 4 * 2^-9


def test_reset_drops_moments_and_steps() -> None:
    parameter = matrix(4, 4)
    optimizer = Muon([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.reset()
    assert not optimizer.state


def test_vectors_are_rejected_by_the_muon_rule() -> None:
    with pytest.raises(OptimizerError, match=r"shape \(4,\): use rule = 'adam'"):
        Muon([nn.Parameter(torch.ones(4))])
