"""Distributed training with the names of `transformers`: arguments for DDP and FSDP, and properties of the process."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import ParallelConfig, join_world
from whimbrel.distributed.world import launched_processes
from whimbrel.train.device import choose_device

__all__ = ["PARALLEL_ARGUMENTS", "ProcessArguments", "changed_settings", "merge_settings"]

Settings = dict[str, Any]
"""Settings of the [parallel] section."""

FSDP_OPTIONS: dict[str, Settings] = {
    "full_shard": {"strategy": "fsdp"},
    "shard_grad_op": {"strategy": "fsdp", "reshard_after_forward": False},
    "hybrid_shard": {"strategy": "hsdp"},
    "hybrid_shard_zero2": {"strategy": "hsdp", "reshard_after_forward": False},
    "no_shard": {"strategy": "ddp"},
    "offload": {"cpu_offload": True},
    "auto_wrap": {},  # each block is always sharded by itself
}
FSDP_CONFIG: dict[str, Callable[[Any], Settings | None]] = {
    "activation_checkpointing": lambda on: None if on else {},
    "auto_wrap_policy": lambda name: {} if name in (None, "TRANSFORMER_BASED_WRAP") else None,
    "cpu_offload": lambda on: {"cpu_offload": bool(on)},
    "cpu_ram_efficient_loading": lambda _: {},  # always: no rank creates the complete model of model_init
    "min_num_params": lambda count: None if count else {},
    "reshard_after_forward": lambda on: {"reshard_after_forward": on} if isinstance(on, bool) else None,
    "state_dict_type": lambda name: {} if name == "FULL_STATE_DICT" else None,
    "transformer_layer_cls_to_wrap": lambda names: None if names else {},  # blocks are found in the model
    "version": lambda version: {} if version == 2 else None,
    "xla": lambda on: None if on else {},
}
"""Entries of `fsdp_config`, with or without the prefix `fsdp_`; None for a value that is not supported."""


def _timeout(seconds: Any) -> Settings:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ConfigError(f"expected a number of seconds for ddp_timeout, got {seconds!r}")
    return {"timeout": float(seconds)}


def _fsdp(value: Any) -> Settings:
    """`fsdp="full_shard offload"`, a list of these options, or True."""
    options = ["full_shard"] if value is True else value.split() if isinstance(value, str) else list(value or [])
    settings: Settings = {}
    for option in (str(getattr(option, "value", option)) for option in options):
        if option not in FSDP_OPTIONS:
            raise ConfigError(f"unsupported fsdp={option!r}: use one of {', '.join(FSDP_OPTIONS)}")
        settings |= FSDP_OPTIONS[option]
    if settings and "strategy" not in settings:
        raise ConfigError(f"unsupported fsdp={value!r}: pass 'full_shard' as well")
    return settings


def _fsdp_config(value: Any) -> Settings:
    """A dict, or the path of a JSON file."""
    if isinstance(value, str | os.PathLike):
        value = json.loads(Path(value).read_text(encoding="utf-8"))
    settings: Settings = {}
    for key, entry in (value or {}).items():
        translated = FSDP_CONFIG.get(key.removeprefix("fsdp_"), lambda _: None)(entry)
        if translated is None:
            raise ConfigError(
                f"unsupported fsdp_config={{{key!r}: {entry!r}}}: remove it, or use parallel={{...}} and "
                "gradient_checkpointing=True"
            )
        settings |= translated
    return settings


def _parallelism_config(value: Any) -> Settings:
    """An `accelerate.ParallelismConfig`."""
    if value is None:
        return {}
    sizes: dict[str, int] = {name: getattr(value, f"{name}_size", 0) for name in ("dp_replicate", "dp_shard", "tp")}
    others = [name for name in ("cp", "sp") if (getattr(value, f"{name}_size", 1) or 1) > 1]
    if others or 0 in sizes.values():
        got = f"{others[0]}_size > 1" if others else repr(value)
        raise ConfigError(f"unsupported parallelism_config={got}: use dp_replicate_size, dp_shard_size and tp_size")
    return {name: size for name, size in sizes.items() if size > 1}


def _local_rank(value: Any) -> Settings:
    if value not in (-1, int(os.environ.get("LOCAL_RANK", 0))):
        raise ConfigError(f"unsupported local_rank={value!r}: torchrun sets LOCAL_RANK; remove it")
    return {}


def _average_tokens(value: Any) -> Settings:
    if not value and launched_processes() > 1:
        raise ConfigError(
            "unsupported average_tokens_across_devices=False: the loss is the mean over the tokens of all processes; "
            "remove it"
        )
    return {}


PARALLEL_ARGUMENTS: dict[str, Callable[[Any], Settings]] = {
    "average_tokens_across_devices": _average_tokens,
    "ddp_timeout": _timeout,
    "fsdp": _fsdp,
    "fsdp_config": _fsdp_config,
    "local_rank": _local_rank,
    "parallelism_config": _parallelism_config,
}
"""Arguments of `transformers`, and the settings of [parallel] that they stand for."""


def merge_settings(settings: ParallelConfig | Settings | None, more: Settings, argument: str) -> Settings:
    """Add the settings that `argument` stands for; raises ConfigError if they conflict with `settings`."""
    merged = dict((changed_settings(settings) if isinstance(settings, ParallelConfig) else settings) or {})
    for name, value in more.items():
        if merged.setdefault(name, value) != value:
            raise ConfigError(
                f"{argument} means parallel.{name} = {value!r}, which conflicts with {merged[name]!r}: pass only one"
            )
    return merged


def changed_settings(config: ParallelConfig) -> Settings | None:
    """The settings that differ from their defaults, as the argument `parallel`; None if there are none."""
    found = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in found.items() if value != getattr(DEFAULTS, name)} or None


DEFAULTS = ParallelConfig()


class ProcessArguments:
    """Properties of `transformers.TrainingArguments` that describe this process."""

    parallel: Settings | None = None
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    use_cpu: bool

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return dist.get_world_size() if dist.is_initialized() else launched_processes()

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))

    @property
    def local_process_index(self) -> int:
        """Rank among the processes of this machine."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return choose_device("cpu" if self.use_cpu else None)

    @property
    def n_gpu(self) -> int:
        """Number of GPUs of this process: 0 or 1."""
        return int(self.device.type == "cuda")

    @property
    def train_batch_size(self) -> int:
        """Sequences per forward pass of this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Sequences per evaluation pass of this process."""
        return self.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`parallel.timeout`."""
        return timedelta(seconds=self._parallel_config().timeout)

    @property
    def should_log(self) -> bool:
        """Whether this process logs."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        return self.process_index == 0

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block on the first process (of each machine, with `local`) before the others run it."""
        del desc
        world = join_world(self._parallel_config(), self.device.type)
        is_first = world.local_rank == 0 if local else world.is_main
        if not is_first:
            world.barrier()
        yield
        if is_first:
            world.barrier()

    def _parallel_config(self) -> ParallelConfig:
        return ParallelConfig(**(self.parallel or {}))
