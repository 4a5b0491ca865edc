"""`transformers` arguments that differ here: translated, accepted if they match what the trainer does anyway, or
rejected with an error that names the alternative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from whimbrel.base.errors import ConfigError
from whimbrel.config import suggest

__all__ = ["CheckedNames", "HELD", "Held", "TRAINER_ELSEWHERE", "TRANSLATED", "respelled"]


class Held(NamedTuple):
    """An argument without a counterpart: the values that match what the trainer does anyway (the transformers default
    first), and the hint for any other value.
    """

    values: tuple[Any, ...]
    hint: str


def _precision(kind: str) -> Callable[[Any], dict[str, Any]]:
    return lambda on: {"mixed_precision": kind} if on else {}


TRANSLATED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "bf16": _precision("bf16"),
    "fp16": _precision("fp16"),
    "greater_is_better": lambda value: {"best_model_greater_is_better": value},
    "ignore_data_skip": lambda on: {"resume_skip": ("dataset",)} if on else {},
    "load_best_model_at_end": lambda value: {"preserve_best_model": value},
    "metric_for_best_model": lambda name: {} if name is None else {"best_model_metric": name},
    "tf32": lambda on: {} if on is None else {"float32_matmul_precision": "high" if on else "highest"},
    "warmup_ratio": lambda share: {"warmup_steps": share} if share else {},
}
"""Other names for our arguments."""

_NO_HUB = "upload the directory that save_model writes with huggingface_hub"
_ONE_PROCESS = "leave it out: the trainer runs in one process"
_OPTIMIZER = "pass optimizers=(OptimConfig(name=NAME, ...), None) to the trainer"
_SCRIPT = "use a flag in your own script: it decides whether to call train(), evaluate() or predict()"
_SHARDING = "leave it out: the trainer uses one device"
_TRACKER = "pass callbacks=[TrackerCallback('trackio', project=...)] to the trainer"

HELD: dict[str, Held] = {
    "accelerator_config": Held((None,), _ONE_PROCESS),
    "auto_find_batch_size": Held((False,), "use per_device_train_batch_size; `whimbrel train` finds it automatically"),
    "average_tokens_across_devices": Held((True, False), _ONE_PROCESS),
    "batch_eval_metrics": Held((False,), "use compute_metrics over all batches, with preprocess_logits_for_metrics"),
    "bf16_full_eval": Held((False,), "use mixed_precision='bf16', or model.to(torch.bfloat16)"),
    "data_parallel": Held((None,), _ONE_PROCESS),
    "dataloader_in_order": Held((True,), "leave it out: batches keep their order, so that a resume is exact"),
    "dataloader_multiprocessing_context": Held((None,), "use a DataLoader of your own as train_dataset"),
    "dataloader_persistent_workers": Held((False,), "use a DataLoader of your own as train_dataset"),
    "ddp_backend": Held((None,), _ONE_PROCESS),
    "ddp_broadcast_buffers": Held((None,), _ONE_PROCESS),
    "ddp_bucket_cap_mb": Held((None,), _ONE_PROCESS),
    "ddp_find_unused_parameters": Held((None, False), _ONE_PROCESS),
    "ddp_static_graph": Held((None,), _ONE_PROCESS),
    "ddp_timeout": Held((1800,), _ONE_PROCESS),
    "debug": Held(("", []), "use detect_anomaly=True to find the operation that produces a NaN"),
    "deepspeed": Held((None,), _SHARDING),
    "do_eval": Held((False,), _SCRIPT),
    "do_predict": Held((False,), _SCRIPT),
    "do_train": Held((False,), _SCRIPT),
    "enable_jit_checkpoint": Held((False, True), "leave it out: SIGTERM always saves"),
    "eval_accumulation_steps": Held((None, 1), "leave it out: predictions are moved to the CPU after each batch"),
    "eval_do_concat_batches": Held((True,), "override evaluate"),
    "eval_on_start": Held((False,), "call trainer.evaluate() before trainer.train()"),
    "eval_use_gather_object": Held((False,), _ONE_PROCESS),
    "evaluation_strategy": Held((), "use eval_strategy"),
    "fp16_full_eval": Held((False,), "use mixed_precision='fp16', or model.half()"),
    "fsdp": Held((None, "", []), _SHARDING),
    "fsdp_config": Held((None,), _SHARDING),
    "gradient_checkpointing_kwargs": Held(
        (None, {}, {"use_reentrant": False}), "use recompute='full' or 'selective'; it is never reentrant"
    ),
    "group_by_length": Held((False,), "use a DataLoader of your own as train_dataset, with such a sampler"),
    "hub_always_push": Held((False,), _NO_HUB),
    "hub_model_id": Held((None,), _NO_HUB),
    "hub_private_repo": Held((None, False), _NO_HUB),
    "hub_revision": Held((None,), _NO_HUB),
    "hub_strategy": Held(("every_save",), _NO_HUB),
    "hub_token": Held((None,), _NO_HUB),
    "include_for_metrics": Held(([], ()), "override prediction_step and add them to the predictions"),
    "include_inputs_for_metrics": Held((False,), "override prediction_step and add them to the predictions"),
    "include_num_input_tokens_seen": Held(
        ("no", False), "use trainer.state.num_input_tokens_seen, which is always counted"
    ),
    "include_tokens_per_second": Held((False,), "use an on_train_metrics callback, which gets tokens and seconds"),
    "jit_mode_eval": Held((False,), "use torch_compile=True"),
    "label_smoothing_factor": Held((0.0,), "use compute_loss_func with torch's label_smoothing"),
    "length_column_name": Held(("length",), "use a DataLoader of your own as train_dataset, with such a sampler"),
    "liger_kernel_config": Held((None,), "use a model to which liger_kernel was applied"),
    "local_rank": Held((-1, 0), _ONE_PROCESS),
    "log_level": Held(("passive",), "use logging.getLogger('whimbrel').setLevel(...)"),
    "log_level_replica": Held(("warning",), _ONE_PROCESS),
    "log_on_each_node": Held((True, False), _ONE_PROCESS),
    "logging_nan_inf_filter": Held((True,), "use on_nonfinite: non-finite steps never enter the logged loss"),
    "neftune_noise_alpha": Held((None,), "use a forward hook on the model's embedding"),
    "no_cuda": Held((), "use use_cpu"),
    "optim": Held(("adamw_torch_fused", "adamw_torch"), "pass optimizers=(NAME, None) to the trainer"),
    "optim_args": Held((None,), _OPTIMIZER),
    "optim_target_modules": Held((None,), "pass optimizers=(OptimConfig(name=NAME, groups=(GroupConfig(...),)), None)"),
    "parallelism_config": Held((None,), _ONE_PROCESS),
    "prediction_loss_only": Held((False,), "leave compute_metrics out: evaluate() then returns only the loss"),
    "project": Held(("huggingface",), _TRACKER),
    "push_to_hub": Held((False,), _NO_HUB),
    "restore_callback_states_from_checkpoint": Held(
        (False, True), "leave it out: callbacks with a state_dict are restored unless resume_skip=('callbacks',)"
    ),
    "save_on_each_node": Held((False, True), _ONE_PROCESS),
    "save_only_model": Held((False,), "use save_strategy='no' and save_model, or an on_save callback"),
    "save_safetensors": Held((True,), "leave it out: weights are always written as safetensors"),
    "skip_memory_metrics": Held((True,), "pass callbacks=[MemoryCallback()] to the trainer"),
    "torch_empty_cache_steps": Held((None,), "use an on_step_end callback that calls torch.cuda.empty_cache()"),
    "trackio_bucket_id": Held((None,), _TRACKER),
    "trackio_space_id": Held((None,), _TRACKER),
    "trackio_static_space_id": Held((None,), _TRACKER),
    "use_cache": Held((False,), "use model.config.use_cache"),
    "use_ipex": Held((False,), "use torch_compile=True"),
    "use_liger_kernel": Held((False,), "use a model to which liger_kernel was applied"),
    "use_mps_device": Held((), "leave it out: the best device is chosen automatically, unless use_cpu=True"),
}
"""All other transformers arguments, including those of earlier versions."""

TRAINER_ELSEWHERE = {
    "peft_config": "the model that get_peft_model returns as model",
    "tokenizer": "processing_class",
}
"""Arguments of other trainers, and what to pass here instead."""


def respelled(owner: str, name: str, value: Any) -> dict[str, Any] | None:
    """Translate a `transformers` argument into ours; empty if its value matches what the trainer does anyway.

    None if it is not a `transformers` argument.
    """
    if name in TRANSLATED:
        return TRANSLATED[name](value)
    if name not in HELD:
        return None
    held, plain = HELD[name], value.value if isinstance(value, Enum) else value
    if any(plain == one and isinstance(plain, bool) == isinstance(one, bool) for one in held.values):
        return {}
    raise ConfigError(f"{owner} has no argument '{name}': {held.hint} (got {plain!r})")


class CheckedNames(type):
    """Metaclass of classes that accept `transformers` arguments and reject unknown ones with a hint."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        """Construct, once every name is known."""
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        given = {name: value for name, value in named.items() if name in known}
        for name in (name for name in named if name not in known):
            found = respelled(cls.__name__, name, named[name])
            if found is None or not found.keys() <= set(known):
                close = suggest(name, known)
                hint = f"did you mean '{close}'?" if close else "leave it out (docs/trainer.md lists all arguments)"
                raise ConfigError(f"{cls.__name__} has no argument '{name}': {hint}")
            for own, value in found.items():
                if given.setdefault(own, value) != value:
                    raise ConfigError(
                        f"{name} = {named[name]!r} and {own} = {given[own]!r} contradict each other: leave one out"
                    )
        return super().__call__(*args, **given)
