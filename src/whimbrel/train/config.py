"""What a run is: one TOML file, composed of the settings of its parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whimbrel.base.errors import ConfigError
from whimbrel.config import apply_overrides, build, check_unused, load_toml, to_table
from whimbrel.models import GPTConfig, preset
from whimbrel.train.settings import LoaderConfig, TrainerConfig, check_positive

__all__ = ["DataConfig", "RunConfig", "SampleConfig", "load_run_config", "run_config"]

DEFAULT_TOKENS_PER_STEP = 524_288


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
    eot_id: int | None = None
    """Id of the token that starts a document; default: from the manifest, or GPT-2's or Llama 3's without one."""
    verify: bool = False
    """Check the SHA-256 of each shard against the manifest when it is first read."""

    def __post_init__(self) -> None:
        check_positive("data", self, "sequence_length")
        if self.eot_id is not None and self.eot_id < 0:
            raise ConfigError(f"expected data.eot_id of at least 0, got {self.eot_id}")


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
        check_positive("sample", self, "every", "max_new_tokens", "top_k")
        if self.temperature < 0:
            raise ConfigError(f"sample.temperature = {self.temperature} must not be negative")
        if self.every is None:
            check_unused("sample", self, ("prompt", "max_new_tokens", "temperature", "top_k"), "sample.every")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(TrainerConfig):
    """A whole training run: the settings of the trainer, and the model and data it is given."""

    model: GPTConfig
    """The model: `preset = NAME` and any field of GPTConfig."""
    data: DataConfig
    """Where the tokens come from."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Text written during training."""

    def __post_init__(self) -> None:
        train = self.train
        if self.sequence_length > self.model.context_length:
            raise ConfigError(
                f"data.sequence_length = {self.sequence_length} is longer than model.context_length = "
                f"{self.model.context_length}: lower one or raise the other"
            )
        if self.loader != LoaderConfig():
            raise ConfigError("[loader] is for datasets in Python: token shards are read without workers; leave it out")
        if train.accumulation is not None and train.micro_batch is None:
            raise ConfigError("train.accumulation counts micro-batches: give train.micro_batch with it")
        if train.tokens is not None and train.tokens % self.tokens_per_step:
            below = train.tokens // self.tokens_per_step * self.tokens_per_step
            raise ConfigError(
                f"train.tokens = {train.tokens} is not a multiple of train.tokens_per_step = {self.tokens_per_step}: "
                f"the nearest are {below} and {below + self.tokens_per_step}"
            )

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence."""
        return self.model.context_length if self.data.sequence_length is None else self.data.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        train = self.train
        if train.accumulation is not None and train.micro_batch is not None:
            return train.accumulation * train.micro_batch * self.sequence_length
        return DEFAULT_TOKENS_PER_STEP if train.tokens_per_step is None else train.tokens_per_step


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
