"""Jobs for test_deferred_init.py: what a rank allocates until its part of a model is ready, and its values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.distributed import trainer_jobs
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.state import full_state, lazy_gather_state
from whimbrel.models import GPT, GPTConfig
from whimbrel.train.run_config import build_run_config
from whimbrel.train.trainer import BaseTrainer

MAPPED = 2**22
"""An allocation of this size is a file with a complete model; parameters are smaller."""


class Built(NamedTuple):
    """A model that is ready to train."""

    peak: int
    """The most bytes that were allocated at one time."""
    own: int
    """Bytes of the parameters on this rank."""
    state: dict[str, Tensor]
    """The complete state, on rank 0."""


SIZES = {"num_layers": 8, "num_heads": 4, "embd_size": 128, "vocab_size": 61, "context_length": 16}


def make_model(kind: str) -> nn.Module:
    """Larger than that of `trainer_jobs`, so that its parameters are most of what is allocated."""
    if kind in trainer_jobs.MODELS:
        return GPT(GPTConfig(**SIZES, **trainer_jobs.MODELS[kind]))
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=8, num_attention_heads=4, hidden_size=128, intermediate_size=512, vocab_size=61,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def build(folder: Path, settings: dict[str, Any], kind: str) -> Built:
    """A model of `model_init`."""
    config = trainer_jobs.make_config(folder, settings, 1, {})
    make_model(kind)  # imports what it needs
    return _built(
        lambda: BaseTrainer(config, model_init=lambda: make_model(kind), train_dataset=trainer_jobs.examples())
    )


def build_run(table: dict[str, Any], settings: dict[str, Any]) -> Built:
    """A model of a configuration: new, or with the weights in `model.path`."""
    return _built(lambda: BaseTrainer.from_config(build_run_config(table | {"parallel": settings})))


def _built(create: Callable[[], BaseTrainer]) -> Built:
    trainers: list[BaseTrainer] = []

    def prepare() -> None:
        trainers.append(create())
        trainers[0]._prepare_model()

    peak, model = peak_bytes(prepare), trainers[0].unwrapped_model()
    parts: list[Any] = [p for p in model.parameters() if not p.is_meta]
    own = sum((p.to_local() if hasattr(p, "placements") else p).nbytes for p in parts)
    return Built(peak, own, full_state(lazy_gather_state(model, model.state_dict()), trainers[0].world))


def error_of_different_seeds(folder: Path, settings: dict[str, Any]) -> str:
    """The error of ranks that initialize a model with different random numbers."""

    def create() -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return make_model("gpt2")

    config = trainer_jobs.make_config(folder, settings, 1, {})
    try:
        BaseTrainer(config, model_init=create, train_dataset=trainer_jobs.examples()).train()
    except ConfigError as error:
        return str(error)
    return "no error"


def peak_bytes(action: Callable[[], object]) -> int:
    """The most host memory that tensors which `action` creates take at one time, without files mapped into memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        action()
    events = sorted(_allocations(recorded), key=lambda event: event.start_time_ns)
    sizes = [event.extra_fields.alloc_size for event in events]
    return max(itertools.accumulate(size for size in sizes if abs(size) < MAPPED))


def _allocations(recorded: Any) -> list[Any]:
    found, events = [], list(recorded.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag.name == "Allocation":
            found.append(event)
    return found
