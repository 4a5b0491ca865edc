"""Routing of parameters, parameter groups, and restoring saved state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from whimbrel.base.errors import ConfigError, OptimizerError
from whimbrel.config import build
from whimbrel.optim import (
    GaLore,
    GroupConfig,
    OptimConfig,
    ParameterInfo,
    ScheduleConfig,
    build_optimizer,
    classify_parameters,
    restore_optimizer,
)
from whimbrel.optim.build import OPTIMIZERS, OPTIONS_BY_OPTIMIZER

NAMES = get_args(get_type_hints(OptimConfig)["name"])
LOW = [name for name in NAMES if "rank" in OPTIONS_BY_OPTIMIZER[name]]
SMALL = {name: {"rank": 2} if name in LOW else {} for name in NAMES}


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.inner, self.norm = nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        if tied:
            self.lm_head.weight = self.table.weight


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    return {name: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for name in g["names"]}


def test_classify_parameters_assigns_roles() -> None:
    roles = {item.name: item.role for item in classify_parameters(Net(tied=False))}
    assert roles == {
        "table.weight": "embedding", "inner.weight": "hidden", "inner.bias": "scalar", "norm.weight": "scalar",
        "norm.bias": "scalar", "lm_head.weight": "head",
    }  # fmt: skip


def test_classify_parameters_lists_tied_parameters_once_and_skips_frozen_ones() -> None:
    net = Net(tied=True)
    net.inner.requires_grad_(False)
    roles = {item.name: item.role for item in classify_parameters(net)}
    assert roles == {"table.weight": "embedding", "norm.weight": "scalar", "norm.bias": "scalar"}
    with pytest.raises(OptimizerError, match="Net has no trainable parameters"):
        classify_parameters(net.requires_grad_(False))


def test_classify_parameters_assigns_splits_by_name() -> None:
    parameters = {item.name: item.splits for item in classify_parameters(Net(tied=True), {"inner.weight": (2, 2)})}
    assert (parameters["inner.weight"], parameters["table.weight"]) == ((2, 2), ())


def test_classify_parameters_of_a_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    roles = {item.name: item.role for item in classify_parameters(transformers.LlamaForCausalLM(config))}
    assert (roles["model.embed_tokens.weight"], roles["lm_head.weight"]) == ("embedding", "head")
    assert (roles["model.layers.0.mlp.up_proj.weight"], roles["model.norm.weight"]) == ("hidden", "scalar")


def test_groups_match_parameters_by_pattern() -> None:
    groups = (
        GroupConfig(pattern=r"^inner\.", lr=0.5),
        GroupConfig(pattern=r"weight$", weight_decay=0.25),
    )
    optimizer = build_optimizer(
        OptimConfig(lr=0.1, weight_decay=0.01, groups=groups), classify_parameters(Net(tied=True))
    )
    assert settings_of(optimizer) == {
        "table.weight": (0.1, 0.25), "inner.weight": (0.5, 0.01), "inner.bias": (0.5, 0.0),
        "norm.weight": (0.1, 0.25), "norm.bias": (0.1, 0.0),
    }  # fmt: skip
    assert all(group["peak_lr"] == group["lr"] for group in optimizer.param_groups)


def test_groups_are_read_from_tables() -> None:
    config = build(OptimConfig, {"groups": [{"pattern": "bias", "lr": 1}]}, "optim")
    assert config.groups == (GroupConfig(pattern="bias", lr=1.0),)
    with pytest.raises(ConfigError, match=r"groups\[0\].patern': did you mean 'optim.groups\[0\].pattern'\?"):
        build(OptimConfig, {"groups": [{"patern": "bias"}]}, "optim")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"pattern": "("}, "expected a regular expression"),
        ({"pattern": "x"}, "no options given: set lr"),
        ({"pattern": "x", "lr": -1.0}, "expected lr >= 0, got -1.0"),
        ({"pattern": "x", "rank": 0}, "expected rank >= 1, got 0"),
        ({"pattern": "x", "rank": 4, "subspace": False}, "rank = 4 conflicts with subspace"),
    ],
)
def test_invalid_groups_are_rejected(group: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupConfig(**group)  # type: ignore[arg-type]


def test_pattern_that_matches_nothing_is_rejected() -> None:
    config = OptimConfig(groups=(GroupConfig(pattern="wte", lr=1.0),))
    with pytest.raises(ConfigError, match="'wte': no parameter name matches"):
        build_optimizer(config, classify_parameters(Net(tied=True)))


def test_with_name_changes_only_the_name() -> None:
    assert OptimConfig(lr=0.1).with_name("muon") == OptimConfig(name="muon", lr=0.1)
    assert ScheduleConfig(warmup_steps=3).with_name("cosine") == ScheduleConfig(name="cosine", warmup_steps=3)
    with pytest.raises(
        ConfigError, match=r"optim.name: expected one of adamw, .*, muon.* got 'adam': did you mean 'adamw'\?"
    ):
        OptimConfig().with_name("adam")
    with pytest.raises(ConfigError, match="schedule.name: expected one of constant.* got 'steps'"):
        ScheduleConfig().with_name("steps")


OPTION_VALUES = {
    "rank": 2, "gap": 3, "lazy": True, "moment_transfer": "align", "scale": 0.5, "side": "left", "store": "bf16",
    "basis_store": "int8", "start": "random", "projection_type": "left", "momentum": 0.5, "momentum_start": 0.25,
    "momentum_warmup": 3, "neuron_beta": 0.5, "cautious_decay": True,
}  # fmt: skip
GROUP_NAMES = {"galore": {"gap": "update_proj_gap"}}


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_an_optimizer_reaches_its_groups(name: str) -> None:
    assert list(OPTIMIZERS) == list(OPTIONS_BY_OPTIMIZER) == list(NAMES)
    options = {option: OPTION_VALUES[option] for option in OPTIONS_BY_OPTIMIZER[name]}
    optimizer = build_optimizer(OptimConfig(name=name, **options), classify_parameters(Net(tied=True)))  # type: ignore[arg-type]
    for option, value in options.items():
        assert optimizer.defaults[GROUP_NAMES.get(name, {}).get(option, option)] == value


def kinds(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: group.get("rank", group.get("rule")) for group in optimizer.param_groups for name in group["names"]}


@pytest.mark.parametrize("name", LOW)
def test_hidden_matrices_get_a_subspace_and_the_rest_adamw(name: str) -> None:
    optimizer = build_optimizer(OptimConfig(name=name), classify_parameters(Net(tied=False)))  # type: ignore[arg-type]
    default = 1 if name == "apollo_mini" else 128
    assert kinds(optimizer) == {
        "inner.weight": default, "table.weight": None, "lm_head.weight": None, "inner.bias": None, "norm.weight": None,
        "norm.bias": None,
    }  # fmt: skip
    shapes = {name: first_moment(optimizer, name).shape for name in ("inner.weight", "table.weight")}
    assert shapes["table.weight"] == (7, 4)
    assert shapes["inner.weight"] == ((4, 1) if name == "apollo_mini" else (4, 4))


def first_moment(optimizer: torch.optim.Optimizer, name: str) -> torch.Tensor:
    """The first moment of a parameter."""
    for group in optimizer.param_groups:
        for found, parameter in zip(group["names"], group["params"], strict=True):
            if found == name:
                return optimizer.state[parameter]["exp_avg"]  # type: ignore[no-any-return]
    raise KeyError(name)


def test_groups_set_ranks_and_disable_subspaces() -> None:
    groups = (
        GroupConfig(pattern="inner", subspace=False),
        GroupConfig(pattern="table", rank=3),
        GroupConfig(pattern="head", subspace=True),
    )
    optimizer = build_optimizer(OptimConfig(name="galore_warm", rank=2, groups=groups), classify_parameters(Net(False)))
    assert {name: first_moment(optimizer, f"{name}.weight").shape[1] for name in ("inner", "table", "lm_head")} == {
        "inner": 4, "table": 3, "lm_head": 2,
    }  # fmt: skip
    vectors = OptimConfig(name="galore_warm", groups=(GroupConfig(pattern="norm", rank=3),))
    with pytest.raises(ConfigError, match="only vectors match"):
        build_optimizer(vectors, classify_parameters(Net(False)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 8}, "optim.rank = 8 needs optim.name = galore or galore_warm or qgalore or apollo"),
        ({"name": "muon", "gap": 8}, "optim.gap = 8 needs optim.name = galore or"),
        ({"name": "adamw8bit", "store": "int8"}, "optim.store = 'int8' needs optim.name = galore_warm or apollo or"),
        ({"name": "galore", "side": "left"}, "optim.side = 'left' needs optim.name = galore_warm: set that, or remove"),
        (
            {"name": "galore_warm", "projection_type": "full"},
            "optim.projection_type = 'full' needs optim.name = galore",
        ),
        ({"name": "ldadam", "gap": 2}, "optim.gap = 2 needs"),
        ({"name": "qgalore", "momentum": 0.5}, "optim.momentum = 0.5 needs optim.name = muon"),
        ({"name": "galore_warm", "rank": 0}, "optim.rank: expected .* got 0"),
        ({"name": "galore_warm", "gap": 0}, "optim.gap: expected .* got 0"),
        ({"name": "galore_warm", "scale": -1.0}, "optim.scale: expected .* got -1.0"),
        ({"name": "galore_warm", "store": "int4"}, "optim.store: expected one of fp32, bf16, int8.* got 'int4'"),
        ({"name": "galore_warm", "rnk": 4}, "unknown setting 'optim.rnk': did you mean 'optim.rank'"),
        ({"groups": [{"pattern": "x", "rank": 4}]}, "optim.groups.rank = 4 needs optim.name = galore or"),
        ({"name": "muon", "groups": [{"pattern": "x", "subspace": False}]}, "optim.groups.subspace = False needs"),
    ],
)
def test_options_without_effect_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(OptimConfig, settings, "optim")


@pytest.mark.parametrize("name", ["galore_warm", "apollo", "fira"])
def test_store_applies_to_parameters_without_a_subspace(name: str) -> None:
    config = OptimConfig(name=name, rank=64, store="int8")  # type: ignore[arg-type]
    model = nn.ModuleDict({"table": nn.Embedding(128, 64), "inner": nn.Linear(64, 64)})
    optimizer = build_optimizer(config, classify_parameters(model))
    assert {name: first_moment(optimizer, f"{name}.weight").dtype for name in model} == dict.fromkeys(model, torch.int8)


def test_seed_reaches_the_optimizer() -> None:
    optimizers = [
        build_optimizer(OptimConfig(name="apollo"), classify_parameters(Net(True)), seed=seed)
        for seed in (0, 1, 2**63 - 1)
    ]
    seeds = [[int(state["seed"]) for state in optimizer.state.values()] for optimizer in optimizers]
    assert len({tuple(found) for found in seeds}) == 3


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", NAMES)
def test_restore_matches_parameters_by_name_across_groups(name: str) -> None:
    """The groups of the saved state were different and in another order."""
    torch.manual_seed(0)
    first, second = Net(tied=False), Net(tied=False)
    config = OptimConfig(name=name, lr=0.1, **SMALL[name])  # type: ignore[arg-type]
    optimizer = build_optimizer(config, classify_parameters(first), seed=5)
    for step in range(3):
        gradients(first, step)
        optimizer.step()
    other = OptimConfig(
        name=name,
        lr=0.1,
        **SMALL[name],
        groups=(GroupConfig(pattern="table|inner.bias", lr=0.2),),  # type: ignore[arg-type]
    )
    again = build_optimizer(other, classify_parameters(second)[::-1])
    second.load_state_dict(first.state_dict())
    restore_optimizer(again, copy.deepcopy(optimizer.state_dict()))
    for group in again.param_groups:
        assert group["lr"] == (0.2 if {"table.weight", "inner.bias"} & {*group["names"]} else 0.1)
        group["lr"] = 0.1
    for net, moving in ((first, optimizer), (second, again)):
        gradients(net, 3)
        moving.step()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("saved", "requested", "message"),
    [
        (
            {"name": "galore_warm", "rank": 2},
            {"name": "galore_warm", "rank": 3},
            "inner.weight: expected rank = 3, got 2",
        ),
        (
            {"name": "galore_warm"},
            {"name": "galore_warm", "side": "left"},
            "expected side = 'left', got 'right'",
        ),
        (
            {"name": "galore_warm"},
            {"name": "galore_warm", "store": "int8"},
            "expected store = 'int8', got 'fp32'",
        ),
        (
            {"name": "galore"},
            {"name": "galore", "projection_type": "left"},
            "expected projection_type = 'left', got 'std'",
        ),
        (
            {"name": "apollo", "rank": 1},
            {"name": "apollo_mini"},
            "expected back_projection = 'apollo_mini', got 'apollo'",
        ),
        ({"name": "galore_warm", "rank": 2}, {"name": "galore", "rank": 2}, "from a different optimizer"),
        ({}, {"name": "adamw8bit"}, "from a different optimizer"),
        ({"name": "muon"}, {}, "from a different optimizer"),
    ],
)
def test_restore_rejects_state_of_other_options(saved: dict[str, Any], requested: dict[str, Any], message: str) -> None:
    before, after = (
        build_optimizer(OptimConfig(**settings), classify_parameters(Net(False))) for settings in (saved, requested)
    )
    with pytest.raises(OptimizerError, match=message):
        restore_optimizer(after, before.state_dict())
    other = build_optimizer(OptimConfig(**requested), classify_parameters(Net(tied=True)))
    with pytest.raises(OptimizerError, match="different parameters: lm_head.weight"):
        restore_optimizer(after, other.state_dict())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("adamw", "muon")])
def test_reset_restores_the_initial_state(name: str) -> None:
    torch.manual_seed(0)
    net = Net(tied=True)
    optimizer = build_optimizer(OptimConfig(name=name, **SMALL[name]), classify_parameters(net))  # type: ignore[arg-type]
    fresh = [{key: value.clone() for key, value in state.items()} for state in optimizer.state.values()]
    gradients(net, 0)
    optimizer.step()
    assert any(
        not torch.equal(a, b[key]) for b, s in zip(fresh, optimizer.state.values(), strict=True) for key, a in s.items()
    )
    optimizer.reset()  # type: ignore[attr-defined]
    for before, after in zip(fresh, optimizer.state.values(), strict=True):
        assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_full_rank_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 96), "b": nn.Linear(200, 300)})
    for rank, warnings in ((None, 1), (64, 1), (32, 0)):
        caplog.clear()
        build_optimizer(OptimConfig(name="galore_warm", rank=rank), classify_parameters(model))
        assert len(caplog.records) == warnings
        assert all(f"rank {rank or 128} is the full rank of 1 parameters" in r.getMessage() for r in caplog.records)


def test_full_rank_of_an_expert_stack_is_the_rank_of_its_matrices(caplog: pytest.LogCaptureFixture) -> None:
    """Eight experts of 16 x 4 have rank 4; as a matrix of 8 x 64 the stack would have rank 8."""
    stack = ParameterInfo("experts", nn.Parameter(torch.zeros(8, 16, 4)), "hidden")
    build_optimizer(OptimConfig(name="galore", rank=4), [stack])
    assert "rank 4 is the full rank of 1 parameters" in caplog.text
    caplog.clear()
    few = ParameterInfo("experts", nn.Parameter(torch.zeros(2, 16, 16)), "hidden")
    build_optimizer(OptimConfig(name="galore", rank=4), [few])
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimConfig(name="galoor"), r"optim.name: expected one of .* got 'galoor': did you mean 'galore'\?"),
        (
            lambda: OptimConfig(name="galore", projection_type="x"),
            "optim.projection_type: expected one of std.* got 'x'",
        ),
        (
            lambda: OptimConfig(name="galore_warm", store="int9"),
            r"optim.store: expected .* got 'int9': did you mean 'int8'\?",
        ),
        (
            lambda: OptimConfig(decay_params="none"),
            "optim.decay_params: expected one of all, matrices, hidden.* got 'none'",
        ),
        (lambda: ScheduleConfig(name="cosin"), r"schedule.name: expected .* got 'cosin': did you mean 'cosine'\?"),
    ],
)
def test_unknown_choices_are_rejected_by_the_constructor(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_restore_includes_the_count_of_skipped_steps() -> None:
    first, second = (
        build_optimizer(OptimConfig(name="galore", rank=2), classify_parameters(Net(True))) for _ in range(2)
    )
    assert isinstance(first, GaLore)
    assert isinstance(second, GaLore)
    first.skipped = 3
    restore_optimizer(second, first.state_dict())
    assert second.skipped == 3


def parameters() -> list[ParameterInfo]:
    return [
        ParameterInfo("block.weight", nn.Parameter(torch.ones(4, 4)), "hidden"),
        ParameterInfo("block.bias", nn.Parameter(torch.ones(4)), "scalar"),
        ParameterInfo("wte.weight", nn.Parameter(torch.ones(8, 4)), "embedding"),
        ParameterInfo("lm_head.weight", nn.Parameter(torch.ones(8, 4)), "head"),
    ]


def test_build_assigns_learning_rates_decay_and_rules() -> None:
    config = OptimConfig(
        name="muon", lr=0.02, embedding_lr=0.3, head_lr=0.004, scalar_lr=0.01, weight_decay=0.05, decay_params="hidden"
    )
    optimizer = build_optimizer(config, parameters())
    groups = {group["names"][0]: group for group in optimizer.param_groups}
    assert {name: (g["rule"], g["lr"], g["weight_decay"]) for name, g in groups.items()} == {
        "block.weight": ("muon", 0.02, 0.05),
        "block.bias": ("adam", 0.01, 0.0),
        "wte.weight": ("adam", 0.3, 0.0),
        "lm_head.weight": ("adam", 0.004, 0.0),
    }


@pytest.mark.parametrize(("decay", "decayed"), [("all", 4), ("matrices", 3), ("hidden", 1)])
def test_decay_params_selects_parameters(decay: str, decayed: int) -> None:
    optimizer = build_optimizer(OptimConfig(decay_params=decay), parameters())  # type: ignore[arg-type]
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
def test_invalid_optim_config_is_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="optim\\."):
        OptimConfig(**settings)  # type: ignore[arg-type]
