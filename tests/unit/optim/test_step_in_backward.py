"""step_in_backward gives exactly the updates of a step after backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from whimbrel.base.errors import OptimizerError
from whimbrel.optim import (
    GaLore,
    OptimConfig,
    OptimizerInBackward,
    Schedule,
    build_optimizer,
    classify_parameters,
    step_in_backward,
)


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
    )
    net[4].weight = net[0].weight  # tied: used twice in a forward pass, updated once
    return net


def optimizer_of(net: nn.Module, name: str) -> torch.optim.Optimizer:
    config = OptimConfig(name=name, lr=0.05, scalar_lr=0.1, weight_decay=0.1)  # type: ignore[arg-type]
    return build_optimizer(config, classify_parameters(net))


def loss_of(net: nn.Module, step: int) -> torch.Tensor:
    ids = torch.randint(0, 11, (6, 5), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def run(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    norms = []
    schedule = Schedule(optimizer, lambda step: 1 / (step + 1))
    schedule.load_state_dict({"step": steps.start})
    for step in steps:
        loss_of(net, step).backward()
        if isinstance(optimizer, OptimizerInBackward):
            norms.append(float(optimizer.grad_norm()))
            assert all(p.grad is None for p in net.parameters())
        else:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return norms


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_and_state_are_bit_identical(name: str) -> None:
    plain, hooked = model(), model()
    after, during = optimizer_of(plain, name), step_in_backward(optimizer_of(hooked, name))
    norms = run(plain, after, range(5))
    assert run(hooked, during, range(5)) == pytest.approx(norms, rel=1e-6)  # summed in another order
    assert same(plain.state_dict(), hooked.state_dict())
    assert same(after.state_dict(), during.state_dict())


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("first", ["plain", "hooked"])
def test_checkpoint_of_either_mode_resumes_in_the_other(name: str, first: str) -> None:
    whole = model()
    run(whole, optimizer_of(whole, name), range(6))

    def optimizer(net: nn.Module, hooked: bool) -> torch.optim.Optimizer:
        return step_in_backward(optimizer_of(net, name)) if hooked else optimizer_of(net, name)

    begun, resumed = model(), model()
    begun_by = optimizer(begun, first == "hooked")
    run(begun, begun_by, range(3))
    resumed.load_state_dict(begun.state_dict())
    resumed_by = optimizer(resumed, first != "hooked")
    resumed_by.load_state_dict(copy.deepcopy(begun_by.state_dict()))
    run(resumed, resumed_by, range(3, 6))
    assert same(whole.state_dict(), resumed.state_dict())


def test_second_gradient_in_one_step_is_rejected() -> None:
    net = model()
    optimizer = step_in_backward(optimizer_of(net, "adamw"))
    loss_of(net, 0).backward()
    with pytest.raises(OptimizerError, match="second gradient in one step.*disable gradient accumulation"):
        loss_of(net, 1).backward()
    optimizer.step()
    loss_of(net, 1).backward()


def test_remove_restores_normal_gradients() -> None:
    net = model()
    inner = optimizer_of(net, "adamw")
    assert step_in_backward(inner).remove() is inner
    before = copy.deepcopy(net.state_dict())
    loss_of(net, 0).backward()
    assert all(p.grad is not None for p in net.parameters())
    assert same(before, net.state_dict())


def test_unsupported_optimizers_are_rejected() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(OptimizerError, match="LBFGS updates all parameters together"):
        step_in_backward(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(OptimizerError, match="add it before"):
        step_in_backward(torch.optim.SGD(net.parameters(), lr=0.1)).add_param_group({"params": []})

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1

    net = nn.Linear(2, 2)
    step_in_backward(Counting(net.parameters(), lr=0.1))
    with pytest.raises(OptimizerError, match="Counting keeps state per group"):
        net(torch.ones(1, 2)).sum().backward()


def test_every_group_of_galore_is_updated() -> None:
    """Also groups with different state layouts."""
    params = [nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(i))) for i in range(2)]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    ours, expected = (GaLore([{"params": [a], "rank": 2}, {"params": [b]}], lr=0.1) for a, b in (params, twins))
    wrapper = step_in_backward(ours)
    for group in (params, twins):
        sum((p.square().sum() for p in group), torch.zeros(())).backward()
    wrapper.step()
    expected.step()
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)
