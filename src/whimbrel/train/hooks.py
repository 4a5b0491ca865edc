"""The methods of `transformers.Trainer` that subclasses override: loss, steps, optimizer, dataloaders."""

from __future__ import annotations

import inspect
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whimbrel.base.errors import ConfigError, DataError, TrainingError
from whimbrel.checkpoint import SharingPattern, StateComponent
from whimbrel.data import TokenDataLoader
from whimbrel.optim import InBackward
from whimbrel.precision import torch_switches
from whimbrel.train import assemble
from whimbrel.train.batches import TokenBatches, make_batches
from whimbrel.train.core import TrainerCore
from whimbrel.train.dataset_batches import DatasetBatches, LoaderBatches, drop_unused_columns, to_device
from whimbrel.train.distributed import refuse_wrapped_model
from whimbrel.train.evaluation import label_names_of, labels_of, select_predictions
from whimbrel.train.loop import Scheduler
from whimbrel.train.outputs import Objective
from whimbrel.train.overrides import overrides

__all__ = ["TrainerHooks"]


class TrainerHooks(TrainerCore):
    """The methods that a subclass may override, with the signatures of `transformers.Trainer`."""

    _plain: Objective | None = None
    """The objective that the default `compute_loss` uses for the current batch."""
    _step_targets: Tensor | None = None
    """The number of targets in the current step."""

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
        objective = self._plain_objective(model)
        count = objective.count(inputs)
        total = count.clamp(min=1) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).to(count)
        outputs, loss = objective.scored(inputs, total, count, labeled=True, logits=return_outputs)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Forward and backward pass of a micro-batch; returns its share of the step's loss.

        `num_items_in_batch` counts the targets of the whole step. An override runs its own backward pass with
        `self.accelerator.backward(loss)`, which scales the loss under fp16.
        """
        del num_items_in_batch  # an override may not pass it on, so the current step stores it
        inputs = _on_device(inputs, self.device)
        objective = self._hooked_objective(self._plain_objective(model))
        with self.precision.autocast():
            count = objective.count(inputs)
            total = count.clamp(min=1) if self._step_targets is None else self._step_targets
            loss = objective.loss(inputs, total, count)
        self.accelerator.backward(loss)
        return loss.detach()

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The mean loss of a batch, its predictions (all outputs but the loss and `ignore_keys`) and its labels."""
        inputs = _on_device(inputs, self.device)
        objective = self._hooked_objective(self._plain_objective(model))
        labels = labels_of(inputs, self.label_names)
        with torch.no_grad():
            count = objective.count(inputs)
            outputs, loss = objective.scored(inputs, count.clamp(min=1), count, labeled=labels is not None)
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            shape = getattr(self.unwrapped_model(), "config", None)
            ignore_keys = getattr(shape, "keys_to_ignore_at_inference", None) or ["past_key_values"]
        return loss, select_predictions(outputs, ignore_keys), labels

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the label inputs: `label_names` from the arguments, or inferred from the model's forward."""
        if self.config.loader.label_names is not None:
            return self.config.loader.label_names
        model = self.unwrapped_model()
        model = getattr(model, "get_base_model", lambda: model)()  # under an adapter
        return label_names_of(inspect.signature(model.forward).parameters, type(model).__name__)

    def _objective(self, batches: Any) -> Objective:
        """The objective for `batches`, using `compute_loss` if a subclass overrides it."""
        assert self.model is not None
        loader = batches.loader if isinstance(batches, TokenBatches) else None
        if loader is not None and loader.documents != "join":
            self._plain = Objective(self.model, self.loss_fn, lambda x: {"documents": loader.documents_of(x)})
        else:
            self._plain = Objective(self.model, self.loss_fn)
        return self._hooked_objective(self._plain)

    def _plain_objective(self, model: nn.Module) -> Objective:
        if self._plain is None or self._plain.model is not model:
            self._plain = Objective(model, self.loss_fn)
        return self._plain

    def _hooked_objective(self, plain: Objective) -> Objective:
        if not overrides(self, "compute_loss"):
            return plain

        def compute(inputs: Any, **keywords: Any) -> Any:
            self._plain = plain
            return self.compute_loss(plain.model, inputs, **_accepted(self.compute_loss, keywords))

        return OverriddenLoss(plain.model, _unused, plain.extras, override=compute, plain=plain)

    def _counting_objective(self, objective: Objective, *methods: str) -> Objective:
        """An objective that counts targets without an extra forward pass, if a subclass overrides one of `methods`."""
        if not overrides(self, *methods) or isinstance(objective, OverriddenLoss) or objective.decided:
            return objective
        return Objective(objective.model, _unused, objective.extras)

    def _overridden_step(self, plain: Objective) -> Callable[[Any, Tensor], Tensor] | None:
        """`training_step` as the loop calls it, or None if no subclass overrides it."""
        if not overrides(self, "training_step"):
            return None

        def step(batch: Any, total: Tensor) -> Tensor:
            self._plain, self._step_targets, self.accelerator.called = plain, total, False
            keywords = _accepted(self.training_step, {"num_items_in_batch": total})
            loss = self.training_step(plain.model, _copied(batch), **keywords)
            self._step_targets = None
            if self.precision.scaler is not None and not self.accelerator.called:
                raise TrainingError(
                    "training_step under mixed_precision='fp16' must use self.accelerator.backward(loss)"
                )
            return _scalar(loss, "training_step").detach()

        return step

    # Optimizer and scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create `self.optimizer` and `self.lr_scheduler`."""
        self._keep("optimizer", self.create_optimizer())
        keywords = _accepted(self.create_scheduler, {"optimizer": self.optimizer})
        self._keep("lr_scheduler", self.create_scheduler(num_training_steps, **keywords))

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create `self.optimizer` from the arguments; an override sets or returns it."""
        if self.optimizer is None:
            self.optimizer = self._build_optimizer(self._optimizers[0], model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Scheduler:
        """Create `self.lr_scheduler` from the arguments; an override sets or returns it."""
        if self.lr_scheduler is None:
            moved = self.optimizer if optimizer is None else optimizer
            assert moved is not None
            self.lr_scheduler = assemble.build_scheduler(moved, self.config, num_training_steps, self._optimizers[1])
        return self.lr_scheduler

    def _make_optimizer(self, total: int) -> None:
        """Recreate optimizer and scheduler through the methods above."""
        if isinstance(self.optimizer, InBackward):
            self.optimizer.remove()  # of an earlier train()
        self.optimizer, self.lr_scheduler = None, None
        self.create_optimizer_and_scheduler(total)
        for name in ("optimizer", "lr_scheduler"):
            if getattr(self, name) is None:
                raise ConfigError(f"create_optimizer_and_scheduler must set self.{name}, got None")
        self._wrap_created(total)

    def _wrap_created(self, total: int) -> None:
        """Check a subclass's optimizer as if it had been passed in, and set up steps in backward if requested."""
        assert self.optimizer is not None
        if overrides(self, "create_optimizer", "create_optimizer_and_scheduler"):
            self.optimizer = self._build_optimizer(self.optimizer)  # wraps it for steps in backward if requested
        if overrides(self, "create_scheduler", "create_optimizer_and_scheduler"):
            self.lr_scheduler = assemble.build_scheduler(self.optimizer, self.config, total, self.lr_scheduler)

    def _build_optimizer(self, choice: assemble.OptimizerChoice, model: nn.Module | None = None) -> Optimizer:
        return assemble.build_optimizer_of(
            model or self.unwrapped_model(), self.config, choice, accumulation=self._accumulation()
        )

    def _keep(self, name: str, made: Any) -> None:
        """Store what a method returned; it may also have set the attribute and returned None."""
        if made is not None:
            setattr(self, name, made)
        if getattr(self, name) is None:
            kind = "scheduler" if name == "lr_scheduler" else name
            raise ConfigError(f"create_{kind} must return the {kind} or set self.{name}, got None")

    def _accumulation(self) -> int:
        return self.config.train.accumulation or 1

    # Model and data

    def get_state_components(self) -> list[StateComponent]:
        """All components of a checkpoint; files from an overridden `save_model` go to a folder of that name."""
        parts = super().get_state_components()
        if overrides(self, "save_model"):
            parts.append(StateComponent("save_model", SavedModel(self), SharingPattern.GLOBAL, required=False))
        return parts

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model from `model_init`, initialized with the seed and dtype of the arguments."""
        if trial is not None:
            raise ConfigError("expected trial=None: construct and train one Trainer for each trial")
        assert self.model_init is not None
        assemble.seed_everything(self.config.train.seed)
        with torch_switches(default_dtype=self.config.train.default_dtype):
            model = self.model_init()
        refuse_wrapped_model(model)
        return model

    def get_train_dataloader(self) -> Any:
        """The batches to train on; an override returns a DataLoader."""
        if self.train_dataset is None:
            raise ConfigError("train() needs train_dataset: pass it to the trainer")
        return self._make_batches(self.train_dataset, self.config.train.micro_batch, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of `eval_dataset`, or of the trainer's own; an override returns a DataLoader."""
        dataset = self._eval_dataset(eval_dataset)
        if dataset is None or isinstance(dataset, Mapping):
            raise ConfigError("get_eval_dataloader() needs one eval_dataset: pass it here or to the trainer")
        return self._make_batches(dataset, self.config.validation.micro_batch, shuffle=False)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The batches to predict; an override returns a DataLoader."""
        return self._make_batches(test_dataset, self.config.validation.micro_batch, shuffle=False)

    def _eval_dataset(self, given: Any = None) -> Any:
        """The dataset passed in, looked up if it is a name; None: the trainer's own."""
        if given is None:
            return self.eval_dataset
        if isinstance(given, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if given not in known:
                raise ConfigError(
                    f"expected one of the eval datasets ({', '.join(known) or 'none is named'}), got {given!r}"
                )
            return known[given]
        return given

    def _as_batches(self, found: Any) -> TokenBatches | DatasetBatches:
        """Wrap the dataloader that an override returned."""
        if isinstance(found, TokenBatches | DatasetBatches):
            return found
        if isinstance(found, TokenDataLoader):
            return TokenBatches(found, self.device)
        return LoaderBatches(found, self.device, seed=self._data_seed)

    @property
    def _data_seed(self) -> int:
        seed = self.config.loader.seed
        return self.config.train.seed if seed is None else seed

    def _make_batches(self, dataset: Any, size: int | None, *, shuffle: bool) -> TokenBatches | DatasetBatches:
        assert self.model is not None
        if isinstance(dataset, TokenBatches | DatasetBatches):
            return dataset
        if isinstance(dataset, TokenDataLoader):
            size = dataset.B if not shuffle or size is None else size
        loader = self.config.loader if shuffle else replace(self.config.loader, drop_last=False)
        if loader.remove_unused_columns:
            dataset = drop_unused_columns(dataset, self.unwrapped_model(), loader.label_names or ())
        return make_batches(
            dataset,
            size or self.config.train.micro_batch or 1,
            self.device,
            collate=self.data_collator,
            seed=self._data_seed,
            shuffle=shuffle and loader.shuffle,
            loader=loader,
        )


class SavedModel:
    """Checkpoint component for the files of a subclass's `save_model`, saved beside the complete training state.

    `save_model` runs when the state is captured, since training continues during an asynchronous save; the files are
    then copied into the checkpoint.
    """

    def __init__(self, trainer: TrainerHooks) -> None:
        self._trainer = trainer
        self._staged: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Write the files to a staging folder."""
        run = self._trainer.config.output_dir
        run.mkdir(parents=True, exist_ok=True)
        self._staged = mkdtemp(prefix=".save_model-", dir=run)
        weakref.finalize(self, shutil.rmtree, self._staged, ignore_errors=True)  # a retried save still needs the files
        method = self._trainer.save_model
        method(self._staged, **_accepted(method, {"_internal_call": True}))
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Does nothing: the model component restores the weights."""

    def save_directory(self, state: Any, folder: Path) -> None:
        """Copy the files."""
        del state
        assert self._staged is not None
        shutil.copytree(self._staged, folder, dirs_exist_ok=True)

    def load_directory(self, folder: Path) -> None:
        """Does nothing."""


@dataclass(slots=True, kw_only=True)
class OverriddenLoss(Objective):
    """The loss from a subclass's `compute_loss`, as its share of the step.

    `num_items_in_batch` is the number of targets in the micro-batch: whether `compute_loss` divides a sum by it or
    returns a mean, the result is a mean over these targets, which is weighted here.
    """

    override: Callable[..., Any]
    plain: Objective

    def loss(self, batch: Any, total: Tensor, count: Tensor) -> Tensor:
        """The mean over this batch's `count` targets, as its share of the `total` of the step."""
        mean = self.override(_copied(batch), num_items_in_batch=count.clamp(min=1))
        return self._weighed(mean, total, count)

    def scored(
        self, batch: Any, total: Tensor, count: Tensor, *, labeled: bool, logits: bool = True
    ) -> tuple[Any, Tensor | None]:
        """The outputs, and the loss where the batch is `labeled`."""
        if not labeled:
            return self.plain.scored(batch, total, count, labeled=False, logits=logits)
        found = self.override(_copied(batch), return_outputs=True, num_items_in_batch=count.clamp(min=1))
        if not isinstance(found, tuple) or len(found) != 2:
            raise DataError(
                f"expected (loss, outputs) from compute_loss(..., return_outputs=True), got {type(found).__name__}"
            )
        return found[1], self._weighed(found[0], total, count)

    def _weighed(self, mean: Any, total: Tensor, count: Tensor) -> Tensor:
        return torch.where(count > 0, _scalar(mean, "compute_loss"), 0.0) * (count / total)


def _on_device(inputs: Any, device: torch.device) -> Any:
    """Returns the same object if it is already on the device: the objective recognizes a batch by identity."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    placed = all(value.device.type == device.type for value in values if isinstance(value, Tensor))
    return inputs if placed else to_device(inputs, device)


def _unused(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("the overridden compute_loss computes the loss")


def _scalar(loss: Any, method: str) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise DataError(f"expected a scalar loss tensor from {method}, got {kind}")


def _copied(batch: Any) -> Any:
    """A shallow copy of a batch, so that an override may pop keys."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _accepted(method: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that a method accepts: signatures vary between transformers versions."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}
