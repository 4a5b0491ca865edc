"""What a run is: one TOML file, composed of the settings of its parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whimbrel.base.errors import ConfigError
from whimbrel.config import apply_overrides, build, load_toml, to_table
from whimbrel.models import GPTConfig, preset
from whimbrel.optim import OptimConfig, ScheduleConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "RunConfig",
    "SampleConfig",
    "TrainConfig",
    "ValidationConfig",
    "load_run_config",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where the tokens come from."""

    path: Path
    """Directory of token shards, as `whimbrel prepare` writes it."""
    sequence_length: int | None = None
    """Tokens of a training sequence; not given: the model's context length."""
    shuffle_seed: int | None = None
    """Shuffle the order of blocks in each epoch from this seed; not given: the order on disk."""
    documents: Literal["join", "mask", "pack"] = "join"
    """join: attention crosses documents; mask: it does not; pack: as mask, and each sequence opens with a document."""

    def __post_init__(self) -> None:
        _check_positive("data", self, "sequence_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, how large, how precise."""

    steps: int | None = None
    """Optimizer steps of the whole run; give this or tokens."""
    tokens: int | None = None
    """Training tokens of the whole run, a multiple of tokens_per_step; give this or steps."""
    tokens_per_step: int = 524_288
    """Tokens of one optimizer step; micro-batches are accumulated to reach it."""
    micro_batch: int | None = None
    """Sequences in one forward pass; not given: as many as fit in free memory."""
    clip: float | None = None
    """Largest norm of all gradients together; not given: no clipping."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the products of forward and backward in bfloat16 (autocast); weights and optimizer stay in fp32."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of fp32 products: high lets a GPU use TF32."""
    compile: bool = False
    """Compile the blocks with torch.compile: one block once, the rest reuse it, cached on disk between runs."""
    device: str | None = None
    """cuda, mps or cpu; not given: the best this machine has."""
    seed: int = 0
    """Seed of the initial weights."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ConfigError("the length of the run is given by exactly one of train.steps and train.tokens")
        _check_positive("train", self, "steps", "tokens", "tokens_per_step", "micro_batch", "clip")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"train.seed = {self.seed} must be at least 0 and below 2**63")
        if self.tokens is not None and self.tokens % self.tokens_per_step:
            below = self.tokens // self.tokens_per_step * self.tokens_per_step
            raise ConfigError(
                f"train.tokens = {self.tokens} is not a multiple of train.tokens_per_step = {self.tokens_per_step}: "
                f"the nearest are {below} and {below + self.tokens_per_step}"
            )

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps if self.steps is not None else (self.tokens or 0) // self.tokens_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Loss on held-out tokens, always the same ones."""

    path: Path | None = None
    """Directory of the held-out shards; not given: those of split val in data.path, if there are any."""
    every: int | None = None
    """Validate after this many steps; not given: at the end only."""
    tokens: int | None = None
    """How many held-out tokens, rounded down to whole sequences; not given: all of them."""
    micro_batch: int | None = None
    """Sequences in one validation pass; not given: as in training."""

    def __post_init__(self) -> None:
        _check_positive("validation", self, "every", "tokens", "micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Text written by the model during training, for people to read."""

    every: int | None = None
    """Write a sample after this many steps; not given: none."""
    prompt: str = ""
    """What the sample continues; empty: the start of a document."""
    max_new_tokens: int = 64
    """Length of the sample in tokens."""
    temperature: float = 0.8
    """Randomness of the sample."""
    top_k: int | None = None
    """Draw among this many most likely tokens; not given: among all."""

    def __post_init__(self) -> None:
        _check_positive("sample", self, "every", "max_new_tokens", "top_k")
        if self.temperature < 0:
            raise ConfigError(f"sample.temperature = {self.temperature} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the whole state is saved."""

    every: int | None = None
    """Save after this many steps; not given: at the end only."""
    keep: int | None = None
    """How many of the newest checkpoints stay; not given: all."""

    def __post_init__(self) -> None:
        _check_positive("checkpoint", self, "every", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole training run."""

    output_dir: Path
    """The run directory: resolved configuration, log and checkpoints; a run found there is resumed."""
    model: GPTConfig
    """The model: `preset = NAME` and any field of GPTConfig."""
    data: DataConfig
    """Where the tokens come from."""
    train: TrainConfig
    """How long, how large, how precise."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the run."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Loss on held-out tokens."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Text written during training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""

    def __post_init__(self) -> None:
        if self.sequence_length > self.model.context_length:
            raise ConfigError(
                f"data.sequence_length = {self.sequence_length} is longer than model.context_length = "
                f"{self.model.context_length}: lower one or raise the other"
            )

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence."""
        return self.model.context_length if self.data.sequence_length is None else self.data.sequence_length


def load_run_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The run that a TOML file and `--a.b=c` overrides describe, its model preset filled in."""
    return run_config(apply_overrides(load_toml(path), overrides))


def run_config(table: dict[str, Any]) -> RunConfig:
    """The run that a table describes."""
    model = table.get("model", {})
    if isinstance(model, dict) and "preset" in model:
        if not isinstance(model["preset"], str):
            raise ConfigError(f"model.preset = {model['preset']!r} must be a text")
        own = {key: value for key, value in model.items() if key != "preset"}
        table = table | {"model": to_table(preset(model["preset"])) | own}
    return build(RunConfig, table)


def _check_positive(section: str, settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{section}.{name} = {value} must be greater than 0")
