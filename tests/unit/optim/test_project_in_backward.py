"""project_in_backward: exact under accumulation, without storing full gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from whimbrel.base.errors import OptimizerError
from whimbrel.optim import (
    Apollo,
    GaLoreWarm,
    LDAdam,
    LowRankOptimizer,
    ProjectInBackward,
    QGaLore,
    project_in_backward,
)
from whimbrel.optim.backward import ProjectedLinear

SIDES = ("right", "left")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 48, bias=False), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10)
    )


def warm(net: nn.Module, **settings: Any) -> GaLoreWarm:
    return GaLoreWarm(net.parameters(), lr=1e-2, **{"rank": 6, "gap": 5, "start": "random", **settings})


def fit(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: int = 1,
    clip: float | None = None,
    steps: range = range(24),
    look: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train on sixteen samples per step in `micro_batches` parts; returns the gradient norms."""
    norms = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 24, generator=generator), torch.randint(0, 10, (16,), generator=generator)
        for part, labels in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            (nn.functional.cross_entropy(net(part), labels, reduction="sum") / 16).backward()
            look()
        if isinstance(optimizer, ProjectInBackward):
            norm = optimizer.grad_norm()
            if clip is not None:
                optimizer.clip_(clip, norm)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
            if clip is not None:
                nn.utils.clip_grads_with_norm_(net.parameters(), clip, norm)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in net.parameters()])


@pytest.mark.parametrize("side", SIDES)
def test_one_micro_batch_is_bit_identical(side: str) -> None:
    plain, projected = model(), model()
    norms = fit(plain, warm(plain, side=side))
    again = fit(projected, project_in_backward(warm(projected, side=side)))
    assert torch.equal(weights(plain), weights(projected))
    assert again == pytest.approx(norms, rel=1e-6)


def test_clipping_with_one_micro_batch_is_exact() -> None:
    plain, projected = model(), model()
    fit(plain, warm(plain), clip=0.5)
    fit(projected, project_in_backward(warm(projected)), clip=0.5)
    torch.testing.assert_close(weights(projected), weights(plain), rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("linears", [False, True])
@pytest.mark.parametrize("start", ["random", "gradient"])
def test_eight_micro_batches_equal_one_batch(side: str, linears: bool, start: str) -> None:
    whole, parts = model(), model()
    fit(whole, warm(whole, side=side, start=start))
    settings: dict[str, Any] = {"accumulation": 8, "model": parts if linears else None}
    fit(parts, project_in_backward(warm(parts, side=side, start=start), **settings), micro_batches=8)
    torch.testing.assert_close(weights(parts), weights(whole), rtol=0, atol=1e-5)


@pytest.mark.parametrize("linears", [False, True])
def test_norm_of_accumulated_gradients_is_estimated(linears: bool) -> None:
    plain, parts = model(), model()
    true = fit(plain, warm(plain), micro_batches=4)
    optimizer = project_in_backward(warm(parts), accumulation=4, model=parts if linears else None)
    estimated = fit(parts, optimizer, micro_batches=4)
    errors = torch.tensor(estimated) / torch.tensor(true) - 1
    assert errors.abs().max() < 0.2  # three small matrices: the error falls with their number
    assert abs(float(errors.mean())) < 0.03


def test_clipping_scales_projected_and_full_gradients() -> None:
    net = model()
    optimizer = project_in_backward(warm(net))
    fit(net, optimizer, steps=range(3))
    nn.functional.cross_entropy(net(torch.randn(8, 24)), torch.randint(0, 10, (8,))).backward()
    norm = optimizer.grad_norm()
    before = [tensor.clone() for tensor in optimizer.optimizer.projected.values()]
    biases = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    optimizer.clip_(float(norm) / 4, norm)
    for was, now in zip(before, optimizer.optimizer.projected.values(), strict=True):
        torch.testing.assert_close(now, was / 4)
    for was, now in zip(biases, [p.grad for p in net.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(now, was / 4)


def test_only_matrices_with_a_due_basis_keep_full_gradients() -> None:
    net = model()
    optimizer = project_in_backward(warm(net, gap=4), accumulation=2)
    matrices = [p for p in net.parameters() if p.ndim == 2]
    kept = []

    def look() -> None:
        for p in matrices:
            due = optimizer.optimizer.is_refresh_due(p)
            assert (p.grad is not None) == due
            assert (p in optimizer.optimizer.projected) != due
            kept.append(due)

    fit(net, optimizer, micro_batches=2, look=look)
    assert 0 < sum(kept) < len(kept) / 2


class Shapes(TorchDispatchMode):
    """Records the shapes of all computed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {
            tuple(t.shape) for t in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(t)
        }
        return result


@pytest.mark.parametrize("linears", [False, True])
def test_projected_linear_never_computes_its_weight_gradient(linears: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(31, 57), nn.Linear(57, 43))
    optimizer = project_in_backward(warm(net, gap=1000, rank=3), model=net if linears else None)
    for _ in range(70):  # past the first refreshes
        net(torch.randn(5, 31)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = net(torch.randn(5, 31)).square().mean()
    with Shapes() as shapes:
        loss.backward()
    assert ((57, 31) in shapes.seen) == (not linears)
    assert ((43, 57) in shapes.seen) == (not linears)
    assert (57, 3) in shapes.seen or (57, 19) in shapes.seen


def test_forward_saves_only_the_projected_input() -> None:
    """dY^T (X Q) needs X Q: r + 16 numbers per token instead of n."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48, bias=False))
    optimizer = project_in_backward(warm(net, gap=1000, rank=4), model=net)
    for _ in range(70):
        net(torch.randn(5, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(torch.randn(5, 64))
    assert (5, 20) in saved
    assert (5, 64) not in saved


def test_projected_linear_equals_linear_under_autocast_and_without_gradients() -> None:
    net = model()
    reference = copy.deepcopy(net)
    optimizer = project_in_backward(warm(net), model=net)
    assert isinstance(net[0], ProjectedLinear)
    x = torch.randn(3, 24)
    with torch.no_grad():
        assert torch.equal(net(x), reference(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = net(x), reference(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)
    assert type(optimizer.remove()) is GaLoreWarm
    assert type(net[0]) is nn.Linear
    assert list(net.state_dict()) == list(reference.state_dict())


def test_state_resumes_in_either_mode() -> None:
    whole, half = model(), model()
    fit(whole, warm(whole))
    first = project_in_backward(warm(half))
    fit(half, first, steps=range(11))
    state = copy.deepcopy(first.state_dict())
    first.remove()
    second = warm(half)
    second.load_state_dict(state)
    fit(half, second, steps=range(11, 24))
    assert torch.equal(weights(half), weights(whole))


@pytest.mark.parametrize("linears", [False, True])
def test_nonfinite_gradient_skips_the_complete_step(linears: bool) -> None:
    net = model()
    optimizer = project_in_backward(warm(net), model=net if linears else None)
    fit(net, optimizer, steps=range(12))
    before, state = weights(net), copy.deepcopy(optimizer.state_dict())
    (net(torch.full((2, 24), float("nan"))).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(weights(net), before)
    for index, tensors in optimizer.state_dict()["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, state["state"][index][name])
    assert optimizer.optimizer.skipped == 1
    fit(net, optimizer, steps=range(12, 14))
    assert not torch.equal(weights(net), before)


def test_projections_have_the_dtype_of_their_parameter_by_default() -> None:
    for dtype, asked, expected in (
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
    ):
        for linears in (False, True):
            net = model().to(dtype)
            optimizer = project_in_backward(warm(net, gap=1000), dtype=asked, model=net if linears else None)
            for _ in range(70):
                net(torch.randn(4, 24, dtype=dtype)).float().square().mean().backward()
                optimizer.step()
            net(torch.randn(4, 24, dtype=dtype)).float().square().mean().backward()
            optimizer.grad_norm()
            assert {low.dtype for low in optimizer.optimizer.projected.values()} == {expected}


def test_tied_weight_accumulates_both_gradients() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Tanh(), nn.Linear(24, 24, bias=False), nn.Linear(24, 10))
        made[2].weight = made[0].weight
        return made

    plain, projected = net(), net()
    fit(plain, warm(plain))
    fit(projected, project_in_backward(warm(projected), model=projected))
    torch.testing.assert_close(weights(projected), weights(plain), rtol=0, atol=1e-5)


def test_unsupported_optimizers_and_models_are_rejected() -> None:
    for kind in (Apollo, LDAdam):
        with pytest.raises(OptimizerError, match="needs the full gradient of every parameter"):
            project_in_backward(kind(model().parameters(), rank=4))
    with pytest.raises(OptimizerError, match="expected a low-rank optimizer.* got AdamW"):
        project_in_backward(torch.optim.AdamW(model().parameters()))  # type: ignore[arg-type]
    drawn = model()
    random = LowRankOptimizer(drawn.parameters(), rank=4, subspace="random")
    for _ in range(2):  # a rejected wrapper changes nothing
        with pytest.raises(OptimizerError, match="no nn.Linear .*stored basis"):
            project_in_backward(random, model=drawn)
    project_in_backward(random)
    with pytest.raises(OptimizerError, match="cannot add a parameter group"):
        project_in_backward(warm(model())).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize("kind", ["qgalore", "random"])
def test_other_kinds_of_bases_can_be_projected(kind: str) -> None:
    def optimizer(net: nn.Module) -> LowRankOptimizer:
        if kind == "qgalore":
            return QGaLore(net.parameters(), lr=1e-2, rank=6, gap=7)
        return LowRankOptimizer(net.parameters(), lr=1e-2, rank=6, gap=7, subspace="random")

    whole, parts = model(), model()
    fit(whole, optimizer(whole))
    linears = parts if kind == "qgalore" else None  # a random basis is not stored
    fit(parts, project_in_backward(optimizer(parts), accumulation=4, model=linears), micro_batches=4)
    far = 1e-2 if kind == "qgalore" else 1e-5  # 4-bit codes amplify rounding errors to a level
    torch.testing.assert_close(weights(parts), weights(whole), rtol=0, atol=far)


@pytest.mark.parametrize("linears", [False, True])
def test_reset_restarts_training(linears: bool) -> None:
    """Linear layers use the current basis."""
    net, fresh = model(), model()
    optimizer = project_in_backward(warm(net, gap=1000), model=net if linears else None)
    fit(net, optimizer, steps=range(80))
    optimizer.reset()
    with torch.no_grad():
        for old, new in zip(net.parameters(), fresh.parameters(), strict=True):
            old.copy_(new)
    fit(net, optimizer, steps=range(80))
    fit(fresh, project_in_backward(warm(fresh, gap=1000), model=fresh if linears else None), steps=range(80))
    assert torch.equal(weights(net), weights(fresh))


def test_norm_estimate_with_a_random_basis() -> None:
    plain, parts = model(), model()
    true = fit(plain, LowRankOptimizer(plain.parameters(), lr=1e-2, rank=6, subspace="random"), micro_batches=2)
    random = LowRankOptimizer(parts.parameters(), lr=1e-2, rank=6, subspace="random")
    ratios = torch.tensor(fit(parts, project_in_backward(random, accumulation=2), micro_batches=2)) / torch.tensor(true)
    assert abs(float(ratios.mean()) - 1) < 0.1


def test_more_micro_batches_than_accumulation_are_rejected() -> None:
    net = model()
    project_in_backward(warm(net, gap=1000, start="random")).optimizer.state[net[0].weight]["due"].fill_(1000)
    net(torch.randn(4, 24)).sum().backward()
    with pytest.raises(OptimizerError, match="second gradient in one step.* accumulation="):
        net(torch.randn(4, 24)).sum().backward()
    for wrong in (0, -1, 1.5, "x", True):
        with pytest.raises(OptimizerError, match="accumulation: expected an integer"):
            project_in_backward(warm(model()), accumulation=wrong)  # type: ignore[arg-type]


def test_grad_scaler_and_second_wrapper_are_rejected() -> None:
    net = model()
    optimizer = project_in_backward(warm(net))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.randn(4, 24)).sum()).backward()
    with pytest.raises(OptimizerError, match="GradScaler.* use bf16"):
        scaler.step(optimizer)
    for again in (optimizer.optimizer, optimizer):
        with pytest.raises(OptimizerError, match="already runs in backward|expected a low-rank optimizer"):
            project_in_backward(again)  # type: ignore[arg-type]


def test_input_without_batch_dimension_can_be_projected() -> None:
    net = nn.Sequential(nn.Linear(6, 5))
    optimizer = project_in_backward(warm(net, rank=2, gap=1000), model=net)
    for _ in range(70):
        net(torch.randn(6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    net(torch.randn(6)).sum().backward()
    optimizer.grad_norm()
    assert optimizer.optimizer.projected[net[0].weight].shape == (5, 2)


def test_simulate_peak_step_keeps_the_most_full_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(30)])

    def num_full_gradients(optimizer: ProjectInBackward) -> int:
        net(torch.randn(2, 16)).sum().backward()
        return sum(p.grad is not None for p in net.parameters())

    optimizer = project_in_backward(warm(net, rank=2, gap=6))
    kept = []
    for _ in range(40):
        kept.append(num_full_gradients(optimizer))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.simulate_peak_step()
    assert num_full_gradients(optimizer) == max(kept)
    assert max(kept) < 12


def test_norm_without_gradients_is_zero() -> None:
    assert project_in_backward(warm(model())).grad_norm() == 0
