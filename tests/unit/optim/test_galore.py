"""GaLore: its equation, state and errors, and bugs of a public implementation."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whimbrel.base.errors import OptimizerError
from whimbrel.optim import GaLore, GaLoreProjector, NoSparseGradientError, step_in_backward

TYPES = ["std", "reverse_std", "right", "left", "full"]
SHAPES = [(8, 5), (5, 8), (6, 6), (7,), (), (3, 6, 4), (4, 3, 2, 2), (4, 2, 2, 2, 2), (1, 5)]


def random(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(random(shape, seed, dtype)) for seed, shape in enumerate(SHAPES)]


def run_steps(optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Step with gradients that depend only on the step and the index of the parameter."""
    for step in steps:
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            p.grad = random(tuple(p.shape), 100 * step + index, p.dtype)
        optimizer.step()


def tensors(optimizer: GaLore) -> list[Tensor]:
    """Parameters and state, in order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.detach() for p in params] + [t for p in params for t in optimizer.state[p].values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("projection_type", TYPES)
@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (3, 6, 4), (4, 3, 2, 2)])
def test_steps_match_the_equation(shape: tuple[int, ...], projection_type: str) -> None:
    p = nn.Parameter(random(shape, dtype=torch.float64))
    lr, (b1, b2), wd, eps, gap, scale = 0.1, (0.8, 0.95), 0.2, 1e-3, 2, 0.5
    optimizer = GaLore(
        [p], lr, (b1, b2), wd, eps, rank=2, update_proj_gap=gap, scale=scale, projection_type=projection_type
    )
    expected = p.detach().clone()
    projector = GaLoreProjector(2, gap, scale, projection_type)
    m = v = torch.zeros(())
    for t in range(1, 6):
        p.grad = random(shape, t, torch.float64)
        r = projector.project(p.grad if p.ndim < 4 else p.grad.flatten(1), t - 1)
        m, v = b1 * m + (1 - b1) * r, b2 * v + (1 - b2) * r * r
        n = math.sqrt(1 - b2**t) / (1 - b1**t) * m / (v.sqrt() + eps)
        expected = (1 - lr * wd) * expected - lr * projector.project_back(n).reshape(shape)
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)


def test_stacks_and_convolutions_equal_separate_matrices() -> None:
    stack, conv = nn.Parameter(random((3, 6, 4))), nn.Parameter(random((6, 3, 2, 2)))
    apart = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    flat = nn.Parameter(conv.detach().flatten(1).clone())
    last = nn.Parameter(conv.detach().clone(memory_format=torch.channels_last))
    optimizer = GaLore([stack, conv, *apart, flat, last], lr=0.1, rank=2, update_proj_gap=2)
    for step in range(4):
        stack.grad, conv.grad = random((3, 6, 4), step), random((6, 3, 2, 2), step)
        for part, grad in zip(apart, stack.grad, strict=True):
            part.grad = grad.clone()
        flat.grad, last.grad = conv.grad.flatten(1), conv.grad.clone(memory_format=torch.channels_last)
        optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([part.detach() for part in apart]))
    torch.testing.assert_close(conv.detach().flatten(1), flat.detach())
    torch.testing.assert_close(conv.detach(), last.detach())
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_only_matrices_of_groups_with_a_rank_are_projected() -> None:
    matrix, bias, plain = nn.Parameter(random((8, 6))), nn.Parameter(random((6,))), nn.Parameter(random((8, 6)))
    optimizer = GaLore([{"params": [matrix, bias], "rank": 2}, {"params": [plain]}])
    assert [set(optimizer.state[p]) for p in (bias, plain)] == [{"step", "exp_avg", "exp_avg_sq"}] * 2
    assert "ortho_matrix" in optimizer.state[matrix]


def test_keywords_are_the_defaults_of_all_groups() -> None:
    a, b = nn.Parameter(random((8, 6))), nn.Parameter(random((8, 6)))
    optimizer = GaLore([{"params": [a], "rank": 3}, {"params": [b], "lr": 0.5}], rank=2, projection_type="full")
    assert [group["rank"] for group in optimizer.param_groups] == [3, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]
    assert optimizer.state[a]["exp_avg"].shape == (3, 3)
    assert optimizer.state[b]["exp_avg"].shape == (2, 2)
    assert optimizer.defaults == {
        "lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 1e-6, "rank": 2, "update_proj_gap": 200,
        "scale": 0.25, "projection_type": "full", "maximize": False,
    }  # fmt: skip


@pytest.mark.parametrize("projection_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_moments_are_allocated_in_the_projected_shape(projection_type: str, dtype: torch.dtype) -> None:
    """An implementation that allocates them at the parameter's shape has no memory to save, and crashes."""
    params = parameters(dtype)
    on_meta = [nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta")) for p in params]
    optimizer, unmade = (GaLore(p, rank=3, projection_type=projection_type) for p in (params, on_meta))
    planned = [{key: (t.shape, t.dtype) for key, t in unmade.state[p].items()} for p in on_meta]
    run_steps(optimizer, range(2))
    assert [{key: (t.shape, t.dtype) for key, t in optimizer.state[p].items()} for p in params] == planned
    matrix = optimizer.state[params[0]]
    side = {"std": "right", "reverse_std": "left"}.get(projection_type, projection_type)
    low, basis = {
        "right": ((8, 3), {"ortho_matrix": (3, 5)}),
        "left": ((3, 5), {"ortho_matrix": (8, 3)}),
        "full": ((3, 3), {"ortho_matrix_left": (8, 3), "ortho_matrix_right": (3, 5)}),
    }[side]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = {"step": ((), torch.float32), "exp_avg": (low, wide), "exp_avg_sq": (low, wide)}
    assert {k: (t.shape, t.dtype) for k, t in matrix.items()} == shapes | {k: (s, dtype) for k, s in basis.items()}


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6)])
@pytest.mark.parametrize("projection_type", TYPES)
def test_update_is_projected_back_with_the_same_basis(projection_type: str, shape: tuple[int, int]) -> None:
    """An implementation that multiplies by the wrong transpose leaves the span of the basis, or crashes."""
    p = nn.Parameter(torch.zeros(shape))
    p.grad = random(shape)
    GaLore([p], lr=1.0, rank=2, scale=1.0, projection_type=projection_type).step()
    update, (u, _, vh) = p.detach(), torch.linalg.svd(p.grad, full_matrices=False)
    spans = {"left": u[:, :2] @ u[:, :2].T @ update, "right": update @ vh[:2].T @ vh[:2]}
    tall = shape[0] >= shape[1]
    sides = {"std": ["right" if tall else "left"], "reverse_std": ["left" if tall else "right"], "full": spans}
    for side in sides.get(projection_type, [projection_type]):
        torch.testing.assert_close(update, spans[side], atol=1e-5, rtol=1e-5)
    assert (update * p.grad).sum() < -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("projection_type", TYPES)
def test_state_dict_has_only_tensors_and_resumes_bit_for_bit(projection_type: str, dtype: torch.dtype) -> None:
    """An implementation that keeps a Python object in its state cannot be loaded with `weights_only`."""
    settings = {"lr": 0.01, "rank": 2, "update_proj_gap": 3, "projection_type": projection_type}
    through = GaLore(parameters(dtype), **settings)
    run_steps(through, range(4))
    assert all(isinstance(value, Tensor) for state in through.state.values() for value in state.values())
    file = io.BytesIO()
    torch.save(through.state_dict(), file)
    file.seek(0)
    resumed = GaLore([nn.Parameter(p.detach().clone()) for p in through.param_groups[0]["params"]], **settings)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert same(tensors(resumed), tensors(through))
    for optimizer in (through, resumed):
        run_steps(optimizer, range(4, 9))
    assert same(tensors(resumed), tensors(through))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps", [0, 3])
def test_step_with_a_nonfinite_gradient_is_skipped_completely(steps: int, value: float) -> None:
    """Without the check, its SVD fails or the weights become NaN."""
    optimizer, spared = (GaLore(parameters(), rank=2, update_proj_gap=1, weight_decay=0.1) for _ in range(2))
    for one in (optimizer, spared):
        run_steps(one, range(steps))
    optimizer.param_groups[0]["params"][3].grad = torch.full((7,), value)
    assert optimizer.step(lambda: 2.5) == 2.5
    assert optimizer.skipped == 1
    assert same(tensors(optimizer), tensors(spared))
    for one in (optimizer, spared):
        run_steps(one, range(steps, steps + 2))
    assert same(tensors(optimizer), tensors(spared))
    assert spared.skipped == 0


@pytest.mark.parametrize("projection_type", TYPES)
def test_projections_beyond_the_range_of_fp16_are_finite(projection_type: str) -> None:
    """Gradients of 1e4 fit in fp16, their projection (1e4 * 64 at rank 1) does not."""
    p = nn.Parameter(torch.zeros(64, 64, dtype=torch.float16))
    optimizer = GaLore([p], lr=0.01, rank=1, projection_type=projection_type)
    for _ in range(2):
        p.grad = torch.full((64, 64), 1e4, dtype=torch.float16)
        optimizer.step()
    assert p.isfinite().all()
    assert (p < 0).all()


@pytest.mark.parametrize("projection_type", TYPES)
def test_zero_and_rank_deficient_gradients(projection_type: str) -> None:
    p = nn.Parameter(random((8, 5)))
    optimizer = GaLore([p], lr=0.1, rank=4, update_proj_gap=2, projection_type=projection_type)
    before = p.detach().clone()
    p.grad = torch.zeros(8, 5)
    optimizer.step()
    assert torch.equal(p, before)
    for _ in range(3):
        p.grad = torch.ones(8, 5)
        optimizer.step()
    assert p.isfinite().all()
    assert p.sum() < before.sum()


def test_steps_are_counted_per_parameter_and_missing_gradients_are_skipped() -> None:
    a, b = nn.Parameter(random((8, 5))), nn.Parameter(random((8, 5)))
    optimizer = GaLore([a, b], rank=2, update_proj_gap=2)
    bases = []
    for step in range(4):
        a.grad, b.grad = random((8, 5), step), random((8, 5), 9) if step == 3 else None
        optimizer.step()
        bases.append(optimizer.state[a]["ortho_matrix"].clone())
    assert [int(optimizer.state[p]["step"]) for p in (a, b)] == [4, 1]
    assert [torch.equal(x, y) for x, y in itertools.pairwise(bases)] == [True, False, True]
    expected = GaLoreProjector.get_orthogonal_matrix(random((8, 5), 9), 2, "right")
    assert torch.equal(optimizer.state[b]["ortho_matrix"], expected)


def test_reset_zeroes_the_state_and_restarts() -> None:
    optimizer, start = GaLore(parameters(), rank=2, update_proj_gap=3), parameters()
    run_steps(optimizer, range(5))
    optimizer.reset()
    assert not any(tensor.any() for state in optimizer.state.values() for tensor in state.values())
    for p, original in zip(optimizer.param_groups[0]["params"], start, strict=True):
        p.data.copy_(original)
    run_steps(optimizer, range(3))
    fresh = GaLore(start, rank=2, update_proj_gap=3)
    run_steps(fresh, range(3))
    assert same(tensors(optimizer), tensors(fresh))


def test_maximize_ascends() -> None:
    down, up = (GaLore(parameters(), rank=2, update_proj_gap=2, maximize=maximize) for maximize in (False, True))
    for step in range(5):
        for p, q in zip(down.param_groups[0]["params"], up.param_groups[0]["params"], strict=True):
            q.grad = random(tuple(p.shape), step)
            p.grad = -q.grad
        down.step()
        up.step()
    for p, q in zip(down.param_groups[0]["params"], up.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    layer = nn.Linear(6, 4)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = GaLore(layer.parameters(), lr=0.05, rank=2, update_proj_gap=5)
    x = random((32, 6))
    y = x @ random((6, 4), 1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        losses = [optimizer.step(closure) for _ in range(60)]
    assert losses[-1] < 0.8 * losses[0]


def test_sparse_gradients_are_rejected_before_any_update() -> None:
    table, matrix = nn.Embedding(6, 4, sparse=True), nn.Parameter(random((6, 4)))
    optimizer = GaLore([matrix, table.weight], rank=2)
    (table(torch.tensor([1, 2])) @ matrix.T).sum().backward()
    before = matrix.detach().clone()
    with pytest.raises(NoSparseGradientError, match="GaLore expected dense gradients") as refused:
        optimizer.step()
    assert isinstance(refused.value, OptimizerError)
    assert isinstance(refused.value, RuntimeError)
    assert torch.equal(matrix, before)


def test_empty_and_frozen_parameters() -> None:
    empty, frozen = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(random((8, 5)), requires_grad=False)
    optimizer = GaLore([empty, frozen], rank=2)
    assert frozen not in optimizer.state
    frozen.requires_grad_(True)
    empty.grad, frozen.grad = torch.zeros(0, 4), random((8, 5))
    optimizer.step()
    assert int(optimizer.state[frozen]["step"]) == 1


def test_str_is_the_class_name() -> None:
    assert str(GaLore(parameters())) == "GaLore"


def test_deepcopy_continues_identically() -> None:
    optimizer = GaLore(parameters(), rank=2)
    run_steps(optimizer, range(2))
    clone = copy.deepcopy(optimizer)
    for one in (optimizer, clone):
        run_steps(one, range(2, 4))
    assert same(tensors(optimizer), tensors(clone))
    assert clone.skipped == 0


def test_step_in_backward_equals_step_after_it() -> None:
    layers = [nn.Linear(6, 6) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    plain, inner = (GaLore(layer.parameters(), rank=2, update_proj_gap=2) for layer in layers)
    stepping = step_in_backward(inner)
    for step in range(4):
        for layer, optimizer in zip(layers, (plain, stepping), strict=True):
            optimizer.zero_grad()
            layer(random((5, 6), step)).square().sum().backward()
            optimizer.step()
    assert same(tensors(plain), tensors(inner))


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(8, 5, generator=torch.Generator().manual_seed(0)))


def stepped(optimizer: GaLore) -> GaLore:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1e-3}, "lr: expected a number >= 0, got"),
        ({"lr": "fast"}, "lr: expected a number >= 0, got"),
        ({"lr": float("nan")}, "lr: expected a number >= 0, got"),
        ({"weight_decay": -0.1}, "weight_decay: expected a number >= 0, got"),
        ({"eps": -1e-8}, "eps: expected a number >= 0, got"),
        ({"scale": -1.0}, "scale: expected a number >= 0, got"),
        ({"betas": (0.9, 1.0)}, "betas: expected two numbers"),
        ({"betas": (-0.1, 0.9)}, "betas: expected two numbers"),
        ({"betas": 0.9}, "betas: expected two numbers"),
        ({"rank": 0}, "rank: expected an integer >= 1, got 0"),
        ({"rank": 0.5}, "rank: expected an integer >= 1, got 0.5"),
        ({"update_proj_gap": 0}, "update_proj_gap: expected an integer >= 1, got 0"),
        ({"projection_type": "rigth"}, "projection_type: expected one of std.* got 'rigth'"),
    ],
)
def test_invalid_options_are_rejected_by_name(settings: dict[str, Any], message: str) -> None:
    for groups, defaults in (([matrix()], settings), ([{"params": [matrix()], **settings}], {})):
        with pytest.raises(OptimizerError, match=message):
            GaLore(groups, **defaults)


def test_zero_is_valid_for_rates_and_betas() -> None:
    optimizer = GaLore([matrix()], lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, eps=0.0, rank=1, scale=0.0)
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    assert torch.equal(stepped(optimizer).param_groups[0]["params"][0], before)


def test_unknown_options_are_rejected() -> None:
    with pytest.raises(TypeError, match="proj_type"):
        GaLore([matrix()], rank=2, proj_type="std")
    with pytest.raises(OptimizerError, match="unknown option 'proj_type' .* did you mean 'projection_type'"):
        GaLore([{"params": [matrix()], "rank": 2, "proj_type": "std"}])
    labels = {"names": ["a"], "peak_lr": 1.0, "initial_lr": 1.0, "splits": [()]}
    assert GaLore([{"params": [matrix()], **labels}]).param_groups[0]["names"] == ["a"]
    assert GaLore([("a", matrix())]).param_groups[0]["param_names"] == ["a"]


def test_rejected_group_is_not_added() -> None:
    optimizer = GaLore([matrix()], rank=2)
    with pytest.raises(OptimizerError, match="torch.complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    late = matrix()
    optimizer.add_param_group({"params": [late], "rank": 3})
    assert optimizer.state[late]["exp_avg"].shape == (8, 3)


def test_mismatched_state_dict_is_rejected_without_changes() -> None:
    optimizer = stepped(GaLore([matrix()], rank=2))
    (p,) = optimizer.param_groups[0]["params"]
    before = {key: tensor.clone() for key, tensor in optimizer.state[p].items()}
    adam = torch.optim.AdamW([matrix()]).state_dict()
    wide = stepped(GaLore([nn.Parameter(torch.zeros(8, 6))], rank=2)).state_dict()
    other = stepped(GaLore([matrix()], rank=2)).state_dict()
    other["param_groups"][0]["projection_type"] = "full"
    narrow = stepped(GaLore([matrix()], rank=1)).state_dict()
    beyond = stepped(GaLore([matrix()], rank=2)).state_dict()
    beyond["param_groups"][0]["betas"] = (0.9, 1.0)
    for bad, message in (
        (adam, "expected a saved state of GaLore, got one without 'rank'"),
        (wide, r"shape \(8, 5\): expected a saved state with ortho_matrix of \(2, 5\), got \(2, 6\)"),
        (other, "expected a saved state with projection_type = 'std', got 'full'"),
        (narrow, "expected a saved state with rank = 2, got 1"),
        (beyond, "betas: expected two numbers"),
    ):
        with pytest.raises(OptimizerError, match=message):
            optimizer.load_state_dict(bad)
        assert optimizer.param_groups[0]["rank"] == 2
        assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.state[p].items())
    with pytest.raises(ValueError, match="expected a saved state with groups"):
        optimizer.load_state_dict(GaLore([matrix(), matrix()], rank=2).state_dict())
    assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.state[p].items())


def test_loaded_state_is_a_copy() -> None:
    saved = stepped(GaLore([matrix()], rank=4)).state_dict()
    optimizer = GaLore([matrix()], rank=4)
    optimizer.load_state_dict(saved)
    (p,) = optimizer.param_groups[0]["params"]
    assert torch.equal(optimizer.state[p]["exp_avg"], saved["state"][0]["exp_avg"])
    optimizer.reset()
    assert saved["state"][0]["exp_avg"].any()
    optimizer.add_param_group({"params": [matrix()]})


def test_load_hooks_see_the_complete_state() -> None:
    """A pre-hook that reorders parameters, and a post-hook that reads the moments."""
    saved = stepped(GaLore([matrix(), nn.Parameter(torch.ones(3))], rank=2)).state_dict()
    bias, weight = nn.Parameter(torch.ones(3)), matrix()
    optimizer = GaLore([bias, weight], rank=2)
    seen: list[Tensor] = []

    def swap_states(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict | {"state": {0: state_dict["state"][1], 1: state_dict["state"][0]}}

    optimizer.register_load_state_dict_pre_hook(swap_states)
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append(own.state[weight]["exp_avg"].clone()))
    optimizer.load_state_dict(saved)
    assert torch.equal(seen[0], saved["state"][0]["exp_avg"])
    assert torch.equal(optimizer.state[bias]["exp_avg"], saved["state"][1]["exp_avg"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("projection_type", TYPES)
def test_state_moves_with_the_model_to_its_device(projection_type: str, dtype: torch.dtype) -> None:
    """`transformers.Trainer` moves a model after its optimizer is built. GPU results match the CPU."""
    cpu_params, gpu_params = (nn.ParameterList(parameters(dtype)) for _ in range(2))
    optimizer, moved = (
        GaLore(m.parameters(), lr=1e-2, rank=2, projection_type=projection_type) for m in (cpu_params, gpu_params)
    )
    gpu_params.to("cuda")
    for step in range(3):
        for index, (p, q) in enumerate(zip(cpu_params, gpu_params, strict=True)):
            p.grad = random(tuple(p.shape), 100 * step + index, dtype)
            q.grad = p.grad.to("cuda")
        optimizer.step()
        moved.step()
    bar = 1e-4 if dtype == torch.float32 else 3e-2
    for p, q in zip(cpu_params, gpu_params, strict=True):
        torch.testing.assert_close(p, q.cpu(), atol=bar, rtol=bar)
        assert all(t.is_cuda == (key != "step") for key, t in moved.state[q].items())
    gpu_params[0].grad.fill_(math.nan)
    moved.step()
    assert moved.skipped == 1
