"""Compatibility with `transformers.Trainer`: its arguments that differ here, and its methods that may be overridden.

Arguments are translated, accepted if they match what the trainer does anyway, or rejected with an alternative.
Overriding a method that our loop never calls is rejected with an alternative, too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from whimbrel.base.errors import ConfigError
from whimbrel.config import suggest
from whimbrel.train.parallel_args import PARALLEL_ARGUMENTS, merge_settings

__all__ = [
    "HF_ALTERNATIVES",
    "HF_TRANSLATED",
    "HYPERPARAMETER_SEARCH",
    "SUPPORTED_OVERRIDES",
    "TRAINER_ALTERNATIVES",
    "UNSUPPORTED_OVERRIDES",
    "Alternative",
    "CheckedArguments",
    "ProcessFlag",
    "accepted_kwargs",
    "check_overrides",
    "missing_attribute",
    "overrides",
    "translate_argument",
]

# Arguments


class Alternative(NamedTuple):
    """An unsupported argument: the values that are accepted because they match our behavior (the transformers default
    first), and the hint for any other value.
    """

    values: tuple[Any, ...]
    hint: str


def _parallel(translate: Callable[[Any], dict[str, Any]], value: Any) -> dict[str, Any]:
    settings = translate(value)
    return {"parallel": settings} if settings else {}


HF_TRANSLATED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "bf16": lambda on: {"mixed_precision": "bf16"} if on else {},
    "fp16": lambda on: {"mixed_precision": "fp16"} if on else {},
    "greater_is_better": lambda value: {"best_model_greater_is_better": value},
    "ignore_data_skip": lambda on: {"resume_skip": ("dataset",)} if on else {},
    "load_best_model_at_end": lambda value: {"preserve_best_model": value},
    "metric_for_best_model": lambda name: {} if name is None else {"best_model_metric": name},
    "tf32": lambda on: {} if on is None else {"float32_matmul_precision": "high" if on else "highest"},
    "warmup_ratio": lambda ratio: {"warmup_steps": ratio} if ratio else {},
    **{name: partial(_parallel, translate) for name, translate in PARALLEL_ARGUMENTS.items()},
}
"""Other names for our arguments."""

_HUB = "upload the run with `whimbrel push RUN owner/name`"
_NO_OVERRIDE = "remove the override and use parallel={...} (docs/distributed.md)"
_PARALLEL = "use parallel={...} (docs/distributed.md), or remove it"
_OPTIMIZER = "pass optimizers=(OptimConfig(name=NAME, ...), None) to the trainer"
_SCRIPT = "your script decides whether to call train(), evaluate() or predict(); use your own flag"
_TRACKER = "pass callbacks=[TrackerCallback('trackio', project=...)] to the trainer"

HF_ALTERNATIVES: dict[str, Alternative] = {
    "accelerator_config": Alternative((None,), _PARALLEL),
    "auto_find_batch_size": Alternative(
        (False,), "use per_device_train_batch_size; `whimbrel train` finds it automatically"
    ),
    "batch_eval_metrics": Alternative(
        (False,), "use compute_metrics over all batches, with preprocess_logits_for_metrics"
    ),
    "bf16_full_eval": Alternative((False,), "use mixed_precision='bf16', or model.to(torch.bfloat16)"),
    "data_parallel": Alternative((None,), _PARALLEL),
    "dataloader_in_order": Alternative(
        (True,), "batches always keep their order, so that a resume is exact; remove it"
    ),
    "dataloader_multiprocessing_context": Alternative((None,), "pass your own DataLoader as train_dataset"),
    "dataloader_persistent_workers": Alternative((False,), "pass your own DataLoader as train_dataset"),
    "ddp_backend": Alternative((None,), "GPUs use NCCL and CPUs gloo; remove it"),
    "ddp_broadcast_buffers": Alternative(
        (None, True), "buffers of rank 0 are broadcast, except constant tables; remove it"
    ),
    "ddp_bucket_cap_mb": Alternative((None,), "DDP uses buckets of 25 MiB; remove it"),
    "ddp_find_unused_parameters": Alternative(
        (None, False), "freeze unused parameters, or use parallel={'strategy': 'fsdp'}"
    ),
    "ddp_static_graph": Alternative((None, False), "the graph may change; remove it"),
    "debug": Alternative(("", []), "use detect_anomaly=True to find the operation that produces a NaN"),
    "deepspeed": Alternative((None,), "use parallel={'strategy': 'fsdp'}, which shards like ZeRO-3"),
    "do_eval": Alternative((False,), _SCRIPT),
    "do_predict": Alternative((False,), _SCRIPT),
    "do_train": Alternative((False,), _SCRIPT),
    "enable_jit_checkpoint": Alternative((False, True), "SIGTERM always saves; remove it"),
    "eval_accumulation_steps": Alternative((None, 1), "predictions are moved to the CPU after each batch; remove it"),
    "eval_do_concat_batches": Alternative((True,), "override evaluate"),
    "eval_on_start": Alternative((False,), "call trainer.evaluate() before trainer.train()"),
    "eval_use_gather_object": Alternative((False,), "predictions of any kind are gathered; remove it"),
    "evaluation_strategy": Alternative((), "use eval_strategy"),
    "fp16_full_eval": Alternative((False,), "use mixed_precision='fp16', or model.half()"),
    "gradient_checkpointing_kwargs": Alternative(
        (None, {}, {"use_reentrant": False}), "use recompute='full' or 'selective'; it is never reentrant"
    ),
    "group_by_length": Alternative((False,), "pass your own DataLoader with a length-grouped sampler as train_dataset"),
    "hub_always_push": Alternative((False,), _HUB),
    "hub_model_id": Alternative((None,), _HUB),
    "hub_private_repo": Alternative((None, False), _HUB),
    "hub_revision": Alternative((None,), _HUB),
    "hub_strategy": Alternative(("every_save",), _HUB),
    "hub_token": Alternative((None,), _HUB),
    "include_for_metrics": Alternative(([], ()), "override prediction_step and add them to the predictions"),
    "include_inputs_for_metrics": Alternative((False,), "override prediction_step and add them to the predictions"),
    "include_num_input_tokens_seen": Alternative(
        ("no", False), "use trainer.state.num_input_tokens_seen, which is always counted"
    ),
    "include_tokens_per_second": Alternative(
        (False,), "use an on_train_metrics callback, which gets tokens and seconds"
    ),
    "jit_mode_eval": Alternative((False,), "use torch_compile=True"),
    "label_smoothing_factor": Alternative((0.0,), "use compute_loss_func with torch's label_smoothing"),
    "length_column_name": Alternative(
        ("length",), "pass your own DataLoader with a length-grouped sampler as train_dataset"
    ),
    "liger_kernel_config": Alternative((None,), "apply liger_kernel to the model before passing it"),
    "log_level": Alternative(("passive",), "use logging.getLogger('whimbrel').setLevel(...)"),
    "log_level_replica": Alternative(("warning",), "ranks other than 0 log warnings; remove it"),
    "log_on_each_node": Alternative((True, False), "rank 0 logs; remove it"),
    "logging_nan_inf_filter": Alternative((True,), "use on_nonfinite: non-finite steps never enter the logged loss"),
    "neftune_noise_alpha": Alternative((None,), "use a forward hook on the model's embedding"),
    "no_cuda": Alternative((), "use use_cpu"),
    "optim": Alternative(("adamw_torch_fused", "adamw_torch"), "pass optimizers=(NAME, None) to the trainer"),
    "optim_args": Alternative((None,), _OPTIMIZER),
    "optim_target_modules": Alternative(
        (None,), "pass optimizers=(OptimConfig(name=NAME, groups=(GroupConfig(...),)), None)"
    ),
    "prediction_loss_only": Alternative((False,), "pass no compute_metrics: evaluate() then returns only the loss"),
    "project": Alternative(("huggingface",), _TRACKER),
    "push_to_hub": Alternative((False,), _HUB),
    "restore_callback_states_from_checkpoint": Alternative(
        (False, True), "callbacks with a state_dict are restored unless resume_skip=('callbacks',); remove it"
    ),
    "save_on_each_node": Alternative((False,), "checkpoints need a directory that all machines share; remove it"),
    "save_only_model": Alternative((False,), "use save_strategy='no' and save_model, or an on_save callback"),
    "save_safetensors": Alternative((True,), "weights are always written as safetensors; remove it"),
    "skip_memory_metrics": Alternative((True,), "pass callbacks=[MemoryCallback()] to the trainer"),
    "torch_empty_cache_steps": Alternative((None,), "use an on_step_end callback that calls torch.cuda.empty_cache()"),
    "trackio_bucket_id": Alternative((None,), _TRACKER),
    "trackio_space_id": Alternative((None,), _TRACKER),
    "trackio_static_space_id": Alternative((None,), _TRACKER),
    "use_cache": Alternative((False,), "use model.config.use_cache"),
    "use_ipex": Alternative((False,), "use torch_compile=True"),
    "use_liger_kernel": Alternative((False,), "apply liger_kernel to the model before passing it"),
    "use_mps_device": Alternative((), "the best device is chosen automatically, unless use_cpu=True; remove it"),
}
"""All other transformers arguments, including those of earlier versions."""

TRAINER_ALTERNATIVES = {
    "peft_config": "model=get_peft_model(model, peft_config)",
    "tokenizer": "processing_class",
}
"""Arguments of other trainers, and what to pass here instead."""


def translate_argument(name: str, value: Any) -> dict[str, Any] | None:
    """Translate a `transformers` argument into ours; empty if its value matches what the trainer does anyway.

    None if it is not a `transformers` argument.
    """
    if name in HF_TRANSLATED:
        return HF_TRANSLATED[name](value)
    if name not in HF_ALTERNATIVES:
        return None
    alternative, raw_value = HF_ALTERNATIVES[name], value.value if isinstance(value, Enum) else value
    for accepted in alternative.values:
        if raw_value == accepted and isinstance(raw_value, bool) == isinstance(accepted, bool):
            return {}
    raise ConfigError(f"unsupported {name}={raw_value!r}: {alternative.hint}")


class CheckedArguments(type):
    """Metaclass of classes that accept `transformers` arguments and reject unknown ones with a hint."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        arguments = {name: value for name, value in kwargs.items() if name in known}
        for name in (name for name in kwargs if name not in known):
            translated = translate_argument(name, kwargs[name])
            if translated is None or not translated.keys() <= set(known):
                close = suggest(name, known)
                hint = f"did you mean '{close}'?" if close else "remove it (docs/trainer.md lists all arguments)"
                raise ConfigError(f"{cls.__name__} has no argument '{name}': {hint}")
            for our_name, value in translated.items():
                if our_name == "parallel":
                    arguments[our_name] = merge_settings(arguments.get(our_name), value, name)
                elif arguments.setdefault(our_name, value) != value:
                    raise ConfigError(
                        f"{name} = {kwargs[name]!r} and {our_name} = {arguments[our_name]!r} conflict: pass only one"
                    )
        return super().__call__(*args, **arguments)


# Overridden methods

SUPPORTED_OVERRIDES = frozenset({
    "__init__", "add_callback", "call_model_init", "compute_loss", "compute_metrics", "create_optimizer",
    "create_optimizer_and_scheduler", "create_scheduler", "evaluate", "get_eval_dataloader", "get_test_dataloader",
    "get_train_dataloader", "log", "pop_callback", "predict", "prediction_step", "preprocess_logits_for_metrics",
    "remove_callback", "save_model", "train", "training_step",
})  # fmt: skip
"""Methods that our training loop calls too, with the same arguments."""

_BATCHES = "shape the batches in data_collator, or override get_train_dataloader and get_eval_dataloader"
_CHECKPOINT = "override get_state_components to save more, or use an on_save callback"
_CLIP = "set max_grad_norm, or use an on_pre_optimizer_step callback"
_COLUMNS = "set remove_unused_columns=False, or drop columns from the dataset before passing it"
_EVALUATION = "override prediction_step or evaluate, or pass compute_metrics"
_OVERRIDE_LOOP = "override training_step or compute_loss, or use a callback"
_OVERRIDE_OPTIMIZER = "override create_optimizer, or pass optimizers=(OptimConfig(...), None)"
_MIXED_PRECISION = "set mixed_precision"
_PROCESS = "read the attribute is_world_process_zero"
_RESUME = "override get_state_components, or use train(resume_from_checkpoint=...)"
HYPERPARAMETER_SEARCH = "construct and train one Trainer for each trial"
_STATE = "read trainer.state, or use a callback"
_METRICS = "override log, or use an on_log or on_evaluate callback"
_MODEL = "wrap the model before passing it, or override call_model_init"

UNSUPPORTED_OVERRIDES = {
    **dict.fromkeys(
        ("_get_collator_with_removed_columns", "_get_dataloader", "_get_eval_sampler", "_get_train_sampler",
         "_prepare_input", "_prepare_inputs", "get_batch_samples", "num_examples"),
        _BATCHES,
    ),
    **dict.fromkeys(
        ("_remove_unused_columns", "_set_signature_columns_if_needed"), _COLUMNS
    ),
    **dict.fromkeys(
        ("_save", "_save_checkpoint", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler", "save_state"),
        _CHECKPOINT,
    ),
    **dict.fromkeys(("_clip_grad_norm", "_get_grad_norm", "_has_mixed_mesh_grads", "_mixed_mesh_grad_norm"), _CLIP),
    **dict.fromkeys(
        ("_build_accelerator_args", "_prepare_context_parallel_inputs", "_sync_replicated_trainable_parameters",
         "create_accelerator_and_postprocess", "get_cp_size", "get_sp_size", "get_tp_size"),
        _NO_OVERRIDE,
    ),
    **dict.fromkeys(
        ("_determine_best_metric", "_evaluate", "evaluation_loop", "prediction_loop"), _EVALUATION
    ),
    **dict.fromkeys(
        ("_finish_current_push", "_push_from_checkpoint", "create_model_card", "init_hf_repo", "push_to_hub"), _HUB
    ),
    **dict.fromkeys(
        ("_finalize_training", "_get_num_items_in_batch", "_init_training_state", "_inner_training_loop",
         "_maybe_log_save_evaluate", "_prepare_for_training", "_run_epoch", "_update_auto_batch_size", "end",
         "get_total_train_batch_size", "set_initial_training_values"),
        _OVERRIDE_LOOP,
    ),
    **dict.fromkeys(
        ("_get_learning_rate", "get_decay_parameter_names", "get_learning_rates", "get_optimizer_cls_and_kwargs",
         "get_optimizer_group"),
        _OVERRIDE_OPTIMIZER,
    ),
    **dict.fromkeys(("autocast_smart_context_manager", "compute_loss_context_manager"), _MIXED_PRECISION),
    **dict.fromkeys(("is_local_process_zero", "is_world_process_zero"), _PROCESS),
    **dict.fromkeys(
        ("_issue_warnings_after_load", "_load_best_model", "_load_callback_state", "_load_from_checkpoint",
         "_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler"),
        _RESUME,
    ),
    **dict.fromkeys(
        ("_get_output_dir", "_hp_search_setup", "_report_to_hp_search", "_tune_save_checkpoint",
         "hyperparameter_search"),
        HYPERPARAMETER_SEARCH,
    ),
    **dict.fromkeys(
        ("_track_num_input_tokens", "floating_point_ops", "get_num_trainable_parameters", "store_flos"), _STATE
    ),
    **dict.fromkeys(("log_metrics", "metrics_format", "save_metrics"), _METRICS),
    **dict.fromkeys(("_move_model_to_device", "_wrap_model"), _MODEL),
    "_validate_args": "check in __init__, after super().__init__(...)",
}  # fmt: skip
"""Methods that our training loop never calls, and what to do instead of overriding them."""


class ProcessFlag(int):
    """A callable bool: `is_world_process_zero` is an attribute here, a method in transformers."""

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


def check_overrides(trainer: object) -> None:
    """Raise if the trainer's class or one of its attributes overrides a method that is never called."""
    for name in (name for name in UNSUPPORTED_OVERRIDES if name in _overridden(trainer)):
        raise ConfigError(f"{type(trainer).__name__}.{name} would never be called: {UNSUPPORTED_OVERRIDES[name]}")


def overrides(trainer: object, *names: str) -> bool:
    """Whether a subclass, or an attribute of `trainer` itself, overrides one of the methods `names`."""
    overridden = _overridden(trainer)
    return any(name in overridden for name in names)


def missing_attribute(trainer: object, name: str) -> AttributeError:
    """The error for a missing attribute, with a hint if `transformers.Trainer` has it."""
    hint = f": {UNSUPPORTED_OVERRIDES[name]}" if name in UNSUPPORTED_OVERRIDES else ""
    return AttributeError(f"'{type(trainer).__name__}' object has no attribute '{name}'{hint}")


def _overridden(trainer: object) -> set[str]:
    """Names defined by subclasses outside this package, and methods assigned on the instance."""
    assigned = {name for name, value in vars(trainer).items() if name in _METHODS and inspect.isroutine(value)}
    foreign = [base for base in type(trainer).__mro__ if base.__module__.partition(".")[0] not in _OURS]
    return assigned.union(*(vars(base) for base in foreign))


_METHODS = UNSUPPORTED_OVERRIDES.keys() | SUPPORTED_OVERRIDES
_OURS = ("whimbrel", "builtins")


def accepted_kwargs(method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments in `kwargs` that an override accepts: signatures vary between transformers versions."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}
