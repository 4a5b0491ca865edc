"""Training arguments with the names, defaults and sentinels of `transformers.TrainingArguments`.

`to_config` translates them to the same config that a TOML file produces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import time
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend

from whimbrel.base.errors import ConfigError
from whimbrel.config import convert
from whimbrel.optim import ScheduleConfig
from whimbrel.precision import backend_names
from whimbrel.train.config import Fp8Recipe, QatRecipe, SdpaBackend, TrainerConfig
from whimbrel.train.elsewhere import HELD, CheckedNames, respelled
from whimbrel.train.metric import greater_is_better
from whimbrel.train.schedules import schedule_arguments, schedule_settings

__all__ = [
    "BaseTrainingArguments",
    "MinimalTrainingArguments",
    "REPORTERS",
    "Row",
    "TABLE",
    "TrainingArguments",
    "UNEXPRESSED",
    "from_config",
    "no_tokenizer_parallelism",
    "to_config",
]

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT_DIR = "trainer_output"
REPORTERS = ("tensorboard", "wandb", "trackio")
Interval = Literal["no", "steps", "epoch"]


@dataclass
class MinimalTrainingArguments(metaclass=CheckedNames):
    """The arguments shared with `transformers`: checked when constructed, and again when a trainer takes them."""

    output_dir: str | None = None
    """The run directory; None: trainer_output."""
    overwrite_output_dir: bool = False
    """Begin anew: remove the run that is in output_dir."""
    per_device_train_batch_size: int = 8
    """Sequences in one forward pass."""
    per_device_eval_batch_size: int = 8
    """Sequences in one evaluation pass."""
    num_train_epochs: float = 3.0
    """Passes over the training data, where max_steps does not say how long the run is."""
    max_steps: int = -1
    """Optimizer steps of the whole run, whatever the epochs; -1: by num_train_epochs."""
    learning_rate: float = 5e-5
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices and embeddings; biases and norms do not decay."""
    adam_beta1: float = 0.9
    """Decay rate of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay rate of Adam's second moment."""
    adam_epsilon: float = 1e-8
    """Adam's guard against division by zero."""
    max_grad_norm: float = 1.0
    """Largest norm of all gradients together; 0: no clipping."""
    lr_scheduler_type: str = "linear"
    """The learning rate over the run: a name of transformers that depends on the step alone, or wsd."""
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    """What that schedule takes besides, also as JSON; None: {}."""
    warmup_steps: int | float = 0
    """Steps over which the learning rate rises, or below 1 their share of the run."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of one optimizer step."""
    logging_strategy: Interval = "steps"
    """When to log."""
    logging_steps: int | float = 500
    """Log after this many steps, or below 1 this share of the run."""
    logging_first_step: bool = False
    """Log the first step too."""
    logging_dir: str | None = None
    """Where TensorBoard's events go; None: a new folder in output_dir/runs."""
    report_to: str | list[str] | None = "none"
    """Where to report metrics: tensorboard, wandb, trackio or a list of them; "none" or None: nowhere."""
    run_name: str | None = None
    """Run name in wandb and trackio; None: the name of output_dir."""
    disable_tqdm: bool | None = None
    """Do not show progress."""
    eval_strategy: Interval = "no"
    """When to evaluate."""
    eval_steps: int | float | None = None
    """Evaluate after this many steps, or below 1 this share of the run; None: logging_steps."""
    eval_delay: float = 0.0
    """No evaluation before this many steps; with eval_strategy="epoch", epochs."""
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    """When to save; best: after each evaluation that is better than all before."""
    save_steps: int | float = 500
    """Save after this many steps, or below 1 this share of the run."""
    save_total_limit: int | None = None
    """How many of the newest checkpoints stay; None: all."""
    seed: int = 42
    """Seed of the initial weights, of the order of a dataset, and of whatever else is drawn."""
    data_seed: int | None = None
    """Seed for shuffling; None: seed."""
    full_determinism: bool = False
    """Use only deterministic kernels, needed for a bit-exact resume on a GPU; slower."""
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    """Order of the training examples: reshuffled every epoch, or as in the dataset."""
    remove_unused_columns: bool = True
    """Drop columns of a `datasets` dataset that the model's forward does not accept."""
    label_names: list[str] | None = None
    """Names of the inputs that are labels; None: arguments of the model's forward whose names contain "label"."""
    dataloader_num_workers: int = 0
    """Processes that fetch batches; 0: the training process itself."""
    dataloader_pin_memory: bool = True
    """Copy batches into pinned memory on the way to a GPU."""
    dataloader_prefetch_factor: int | None = None
    """Batches that each worker fetches ahead; None: 2."""
    dataloader_drop_last: bool = False
    """Leave out a last batch that is not full."""
    torch_compile: bool = False
    """Compile with torch.compile."""
    torch_compile_backend: str | None = None
    """The backend of torch.compile, which turns it on; None: inductor."""
    torch_compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = (
        None
    )
    """The mode of torch.compile, which turns it on; None: default."""
    gradient_checkpointing: bool = False
    """Compute the activations of each block again in backward."""
    resume_from_checkpoint: bool | str | None = None
    """The checkpoint to go on from; True or "latest": the newest whole one in output_dir; None: begin anew."""
    use_cpu: bool = False
    """Train on the CPU, whatever else there is."""

    def __post_init__(self) -> None:
        self._folder = f"{time.time_ns()}_{socket.gethostname()}"
        self._filled: dict[str, tuple[Any, Any]] = {}
        self.check()

    def __getattr__(self, name: str) -> Any:
        """`transformers` arguments that callbacks read and that have a different name or a fixed value here."""
        if name in ("bf16", "fp16"):
            return getattr(self, "mixed_precision", None) == name
        if name in HELD and HELD[name].values:
            return HELD[name].values[0]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an argument; `transformers` arguments are translated or rejected as in the constructor."""
        fields, own = type(self).__dataclass_fields__, getattr(type(self), name, None)
        found = None if name in fields or own is not None else respelled(type(self).__name__, name, value)
        for key, given in {name: value}.items() if found is None else found.items():
            super().__setattr__(key, given)

    def check(self) -> None:
        """Refuse what cannot be used, convert what is another form of an allowed value, and fill the defaults.

        Called on construction; arguments assigned later are checked when a trainer takes them.
        """
        for name, value in self.to_dict().items():
            setattr(self, name, _converted(type(self), name, value))
        self._filled.clear()
        self._check_values()
        self._fill_defaults()

    def to_dict(self) -> dict[str, Any]:
        """The arguments as they were given: a default that was filled in is None again (or what else was given)."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {name: given for name, (given, filled) in self._filled.items() if getattr(self, name) == filled}

    def to_json_string(self) -> str:
        """The arguments as they were given, as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def _compiles(self) -> bool:
        return self.torch_compile or self.torch_compile_backend is not None or self.torch_compile_mode is not None

    def _check_values(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name, None)
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value} must be at least {least}")
        for name in ("max_steps", "max_eval_steps"):
            if getattr(self, name, -1) < 1 and getattr(self, name, -1) != -1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1, or -1 for no limit of its own")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 0 and below 1")
        if self.num_train_epochs <= 0:
            raise ConfigError(f"num_train_epochs = {self.num_train_epochs} must be greater than 0")
        for name in ("seed", "data_seed"):
            if (seed := getattr(self, name)) is not None and not 0 <= seed < 2**63:
                raise ConfigError(f"{name} = {seed} must be at least 0 and below 2**63")
        self._check_intervals()
        if self.dataloader_prefetch_factor is not None and not self.dataloader_num_workers:
            raise ConfigError(
                f"dataloader_prefetch_factor = {self.dataloader_prefetch_factor} is for workers: set "
                "dataloader_num_workers to at least 1 or leave it None"
            )

    def _check_intervals(self) -> None:
        for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
            value = getattr(self, name)
            if isinstance(value, float) and value >= 1:
                if not value.is_integer():
                    raise ConfigError(f"{name} = {value} must be a whole number, or a share of the run below 1")
                setattr(self, name, int(value))
            if value is not None and value <= 0 and name != "warmup_steps":
                raise ConfigError(f"{name} = {value} must be greater than 0")
        evaluates = self.eval_strategy == "steps" and self.eval_steps is None
        for kind, unused in (("logging", not evaluates), ("eval", True), ("save", True)):
            name, strategy = f"{kind}_steps", getattr(self, f"{kind}_strategy")
            if unused and strategy != "steps" and getattr(self, name) != _default(name):
                logger.warning(
                    "%s = %s has no effect: it needs %s_strategy='steps', and that is %r",
                    name, getattr(self, name), kind, strategy,
                )  # fmt: skip
        if self.eval_strategy == "no" and (self.eval_delay or self.save_strategy == "best"):
            name = "eval_delay" if self.eval_delay else "save_strategy"
            raise ConfigError(f"{name} = {getattr(self, name)!r} needs eval_strategy='steps' or 'epoch': set it")

    def _fill_defaults(self) -> None:
        compiles = self._compiles
        self._fill("output_dir", DEFAULT_OUTPUT_DIR)
        self._fill("logging_dir", str(Path(str(self.output_dir)) / "runs" / self._folder))
        self._fill("lr_scheduler_kwargs", {})
        self._fill("eval_steps", self.logging_steps if self.eval_strategy == "steps" else None)
        self._fill("dataloader_prefetch_factor", 2 if self.dataloader_num_workers else None)
        self._fill("torch_compile", compiles)
        self._fill("torch_compile_backend", "inductor" if compiles else None)
        self._fill("torch_compile_mode", "default" if compiles else None)

    def _fill(self, name: str, default: Any) -> None:
        """Give an argument that was left open its default, and remember that it was open."""
        given = getattr(self, name)
        if given in (None, False) and given != default:
            self._filled[name] = (given, default)
            setattr(self, name, default)


@dataclass
class BaseTrainingArguments(MinimalTrainingArguments):
    """Those arguments, and what every trainer of ours takes besides."""

    default_dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    """The dtype that a model is built in; None: torch's own."""
    max_eval_steps: int = -1
    """How many batches are evaluated at most; -1: all."""
    preserve_best_model: bool = False
    """Keep the best checkpoints regardless of save_total_limit, and load the best one when training ends."""
    best_model_metric: str = "loss"
    """What best is measured by: a metric of evaluation, with or without eval_ before it."""
    best_model_greater_is_better: bool | None = None
    """Whether a greater metric is better; None: not for names with loss or perplexity in them, else yes."""
    preserve_n_best: int = 1
    """How many of the best checkpoints stay, with preserve_best_model."""
    eval_on_save: bool = False
    """Evaluate before each save."""
    enable_activation_offloading: bool = False
    """Keep activations in host memory between forward and backward."""
    detect_anomaly: bool = False
    """Name the operation whose gradient is NaN; slow."""
    sdpa_backend: tuple[SdpaBackend, ...] | SdpaBackend | None = None
    """Which attention kernels may be used, one or a list, names or members of SDPBackend; None: torch chooses."""
    sdpa_set_priority: bool = False
    """Try the kernels of sdpa_backend in the order given."""
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of fp32 products: high lets a GPU use TF32; None: torch's own."""
    dynamo_recompile_limit: int | None = None
    """How often torch.compile may compile one function anew; None: torch's own."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """Run forward and backward in 16 bits where that is safe; "no" becomes None."""
    fp8_recipe: Fp8Recipe | None = None
    """Run the products of linear layers in fp8, scaled by tensor or by row; gw_hp: weight gradients are not."""
    fp8_dim_alignment: int = 16
    """Linear layers with a dimension that is no multiple of this are left out by fp8_recipe."""
    qat_recipe: QatRecipe | None = None
    """Train with linear layers rounded as they will be when the model is quantised."""

    @property
    def metric_for_best_model(self) -> str:
        """What `transformers` calls best_model_metric."""
        return self.best_model_metric

    @property
    def greater_is_better(self) -> bool:
        """What `transformers` calls best_model_greater_is_better, inferred where it was not given."""
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
        if self.sdpa_set_priority and self.sdpa_backend is None:
            raise ConfigError("sdpa_set_priority = True needs sdpa_backend, the order to try: give it")
        if self.dynamo_recompile_limit is not None and not self._compiles:
            raise ConfigError(
                f"dynamo_recompile_limit = {self.dynamo_recompile_limit} needs torch_compile=True: set it"
            )
        if not self.best_model_metric:
            raise ConfigError("best_model_metric = '' must be the name of a metric, such as 'loss'")
        if self.fp8_recipe is not None and self.qat_recipe is not None:
            raise ConfigError(
                f"fp8_recipe = {self.fp8_recipe!r} and qat_recipe = {self.qat_recipe!r} exclude each other: give one"
            )
        if self.fp8_recipe is None and self.fp8_dim_alignment != _default("fp8_dim_alignment"):
            raise ConfigError(f"fp8_dim_alignment = {self.fp8_dim_alignment} is for fp8_recipe, which is None: set it")


@dataclass
class TrainingArguments(BaseTrainingArguments):
    """Every argument there is."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """After a loss or gradient norm that is not finite: stop, skip the step, or go back to the last checkpoint."""
    recompute: float | Literal["none", "full", "selective"] = "none"
    """Activations computed again in backward: full; selective (all but products); or the share of memory to keep."""
    optimizer_in_backward: bool = False
    """Free each gradient in backward: projected, by optimizers in a subspace; else used, which bars clipping."""
    projected_linears: bool = False
    """With optimizer_in_backward: linear layers make the projection of their weight gradient and never itself."""
    compile_scope: Literal["block", "model"] = "block"
    """With torch_compile: one block once, which the rest reuse, or the whole model in one graph."""
    resume_skip: tuple[str, ...] | None = None
    """Checkpoint components that are not restored on resume: optimizer, scheduler, dataset, rng, callbacks."""
    save_minutes: float | None = 10.0
    """Also save when this many minutes have passed since the last save; removed once a newer checkpoint exists."""
    async_save: bool = True
    """Write checkpoints on a thread of their own: training waits only for the copy of its state."""

    def _check_values(self) -> None:
        super()._check_values()
        if isinstance(self.recompute, float) and not 0 <= self.recompute <= 1:
            raise ConfigError(f"recompute = {self.recompute} must be none, full, selective or between 0 and 1")
        if self.gradient_checkpointing and self.recompute not in ("none", "full"):
            raise ConfigError(
                f"gradient_checkpointing = True is recompute='full', and recompute = {self.recompute!r}: give one"
            )
        if self.save_minutes is not None and self.save_minutes <= 0:
            raise ConfigError(f"save_minutes = {self.save_minutes} must be greater than 0, or None")
        if self.save_strategy == "no" and self.save_minutes not in (None, _default("save_minutes")):
            logger.warning("save_minutes = %s has no effect with save_strategy='no'", self.save_minutes)
        if self.projected_linears and not self.optimizer_in_backward:
            raise ConfigError("projected_linears = True needs optimizer_in_backward=True: set it")
        if self.compile_scope != "block" and not self._compiles:
            raise ConfigError(f"compile_scope = {self.compile_scope!r} needs torch_compile=True: set it")


_LEAST: dict[str, float] = {
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1,
    "learning_rate": 0, "weight_decay": 0, "adam_epsilon": 0, "max_grad_norm": 0, "warmup_steps": 0, "eval_delay": 0,
    "save_total_limit": 1, "dataloader_num_workers": 0, "dataloader_prefetch_factor": 1, "preserve_n_best": 1,
    "dynamo_recompile_limit": 1, "fp8_dim_alignment": 1,
}  # fmt: skip


@contextlib.contextmanager
def no_tokenizer_parallelism(workers: int) -> Iterator[None]:
    """Inside, tokenizers start no threads of their own where there are loader workers, which are forked."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    if workers:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if workers and before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        elif workers:
            os.environ["TOKENIZERS_PARALLELISM"] = str(before)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _default(name: str) -> Any:
    return TrainingArguments.__dataclass_fields__[name].default


def _converted(cls: type, name: str, value: Any) -> Any:
    """The argument as its declared type, from any of the forms that `transformers` and torch take it in."""
    if isinstance(value, SDPBackend) or (name == "sdpa_backend" and isinstance(value, list | tuple)):
        names = backend_names(value)
        value = names[0] if isinstance(value, SDPBackend) else names
    elif isinstance(value, Enum):
        value = value.value
    elif isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)
    if name == "lr_scheduler_kwargs":
        return _keywords(value)
    if name == "qat_recipe" and isinstance(value, str) and ("fp8" in value or "float8" in value):
        raise ConfigError(
            f"qat_recipe = {value!r} is not one of {', '.join(typing.get_args(QatRecipe))}: fake quantization to fp8 "
            "zeroes nearly all of a weight's gradient (docs/precision.md); train with fp8_recipe instead"
        )
    if name == "report_to":
        return _reporters(value)
    if name == "label_names":
        return _names(value)
    if name.endswith("_steps") and isinstance(value, float) and value >= 1 and value.is_integer():
        value = int(value)
    if name.endswith("_dir") and isinstance(value, str):
        value = str(Path(value).expanduser())
    return convert(_hints(cls)[name], value, name)


def _reporters(value: Any) -> str | list[str] | None:
    """`value` unchanged, once every name in it is checked."""
    given = [value] if isinstance(value, str) else list(value or ())
    for one in given:
        if one not in (*REPORTERS, "none") or (one == "none" and len(given) > 1):
            raise ConfigError(
                f"report_to = {value!r}: expected none, or some of {', '.join(REPORTERS)}, got {one!r}; for other "
                "trackers pass the callbacks from transformers.integrations"
            )
    return value if isinstance(value, str | None) else given


def _names(value: Any) -> list[str] | None:
    if value is None or (isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value)):
        return None if value is None else list(value)
    raise ConfigError(f"label_names = {value!r}: expected a list of names, or None")


def _keywords(value: Any) -> dict[str, Any] | None:
    """Keywords given as a dict or as its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"lr_scheduler_kwargs = {value!r} is not JSON: {error}") from error
    if value is None or (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        return value
    raise ConfigError(f"lr_scheduler_kwargs = {value!r} must be a dict of names and values, or None")


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


def _reporter_flags(asked: str | list[str] | None) -> tuple[Any, ...]:
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
    Row(("report_to",), tuple(f"log.{name}" for name in REPORTERS), _reporter_flags, _reported),
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
