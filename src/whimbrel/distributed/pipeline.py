"""Pipeline parallelism: ranks run consecutive layers, and the micro-batches of a step flow through them.

The schedules are those of torch.distributed.pipelining; a step's micro-batches are its gradient accumulation. With
"interleaved" and "zero-bubble" every rank runs two stages, which shortens the time ranks wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.activation_checkpoint import find_blocks
from whimbrel.distributed.layout import PipelineSchedule

__all__ = ["CausalLMStage", "Pipeline", "split_layers", "stage_indices"]


def stage_indices(schedule: PipelineSchedule, rank: int, ranks: int) -> list[int]:
    """The stages of one rank: its own, or two; "zero-bubble" places them in a V, so that rank 0 has first and last."""
    if schedule == "interleaved":
        return [rank, rank + ranks]
    if schedule == "zero-bubble":
        return [rank, 2 * ranks - 1 - rank]
    return [rank]


def split_layers(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Consecutive layers for each stage so that the most expensive stage is as cheap as possible.

    `costs` of the layers; `first` and `last` are those of the embedding and the head.
    """
    if stages > len(costs):
        raise ConfigError(f"expected at most {len(costs)} pipeline stages, one per layer, got {stages}: lower pp")
    total = [0.0, *itertools.accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return total[stop] - total[start] + extra

    # best[stop]: the lowest maximum for the layers before `stop` in the stages so far, and where the last one starts.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        best = {
            stop: min(
                (max(highest, cost(stage, start, stop)), [*starts, start])
                for start, (highest, starts) in best.items()
                if start < stop
            )
            for stop in range(stage + 1, len(costs) - (stages - 1 - stage) + 1)
        }
    starts = best[len(costs)][1]
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, len(costs)])]


class CausalLMStage(nn.Module):
    """A stage of a decoder-only model of transformers; parameters keep their names.

    The model's own forward runs with all other layers replaced by ones that pass the hidden states on. Modules before
    the layers belong to the first stage, modules after them to the last. Takes token ids in the first stage, hidden
    states in others; the last returns the loss, summed over targets, with shape (1,).
    """

    def __init__(self, model: nn.Module, layers: range, count: int) -> None:
        super().__init__()
        self.is_first, self.is_last = layers.start == 0, layers.stop == count
        self.model = model
        blocks = set(find_blocks(model))
        parent, name = next(
            (module, name)
            for module in model.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and blocks <= set(child)
        )
        stack: Any = getattr(parent, name)
        for index in set(range(count)) - set(layers):
            stack[index] = _PassThrough()
        before = True
        for child_name, child in list(parent.named_children()):
            if child is stack:
                before = False
            elif any(True for _ in child.parameters()) and not (self.is_first if before else self.is_last):
                setattr(parent, child_name, _Zero() if before else _PassThrough())
        if not self.is_last:
            model.set_output_embeddings(_PassThrough())  # type: ignore[operator]

    def forward(self, x: Tensor, *, targets: Tensor, documents: None = None) -> Tensor:
        """Run the stage on token ids (batch, tokens), or on hidden states (batch, tokens, width)."""
        del documents
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        output: Tensor = self.model(**inputs, use_cache=False).logits
        if not self.is_last:
            return output
        loss = nn.functional.cross_entropy(output.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return loss[None]


class _PassThrough(nn.Module):
    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states


class _Zero(nn.Module):
    """Replaces a position embedding, which the first stage has added already."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return position_ids.new_zeros((*position_ids.shape, 1), dtype=torch.get_default_dtype())


class Pipeline:
    """The stages of this rank and their schedule.

    Stages are modules that take `(x, *, targets, documents)`; the last one returns the summed loss, shape (1,). All
    ranks of a pipeline call `forward_backward` with the same batch.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        indices: Sequence[int],
        schedule: PipelineSchedule,
        micro_batches: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        from torch.distributed import pipelining

        kinds: dict[str, Callable[..., Any]] = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zero-bubble": pipelining.ScheduleZBVZeroBubble,
        }
        ranks = dist.get_world_size(group)
        count = ranks * len(indices)
        needed = count if schedule in ("1f1b", "zero-bubble") else ranks if schedule == "interleaved" else 1
        if micro_batches < needed or (schedule == "interleaved" and micro_batches % ranks):
            multiple = " (a multiple of it)" if schedule == "interleaved" else ""
            raise ConfigError(
                f"parallel.pipeline_schedule = {schedule} with pp = {ranks} needs at least {needed} micro-batches "
                f"a step{multiple}, got {micro_batches}: set train.accumulation, or use gpipe"
            )
        stages = [
            pipelining.PipelineStage(module, index, count, device, group=group)
            for module, index in zip(modules, indices, strict=True)
        ]
        self.num_items: Tensor | None = None
        self._has_last = count - 1 in indices
        arguments = stages if schedule in ("interleaved", "zero-bubble") else stages[0]
        self._schedule = kinds[schedule](arguments, micro_batches, loss_fn=self._loss, scale_grads=False)
        self._has_first = 0 in indices

    def forward_backward(
        self, input_ids: Tensor, targets: Tensor, documents: Tensor | None, num_items: Tensor
    ) -> Tensor:
        """Run all micro-batches; returns this rank's part of the loss, which is 0 unless it has the last stage."""
        self.num_items, losses = num_items, list[Tensor]()
        inputs = (input_ids,) if self._has_first else ()
        more = {} if documents is None else {"documents": documents}
        target = targets if self._has_last else None
        self._schedule.step(*inputs, targets=targets, **more, target=target, losses=losses)
        return (
            torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=targets.device)
        )

    def _loss(self, output: Tensor, _target: Tensor) -> Tensor:
        assert self.num_items is not None
        return output.sum() / self.num_items
