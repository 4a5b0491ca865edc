"""Every optimizer in the trainer: by name, saved and resumed exactly, under fp16, and in the summary."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from rich.console import Console

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.checkpoint import latest_checkpoint, list_checkpoints, read_component
from whimbrel.optim import GroupConfig, LowRankOptimizer, OptimConfig
from whimbrel.optim.build import OPTIMIZERS, OPTIONS_BY_OPTIMIZER
from whimbrel.train import RunConfig, Trainer, TrainerCallback, train
from whimbrel.train.callbacks import ProgressCallback

MakeRun = Callable[..., RunConfig]
NAMES = get_args(get_type_hints(OptimConfig)["name"])
SMALL = {
    name: {key: 4 if key == "rank" else 2 for key in ("rank", "gap") if key in OPTIONS_BY_OPTIMIZER[name]}
    for name in NAMES
}
VARIANTS: dict[str, dict[str, Any]] = {name: {"name": name, **SMALL[name]} for name in NAMES} | {
    "galore_full": {**SMALL["galore"], "name": "galore", "projection_type": "full"},
    "galore_warm_small": {
        **SMALL["galore_warm"], "name": "galore_warm", "store": "int8", "basis_store": "int4", "side": "cheapest",
        "start": "random",
    },
    "apollo_bf16": {**SMALL["apollo"], "name": "apollo", "store": "bf16"},
}  # fmt: skip
"""Settings with which a few steps use several projection bases."""


class Losses(TrainerCallback):
    """Records every loss exactly; stops after the given number of steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.values: list[str] = []
        self.stop_after = stop_after

    def on_step_end(self, **event: Any) -> None:
        event["control"].should_training_stop = event["state"].global_step == self.stop_after

    def on_train_metrics(self, **event: Any) -> None:
        self.values.append(event["metrics"]["loss"].hex())


def run(config: RunConfig, stop_after: int | None = None) -> list[str]:
    losses = Losses(stop_after)
    train(config, callbacks=[losses])
    return losses.values


def settings(optim: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {f"optim__{key}": value for key, value in optim.items()} | others


def saved(directory: Path, component: str) -> dict[str, Any]:
    newest = latest_checkpoint(directory)
    assert newest is not None
    return read_component(newest, component)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stopped_and_resumed_run_is_bit_identical(make_run: MakeRun, tmp_path: Path, variant: str) -> None:
    given = settings(VARIANTS[variant], train__clip=1.0, train__steps=5)
    uninterrupted = run(make_run(output_dir=tmp_path / "uninterrupted", **given))
    interrupted = make_run(output_dir=tmp_path / "interrupted", **given)
    assert run(interrupted, stop_after=2) + run(interrupted) == uninterrupted
    assert list(list_checkpoints(tmp_path / "interrupted")) == [2, 5]
    states = [saved(tmp_path / name, "optimizer")["state"] for name in ("uninterrupted", "interrupted")]
    assert all(torch.equal(t, states[1][index][key]) for index, state in states[0].items() for key, t in state.items())


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_by_name(name: str, fit: Any, args: Any) -> None:
    trainer, losses = fit(args(learning_rate=0.01, weight_decay=0.1), optimizers=(name, "cosine"))
    expected = OPTIMIZERS[name]
    if isinstance(expected, type):
        assert type(trainer.optimizer) is expected
    assert {group["peak_lr"] for group in trainer.optimizer.param_groups} == {0.01}
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.1, 0.0}
    assert losses.values[-1] < losses.values[0]
    assert trainer.optimizer.param_groups[0]["lr"] < 1e-3


def test_optimizer_by_config(fit: Any, args: Any) -> None:
    config = OptimConfig(name="galore_warm", lr=0.02, rank=2, groups=(GroupConfig(pattern="layers.0", rank=3),))
    trainer, _ = fit(args(seed=7), optimizers=(config, None))
    ranks = {name: group["rank"] for group in trainer.optimizer.param_groups for name in group["names"]}
    assert ranks == {"layers.0.weight": 3, "layers.0.bias": None, "layers.3.weight": 2, "layers.3.bias": None}
    assert {group["seed"] for group in trainer.optimizer.param_groups} == {7}
    with pytest.raises(
        ConfigError, match="optim.name: expected one of .* got 'galore_wam': did you mean 'galore_warm'"
    ):
        fit(args(), optimizers=("galore_wam", None))
    with pytest.raises(ConfigError, match=r"unsupported optim_args='rank=8': pass optimizers=\(OptimConfig\(name=NAME"):
        args(optim_args="rank=8")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"name": "galore_warm", "rank": 4}, {"name": "galore_warm", "rank": 8}, "expected rank = 8, got 4"),
        ({"name": "galore_warm"}, {"name": "galore_warm", "store": "int8"}, "expected store = 'int8', got 'fp32'"),
        ({"name": "apollo"}, {"name": "fira"}, "optimizer whimbrel:Fira, got whimbrel:Apollo"),
        (
            {"name": "galore"},
            {"name": "galore_warm"},
            "optimizer whimbrel:GaLoreWarm, got whimbrel:GaLore",
        ),
        ({"name": "adamw"}, {"name": "adamw8bit"}, "optimizer whimbrel:AdamW8bit, got torch:AdamW"),
    ],
)
def test_resuming_with_another_optimizer_raises(
    make_run: MakeRun, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    run(make_run(**settings(before, train__steps=2)))
    with pytest.raises(CheckpointError, match=f"{message}.*skip its state with --resume.skip=optimizer") as refused:
        run(make_run(**settings(after, train__steps=3)))
    assert "\n" not in str(refused.value)
    assert len(run(make_run(**settings(after, train__steps=3, resume__skip=["optimizer"])))) == 1


def test_parameter_groups_may_change_on_resume(make_run: MakeRun) -> None:
    """Other learning rates split the groups differently; every state is matched to its parameter."""
    optim = {"name": "galore_warm", "rank": 4, "gap": 2}
    first = make_run(**settings(optim, train__steps=2))
    run(first)
    before = saved(first.output_dir, "optimizer")
    groups = [{"pattern": "c_fc|wpe", "lr": 1e-4}, {"pattern": "ln_1", "weight_decay": 0.2}]
    trainer = Trainer.from_config(make_run(**settings(optim, train__steps=2, optim__groups=groups)), callbacks=[])
    trainer.train()
    after = trainer.optimizer.state_dict()
    assert [group["names"] for group in after["param_groups"]] != [group["names"] for group in before["param_groups"]]
    index = [
        {name: i for group in state["param_groups"] for name, i in zip(group["names"], group["params"], strict=True)}
        for state in (before, after)
    ]
    for name, i in index[0].items():
        own = after["state"][index[1][name]]
        assert all(torch.equal(tensor, own[key]) for key, tensor in before["state"][i].items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("overflows", [False, True])
def test_fp16_skips_steps_whose_gradients_overflow(make_run: MakeRun, name: str, overflows: bool) -> None:
    """fp16 scales the loss; a step whose gradients overflow is skipped without an optimizer step."""
    config = make_run(**settings(VARIANTS[name], train__precision="fp16", train__clip=1.0, train__steps=4))
    trainer = Trainer.from_config(config, callbacks=[losses := Losses()])
    scaler = trainer.precision.scaler
    assert scaler is not None
    scaler._init_scale = 2.0**40 if overflows else 1024.0
    trainer.train()
    assert len(losses.values) == 4
    assert scaler.get_scale() == (2.0**36 if overflows else 1024.0)
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps <= {0} if overflows else steps == {4}


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_scale_does_not_change_the_update(name: str) -> None:
    results = []
    for scaled in (False, True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(16, 8))
        optimizer = OPTIMIZERS[name]([{"params": [weight]}], lr=0.1, **({"rank": 4} if SMALL[name] else {}))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(3):
            target = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            scaler.scale((weight - target).square().sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(weight.detach())
    assert torch.equal(*results)


def test_reset_clears_the_state_during_a_run(make_run: MakeRun) -> None:
    class Reset(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            if event["state"].global_step == 2:
                event["trainer"].optimizer.reset()

    trainer = Trainer.from_config(make_run(**settings(VARIANTS["galore_warm"], train__steps=5)), callbacks=[Reset()])
    trainer.train()
    assert isinstance(trainer.optimizer, LowRankOptimizer)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {3}


def test_the_summary_lists_the_optimizer_of_each_parameter(make_run: MakeRun) -> None:
    lines = io.StringIO()
    config = make_run(**settings({"name": "galore_warm", "rank": 4, "weight_decay": 0.1}, train__steps=1))
    train(config, callbacks=[ProgressCallback(Console(file=lines), plain=True)])
    printed = [line for line in lines.getvalue().splitlines() if line.startswith("Optimizer: ")]
    assert printed[0].startswith("Optimizer: adamw (lr=0.001, weight_decay=0.1) for 2 tensors, ")
    assert printed[0].endswith(" of state: transformer.wte.weight, transformer.wpe.weight")
    assert printed[2].startswith("Optimizer: warm rank 4, adamw (lr=0.001, weight_decay=0.1) for 8 tensors, ")
    assert "transformer.h.*.attn.c_attn.weight" in printed[2]
