"""`BaseTrainer`: the surface that people know from `transformers.Trainer`, over one loop and named parts."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from whimbrel.base.errors import ConfigError
from whimbrel.checkpoint import step_folders
from whimbrel.data import TokenDataLoader
from whimbrel.models import GPT
from whimbrel.optim import InBackward, parameter_table, whole_steps
from whimbrel.parallel import memory_budget, offload_activations
from whimbrel.precision import sdpa_backends, torch_switches
from whimbrel.train import assemble
from whimbrel.train.arguments import lone_tokenizers
from whimbrel.train.batches import DatasetBatches, TokenBatches, held_out, make_batches
from whimbrel.train.callbacks import ControlCallback, ProgressCallback
from whimbrel.train.columns import drop_unused_columns
from whimbrel.train.core import TrainerCore
from whimbrel.train.device import Stopwatch, device_name, peak_flops, peak_memory
from whimbrel.train.directory import check_directory, clear_directory, events_folder, record_settings
from whimbrel.train.distributed import refuse_wrapped_model
from whimbrel.train.driver import Driver
from whimbrel.train.evaluation import Prediction, mean_loss, predictions
from whimbrel.train.loop import Loop
from whimbrel.train.metric import find_metric
from whimbrel.train.outputs import Objective
from whimbrel.train.settings import TrainerConfig
from whimbrel.train.state import Tally, TrainerControl, TrainerState, TrainOutput
from whimbrel.train.summary import RunSummary, estimate_memory, features

__all__ = ["BaseTrainer", "Trainer"]


class BaseTrainer(TrainerCore):
    """Assembles parts and runs them: dataloaders, model, optimizer, schedule, checkpoints, callbacks."""

    _driver: Driver | None = None

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Run to the last step, or until someone asks for the end. Resume: None, True or "latest", or a path."""
        self._check_datasets()
        given = self.config
        if resume_from_checkpoint is not None:
            latest = resume_from_checkpoint in (True, "latest")
            path = None if latest or isinstance(resume_from_checkpoint, bool) else Path(resume_from_checkpoint)
            self.config = replace(given, resume=replace(given.resume, latest=latest, path=path))
        try:
            with self.checkpoint_manager.lock:  # before anything in the directory is read, changed or removed
                check_directory(self.config, explicit=self._resumes_explicitly)
                with self._torch_settings():
                    self._prepare(self.train_dataset, self.eval_dataset)
                    with self._signals:
                        return self._train_loop()
        finally:
            self.config = given

    def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Make every part that the given datasets call for; a model that exists is never made again."""
        config = self.config
        if config.train.compile:
            assemble.keep_compiled()
        if self.model is None:
            self.model = self._make_model()
        if not self._placed:
            assemble.place_model(self.model, config, self.device)
            self._placed = True
        if eval_dataset is not None:
            self.eval_dataloader = self._make_batches(eval_dataset, config.validation.micro_batch, shuffle=False)
        if train_dataset is None:
            return
        self.train_dataloader = self._make_batches(train_dataset, config.train.micro_batch, shuffle=True)
        if isinstance(self.optimizer, InBackward):
            self.optimizer.remove()  # of an earlier train()
        self.optimizer = assemble.build_optimizer_of(
            self.unwrapped_model(), config, self._optimizers[0], accumulation=self._accumulation()
        )
        total = self._total_steps(self.train_dataloader)
        self.lr_scheduler = assemble.build_scheduler(self.optimizer, config, total, self._optimizers[1])
        self._states = None
        self._optimizer_states()  # before a checkpoint or a step changes their settings
        self.state, self.control, self.tally = self._make_state(total), TrainerControl(), Tally()
        self.callbacks.stopped_by, self._last_metric, self.deferred = None, None, set()
        self.model.train()
        self._warm_up()
        assemble.seed_everything(config.train.seed)
        self._resume()

    def _train_loop(self) -> TrainOutput:
        """Drive the loop; callbacks let go of what they hold also when it fails."""
        assert self.train_dataloader is not None
        loop = self._make_loop()
        per_token = assemble.flops_per_token(self.unwrapped_model(), self._sequence_length())
        driver = self._driver = Driver(self, loop, self.train_dataloader, lambda tokens: per_token * tokens)
        start, ended = time.perf_counter(), False
        try:
            self.tell("on_train_begin", summary=self._summary())
            driver.run()
            self._finish_saves()
            output = self._output(time.perf_counter() - start)
            ended = True
        finally:
            self.checkpoint_manager.close()
            if not ended:
                self.tell("on_train_end", output=None, checkpoint=None, stopped_by=self.stopped_by)
        self.tell(
            "on_train_end", output=output, checkpoint=self.checkpoint_manager.newest(), stopped_by=self.stopped_by
        )
        return output

    def reserve_saves(self) -> None:
        """Take the pinned memory of asynchronous saves now that the optimizer has its state: no save pays for it."""
        if self.config.checkpoint.asynchronous and self.device.type == "cuda":
            self.checkpoint_manager.reserve(self.get_state_components())

    def settle(self) -> None:
        """Wait for the numbers of every step so far; for callbacks that do something slow or print something."""
        if self._driver is not None:
            self._driver.settle()

    def _make_loop(self) -> Loop:
        assert self.model is not None
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        assert self.train_dataloader is not None
        config, scheduler = self.config, self.lr_scheduler
        peaks = [group.get("peak_lr") for group in self.optimizer.param_groups]
        reported = peaks.index(config.optim.lr) if config.optim.lr in peaks else 0
        return Loop(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=scheduler,
            batches=self.train_dataloader,
            objective=self._objective(self.train_dataset),
            precision=self.precision,
            accumulation=self._accumulation(),
            stopwatch=Stopwatch(self.device),
            tell=self.tell,
            lr=lambda: scheduler.get_last_lr()[reported],
            clip=config.train.clip,
            on_nonfinite=config.train.on_nonfinite,
        )

    def _objective(self, dataset: Any) -> Objective:
        """How a batch of `dataset` becomes a loss."""
        assert self.model is not None
        if isinstance(dataset, TokenDataLoader) and dataset.documents != "join":
            return Objective(self.model, self.loss_fn, lambda x: {"documents": dataset.documents_of(x)})
        return Objective(self.model, self.loss_fn)

    def _finish_saves(self) -> None:
        """Wait until the last save is on disk, and tell of it."""
        self.checkpoint_manager.wait()
        for saved in self.checkpoint_manager.finished():
            self.tell("on_save", checkpoint=saved.path, step=saved.step)

    def _output(self, seconds: float) -> TrainOutput:
        """The sums."""
        state, tally = self.state, self.tally
        loss = tally.loss / tally.steps if tally.steps else math.nan
        metrics: dict[str, Any] = {
            "train_runtime": seconds, "train_seconds": tally.seconds, "train_loss": loss, "epoch": state.epoch,
            "num_input_tokens_seen": state.num_input_tokens_seen, "total_flos": state.total_flos,
            "compile_seconds": self.compile_seconds, "peak_memory": peak_memory(self.device),
        }  # fmt: skip
        return TrainOutput(state.global_step, loss, metrics)

    @property
    def can_evaluate(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.eval_dataloader is not None

    @property
    def drains(self) -> bool:
        """Whether the run was asked to save and end, and nothing else."""
        return self.received_signal is not None or any(
            getattr(callback, "drains", False) for callback in self.callbacks
        )

    @property
    def received_signal(self) -> signal.Signals | None:
        """The signal that ended the last `train()`, or is about to end it."""
        return self._signals.received

    def tell(self, event: str, **keywords: Any) -> TrainerControl:
        """Dispatch an event to the callbacks; the control that holds afterwards."""
        control = super().tell(event, **keywords)
        if event == "on_prediction_step" and self._driver is not None:
            self._driver.check_evaluation()
        return control

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """The mean loss over held-out targets, logged, and compared with the best so far."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("evaluate() needs eval_dataset: give it here or to the trainer")
        with self._batches_of(dataset):
            metrics = self._eval_loop(dataset)
        self.log(metrics)
        self.tell("on_evaluate", metrics=metrics)
        return metrics

    @contextlib.contextmanager
    def _batches_of(self, dataset: Any) -> Iterator[None]:
        """Have the batches of `dataset` ready to be evaluated; the trainer's own are there again afterwards."""
        own, ready = self.eval_dataloader, dataset is self.eval_dataset and self.eval_dataloader is not None
        with self._torch_settings():
            if not ready:
                self._prepare(None, dataset)
            try:
                yield
            finally:
                if dataset is not self.eval_dataset:
                    self.eval_dataloader = own

    def _eval_loop(self, dataset: Any) -> dict[str, float]:
        """What is measured on the prepared batches."""
        batches = self.eval_dataloader
        assert batches is not None
        held = held_out(batches, self.config.validation.tokens) if isinstance(batches, TokenBatches) else batches
        loss = mean_loss(
            self._objective(dataset), held, self.precision, self.config.validation.batches,
            lambda: self.tell("on_prediction_step"),
        )  # fmt: skip
        return {"eval_loss": loss}

    def predict(self, test_dataset: Any) -> Prediction:
        """Logits and labels of a dataset, in its order, and the loss where it has labels."""
        if isinstance(test_dataset, TokenDataLoader):
            raise ConfigError("predict() takes a dataset: the logits of a whole token stream would not fit in memory")
        with self._batches_of(test_dataset):
            assert isinstance(self.eval_dataloader, DatasetBatches)
            logits, labels, loss = predictions(
                self._objective(test_dataset), self.eval_dataloader, self.precision,
                lambda: self.tell("on_prediction_step"),
            )  # fmt: skip
            metrics = {} if loss is None else {"test_loss": loss}
        self.tell("on_predict", metrics=metrics)
        return Prediction(logits, labels, metrics)

    def compare(self, metrics: dict[str, float]) -> None:
        """Remember the metric that best is measured by, and whether it is the best so far."""
        value = find_metric(metrics, self.config.checkpoint.metric)
        self._last_metric = self.state.global_step, value
        best = self.state.best_metric
        better = best is None or (value > best if self._greater_is_better else value < best)
        if better and not math.isnan(value):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    # What the parts are made from

    @contextlib.contextmanager
    def _torch_settings(self) -> Iterator[None]:
        """Torch's switches, attention kernels and activation offloading as set; afterwards as they were."""
        train = self.config.train
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                torch_switches(
                    matmul_precision=train.matmul_precision,
                    detect_anomaly=train.detect_anomaly,
                    recompile_limit=train.recompile_limit,
                    deterministic=train.deterministic,
                )
            )
            stack.enter_context(sdpa_backends(train.sdpa_backend, set_priority=train.sdpa_set_priority))
            if train.activation_offloading:
                stack.enter_context(offload_activations(self.device))
            if isinstance(train.recompute, float):
                stack.enter_context(memory_budget(train.recompute))
            stack.enter_context(lone_tokenizers(self.config.loader.workers))
            yield

    def _make_model(self) -> nn.Module:
        assert self.model_init is not None
        assemble.seed_everything(self.config.train.seed)
        with torch_switches(default_dtype=self.config.train.default_dtype):
            model = self.model_init()
        refuse_wrapped_model(model)
        return model

    def _make_batches(self, dataset: Any, size: int | None, *, shuffle: bool) -> TokenBatches | DatasetBatches:
        assert self.model is not None
        if isinstance(dataset, TokenDataLoader):
            size = dataset.B if not shuffle or size is None else size
        return make_batches(
            drop_unused_columns(dataset, self.unwrapped_model()),
            size or self.config.train.micro_batch or 1,
            self.device,
            collate=self.data_collator,
            seed=self.config.train.seed,
            shuffle=shuffle,
            loader=self.config.loader if shuffle else replace(self.config.loader, drop_last=False),
        )

    def _make_state(self, total: int) -> TrainerState:
        config = self.config
        return TrainerState(
            max_steps=total,
            num_train_epochs=config.train.epochs or self._epochs_in(total),
            logging_steps=whole_steps(config.log.every, total) if config.log.every else 0,
            eval_steps=whole_steps(config.validation.every, total) if config.validation.every else 0,
            save_steps=whole_steps(config.checkpoint.every, total) if config.checkpoint.every else 0,
            train_batch_size=config.train.micro_batch or 0,
            max_eval_steps=config.validation.batches or -1,
            is_local_process_zero=self.is_local_process_zero,
            is_world_process_zero=self.is_world_process_zero,
        )

    def _epochs_in(self, steps: int) -> float:
        """Passes that so many steps begin; 0 where the length of a pass is not known."""
        batches = self.train_dataloader
        if batches is None or (isinstance(batches, DatasetBatches) and not hasattr(batches.dataset, "__len__")):
            return 0.0
        return float(math.ceil(steps / batches.steps_for(1.0, self._accumulation())))

    def _accumulation(self) -> int:
        return self.config.train.accumulation or 1

    def _total_steps(self, batches: TokenBatches | DatasetBatches) -> int:
        train = self.config.train
        return train.steps if train.steps is not None else batches.steps_for(train.epochs or 0.0, self._accumulation())

    def _warm_up(self) -> None:
        """Compile ahead of the first step; a strategy that knows its shapes does it here."""

    def _check_datasets(self) -> None:
        """Refuse to train without data, and to be asked for evaluations without any."""
        if self.train_dataset is None:
            raise ConfigError("train() needs train_dataset: give it to the trainer")
        validation, checkpoint = self.config.validation, self.config.checkpoint
        asked = {
            "validation.every (eval_strategy)": validation.every is not None or validation.each_epoch,
            "checkpoint.evaluate (eval_on_save)": checkpoint.evaluate,
            "checkpoint.best (preserve_best_model)": checkpoint.best is not None,
            "checkpoint.when_best (save_strategy='best')": checkpoint.when_best,
        }
        for name in (name for name, on in asked.items() if on and self.eval_dataset is None):
            raise ConfigError(f"{name} asks for evaluations and there is nothing to evaluate on: give eval_dataset")

    def _begins_anew(self) -> bool:
        """Whether the run in the directory is to be removed: not where someone asked to go on with it."""
        return self.config.overwrite_output_dir and not self.config.resume.latest

    _resumes_explicitly = True
    """Whether resuming from the newest checkpoint was asked for; not where it is what happens by itself."""

    def _resume(self) -> None:
        """Load the checkpoint that was asked for, or remove what is to be begun anew; write down the settings."""
        config = self.config
        if config.resume.path is not None:
            self.load_checkpoint(config.resume.path)
        elif self._begins_anew():
            clear_directory(config.output_dir)
        elif step_folders(config.output_dir):
            self.load_checkpoint()
        if config.log.dir is None:
            self.args.logging_dir = events_folder(config.output_dir) or self.args.logging_dir
        self.checkpoint_manager.tidy(self.state.global_step)
        if self.state.global_step < self.state.max_steps:
            record_settings(self._given_settings(), resumed=self.resumed_from is not None)

    def _given_settings(self) -> TrainerConfig:
        """The settings that the run directory keeps."""
        return self.config

    def _sequence_length(self) -> int:
        """Tokens of a training sequence, as the loader or the first example says; 0 where neither does."""
        if isinstance(self.train_dataloader, TokenBatches):
            return self.train_dataloader.loader.T
        assert self.train_dataloader is not None
        example = self.train_dataloader.first_example()
        inputs = example.get("input_ids") if isinstance(example, Mapping) else None
        return 0 if inputs is None else len(inputs)

    def _summary(self) -> RunSummary:
        model, length, config = self.unwrapped_model(), self._sequence_length(), self.config
        samples = (config.train.micro_batch or 1) * self._accumulation()
        return RunSummary(
            device=self.device.type,
            device_name=device_name(self.device),
            parameters=model.num_parameters() if isinstance(model, GPT) else sum(p.numel() for p in model.parameters()),
            frozen_parameters=sum(p.numel() for p in model.parameters() if not p.requires_grad),
            memory=estimate_memory(model, self.optimizer),
            moved=() if self.optimizer is None else parameter_table(model, self.optimizer),
            samples_per_step=samples,
            tokens_per_step=samples * length or None,
            tokens_per_micro_batch=samples * length // self._accumulation() or None,
            accumulation=self._accumulation(),
            total_steps=self.state.max_steps,
            first_step=self.state.global_step,
            flops_per_token=assemble.flops_per_token(model, length),
            peak_flops=peak_flops(self.device),
            compile_seconds=self.compile_seconds,
            features=features(config),
            resumed_from=self.resumed_from,
        )


class Trainer(BaseTrainer):
    """One device. By default it shows its progress and can be controlled while it runs."""

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """Progress and live control."""
        return [ProgressCallback(), ControlCallback()]
