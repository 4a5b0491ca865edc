"""What every trainer holds: arguments, parts, callbacks, and a state that is saved and loaded as one."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from whimbrel.base.errors import ConfigError
from whimbrel.checkpoint import CheckpointManager, RNGState, Saved, SharingPattern, StateComponent
from whimbrel.checkpoint import checkpoint_path as find_checkpoint
from whimbrel.config import did_you_mean, to_table
from whimbrel.precision import PrecisionPlan
from whimbrel.tokenization import Tokenizer
from whimbrel.train import assemble
from whimbrel.train.arguments import MinimalTrainingArguments, to_config
from whimbrel.train.batches import TokenBatches
from whimbrel.train.callback import Callbacks, StopRequest
from whimbrel.train.callbacks import ProgressCallback, TensorBoardCallback, TrackerCallback
from whimbrel.train.callbacks.loggers import JsonlLogger
from whimbrel.train.config import LogConfig, TrainerConfig
from whimbrel.train.dataset_batches import DatasetBatches, collate
from whimbrel.train.device import choose_device
from whimbrel.train.distributed import check_single_process, refuse_wrapped_model
from whimbrel.train.elsewhere import TRAINER_ELSEWHERE
from whimbrel.train.evaluation import EvalPrediction
from whimbrel.train.identity import check_model, model_identity
from whimbrel.train.log import plain
from whimbrel.train.loop import Scheduler
from whimbrel.train.metric import greater_is_better
from whimbrel.train.model_state import export_model, model_state
from whimbrel.train.optimizer_state import OptimizerState, SchedulerState
from whimbrel.train.outputs import LossFunction
from whimbrel.train.overrides import check_overrides, missing_method, overrides
from whimbrel.train.signals import SignalHandler
from whimbrel.train.state import Tally, TrainerControl, TrainerState

__all__ = ["TrainerCore"]

SAVED = ("global_step", "epoch_start_step", "raw_epoch", "num_input_tokens_seen", "total_flos")
"""What of the trainer's state a resume cannot do without."""
HISTORY = ("epoch", "best_metric", "best_global_step", "best_model_checkpoint")
"""What it takes up as well, where the checkpoint has it."""


class TrainerCore:
    """The constructor, callbacks, log and checkpoints of a trainer; `BaseTrainer` adds training and evaluation.

    `optimizers` gives an optimizer and a scheduler as objects, by name, or (the optimizer) as a function of the
    parameters. `callbacks` are added to `default_callbacks()`; one of the same class as a default replaces it, and
    `remove_callback` removes a default. The log file is not a callback: every run writes it.
    """

    def __init__(
        self,
        args: MinimalTrainingArguments,
        model: nn.Module | None = None,
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        callbacks: Iterable[Any] | None = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        optimizers: tuple[assemble.OptimizerChoice, assemble.SchedulerChoice] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        **unknown: Any,
    ) -> None:
        check_single_process()
        _refuse_unknown(type(self), unknown)
        check_overrides(self)
        _check_given(args, model, model_init, processing_class)
        _check_collator(data_collator, train_dataset, eval_dataset)
        self.args, self.config = args, self._make_config(args)
        if model_init is None and self.config.train.default_dtype is not None and not self._builds_model:
            raise ConfigError(
                f"default_dtype = {self.config.train.default_dtype} is for a model that the trainer makes: give "
                "model_init, or give the model in that dtype"
            )
        self.device = choose_device(self.config.train.device)
        self.model, self.model_init = model, model_init
        self.data_collator = data_collator or collate
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.loss_fn = processing_class, compute_loss_func
        self.state, self.control, self.tally = TrainerState(), TrainerControl(), Tally()
        self.callbacks = Callbacks.with_defaults(self.default_callbacks(), callbacks or ())
        for callback in _reporters(self.config.log):
            self.callbacks.add(callback)
        if not self.config.log.progress:
            self.callbacks.pop(ProgressCallback)
        self._log_file, self._signals = Callbacks([JsonlLogger()]), SignalHandler()
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Scheduler | None = None
        self.train_dataloader: TokenBatches | DatasetBatches | None = None
        self.eval_dataloader: TokenBatches | DatasetBatches | None = None
        self.precision = PrecisionPlan(self.config.train.precision, self.device)
        self.is_local_process_zero, self.is_world_process_zero = ProcessFlag(1), ProcessFlag(1)
        self.num_processes = 1
        self.accelerator = Accelerator(self.precision)
        if compute_metrics is not None:
            self.compute_metrics = compute_metrics
        if preprocess_logits_for_metrics is not None:
            self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.resumed_from: Path | None = None
        self.compile_seconds = 0.0
        checkpoint = self.config.checkpoint
        self.checkpoint_manager = CheckpointManager(
            self.config.output_dir,
            keep=checkpoint.keep,
            best=checkpoint.best,
            greater_is_better=self._greater_is_better,
            asynchronous=checkpoint.asynchronous,
            process_groups=self.get_process_groups(),
        )
        self._optimizers, self._placed = _chosen(self, optimizers, optimizer_cls_and_kwargs), False
        self._states: tuple[OptimizerState, SchedulerState] | None = None
        self._lines: list[str] = []
        self.deferred: set[str] = set()
        """Actions due at this step ("evaluate", "save") that were deferred because the run had to stop at once."""
        self._last_metric: tuple[int, float] | None = None
        self._saving: dict[int, TrainerState] = {}
        self._check_metric()
        self.tell("on_init_end")

    def _check_metric(self) -> None:
        """Raise if no evaluation will produce the best-model metric."""

    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None
    """Computes metrics from predictions and labels; a constructor argument or a method of a subclass."""
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None
    """Reduces the logits of a batch before they are gathered, for example to their argmax."""
    _builds_model = False
    """Whether the trainer makes its model itself, without model_init."""

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """The callbacks of every trainer of this class, before those passed to it."""
        return []

    # Callbacks

    def add_callback(self, callback: Any) -> None:
        """Add a callback; a class is instantiated."""
        self.callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take out a callback, by exact class or by identity, and return it; None where there is none."""
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, including a default one, by exact class or by identity."""
        self.callbacks.pop(callback)

    def tell(self, event: str, *, state: TrainerState | None = None, **keywords: Any) -> TrainerControl:
        """Dispatch an event to the callbacks, with the current state or the one given, and return the control."""
        for hearers in (self._log_file, self.callbacks):
            if hearers.handles(event):
                self.control = hearers.dispatch(
                    event, self.control, args=self.args, state=state or self.state,
                    model=None if self.model is None else self.unwrapped_model(),
                    processing_class=self.processing_class, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler,
                    train_dataloader=self.train_dataloader, eval_dataloader=self.eval_dataloader, trainer=self,
                    **keywords,
                )  # fmt: skip
        return self.control

    def tell_saved(self, saved: Saved) -> None:
        """Dispatch `on_save` with the saved state: training may be ahead of it by now."""
        self.tell("on_save", state=self._saving.pop(saved.step, None), checkpoint=saved.path, step=saved.step)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> TrainerControl:
        """Append to the history and notify the callbacks. `start_time` is ignored; overrides may pass it on."""
        del start_time
        entry = {**plain(logs), "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(entry)
        return self.tell("on_log", logs={**logs, "epoch": self.state.epoch})

    @property
    def stopped_by(self) -> StopRequest | None:
        """The first callback that asked for the end."""
        return self.callbacks.stopped_by

    @property
    def _greater_is_better(self) -> bool:
        checkpoint = self.config.checkpoint
        return greater_is_better(checkpoint.metric, checkpoint.greater_is_better)

    # Saving and loading

    def unwrapped_model(self) -> nn.Module:
        """The model as it was given, without what compiling or sharding put around it."""
        if self.model is None:
            raise ConfigError("there is no model yet: model_init makes it when training or evaluation begins")
        return getattr(self.model, "_orig_mod", self.model)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, naming the alternative for attributes of `transformers.Trainer`."""
        raise missing_method(self, name)

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write only the weights and processing_class; existing files are replaced only with overwrite_output_dir.

        `_internal_call` is ignored; overrides may pass it on.
        """
        del _internal_call
        target = self.config.output_dir if output_dir is None else Path(output_dir)
        export_model(self.unwrapped_model(), self.processing_class, target, overwrite=self.config.overwrite_output_dir)

    def save_checkpoint(self, checkpoint_path: str | Path | None = None, *, temporary: bool = False) -> Path:
        """Save the whole state; with async_save the files follow, and `on_save` tells when they are there.

        The numbers of every step so far are waited for, so that nothing that is not finite is saved. A step that was
        saved before is not saved again. A temporary checkpoint is removed once a newer one exists and is never best.
        """
        self.settle()
        metric = None
        if self._last_metric is not None and self._last_metric[0] == self.state.global_step and not temporary:
            metric = self._last_metric[1]
        path, step = None if checkpoint_path is None else Path(checkpoint_path), self.state.global_step
        if self.state.best_global_step == step and not temporary:
            self.state.best_model_checkpoint = str(path or find_checkpoint(self.checkpoint_manager.run, step))
        while len(self._saving) > 3:  # of saves that failed
            del self._saving[min(self._saving)]
        self._saving[step] = dataclasses.replace(self.state, log_history=list(self.state.log_history))
        saved = self.checkpoint_manager.save(
            step, self.get_state_components(), metric=metric, about=self._about(), path=path, temporary=temporary
        )
        if self.callbacks.expect_saved_model:
            self.checkpoint_manager.settle()
        return saved

    def settle(self) -> None:
        """Wait for the numbers of every step so far; for callbacks that do something slow or print something."""

    def load_checkpoint(self, checkpoint_path: str | Path | None = None) -> Path:
        """Load the whole state; None: the newest whole checkpoint. What does not fit stops with its name."""
        manager, path = self.checkpoint_manager, None if checkpoint_path is None else Path(checkpoint_path)
        manifest = manager.load(
            self.get_state_components(), path, skip=self.config.resume.skip,
            check=partial(check_model, self.unwrapped_model()),
        )  # fmt: skip
        self.resumed_from = path or find_checkpoint(manager.run, manifest.step)
        return self.resumed_from

    def rewind(self) -> int:
        """Go back to the newest checkpoint but for the data, which goes on; gives the step."""
        components = [part for part in self.get_state_components() if part.key not in ("dataset", "rng")]
        epoch = self.state.raw_epoch
        self.checkpoint_manager.load(components, self.checkpoint_manager.current() or self.resumed_from)
        self.state.raw_epoch = epoch
        self.state.epoch_start_step = min(self.state.epoch_start_step, self.state.global_step)
        return self.state.global_step

    def get_state_components(self) -> list[StateComponent]:
        """All that a checkpoint holds, in order."""
        one, own = SharingPattern.GLOBAL, SharingPattern.PER_RANK
        parts = [
            StateComponent("model", model_state(self.unwrapped_model(), self.processing_class), one),
            StateComponent("trainer", self, one),
            StateComponent("rng", RNGState(), own, required=False),
            StateComponent("callbacks", self.callbacks, one, required=False),
        ]
        if self.optimizer is not None and self.lr_scheduler is not None:
            optimizer, scheduler = self._optimizer_states()
            parts.insert(1, StateComponent("optimizer", optimizer, one, required=False))
            parts.insert(2, StateComponent("scheduler", scheduler, one, required=False))
        if self.train_dataloader is not None:
            pattern = self._get_dataset_sharing_pattern()
            parts.insert(-2, StateComponent("dataset", self.train_dataloader, pattern, required=False))
        return parts

    def _optimizer_states(self) -> tuple[OptimizerState, SchedulerState]:
        """The checkpoint components of optimizer and scheduler, which record their initial settings."""
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        held = self._states
        if held is None or held[0].optimizer is not self.optimizer or held[1].scheduler is not self.lr_scheduler:
            held = self._states = OptimizerState(self.optimizer), SchedulerState(self.lr_scheduler)
        return held

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        return SharingPattern.GLOBAL

    def get_process_groups(self) -> dict[str, Any]:
        """Groups of processes that components can be shared in, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """How far the run is, its history (as lines of JSON), its sums and, under fp16, the scale of the loss."""
        state: dict[str, Any] = {name: getattr(self.state, name) for name in (*SAVED, *HISTORY)}
        history = self.state.log_history
        del self._lines[len(history) :]
        self._lines += [json.dumps(entry) for entry in history[len(self._lines) :]]
        state["log_history"] = "\n".join(self._lines)  # one text: a long history costs a save nothing
        state["tally"] = dataclasses.asdict(self.tally)
        if self.deferred:
            state["deferred"] = sorted(self.deferred)
        if self.precision.scaler is not None:
            state["grad_scaler"] = self.precision.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` is."""
        for name in (*SAVED, *(name for name in HISTORY if name in state)):
            setattr(self.state, name, state[name])
        self._lines = state.get("log_history", "").splitlines()
        self.state.log_history = [json.loads(line) for line in self._lines]
        self.tally = Tally(**state.get("tally", {}))
        self.deferred = set(state.get("deferred", ()))
        if self.precision.scaler is not None and "grad_scaler" in state:
            self.precision.load_state_dict(state["grad_scaler"])

    def _make_config(self, args: MinimalTrainingArguments) -> TrainerConfig:
        """The settings that the arguments come down to."""
        return to_config(args)

    def _about(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of the run."""
        settings = json.dumps(to_table(self.config), sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()
        return {"config_hash": digest, "model": model_identity(self.unwrapped_model())}


class ProcessFlag(int):
    """A callable bool: `is_world_process_zero` is an attribute here, a method in transformers."""

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


class Accelerator:
    """Provides `accelerator.backward`, as in transformers, for overrides of `training_step`."""

    def __init__(self, precision: PrecisionPlan) -> None:
        self._precision = precision
        self.called = False

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, with the loss scaled under fp16."""
        self.called = True
        self._precision.scale(loss).backward()


def _check_collator(data_collator: object, *datasets: object) -> None:
    """Raise if data_collator would not be used."""
    given = [dataset for dataset in datasets if dataset is not None]
    if data_collator is not None and given and all(isinstance(dataset, DataLoader) for dataset in given):
        raise ConfigError("data_collator has no effect on a DataLoader, which has its collate_fn: leave it out")


def _reporters(log: LogConfig) -> list[Any]:
    """The logging callbacks selected by the settings."""
    trackers: list[Any] = [TrackerCallback(kind) for kind in ("wandb", "trackio") if getattr(log, kind)]
    return [TensorBoardCallback(), *trackers] if log.tensorboard else trackers


def _refuse_unknown(cls: type, unknown: Mapping[str, Any]) -> None:
    """Raise for unknown keyword arguments, naming the alternative."""
    for name in unknown:
        known = [key for key in inspect.signature(TrainerCore.__init__).parameters if key not in ("self", "unknown")]
        hint = f": give {TRAINER_ELSEWHERE[name]}" if name in TRAINER_ELSEWHERE else did_you_mean(name, known)
        raise ConfigError(f"{cls.__name__} has no argument '{name}'{hint}")


def _chosen(trainer: object, optimizers: tuple[Any, Any], given: tuple[Any, dict[str, Any]] | None) -> tuple[Any, Any]:
    """The chosen optimizer and scheduler; raises if they are given in two ways."""
    optimizer, scheduler = optimizers
    if given is not None and optimizer is not None:
        raise ConfigError("expected optimizers or optimizer_cls_and_kwargs, got both: leave one out")
    for method, choice in {"create_optimizer": optimizer or given, "create_scheduler": scheduler}.items():
        if choice is not None and overrides(trainer, method, "create_optimizer_and_scheduler"):
            raise ConfigError(f"{method} is overridden, but optimizers is given too: leave one out")
    if given is None:
        return optimizer, scheduler
    kind, keywords = given
    return lambda parameters: kind(parameters, **keywords), scheduler


def _check_given(args: object, model: object, model_init: object, processing_class: object) -> None:
    """Refuse what is not what its name says."""
    if isinstance(args, nn.Module):
        raise ConfigError("the arguments come first and the model second: Trainer(args, model), or by name")
    if not isinstance(args, MinimalTrainingArguments):
        kind = f"{type(args).__module__.partition('.')[0]}.{type(args).__name__}"
        raise ConfigError(f"args is a {kind}: give whimbrel.train.TrainingArguments, which has its names")
    if model is None and model_init is None:
        raise ConfigError("a trainer needs a model: give model, or model_init, which makes one")
    if not isinstance(model, nn.Module | None):
        raise ConfigError(f"model is a {type(model).__name__}: give a torch module, as from_pretrained returns it")
    if model is not None:
        refuse_wrapped_model(model)
    if not (isinstance(processing_class, Tokenizer | None) or hasattr(processing_class, "save_pretrained")):
        kind = type(processing_class).__name__
        raise ConfigError(f"processing_class is a {kind}: give a tokenizer, or what has save_pretrained")
