"""Methods of `transformers.Trainer` that a subclass may override, and alternatives to overriding the others."""

from __future__ import annotations

import inspect

from whimbrel.base.errors import ConfigError

__all__ = ["HONORED", "REFUSED", "check_overrides", "missing_method", "overrides"]

HONORED = frozenset({
    "__init__", "add_callback", "call_model_init", "compute_loss", "compute_metrics", "create_optimizer",
    "create_optimizer_and_scheduler", "create_scheduler", "evaluate", "get_eval_dataloader", "get_test_dataloader",
    "get_train_dataloader", "log", "pop_callback", "predict", "prediction_step", "preprocess_logits_for_metrics",
    "remove_callback", "save_model", "train", "training_step",
})  # fmt: skip
"""Methods that our training loop calls too, with the same arguments."""

_BATCHES = "shape the batches in data_collator, or override get_train_dataloader and get_eval_dataloader"
_CHECKPOINT = "override get_state_components to save more, or use an on_save callback"
_CLIP = "set max_grad_norm, or use an on_pre_optimizer_step callback"
_COLUMNS = "set remove_unused_columns=False, or drop columns from the dataset before it is given"
_DEVICE = "this trainer runs on one device: leave it out"
_EVALUATION = "override prediction_step or evaluate, or give compute_metrics"
_HUB = "upload the directory that save_model writes with huggingface_hub"
_LOOP = "override training_step or compute_loss, or use a callback"
_OPTIMIZER = "override create_optimizer, or give optimizers=(OptimConfig(...), None)"
_PRECISION = "set mixed_precision"
_PROCESS = "read the attribute is_world_process_zero"
_RESUME = "override get_state_components, or use train(resume_from_checkpoint=...)"
_SEARCH = "construct and train one Trainer for each trial"
_STATE = "read trainer.state, or use a callback"
_METRICS = "override log, or use an on_log or on_evaluate callback"
_MODEL = "wrap the model before it is given, or override call_model_init"

REFUSED = {
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
        _DEVICE,
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
        _LOOP,
    ),
    **dict.fromkeys(
        ("_get_learning_rate", "get_decay_parameter_names", "get_learning_rates", "get_optimizer_cls_and_kwargs",
         "get_optimizer_group"),
        _OPTIMIZER,
    ),
    **dict.fromkeys(("autocast_smart_context_manager", "compute_loss_context_manager"), _PRECISION),
    **dict.fromkeys(("is_local_process_zero", "is_world_process_zero"), _PROCESS),
    **dict.fromkeys(
        ("_issue_warnings_after_load", "_load_best_model", "_load_callback_state", "_load_from_checkpoint",
         "_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler"),
        _RESUME,
    ),
    **dict.fromkeys(
        ("_get_output_dir", "_hp_search_setup", "_report_to_hp_search", "_tune_save_checkpoint",
         "hyperparameter_search"),
        _SEARCH,
    ),
    **dict.fromkeys(
        ("_track_num_input_tokens", "floating_point_ops", "get_num_trainable_parameters", "store_flos"), _STATE
    ),
    **dict.fromkeys(("log_metrics", "metrics_format", "save_metrics"), _METRICS),
    **dict.fromkeys(("_move_model_to_device", "_wrap_model"), _MODEL),
    "_validate_args": "check in __init__, after super().__init__(...)",
}  # fmt: skip
"""Methods that our training loop never calls, and what to do instead of overriding them."""


def check_overrides(trainer: object) -> None:
    """Raise if the trainer's class or one of its attributes overrides a method that is never called."""
    for name in (name for name in REFUSED if name in _given(trainer)):
        raise ConfigError(f"{type(trainer).__name__}.{name} would never be called: {REFUSED[name]}")


def overrides(trainer: object, *names: str) -> bool:
    """Whether a subclass, or an attribute of `trainer` itself, overrides one of the methods `names`."""
    given = _given(trainer)
    return any(name in given for name in names)


def missing_method(trainer: object, name: str) -> AttributeError:
    """The error for a missing attribute, with a hint if `transformers.Trainer` has it."""
    hint = f": {REFUSED[name]}" if name in REFUSED else ""
    return AttributeError(f"'{type(trainer).__name__}' object has no attribute '{name}'{hint}")


def _given(trainer: object) -> set[str]:
    """Names defined by classes of `trainer` outside this package, and methods assigned to the instance."""
    assigned = {name for name, value in vars(trainer).items() if name in _METHODS and inspect.isroutine(value)}
    foreign = [base for base in type(trainer).__mro__ if base.__module__.partition(".")[0] not in _OURS]
    return assigned.union(*(vars(base) for base in foreign))


_METHODS = REFUSED.keys() | HONORED
_OURS = ("whimbrel", "builtins")
