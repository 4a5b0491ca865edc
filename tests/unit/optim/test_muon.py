"""Muon against its equation, and its groups, state and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from whimbrel.base.errors import ConfigError, OptimizerError
from whimbrel.ops import orthogonalize
from whimbrel.optim import Muon, OptimConfig, RoutedParameter, build_optimizer


def matrix(rows: int, columns: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))


def test_two_steps_follow_the_equation() -> None:
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


def test_it_moves_as_torch_muon_does() -> None:
    """torch's own Muon uses other coefficients for the polar factor, so directions agree, not digits."""
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


def test_fused_rows_are_orthogonalised_apart() -> None:
    fused, parts = matrix(24, 16), [nn.Parameter(piece.clone()) for piece in matrix(24, 16).detach().split([8, 8, 8])]
    gradient = matrix(24, 16, 5).detach()
    fused.grad = gradient.clone()
    for part, piece in zip(parts, gradient.split([8, 8, 8]), strict=True):
        part.grad = piece.clone()
    Muon([{"params": [fused], "splits": [(8, 8, 8)]}]).step()
    Muon(parts).step()
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


def test_momentum_warms_up() -> None:
    p = matrix(4, 4)
    optimizer = Muon([p], lr=0.0, momentum=0.95, momentum_start=0.85, momentum_warmup=2)
    buffer = torch.zeros(4, 4)
    for momentum in (0.85, 0.90, 0.95, 0.95):
        p.grad = torch.ones(4, 4)
        optimizer.step()
        buffer = momentum * buffer + (1 - momentum)
        torch.testing.assert_close(optimizer.state[p]["momentum"], buffer)


def test_state_resumes_bit_for_bit() -> None:
    def make() -> tuple[nn.Parameter, nn.Parameter, Muon]:
        a, b = matrix(8, 8), nn.Parameter(torch.ones(8))
        return a, b, Muon([{"params": [a]}, {"params": [b], "rule": "adam"}], lr=0.1)

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
        ({"rule": "sgd"}, "rule: expected muon or adam, got 'sgd'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        Muon([matrix(4, 4)], **settings)  # type: ignore[arg-type]


def test_a_misspelt_key_of_a_group_is_refused_and_the_group_is_not_there() -> None:
    optimizer = Muon([matrix(4, 4)])
    with pytest.raises(OptimizerError, match="unknown option 'momentun' .* did you mean 'momentum'"):
        optimizer.add_param_group({"params": [matrix(4, 4)], "momentun": 0.9})
    with pytest.raises(OptimizerError, match="use rule = 'adam'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("rule", ["muon", "adam"])
def test_parameters_without_elements_are_passed_over(rule: str) -> None:
    empty, full = nn.Parameter(torch.zeros(4, 0)), matrix(4, 4)
    optimizer = Muon([empty, full], rule=rule)
    before = full.detach().clone()
    empty.grad, full.grad = torch.zeros(4, 0), torch.ones(4, 4)
    optimizer.step()
    assert not torch.equal(full, before)


def test_splits_without_rows_are_passed_over() -> None:
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


def test_reset_forgets_moments_and_steps() -> None:
    parameter = matrix(4, 4)
    optimizer = Muon([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.reset()
    assert not optimizer.state


def test_vectors_are_refused_by_the_muon_rule() -> None:
    with pytest.raises(OptimizerError, match=r"shape \(4,\): use rule = 'adam'"):
        Muon([nn.Parameter(torch.ones(4))])


def routed() -> list[RoutedParameter]:
    return [
        RoutedParameter("block.weight", matrix(4, 4), "hidden"),
        RoutedParameter("block.bias", nn.Parameter(torch.ones(4)), "scalar"),
        RoutedParameter("wte.weight", matrix(8, 4), "embedding"),
        RoutedParameter("lm_head.weight", matrix(8, 4), "head"),
    ]


def test_build_routes_rates_decay_and_rules() -> None:
    config = OptimConfig(
        name="muon", lr=0.02, embedding_lr=0.3, head_lr=0.004, scalar_lr=0.01, weight_decay=0.05, decay="hidden"
    )
    optimizer = build_optimizer(config, routed())
    groups = {group["names"][0]: group for group in optimizer.param_groups}
    assert {name: (g["rule"], g["lr"], g["weight_decay"]) for name, g in groups.items()} == {
        "block.weight": ("muon", 0.02, 0.05),
        "block.bias": ("adam", 0.01, 0.0),
        "wte.weight": ("adam", 0.3, 0.0),
        "lm_head.weight": ("adam", 0.004, 0.0),
    }


@pytest.mark.parametrize(("decay", "decayed"), [("all", 4), ("matrices", 3), ("hidden", 1)])
def test_decay_groups(decay: str, decayed: int) -> None:
    optimizer = build_optimizer(OptimConfig(decay=decay), routed())  # type: ignore[arg-type]
    assert type(optimizer) is torch.optim.AdamW
    assert sum(len(g["params"]) for g in optimizer.param_groups if g["weight_decay"] > 0) == decayed


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"momentum": 1.0},
        {"momentum_start": 0.5},
        {"momentum_warmup": 5},
        {"eps": -1e-8},
        {"momentum": 0.9},
        {"momentum_start": 0.5, "momentum_warmup": 5},
    ],
)
def test_bad_optim_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="optim\\."):
        OptimConfig(**settings)  # type: ignore[arg-type]
