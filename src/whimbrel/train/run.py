"""A run from its configuration to its last checkpoint: resume, step, validate, sample, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whimbrel import __version__
from whimbrel.artifacts import load_weights, save_model
from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.base.files import atomic_file
from whimbrel.base.logging import get_logger
from whimbrel.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_component,
    verify_checkpoint,
    write_checkpoint,
)
from whimbrel.config import dump_toml, to_table
from whimbrel.data import TokenDataLoader
from whimbrel.models import GPT, IGNORE_INDEX
from whimbrel.optim import restore_optimizer
from whimbrel.text import Tokenizer
from whimbrel.train import assemble
from whimbrel.train.config import RunConfig
from whimbrel.train.device import choose_device, device_name, peak_flops, peak_memory
from whimbrel.train.loop import Loop
from whimbrel.train.watch import JsonLog, RunResult, RunSummary, StepRecord, Watcher

__all__ = ["Sampler", "train"]

Sampler = Callable[[GPT, Tokenizer, int], str]
"""Writes a text with the model as it is after so many steps."""

logger = get_logger(__name__)


def train(
    config: RunConfig,
    *,
    watchers: Sequence[Watcher] = (),
    sampler: Sampler | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Run `config` to its end or until `stopping`; a run already in its output directory is gone on with, exactly."""
    run = Run.prepare(config, list(watchers), sampler)
    run.start()
    while run.loop.position.step < config.train.total_steps and not stopping():
        run.loop.run(run.next_stop(), stopping)
        run.after_steps(stopped=stopping())
    if stopping() and run.loop.position.step > 0:
        run.save()  # the request may have come while something else than a step was running
    return run.finish()


@dataclass(slots=True)
class Run:
    """The assembled parts of one run and what they have reached."""

    config: RunConfig
    device: torch.device
    model: GPT
    batches: TokenDataLoader
    loop: Loop
    validation: TokenDataLoader | None
    tokenizer: Tokenizer | None
    resumed_from: Path | None
    watchers: list[Watcher]
    sampler: Sampler | None
    compile_seconds: float = 0.0
    validation_loss: float | None = None
    checkpoint: Path | None = None
    last: _LastStep = field(default_factory=lambda: _LastStep())

    @classmethod
    def prepare(cls, config: RunConfig, watchers: list[Watcher], sampler: Sampler | None) -> Run:
        """Assemble the parts and, where the output directory holds a checkpoint, put them into its state."""
        if config.train.compile:
            assemble.keep_compiled()
        device = choose_device(config.train.device)
        torch.set_float32_matmul_precision(config.train.matmul_precision)
        newest = latest_checkpoint(config.output_dir)
        config = _with_recorded_micro_batch(config, None if newest is None else verify_checkpoint(newest))
        model = assemble.build_model(config, device)
        micro_batch = assemble.choose_micro_batch(config, model, device)
        config = replace(config, train=replace(config.train, micro_batch=micro_batch, device=str(device)))
        batches = assemble.build_batches(config, device, micro_batch)
        run = cls(
            config=config,
            device=device,
            model=model,
            batches=batches,
            loop=assemble.build_loop(config, model, batches, device),
            validation=assemble.build_validation(config, device, micro_batch),
            tokenizer=assemble.find_tokenizer(config, batches.eot_id),
            resumed_from=newest,
            watchers=watchers,
            sampler=sampler,
        )
        if sampler is None and config.sample.every is not None:
            raise ConfigError("sample.every is set but nothing here can write samples: pass sampler= or leave it out")
        if config.sample.every is not None and run.tokenizer is None:
            raise ConfigError(f"sample.every needs the tokenizer, and {config.data.path} holds no tokenizer.json")
        if newest is not None:
            run.load(newest)
        if run.loop.position.step < config.train.total_steps:
            with atomic_file(config.output_dir / "config.toml", "w") as file:
                file.write(dump_toml(to_table(config)))
        run.watchers = [JsonLog(config.output_dir / "log.jsonl", run.loop.position.step), run.last, *watchers]
        run.loop.watchers = run.watchers
        return run

    def load(self, checkpoint: Path) -> None:
        """Put every part into the state that a checkpoint holds; the optimizer's settings stay those of this run."""
        load_weights(self.model, checkpoint / "model")
        self.batches.load_state_dict(read_component(checkpoint, "batches"))
        self.loop.position.load_state_dict(read_component(checkpoint, "position"))
        if not restore_optimizer(self.loop.optimizer, read_component(checkpoint, "optimizer")):
            raise CheckpointError(
                f"{checkpoint} holds the state of another optimizer, or of other parameter groups: keep optim.name, "
                "optim.decay and which rates are given, or name another output_dir"
            )

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds besides the model."""
        return {"optimizer": self.loop.optimizer, "batches": self.batches, "position": self.loop.position}

    def start(self) -> None:
        """Compile, so that no step is timed with it, and tell the watchers what is about to run."""
        config, loop = self.config, self.loop
        if config.train.compile and loop.position.step < config.train.total_steps:
            assemble.compile_blocks(self.model)
            self.compile_seconds = self._warm_up()
        summary = RunSummary(
            device=self.device.type,
            device_name=device_name(self.device),
            parameters=self.model.num_parameters(),
            tokens_per_step=config.train.tokens_per_step,
            micro_batch=self.batches.B,
            sequence_length=self.batches.T,
            accumulation=loop.accumulation,
            total_steps=config.train.total_steps,
            first_step=loop.position.step,
            flops_per_token=self.model.flops_per_token(self.batches.T),
            peak_flops=peak_flops(self.device),
            compile_seconds=self.compile_seconds,
            resumed_from=None if self.resumed_from is None else str(self.resumed_from),
        )
        for watcher in self.watchers:
            watcher.on_start(summary)

    def next_stop(self) -> int:
        """The next step after which something besides stepping is due."""
        step, total = self.loop.position.step, self.config.train.total_steps
        periods = (self.config.validation.every, self.config.sample.every, self.config.checkpoint.every)
        return min([total, *((step // every + 1) * every for every in periods if every is not None)])

    def after_steps(self, *, stopped: bool) -> None:
        """Validate, sample and save, each where it is due; stopped early, save as well and do nothing more."""
        step = self.loop.position.step
        final = step == self.config.train.total_steps

        def due(every: int | None) -> bool:
            return every is not None and step % every == 0

        if self.validation is not None and (due(self.config.validation.every) or final):
            self.validation_loss = self.validate(self.validation)
            for watcher in self.watchers:
                watcher.on_validation(step, self.validation_loss)
        if self.sampler is not None and self.tokenizer is not None and due(self.config.sample.every):
            text = self.sampler(self.model, self.tokenizer, step)
            for watcher in self.watchers:
                watcher.on_sample(step, text)
        if due(self.config.checkpoint.every) or final or stopped:
            self.save()

    @torch.no_grad()
    def validate(self, batches: TokenDataLoader) -> float:
        """Loss over the held-out sequences, each counted once whatever the batch size."""
        left = min(self.config.validation.tokens or batches.total_tokens, batches.total_tokens - 1) // batches.T
        batches.reset()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        while left > 0:
            x, y = batches.next_batch()
            y[left:] = IGNORE_INDEX
            left -= batches.B
            with self.loop.autocast():
                loss = self.model(x, y, loss_divisor=1.0, **self.loop.extras(x)).loss
            total += loss
            count += (y != IGNORE_INDEX).sum()
        return float(total / count)

    def save(self) -> None:
        """Write a checkpoint of this step, unless it is there."""
        step, directory = self.loop.position.step, self.config.output_dir
        if step not in list_checkpoints(directory):
            states = {key: part.state_dict() for key, part in self.parts().items()}
            about = {"whimbrel": __version__, "torch": str(torch.__version__), "micro_batch": self.batches.B}
            path = write_checkpoint(directory, step, states, self._write_model, about)
            self.checkpoint = path
            for watcher in self.watchers:
                watcher.on_checkpoint(step, path)
            if self.config.checkpoint.keep is not None:
                prune_checkpoints(directory, self.config.checkpoint.keep)

    def finish(self) -> RunResult:
        """Tell the watchers how it ended."""
        position = self.loop.position
        result = RunResult(
            step=position.step, tokens=position.tokens, seconds=position.seconds, compile_seconds=self.compile_seconds,
            train_loss=self.last.loss, validation_loss=self.validation_loss, peak_memory=peak_memory(self.device),
            checkpoint=self.checkpoint or self.resumed_from,
        )  # fmt: skip
        for watcher in self.watchers:
            watcher.on_end(result)
        return result

    def _write_model(self, path: Path) -> None:
        save_model(self.model, path, tokenizer=self.tokenizer)

    def _warm_up(self) -> float:
        """Seconds until one pass forth and back has been compiled and run; leaves no trace in the model."""
        start = time.perf_counter()
        x = torch.zeros(self.batches.B, self.batches.T, dtype=torch.int64, device=self.device)
        with self.loop.autocast():
            loss: Tensor = self.model(x, x, **self.loop.extras(x)).loss
        loss.backward()
        self.loop.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def _with_recorded_micro_batch(config: RunConfig, manifest: Mapping[str, Any] | None) -> RunConfig:
    """A resumed run that names no micro-batch goes on with the one it had, so that free memory changes no sum."""
    recorded = None if manifest is None else manifest.get("micro_batch")
    if config.train.micro_batch is not None or not isinstance(recorded, int):
        return config
    if config.train.tokens_per_step % (recorded * config.sequence_length):
        return config
    return replace(config, train=replace(config.train, micro_batch=recorded))


class _LastStep(Watcher):
    """Remembers the newest training loss."""

    loss: float | None = None

    def on_step(self, record: StepRecord) -> None:
        self.loss = record.loss
