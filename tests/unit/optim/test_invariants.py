"""Invariants of every optimizer: what a step does for any gradients."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.optim.optimizer_cases import (
    CASES,
    LOW_RANK,
    SHAPES,
    Teacher,
    differences,
    parameters,
    params_of,
    random,
    run_steps,
    snapshot,
)
from torch import Tensor, nn

from whimbrel.optim import NoSparseGradientError

every = pytest.mark.parametrize("name", CASES)
every_but_muon = pytest.mark.parametrize("name", [name for name in CASES if name not in ("muon", "normuon")])
"""Muon has no `maximize`, and stores moments in the dtype of the parameter."""
every_low_rank = pytest.mark.parametrize("name", LOW_RANK)
FITS = dict.fromkeys(CASES, 8.0) | {"adafactor, int8": 5.0, "warm lion, bf16, int8": 5.0}
"""The minimum factor by which the loss falls."""


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_falls_on_a_small_problem(name: str, dtype: torch.dtype) -> None:
    teacher = Teacher(dtype)
    before, after = teacher.fit(CASES[name](teacher.params), 60)
    assert after < before / FITS[name]


@every
def test_closure_runs_with_gradients_and_its_loss_is_returned(name: str) -> None:
    teacher = Teacher()
    optimizer = CASES[name](teacher.params)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        return teacher.loss()

    with torch.no_grad():
        losses = [float(optimizer.step(closure)) for _ in range(20)]
    assert losses[0] == float(Teacher().loss())
    assert losses[-1] < losses[0] / 2


@every
def test_parameter_without_a_gradient_is_not_updated(name: str) -> None:
    optimizer = CASES[name](parameters())
    params = params_of(optimizer)
    run_steps(optimizer, range(2))
    for index, p in enumerate(params):
        p.grad = None if index % 2 else random(p.shape, index)
    before = snapshot(optimizer)
    optimizer.step()
    changed = {int(key.split()[0]) for key in differences(before, snapshot(optimizer))}
    assert changed == set(range(0, len(params), 2))


@every
def test_step_without_gradients_changes_nothing(name: str) -> None:
    optimizer = CASES[name](parameters())
    before = snapshot(optimizer)
    optimizer.step()
    assert differences(before, snapshot(optimizer)) == []


@every
def test_sparse_gradients_are_rejected(name: str) -> None:
    p = nn.Parameter(random((24, 16)))
    optimizer = CASES[name]([p])
    p.grad = torch.eye(24, 16).to_sparse()
    with pytest.raises(NoSparseGradientError, match="dense gradients"):
        optimizer.step()


@every
def test_parameters_of_every_shape_are_updated(name: str) -> None:
    """Matrices, vectors, scalars, stacks and convolutions."""
    optimizer = CASES[name](parameters())
    before = [p.detach().clone() for p in params_of(optimizer)]
    run_steps(optimizer, range(3))
    for old, p in zip(before, params_of(optimizer), strict=True):
        assert p.isfinite().all()
        assert (p != old).float().mean() > 0.9


@every
@pytest.mark.parametrize("steps", [1, 8])
def test_step_descends(name: str, steps: int) -> None:
    optimizer = CASES[name](parameters())
    before = [p.detach().clone() for p in params_of(optimizer)]
    for _ in range(steps):
        for index, p in enumerate(params_of(optimizer)):
            p.grad = random(p.shape, index)
        optimizer.step()
    for old, p in zip(before, params_of(optimizer), strict=True):
        assert ((p.detach() - old) * p.grad).sum() < 0


@every
def test_convolution_in_channels_last_is_updated(name: str) -> None:
    """The memory format of the gradient makes no difference."""
    weights = []
    for gradient_format in (torch.channels_last, torch.contiguous_format):
        p = nn.Parameter(random((8, 6, 3, 3)).to(memory_format=torch.channels_last))
        optimizer = CASES[name]([p])
        for step in range(7):
            p.grad = random(p.shape, step + 1).to(memory_format=gradient_format)
            optimizer.step()
        assert p.is_contiguous(memory_format=torch.channels_last)
        weights.append(p.detach().clone())
    torch.testing.assert_close(weights[0], weights[1], atol=1e-4, rtol=1e-4)
    assert (weights[0] != random((8, 6, 3, 3))).float().mean() > 0.9


@every_low_rank
def test_matrices_of_a_stack_are_independent(name: str) -> None:
    """A different gradient for the first matrix changes only the first."""
    moved = []
    for size in (1.0, 3.0):
        p = nn.Parameter(random((3, 8, 6)))
        optimizer = LOW_RANK[name]([p])
        for step in range(7):
            p.grad = random(p.shape, step) * torch.tensor([size**step, 1.0, 1.0])[:, None, None]
            optimizer.step()
        moved.append(p.detach().clone())
    torch.testing.assert_close(moved[0][1:], moved[1][1:], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(moved[0][0], moved[1][0], atol=1e-4) or name in ("warm muon", "warm lion, bf16, int8")


@every_low_rank
def test_stack_trains_if_one_matrix_never_has_a_gradient(name: str) -> None:
    p = nn.Parameter(random((3, 8, 6)))
    optimizer = LOW_RANK[name]([p])
    before = p.detach().clone()
    for step in range(3):
        p.grad = random(p.shape, step)
        p.grad[1] = 0
        optimizer.step()
    assert torch.equal(p[1], before[1])
    assert (p[0] != before[0]).all()
    assert (p[2] != before[2]).all()


@every
def test_zero_gradients_change_no_weight(name: str) -> None:
    teacher = Teacher()
    optimizer = CASES[name](teacher.params)
    before = [p.detach().clone() for p in teacher.params]
    for _ in range(3):
        for p in teacher.params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for old, p in zip(before, teacher.params, strict=True):
        assert torch.equal(old, p)
    first, last = teacher.fit(optimizer, 60)
    assert last < first / 5


@every
def test_weight_decay_is_decoupled(name: str) -> None:
    """W <- (1 - lr wd) W for a gradient of zeros."""
    optimizer = CASES[name](parameters(), weight_decay=0.5)
    expected = [p.detach() * (1 - group["lr"] * 0.5) for group in optimizer.param_groups for p in group["params"]]
    run_steps(optimizer, range(1), size=0.0)
    for wanted, p in zip(expected, params_of(optimizer), strict=True):
        torch.testing.assert_close(p.detach(), wanted, atol=0, rtol=1e-6)


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradient_skips_the_step(name: str, bad: float) -> None:
    """One bad element: no parameter changes, the step is counted, and later steps are unaffected."""
    optimizer, unspoilt = CASES[name](parameters()), CASES[name](parameters())
    for one in (optimizer, unspoilt):
        run_steps(one, range(3))
    before = snapshot(optimizer)
    params = params_of(optimizer)
    for p in params:
        p.grad = random(p.shape)
    params[1].grad[3, 2] = bad
    optimizer.step()
    assert differences(before, snapshot(optimizer)) == []
    assert optimizer.skipped == 1
    for one in (optimizer, unspoilt):
        run_steps(one, range(3, 8))
    assert differences(snapshot(optimizer), snapshot(unspoilt)) == []


@every_but_muon
def test_large_gradients_in_fp16_are_finite(name: str) -> None:
    """Their norm exceeds fp16."""
    p = nn.Parameter(random((24, 16), dtype=torch.float16))
    optimizer = CASES[name]([p])
    before = p.detach().clone()
    p.grad = (random((24, 16), 1) * 8000).half()
    optimizer.step()
    assert p.isfinite().all()
    assert not torch.equal(p, before)


@every
@pytest.mark.parametrize("rank", [1, 2])
def test_gradients_of_lower_rank_than_the_subspace(name: str, rank: int) -> None:
    p = nn.Parameter(random((24, 16)))
    optimizer = CASES[name]([p])
    before = p.detach().clone()
    for step in range(12):
        p.grad = random((24, rank), step) @ random((rank, 16), step + 50)
        optimizer.step()
    assert p.isfinite().all()
    assert not torch.equal(p, before)
    if "failures" in optimizer.state[p]:
        assert int(optimizer.state[p]["failures"]) == 0


@pytest.mark.parametrize("name", [name for name, entry in CASES.items() if "rank" in entry.settings])
def test_rank_is_limited_by_the_matrix(name: str) -> None:
    one, other = (CASES[name]([nn.Parameter(random((8, 6)))], rank=rank) for rank in (6, 1000))
    run_steps(one, range(8))
    run_steps(other, range(8))
    assert differences(snapshot(one), snapshot(other)) == []


@every_but_muon
def test_maximize_ascends(name: str) -> None:
    """Two steps only: the signs of the next basis are arbitrary."""
    down, up = CASES[name](parameters()), CASES[name](parameters(), maximize=True)
    run_steps(down, range(2))
    run_steps(up, range(2), size=-1.0)
    for a, b in zip(params_of(down), params_of(up), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@every_low_rank
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_accumulate_small_updates(name: str, dtype: torch.dtype) -> None:
    """Updates are a small fraction of the spacing of values; on average they match fp32."""
    steps, distance = 24, torch.finfo(dtype).eps
    moved = {}
    for kind in (torch.float32, dtype):
        p = nn.Parameter(torch.full(SHAPES["large"], 1.5, dtype=kind))
        optimizer = LOW_RANK[name]([p], lr=8 * LOW_RANK[name].lr * distance)
        for _ in range(steps):
            p.grad = (random(p.shape) / 64).to(dtype).to(kind)
            optimizer.step()
        moved[kind] = p.detach().float() - 1.5
    true, rounded = moved.values()
    assert true.square().mean().sqrt() / steps < distance / 2
    share = float((true * rounded).sum() / (true * true).sum())
    assert abs(share - 1) < 0.2


@every
def test_skipped_steps_are_logged_sparingly_and_saved(name: str, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = CASES[name](parameters())
    for _ in range(5):
        for p in params_of(optimizer):
            p.grad = torch.full_like(p, math.nan)
        optimizer.step()
    kind = type(optimizer).__name__
    assert [record.getMessage() for record in caplog.records] == [
        f"{kind} skipped a step because a gradient is not finite ({count} skipped so far)" for count in (1, 2, 4)
    ]
    clone = CASES[name](parameters())
    clone.load_state_dict(optimizer.state_dict())
    assert clone.skipped == optimizer.skipped == 5


@every
def test_large_finite_gradients_are_not_skipped(name: str) -> None:
    """Also where their squares overflow fp32."""
    optimizer = CASES[name](parameters())
    run_steps(optimizer, range(2), size=1e20)
    assert optimizer.skipped == 0
