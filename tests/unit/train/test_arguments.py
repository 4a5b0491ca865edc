"""Training arguments: transformers names and defaults, conversion and checks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import ParallelConfig
from whimbrel.models import GPTConfig
from whimbrel.train.arguments import (
    BaseTrainingArguments,
    MinimalTrainingArguments,
    TrainingArguments,
    to_config,
)
from whimbrel.train.build import no_tokenizer_parallelism
from whimbrel.train.hf_compat import HF_ALTERNATIVES, HF_TRANSLATED

CLASSES = [MinimalTrainingArguments, BaseTrainingArguments, TrainingArguments]


def hf_fields() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    return {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}


def hf_names() -> list[str]:
    try:
        import transformers  # noqa: F401
    except ImportError:
        return []
    return sorted(hf_fields())


def test_names_and_defaults_are_those_of_transformers() -> None:
    theirs = hf_fields()
    ours = {field.name: field.default for field in dataclasses.fields(MinimalTrainingArguments)}
    assert set(ours) - set(theirs) <= {"overwrite_output_dir", "logging_dir"}  # which later versions dropped
    assert {name: value for name, value in ours.items() if name in theirs and theirs[name] != value} == {}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"eval_strategy": "steps", "save_strategy": "best", "dataloader_num_workers": 2, "warmup_steps": 0.1},
        {"torch_compile_mode": "max-autotune", "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}},
    ],
)
def test_the_dict_builds_the_arguments_of_transformers(cls: type, given: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    known = hf_fields()
    values = cls(output_dir=str(tmp_path), use_cpu=True, **given).to_dict()
    theirs = transformers.TrainingArguments(**{name: value for name, value in values.items() if name in known})
    assert theirs.learning_rate == 5e-5
    assert all(getattr(theirs, name) == value for name, value in given.items())


def test_enums_of_transformers_are_accepted() -> None:
    utils = pytest.importorskip("transformers.trainer_utils")
    args = TrainingArguments(
        eval_strategy=utils.IntervalStrategy.EPOCH,
        save_strategy=utils.SaveStrategy.BEST,
        lr_scheduler_type=utils.SchedulerType.COSINE,
    )
    assert (args.eval_strategy, args.save_strategy, args.lr_scheduler_type) == ("epoch", "best", "cosine")
    assert args.eval_strategy == utils.IntervalStrategy.EPOCH  # as its callbacks compare


def test_defaults_are_filled_and_given_values_remembered(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), eval_strategy="steps", dataloader_num_workers=3, torch_compile=True)
    assert re.fullmatch(rf"{tmp_path}/runs/\d{{16,}}_{re.escape(socket.gethostname())}", str(args.logging_dir))
    assert (args.lr_scheduler_kwargs, args.eval_steps, args.dataloader_prefetch_factor) == ({}, 500, 2)
    assert (args.torch_compile_backend, args.torch_compile_mode) == ("inductor", "default")
    open_names = ("logging_dir", "lr_scheduler_kwargs", "eval_steps", "dataloader_prefetch_factor")
    assert [args.to_dict()[name] for name in (*open_names, "torch_compile_backend", "torch_compile_mode")] == [None] * 6


def test_defaults_without_effect_are_not_filled_in() -> None:
    args = TrainingArguments()
    assert args.output_dir == "trainer_output"
    assert (args.dataloader_prefetch_factor, args.eval_steps) == (None, None)
    assert (args.torch_compile_backend, args.torch_compile_mode) == (None, None)


def test_a_compile_mode_enables_torch_compile() -> None:
    args = TrainingArguments(torch_compile_mode="reduce-overhead")
    assert (args.torch_compile, args.torch_compile_backend) == (True, "inductor")
    assert args.to_dict()["torch_compile"] is False


def test_check_revalidates_changed_arguments_and_keeps_logging_dir() -> None:
    args = TrainingArguments(dataloader_num_workers=2)
    folder = args.logging_dir
    args.dataloader_num_workers = 0
    args.check()
    assert (args.dataloader_prefetch_factor, args.logging_dir) == (None, folder)
    args.learning_rate = -1.0
    with pytest.raises(ConfigError, match="learning_rate"):
        args.check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_strategy": "step"}, "eval_strategy.*'steps'"),
        ({"save_strategy": 3}, "save_strategy.*no, steps, epoch, best"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size > 0, got 0"),
        ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size.*'8'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps > 0, got 0"),
        ({"num_train_epochs": 0}, "num_train_epochs > 0, got 0"),
        ({"max_steps": 0}, "max_steps > 0, got 0"),
        ({"max_steps": -2}, "max_steps > 0, got -2"),
        ({"max_eval_steps": -2}, "max_eval_steps > 0, got -2"),
        ({"max_grad_norm": -1.0}, "max_grad_norm > 0, got -1"),
        ({"learning_rate": float("nan")}, "learning_rate.*nan"),
        ({"learning_rate": -1.0}, "learning_rate.*-1"),
        ({"weight_decay": -1.0}, "weight_decay.*-1"),
        ({"adam_beta2": 1.0}, "adam_beta2.*1.0"),
        ({"adam_epsilon": -1.0}, "adam_epsilon.*-1"),
        ({"warmup_steps": -1}, "warmup_steps.*-1"),
        ({"logging_steps": 1.5}, "logging_steps .* fraction .* got 1.5"),
        ({"eval_strategy": "steps", "eval_steps": 0}, "eval_steps .* got 0"),
        ({"eval_delay": 5}, "eval_delay = 5.0 needs eval_steps or eval_strategy='epoch'"),
        ({"save_strategy": "best"}, "save_strategy = 'best' needs eval_strategy"),
        ({"save_total_limit": 0}, "save_total_limit > 0, got 0"),
        ({"seed": -1}, "expected seed .* got -1"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers >= 0, got -1"),
        ({"dataloader_prefetch_factor": 4}, "dataloader_prefetch_factor = 4 needs dataloader_num_workers"),
        ({"torch_compile_mode": "fastest"}, "torch_compile_mode.*'fastest'"),
        ({"compile_scope": "model"}, "compile_scope = 'model' needs torch_compile"),
        ({"dynamo_recompile_limit": 3}, "dynamo_recompile_limit = 3 needs torch_compile"),
        ({"lr_scheduler_kwargs": "{"}, "JSON for lr_scheduler_kwargs, got '{'"),
        ({"lr_scheduler_kwargs": [1]}, "dict .*lr_scheduler_kwargs, got \\[1\\]"),
        ({"default_dtype": "int8"}, "default_dtype.*float32, float64, bfloat16, float16"),
        ({"mixed_precision": "fp8"}, "mixed_precision.*no, bf16, fp16"),
        ({"preserve_n_best": 3}, "preserve_n_best = 3 needs preserve_best_model=True"),
        ({"preserve_best_model": True, "preserve_n_best": 0}, "preserve_n_best > 0, got 0"),
        ({"best_model_metric": ""}, "best_model_metric.* got ''"),
        ({"sdpa_backend": "flas"}, "sdpa_backend.*'flash'"),
        ({"sdpa_backend": ["math", "x"]}, "sdpa_backend.*'x'"),
        ({"sdpa_set_priority": True}, "sdpa_set_priority = True needs sdpa_backend"),
        ({"float32_matmul_precision": "low"}, "float32_matmul_precision.*highest, high, medium"),
        ({"fp8_recipe": "rowwise", "qat_recipe": "int4-weight-only"}, "fp8_recipe = rowwise and qat_recipe = "),
        ({"fp8_recipe": "rowise"}, "fp8_recipe.*'rowwise'"),
        ({"qat_recipe": "fp8"}, "qat_recipe.*int8-dynamic-act-int4-weight, int4-weight-only"),
        ({"qat_recipe": "float8-weight-only"}, "fp8_recipe instead"),
        ({"fp8_recipe": "rowwise", "fp8_dim_alignment": 0}, "fp8_dim_alignment > 0, got 0"),
        ({"fp8_dim_alignment": 32}, "fp8_dim_alignment = 32 needs fp8_recipe"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite.*stop, skip, rollback"),
        ({"recompute": "ful"}, "recompute.*'full'"),
        ({"projected_linears": True}, "projected_linears = True needs optimizer_in_backward"),
        ({"recompute": 1.5}, "recompute .* got 1.5"),
        ({"gradient_checkpointing": True, "recompute": "selective"}, "gradient_checkpointing .*'selective'"),
        ({"save_minutes": 0.0}, "save_minutes > 0, got 0"),
    ],
)
def test_invalid_values_raise_an_error_that_names_the_argument(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        TrainingArguments(**given)
    assert "\n" not in str(caught.value)


def test_other_forms_of_a_value_are_converted(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=tmp_path,  # type: ignore[arg-type]
        mixed_precision="no",
        default_dtype=torch.bfloat16,  # type: ignore[arg-type]
        sdpa_backend=[SDPBackend.FLASH_ATTENTION, "math"],  # type: ignore[arg-type]
        logging_steps=10.0,
        lr_scheduler_type="polynomial",
        lr_scheduler_kwargs='{"power": 2.0}',
        recompute=1,
    )
    assert (args.output_dir, args.mixed_precision, args.default_dtype) == (str(tmp_path), None, "bfloat16")
    assert (args.sdpa_backend, args.logging_steps, args.recompute) == (("flash", "math"), 10, 1.0)
    assert type(args.logging_steps) is int
    assert args.lr_scheduler_kwargs == {"power": 2.0}
    assert TrainingArguments(sdpa_backend=SDPBackend.MATH).sdpa_backend == "math"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metric", "given", "greater"),
    [("loss", None, False), ("eval_perplexity", None, False), ("accuracy", None, True), ("loss", True, True)],
)
def test_best_model_arguments_are_readable_by_their_transformers_names(
    metric: str, given: bool | None, greater: bool
) -> None:
    args = BaseTrainingArguments(
        best_model_metric=metric, best_model_greater_is_better=given, preserve_best_model=greater
    )
    assert (args.metric_for_best_model, args.greater_is_better, args.load_best_model_at_end) == (
        metric,
        greater,
        greater,
    )
    with pytest.raises(AttributeError):
        args.metric_for_best_model = "other"  # type: ignore[misc]


def test_to_json_string_round_trips() -> None:
    args = TrainingArguments(sdpa_backend=("flash",), eval_strategy="epoch")
    assert json.loads(args.to_json_string()) == args.to_dict() | {"sdpa_backend": ["flash"]}
    assert json.loads(GPTConfig(num_layers=3).to_json_string())["num_layers"] == 3


@pytest.mark.parametrize("before", [None, "true"])
def test_tokenizer_parallelism_is_disabled_only_with_workers(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    with no_tokenizer_parallelism(0):
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before
    with no_tokenizer_parallelism(2):
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"eval_steps": 10}, "eval_steps"),
        ({"save_strategy": "epoch", "save_steps": 10}, "save_steps"),
        ({"logging_strategy": "no", "logging_steps": 10}, "logging_steps"),
    ],
)
def test_steps_without_their_strategy_log_a_warning(
    given: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    TrainingArguments(output_dir="out", **given)
    assert f"{name} = 10 has no effect" in caplog.text


def test_integral_floats_are_converted_to_steps() -> None:
    assert TrainingArguments(output_dir="out", logging_steps=10.0).logging_steps == 10


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("learning_rat", 1.0, "TrainingArguments has no argument 'learning_rat': did you mean 'learning_rate'"),
        ("optim", "adafactor", r"unsupported optim='adafactor': pass optimizers=\(NAME, None\)"),
        ("push_to_hub", True, "unsupported push_to_hub=True: .* `whimbrel push"),
        ("evaluation_strategy", "steps", "unsupported evaluation_strategy='steps': use eval_strategy"),
        ("qqqqqqqqqqqq", 1, "has no argument 'qqqqqqqqqqqq': remove it"),
    ],
)
def test_unknown_arguments_raise_an_error_with_an_alternative(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(output_dir="out", **{name: value})


OTHER_VALUES: dict[str, Any] = {
    "accelerator_config": {"split_batches": True}, "ddp_broadcast_buffers": False, "debug": "underflow_overflow",
    "deepspeed": "config.json", "eval_accumulation_steps": 4,
    "gradient_checkpointing_kwargs": {"use_reentrant": True}, "hub_strategy": "end", "include_for_metrics": ["loss"],
    "include_num_input_tokens_seen": "all", "label_smoothing_factor": 0.1, "length_column_name": "size",
    "liger_kernel_config": {"rope": True}, "log_level": "debug", "log_level_replica": "debug",
    "neftune_noise_alpha": 5.0, "optim": "adafactor", "optim_args": "a=1", "project": "mine",
    "torch_empty_cache_steps": 4, "ddp_bucket_cap_mb": 25, "hub_token": "x", "hub_model_id": "x", "hub_revision": "x",
    "dataloader_multiprocessing_context": "spawn", "ddp_backend": "gloo", "optim_target_modules": ["q"],
    "trackio_space_id": "x", "trackio_bucket_id": "x", "trackio_static_space_id": "x",
}  # fmt: skip
"""Values other than the default, of arguments that are not switches."""
TRANSLATED_VALUES: dict[str, Any] = {
    "metric_for_best_model": "accuracy", "ddp_timeout": 60, "fsdp_config": {"cpu_offload": True},
    "parallelism_config": SimpleNamespace(dp_replicate_size=1, dp_shard_size=2, tp_size=1),
}  # fmt: skip
ACCEPTED_ONLY = ("average_tokens_across_devices", "local_rank")
"""Arguments that are checked, but change nothing."""


@pytest.mark.parametrize("name", hf_names())
def test_every_transformers_argument_is_accepted_or_rejected_with_a_hint(name: str) -> None:
    """A new version's argument is in none of the tables, and fails here."""
    ours = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert [name in ours, name in HF_TRANSLATED, name in HF_ALTERNATIVES].count(True) == 1
    if name in ours:
        return  # covered by test_arguments_to_config
    default = hf_fields()[name]
    if default is dataclasses.MISSING:
        default = []
    if name != "ddp_timeout":  # ours is shorter
        assert TrainingArguments(**{name: default}).to_dict() == TrainingArguments().to_dict()
    if name in ACCEPTED_ONLY:
        return
    if name in HF_TRANSLATED:
        value = TRANSLATED_VALUES.get(name, True)
        if name == "fsdp_config":
            value, name = "full_shard offload", "fsdp"
        assert TrainingArguments(**{name: value}).to_dict() != TrainingArguments().to_dict()
        return
    assert getattr(TrainingArguments(), name) == default  # for callbacks that read it
    if {True, False} <= {one for one in HF_ALTERNATIVES[name].values if isinstance(one, bool)}:
        return  # both mean the same here
    value = OTHER_VALUES.get(name, not default)
    with pytest.raises(
        ConfigError, match=f"unsupported {name}=.*: .*(apply|call|override|pass|remove|upload|use) "
    ) as refused:
        TrainingArguments(**{name: value})
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=f"unsupported {name}="):
        setattr(TrainingArguments(), name, value)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"ddp_timeout": 60}, {"timeout": 60.0}),
        ({"fsdp": "full_shard auto_wrap"}, {"strategy": "fsdp"}),
        ({"fsdp": ["shard_grad_op", "offload"]},
         {"strategy": "fsdp", "reshard_after_forward": False, "cpu_offload": True}),
        ({"fsdp": True, "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": False}},
         {"strategy": "fsdp", "reshard_after_forward": False}),
        ({"fsdp": "hybrid_shard", "ddp_timeout": 5}, {"strategy": "hsdp", "timeout": 5.0}),
        ({"parallelism_config": SimpleNamespace(dp_replicate_size=2, dp_shard_size=4, tp_size=1)},
         {"dp_replicate": 2, "dp_shard": 4}),
        ({"parallel": ParallelConfig(tp=2), "ddp_timeout": 7}, {"tp": 2, "timeout": 7.0}),
    ],
    ids=str,
)  # fmt: skip
def test_parallel_arguments_of_transformers_are_settings_of_parallel(
    given: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert to_config(TrainingArguments(**given)).parallel == ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fsdp": "half_shard"}, "unsupported fsdp='half_shard': use one of full_shard"),
        ({"fsdp": "offload"}, "unsupported fsdp='offload': pass 'full_shard' as well"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, r"unsupported fsdp_config=\{'version': 1\}"),
        ({"fsdp": True, "fsdp_config": {"use_orig_params": True}}, "unsupported fsdp_config="),
        ({"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}, "unsupported fsdp_config="),
        ({"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}}, "unsupported fsdp_config="),
        ({"fsdp": True, "parallel": {"strategy": "ddp"}}, "fsdp means parallel.strategy = 'fsdp', which conflicts"),
        ({"parallelism_config": SimpleNamespace(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=2)},
         "unsupported parallelism_config=cp_size > 1"),
        ({"local_rank": 3}, "unsupported local_rank=3"),
        ({"parallel": "fsdp"}, "expected a dict"),
        ({"parallel": {"stratgy": "fsdp"}}, "stratgy"),
        ({"parallel": {"tp": 0}}, "tp"),
    ],
    ids=str,
)  # fmt: skip
def test_parallel_arguments_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(**given)


def test_arguments_describe_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments(use_cpu=True)
    assert (args.world_size, args.process_index, args.local_process_index, args.should_save) == (1, 0, 0, True)
    with args.main_process_first():
        pass
    for name, value in {"WORLD_SIZE": 4, "RANK": 3, "LOCAL_RANK": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert (args.world_size, args.process_index, args.local_process_index, args.should_save) == (4, 3, 1, False)
    assert (args.local_rank, args.ddp_timeout, args.fsdp, args.n_gpu) == (1, 600.0, [], 0)


def test_transformers_names_of_our_arguments_are_translated() -> None:
    args = TrainingArguments(
        bf16=True, fp16=False, tf32=True, load_best_model_at_end=True, metric_for_best_model="eval_accuracy",
        greater_is_better=True, ignore_data_skip=True, optim="adamw_torch",
    )  # type: ignore[call-arg] # fmt: skip
    assert (args.mixed_precision, args.float32_matmul_precision, args.bf16, args.fp16) == ("bf16", "high", True, False)
    assert (args.preserve_best_model, args.best_model_metric, args.load_best_model_at_end) == (
        True,
        "eval_accuracy",
        True,
    )
    assert (args.best_model_greater_is_better, args.resume_skip) == (True, ("dataset",))
    args.bf16 = False
    args.fp16 = True
    assert args.mixed_precision == "fp16"
    with pytest.raises(ConfigError, match="fp16 = True and mixed_precision = 'bf16' conflict"):
        TrainingArguments(bf16=True, fp16=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="MinimalTrainingArguments has no argument 'bf16'"):
        MinimalTrainingArguments(bf16=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"report_to": "all"}, "tensorboard, wandb, trackio for report_to, got 'all'"),
        ({"report_to": ["none", "wandb"]}, "got 'none'"),
        ({"label_names": "labels"}, "list .*label_names, got 'labels'"),
        ({"data_seed": -1}, "expected data_seed .* got -1"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy.*'group_by_length'"),
    ],
)
def test_invalid_reporters_labels_and_orders_raise_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(**given)
