"""What GaLore refuses: settings, keys, parameters, and states that are not its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whimbrel.base.errors import OptimizerError
from whimbrel.optim import GaLore


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
        ({"lr": -1e-3}, "lr = -0.001 must be a number of at least 0"),
        ({"lr": "fast"}, "lr = 'fast' must be a number of at least 0"),
        ({"lr": float("nan")}, "lr = nan must be a number of at least 0"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1 must be a number of at least 0"),
        ({"eps": -1e-8}, "eps = -1e-08 must be a number of at least 0"),
        ({"scale": -1.0}, "scale = -1.0 must be a number of at least 0"),
        ({"betas": (0.9, 1.0)}, "betas = (0.9, 1.0) must be two numbers, each at least 0 and below 1"),
        ({"betas": (-0.1, 0.9)}, "betas = (-0.1, 0.9) must be two numbers, each at least 0 and below 1"),
        ({"betas": 0.9}, "betas = 0.9 must be two numbers, each at least 0 and below 1"),
        ({"rank": 0}, "rank = 0 must be a whole number of at least 1"),
        ({"rank": 0.5}, "rank = 0.5 must be a whole number of at least 1"),
        ({"update_proj_gap": 0}, "update_proj_gap = 0 must be a whole number of at least 1"),
        ({"projection_type": "rigth"}, "projection_type = 'rigth' is not one of std, reverse_std, right, left, full"),
    ],
)
def test_bad_values_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    for groups, defaults in (([matrix()], settings), ([{"params": [matrix()], **settings}], {})):
        with pytest.raises(OptimizerError) as refused:
            GaLore(groups, **defaults)
        assert str(refused.value) == message


def test_zero_is_allowed_where_it_means_something() -> None:
    optimizer = GaLore([matrix()], lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, eps=0.0, rank=1, scale=0.0)
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    assert torch.equal(stepped(optimizer).param_groups[0]["params"][0], before)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="proj_type"):
        GaLore([matrix()], rank=2, proj_type="std")
    with pytest.raises(
        OptimizerError, match="a group has 'proj_type', which GaLore does not know: did you mean 'projection_type'"
    ):
        GaLore([{"params": [matrix()], "rank": 2, "proj_type": "std"}])
    labels = {"names": ["a"], "peak_lr": 1.0, "initial_lr": 1.0, "splits": [()]}
    assert GaLore([{"params": [matrix()], **labels}]).param_groups[0]["names"] == ["a"]
    assert GaLore([("a", matrix())]).param_groups[0]["param_names"] == ["a"]


def test_a_group_that_is_refused_is_not_there() -> None:
    optimizer = GaLore([matrix()], rank=2)
    with pytest.raises(OptimizerError, match="torch.complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    late = matrix()
    optimizer.add_param_group({"params": [late], "rank": 3})
    assert optimizer.state[late]["exp_avg"].shape == (8, 3)


def test_a_state_of_other_shapes_or_another_optimizer_is_refused_and_nothing_has_changed() -> None:
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
        (adam, "another optimizer than GaLore: no projection_type, rank, scale, update_proj_gap"),
        (wide, r"shape \(8, 5\) has .*'ortho_matrix': \(2, 6\).* needs .*'ortho_matrix': \(2, 5\)"),
        (other, "expected a state of rank = 2, projection_type = 'std', got one of rank = 2, projection_type = 'full'"),
        (narrow, "expected a state of rank = 2, projection_type = 'std', got one of rank = 1, projection_type = 'std'"),
        (beyond, r"betas = \(0.9, 1.0\) must be"),
    ):
        with pytest.raises(OptimizerError, match=message):
            optimizer.load_state_dict(bad)
        assert optimizer.param_groups[0]["rank"] == 2
        assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.state[p].items())
    with pytest.raises(ValueError, match="size of optimizer's group"):
        optimizer.load_state_dict(GaLore([matrix(), matrix()], rank=2).state_dict())
    assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.state[p].items())


def test_a_loaded_state_is_a_copy() -> None:
    saved = stepped(GaLore([matrix()], rank=4)).state_dict()
    optimizer = GaLore([matrix()], rank=4)
    optimizer.load_state_dict(saved)
    (p,) = optimizer.param_groups[0]["params"]
    assert torch.equal(optimizer.state[p]["exp_avg"], saved["state"][0]["exp_avg"])
    optimizer.reset()
    assert saved["state"][0]["exp_avg"].any()
    optimizer.add_param_group({"params": [matrix()]})


def test_hooks_see_the_whole_of_a_state() -> None:
    """One that puts parameters in another order before, one that looks at the moments after."""
    saved = stepped(GaLore([matrix(), nn.Parameter(torch.ones(3))], rank=2)).state_dict()
    bias, weight = nn.Parameter(torch.ones(3)), matrix()
    optimizer = GaLore([bias, weight], rank=2)
    seen: list[Tensor] = []

    def turn(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict | {"state": {0: state_dict["state"][1], 1: state_dict["state"][0]}}

    optimizer.register_load_state_dict_pre_hook(turn)
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append(own.state[weight]["exp_avg"].clone()))
    optimizer.load_state_dict(saved)
    assert torch.equal(seen[0], saved["state"][0]["exp_avg"])
    assert torch.equal(optimizer.state[bias]["exp_avg"], saved["state"][1]["exp_avg"])
