"""Which parameter an optimizer gets, and with which settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from whimbrel.base.errors import ConfigError, OptimizerError
from whimbrel.config import build
from whimbrel.optim import GroupConfig, OptimConfig, ScheduleConfig, build_optimizer, route_parameters


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.inner, self.norm = nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        if tied:
            self.lm_head.weight = self.table.weight


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    return {name: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for name in g["names"]}


def test_roles_of_any_model() -> None:
    roles = {item.name: item.role for item in route_parameters(Net(tied=False))}
    assert roles == {
        "table.weight": "embedding", "inner.weight": "hidden", "inner.bias": "scalar", "norm.weight": "scalar",
        "norm.bias": "scalar", "lm_head.weight": "head",
    }  # fmt: skip


def test_tied_parameters_come_once_and_frozen_ones_not_at_all() -> None:
    net = Net(tied=True)
    net.inner.requires_grad_(False)
    roles = {item.name: item.role for item in route_parameters(net)}
    assert roles == {"table.weight": "embedding", "norm.weight": "scalar", "norm.bias": "scalar"}
    with pytest.raises(OptimizerError, match="Net has no parameter that is trained"):
        route_parameters(net.requires_grad_(False))


def test_splits_are_given_by_name() -> None:
    routed = {item.name: item.splits for item in route_parameters(Net(tied=True), {"inner.weight": (2, 2)})}
    assert (routed["inner.weight"], routed["table.weight"]) == ((2, 2), ())


def test_a_hugging_face_model_is_routed() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    roles = {item.name: item.role for item in route_parameters(transformers.LlamaForCausalLM(config))}
    assert (roles["model.embed_tokens.weight"], roles["lm_head.weight"]) == ("embedding", "head")
    assert (roles["model.layers.0.mlp.up_proj.weight"], roles["model.norm.weight"]) == ("hidden", "scalar")


def test_groups_by_pattern() -> None:
    groups = (
        GroupConfig(pattern=r"^inner\.", lr=0.5),
        GroupConfig(pattern=r"weight$", weight_decay=0.25),
    )
    optimizer = build_optimizer(OptimConfig(lr=0.1, weight_decay=0.01, groups=groups), route_parameters(Net(tied=True)))
    assert settings_of(optimizer) == {
        "table.weight": (0.1, 0.25), "inner.weight": (0.5, 0.01), "inner.bias": (0.5, 0.0),
        "norm.weight": (0.1, 0.25), "norm.bias": (0.1, 0.0),
    }  # fmt: skip
    assert all(group["peak_lr"] == group["lr"] for group in optimizer.param_groups)


def test_groups_come_from_tables() -> None:
    config = build(OptimConfig, {"groups": [{"pattern": "bias", "lr": 1}]}, "optim")
    assert config.groups == (GroupConfig(pattern="bias", lr=1.0),)
    with pytest.raises(ConfigError, match=r"unknown setting 'optim.groups\[0\].patern': did you mean 'pattern'\?"):
        build(OptimConfig, {"groups": [{"patern": "bias"}]}, "optim")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"pattern": "("}, "the pattern '\\(', no regular expression"),
        ({"pattern": "x"}, "sets nothing for 'x': give it lr, weight_decay, rank or subspace"),
        ({"pattern": "x", "lr": -1.0}, "lr = -1.0 for 'x': it must not be negative"),
    ],
)
def test_bad_groups_are_refused(group: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupConfig(**group)  # type: ignore[arg-type]


def test_a_pattern_without_parameters_is_refused() -> None:
    config = OptimConfig(groups=(GroupConfig(pattern="wte", lr=1.0),))
    with pytest.raises(ConfigError, match="the pattern 'wte', which is in no parameter's name"):
        build_optimizer(config, route_parameters(Net(tied=True)))


def test_optimizers_and_schedules_by_name() -> None:
    assert OptimConfig(lr=0.1).named("muon") == OptimConfig(name="muon", lr=0.1)
    assert ScheduleConfig(warmup_steps=3).named("cosine") == ScheduleConfig(name="cosine", warmup_steps=3)
    with pytest.raises(ConfigError, match=r"optim.name = 'adam' is not one of adamw, .*, muon: did you mean 'adamw'\?"):
        OptimConfig().named("adam")
    with pytest.raises(ConfigError, match="schedule.name = 'steps' is not one of constant"):
        ScheduleConfig().named("steps")
