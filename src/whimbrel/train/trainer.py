"""`BaseTrainer` and `Trainer`: the training loop with events, evaluation, checkpointing and resume."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from whimbrel.base.errors import ConfigError, TrainingError
from whimbrel.checkpoint import CheckpointManager, RNGState
from whimbrel.data import TokenDataLoader
from whimbrel.distributed import World, join_world, report_failure
from whimbrel.optim import parameter_table, resolve_steps
from whimbrel.precision import MixedPrecision
from whimbrel.train import build, checks
from whimbrel.train.arguments import MinimalTrainingArguments, from_config, to_config
from whimbrel.train.batches import Batches, DatasetBatches, TokenBatches, check_same_data, collate
from whimbrel.train.callback import Callbacks, RunningTotals, StopRequest, TrainerControl, TrainerState, TrainOutput
from whimbrel.train.callbacks import ControlCallback, ProgressCallback, TensorBoardCallback, TrackerCallback
from whimbrel.train.callbacks.loggers import JsonlLogger
from whimbrel.train.callbacks.progress import RunSummary, estimate_memory, features
from whimbrel.train.checkpointing import CheckpointMixin
from whimbrel.train.config import LogConfig, TrainerConfig
from whimbrel.train.control import SignalHandler
from whimbrel.train.device import Stopwatch, choose_device, device_name, peak_flops, peak_memory
from whimbrel.train.evaluation import EvalPrediction, find_metric, greater_is_better, has_metric
from whimbrel.train.finetune import build_finetuning_run
from whimbrel.train.hf_compat import ProcessFlag, check_overrides, missing_attribute, overrides
from whimbrel.train.memory_mesh import resolve_strategy
from whimbrel.train.objectives import LossFunction, Objective, ObjectiveFunction, as_objective
from whimbrel.train.overridable import Accelerator, OverridableMethodsMixin
from whimbrel.train.random_state import rank_seed, seed_everything
from whimbrel.train.run_config import RunConfig
from whimbrel.train.run_directory import check_directory, record_launch, resume_after_restart, to_json
from whimbrel.train.step import NonFiniteError, StepMetrics, TrainStep

__all__ = ["BaseTrainer", "Trainer", "train"]

logger = logging.getLogger(__name__)

MAX_ROLLBACKS = 3
"""Maximum number of rollbacks to the same checkpoint before the run fails."""
MAX_SKIPS = 100
"""Maximum number of consecutive skipped steps before the run fails."""
REMEDY = "lower the learning rate (optim.lr, learning_rate) or clip the gradient (train.clip, max_grad_norm)"


class EvaluationInterruptedError(Exception):
    """Stops an evaluation between two batches because the run has to stop."""


@dataclass(slots=True)
class _Session:
    """Loop state of one `train()` call that is not saved in checkpoints."""

    step: TrainStep
    flops_per_token: float
    last_done: dict[str, int] = field(default_factory=dict)
    """The step of the last evaluation and save: neither is repeated at the same step."""
    rollbacks: int = 0
    skips: int = 0
    """Skipped steps in a row."""
    has_stepped: bool = False
    has_rolled_back: bool = False
    """Whether the run rolled back and has not stepped since."""
    is_evaluating: bool = False
    save_is_due: bool = False
    """Whether a save is scheduled at this step by the config (not only requested by a callback or signal)."""
    saved_at: float = field(default_factory=time.monotonic)
    save_is_overdue: bool = False
    """Whether the last save is longer ago than `checkpoint.every_minutes`."""


class BaseTrainer(CheckpointMixin, OverridableMethodsMixin):
    """Trains a model: the interface of `transformers.Trainer`, with complete state in every checkpoint.

    `args` may also be a `TrainerConfig`, which TOML files are parsed to; `from_config` builds model and data as well.
    `optimizers` are an optimizer and a scheduler as objects, by name, or (the optimizer) as a function of the
    parameters. `callbacks` are added to `default_callbacks()`; one of the same class as a default replaces it, and
    `remove_callback` removes a default. The log file is not a callback: every run writes it.
    """

    _session: _Session | None = None
    _agreed_signal: signal.Signals | None = None
    _callbacks_drain: bool = False
    _requested_config: RunConfig | None = None
    """The configuration that `from_config` was called with."""

    def __init__(
        self,
        args: MinimalTrainingArguments | TrainerConfig,
        model: nn.Module | None = None,
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        callbacks: Iterable[Any] | None = None,
        compute_loss_func: LossFunction | None = None,
        objective: Objective | ObjectiveFunction | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        optimizers: tuple[build.OptimizerChoice, build.SchedulerChoice] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        world: World | None = None,
        **unknown: Any,
    ) -> None:
        checks.reject_unknown_arguments(type(self), BaseTrainer.__init__, unknown)
        check_overrides(self)
        checks.check_arguments(args, model, model_init, processing_class)
        checks.check_collator(data_collator, train_dataset, eval_dataset)
        if objective is not None and compute_loss_func is not None:
            raise ConfigError("expected objective or compute_loss_func, got both: pass only one")
        self._from_config = isinstance(args, TrainerConfig)
        self.config = self._recorded_config = args if isinstance(args, TrainerConfig) else to_config(args)
        self.args = from_config(args) if isinstance(args, TrainerConfig) else args
        if model_init is None and self.config.train.default_dtype is not None and not self._from_config:
            raise ConfigError(
                f"default_dtype = {self.config.train.default_dtype} applies to models that the trainer creates: pass "
                "model_init, or pass the model in that dtype"
            )
        self.device = choose_device(self.config.train.device)
        self.world = join_world(self.config.parallel, self.device.type) if world is None else world
        self.model, self.model_init = model, model_init
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator = data_collator or collate
        self.processing_class, self.loss_fn = processing_class, compute_loss_func
        self.objective = as_objective(objective)
        checks.check_objective(self.objective, self.config)
        self.state, self.control, self.totals = TrainerState(), TrainerControl(), RunningTotals()
        self.callbacks = Callbacks.with_defaults(self.default_callbacks(), callbacks or ())
        self.callbacks.is_main = self.world.is_main
        for callback in _log_callbacks(self.config.log):
            self.callbacks.add(callback)
        if not self.config.log.progress:
            self.callbacks.pop(ProgressCallback)
        self._log_file, self._signals = Callbacks([JsonlLogger()]), SignalHandler()
        self.optimizer, self.lr_scheduler = None, None
        self.train_dataloader, self.eval_dataloader = None, None
        self.precision = MixedPrecision(self.config.train.precision, self.device)
        self.is_local_process_zero = ProcessFlag(self.world.local_rank == 0)
        self.is_world_process_zero = ProcessFlag(self.world.is_main)
        self.num_processes, self.process_index = self.world.size, self.world.rank
        self.accelerator = Accelerator(self.precision, self.world, self.device)
        if compute_metrics is not None:
            self.compute_metrics = compute_metrics
        if preprocess_logits_for_metrics is not None:
            self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.compile_seconds = 0.0
        checkpoint = self.config.checkpoint
        self.checkpoint_manager = CheckpointManager(
            self.config.output_dir,
            keep=checkpoint.keep,
            best=checkpoint.best,
            greater_is_better=self._greater_is_better,
            asynchronous=checkpoint.asynchronous,
            mirror=checkpoint.mirror,
            world=self.world,
            process_groups=self.get_process_groups(),
        )
        self._optimizers = checks.resolve_optimizers(self, optimizers, optimizer_cls_and_kwargs)
        self._is_wrapped = False
        self._history_lines, self.deferred, self._states_being_saved = [], set(), {}
        checks.check_metric(self)
        self.dispatch("on_init_end")

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        *,
        callbacks: Iterable[Any] | None = None,
        sample_func: build.SampleFunction | None = None,
        objective: Objective | ObjectiveFunction | None = None,
    ) -> Self:
        """Build a trainer for a GPT on token shards or samples; an existing run in the output directory is resumed.

        `callbacks` and those that the configuration enables are added to the defaults. `sample_func` generates the text
        for `[sample]` instead of the inference engine. `objective` replaces `[objective]`.
        """
        config = resolve_strategy(config)
        world = join_world(config.parallel, choose_device(config.train.device).type)
        config = resume_after_restart(config, world)
        build_parts = build.build_run if config.data.sources is None else build_finetuning_run
        parts = build_parts(config, world, sample_func)
        arguments = parts.trainer_arguments() | ({} if objective is None else {"objective": objective})
        all_callbacks = [*(callbacks or ()), *parts.callbacks]
        trainer = cls(parts.config, parts.model, callbacks=all_callbacks, world=world, **arguments)
        trainer._requested_config, trainer._recorded_config = config, parts.recorded_config
        return trainer

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """The callbacks of every trainer of this class, before those passed to it."""
        return []

    # Callbacks

    def add_callback(self, callback: Any) -> None:
        """Add a callback; a class is instantiated."""
        self.callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by exact class or by identity, and return it; None if there is none."""
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, including a default one, by exact class or by identity."""
        self.callbacks.pop(callback)

    def dispatch(self, event: str, *, state: TrainerState | None = None, **kwargs: Any) -> TrainerControl:
        """Dispatch an event to the callbacks, with the current state or the one passed in, and return the control."""
        for callbacks in (self._log_file, self.callbacks) if self.world.is_main else (self.callbacks,):
            if callbacks.handles(event):
                self.control = callbacks.dispatch(
                    event, self.control, args=self.args, state=state or self.state,
                    model=None if self.model is None else self.unwrapped_model(),
                    processing_class=self.processing_class, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler,
                    train_dataloader=self.train_dataloader, eval_dataloader=self.eval_dataloader, trainer=self,
                    **kwargs,
                )  # fmt: skip
        if event == "on_prediction_step":
            self._check_interrupted()
        return self.control

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> TrainerControl:
        """Append to the history and notify the callbacks. `start_time` is ignored; overrides may pass it on."""
        del start_time
        entry = {**to_json(logs), "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(entry)
        return self.dispatch("on_log", logs={**logs, "epoch": self.state.epoch}, kind=self._log_kind)

    @property
    def stopped_by(self) -> StopRequest | None:
        """The first callback that requested a stop."""
        return self.callbacks.stopped_by

    @property
    def received_signal(self) -> signal.Signals | None:
        """The signal that stopped the last `train()`, or is about to stop it."""
        return self._signals.received if self.world.size == 1 else self._agreed_signal

    @property
    def is_draining(self) -> bool:
        """Whether the run must save and stop immediately without evaluating, to be resumed later."""
        return self.received_signal is not None or self._callbacks_drain

    def _sync_decisions(self, session: _Session) -> None:
        """Synchronize decisions over ranks: callbacks and clock of rank 0, and a signal to any rank."""
        self._callbacks_drain = any(getattr(callback, "is_draining", False) for callback in self.callbacks)
        session.save_is_overdue = self._save_is_overdue(session)
        if self.world.size == 1:
            return
        control = asdict(self.control)
        flags = [*control.values(), session.save_is_due, session.save_is_overdue, self._callbacks_drain]
        flags, received = self.world.agree(flags, self._signals.received or 0)
        self._agreed_signal = signal.Signals(received) if received else None
        *values, session.save_is_due, session.save_is_overdue, self._callbacks_drain = flags
        self.control = TrainerControl(**dict(zip(control, values, strict=True)))

    # Training

    def train(
        self,
        resume_from_checkpoint: bool | str | Path | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train until the last step or until a stop is requested.

        `resume_from_checkpoint`: a checkpoint, True or "latest" for the latest in the output directory, False for a new
        run; None: as in the arguments.
        `ignore_keys_for_eval`: model outputs to exclude from the predictions in evaluations during training.
        """
        checks.check_no_trial(trial)
        check_overrides(self)
        checks.check_datasets(self)
        original_config, self._ignore_keys = self.config, ignore_keys_for_eval
        if resume_from_checkpoint is not None:
            latest = resume_from_checkpoint in (True, "latest")
            path = None if latest or isinstance(resume_from_checkpoint, bool) else Path(resume_from_checkpoint)
            self.config = replace(original_config, resume=replace(original_config.resume, latest=latest, path=path))
        self.config = resume_after_restart(self.config, self.world)
        try:
            # The lock comes before anything in the directory is read, changed or removed.
            with self._lock(), self._torch_settings():
                self._prepare_model()
                self._prepare_training()
                with self._signals:
                    return self._train_loop()
        finally:
            self.config, self._ignore_keys = original_config, None

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock and check the run directory, on rank 0 for all ranks."""
        with contextlib.ExitStack() as stack:

            def enter() -> None:
                stack.enter_context(self.checkpoint_manager.lock)
                self._fetch_from_mirror()
                check_directory(self.config, explicit=not self._from_config)
                record_launch(self.config.output_dir)

            self.world.run_on_main(enter)
            yield

    def _prepare_model(self) -> None:
        """Create the model if there is none, and wrap it; does nothing the second time."""
        if self.config.train.compile:
            build.set_compile_cache()
        if self.model is None:
            self.model = self.call_model_init()
        if not self._is_wrapped:
            checks.check_parallel(self)
            checks.check_delayed_fp8(self)
            self.model = build.wrap_model(self.model, self.config, self.device, self.world)
            self._is_wrapped = True

    def _prepare_training(self) -> None:
        """Create dataloaders, optimizer and scheduler, reset the state, and load a checkpoint to resume from."""
        assert self.model is not None
        config = self.config
        if self.eval_dataset is not None and not isinstance(self.eval_dataset, Mapping):
            self.eval_dataloader = self._make_batches(self.eval_dataset, config.validation.micro_batch, shuffle=False)
        if overrides(self, "get_train_dataloader"):
            self.train_dataloader = self._as_batches(self.get_train_dataloader())
        else:
            self.train_dataloader = self._make_batches(self.train_dataset, config.train.micro_batch, shuffle=True)
        total = config.train.steps
        if total is None:
            total = self.train_dataloader.steps_for(config.train.epochs or 0.0, config.train.accumulation or 1)
        self._create_optimizer_and_scheduler(total)
        self._outer = build.create_outer_optimizer(self.unwrapped_model(), config, self.world, total)
        self._optimizer_states = None
        self._optimizer_components()  # they record initial settings, before a checkpoint or a step changes them
        self.state, self.control, self.totals = self._initial_state(total), TrainerControl(), RunningTotals()
        self.callbacks.stopped_by, self._last_metric, self.deferred = None, None, set()
        self.model.train()
        if self._from_config and config.train.compile and isinstance(self.train_dataset, TokenDataLoader):
            # Before the first step, to keep compilation out of step times; token shards have known shapes.
            start = time.perf_counter()
            objective = self._objective_for(self.train_dataset)
            build.compile_ahead(self.model, objective, self.train_dataset, self.precision, self.device)
            self.compile_seconds = time.perf_counter() - start
        seed_everything(rank_seed(config.train.seed, self.world))
        if self._requested_config is not None:
            build.check_run_directory_unchanged(self._requested_config, config.train.micro_batch, self.world.dp_size)
        self._resume()
        check_same_data(self.train_dataloader, self.world)

    def _train_loop(self) -> TrainOutput:
        """Run all epochs, wait for the last save and load the best model; dispatches `on_train_end` on failure too."""
        flops = build.flops_per_token(self.unwrapped_model(), self._sequence_length())
        self._session = _Session(self._make_step(), flops)
        start, output = time.perf_counter(), None
        try:
            self.dispatch("on_train_begin", summary=self._summary())
            self._run_epochs(self._session)
            self.checkpoint_manager.wait()
            self._dispatch_finished_saves()
            self._finish_outer()
            interrupted = self.is_draining and not self._is_last_step
            if self.config.checkpoint.best is not None and not (interrupted or self.control.should_abort_without_save):
                self._load_best()
            totals = self.totals
            loss = totals.loss / totals.steps if totals.steps else math.nan
            metrics: dict[str, Any] = {
                "train_runtime": time.perf_counter() - start, "train_seconds": totals.seconds, "train_loss": loss,
                "epoch": self.state.epoch, "num_input_tokens_seen": self.state.num_input_tokens_seen,
                "total_flos": self.state.total_flos, "compile_seconds": self.compile_seconds,
                "peak_memory": peak_memory(self.device),
            }  # fmt: skip
            output = TrainOutput(self.state.global_step, loss, metrics)
        except Exception as error:
            report_failure(error)  # first of all, since the other ranks may wait for this one
            raise
        finally:
            self.checkpoint_manager.close()
            if output is None:
                self.dispatch("on_train_end", output=None, checkpoint=None, stopped_by=self.stopped_by)
        self.dispatch(
            "on_train_end", output=output, checkpoint=self.checkpoint_manager.newest(), stopped_by=self.stopped_by
        )
        return output

    def _make_step(self) -> TrainStep:
        assert self.model is not None
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        assert self.train_dataloader is not None
        config, scheduler = self.config, self.lr_scheduler
        # Of several parameter groups, report the learning rate of one with the configured peak.
        peaks = [group.get("peak_lr") for group in self.optimizer.param_groups]
        reported = peaks.index(config.optim.lr) if config.optim.lr in peaks else 0
        return TrainStep(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=scheduler,
            batches=self.train_dataloader,
            objective=self._counting_objective(self._objective_for(self.train_dataloader), "training_step"),
            training_step=self._overridden_training_step(self.model),
            precision=self.precision,
            world=self.world,
            outer=self._outer,
            accumulation=config.train.accumulation or 1,
            stopwatch=Stopwatch(self.device),
            dispatch=self.dispatch,
            lr=lambda: scheduler.get_last_lr()[reported],
            clip=config.train.clip,
            on_nonfinite=config.train.on_nonfinite,
        )

    def _run_epochs(self, session: _Session) -> None:
        """Train until the last step or until a stop is requested, then do the final log, evaluation and save."""
        batches, state = self.train_dataloader, self.state
        assert batches is not None
        session.saved_at = time.monotonic()
        if self.deferred:
            self._run_deferred(session)
        while self._should_continue():
            batches.start_epoch(state.raw_epoch)
            self.control.should_epoch_stop = False
            self.dispatch("on_epoch_begin")
            while self._should_continue():
                try:
                    epoch_ended = self._step(session, batches)
                except NonFiniteError as error:
                    self._recover(session, error)
                    break
                if epoch_ended:
                    break
        if session.has_stepped and not self.control.should_abort_without_save:
            interrupted = self.is_draining and not self._is_last_step
            if state.global_step > state.epoch_start_step and not interrupted:
                self.dispatch("on_epoch_end")  # the run ends within an epoch
                self._sync_decisions(session)
            try:
                self._handle_control(session, final=True)
            except NonFiniteError as error:
                self._recover(session, error, final=True)

    def _should_continue(self) -> bool:
        """Whether to run another step."""
        assert self._session is not None
        self._sync_decisions(self._session)
        self._check_signal("on_step_begin")
        train = self.config.train
        # A run of N epochs ends after N passes, even if callbacks ended some of them early. A rollback repeats steps
        # with later data, so after one only the steps count.
        all_epochs_done = (
            train.epochs is not None
            and train.on_nonfinite != "rollback"
            and self.state.raw_epoch >= math.ceil(train.epochs)
        )
        return not (self._is_last_step or all_epochs_done or self.control.should_stop)

    @property
    def _is_last_step(self) -> bool:
        return self.state.global_step >= self.state.max_steps

    def _check_signal(self, event: str) -> None:
        """Request a save and a stop once a signal was received."""
        received = self.received_signal
        if received is None or self.control.should_abort_without_save:
            return
        self.control.should_save = self.control.should_training_stop = True
        if self.callbacks.stopped_by is None:
            self.callbacks.stopped_by = StopRequest(received.name, event, "stop")
            again = "press Ctrl-C again" if received == signal.SIGINT else f"send {received.name} again"
            logger.info("Interrupted (%s): saving; %s to quit without saving", received.name, again)

    def _step(self, session: _Session, batches: Batches) -> bool:
        """Run one optimizer step and the actions due after it; returns whether the epoch ended."""
        state = self.state
        self.dispatch("on_step_begin")
        tokens = session.step.run(state.global_step + 1)
        if tokens is not None:
            state.global_step += 1
            session.has_rolled_back = False
            if not session.has_stepped:
                session.has_stepped = True
                self._reserve_save_memory()
            state.num_input_tokens_seen += tokens
            state.total_flos += session.flops_per_token * tokens
            state.epoch = batches.epoch
            self._request_due_actions(session)
            self.dispatch("on_step_end")
            self._sync_decisions(session)
            self._check_signal("on_step_end")
        epoch_ended = tokens is None or self.control.should_epoch_stop or batches.exhausted()
        if epoch_ended:
            self._end_epoch(session, batches, tokens)
        self._handle_control(session, final=self._is_last_step or self.control.should_training_stop)
        return epoch_ended

    def _end_epoch(self, session: _Session, batches: Batches, tokens: int | None) -> None:
        state, config = self.state, self.config
        if tokens is None and state.global_step == state.epoch_start_step and not session.has_rolled_back:
            raise TrainingError(
                f"expected batches in epoch {state.raw_epoch}, got none: the dataset is empty, or an iterable that can "
                "be read only once"
            )
        state.raw_epoch += 1
        state.epoch_start_step = state.global_step
        batches.start_epoch(state.raw_epoch)
        state.epoch = batches.epoch
        self.control.should_log |= config.log.each_epoch
        self.control.should_evaluate |= config.validation.each_epoch and self.can_evaluate and self._past_eval_delay()
        self._request_save(session, config.checkpoint.each_epoch)
        self.dispatch("on_epoch_end")
        self._sync_decisions(session)

    def _request_due_actions(self, session: _Session) -> None:
        """Set the flags in `control` that are due after this step; callbacks may still change them."""
        control, config, step = self.control, self.config, self.state.global_step

        def is_due(every: float | None) -> bool:
            return every is not None and step % resolve_steps(every, self.state.max_steps) == 0

        control.should_log |= is_due(config.log.every) or (step == 1 and config.log.first)
        control.should_evaluate |= is_due(config.validation.every) and self.can_evaluate and self._past_eval_delay()
        self._request_save(session, is_due(config.checkpoint.every))

    def _request_save(self, session: _Session, is_due: bool) -> None:
        """Request a save, preceded by an evaluation if checkpoints are evaluated."""
        self.control.should_save |= is_due
        session.save_is_due |= is_due
        self.control.should_evaluate |= is_due and self._evaluates_before_save and self.can_evaluate

    @property
    def _evaluates_before_save(self) -> bool:
        return self.config.checkpoint.evaluate or self.config.checkpoint.best is not None

    def _past_eval_delay(self) -> bool:
        progress = self.state.epoch if self.config.validation.each_epoch else self.state.global_step
        return progress >= self.config.validation.delay

    @property
    def can_evaluate(self) -> bool:
        """Whether there is data to evaluate on."""
        has_data = self.eval_dataloader is not None or self.eval_dataset is not None
        return has_data or overrides(self, "get_eval_dataloader")

    def _handle_control(self, session: _Session, *, final: bool) -> None:
        """Log, evaluate and save as requested in `control`, each once per step."""
        control, config = self.control, self.config
        if final and not control.should_abort_without_save:
            if not (self.is_draining and not self._is_last_step):  # an interrupted run is resumed later
                control.should_log |= config.log.every is not None or config.log.each_epoch
                control.should_evaluate |= config.validation.at_end and self.can_evaluate
                session.save_is_due |= config.checkpoint.at_end
            control.should_save |= config.checkpoint.at_end
        requested = control.should_log or control.should_evaluate or control.should_save
        if final or requested or session.save_is_overdue:
            self.flush_metrics()
            for action in (self._log_step, self._evaluate_step, self._save_step):
                self._sync_decisions(session)
                if not self.control.should_abort_without_save:
                    action(session)
        else:
            session.step.flush_metrics(partial(self._report, session), keep=1)
        if self._dispatch_finished_saves():
            session.rollbacks = 0

    def flush_metrics(self) -> None:
        """Wait for the metrics of all steps so far and report them. Callbacks call it before slow work or printing."""
        if self._session is not None:
            self._session.step.flush_metrics(partial(self._report, self._session))
            self._session.step.reset_timer()

    def _report(self, session: _Session, metrics: StepMetrics, extra: dict[str, float]) -> None:
        """Called with the metrics of each step, once the device has computed them."""
        if not metrics.skipped:
            self.totals.add(metrics.loss, metrics.grad_norm, metrics.lr, metrics.seconds, extra)
            session.skips = 0
        else:
            session.skips += 1
            error = NonFiniteError(metrics.step, metrics.loss, metrics.grad_norm)
            logger.warning("%s: step skipped", error)
            if session.skips == MAX_SKIPS:
                raise TrainingError(f"{error}, {MAX_SKIPS} skipped steps in a row: {REMEDY}")
        self.dispatch("on_train_metrics", metrics={**metrics._asdict(), **extra})

    def _log_step(self, session: _Session) -> None:
        if self.control.should_log and self.totals.unlogged_steps:
            logs: dict[str, Any] = dict(self.totals.pop_logs())
            self.dispatch("on_log_step", logs=logs)
            self.log(logs)
        self.control.should_log = False

    def _evaluate_step(self, session: _Session) -> None:
        evaluate_before_save = self._evaluates_before_save and (
            session.save_is_due if self.is_draining else self.control.should_save
        )
        requested = (self.control.should_evaluate or evaluate_before_save) and self.can_evaluate
        if requested and self._claim(session, "evaluate"):
            self._evaluate_or_defer(session)
        self.control.should_evaluate = False

    def _evaluate_or_defer(self, session: _Session) -> None:
        """Evaluate, unless the run must stop immediately; in that case the resumed run starts with this evaluation.

        A signal stops an evaluation in progress. Its RNG state is restored, so that the resumed run repeats it exactly.
        """
        rng = RNGState()
        before, session.is_evaluating = rng.state_dict(), True
        try:
            self._check_interrupted()
            self._update_best_metric(self.evaluate())
        except EvaluationInterruptedError:
            rng.load_state_dict(before)
            if not self.control.should_abort_without_save:
                self.deferred = {"evaluate", *(["save"] if session.save_is_due else [])}
                self._check_signal("on_prediction_step")
            return
        finally:
            session.is_evaluating = False
        is_best = self.state.best_global_step == self.state.global_step
        self.control.should_save |= self.config.checkpoint.when_best and is_best

    def _check_interrupted(self) -> None:
        """Raise EvaluationInterruptedError if the training loop is evaluating and the run must stop immediately."""
        if self._session is None or not self._session.is_evaluating:
            return
        self._sync_decisions(self._session)
        if self.is_draining or self.control.should_abort_without_save:
            raise EvaluationInterruptedError

    def _update_best_metric(self, metrics: dict[str, float]) -> None:
        """Record the best-model metric of an evaluation, and whether it is the best so far."""
        checkpoint = self.config.checkpoint
        if not has_metric(metrics, checkpoint.metric) and checkpoint.best is None and not checkpoint.when_best:
            return  # with several datasets the metric may not exist, and it is not needed
        value = find_metric(metrics, checkpoint.metric)
        self._last_metric = self.state.global_step, value
        best = self.state.best_metric
        better = best is None or (value > best if self._greater_is_better else value < best)
        if better and not math.isnan(value):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def _run_deferred(self, session: _Session) -> None:
        """Run the actions deferred by an interrupted run; a checkpoint among them gets its metric now."""
        deferred, self.deferred = self.deferred, set()
        self.checkpoint_manager.invalidate(self.state.global_step)
        self.control.should_evaluate = "evaluate" in deferred and self.can_evaluate
        session.save_is_due = self.control.should_save = "save" in deferred
        self._handle_control(session, final=False)

    def _save_is_overdue(self, session: _Session) -> bool:
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - session.saved_at >= 60 * minutes

    def _save_step(self, session: _Session) -> None:
        """Save if requested, or make a temporary save without a metric if the last save is too long ago."""
        requested = self.control.should_save
        if (requested or session.save_is_overdue) and self.state.global_step > 0 and self._claim(session, "save"):
            with contextlib.suppress(OSError):  # logged when it fails; raised at the end if it was the last save
                self.save_checkpoint() if requested else self.save_checkpoint(temporary=True)
            session.saved_at = time.monotonic()
        self.control.should_save = session.save_is_due = False

    def _claim(self, session: _Session, action: str) -> bool:
        """Mark `action` as done at this step; False if it already was."""
        step = self.state.global_step
        already_done = session.last_done.get(action) == step
        session.last_done[action] = step
        return not already_done

    def _recover(self, session: _Session, error: NonFiniteError, *, final: bool = False) -> None:
        """Fail, or roll back to the newest checkpoint and continue with the next data."""
        manager = self.checkpoint_manager
        if self.config.train.on_nonfinite != "rollback":
            raise TrainingError(f"{error}: {REMEDY}; nothing has been saved since the last checkpoint") from error
        manager.wait()
        if manager.current() is None and self.resumed_from is None:
            raise TrainingError(
                f"{error}, and there is no checkpoint to roll back to: save more often (checkpoint.every, save_steps)"
            ) from error
        session.rollbacks = self.world.broadcast(session.rollbacks)  # ranks may see a finished save at different steps
        if session.rollbacks == MAX_ROLLBACKS or final:
            raise TrainingError(f"{error}, after {session.rollbacks} rollbacks: {REMEDY}") from error
        session.rollbacks, session.has_rolled_back = session.rollbacks + 1, True
        components = [c for c in self.get_state_components() if c.key not in ("dataset", "rng")]
        epoch = self.state.raw_epoch
        manager.load(components, manager.current() or self.resumed_from)
        self._start_outer()
        self.state.raw_epoch = epoch
        self.state.epoch_start_step = min(self.state.epoch_start_step, self.state.global_step)
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        session.save_is_due, self.deferred = False, set()
        session.last_done.clear()
        session.step.reset_timer()
        step = self.state.global_step
        logger.warning("%s: rolled back to step %d, continuing with the next data", error, step)
        self.dispatch("on_rollback", step=step)

    # Preparation

    def _torch_settings(self) -> contextlib.AbstractContextManager[None]:
        return build.torch_settings(self.config, self.device)

    def _initial_state(self, total: int) -> TrainerState:
        config, batches = self.config, self.train_dataloader
        epochs = config.train.epochs or 0.0  # 0 if the length of an epoch is unknown
        if not epochs and (isinstance(batches, TokenBatches) or batches.has_length):
            epochs = float(math.ceil(total / batches.steps_for(1.0, config.train.accumulation or 1)))
        return TrainerState(
            max_steps=total,
            num_train_epochs=epochs,
            logging_steps=resolve_steps(config.log.every, total) if config.log.every else 0,
            eval_steps=resolve_steps(config.validation.every, total) if config.validation.every else 0,
            save_steps=resolve_steps(config.checkpoint.every, total) if config.checkpoint.every else 0,
            train_batch_size=self._micro_batch() or 0,
            max_eval_steps=config.validation.batches or -1,
            is_local_process_zero=bool(self.is_local_process_zero),
            is_world_process_zero=bool(self.is_world_process_zero),
        )

    @property
    def _greater_is_better(self) -> bool:
        checkpoint = self.config.checkpoint
        return greater_is_better(checkpoint.metric, checkpoint.greater_is_better)

    def _sequence_length(self) -> int:
        """Tokens per training example, from the loader or the first example; 0 if unknown."""
        if isinstance(self.train_dataloader, TokenBatches):
            return self.train_dataloader.loader.T
        assert self.train_dataloader is not None
        example = self.train_dataloader.first_example()
        inputs = example.get("input_ids") if isinstance(example, Mapping) else None
        return 0 if inputs is None else torch.as_tensor(inputs).numel()

    def _micro_batch(self) -> int | None:
        """Samples per forward pass; a DataLoader's own batch size takes precedence over the config."""
        batches = self.train_dataloader
        return batches.batch_size if isinstance(batches, DatasetBatches) else self.config.train.micro_batch

    def _summary(self) -> RunSummary:
        model, length, config = self.unwrapped_model(), self._sequence_length(), self.config
        accumulation = config.train.accumulation or 1
        samples = (self._micro_batch() or 1) * accumulation * self.world.dp_size
        return RunSummary(
            device=self.device.type,
            device_name=device_name(self.device),
            parameters=build.num_parameters(model),
            frozen_parameters=build.num_parameters(model, trainable=False),
            memory=estimate_memory(model, self.optimizer),
            optimizer_table=() if self.optimizer is None else parameter_table(model, self.optimizer),
            samples_per_step=samples,
            tokens_per_step=samples * length or None,
            tokens_per_micro_batch=(self._micro_batch() or 1) * length or None,
            accumulation=accumulation,
            total_steps=self.state.max_steps,
            first_step=self.state.global_step,
            flops_per_token=build.flops_per_token(model, length),
            peak_flops=peak_flops(self.device, self.world.size),
            compile_seconds=self.compile_seconds,
            features=features(config),
            resumed_from=self.resumed_from,
        )

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, naming the alternative for attributes of `transformers.Trainer`."""
        raise missing_attribute(self, name)


class Trainer(BaseTrainer):
    """Trains on the devices that torchrun assigns. By default it shows progress and accepts `whimbrel control`."""

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """Progress and live control."""
        return [ProgressCallback(), ControlCallback()]


def train(
    config: RunConfig, *, callbacks: Iterable[Any] | None = None, sample_func: build.SampleFunction | None = None
) -> TrainOutput:
    """Train as described by `config`; an existing run in its output directory is resumed exactly."""
    return Trainer.from_config(config, callbacks=callbacks, sample_func=sample_func).train()


def _log_callbacks(log: LogConfig) -> list[Any]:
    """The logging callbacks that the settings enable."""
    trackers: list[Any] = [TrackerCallback(name) for name in ("wandb", "trackio") if getattr(log, name)]
    return [TensorBoardCallback(), *trackers] if log.tensorboard else trackers
