"""Training arguments to settings and back: one table."""

from __future__ import annotations

import dataclasses
import typing
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from whimbrel.optim import ScheduleConfig
from whimbrel.train.arguments import DEFAULT_OUTPUT_DIR, REPORTERS, MinimalTrainingArguments, TrainingArguments
from whimbrel.train.schedules import schedule_arguments, schedule_settings
from whimbrel.train.settings import TrainerConfig

__all__ = ["Row", "TABLE", "UNEXPRESSED", "from_config", "to_config"]

Every = int | float | None
DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}


@dataclass(frozen=True, slots=True)
class Row:
    """Arguments and the settings that say the same; `forth` and `back` turn the values of one into the other's."""

    arguments: tuple[str, ...]
    settings: tuple[str, ...]
    forth: Callable[..., tuple[Any, ...]] = lambda *values: values
    back: Callable[..., tuple[Any, ...]] = lambda *values: values


def to_config(args: MinimalTrainingArguments) -> TrainerConfig:
    """The settings that `args` stand for; arguments changed since they were constructed are checked again."""
    args.check()
    given = DEFAULTS | args.to_dict()
    sections: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for row in TABLE:
        values = row.forth(*(given[name] for name in row.arguments))
        for setting, value in zip(row.settings, values, strict=True):
            section, _, name = setting.rpartition(".")
            sections[section][name] = value
    kinds = typing.get_type_hints(TrainerConfig)
    top = sections.pop("")
    return TrainerConfig(**top, **{name: kinds[name](**values) for name, values in sections.items()})


def from_config(config: TrainerConfig) -> TrainingArguments:
    """The arguments that say what `config` says, for callbacks that look for them.

    What the settings leave open (a micro-batch, a length in tokens) keeps its default until a trainer has chosen.
    """
    values: dict[str, Any] = {}
    for row in TABLE:
        settings = row.back(*(attrgetter(name)(config) for name in row.settings))
        values |= dict(zip(row.arguments, settings, strict=True))
    kinds = typing.get_type_hints(TrainingArguments)
    open_ends = {name for name, value in values.items() if value is None and not _admits_none(kinds[name])}
    return TrainingArguments(**{name: value for name, value in values.items() if name not in open_ends})


def _admits_none(kind: Any) -> bool:
    return type(None) in typing.get_args(kind)


def _same(argument: str, setting: str) -> Row:
    return Row((argument,), (setting,))


def _as(argument: str, setting: str, forth: Callable[[Any], Any], back: Callable[[Any], Any]) -> Row:
    return Row((argument,), (setting,), lambda value: (forth(value),), lambda value: (back(value),))


def _rates(lr: float, kind: str, keywords: dict[str, Any] | None, warmup: int | float) -> tuple[Any, ...]:
    return lr, schedule_settings(kind, keywords or {}, warmup, lr)


def _rate_arguments(lr: float, schedule: ScheduleConfig) -> tuple[Any, ...]:
    return lr, *schedule_arguments(schedule)


def _intervals(
    log: str, log_steps: Every, held_out: str, eval_steps: Every, save: str, save_steps: Every, minutes: float | None
) -> tuple[Any, ...]:
    """Strategies to intervals. What is evaluated or saved at intervals is so at the end of the run too."""
    eval_steps = log_steps if eval_steps is None else eval_steps
    return (
        *(log_steps if log == "steps" else None, log == "epoch"),
        *(eval_steps if held_out == "steps" else None, held_out == "epoch", held_out != "no"),
        *(save_steps if save == "steps" else None, save == "epoch", save in ("steps", "epoch"), save == "best"),
        None if save == "no" else minutes,
    )


def _strategies(
    log: Every, log_epoch: bool, held_out: Every, eval_epoch: bool, _eval_end: bool,
    save: Every, save_epoch: bool, _save_end: bool, save_best: bool, minutes: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Intervals to strategies, of which there is one at a time: steps before epochs before best."""

    def strategy(every: Every, each_epoch: bool) -> str:
        return "steps" if every is not None else "epoch" if each_epoch else "no"

    saving, evaluating = strategy(save, save_epoch), strategy(held_out, eval_epoch)
    if save_best and saving == "no" != evaluating:
        saving = "best"
    return strategy(log, log_epoch), log, evaluating, held_out, saving, save, minutes if saving != "no" else None


def _resume(asked: bool | str | None) -> tuple[Any, ...]:
    latest = asked is True or asked == "latest"
    return None if latest or not asked else Path(str(asked)), latest


def _reporters(asked: str | list[str] | None) -> tuple[Any, ...]:
    names = [asked] if isinstance(asked, str) else asked or []
    return tuple(name in names for name in REPORTERS)


def _reported(*on: bool) -> tuple[Any, ...]:
    return ([name for name, asked in zip(REPORTERS, on, strict=True) if asked] or "none",)


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value)


def _text(value: Path | None) -> str | None:
    return None if value is None else str(value)


TABLE = (
    _as("output_dir", "output_dir", lambda path: Path(path or DEFAULT_OUTPUT_DIR), str),
    _same("overwrite_output_dir", "overwrite_output_dir"),
    Row(
        ("per_device_train_batch_size", "per_device_eval_batch_size"),
        ("train.micro_batch", "validation.micro_batch"),
        back=lambda train, held_out: (train, train if held_out is None else held_out),
    ),
    _same("gradient_accumulation_steps", "train.accumulation"),
    Row(
        ("max_steps", "num_train_epochs"),
        ("train.steps", "train.epochs"),
        forth=lambda steps, epochs: (None, epochs) if steps < 0 else (steps, None),
    ),
    Row(
        ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        ("optim.lr", "schedule"),
        _rates,
        _rate_arguments,
    ),
    _same("weight_decay", "optim.weight_decay"),
    Row(("adam_beta1", "adam_beta2"), ("optim.betas",), lambda *betas: (betas,), lambda betas: betas),
    _same("adam_epsilon", "optim.eps"),
    _as("max_grad_norm", "train.clip", lambda norm: norm or None, lambda clip: clip or 0.0),
    Row(
        (
            *("logging_strategy", "logging_steps", "eval_strategy", "eval_steps"),
            *("save_strategy", "save_steps", "save_minutes"),
        ),
        (
            *("log.every", "log.each_epoch"),
            *("validation.every", "validation.each_epoch", "validation.at_end"),
            *("checkpoint.every", "checkpoint.each_epoch", "checkpoint.at_end", "checkpoint.when_best"),
            "checkpoint.every_minutes",
        ),
        _intervals,
        _strategies,
    ),
    _same("logging_first_step", "log.first"),
    _as("logging_dir", "log.dir", _path, _text),
    Row(("report_to",), tuple(f"log.{name}" for name in REPORTERS), _reporters, _reported),
    _same("run_name", "log.run_name"),
    _as("disable_tqdm", "log.progress", lambda off: not off, lambda on: None if on else True),
    _same("eval_delay", "validation.delay"),
    _as("max_eval_steps", "validation.batches", lambda n: None if n < 0 else n, lambda n: n),
    _same("save_total_limit", "checkpoint.keep"),
    Row(
        ("preserve_best_model", "preserve_n_best"),
        ("checkpoint.best",),
        lambda kept, count: (count if kept else None,),
        lambda count: (count is not None, count),
    ),
    _same("best_model_metric", "checkpoint.metric"),
    _same("best_model_greater_is_better", "checkpoint.greater_is_better"),
    _same("eval_on_save", "checkpoint.evaluate"),
    _same("async_save", "checkpoint.asynchronous"),
    Row(
        ("resume_from_checkpoint",),
        ("resume.path", "resume.latest"),
        _resume,
        lambda path, latest: (_text(path) or ("latest" if latest else None),),
    ),
    _as("resume_skip", "resume.skip", lambda keys: keys or (), lambda keys: keys or None),
    _same("seed", "train.seed"),
    _same("data_seed", "loader.seed"),
    _same("full_determinism", "train.deterministic"),
    _as(
        "train_sampling_strategy",
        "loader.shuffle",
        lambda kind: kind == "random",
        lambda shuffle: "random" if shuffle else "sequential",
    ),
    _same("remove_unused_columns", "loader.remove_unused_columns"),
    _as("label_names", "loader.label_names", lambda n: None if n is None else tuple(n), lambda n: n and list(n)),
    _as("use_cpu", "train.device", lambda cpu: "cpu" if cpu else None, lambda device: device == "cpu"),
    _same("dataloader_num_workers", "loader.workers"),
    _same("dataloader_pin_memory", "loader.pin_memory"),
    _same("dataloader_prefetch_factor", "loader.prefetch_factor"),
    _same("dataloader_drop_last", "loader.drop_last"),
    Row(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        ("train.compile", "train.compile_backend", "train.compile_mode"),
        lambda on, backend, mode: (on or (backend or mode) is not None, backend or "inductor", mode or "default"),
        lambda on, backend, mode: (on, backend, mode) if on else (on, None, None),
    ),
    _same("compile_scope", "train.compile_scope"),
    _same("dynamo_recompile_limit", "train.recompile_limit"),
    Row(
        ("gradient_checkpointing", "recompute"),
        ("train.recompute",),
        lambda full, mode: ("full" if full else mode,),
        lambda mode: (mode == "full", mode),
    ),
    _same("enable_activation_offloading", "train.activation_offloading"),
    _same("optimizer_in_backward", "train.optimizer_in_backward"),
    _same("projected_linears", "train.projected_linears"),
    _as("mixed_precision", "train.precision", lambda p: p or "fp32", lambda p: None if p == "fp32" else p),
    *(_same(name, f"train.{name}") for name in ("fp8_recipe", "fp8_dim_alignment", "qat_recipe")),
    _same("float32_matmul_precision", "train.matmul_precision"),
    _same("default_dtype", "train.default_dtype"),
    _same("sdpa_backend", "train.sdpa_backend"),
    _same("sdpa_set_priority", "train.sdpa_set_priority"),
    _same("detect_anomaly", "train.detect_anomaly"),
    _same("on_nonfinite", "train.on_nonfinite"),
)
"""Every argument; every setting but those in UNEXPRESSED."""

UNEXPRESSED = {
    **dict.fromkeys(("train.tokens", "train.tokens_per_step"), "arguments count steps and micro-batches, not tokens"),
    **dict.fromkeys(("validation.path", "validation.tokens"), "a trainer is handed the held-out dataset"),
    "train.weights": "a trainer may be handed a model with such weights (whimbrel.precision.prepare)",
    "optim.name": "arguments mean AdamW; a trainer may be handed another optimizer, by name or with settings",
    "optim.decay": "arguments mean matrices and embeddings, as transformers does: not biases, not norms",
    **dict.fromkeys(
        ("optim.embedding_lr", "optim.head_lr", "optim.scalar_lr", "optim.groups"),
        "arguments have one learning rate for all parameters",
    ),
    **dict.fromkeys(
        ("optim.momentum", "optim.momentum_start", "optim.momentum_warmup", "optim.rank", "optim.gap", "optim.lazy",
         "optim.carry", "optim.scale", "optim.side", "optim.store", "optim.basis_store", "optim.start",
         "optim.projection_type"),
        "arguments mean AdamW; a trainer may be handed an OptimConfig",
    ),
    **dict.fromkeys(
        ("log.norms", "log.profile", "early_stopping", "ema",
         "divergence"),
        "a trainer is handed callbacks",
    ),
}  # fmt: skip
"""Settings that no argument stands for, or whole sections of them, and why."""
