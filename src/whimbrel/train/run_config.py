"""The config of a run, loaded from TOML or translated from TrainingArguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from whimbrel.base.errors import ConfigError
from whimbrel.config import (
    apply_overrides,
    build,
    check_unused,
    config_file,
    convert,
    load_toml,
    resolve_none,
    to_table,
)
from whimbrel.data.packing import TooLong
from whimbrel.data.sources import is_source
from whimbrel.model_io import locate_model, read_architecture
from whimbrel.model_io.hub import resolve_path
from whimbrel.models import GPTConfig, LoraConfig, preset
from whimbrel.models.lora import select_targets
from whimbrel.tokenization import TrainOn
from whimbrel.train.config import LoaderConfig, TrainerConfig, check_positive

__all__ = [
    "DataConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "RunConfig",
    "SampleConfig",
    "SampleFormat",
    "build_run_config",
    "load_run_config",
]

SampleFormat = Literal["messages", "prompt-completion", "sharegpt", "alpaca", "text", "preference"]
DEFAULT_TOKENS_PER_STEP = 524_288
FINETUNING_TOKENS_PER_STEP = 16_384
FINETUNING_SEQUENCE_LENGTH = 2048
"""Default unless the model's context is shorter: few samples fill the long contexts of recent models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Training data."""

    path: Path | tuple[str, ...]
    """Directory of token shards, as written by `whimbrel prepare`; or fine-tuning samples: a jsonl or parquet file, a
    directory of them, or a list of files, directories and Hub datasets."""
    sequence_length: int | None = None
    """Tokens per training sequence; default: the model's context length, capped at 2048 for fine-tuning samples."""
    shuffle_seed: int | None = None
    """Seed for shuffling the order of blocks in each epoch; default: the order on disk."""
    documents: Literal["join", "mask", "pack"] = "join"
    """join: tokens attend across document boundaries; mask: they do not; pack: as mask, and sequences also start at
    document boundaries."""
    eot_id: int | None = None
    """Id of the token that starts a document; default: the id in the manifest, or else that of GPT-2 or Llama 3."""
    verify: bool = False
    """Check the SHA-256 of each shard against the manifest when it is first read."""
    format: SampleFormat | None = None
    """Format of the samples; default: detected from the first row of each file."""
    template: str | None = None
    """Built-in chat template to use, such as chatml; its special tokens are added to the tokenizer. Default: the
    model's own template."""
    train_on: TrainOn = "assistant"
    """Turns to compute the loss on: assistant (all assistant turns), last (only the last assistant turn) or all."""
    packing: bool = True
    """Pack several samples into each sequence, without attention between them; false: pad each sample instead."""
    too_long: TooLong = "truncate"
    """What to do with samples longer than the sequence length: truncate (after the last turn that fits) or drop."""
    skip_bad: bool = False
    """Skip and count invalid samples instead of stopping at the first one."""
    val: float | None = None
    """Fraction of the samples to hold out for validation; default: none."""

    def __post_init__(self) -> None:
        check_positive("data", self, "sequence_length")
        if self.eot_id is not None and self.eot_id < 0:
            raise ConfigError(f"expected data.eot_id >= 0, got {self.eot_id}")
        if self.val is not None and not 0 < self.val < 1:
            raise ConfigError(f"expected data.val between 0 and 1, got {self.val}")
        if isinstance(self.path, tuple) and not self.path:
            raise ConfigError("expected at least one file in data.path, got none")
        if self.sources is None:
            names = ("template", "train_on", "packing", "too_long", "skip_bad", "val")
            check_unused("data", self, names, "samples in data.path (jsonl or parquet files)")
        else:
            shard_names = ("shuffle_seed", "documents", "eot_id", "verify")
            check_unused("data", self, shard_names, "a directory of token shards in data.path")

    @property
    def sources(self) -> tuple[str, ...] | None:
        """Files and datasets with samples to fine-tune on; None if `path` is a directory of token shards."""
        if isinstance(self.path, tuple):
            return self.path
        return (str(self.path),) if self.format is not None or is_source(self.path) else None

    @property
    def shards(self) -> Path:
        """The directory of token shards."""
        if not isinstance(self.path, Path) or self.sources is not None:
            raise ConfigError(f"expected a directory of token shards in data.path, got {self.path}")
        return self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Text sampled from the model during training."""

    every: int | None = None
    """Sample every N steps; default: never."""
    prompt: str = ""
    """Prompt to continue; if empty, the sample starts a new document."""
    max_new_tokens: int = 64
    """Maximum length of the sample in tokens."""
    temperature: float = 0.8
    """Sampling temperature."""
    top_k: int | None = None
    """Sample from the k most likely tokens; default: all."""

    def __post_init__(self) -> None:
        check_positive("sample", self, "every", "max_new_tokens", "top_k")
        if self.temperature < 0:
            raise ConfigError(f"expected sample.temperature >= 0, got {self.temperature}")
        if self.every is None:
            check_unused("sample", self, ("prompt", "max_new_tokens", "temperature", "top_k"), "sample.every")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """Training objective: the loss and its settings."""

    name: Literal["lm", "sft", "dpo", "orpo", "distill"] | None = None
    """lm (loss on every token), sft (loss on the answers), dpo or orpo (training on preference pairs) or distill
    (training on a teacher's predictions); default: lm for token shards, sft for samples."""
    beta: float = 0.1
    """With dpo: how strongly the model is kept close to the reference. With orpo: weight of the odds-ratio loss."""
    loss: Literal["sigmoid", "ipo", "robust"] = "sigmoid"
    """With dpo: type of the loss."""
    label_smoothing: float = 0.0
    """With dpo and loss = sigmoid or robust: assumed probability that the labels of a pair are flipped."""
    reference: Literal["base", "precomputed"] | None = None
    """With dpo: where the log-probabilities of the reference model come from: base (computed in every step by the model
    with its adapters disabled) or precomputed (computed once before training, and stored in the run directory);
    default: base with [lora], else precomputed."""
    teacher: Path | None = None
    """With distill: path of the teacher model, which must have the same vocabulary."""
    k: int = 64
    """With distill: number of top-k log-probabilities of the teacher to store per token."""
    temperature: float = 1.0
    """With distill: softmax temperature of both teacher and student."""

    def __post_init__(self) -> None:
        check_positive("objective", self, "beta", "k", "temperature")
        for name, objectives in OBJECTIVES_BY_OPTION.items():
            if self.name not in objectives:
                check_unused("objective", self, (name,), f"objective.name = {' or '.join(objectives)}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"expected objective.label_smoothing from 0 to below 0.5, got {self.label_smoothing}")
        if self.loss == "ipo":
            check_unused("objective", self, ("label_smoothing",), "objective.loss = sigmoid or robust")
        if self.name == "distill" and self.teacher is None:
            raise ConfigError("objective.name = distill needs objective.teacher: set it to a model directory")


OBJECTIVES_BY_OPTION = {
    "beta": ("dpo", "orpo"),
    "loss": ("dpo",),
    "label_smoothing": ("dpo",),
    "reference": ("dpo",),
    "teacher": ("distill",),
    "k": ("distill",),
    "temperature": ("distill",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(GPTConfig):
    """The model of a run: its architecture, and the weights it starts from."""

    path: Path | None = None
    """Start from existing weights, which also set the architecture: a Hugging Face model directory, a run, a
    checkpoint, an adapter (merged into its base model) or owner/name on the Hugging Face Hub."""
    weights: Literal["int8", "int4", "fp8"] | None = None
    """Quantize the frozen linear layers to this format while loading (QLoRA); needs [lora]."""

    @property
    def architecture(self) -> GPTConfig:
        """The settings without `path` and `weights`."""
        return GPTConfig(**{item.name: getattr(self, item.name) for item in fields(GPTConfig)})

    @classmethod
    def from_architecture(cls, config: GPTConfig, path: Path | None = None, weights: Any = None) -> ModelConfig:
        """Add `path` and `weights` to an architecture."""
        settings = {item.name: getattr(config, item.name) for item in fields(GPTConfig)}
        return cls(**settings, path=path, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(TrainerConfig):
    """A complete training run: the trainer's settings plus model and data."""

    model: ModelConfig
    """The model: `preset = NAME` and any field of GPTConfig, or `path = DIR` to start from existing weights."""
    data: DataConfig
    """Training data."""
    lora: LoraConfig | None = None
    """Train LoRA adapters and freeze the weights in model.path; default: train all weights."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Training objective: the loss and its settings."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Text sampled during training."""

    def __post_init__(self) -> None:
        train = self.train
        model: GPTConfig = self.model
        if type(model) is GPTConfig:  # from Python
            object.__setattr__(self, "model", ModelConfig.from_architecture(model))
        elif self.model.path is not None and self.model.path.exists():
            stored, default = read_architecture(locate_model(self.model.path)), GPTConfig()
            changed = [f.name for f in fields(GPTConfig) if getattr(model, f.name) != getattr(default, f.name)]
            _check_architecture(model, stored, self.model.path, changed)
            stored = replace(stored, dropout=model.dropout)
            object.__setattr__(
                self, "model", ModelConfig.from_architecture(stored, self.model.path, self.model.weights)
            )
        _check_output(self.output_dir, self.model.path)
        if self.sequence_length > self.model.context_length:
            remedy = "change one of them" if self.model.path is None else "lower it, or choose another model"
            raise ConfigError(
                f"data.sequence_length = {self.sequence_length} exceeds model.context_length = "
                f"{self.model.context_length}: {remedy}"
            )
        if self.loader != LoaderConfig() and self.data.sources is None:
            raise ConfigError("[loader] has no effect on token shards: remove it")
        _check_adapters(self)
        _check_objective(self)
        if train.accumulation is not None and train.micro_batch is None:
            raise ConfigError("train.accumulation needs train.micro_batch: set it")
        if train.optimizer_in_backward and self.log.norms is not None:
            raise ConfigError(
                "log.norms needs the gradients, which train.optimizer_in_backward frees during backward: disable one "
                "of them"
            )
        if train.tokens is not None and train.tokens % self.tokens_per_step:
            below = train.tokens // self.tokens_per_step * self.tokens_per_step
            raise ConfigError(
                f"train.tokens = {train.tokens} is not a multiple of train.tokens_per_step = {self.tokens_per_step}: "
                f"the nearest multiples are {below} and {below + self.tokens_per_step}"
            )

    @property
    def sequence_length(self) -> int:
        """Tokens per training sequence."""
        if self.data.sequence_length is not None:
            return self.data.sequence_length
        context = self.model.context_length
        return context if self.data.sources is None else min(context, FINETUNING_SEQUENCE_LENGTH)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        train = self.train
        if train.accumulation is not None and train.micro_batch is not None:
            return train.accumulation * train.micro_batch * self.sequence_length
        if train.tokens_per_step is not None or self.data.sources is None:
            return train.tokens_per_step or DEFAULT_TOKENS_PER_STEP
        return max(1, FINETUNING_TOKENS_PER_STEP // self.sequence_length) * self.sequence_length


def _check_output(output_dir: Path, model: Path | None) -> None:
    """Raise if the run would be written into the model that it starts from, or is that model."""
    output = output_dir.resolve()
    if model is not None and (model.resolve() == output or output / "checkpoints" in model.resolve().parents):
        raise ConfigError(
            f"expected output_dir to differ from model.path, the model to start from, got {output_dir} for both: "
            "choose another output_dir"
        )


def _check_adapters(config: RunConfig) -> None:
    """Raise for settings that are incompatible with `[lora]`, or need it."""
    model, train = config.model, config.train
    if config.lora is None:
        if model.weights is not None:
            raise ConfigError(f"model.weights = {model.weights} needs [lora]: quantized weights cannot be trained")
        return
    if model.path is None:
        raise ConfigError("[lora] needs model.path, the model to train adapters for: set it")
    refused = {
        f"train.{name} = {getattr(train, name)}": getattr(train, name)
        for name in ("fp8_recipe", "qat_recipe", "weight_dtype", "projected_linears")
    }
    refused |= {
        "ema.decay": config.ema.decay is not None,
        f"parallel.tp = {config.parallel.tp}": (config.parallel.tp or 1) > 1,
        f"parallel.pp = {config.parallel.pp}": (config.parallel.pp or 1) > 1,
    }
    for name in (name for name, is_set in refused.items() if is_set):
        raise ConfigError(f"{name} does not work with [lora]: remove one of them")
    if config.lora.modules is not None:
        select_targets(model.architecture, config.lora.modules)  # raises for unknown names


def _check_objective(config: RunConfig) -> None:
    """Raise for an objective that does not match the data, and for settings that have no effect on samples."""
    name, validation, loader = config.objective.name, config.validation, config.loader
    if config.data.sources is None:
        if name not in (None, "lm"):
            raise ConfigError(
                f"objective.name = {name} needs samples in data.path, got token shards: {config.data.path}"
            )
        return
    if config.model.path is None:
        raise ConfigError("fine-tuning samples in data.path need the tokenizer and chat template of model.path: set it")
    if config.objective.reference == "base" and config.lora is None:
        raise ConfigError("objective.reference = base needs [lora]: without adapters, use precomputed")
    precomputes = name == "distill" or (name == "dpo" and _reference(config) == "precomputed")
    if precomputes and not config.data.packing:
        raise ConfigError(f"objective.name = {name} with precomputed values needs data.packing = true")
    if config.data.val is not None and validation.path is not None:
        raise ConfigError("expected data.val or validation.path, got both: remove one")
    check_unused("validation", validation, ("tokens",), "token shards (for samples: validation.batches)")
    check_unused("loader", loader, ("remove_unused_columns", "label_names"), "a dataset in Python")
    if config.sample.every is not None and not config.sample.prompt:
        raise ConfigError("sample.every needs sample.prompt, the user message to answer: set it")
    if (config.parallel.pp or 1) > 1 and name not in (None, "lm", "sft"):
        raise ConfigError(f"objective.name = {name} does not work with pipeline parallelism (parallel.pp): use fsdp")


def _reference(config: RunConfig) -> str:
    return config.objective.reference or ("precomputed" if config.lora is None else "base")


def load_run_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> RunConfig:
    """Load a TOML file or a recipe of the package, apply `--a.b=c` overrides and resolve the model preset."""
    return build_run_config(apply_overrides(load_toml(config_file(path)), overrides))


def build_run_config(table: dict[str, Any]) -> RunConfig:
    """Build a RunConfig from a TOML table, resolving the model preset or path."""
    _check_paths(table)
    if table.get("validation") == "none":  # the defaults of the section validate after the last step
        table = table | {"validation": {"at_end": False}}
    model = table.get("model")
    if not isinstance(model, dict):
        return build(RunConfig, table)
    model = {
        key: value for key, value in resolve_none(ModelConfig, model).items() if (key, value) != ("preset", "none")
    }
    if model.get("path") is not None:
        model = _model_table(model)
    elif "preset" in model:
        name = model.pop("preset")
        if not isinstance(name, str):
            raise ConfigError(f"expected a string for model.preset, got {name!r}")
        model = to_table(preset(name)) | model
    return build(RunConfig, table | {"model": model})


def _check_paths(table: Mapping[str, Any]) -> None:
    """Raise if a fine-tuning run has no model or no data: recipes leave both to the user."""
    objective = table.get("objective")
    name = objective.get("name", "none") if isinstance(objective, dict) else "none"
    if name in ("none", "lm") and table.get("lora", "none") == "none":
        return
    missing = [
        f"{section}.path"
        for section in ("model", "data")
        if isinstance(settings := table.get(section, {}), dict) and settings.get("path", "none") == "none"
    ]
    if missing:
        options = " ".join(f"--{setting}=PATH" for setting in missing)
        raise ConfigError(f"fine-tuning needs {' and '.join(missing)}: pass {options}, or edit the config file")


def _model_table(table: dict[str, Any]) -> dict[str, Any]:
    """The `[model]` table with the architecture from the directory `path`; raises if other keys conflict with it."""
    path: Path = convert(Path, table["path"], "model.path")
    overrides = {key: value for key, value in table.items() if key not in ("path", "weights")}
    training = {key: table[key] for key in ("weights", "dropout") if key in table}
    if "preset" in overrides:
        raise ConfigError("expected model.path or model.preset, got both: remove one")
    if not path.exists() and to_table(GPTConfig()).keys() <= overrides.keys():
        return table  # the config.toml of a run that is resumed after its source was removed
    path = resolve_path(path)
    stored = read_architecture(locate_model(path))
    _check_architecture(build(GPTConfig, to_table(stored) | overrides, "model"), stored, path, overrides)
    return to_table(stored) | training | {"path": str(path)}


def _check_architecture(requested: GPTConfig, stored: GPTConfig, path: Path, names: Iterable[str]) -> None:
    """Raise if one of the settings `names` differs from that of the model in `path`; only dropout may."""
    for name in names:
        if name != "dropout" and getattr(requested, name) != getattr(stored, name):
            raise ConfigError(
                f"model.{name} = {getattr(requested, name)} conflicts with model.path = {path}, which has "
                f"{getattr(stored, name)}: remove model.{name}"
            )
