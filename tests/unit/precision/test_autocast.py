"""Mixed precision: autocast, gradient scaling and its checkpointed state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from whimbrel.base.errors import PrecisionError
from whimbrel.precision import MixedPrecision

CPU = torch.device("cpu")


def step(plan: MixedPrecision, net: nn.Linear, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    with plan.autocast():
        loss = net(torch.ones(2, 4)).float().mean() * factor
    plan.scale(loss).backward()
    plan.unscale(optimizer)
    plan.step(optimizer)
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matmuls_use_the_autocast_dtype_and_weights_keep_theirs(precision: str, dtype: torch.dtype) -> None:
    plan, net = MixedPrecision(precision, CPU), nn.Linear(4, 4)  # type: ignore[arg-type]
    with plan.autocast():
        assert net(torch.ones(2, 4)).dtype == dtype
    assert net.weight.dtype == torch.float32
    assert net(torch.ones(2, 4)).dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_scaler_nothing_is_scaled(precision: str) -> None:
    plan, net = MixedPrecision(precision, CPU), nn.Linear(4, 4)  # type: ignore[arg-type]
    loss = torch.tensor(3.0)
    assert plan.scale(loss) is loss
    assert (plan.scaler, plan.state_dict()) == (None, {})
    before = net.weight.detach().clone()
    step(plan, net, torch.optim.SGD(net.parameters(), lr=0.1))
    torch.testing.assert_close(before - net.weight.detach(), torch.full((4, 4), 0.025))


def test_fp16_gradients_are_unscaled_and_an_overflow_skips_the_step() -> None:
    plan, net = MixedPrecision("fp16", CPU), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.weight.detach().clone()
    step(plan, net, optimizer)
    torch.testing.assert_close(before - net.weight.detach(), torch.full((4, 4), 0.025))
    moved, scale = net.weight.detach().clone(), plan.state_dict()["scale"]
    step(plan, net, optimizer, factor=1e35)
    assert torch.equal(net.weight, moved)
    assert plan.state_dict()["scale"] == scale / 2


def test_after_a_skipped_step_the_next_can_be_unscaled() -> None:
    plan, net = MixedPrecision("fp16", CPU), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plan.scale(net(torch.ones(2, 4)).sum()).backward()
    plan.unscale(optimizer)
    plan.skip()
    optimizer.zero_grad()
    step(plan, net, optimizer)


def test_the_scale_is_restored_from_a_state_dict() -> None:
    plan, net = MixedPrecision("fp16", CPU), nn.Linear(4, 4)
    step(plan, net, torch.optim.SGD(net.parameters(), lr=0.1), factor=1e35)
    other = MixedPrecision("fp16", CPU)
    other.load_state_dict(copy.deepcopy(plan.state_dict()))
    assert other.state_dict() == plan.state_dict() != MixedPrecision("fp16", CPU).state_dict()
    other.load_state_dict({})  # state of a run with another precision
    assert other.state_dict() == plan.state_dict()


def test_unknown_precisions_are_rejected() -> None:
    with pytest.raises(PrecisionError, match="precision: expected one of fp32, bf16, fp16, got 'fp8'"):
        MixedPrecision("fp8", CPU)  # type: ignore[arg-type]


def test_bf16_on_an_old_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(PrecisionError, match=r"compute capability 8.0 .* got 7.5: use fp16"):
        MixedPrecision("bf16", torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_and_scaling_on_a_gpu(precision: str) -> None:
    device = torch.device("cuda")
    plan, net = MixedPrecision(precision, device), nn.Linear(4, 4, device=device)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    before = net.weight.detach().clone()
    with plan.autocast():
        loss = net(torch.ones(2, 4, device=device)).float().mean()
    plan.scale(loss).backward()
    plan.unscale(optimizer)
    plan.step(optimizer)
    assert not torch.equal(before, net.weight)
