"""`BaseTrainer`: the surface that people know from `transformers.Trainer`, over one loop and named parts."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.checkpoint import checkpoint_path as find_checkpoint
from whimbrel.checkpoint import step_folders
from whimbrel.data import TokenDataLoader
from whimbrel.distributed import activation_memory_budget, offload_activations
from whimbrel.models import GPT
from whimbrel.optim import parameter_table, whole_steps
from whimbrel.precision import sdpa_backends, torch_switches
from whimbrel.train import assemble
from whimbrel.train.arguments import no_tokenizer_parallelism
from whimbrel.train.batches import TokenBatches, held_out
from whimbrel.train.callbacks import ControlCallback, ProgressCallback
from whimbrel.train.config import TrainerConfig
from whimbrel.train.dataset_batches import DatasetBatches
from whimbrel.train.device import Stopwatch, device_name, peak_flops, peak_memory
from whimbrel.train.directory import check_directory, clear_directory, events_folder, record_settings
from whimbrel.train.driver import Driver
from whimbrel.train.evaluation import Evaluation, Prediction, computed_metrics, evaluate_batches
from whimbrel.train.hooks import TrainerHooks
from whimbrel.train.loop import Loop
from whimbrel.train.metric import find_metric, has_metric
from whimbrel.train.overrides import check_overrides, overrides
from whimbrel.train.state import Tally, TrainerControl, TrainerState, TrainOutput
from whimbrel.train.summary import RunSummary, estimate_memory, features

__all__ = ["BaseTrainer", "Trainer"]

logger = logging.getLogger(__name__)

_OVERRIDDEN = object()
"""Placeholder for train_dataset in a trainer whose class overrides get_train_dataloader."""


class BaseTrainer(TrainerHooks):
    """Assembles parts and runs them: dataloaders, model, optimizer, schedule, checkpoints, callbacks."""

    _driver: Driver | None = None
    _ignore_keys: list[str] | None = None

    def train(
        self,
        resume_from_checkpoint: bool | str | Path | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train until the last step or until a stop is requested. Resume: None, True or "latest", or a path.

        `ignore_keys_for_eval`: model outputs to exclude from the predictions in evaluations during training.
        """
        if trial is not None:
            raise ConfigError("expected trial=None: construct and train one Trainer for each trial")
        check_overrides(self)
        self._check_datasets()
        given, self._ignore_keys = self.config, ignore_keys_for_eval
        if resume_from_checkpoint is not None:
            latest = resume_from_checkpoint in (True, "latest")
            path = None if latest or isinstance(resume_from_checkpoint, bool) else Path(resume_from_checkpoint)
            self.config = replace(given, resume=replace(given.resume, latest=latest, path=path))
        try:
            with self.checkpoint_manager.lock:  # before anything in the directory is read, changed or removed
                check_directory(self.config, explicit=self._resumes_explicitly)
                with self._torch_settings():
                    self._prepare(_OVERRIDDEN if self.train_dataset is None else self.train_dataset, self.eval_dataset)
                    with self._signals:
                        return self._train_loop()
        finally:
            self.config, self._ignore_keys = given, None

    def _named(self, given: Path) -> Path:
        """Resolve a checkpoint path, or the name it has in `transformers`: `output_dir/checkpoint-500`."""
        run = self.config.output_dir
        found = re.fullmatch(r"checkpoint-(\d+)", given.name)
        ours = None if found is None else find_checkpoint(run, int(found[1]))
        return ours if ours is not None and not given.exists() and ours.exists() and given.parent == run else given

    def _prepare(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Make every part that the given datasets call for; a model that exists is never made again."""
        config = self.config
        if config.train.compile:
            assemble.keep_compiled()
        if self.model is None:
            self.model = self.call_model_init()
        if not self._placed:
            assemble.place_model(self.model, config, self.device)
            self._placed = True
        if eval_dataset is not None and not isinstance(eval_dataset, Mapping):
            self.eval_dataloader = self._make_batches(eval_dataset, config.validation.micro_batch, shuffle=False)
        if train_dataset is None:
            return
        if overrides(self, "get_train_dataloader"):
            self.train_dataloader = self._as_batches(self.get_train_dataloader())
        else:
            self.train_dataloader = self._make_batches(train_dataset, config.train.micro_batch, shuffle=True)
        total = self._total_steps(self.train_dataloader)
        self._make_optimizer(total)
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
            self._load_best()
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
            parts = [part for part in self.get_state_components() if part.key != "save_model"]
            self.checkpoint_manager.reserve(parts)

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
        objective = self._objective(self.train_dataloader)
        peaks = [group.get("peak_lr") for group in self.optimizer.param_groups]
        reported = peaks.index(config.optim.lr) if config.optim.lr in peaks else 0
        return Loop(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=scheduler,
            batches=self.train_dataloader,
            objective=self._counting_objective(objective, "training_step"),
            training_step=self._overridden_step(objective),
            precision=self.precision,
            accumulation=self._accumulation(),
            stopwatch=Stopwatch(self.device),
            tell=self.tell,
            lr=lambda: scheduler.get_last_lr()[reported],
            clip=config.train.clip,
            on_nonfinite=config.train.on_nonfinite,
        )

    def _finish_saves(self) -> None:
        """Wait until the last save is on disk, and tell of it."""
        self.checkpoint_manager.wait()
        for saved in self.checkpoint_manager.finished():
            self.tell_saved(saved)

    def _load_best(self) -> None:
        """Load the weights of the best checkpoint if best checkpoints are kept, unless the run was interrupted."""
        pauses = self.drains and self.state.global_step < self.state.max_steps
        if self.config.checkpoint.best is None or self.control.should_abort_without_save or pauses:
            return
        best = self.checkpoint_manager.best()
        if best is not None and best != find_checkpoint(self.checkpoint_manager.run, self.state.global_step):
            logger.info("Loading the best model from %s", best)
            (model,) = (part for part in self.get_state_components() if part.key == "model")
            self.checkpoint_manager.load_component(model, best)

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
        return self.eval_dataloader is not None or self._has_eval_data

    @property
    def _has_eval_data(self) -> bool:
        return self.eval_dataset is not None or overrides(self, "get_eval_dataloader")

    @property
    def drains(self) -> bool:
        """Whether the run was asked to save and end, and nothing else."""
        return self.received_signal is not None or any(
            getattr(callback, "drains", False) for callback in self.callbacks
        )

    @property
    def received_signal(self) -> signal.Signals | None:
        """The signal that stopped the last `train()`, or is about to stop it."""
        return self._signals.received

    def tell(self, event: str, **keywords: Any) -> TrainerControl:
        """Dispatch an event to the callbacks and return the control."""
        control = super().tell(event, **keywords)
        if event == "on_prediction_step" and self._driver is not None:
            self._driver.check_evaluation()
        return control

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, log and return the mean loss over held-out targets and the metrics of compute_metrics.

        Each dataset of a dict is evaluated separately, with its name in the metrics: `eval_NAME_loss`. A string selects
        one of the trainer's datasets by name. `ignore_keys`: model outputs to exclude from the predictions.
        """
        dataset = self._eval_dataset(eval_dataset)
        if dataset is None and not overrides(self, "get_eval_dataloader"):
            raise ConfigError("evaluate() needs eval_dataset: give it here or to the trainer")
        if isinstance(dataset, Mapping):
            found: dict[str, float] = {}
            for name, one in dataset.items():
                part = name if eval_dataset is None else one
                found |= self.evaluate(part, ignore_keys=ignore_keys, metric_key_prefix=f"{metric_key_prefix}_{name}")
            return found
        with self._batches_of(dataset, eval_dataset, ignore_keys):
            measured = self._eval_loop()
        metrics = {f"{metric_key_prefix}_{name.removeprefix('eval_')}": value for name, value in measured.items()}
        self.log(metrics)
        self.tell("on_evaluate", metrics=metrics)
        return metrics

    @contextlib.contextmanager
    def _batches_of(self, dataset: Any, given: Any, ignore_keys: list[str] | None) -> Iterator[None]:
        """Have the batches of `dataset` ready to be evaluated; the trainer's own are there again afterwards."""
        own, ignored = self.eval_dataloader, self._ignore_keys
        ready = dataset is self.eval_dataset and own is not None
        with self._torch_settings():
            self._prepare(None, None)
            if overrides(self, "get_eval_dataloader"):
                self.eval_dataloader = self._as_batches(self.get_eval_dataloader(given))
            elif not ready:
                self._prepare(None, dataset)
            self._ignore_keys = ignored if ignore_keys is None else ignore_keys
            try:
                yield
            finally:
                self._ignore_keys = ignored
                if dataset is not self.eval_dataset:
                    self.eval_dataloader = own

    def _eval_loop(self) -> dict[str, float]:
        """Loss and metrics on the prepared batches, with the prefix `eval_`."""
        batches, config = self.eval_dataloader, self.config.validation
        assert batches is not None
        held = held_out(batches, config.tokens) if isinstance(batches, TokenBatches) else batches
        found = self._evaluated(held, batches, gather=self.compute_metrics is not None, limit=config.batches)
        metrics = {} if found.loss is None else {"eval_loss": found.loss}
        if self.compute_metrics is not None:
            if found.predictions is None or found.label_ids is None:
                missing = "predictions" if found.predictions is None else f"labels ({', '.join(self.label_names)})"
                raise DataError(f"compute_metrics needs predictions and labels, but the batches have no {missing}")
            metrics |= computed_metrics(self.compute_metrics, found)
        return metrics

    def _evaluated(self, held: Any, batches: Any, *, gather: bool, limit: int | None = None) -> Evaluation:
        """Evaluate `held` batches of `batches`, with prediction_step if predictions are needed."""
        objective = self._objective(batches)
        model = objective.model

        def step(batch: Any) -> tuple[Any, Any, Any]:
            return self.prediction_step(model, batch, not gather, ignore_keys=self._ignore_keys)

        return evaluate_batches(
            self._counting_objective(objective, "prediction_step"), held, self.precision,
            tell=lambda: self.tell("on_prediction_step"), limit=limit, gather=gather,
            step=step if gather or overrides(self, "prediction_step") else None,
            preprocess=self.preprocess_logits_for_metrics,
        )  # fmt: skip

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> Prediction:
        """Logits and labels of a dataset, in its order, and loss and metrics if it has labels."""
        if isinstance(test_dataset, TokenDataLoader):
            raise ConfigError("predict() takes a dataset: the logits of a whole token stream would not fit in memory")
        own, ignored = self.eval_dataloader, self._ignore_keys
        with self._torch_settings():
            self._prepare(None, None)
            try:
                self.eval_dataloader = self._as_batches(self.get_test_dataloader(test_dataset))
                self._ignore_keys = ignore_keys
                found = self._evaluated(self.eval_dataloader, self.eval_dataloader, gather=True)
            finally:
                self.eval_dataloader, self._ignore_keys = own, ignored
        metrics = {} if found.loss is None else {"loss": found.loss}
        if self.compute_metrics is not None and found.predictions is not None and found.label_ids is not None:
            metrics |= computed_metrics(self.compute_metrics, found)
        metrics = {f"{metric_key_prefix}_{name.removeprefix('eval_')}": value for name, value in metrics.items()}
        self.tell("on_predict", metrics=metrics)
        return Prediction(found.predictions, found.label_ids, metrics)

    def compare(self, metrics: dict[str, float]) -> None:
        """Remember the metric that best is measured by, and whether it is the best so far."""
        checkpoint = self.config.checkpoint
        if not has_metric(metrics, checkpoint.metric) and checkpoint.best is None and not checkpoint.when_best:
            return  # with several datasets the metric may not exist, and it is not needed
        value = find_metric(metrics, checkpoint.metric)
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
                stack.enter_context(activation_memory_budget(train.recompute))
            stack.enter_context(no_tokenizer_parallelism(self.config.loader.workers))
            yield

    def _make_state(self, total: int) -> TrainerState:
        config = self.config
        return TrainerState(
            max_steps=total,
            num_train_epochs=config.train.epochs or self._epochs_in(total),
            logging_steps=whole_steps(config.log.every, total) if config.log.every else 0,
            eval_steps=whole_steps(config.validation.every, total) if config.validation.every else 0,
            save_steps=whole_steps(config.checkpoint.every, total) if config.checkpoint.every else 0,
            train_batch_size=self._micro_batch() or 0,
            max_eval_steps=config.validation.batches or -1,
            is_local_process_zero=bool(self.is_local_process_zero),
            is_world_process_zero=bool(self.is_world_process_zero),
        )

    def _epochs_in(self, steps: int) -> float:
        """Passes that so many steps begin; 0 where the length of a pass is not known."""
        batches = self.train_dataloader
        if batches is None or (isinstance(batches, DatasetBatches) and not batches.sized):
            return 0.0
        return float(math.ceil(steps / batches.steps_for(1.0, self._accumulation())))

    def _total_steps(self, batches: TokenBatches | DatasetBatches) -> int:
        train = self.config.train
        return train.steps if train.steps is not None else batches.steps_for(train.epochs or 0.0, self._accumulation())

    def _warm_up(self) -> None:
        """Compile ahead of the first step; a strategy that knows its shapes does it here."""

    def _check_datasets(self) -> None:
        """Refuse to train without data, and to be asked for evaluations without any."""
        if self.train_dataset is None and not overrides(self, "get_train_dataloader"):
            raise ConfigError("train() needs train_dataset: give it to the trainer")
        validation, checkpoint = self.config.validation, self.config.checkpoint
        asked = {
            "validation.every (eval_strategy)": validation.every is not None or validation.each_epoch,
            "checkpoint.evaluate (eval_on_save)": checkpoint.evaluate,
            "checkpoint.best (preserve_best_model)": checkpoint.best is not None,
            "checkpoint.when_best (save_strategy='best')": checkpoint.when_best,
        }
        for name in (name for name, on in asked.items() if on and not self._has_eval_data):
            raise ConfigError(f"{name} asks for evaluations and there is nothing to evaluate on: give eval_dataset")

    def _check_metric(self) -> None:
        """Raise if it is already known that no evaluation will produce the best-model metric."""
        validation, checkpoint, metric = self.config.validation, self.config.checkpoint, self.config.checkpoint.metric
        compared = (
            checkpoint.best is not None or checkpoint.when_best or self.config.early_stopping.patience is not None
        )
        evaluates = validation.every is not None or validation.each_epoch or checkpoint.evaluate
        own = [
            type(callback).__module__.partition(".")[0] == "whimbrel" for callback in self.callbacks.of("on_evaluate")
        ]
        known = not overrides(self, "evaluate", "_eval_loop") and self.compute_metrics is None and all(own)
        if not known or not (compared or (evaluates and metric != "loss")):
            return
        datasets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
        measured = [f"eval_{name}_loss" for name in datasets] or ["eval_loss"]
        if not has_metric(measured, metric):
            raise ConfigError(
                f"best_model_metric (checkpoint.metric) = {metric!r}: expected one of the evaluation metrics "
                f"({', '.join(measured)}); pass compute_metrics, or override evaluate"
            )

    def _begins_anew(self) -> bool:
        """Whether the run in the directory is to be removed: not where someone asked to go on with it."""
        return self.config.overwrite_output_dir and not self.config.resume.latest

    _resumes_explicitly = True
    """Whether resuming from the newest checkpoint was asked for; not where it is what happens by itself."""

    def _resume(self) -> None:
        """Load the checkpoint that was asked for, or remove what is to be begun anew; write down the settings."""
        config = self.config
        if config.resume.path is not None:
            self.load_checkpoint(self._named(config.resume.path))
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

    def _micro_batch(self) -> int | None:
        """Samples of a forward pass: a ready DataLoader has its own batch size, whatever the settings say."""
        batches = self.train_dataloader
        return batches.batch_size if isinstance(batches, DatasetBatches) else self.config.train.micro_batch

    def _summary(self) -> RunSummary:
        model, length, config = self.unwrapped_model(), self._sequence_length(), self.config
        samples = (self._micro_batch() or 1) * self._accumulation()
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
    """Trains on one device. By default it shows progress and accepts `whimbrel control` commands."""

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """Progress and live control."""
        return [ProgressCallback(), ControlCallback()]
