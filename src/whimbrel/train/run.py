"""The TOML door: a run's configuration to a trainer over token shards, and on to its last checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.checkpoint import list_checkpoints, read_manifest
from whimbrel.models import GPT
from whimbrel.tokenization import Tokenizer
from whimbrel.train import recipe
from whimbrel.train.arguments import MinimalTrainingArguments, from_config
from whimbrel.train.batches import TokenBatches, accumulation_steps
from whimbrel.train.callbacks import (
    DivergenceCallback,
    EarlyStoppingCallback,
    EmaCallback,
    MemoryCallback,
    NormsCallback,
    ProfilerCallback,
    SampleCallback,
)
from whimbrel.train.config import RunConfig
from whimbrel.train.device import choose_device
from whimbrel.train.distributed import check_single_process
from whimbrel.train.state import TrainOutput
from whimbrel.train.trainer import Trainer

__all__ = ["RunTrainer", "Sampler", "train"]

Sampler = Callable[[GPT, Tokenizer, int], str]
"""Writes a text with the model as it is after so many steps."""

logger = logging.getLogger(__name__)


def train(config: RunConfig, *, callbacks: Iterable[Any] | None = None, sampler: Sampler | None = None) -> TrainOutput:
    """Run `config` to its end; a run already in its output directory is gone on with, exactly."""
    return RunTrainer(config, callbacks=callbacks, sampler=sampler).train()


class RunTrainer(Trainer):
    """A trainer made from a configuration: GPT over token shards.

    `callbacks` and those from the configuration are added to the defaults of `Trainer`.
    """

    config: RunConfig
    _builds_model = True

    def __init__(
        self, config: RunConfig, *, callbacks: Iterable[Any] | None = None, sampler: Sampler | None = None
    ) -> None:
        check_single_process()
        device = choose_device(config.train.device)
        self._as_given = config
        config = _with_recorded_micro_batch(config)
        model = recipe.draw_model(config)
        micro_batch = recipe.choose_micro_batch(config, model, device)
        batches = recipe.build_batches(config, device, micro_batch)
        self.given = replace(config, train=replace(config.train, micro_batch=micro_batch, device=str(device)))
        self.resolved = _resolved(self.given, TokenBatches(batches, device))
        tokenizer = recipe.find_tokenizer(config, batches.eot_id)
        super().__init__(
            from_config(self.resolved),
            model,
            train_dataset=batches,
            eval_dataset=recipe.build_validation(config, device, micro_batch),
            processing_class=tokenizer,
            callbacks=[*(callbacks or ()), *_callbacks(config, tokenizer, sampler)],
        )

    def _make_config(self, args: MinimalTrainingArguments) -> RunConfig:
        """The configuration itself: the arguments were made from it, for callbacks to read."""
        del args
        return self.resolved

    def _about(self) -> dict[str, Any]:
        return super()._about() | {"micro_batch": self.config.train.micro_batch}

    def _resume(self) -> None:
        micro_batch = _with_recorded_micro_batch(self._as_given).train.micro_batch
        if micro_batch not in (
            None,
            self.config.train.micro_batch,
        ):  # another run has started and ended in the meantime
            raise ConfigError(f"{self.config.output_dir} changed while this run was starting: start it again")
        super()._resume()

    _resumes_explicitly = False

    def _begins_anew(self) -> bool:
        return self.config.overwrite_output_dir

    def _given_settings(self) -> RunConfig:
        return self.given

    def _warm_up(self) -> None:
        """Compile with one pass forth and back, so that no step is timed with it; leaves no trace in the model."""
        assert self.model is not None
        if not self.config.train.compile:
            return
        start = time.perf_counter()
        loader = self.train_dataset
        x = torch.zeros(loader.B, loader.T, dtype=torch.int64, device=self.device)
        objective, ones = self._objective(loader), torch.ones((), device=self.device)
        with self.precision.autocast():
            loss = objective.loss((x, x), ones, ones)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, parameters, allow_unused=True)  # no hook hears of it
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.compile_seconds = time.perf_counter() - start


def _resolved(config: RunConfig, batches: TokenBatches) -> RunConfig:
    """The same run with its length in steps and its steps in micro-batches."""
    train = config.train
    assert train.micro_batch is not None
    accumulation = accumulation_steps(config.tokens_per_step, train.micro_batch, config.sequence_length)
    if train.tokens is not None:
        steps = train.tokens // config.tokens_per_step
    else:
        steps = train.steps if train.steps is not None else batches.steps_for(train.epochs or 0.0, accumulation)
    return replace(
        config,
        train=replace(train, steps=steps, tokens=None, epochs=None, tokens_per_step=None, accumulation=accumulation),
    )


def _with_recorded_micro_batch(config: RunConfig) -> RunConfig:
    """A resumed run that names no micro-batch goes on with the one it had, so that free memory changes no sum."""
    if config.train.micro_batch is not None or config.overwrite_output_dir:
        return config
    asked = config.resume.path
    for path in [asked] if asked is not None else reversed(list_checkpoints(config.output_dir).values()):
        try:
            recorded = read_manifest(path).about.get("micro_batch")
        except CheckpointError:
            continue  # passed over when the run is loaded too, and told of there
        if isinstance(recorded, int) and config.tokens_per_step % (recorded * config.sequence_length) == 0:
            return replace(config, train=replace(config.train, micro_batch=recorded))
        break
    return config


def _callbacks(config: RunConfig, tokenizer: Tokenizer | None, sampler: Sampler | None) -> list[Any]:
    """The callbacks that the configuration asks for."""
    log = config.log
    found: list[Any] = []
    if config.sample.every is not None:
        if sampler is None:
            raise ConfigError("sample.every is set but nothing here can write samples: pass sampler= or leave it out")
        if tokenizer is None:
            raise ConfigError(f"sample.every needs the tokenizer, and {config.data.path} holds no tokenizer.json")
        found.append(
            SampleCallback(lambda model, step: sampler(cast(GPT, model), tokenizer, step), config.sample.every)
        )
    if config.ema.decay is not None:
        found.append(EmaCallback(config.ema.decay, config.ema.every))
    if config.divergence.action is not None:
        found.append(DivergenceCallback(config.divergence))
    if config.early_stopping.patience is not None:
        checkpoint = config.checkpoint
        found.append(
            EarlyStoppingCallback(
                config.early_stopping.patience, config.early_stopping.threshold, checkpoint.metric,
                checkpoint.greater_is_better,
            )
        )  # fmt: skip
    if log.every is not None:
        found.append(MemoryCallback())
    if log.norms is not None:
        found.append(NormsCallback(log.norms))
    if log.profile is not None:
        found.append(ProfilerCallback(*log.profile))
    return found
