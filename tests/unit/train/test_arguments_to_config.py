"""Translation of training arguments to the config and back: nothing is lost or ignored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from whimbrel.base.errors import ConfigError
from whimbrel.config import list_settings
from whimbrel.optim import OptimConfig, ScheduleConfig, lr_factor
from whimbrel.train.arguments import (
    CONFIG_ONLY,
    TRANSLATIONS,
    MinimalTrainingArguments,
    TrainingArguments,
    from_config,
    to_config,
)
from whimbrel.train.config import (
    CheckpointConfig,
    LoaderConfig,
    LogConfig,
    ResumeConfig,
    TrainConfig,
    TrainerConfig,
    ValidationConfig,
)
from whimbrel.train.lr_scheduler_args import SCHEDULER_TYPES, schedule_arguments, schedule_settings

NAMES = [field.name for field in dataclasses.fields(TrainingArguments)]

CHANGES: dict[str, dict[str, Any]] = {
    "output_dir": {"output_dir": "elsewhere"},
    "parallel": {"parallel": {"strategy": "fsdp"}},
    "per_device_train_batch_size": {"per_device_train_batch_size": 3},
    "per_device_eval_batch_size": {"per_device_eval_batch_size": 3},
    "num_train_epochs": {"num_train_epochs": 1.5},
    "max_steps": {"max_steps": 7},
    "learning_rate": {"learning_rate": 1e-3},
    "weight_decay": {"weight_decay": 0.1},
    "adam_beta1": {"adam_beta1": 0.8},
    "adam_beta2": {"adam_beta2": 0.95},
    "adam_epsilon": {"adam_epsilon": 1e-6},
    "max_grad_norm": {"max_grad_norm": 0.5},
    "lr_scheduler_type": {"lr_scheduler_type": "cosine"},
    "lr_scheduler_kwargs": {"lr_scheduler_kwargs": {"min_lr_ratio": 0.1}},
    "warmup_steps": {"warmup_steps": 0.1},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 4},
    "logging_strategy": {"logging_strategy": "epoch"},
    "logging_steps": {"logging_steps": 10},
    "logging_dir": {"logging_dir": "events"},
    "eval_strategy": {"eval_strategy": "epoch"},
    "eval_steps": {"eval_strategy": "steps", "eval_steps": 0.25},
    "eval_delay": {"eval_strategy": "steps", "eval_delay": 5},
    "save_strategy": {"save_strategy": "no"},
    "save_steps": {"save_steps": 10},
    "save_total_limit": {"save_total_limit": 2},
    "seed": {"seed": 1},
    "dataloader_num_workers": {"dataloader_num_workers": 2},
    "dataloader_pin_memory": {"dataloader_pin_memory": False},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4},
    "torch_compile_backend": {"torch_compile_backend": "eager"},
    "torch_compile_mode": {"torch_compile_mode": "max-autotune"},
    "resume_from_checkpoint": {"resume_from_checkpoint": "latest"},
    "default_dtype": {"default_dtype": "bfloat16"},
    "max_eval_steps": {"max_eval_steps": 3},
    "best_model_metric": {"best_model_metric": "accuracy"},
    "best_model_greater_is_better": {"best_model_greater_is_better": True},
    "preserve_n_best": {"preserve_best_model": True, "preserve_n_best": 2},
    "sdpa_backend": {"sdpa_backend": ("flash", "math")},
    "sdpa_set_priority": {"sdpa_backend": "flash", "sdpa_set_priority": True},
    "float32_matmul_precision": {"float32_matmul_precision": "high"},
    "dynamo_recompile_limit": {"torch_compile": True, "dynamo_recompile_limit": 3},
    "mixed_precision": {"mixed_precision": "bf16"},
    "fp8_recipe": {"fp8_recipe": "rowwise"},
    "fp8_dim_alignment": {"fp8_recipe": "rowwise", "fp8_dim_alignment": 32},
    "qat_recipe": {"qat_recipe": "int4-weight-only"},
    "on_nonfinite": {"on_nonfinite": "skip"},
    "recompute": {"recompute": 0.5},
    "optimizer_in_backward": {"max_grad_norm": 0.0, "optimizer_in_backward": True},
    "projected_linears": {"optimizer_in_backward": True, "projected_linears": True},
    "compile_scope": {"torch_compile": True, "compile_scope": "model"},
    "save_minutes": {"save_minutes": 5.0},
    "async_save": {"async_save": False},
    "save_mirror": {"save_mirror": "s3://bucket/prefix"},
    "data_seed": {"data_seed": 1},
    "label_names": {"label_names": ["start", "end"]},
    "remove_unused_columns": {"remove_unused_columns": False},
    "report_to": {"report_to": ["tensorboard"]},
    "resume_skip": {"resume_skip": ("optimizer",)},
    "run_name": {"run_name": "first"},
    "train_sampling_strategy": {"train_sampling_strategy": "sequential"},
}
"""A changed value for each argument, with what it requires; flags are set to True by default."""


def change(name: str) -> dict[str, Any]:
    return CHANGES.get(name, {name: True})


def test_every_argument_is_translated_once() -> None:
    assert sorted(name for row in TRANSLATIONS for name in row.arguments) == sorted(NAMES)


def test_every_setting_has_an_argument_or_a_reason_for_having_none() -> None:
    expressed = {name for row in TRANSLATIONS for name in row.settings}
    assert not expressed & CONFIG_ONLY.keys()
    known = expressed | CONFIG_ONLY.keys()
    settings = [setting.name.replace("[]", "") for setting in list_settings(TrainerConfig)]
    parents = {name: {name, *(name[:i] for i, c in enumerate(name) if c == ".")} for name in settings}
    assert [name for name in settings if not parents[name] & known] == []
    assert known <= {parent for names in parents.values() for parent in names}


@pytest.mark.parametrize("name", NAMES)
def test_no_argument_is_ignored(name: str) -> None:
    given = change(name)
    before = TrainingArguments(**{key: value for key, value in given.items() if key != name})
    after = TrainingArguments(**given)
    assert to_config(after) != to_config(before)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_round_trip_through_the_config(name: str) -> None:
    config = to_config(TrainingArguments(**change(name)))
    back = from_config(config)
    assert to_config(back) == config
    if name != "lr_scheduler_kwargs":
        assert getattr(back, name) == getattr(TrainingArguments(**change(name)), name) or name == "logging_dir"


def test_the_config_round_trips_through_arguments() -> None:
    config = TrainerConfig(
        output_dir=Path("out"),
        overwrite_output_dir=True,
        train=TrainConfig(
            steps=100, accumulation=2, micro_batch=4, clip=0.5, precision="fp16", compile=True, compile_scope="model",
            recompute="full", sdpa_backend=("flash", "math"), sdpa_set_priority=True, device="cpu", seed=3,
        ),
        optim=OptimConfig(lr=1e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1),
        schedule=ScheduleConfig(name="wsd", warmup_steps=10, cooldown=0.3, min_lr_ratio=0.1),
        validation=ValidationConfig(every=0.1, delay=5.0, batches=3, micro_batch=8),
        checkpoint=CheckpointConfig(every=20, keep=2, best=3, metric="perplexity", evaluate=True, asynchronous=False),
        resume=ResumeConfig(path=Path("out/checkpoints/step-00000020"), latest=False),
        loader=LoaderConfig(workers=2, prefetch_factor=4),
        log=LogConfig(every=10, first=True, dir=Path("events")),
    )  # fmt: skip
    args = from_config(config)
    assert to_config(args) == config
    assert (args.max_steps, args.learning_rate, args.eval_steps, args.save_steps) == (100, 1e-3, 0.1, 20)


def test_a_config_without_micro_batch_still_converts_to_arguments() -> None:
    """A TOML run may leave the micro-batch open, count tokens, and validate only at the end."""
    args = from_config(TrainerConfig(output_dir=Path("out"), train=TrainConfig(tokens=1000, tokens_per_step=100)))
    assert (args.max_steps, args.eval_strategy, args.save_strategy, args.resume_from_checkpoint) == (
        -1,
        "no",
        "no",
        "latest",
    )
    assert args.max_grad_norm == 0.0


def test_minimal_arguments_use_the_defaults_of_the_others() -> None:
    assert to_config(MinimalTrainingArguments("out")) == to_config(TrainingArguments("out"))


def test_max_steps_overrides_epochs_and_zero_disables_clipping() -> None:
    config = to_config(TrainingArguments(max_steps=10, num_train_epochs=2, max_grad_norm=0))
    assert (config.train.steps, config.train.epochs, config.train.clip) == (10, None, None)


def test_eval_steps_default_to_logging_steps() -> None:
    assert to_config(TrainingArguments(eval_strategy="steps", logging_steps=7)).validation.every == 7


@pytest.mark.parametrize(("given", "path", "latest"), [(None, None, False), (True, None, True), ("a/b", "a/b", False)])
def test_resume_from_checkpoint_selects_latest_or_a_path(given: Any, path: str | None, latest: bool) -> None:
    resume = to_config(TrainingArguments(resume_from_checkpoint=given)).resume
    assert resume == ResumeConfig(path=None if path is None else Path(path), latest=latest)


def test_arguments_changed_after_construction_are_translated_and_checked() -> None:
    args = TrainingArguments()
    args.learning_rate = 1e-2
    assert to_config(args).optim.lr == 1e-2
    args.eval_strategy = "never"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="eval_strategy.*'never'"):
        to_config(args)


PARITY = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.25}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-4, "power": 2.0}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 20}),
    ("cosine_with_min_lr", {"min_lr": 1e-4}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 0.75}),
    ("warmup_stable_decay", {"num_decay_steps": 13}),
    ("warmup_stable_decay", {"num_decay_steps": 13, "min_lr_ratio": 0.1, "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "1-sqrt", "warmup_type": "cosine"}),
    ("warmup_stable_decay", {"num_decay_steps": 9, "num_cycles": 1.5, "warmup_type": "1-sqrt", "min_lr_ratio": 0.3}),
]


@pytest.mark.parametrize("warmup", [0, 7, 0.11])
@pytest.mark.parametrize(("kind", "keywords"), PARITY)
def test_schedules_match_transformers(kind: str, keywords: dict[str, Any], warmup: int | float) -> None:
    transformers = pytest.importorskip("transformers")
    lr, total = 1e-3, 50
    keywords = {name: value for name, value in keywords.items() if warmup or name != "warmup_type"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    steps = transformers.TrainingArguments(use_cpu=True, warmup_steps=warmup).get_warmup_steps(total)
    theirs = transformers.get_scheduler(kind, optimizer, steps, total, keywords)
    config = schedule_settings(kind, keywords, warmup, lr)
    for step in range(total):
        assert lr_factor(config, step, total) == pytest.approx(theirs.get_last_lr()[0] / lr, rel=1e-12, abs=1e-15)
        optimizer.step()
        theirs.step()


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")  # a warning of transformers
def test_stable_steps_match_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    keywords = {"num_decay_steps": 6, "num_stable_steps": 10, "min_lr_ratio": 0.1}
    theirs = transformers.get_scheduler("warmup_stable_decay", optimizer, 4, 30, keywords)
    config = schedule_settings("warmup_stable_decay", keywords, 4, 1.0)
    for step in range(30):
        assert lr_factor(config, step, 30) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


def test_the_constant_schedule_has_factor_one() -> None:
    assert {lr_factor(schedule_settings("constant", {}, 0, 1.0), step, 9) for step in range(9)} == {1.0}


@pytest.mark.parametrize(
    ("kind", "keywords", "warmup", "message"),
    [
        ("cosin", {}, 0, "lr_scheduler_type.*'cosine'"),
        ("reduce_lr_on_plateau", {}, 0, "linear, cosine"),
        ("cosine", {"num_cycle": 1}, 0, r"lr_scheduler_kwargs.num_cycle.*num_cycles'"),
        (
            "linear",
            {"power": 2.0},
            0,
            "schedule.power = 2.0 needs schedule.name = polynomial",
        ),
        ("polynomial", {"power": "two"}, 0, "schedule.power.*'two'"),
        ("constant", {}, 10, "no effect .* 'constant': use 'constant_with_warmup'"),
        ("cosine_with_min_lr", {}, 0, "needs min_lr or min_lr_rate in lr_scheduler_kwargs"),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, 0, "has min_lr and min_lr_rate"),
        ("warmup_stable_decay", {}, 0, "needs num_decay_steps"),
        ("warmup_stable_decay", {"min_lr_ratio": 0.1}, 0, "needs num_decay_steps"),
        ("cosine_with_min_lr", {"cooldown_steps": 3}, 0, "needs min_lr"),
        ("warmup_stable_decay", {"num_decay_steps": 3, "warmup_type": "cosine"}, 0, "warmup_shape = 'cosine' needs"),
        ("linear", {"warmup_start": 0.5}, 0, "warmup_start = 0.5 needs warmup_steps"),
        ("linear", {"cooldown": 0.5}, 0, "schedule.cooldown = 0.5 needs schedule.name = wsd"),
        (
            "inverse_sqrt",
            {"min_lr_ratio": 0.5},
            0,
            "schedule.min_lr_ratio = 0.5 needs schedule.name = linear or cosine",
        ),
    ],
)
def test_invalid_schedules_and_keywords_raise_an_error(
    kind: str, keywords: dict[str, Any], warmup: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        to_config(TrainingArguments(lr_scheduler_type=kind, lr_scheduler_kwargs=keywords, warmup_steps=warmup))


@pytest.mark.parametrize(("kind", "keywords"), [*PARITY, ("constant", {}), ("wsd", {"cooldown": 0.5})])
def test_schedules_round_trip_through_arguments(kind: str, keywords: dict[str, Any]) -> None:
    config = schedule_settings(kind, keywords, 0 if kind == "constant" else 5, 1e-3)
    name, back, warmup = schedule_arguments(config)
    assert schedule_settings(name, back, warmup, 0.5) == config
    assert kind in SCHEDULER_TYPES


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd", "polynomial", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_our_schedules_round_trip_through_arguments(name: Any, warmup: int) -> None:
    config = ScheduleConfig(name=name, warmup_steps=warmup)
    assert schedule_settings(*schedule_arguments(config), 1e-3) == config
