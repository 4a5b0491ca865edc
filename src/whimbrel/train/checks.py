"""Checks of a trainer's arguments, data and environment: each raises ConfigError with a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from whimbrel.base.errors import ConfigError
from whimbrel.config import did_you_mean
from whimbrel.distributed.strategy import pipeline_averages_gradients
from whimbrel.tokenization import Tokenizer
from whimbrel.train.arguments import MinimalTrainingArguments
from whimbrel.train.config import TrainerConfig
from whimbrel.train.evaluation import has_metric
from whimbrel.train.hf_compat import HYPERPARAMETER_SEARCH, TRAINER_ALTERNATIVES, overrides
from whimbrel.train.objectives import FunctionObjective, Objective

__all__ = [
    "check_arguments",
    "check_collator",
    "check_datasets",
    "check_delayed_fp8",
    "check_metric",
    "check_no_trial",
    "check_objective",
    "check_parallel",
    "check_train_dataset",
    "reject_unknown_arguments",
    "reject_wrapped_model",
    "resolve_optimizers",
]

WRAPPERS = {"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
"""torch wrappers that distribute a model over several devices."""


def check_no_trial(trial: object) -> None:
    """Raise for the trial of a hyperparameter search, which transformers passes to train() and model_init."""
    if trial is not None:
        raise ConfigError(f"expected trial=None: {HYPERPARAMETER_SEARCH}")


def check_objective(objective: Objective | None, config: TrainerConfig) -> None:
    """Raise for an objective that does not work with the settings."""
    if isinstance(objective, FunctionObjective) and config.train.optimizer_in_backward:
        raise ConfigError(
            "a function as objective does not work with train.optimizer_in_backward, which updates weights before the "
            "function has counted all targets: subclass Objective and implement count"
        )


def reject_wrapped_model(model: nn.Module) -> None:
    """Raise for a model that is wrapped in DDP, FSDP or DataParallel, or has DTensor parameters."""
    for module in model.modules():
        kind = _torch_class(type(module), WRAPPERS)
        if kind is not None:
            raise ConfigError(
                f"expected an unwrapped model, got a {kind}: set parallel.strategy, and the trainer wraps the model"
            )
    for name, parameter in model.named_parameters():
        if _torch_class(type(parameter.data), {"DTensor"}) or _torch_class(type(parameter), {"DTensor"}):
            raise ConfigError(
                f"expected regular parameters, got a DTensor for '{name}': set parallel.strategy to shard them"
            )


def _torch_class(kind: type, names: set[str]) -> str | None:
    """The name of the torch base class that is in `names`, found without importing torch.distributed modules."""
    return next(
        (base.__name__ for base in kind.__mro__ if base.__name__ in names and base.__module__.startswith("torch.")),
        None,
    )


def reject_unknown_arguments(cls: type, constructor: Callable[..., None], unknown: Mapping[str, Any]) -> None:
    """Raise for unknown keyword arguments, naming the alternative."""
    for name in unknown:
        known = [key for key in inspect.signature(constructor).parameters if key not in ("self", "unknown")]
        hint = f": pass {TRAINER_ALTERNATIVES[name]}" if name in TRAINER_ALTERNATIVES else did_you_mean(name, known)
        raise ConfigError(f"{cls.__name__} has no argument '{name}'{hint}")


def check_arguments(args: object, model: object, model_init: object, processing_class: object) -> None:
    """Raise for arguments of a wrong type."""
    if isinstance(args, nn.Module):
        raise ConfigError("expected the arguments first and the model second: Trainer(args, model), or pass keywords")
    if not isinstance(args, MinimalTrainingArguments | TrainerConfig):
        kind = f"{type(args).__module__.partition('.')[0]}.{type(args).__name__}"
        raise ConfigError(f"expected args of type whimbrel.train.TrainingArguments, got {kind}: the names are the same")
    if model is None and model_init is None:
        raise ConfigError("a trainer needs a model: pass model, or model_init, which creates one")
    if not isinstance(model, nn.Module | None):
        raise ConfigError(f"expected a torch.nn.Module as model, got {type(model).__name__}")
    if model is not None:
        reject_wrapped_model(model)
    if not (isinstance(processing_class, Tokenizer | None) or hasattr(processing_class, "save_pretrained")):
        kind = type(processing_class).__name__
        raise ConfigError(f"expected a tokenizer or processor with save_pretrained as processing_class, got {kind}")


def check_collator(data_collator: object, *datasets: object) -> None:
    """Raise if data_collator would not be used."""
    passed = [dataset for dataset in datasets if dataset is not None]
    if data_collator is not None and passed and all(isinstance(dataset, DataLoader) for dataset in passed):
        raise ConfigError("data_collator has no effect on a DataLoader, which uses its own collate_fn: remove it")


def resolve_optimizers(
    trainer: object, optimizers: tuple[Any, Any], class_and_kwargs: tuple[Any, dict[str, Any]] | None
) -> tuple[Any, Any]:
    """The chosen optimizer and scheduler; raises if they are passed in two ways."""
    optimizer, scheduler = optimizers
    if class_and_kwargs is not None and optimizer is not None:
        raise ConfigError("expected optimizers or optimizer_cls_and_kwargs, got both: pass only one")
    for method, choice in {"create_optimizer": optimizer or class_and_kwargs, "create_scheduler": scheduler}.items():
        if choice is not None and overrides(trainer, method, "create_optimizer_and_scheduler"):
            raise ConfigError(f"{method} is overridden, but optimizers were also passed: use one or the other")
    if class_and_kwargs is None:
        return optimizer, scheduler
    cls, kwargs = class_and_kwargs
    return lambda parameters: cls(parameters, **kwargs), scheduler


def check_train_dataset(train_dataset: object) -> None:
    """Raise if there is no training data."""
    if train_dataset is None:
        raise ConfigError("train() needs train_dataset: pass it to the trainer")


def check_datasets(trainer: Any) -> None:
    """Raise if there is no training data, or evaluations are requested without evaluation data."""
    if not overrides(trainer, "get_train_dataloader"):
        check_train_dataset(trainer.train_dataset)
    if trainer.eval_dataset is not None or overrides(trainer, "get_eval_dataloader"):
        return
    validation, checkpoint = trainer.config.validation, trainer.config.checkpoint
    requested = {
        "validation.every (eval_strategy)": validation.every is not None or validation.each_epoch,
        "checkpoint.evaluate (eval_on_save)": checkpoint.evaluate,
        "checkpoint.best (preserve_best_model)": checkpoint.best is not None,
        "checkpoint.when_best (save_strategy='best')": checkpoint.when_best,
    }
    for name in (name for name, on in requested.items() if on):
        raise ConfigError(f"{name} needs evaluation data: pass eval_dataset")


def check_parallel(trainer: Any) -> None:
    """Raise for settings that do not work on a model that is split across several ranks."""
    layout, train, parallel = trainer.world.layout, trainer.config.train, trainer.config.parallel
    split = f"a model that is split across ranks ({layout})"
    refused = {"SampleCallback": "sample.every"} if layout.dp_shard > 1 or layout.tp > 1 or layout.pp > 1 else {}
    refused |= {"EmaCallback": "ema.decay", "NormsCallback": "log.norms"} if layout.pp > 1 else {}
    for callback in trainer.callbacks:
        if (name := type(callback).__name__) in refused:
            remedy = "use fsdp" if name != "SampleCallback" else "use ddp"
            raise ConfigError(f"{refused[name]} ({name}) does not work with {split}: remove it, or {remedy}")
    if layout.tp > 1 and train.linear_recipe is not None:
        raise ConfigError(f"fp8 and quantized training do not work with parallel.tp = {layout.tp}: use fsdp")
    if layout.tp > 1 and train.precision == "fp16":
        raise ConfigError(f"train.precision = fp16 does not work with parallel.tp = {layout.tp}: use bf16")
    if layout.pp == 1:
        return
    methods = ("compute_loss", "training_step", "prediction_step")
    conflicts = {
        "train.precision = fp16": train.precision == "fp16",
        "train.optimizer_in_backward": train.optimizer_in_backward,
        "compute_loss_func": trainer.loss_fn is not None,
        "objective": trainer.objective is not None,
        "compute_metrics": trainer.compute_metrics is not None,
        **{f"an overridden {name}": overrides(trainer, name) for name in methods},
    }
    for name in (name for name, is_set in conflicts.items() if is_set):
        remedy = "use bf16" if "fp16" in name else "remove it, or use fsdp"
        raise ConfigError(f"{name} does not work with pipeline parallelism (parallel.pp = {layout.pp}): {remedy}")
    if parallel.pipeline_schedule == "zero-bubble" and not pipeline_averages_gradients(trainer.world, parallel):
        raise ConfigError(
            "parallel.pipeline_schedule = zero-bubble does not work with fsdp, which cannot split backward passes: use "
            "interleaved or 1f1b, or replicate (dp_replicate)"
        )


def check_delayed_fp8(trainer: Any) -> None:
    """Raise for settings that do not work with `fp8_recipe = delayed`, whose blocks are hand-written."""
    train, size = trainer.config.train, trainer.world.size
    if train.fp8_recipe != "delayed":
        return
    compiles_blocks = (train.compile_scope, train.compile_backend, train.compile_mode) == (
        "block",
        "inductor",
        "default",
    )
    conflicts = {
        f"{size} processes": size > 1,
        f"train.precision = {train.precision}": train.precision != "bf16",
        f"train.recompute = {train.recompute}": train.recompute != "none",
        "other train.compile settings than the defaults": not compiles_blocks,
    }
    remedies = {f"{size} processes": "use 1 process", f"train.precision = {train.precision}": "use bf16"}
    for name in (name for name, is_set in conflicts.items() if is_set):
        remedy = remedies.get(name, "remove it")
        raise ConfigError(f"train.fp8_recipe = delayed does not work with {name}: {remedy}, or omit fp8_recipe")


def check_metric(trainer: Any) -> None:
    """Raise if it is already known that no evaluation will produce the best-model metric."""
    config = trainer.config
    validation, checkpoint, metric = config.validation, config.checkpoint, config.checkpoint.metric
    compared = checkpoint.best is not None or checkpoint.when_best or config.early_stopping.patience is not None
    evaluates = validation.every is not None or validation.each_epoch or checkpoint.evaluate
    are_builtin = [
        type(callback).__module__.partition(".")[0] == "whimbrel"
        for callback in trainer.callbacks.handling("on_evaluate")
    ]
    metrics_are_known = (
        not overrides(trainer, "evaluate", "_eval_loop")
        and trainer.compute_metrics is None
        and trainer.objective is None
        and all(are_builtin)
    )
    if not metrics_are_known or not (compared or (evaluates and metric != "loss")):
        return
    datasets = trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {}
    available = [f"eval_{name}_loss" for name in datasets] or ["eval_loss"]
    if not has_metric(available, metric):
        raise ConfigError(
            f"best_model_metric (checkpoint.metric) = {metric!r}: expected one of the evaluation metrics "
            f"({', '.join(available)}); pass compute_metrics, or override evaluate"
        )
