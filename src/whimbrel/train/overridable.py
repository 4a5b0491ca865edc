"""The methods of `transformers.Trainer` that subclasses override: loss, steps, evaluation, optimizer, dataloaders."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whimbrel.base.errors import ConfigError, DataError, TrainingError
from whimbrel.data import TokenDataLoader
from whimbrel.distributed import World, unwrap
from whimbrel.optim import OptimizerInBackward
from whimbrel.precision import MixedPrecision, torch_flags
from whimbrel.train import build
from whimbrel.train.arguments import MinimalTrainingArguments
from whimbrel.train.batches import (
    Batches,
    DataLoaderBatches,
    DatasetBatches,
    TokenBatches,
    drop_unused_columns,
    eval_token_batches,
    make_batches,
    to_device,
)
from whimbrel.train.callback import TrainerControl
from whimbrel.train.checks import check_no_trial, check_train_dataset, reject_wrapped_model
from whimbrel.train.config import TrainerConfig
from whimbrel.train.evaluation import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    call_compute_metrics,
    evaluate_batches,
    get_labels,
    infer_label_names,
    select_predictions,
)
from whimbrel.train.hf_compat import accepted_kwargs, overrides
from whimbrel.train.initial_model import create_model
from whimbrel.train.objectives import (
    ComputeLossObjective,
    LossFunction,
    ModelObjective,
    Objective,
    scalar_loss,
    shallow_copy,
)
from whimbrel.train.random_state import seed_everything
from whimbrel.train.step import Scheduler

__all__ = ["Accelerator", "OverridableMethodsMixin"]


class Accelerator:
    """The parts of `accelerate.Accelerator` that overrides and callbacks use, such as `accelerator.backward`."""

    def __init__(self, precision: MixedPrecision, world: World, device: torch.device) -> None:
        self._precision, self._world, self.device = precision, world, device
        self.called = False
        self.num_processes, self.process_index = world.size, world.rank
        self.local_process_index = world.local_rank
        self.is_main_process, self.is_local_main_process = world.is_main, world.local_rank == 0

    def backward(self, loss: Tensor) -> None:
        """Backward pass, with the loss scaled under fp16."""
        self.called = True
        self._precision.scale(loss).backward()

    def wait_for_everyone(self) -> None:
        """Wait for all processes."""
        self._world.barrier()

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, concatenated."""
        parts = self._world.all_gather_object(torch.atleast_1d(tensor.detach()).cpu())
        return torch.cat(parts).to(tensor.device)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The model without the wrappers of DDP and torch.compile."""
        return unwrap(model)


class OverridableMethodsMixin(ABC):
    """Methods that a subclass of the trainer may override, with the signatures of `transformers.Trainer`.

    `BaseTrainer` sets the attributes below, and calls the methods.
    """

    args: MinimalTrainingArguments
    config: TrainerConfig
    device: torch.device
    world: World
    model: nn.Module | None
    model_init: Callable[[], nn.Module] | None
    objective: Objective | None
    loss_fn: LossFunction | None
    data_collator: Callable[[list[Any]], Any]
    train_dataset: Any
    eval_dataset: Any
    train_dataloader: Batches | None
    eval_dataloader: Batches | None
    optimizer: Optimizer | None
    lr_scheduler: Scheduler | None
    precision: MixedPrecision
    accelerator: Accelerator
    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None
    """Computes metrics from predictions and labels; a constructor argument or a method of a subclass."""
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None
    """Reduces the logits of a batch before they are gathered, for example to their argmax."""

    _optimizers: tuple[build.OptimizerChoice, build.SchedulerChoice]
    _default_objective: ModelObjective | None = None
    """The objective that `compute_loss` uses for the current batches, unless it is overridden."""
    _num_items: Tensor | None = None
    """The number of targets in the current step, for `training_step`."""
    _log_kind = "metrics"
    """What is being logged, "metrics" or "evaluation"; passed to `on_log` as `kind`."""
    _ignore_keys: list[str] | None = None

    @abstractmethod
    def unwrapped_model(self) -> nn.Module:
        """The model without wrappers; see BaseTrainer."""

    @abstractmethod
    def dispatch(self, event: str, **kwargs: Any) -> TrainerControl:
        """Dispatch an event to the callbacks; see BaseTrainer."""

    @abstractmethod
    def log(self, logs: dict[str, Any]) -> TrainerControl:
        """Log metrics; see BaseTrainer."""

    @abstractmethod
    def _outer_parameters(self) -> contextlib.AbstractContextManager[None]: ...

    @abstractmethod
    def _prepare_model(self) -> None: ...

    @abstractmethod
    def _torch_settings(self) -> contextlib.AbstractContextManager[None]: ...

    # Loss and steps

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a micro-batch, and with `return_outputs` the outputs. The loss is the sum over its targets
        divided by `num_items_in_batch` (None: by their number).

        An override returns a mean over the targets of `inputs`, or a sum divided by `num_items_in_batch`, the number of
        these targets: the trainer itself weights the micro-batches of a step.
        """
        objective = self._model_objective()
        count = objective.count(model, inputs)
        total = count.clamp(min=1) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).to(count)
        output = objective(model, inputs, total, with_logits=return_outputs)
        return (output.loss, output.outputs) if return_outputs else output.loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Forward and backward pass of a micro-batch; returns its share of the step's loss.

        `num_items_in_batch` counts the targets of the optimizer step. An override runs its own backward pass with
        `self.accelerator.backward(loss)`, which scales the loss under fp16.
        """
        del num_items_in_batch  # an override may not pass it on, so it is taken from the current step
        inputs = _move_to_device(inputs, self.device)
        objective = self._current_objective()
        with self.precision.autocast():
            count = objective.count(model, inputs)
            total = count.clamp(min=1) if self._num_items is None else self._num_items
            loss = objective(model, inputs, total).loss
        assert loss is not None
        self.accelerator.backward(loss)
        return loss.detach()

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The mean loss of a batch, its predictions (all outputs but the loss and `ignore_keys`) and its labels."""
        inputs = _move_to_device(inputs, self.device)
        objective = self._current_objective()
        labels = get_labels(inputs, self.label_names)
        with torch.no_grad():
            num_items = objective.count(model, inputs).clamp(min=1)
            if labels is None and self.objective is None:
                output = self._model_objective().predict(model, inputs, num_items)
            else:
                output = objective(model, inputs, num_items, with_logits=True)
        if prediction_loss_only:
            return output.loss, None, None
        if ignore_keys is None:
            model_config = getattr(self.unwrapped_model(), "config", None)
            ignore_keys = getattr(model_config, "keys_to_ignore_at_inference", None) or ["past_key_values"]
        return output.loss, select_predictions(output.outputs, ignore_keys), labels

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the label inputs: `label_names` from the arguments, or inferred from the model's forward."""
        if self.config.loader.label_names is not None:
            return self.config.loader.label_names
        model = self.unwrapped_model()
        model = getattr(model, "get_base_model", lambda: model)()  # under an adapter
        return infer_label_names(inspect.signature(model.forward).parameters, type(model).__name__)

    def _objective_for(self, batches: Any) -> Objective:
        """The objective for `batches`: the one passed in, an overridden `compute_loss`, or the default."""
        loader = batches.loader if isinstance(batches, TokenBatches) else None
        if loader is not None and loader.documents != "join":
            self._default_objective = ModelObjective(self.loss_fn, lambda x: {"documents": loader.document_ids(x)})
        else:
            self._default_objective = ModelObjective(self.loss_fn)
        return self._current_objective()

    def _model_objective(self) -> ModelObjective:
        if self._default_objective is None:
            self._default_objective = ModelObjective(self.loss_fn)
        return self._default_objective

    def _current_objective(self) -> Objective:
        if self.objective is not None:
            return self.objective
        if not overrides(self, "compute_loss"):
            return self._model_objective()

        def compute_loss(model: nn.Module, inputs: Any, **kwargs: Any) -> Any:
            return self.compute_loss(model, inputs, **accepted_kwargs(self.compute_loss, kwargs))

        return ComputeLossObjective(compute_loss)

    def _counting_objective(self, objective: Objective, method: str) -> Objective:
        """`objective`, changed to count targets without a forward pass if a subclass overrides `method`."""
        if overrides(self, method) and isinstance(objective, ModelObjective):
            return replace(objective, counts_without_forward=True)
        return objective

    def _overridden_training_step(self, model: nn.Module) -> Callable[[Any, Tensor], Tensor] | None:
        """`training_step` for `TrainStep`, or None if no subclass overrides it."""
        if not overrides(self, "training_step"):
            return None

        def step(batch: Any, num_items: Tensor) -> Tensor:
            self._num_items, self.accelerator.called = num_items, False
            kwargs = accepted_kwargs(self.training_step, {"num_items_in_batch": num_items})
            loss = self.training_step(model, shallow_copy(batch), **kwargs)
            self._num_items = None
            if self.precision.scaler is not None and not self.accelerator.called:
                raise TrainingError(
                    "training_step must call self.accelerator.backward(loss) under mixed_precision='fp16'"
                )
            return scalar_loss(loss, "training_step").detach()

        return step

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, log and return the mean loss over held-out targets and the metrics of compute_metrics.

        Each dataset of a dict is evaluated separately, with its name in the metrics: `eval_NAME_loss`. A string selects
        one of the trainer's datasets by name. `ignore_keys`: model outputs to exclude from the predictions.
        """
        dataset = self._resolve_eval_dataset(eval_dataset)
        if dataset is None and not overrides(self, "get_eval_dataloader"):
            raise ConfigError("evaluate() needs eval_dataset: pass it here or to the trainer")
        if isinstance(dataset, Mapping):
            metrics: dict[str, float] = {}
            for name, subset in dataset.items():
                metrics |= self.evaluate(
                    name if eval_dataset is None else subset,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=f"{metric_key_prefix}_{name}",
                )
            return metrics
        with self._eval_dataloader(dataset, eval_dataset, ignore_keys):
            measured = self._eval_loop()
        metrics = {f"{metric_key_prefix}_{name.removeprefix('eval_')}": value for name, value in measured.items()}
        self._log_kind = "evaluation"
        try:
            self.log(metrics)
        finally:
            self._log_kind = "metrics"
        self.dispatch("on_evaluate", metrics=metrics)
        return metrics

    @contextlib.contextmanager
    def _eval_dataloader(self, dataset: Any, eval_dataset: Any, ignore_keys: list[str] | None) -> Iterator[None]:
        """Set `eval_dataloader` to the batches of `dataset`; restore the trainer's own afterwards."""
        previous_dataloader, previous_ignore_keys = self.eval_dataloader, self._ignore_keys
        already_prepared = dataset is self.eval_dataset and previous_dataloader is not None
        with self._torch_settings():
            self._prepare_model()
            if overrides(self, "get_eval_dataloader"):
                self.eval_dataloader = self._as_batches(self.get_eval_dataloader(eval_dataset))
            elif not already_prepared:
                self.eval_dataloader = self._make_batches(dataset, self.config.validation.micro_batch, shuffle=False)
            self._ignore_keys = previous_ignore_keys if ignore_keys is None else ignore_keys
            try:
                yield
            finally:
                self._ignore_keys = previous_ignore_keys
                if dataset is not self.eval_dataset:
                    self.eval_dataloader = previous_dataloader

    def _eval_loop(self) -> dict[str, float]:
        """Loss and metrics of `eval_dataloader`, with the prefix `eval_`."""
        batches, config = self.eval_dataloader, self.config.validation
        assert batches is not None
        limited = eval_token_batches(batches, config.tokens) if isinstance(batches, TokenBatches) else batches
        result = self._evaluate_batches(limited, batches, gather=self.compute_metrics is not None, limit=config.batches)
        metrics = {} if result.loss is None else {"eval_loss": result.loss}
        metrics |= {f"eval_{name}": value for name, value in result.metrics.items()}
        if self.compute_metrics is not None:
            if result.predictions is None or result.label_ids is None:
                missing = "predictions" if result.predictions is None else f"labels ({', '.join(self.label_names)})"
                raise DataError(f"compute_metrics needs predictions and labels, but the batches have no {missing}")
            metrics |= self.world.run_on_main(partial(call_compute_metrics, self.compute_metrics, result))
        return metrics

    def _evaluate_batches(
        self, limited: Any, batches: Any, *, gather: bool, limit: int | None = None
    ) -> EvalLoopOutput:
        """Evaluate `limited`, some or all of `batches`, with prediction_step if predictions are needed."""
        assert self.model is not None
        training_objective = self._default_objective
        model, objective = self.model, self._objective_for(batches)

        def step(batch: Any) -> tuple[Any, Any, Any]:
            return self.prediction_step(model, batch, not gather, ignore_keys=self._ignore_keys)

        try:
            with self._outer_parameters():
                return evaluate_batches(
                    self._counting_objective(objective, "prediction_step"), model, limited, self.precision, self.world,
                    on_batch=lambda: self.dispatch("on_prediction_step"), limit=limit, gather=gather,
                    step=step if gather or overrides(self, "prediction_step") else None,
                    preprocess=self.preprocess_logits_for_metrics,
                )  # fmt: skip
        finally:
            self._default_objective = training_objective

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Logits and labels of a dataset, in its order, and loss and metrics if it has labels."""
        if isinstance(test_dataset, TokenDataLoader):
            raise ConfigError(
                "expected a dataset in predict(), got a TokenDataLoader: the logits of a token stream would not fit in "
                "memory"
            )
        previous_dataloader, previous_ignore_keys = self.eval_dataloader, self._ignore_keys
        with self._torch_settings():
            self._prepare_model()
            try:
                self.eval_dataloader = self._as_batches(self.get_test_dataloader(test_dataset))
                self._ignore_keys = ignore_keys
                result = self._evaluate_batches(self.eval_dataloader, self.eval_dataloader, gather=True)
            finally:
                self.eval_dataloader, self._ignore_keys = previous_dataloader, previous_ignore_keys
        metrics = {} if result.loss is None else {"loss": result.loss}
        if self.compute_metrics is not None and result.predictions is not None and result.label_ids is not None:
            metrics |= self.world.run_on_main(partial(call_compute_metrics, self.compute_metrics, result))
        metrics = {f"{metric_key_prefix}_{name.removeprefix('eval_')}": value for name, value in metrics.items()}
        self.dispatch("on_predict", metrics=metrics)
        return PredictionOutput(result.predictions, result.label_ids, metrics)

    # Model, optimizer and scheduler

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model from `model_init`, initialized with the seed and dtype of the arguments."""
        check_no_trial(trial)
        model = create_model(self._call_model_init, self.config, self.world)
        reject_wrapped_model(model)
        return model

    def _call_model_init(self) -> nn.Module:
        assert self.model_init is not None
        seed_everything(self.config.train.seed)
        with torch_flags(default_dtype=self.config.train.default_dtype):
            return self.model_init()

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create `self.optimizer` and `self.lr_scheduler`."""
        self._assign("optimizer", self.create_optimizer())
        kwargs = accepted_kwargs(self.create_scheduler, {"optimizer": self.optimizer})
        self._assign("lr_scheduler", self.create_scheduler(num_training_steps, **kwargs))

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create `self.optimizer` from the arguments; an override sets or returns it."""
        if self.optimizer is None:
            self.optimizer = self._build_optimizer(self._optimizers[0], model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Scheduler:
        """Create `self.lr_scheduler` from the arguments; an override sets or returns it."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            assert optimizer is not None
            self.lr_scheduler = build.create_scheduler(optimizer, self.config, num_training_steps, self._optimizers[1])
        return self.lr_scheduler

    def _create_optimizer_and_scheduler(self, total_steps: int) -> None:
        """Create optimizer and scheduler through the methods above, and check what overrides created."""
        if isinstance(self.optimizer, OptimizerInBackward):
            self.optimizer.remove()  # hooks of an earlier train()
        self.optimizer, self.lr_scheduler = None, None
        self.create_optimizer_and_scheduler(total_steps)
        optimizer: Optimizer | None = self.optimizer
        for name in ("optimizer", "lr_scheduler"):
            if getattr(self, name) is None:
                raise ConfigError(f"create_optimizer_and_scheduler must set self.{name}, got None")
        assert optimizer is not None
        if overrides(self, "create_optimizer", "create_optimizer_and_scheduler"):
            self.optimizer = optimizer = self._build_optimizer(optimizer)  # wraps it for steps in backward if requested
        if overrides(self, "create_scheduler", "create_optimizer_and_scheduler"):
            self.lr_scheduler = build.create_scheduler(optimizer, self.config, total_steps, self.lr_scheduler)

    def _build_optimizer(self, choice: build.OptimizerChoice, model: nn.Module | None = None) -> Optimizer:
        return build.create_optimizer(
            model or self.unwrapped_model(),
            self.config,
            choice,
            accumulation=self.config.train.accumulation or 1,
            world=self.world,
        )

    def _assign(self, name: str, created: Any) -> None:
        """Store what a method returned; it may also have set the attribute and returned None."""
        if created is not None:
            setattr(self, name, created)
        if getattr(self, name) is None:
            suffix = name.removeprefix("lr_")
            raise ConfigError(f"create_{suffix} must return the {suffix} or set self.{name}, got None")

    # Data

    def get_train_dataloader(self) -> Any:
        """The batches to train on; an override returns a DataLoader."""
        check_train_dataset(self.train_dataset)
        return self._make_batches(self.train_dataset, self.config.train.micro_batch, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of `eval_dataset`, or of the trainer's own; an override returns a DataLoader."""
        dataset = self._resolve_eval_dataset(eval_dataset)
        if dataset is None or isinstance(dataset, Mapping):
            raise ConfigError("get_eval_dataloader() needs one eval_dataset: pass it here or to the trainer")
        return self._make_batches(dataset, self.config.validation.micro_batch, shuffle=False)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The batches to predict; an override returns a DataLoader."""
        return self._make_batches(test_dataset, self.config.validation.micro_batch, shuffle=False)

    def _resolve_eval_dataset(self, eval_dataset: Any = None) -> Any:
        """The dataset to evaluate on: as passed in, by name, or (None) the trainer's own."""
        if eval_dataset is None:
            return self.eval_dataset
        if isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if eval_dataset not in known:
                raise ConfigError(
                    f"expected one of the eval datasets ({', '.join(known) or 'no named datasets'}), got "
                    f"{eval_dataset!r}"
                )
            return known[eval_dataset]
        return eval_dataset

    def _as_batches(self, dataloader: Any) -> Batches:
        """Wrap the dataloader that an override returned."""
        if isinstance(dataloader, TokenBatches | DatasetBatches):
            return dataloader
        if isinstance(dataloader, TokenDataLoader):
            return self._make_batches(dataloader, dataloader.B, shuffle=False)
        return DataLoaderBatches(
            dataloader, self.device, seed=self._data_seed, rank=self.world.dp_rank, world_size=self.world.dp_size
        )

    @property
    def _data_seed(self) -> int:
        seed = self.config.loader.seed
        return self.config.train.seed if seed is None else seed

    def _make_batches(self, dataset: Any, size: int | None, *, shuffle: bool) -> Batches:
        if isinstance(dataset, TokenBatches | DatasetBatches):
            return dataset
        if isinstance(dataset, TokenDataLoader):
            size = dataset.B if not shuffle or size is None else size
        loader = self.config.loader if shuffle else replace(self.config.loader, drop_last=False)
        columns = () if self.objective is None else self.objective.columns
        if loader.remove_unused_columns and columns is not None:
            kept = (*(loader.label_names or ()), *columns)
            dataset = drop_unused_columns(dataset, self.unwrapped_model(), kept)
        return make_batches(
            dataset,
            size or self.config.train.micro_batch or 1,
            self.device,
            collate=self.data_collator,
            seed=self._data_seed,
            shuffle=shuffle and loader.shuffle,
            loader=loader,
            rank=self.world.dp_rank,
            world_size=self.world.dp_size,
        )


def _move_to_device(inputs: Any, device: torch.device) -> Any:
    """Returns the same object if it is already on the device: the objective recognizes a batch by identity."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    placed = all(value.device.type == device.type for value in values if isinstance(value, Tensor))
    return inputs if placed else to_device(inputs, device)
