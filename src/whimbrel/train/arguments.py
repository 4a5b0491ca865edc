"""Training arguments with the names, defaults and sentinels of `transformers.TrainingArguments`.

`to_config` translates them to the same config that a TOML file produces.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import re
import socket
import time
import typing
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend

from whimbrel.base.errors import ConfigError
from whimbrel.config import build, convert
from whimbrel.distributed import ParallelConfig
from whimbrel.precision import sdpa_backend_names
from whimbrel.train.config import Fp8Recipe, QatRecipe, SdpaBackend, TrainerConfig, check_interval
from whimbrel.train.evaluation import greater_is_better
from whimbrel.train.hf_compat import HF_ALTERNATIVES, CheckedArguments, translate_argument
from whimbrel.train.lr_scheduler_args import schedule_arguments, schedule_settings
from whimbrel.train.parallel_args import PARALLEL_ARGUMENTS, ProcessArguments, changed_settings

__all__ = [
    "CONFIG_ONLY",
    "TRANSLATIONS",
    "BaseTrainingArguments",
    "MinimalTrainingArguments",
    "TrainingArguments",
    "Translation",
    "argument_name",
    "from_config",
    "to_config",
]

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT_DIR = "trainer_output"
REPORTERS = ("tensorboard", "wandb", "trackio")
Interval = Literal["no", "steps", "epoch"]


@dataclass
class MinimalTrainingArguments(ProcessArguments, metaclass=CheckedArguments):
    """The arguments shared with `transformers`.

    They are checked when constructed, and again when passed to a trainer.
    """

    output_dir: str | None = None
    """Run directory; None: trainer_output."""
    overwrite_output_dir: bool = False
    """Delete an existing run in output_dir and start over."""
    per_device_train_batch_size: int = 8
    """Number of samples per forward pass."""
    per_device_eval_batch_size: int = 8
    """Number of samples per forward pass in evaluation."""
    num_train_epochs: float = 3.0
    """Number of passes over the training data, unless max_steps is set."""
    max_steps: int = -1
    """Number of optimizer steps, overriding num_train_epochs; -1: not set."""
    learning_rate: float = 5e-5
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices and embeddings, not of biases and norms."""
    adam_beta1: float = 0.9
    """Decay rate of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay rate of Adam's second moment."""
    adam_epsilon: float = 1e-8
    """Term added to Adam's denominator."""
    max_grad_norm: float = 1.0
    """Maximum gradient norm; 0: no clipping."""
    lr_scheduler_type: str = "linear"
    """Learning rate schedule: wsd, or any transformers schedule that depends only on the step."""
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    """Additional arguments for the schedule, as a dict or JSON; None: {}."""
    warmup_steps: int | float = 0
    """Number of learning rate warmup steps, or a fraction of the run if below 1."""
    gradient_accumulation_steps: int = 1
    """Number of micro-batches per optimizer step."""
    logging_strategy: Interval = "steps"
    """When to log."""
    logging_steps: int | float = 500
    """Log every N steps, or a fraction of the run if below 1."""
    logging_first_step: bool = False
    """Also log the first step."""
    logging_dir: str | None = None
    """Directory for TensorBoard events; None: a new directory in output_dir/runs."""
    report_to: str | list[str] | None = "none"
    """Where to report metrics: tensorboard, wandb, trackio or a list of them; "none" or None: nowhere."""
    run_name: str | None = None
    """Name of the run in Weights & Biases and Trackio; None: the name of output_dir."""
    disable_tqdm: bool | None = None
    """Do not print progress."""
    eval_strategy: Interval = "no"
    """When to evaluate."""
    eval_steps: int | float | None = None
    """Evaluate every N steps, or a fraction of the run if below 1; None: logging_steps."""
    eval_delay: float = 0.0
    """Do not evaluate before this many steps (with eval_strategy="epoch": epochs) have passed."""
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    """When to save; best: after each evaluation with a new best metric."""
    save_steps: int | float = 500
    """Save every N steps, or a fraction of the run if below 1."""
    save_total_limit: int | None = None
    """Number of newest checkpoints to keep; None: all."""
    seed: int = 42
    """Seed for weight initialization, data order and all other random numbers."""
    data_seed: int | None = None
    """Seed for shuffling; None: seed."""
    full_determinism: bool = False
    """Use only deterministic kernels, which a bit-identical resume on a GPU requires; slower."""
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    """Order of the training examples: reshuffled every epoch (random), or as in the dataset (sequential)."""
    remove_unused_columns: bool = True
    """Drop columns of a `datasets` dataset that the model's forward does not accept."""
    label_names: list[str] | None = None
    """Names of the label inputs; None: arguments of the model's forward whose names contain "label"."""
    dataloader_num_workers: int = 0
    """Number of worker processes; with 0, the training process loads the data."""
    dataloader_pin_memory: bool = True
    """Copy batches through pinned memory when training on a GPU."""
    dataloader_prefetch_factor: int | None = None
    """Number of batches that each worker prefetches; None: 2."""
    dataloader_drop_last: bool = False
    """Drop the last incomplete batch of an epoch."""
    torch_compile: bool = False
    """Use torch.compile."""
    torch_compile_backend: str | None = None
    """torch.compile backend; setting it enables torch_compile. None: inductor."""
    torch_compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = (
        None
    )
    """torch.compile mode; setting it enables torch_compile. None: default."""
    gradient_checkpointing: bool = False
    """Recompute the activations of each block in backward."""
    resume_from_checkpoint: bool | str | None = None
    """Checkpoint to resume from; True or "latest": the newest complete one in output_dir; None: start a new run."""
    use_cpu: bool = False
    """Train on the CPU."""

    def __post_init__(self) -> None:
        self._folder = f"{time.time_ns()}_{socket.gethostname()}"
        self._filled: dict[str, tuple[Any, Any]] = {}
        self.check()

    def __getattr__(self, name: str) -> Any:
        """Read `transformers` arguments that have a different name or a fixed value here; callbacks use them."""
        if name in ("bf16", "fp16"):
            return getattr(self, "mixed_precision", None) == name
        if name in PARALLEL_ARGUMENTS:
            return _parallel_argument(self, name)
        if name in HF_ALTERNATIVES and HF_ALTERNATIVES[name].values:
            return HF_ALTERNATIVES[name].values[0]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an argument; `transformers` arguments are translated or rejected as in the constructor."""
        fields, class_attribute = type(self).__dataclass_fields__, getattr(type(self), name, None)
        is_ours = name in fields or class_attribute is not None
        translated = None if is_ours else translate_argument(name, value)
        if translated is not None and "parallel" in translated:
            translated["parallel"] = {**(self.parallel or {}), **translated["parallel"]}
        for our_name, our_value in {name: value}.items() if translated is None else translated.items():
            super().__setattr__(our_name, our_value)

    def check(self) -> None:
        """Convert the values to their types, fill in defaults, and raise for values that the config does not accept.

        Called on construction, and again when the arguments are passed to a trainer.
        """
        for name, value in self.to_dict().items():
            setattr(self, name, _converted(type(self), name, value))
        self._filled.clear()
        self._check_values()
        self._fill_defaults()
        _build_config(self)

    def to_dict(self) -> dict[str, Any]:
        """The arguments as passed by the user, without filled-in defaults."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            name: original for name, (original, filled) in self._filled.items() if getattr(self, name) == filled
        }

    def to_json_string(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def _check_values(self) -> None:
        """Check arguments that have no config equivalent; `_build_config` validates the rest."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            check_interval(name, getattr(self, name))
        evaluates = self.eval_strategy == "steps" and self.eval_steps is None
        for kind, unused in (("logging", not evaluates), ("eval", True), ("save", True)):
            name, strategy = f"{kind}_steps", getattr(self, f"{kind}_strategy")
            if unused and strategy != "steps" and getattr(self, name) != DEFAULTS[name]:
                logger.warning(
                    "%s = %s has no effect with %s_strategy=%r: set it to 'steps'",
                    name, getattr(self, name), kind, strategy,
                )  # fmt: skip
        if self.eval_strategy == "no" and self.save_strategy == "best":
            raise ConfigError("save_strategy = 'best' needs eval_strategy='steps' or 'epoch': set it")

    def _fill_defaults(self) -> None:
        compiles = self.torch_compile or (self.torch_compile_backend or self.torch_compile_mode) is not None
        self._fill("output_dir", DEFAULT_OUTPUT_DIR)
        self._fill("logging_dir", str(Path(str(self.output_dir)) / "runs" / self._folder))
        self._fill("lr_scheduler_kwargs", {})
        self._fill("eval_steps", self.logging_steps if self.eval_strategy == "steps" else None)
        self._fill("dataloader_prefetch_factor", 2 if self.dataloader_num_workers else None)
        self._fill("torch_compile", compiles)
        self._fill("torch_compile_backend", "inductor" if compiles else None)
        self._fill("torch_compile_mode", "default" if compiles else None)

    def _fill(self, name: str, default: Any) -> None:
        """Fill in the default of an unset argument, and remember the original value for `to_dict`."""
        value = getattr(self, name)
        if value in (None, False) and value != default:
            self._filled[name] = (value, default)
            setattr(self, name, default)


@dataclass
class BaseTrainingArguments(MinimalTrainingArguments):
    """The shared arguments plus those that every Whimbrel trainer accepts."""

    parallel: dict[str, Any] | None = None
    """Settings for distributed training (the [parallel] section), as a dict or a ParallelConfig; None: DDP."""
    default_dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    """Dtype in which parameters are created; None: the torch default."""
    max_eval_steps: int = -1
    """Maximum number of evaluation batches; -1: all."""
    preserve_best_model: bool = False
    """Keep the best checkpoints regardless of save_total_limit, and load the best one when training ends."""
    best_model_metric: str = "loss"
    """Evaluation metric that determines the best model, with or without the eval_ prefix."""
    best_model_greater_is_better: bool | None = None
    """Whether a higher metric is better; None: false if the metric's name contains loss or perplexity, else true."""
    preserve_n_best: int = 1
    """Number of best checkpoints to keep with preserve_best_model."""
    eval_on_save: bool = False
    """Evaluate before each save."""
    enable_activation_offloading: bool = False
    """Move activations to host memory between forward and backward."""
    detect_anomaly: bool = False
    """Report the operation that produces a NaN gradient; slow."""
    sdpa_backend: tuple[SdpaBackend, ...] | SdpaBackend | None = None
    """Allowed attention kernels: one or a list, names or members of SDPBackend; None: chosen by torch."""
    sdpa_set_priority: bool = False
    """Try the kernels of sdpa_backend in the given order."""
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of fp32 matmuls: high lets a GPU use TF32; None: the torch default."""
    dynamo_recompile_limit: int | None = None
    """Maximum number of recompilations of one function; None: the torch default."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """Autocast dtype for forward and backward; "no" is the same as None."""
    fp8_recipe: Fp8Recipe | None = None
    """Run linear layers in fp8, with a scale per tensor or per row; gw_hp keeps weight gradients in high precision.
    `delayed` (experimental): MLPs and head of a GPT-2 on an NVIDIA GPU, with scales from earlier micro-batches."""
    fp8_dim_alignment: int = 16
    """fp8_recipe skips linear layers with a dimension that is not a multiple of this."""
    qat_recipe: QatRecipe | None = None
    """Quantization-aware training: fake-quantize linear layers in the format that they will have after training."""

    @property
    def metric_for_best_model(self) -> str:
        """The `transformers` name for best_model_metric."""
        return self.best_model_metric

    @property
    def greater_is_better(self) -> bool:
        """The `transformers` name for best_model_greater_is_better, inferred from the metric if not given."""
        return greater_is_better(self.best_model_metric, self.best_model_greater_is_better)

    @property
    def load_best_model_at_end(self) -> bool:
        """The `transformers` name for preserve_best_model."""
        return self.preserve_best_model

    def _check_values(self) -> None:
        super()._check_values()
        if self.mixed_precision == "no":
            self.mixed_precision = None
        if self.preserve_n_best != 1 and not self.preserve_best_model:
            raise ConfigError(f"preserve_n_best = {self.preserve_n_best} needs preserve_best_model=True: set it")


@dataclass
class TrainingArguments(BaseTrainingArguments):
    """Arguments of `Trainer`: the base arguments plus recompute, optimizer-in-backward and checkpoint options."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """After a non-finite loss or gradient norm: stop, skip the step, or roll back to the last checkpoint."""
    recompute: float | Literal["none", "full", "selective"] = "none"
    """Activation checkpointing: full, selective (keep the outputs of matmuls and attention), or the fraction of
    activations to keep."""
    optimizer_in_backward: bool = False
    """Free each gradient during backward: project it (low-rank optimizers) or apply it immediately (no clipping)."""
    projected_linears: bool = False
    """Let linear layers compute the projected weight gradient directly; requires optimizer_in_backward."""
    compile_scope: Literal["block", "model"] = "block"
    """With torch_compile: compile one block and reuse it for all, or the model as one graph."""
    resume_skip: tuple[str, ...] | None = None
    """Components not to restore on resume: optimizer, scheduler, dataset, rng, callbacks."""
    save_minutes: float | None = 10.0
    """Also save whenever this many minutes have passed since the last save; such a checkpoint is deleted once a newer
    one exists."""
    async_save: bool = True
    """Write checkpoints in a background thread; training waits only while its state is copied."""
    save_mirror: str | None = None
    """URL to copy checkpoints to, such as s3://bucket/prefix; a run without local checkpoints resumes from there.
    Requires the `remote` extra."""

    def _check_values(self) -> None:
        super()._check_values()
        if self.gradient_checkpointing and self.recompute not in ("none", "full"):
            raise ConfigError(
                f"gradient_checkpointing = True means recompute='full', got {self.recompute!r}: set only one"
            )
        if self.save_strategy == "no" and self.save_minutes not in (None, DEFAULTS["save_minutes"]):
            logger.warning("save_minutes = %s has no effect with save_strategy='no'", self.save_minutes)


DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}


type_hints = cache(typing.get_type_hints)


def _converted(cls: type, name: str, value: Any) -> Any:
    """Convert enums, dtypes, paths and other forms that `transformers` and torch accept to the declared type."""
    if isinstance(value, SDPBackend) or (name == "sdpa_backend" and isinstance(value, list | tuple)):
        names = sdpa_backend_names(value)
        value = names[0] if isinstance(value, SDPBackend) else names
    elif isinstance(value, Enum):
        value = value.value
    elif isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)
    if name == "lr_scheduler_kwargs":
        return _parse_scheduler_kwargs(value)
    if name == "qat_recipe" and isinstance(value, str) and ("fp8" in value or "float8" in value):
        raise ConfigError(
            f"qat_recipe: expected one of {', '.join(typing.get_args(QatRecipe))}, got {value!r}: fake quantization "
            "to fp8 zeroes nearly all of a weight's gradient (docs/precision.md); train with fp8_recipe instead"
        )
    if name == "parallel":
        return changed_settings(value) if isinstance(value, ParallelConfig) else _check_parallel(value)
    if name == "report_to":
        return _check_reporters(value)
    if name == "label_names":
        return _check_label_names(value)
    if name.endswith("_steps") and isinstance(value, float) and value >= 1 and value.is_integer():
        value = int(value)
    if name.endswith("_dir") and isinstance(value, str):
        value = str(Path(value).expanduser())
    return convert(type_hints(cls)[name], value, name)


def _check_parallel(value: Any) -> dict[str, Any] | None:
    if value is None or (isinstance(value, dict) and all(isinstance(name, str) for name in value)):
        return value or None
    raise ConfigError(f"expected a dict of [parallel] settings for parallel, got {value!r}")


def _parallel_argument(args: MinimalTrainingArguments, name: str) -> Any:
    """What a `transformers` argument for distributed training would be, for callbacks that read it."""
    settings = ParallelConfig(**(args.parallel or {}))
    values = {
        "average_tokens_across_devices": True, "ddp_timeout": settings.timeout, "fsdp_config": None,
        "fsdp": {"fsdp": ["full_shard"], "hsdp": ["hybrid_shard"]}.get(settings.strategy or "", []),
        "local_rank": args.local_process_index, "parallelism_config": None,
    }  # fmt: skip
    return values[name]


def _check_reporters(value: Any) -> str | list[str] | None:
    """Check the names in `report_to` and return it unchanged."""
    names = [value] if isinstance(value, str) else list(value or ())
    for name in names:
        if name not in (*REPORTERS, "none") or (name == "none" and len(names) > 1):
            raise ConfigError(
                f"expected none or some of {', '.join(REPORTERS)} for report_to, got {name!r}: for other trackers, "
                "pass callbacks from transformers.integrations"
            )
    return value if isinstance(value, str | None) else names


def _check_label_names(value: Any) -> list[str] | None:
    if value is None or (isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value)):
        return None if value is None else list(value)
    raise ConfigError(f"expected a list of names or None for label_names, got {value!r}")


def _parse_scheduler_kwargs(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"expected JSON for lr_scheduler_kwargs, got {value!r}: {error}") from error
    if value is None or (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        return value
    raise ConfigError(f"expected a dict or None for lr_scheduler_kwargs, got {value!r}")


Every = int | float | None


@dataclass(frozen=True, slots=True)
class Translation:
    """Arguments and the equivalent settings, with the functions that convert their values."""

    arguments: tuple[str, ...]
    settings: tuple[str, ...]
    to_settings: Callable[..., tuple[Any, ...]] = lambda *values: values
    to_arguments: Callable[..., tuple[Any, ...]] = lambda *values: values


def to_config(args: MinimalTrainingArguments) -> TrainerConfig:
    """Convert `args` to a config, checking them again in case attributes were assigned after construction."""
    args.check()
    return _build_config(args)


def _build_config(args: MinimalTrainingArguments) -> TrainerConfig:
    arguments = DEFAULTS | args.to_dict()
    sections: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    try:
        for translation in TRANSLATIONS:
            values = translation.to_settings(*(arguments[name] for name in translation.arguments))
            for setting, value in zip(translation.settings, values, strict=True):
                section, _, name = setting.rpartition(".")
                sections[section][name] = value
        types = typing.get_type_hints(TrainerConfig)
        top = sections.pop("")
        return TrainerConfig(**top, **{name: types[name](**values) for name, values in sections.items()})
    except ConfigError as error:
        raise ConfigError(_SETTING.sub(lambda match: argument_name(match[0]), str(error))) from error


def argument_name(setting: str) -> str:
    """The argument that corresponds to `setting`, for error messages; `setting` itself if there is none."""
    if setting in _SPELLING:
        return _SPELLING[setting]
    for translation in TRANSLATIONS:
        for key, name in zip(translation.settings, translation.arguments, strict=False):
            if key == setting:
                return name
    return setting


_SETTING = re.compile(r"\b[a-z_]+\.[a-z0-9_]+\b")
_SPELLING = {
    "checkpoint.best": "preserve_n_best",
    "checkpoint.each_epoch": "save_strategy='epoch'",
    "checkpoint.every": "save_steps",
    "checkpoint.every_minutes": "save_minutes",
    "log.every": "logging_steps",
    "optim.betas": "adam_beta1, adam_beta2",
    "schedule.warmup_steps": "warmup_steps",
    "train.recompute": "recompute",
    "validation.each_epoch": "eval_strategy='epoch'",
    "validation.every": "eval_steps",
}
"""Arguments for settings that are not translated one to one."""


def from_config(config: TrainerConfig) -> TrainingArguments:
    """The arguments equivalent to `config`, for callbacks that read them.

    Values that the config does not set (micro-batch, length in tokens) keep their defaults until they are resolved.
    """
    values: dict[str, Any] = {}
    for translation in TRANSLATIONS:
        arguments = translation.to_arguments(*(attrgetter(name)(config) for name in translation.settings))
        values |= dict(zip(translation.arguments, arguments, strict=True))
    types = typing.get_type_hints(TrainingArguments)
    unset = {name for name, value in values.items() if value is None and type(None) not in typing.get_args(types[name])}
    return TrainingArguments(**{name: value for name, value in values.items() if name not in unset})


def _same(argument: str, setting: str) -> Translation:
    return Translation((argument,), (setting,))


def _convert(
    argument: str, setting: str, to_setting: Callable[[Any], Any], to_argument: Callable[[Any], Any]
) -> Translation:
    return Translation((argument,), (setting,), lambda value: (to_setting(value),), lambda value: (to_argument(value),))


def _strategies_to_intervals(
    log_strategy: str, log_steps: Every, eval_strategy: str, eval_steps: Every,
    save_strategy: str, save_steps: Every, save_minutes: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Evaluations and saves at intervals also happen at the end of the run."""
    eval_steps = log_steps if eval_steps is None else eval_steps
    return (
        log_steps if log_strategy == "steps" else None,
        log_strategy == "epoch",
        eval_steps if eval_strategy == "steps" else None,
        eval_strategy == "epoch",
        eval_strategy != "no",
        save_steps if save_strategy == "steps" else None,
        save_strategy == "epoch",
        save_strategy in ("steps", "epoch"),
        save_strategy == "best",
        None if save_strategy == "no" else save_minutes,
    )


def _intervals_to_strategies(
    log_steps: Every, log_epoch: bool, eval_steps: Every, eval_epoch: bool, _eval_end: bool,
    save_steps: Every, save_epoch: bool, _save_end: bool, save_best: bool, save_minutes: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments have only one strategy at a time: steps take precedence over epochs, and epochs over best."""

    def strategy(every: Every, each_epoch: bool) -> str:
        return "steps" if every is not None else "epoch" if each_epoch else "no"

    save_strategy, eval_strategy = strategy(save_steps, save_epoch), strategy(eval_steps, eval_epoch)
    if save_best and save_strategy == "no" != eval_strategy:
        save_strategy = "best"
    minutes = save_minutes if save_strategy != "no" else None
    return strategy(log_steps, log_epoch), log_steps, eval_strategy, eval_steps, save_strategy, save_steps, minutes


def _resume_settings(resume_from_checkpoint: bool | str | None) -> tuple[Any, ...]:
    latest = resume_from_checkpoint in (True, "latest")
    return None if latest or not resume_from_checkpoint else Path(str(resume_from_checkpoint)), latest


def _path_to_str(value: Path | None) -> str | None:
    return None if value is None else str(value)


TRANSLATIONS = (
    _convert("output_dir", "output_dir", lambda path: Path(path or DEFAULT_OUTPUT_DIR), str),
    _same("overwrite_output_dir", "overwrite_output_dir"),
    Translation(
        ("per_device_train_batch_size", "per_device_eval_batch_size"),
        ("train.micro_batch", "validation.micro_batch"),
        to_arguments=lambda train, evaluation: (train, train if evaluation is None else evaluation),
    ),
    _same("gradient_accumulation_steps", "train.accumulation"),
    Translation(
        ("max_steps", "num_train_epochs"),
        ("train.steps", "train.epochs"),
        to_settings=lambda steps, epochs: (None, epochs) if steps == -1 else (steps, None),
    ),
    Translation(
        ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        ("optim.lr", "schedule"),
        lambda lr, kind, kwargs, warmup: (lr, schedule_settings(kind, kwargs or {}, warmup, lr)),
        lambda lr, schedule: (lr, *schedule_arguments(schedule)),
    ),
    _same("weight_decay", "optim.weight_decay"),
    Translation(("adam_beta1", "adam_beta2"), ("optim.betas",), lambda *betas: (betas,), lambda betas: betas),
    _same("adam_epsilon", "optim.eps"),
    _convert("max_grad_norm", "train.clip", lambda norm: norm or None, lambda clip: clip or 0.0),
    Translation(
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
        _strategies_to_intervals,
        _intervals_to_strategies,
    ),
    _same("logging_first_step", "log.first"),
    _convert("logging_dir", "log.dir", lambda path: None if path is None else Path(path), _path_to_str),
    Translation(
        ("report_to",),
        tuple(f"log.{name}" for name in REPORTERS),
        lambda names: tuple(name in ([names] if isinstance(names, str) else names or []) for name in REPORTERS),
        lambda *enabled: (list(itertools.compress(REPORTERS, enabled)) or "none",),
    ),
    _same("run_name", "log.run_name"),
    _convert("disable_tqdm", "log.progress", lambda off: not off, lambda on: None if on else True),
    _same("eval_delay", "validation.delay"),
    _convert("max_eval_steps", "validation.batches", lambda n: None if n == -1 else n, lambda n: n),
    _same("save_total_limit", "checkpoint.keep"),
    Translation(
        ("preserve_best_model", "preserve_n_best"),
        ("checkpoint.best",),
        lambda kept, count: (count if kept else None,),
        lambda count: (count is not None, count),
    ),
    _same("best_model_metric", "checkpoint.metric"),
    _same("best_model_greater_is_better", "checkpoint.greater_is_better"),
    _same("eval_on_save", "checkpoint.evaluate"),
    _same("async_save", "checkpoint.asynchronous"),
    _same("save_mirror", "checkpoint.mirror"),
    Translation(
        ("resume_from_checkpoint",),
        ("resume.path", "resume.latest"),
        _resume_settings,
        lambda path, latest: (_path_to_str(path) or ("latest" if latest else None),),
    ),
    _convert("resume_skip", "resume.skip", lambda keys: keys or (), lambda keys: keys or None),
    _same("seed", "train.seed"),
    _same("data_seed", "loader.seed"),
    _same("full_determinism", "train.deterministic"),
    _convert(
        "train_sampling_strategy",
        "loader.shuffle",
        lambda kind: kind == "random",
        lambda shuffle: "random" if shuffle else "sequential",
    ),
    _same("remove_unused_columns", "loader.remove_unused_columns"),
    _convert("label_names", "loader.label_names", lambda n: None if n is None else tuple(n), lambda n: n and list(n)),
    _convert("use_cpu", "train.device", lambda cpu: "cpu" if cpu else None, lambda device: device == "cpu"),
    _convert("parallel", "parallel", lambda value: build(ParallelConfig, value or {}, "parallel"), changed_settings),
    _same("dataloader_num_workers", "loader.workers"),
    _same("dataloader_pin_memory", "loader.pin_memory"),
    _same("dataloader_prefetch_factor", "loader.prefetch_factor"),
    _same("dataloader_drop_last", "loader.drop_last"),
    Translation(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        ("train.compile", "train.compile_backend", "train.compile_mode"),
        lambda on, backend, mode: (on or (backend or mode) is not None, backend or "inductor", mode or "default"),
        lambda on, backend, mode: (on, backend, mode) if on else (on, None, None),
    ),
    _same("compile_scope", "train.compile_scope"),
    _same("dynamo_recompile_limit", "train.recompile_limit"),
    Translation(
        ("gradient_checkpointing", "recompute"),
        ("train.recompute",),
        lambda full, mode: ("full" if full else mode,),
        lambda mode: (mode == "full", mode),
    ),
    _same("enable_activation_offloading", "train.activation_offloading"),
    _same("optimizer_in_backward", "train.optimizer_in_backward"),
    _same("projected_linears", "train.projected_linears"),
    _convert("mixed_precision", "train.precision", lambda p: p or "fp32", lambda p: None if p == "fp32" else p),
    *(_same(name, f"train.{name}") for name in ("fp8_recipe", "fp8_dim_alignment", "qat_recipe")),
    _same("float32_matmul_precision", "train.matmul_precision"),
    _same("default_dtype", "train.default_dtype"),
    _same("sdpa_backend", "train.sdpa_backend"),
    _same("sdpa_set_priority", "train.sdpa_set_priority"),
    _same("detect_anomaly", "train.detect_anomaly"),
    _same("on_nonfinite", "train.on_nonfinite"),
)
"""Covers every argument, and every setting except those in CONFIG_ONLY."""

CONFIG_ONLY = {
    **dict.fromkeys(("train.tokens", "train.tokens_per_step"), "arguments count steps and micro-batches, not tokens"),
    **dict.fromkeys(("validation.path", "validation.tokens"), "the trainer is passed the evaluation dataset"),
    "train.weight_dtype": "pass a model that is already quantized (whimbrel.precision.prepare)",
    "optim.name": "arguments configure AdamW; pass another optimizer to the trainer by name or OptimConfig",
    "optim.decay_params": "as in transformers, biases and norms do not decay",
    **dict.fromkeys(
        ("optim.embedding_lr", "optim.head_lr", "optim.scalar_lr", "optim.groups"),
        "arguments have one learning rate for all parameters",
    ),
    **dict.fromkeys(
        ("optim.momentum", "optim.momentum_start", "optim.momentum_warmup", "optim.neuron_beta",
         "optim.cautious_decay", "optim.rank", "optim.gap", "optim.lazy", "optim.moment_transfer", "optim.scale",
         "optim.side", "optim.store", "optim.basis_store", "optim.start", "optim.projection_type"),
        "arguments configure AdamW; pass an OptimConfig to the trainer",
    ),
    **dict.fromkeys(
        ("log.norms", "log.profile", "early_stopping", "ema", "divergence"), "pass callbacks to the trainer"
    ),
}  # fmt: skip
"""Settings (or whole sections) without an equivalent argument, with the reason."""
