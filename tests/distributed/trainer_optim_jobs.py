"""Jobs for test_trainer_optim.py: training runs with the settings of a config file, on the ranks of a process group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import WhimbrelError
from whimbrel.distributed import ParallelConfig
from whimbrel.distributed.state import full_tensor, is_dtensor
from whimbrel.models import GPT, LoraConfig, apply_lora, preset
from whimbrel.precision import quantize_
from whimbrel.train import Trainer, TrainerCallback, TrainingArguments
from whimbrel.train.arguments import to_config
from whimbrel.train.run_config import build_run_config

MODEL = {"context_length": 32, "vocab_size": 300, "num_layers": 2, "embd_size": 64, "num_heads": 2}
TOKENS_PER_STEP = 512


class Run(NamedTuple):
    """What one rank knows after a run; the curve only on rank 0."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    state_bytes: int
    """Bytes of optimizer state on this rank."""


def config_table(folder: Path, ranks: int, changes: dict[str, Any]) -> dict[str, Any]:
    """A run of 12 steps with two micro-batches each, clipped at every step; `section.name` changes a setting."""
    table: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": dict(MODEL),
        "data": {"path": str(folder / "shards"), "shuffle_seed": 1, "documents": "mask"},
        "train": {
            "steps": 12, "tokens_per_step": TOKENS_PER_STEP, "micro_batch": 8 // ranks, "device": "cpu", "clip": 0.5,
        },
        "optim": {"lr": 1e-3},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "log": {"every": 1, "progress": False, "tensorboard": False},
        "validation": {"at_end": False},
        "checkpoint": {"at_end": False},
    }  # fmt: skip
    for key, value in changes.items():
        section, name = key.split(".")
        table.setdefault(section, {})[name] = value
    return table


def train(folder: Path, ranks: int, changes: dict[str, Any]) -> Run:
    trainer = Trainer.from_config(build_run_config(config_table(folder, ranks, changes)))
    trainer.train()
    return finished_run(trainer)


def finished_run(trainer: Trainer) -> Run:
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.optimizer is not None
    state = [tensor for values in trainer.optimizer.state.values() for tensor in values.values()]
    weights = {
        name: full_tensor(parameter.detach()).clone()
        for name, parameter in trainer.unwrapped_model().named_parameters()
        if parameter.requires_grad
    }
    return Run(
        [entry["loss"] for entry in logs],
        [entry["grad_norm"] for entry in logs],
        weights,
        sum((tensor.to_local() if is_dtensor(tensor) else tensor).nbytes for tensor in state),
    )


class Bytes(NamedTuple):
    """Bytes of the storages that a rank has allocated, and the number of parameters."""

    weights: int
    gradients: int
    states: int
    parameters: int


class CountGradients(TrainerCallback):
    all_ranks = True
    allocated = 0

    def on_pre_optimizer_step(self, **event: Any) -> None:
        self.allocated = allocated(parameter.grad for parameter in event["model"].parameters())


def allocated_bytes(folder: Path, ranks: int, changes: dict[str, Any]) -> Bytes:
    """Train and count what is allocated before and after the last optimizer step."""
    config, counter = build_run_config(config_table(folder, ranks, changes)), CountGradients()
    trainer = Trainer.from_config(config, callbacks=[counter])
    trainer.train()
    assert trainer.optimizer is not None
    parameters = list(trainer.unwrapped_model().parameters())
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    return Bytes(allocated(parameters), counter.allocated, allocated(states), len(parameters))


def allocated(tensors: Iterable[Any]) -> int:
    parts = (part for tensor in tensors for part in (getattr(tensor, "codes", tensor), getattr(tensor, "scales", None)))
    local = (tensor.to_local() if is_dtensor(tensor) else tensor for tensor in parts if isinstance(tensor, Tensor))
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())


def error_of_run(folder: Path, ranks: int, changes: dict[str, Any]) -> str:
    """The error that a run raises, as `Type: message`, or "no error"."""
    try:
        train(folder, ranks, changes)
    except WhimbrelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train_adapter(
    folder: Path,
    ranks: int,
    strategy: str | None,
    format_name: str | None,
    resume: str | None = None,
    *,
    library: str = "peft",
) -> Run:
    """LoRA on a frozen Llama, whose linears are quantized to `format_name` (QLoRA), with PEFT or on a GPT."""
    ids = torch.randint(0, 64, (64, 9), generator=torch.Generator().manual_seed(3))
    args = TrainingArguments(
        output_dir=str(folder / "adapter"), max_steps=6, per_device_train_batch_size=8 // ranks, learning_rate=1e-2,
        use_cpu=True, logging_steps=1, save_strategy="steps", save_steps=3, lr_scheduler_type="constant",
        max_grad_norm=0.2, disable_tqdm=True,
    )  # fmt: skip
    config = replace(to_config(args), parallel=ParallelConfig(strategy=strategy))  # type: ignore[arg-type]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    model = (_peft_model if library == "peft" else _gpt_with_adapters)(format_name)
    trainer = Trainer(config, model, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return finished_run(trainer)


def _peft_model(format_name: str | None) -> Any:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    if format_name is not None:
        quantize_(model, format_name)
    torch.manual_seed(1)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    return peft.get_peft_model(model, lora)


def _gpt_with_adapters(format_name: str | None) -> GPT:
    """The base model is in bf16 unless it is quantized, the adapters are in fp32."""
    torch.manual_seed(0)
    config = replace(preset("llama3-8b"), **{**MODEL, "vocab_size": 64}, num_kv_heads=1, head_size=32, mlp_size=128)
    model = GPT(config)
    if format_name is None:
        model.to(torch.bfloat16)
    else:
        quantize_(model, format_name)
    apply_lora(model, LoraConfig(rank=4, alpha=8, modules=("q_proj", "v_proj", "up_proj")))
    return model
