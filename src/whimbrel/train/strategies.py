"""Trainers with a fixed strategy: `DDPTrainer`, `FSDPTrainer`, `PipelineTrainer`, and `AccelTrainer` (Accelerate)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch import nn
from torch.optim import Optimizer

from whimbrel.base.errors import ConfigError, MissingExtraError
from whimbrel.distributed import ParallelConfig, World
from whimbrel.train.arguments import MinimalTrainingArguments
from whimbrel.train.config import TrainerConfig
from whimbrel.train.run_config import RunConfig
from whimbrel.train.trainer import Trainer

__all__ = ["AccelTrainer", "DDPTrainer", "FSDPTrainer", "PipelineTrainer"]


class StrategyTrainer(Trainer):
    """A `Trainer` with one of `strategies`; the first is the default."""

    strategies: ClassVar[tuple[Any, ...]]

    def __init__(
        self, args: MinimalTrainingArguments | TrainerConfig, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if isinstance(args, TrainerConfig):
            args = replace(args, parallel=self._with_strategy(args.parallel))
        elif isinstance(args, MinimalTrainingArguments):
            config = self._with_strategy(ParallelConfig(**(args.parallel or {})))
            args = copy.copy(args)
            args.parallel = {**(args.parallel or {}), "strategy": config.strategy}
        super().__init__(args, model, **kwargs)

    @classmethod
    def from_config(cls, config: RunConfig, **options: Any) -> Self:
        """Like `Trainer.from_config`, with this strategy."""
        return super().from_config(replace(config, parallel=cls._with_strategy(config.parallel)), **options)

    @classmethod
    def _with_strategy(cls, config: ParallelConfig) -> ParallelConfig:
        if config.strategy not in (None, *cls.strategies):
            names = " or ".join(cls.strategies)
            raise ConfigError(
                f"{cls.__name__} trains with strategy = {names}, got {config.strategy}: omit strategy, or use Trainer"
            )
        return replace(config, strategy=config.strategy or cls.strategies[0])


class DDPTrainer(StrategyTrainer):
    """Replicates the model in every process."""

    strategies = ("ddp",)


class FSDPTrainer(StrategyTrainer):
    """Shards the model over all processes, or with strategy = hsdp over the processes of each machine."""

    strategies = ("fsdp", "hsdp")


class PipelineTrainer(StrategyTrainer):
    """Splits the layers of the model over processes."""

    strategies = ("pipeline",)


class AccelTrainer(DDPTrainer):
    """Lets an `accelerate.Accelerator` prepare the model and the optimizer; the training loop stays that of `Trainer`.

    The trainer splits batches: Accelerate would repeat samples at the end of an epoch. `hf_accelerator` (default: a new
    one) must not scale the loss, accumulate gradients or shard; the trainer does.
    """

    def __init__(
        self,
        args: MinimalTrainingArguments | TrainerConfig,
        model: nn.Module | None = None,
        *,
        hf_accelerator: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(args, model, **kwargs)
        if hf_accelerator is None:
            try:
                from accelerate import Accelerator
            except ImportError as error:
                raise MissingExtraError("AccelTrainer", "accelerate", "accelerate") from error
            hf_accelerator = Accelerator(cpu=self.device.type == "cpu")
        self.hf_accelerator = hf_accelerator
        kind = str(getattr(hf_accelerator.distributed_type, "value", hf_accelerator.distributed_type))
        refused = {
            f"distributed_type = {kind}": kind not in ("NO", "MULTI_GPU", "MULTI_CPU"),
            f"{hf_accelerator.num_processes} processes": hf_accelerator.num_processes != self.world.size,
            f"parallel sizes {self.world.layout}": self.world.layout.dp_replicate != self.world.size,
            f"mixed_precision = {hf_accelerator.mixed_precision}": hf_accelerator.mixed_precision != "no",
            f"gradient_accumulation_steps = {hf_accelerator.gradient_accumulation_steps}": (
                hf_accelerator.gradient_accumulation_steps != 1
            ),
            "optimizer_in_backward": self.config.train.optimizer_in_backward,
        }
        for name in (name for name, is_set in refused.items() if is_set):
            raise ConfigError(
                f"AccelTrainer does not work with {name}: set it in the training arguments, or use Trainer or "
                "FSDPTrainer"
            )

    def _prepare_model(self) -> None:
        if self._is_wrapped:
            return
        world, self.world = self.world, World()  # no DDP: the accelerator applies it
        try:
            super()._prepare_model()
        finally:
            self.world = world
        self.model = self.hf_accelerator.prepare_model(self.model)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create the optimizer and register it with the accelerator."""
        optimizer = super().create_optimizer(model)
        self.hf_accelerator.prepare_optimizer(optimizer)
        return optimizer
