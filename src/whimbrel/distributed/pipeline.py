"""Pipeline parallelism: each rank runs a stage of consecutive layers, and the micro-batches of a step flow through.

The schedules are those of torch.distributed.pipelining; a step's micro-batches are its gradient accumulation. With
"interleaved" and "zero-bubble" every rank runs two stages, which shrinks the pipeline bubble.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.distributed.activation_checkpoint import find_blocks
from whimbrel.distributed.layout import PipelineSchedule
from whimbrel.distributed.state import to_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "CausalLMStage",
    "PipelineModel",
    "check_micro_batches",
    "check_stages",
    "find_tied_parameters",
    "min_micro_batches",
    "move_other_stages_to_meta",
    "split_layers",
    "stage_indices",
]

IGNORED = -100
"""Target without a loss."""
TWO_STAGES = ("interleaved", "zero-bubble")
"""Schedules in which every rank has two stages."""
MAX_SCHEDULES = 8
"""Shapes of micro-batches whose schedules, with their buffers, are kept."""
SMALL_VOCAB = 64
"""Vocabulary of the copy of a model that `check_stages` compares."""
Tie = list[tuple[nn.Module, str]]
"""Where one tied parameter occurs: (module, attribute name) pairs."""


def stage_indices(schedule: PipelineSchedule, rank: int, ranks: int) -> list[int]:
    """The stage indices of one rank; "zero-bubble" places two in a V, so that rank 0 has the first and the last."""
    if schedule == "interleaved":
        return [rank, rank + ranks]
    if schedule == "zero-bubble":
        return [rank, 2 * ranks - 1 - rank]
    return [rank]


def min_micro_batches(schedule: PipelineSchedule, ranks: int) -> int:
    """The lowest number of micro-batches that a schedule can run; "interleaved" needs a multiple of it."""
    return {"gpipe": 1, "1f1b": ranks, "interleaved": ranks, "zero-bubble": 2 * ranks}[schedule]


def check_micro_batches(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> None:
    """Raise if a schedule cannot run that number of micro-batches."""
    minimum = min_micro_batches(schedule, ranks)
    if micro_batches < minimum or (schedule == "interleaved" and micro_batches % ranks):
        needed = f"a multiple of {minimum}" if schedule == "interleaved" else f"at least {minimum}"
        raise ConfigError(
            f"parallel.pipeline_schedule = {schedule} with pp = {ranks} needs {needed} micro-batches per "
            f"step, got {micro_batches}: set train.accumulation (gradient_accumulation_steps), or use gpipe"
        )


def split_layers(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Split the layers into consecutive stages so that the most expensive stage is as cheap as possible.

    `costs` are the costs of the layers, `first` and `last` the costs of the embedding and the head.
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
    """A stage of a decoder-only transformers model.

    The model's own forward runs in every stage. Layers of other stages are replaced: the first one returns the hidden
    states of the previous stage, whatever the model has computed up to there, and the one after the stage keeps the
    hidden states for the next stage, whatever the model computes after it. Modules before the layers belong to the
    first stage, modules after them to the last. Takes token ids in the first stage, hidden states in others; the last
    returns the loss, summed over targets, with shape (1,). `model` itself does not change.
    """

    def __init__(self, model: nn.Module, layers: range) -> None:
        super().__init__()
        blocks = find_blocks(model)
        count, found = len(blocks), set(blocks)
        self.is_first, self.is_last = layers.start == 0, layers.stop == count
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        path = next(
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and found <= set(module.children())
        )
        self.model, parent = _copy_path(model, path)
        stack: Any = getattr(parent, path.rpartition(".")[2])
        for index in set(range(count)) - set(layers):
            stack[index] = _PassThrough()
        self._received, self._sent = _Received(), _Sent()
        if not self.is_first:
            stack[0] = self._received
        if not self.is_last:
            stack[layers.stop] = self._sent
        before = True
        for child_name, child in list(parent.named_children()):
            if child is stack:
                before = False
            elif any(True for _ in child.parameters()) and not (self.is_first if before else self.is_last):
                setattr(parent, child_name, _Skipped() if before else _PassThrough())
        if not self.is_last:
            setattr(self.model, _head_name(model), _PassThrough())
        self.blocks = tuple(stack[index] for index in layers)

    @property
    def tp_plan(self) -> dict[str, str]:
        """The tensor-parallel plan of the model."""
        plan: Mapping[str, str] = getattr(self.model, "tp_plan", None) or {}
        return {f"model.{pattern}": style for pattern, style in plan.items()}

    def forward(self, x: Tensor, *, targets: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Run the stage on token ids (batch, tokens), or on hidden states (batch, tokens, width)."""
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x.detach()}
        self._received.hidden_states = x
        with self.autocast():
            output: Tensor = self.model(**inputs, attention_mask=attention_mask, use_cache=False).logits
        hidden_states, self._received.hidden_states, self._sent.hidden_states = self._sent.hidden_states, None, None
        if not self.is_last:
            assert hidden_states is not None
            return hidden_states.clone()  # schedules detach outputs in place, which views do not allow
        loss = F.cross_entropy(output.float().flatten(0, 1), targets.flatten(), reduction="sum")
        return loss[None]


def check_stages(model: nn.Module, ranges: Sequence[range]) -> None:
    """Raise ConfigError if the stages of a transformers model do not compute its loss together.

    Compares them in a copy of the model with a small vocabulary and width, and random weights.
    """
    config: Any = model.config
    for name, reason in {
        "output_router_logits": "adds an auxiliary loss, which a pipeline does not compute",
        "layerdrop": "skips layers at random",
    }.items():
        if value := getattr(config, name, None):
            raise ConfigError(f"{name} = {value} {reason}: disable it in the model's config, or set parallel.pp = 1")
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.manual_seed(0)
            problem = _difference(_small_copy(model), ranges)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
    if problem is not None:
        name = type(model).__name__
        raise ConfigError(f"{name} cannot be split into pipeline stages ({problem}): set parallel.pp = 1 and use fsdp")


def _difference(model: nn.Module, ranges: Sequence[range]) -> str | None:
    """How a model and its stages differ."""
    stages = [CausalLMStage(model, layers) for layers in ranges]
    owners = Counter(parameter for stage in stages for parameter in stage.parameters())
    tied = {getattr(*place) for tie in find_tied_parameters(model) for place in tie}
    for name, parameter in model.named_parameters():
        if owners[parameter] != 1 and parameter not in tied:
            return f"{name} is in {owners[parameter]} stages"
    input_ids = torch.randint(SMALL_VOCAB, (2, 6))
    expected = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
    targets, x = F.pad(input_ids[:, 1:], (0, 1), value=IGNORED), input_ids
    for stage in stages:
        x = stage(x, targets=targets)
    loss = x.sum() / (targets != IGNORED).sum()
    if torch.isclose(loss, expected, rtol=1e-5, atol=0):
        return None
    return f"their loss is {loss:.6f} instead of {expected:.6f}"


def _small_copy(model: nn.Module) -> nn.Module:
    """A model of the same class in eval mode, with fewer heads of the same size, and large random weights."""
    config: Any = copy.deepcopy(model.config)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {
        "vocab_size": SMALL_VOCAB, "hidden_size": 2 * head_dim, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 2 if kv_heads == heads else 1, "ffn_dim": 64,
        "word_embed_proj_dim": 2 * head_dim,
    }  # fmt: skip
    for name, size in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    config._attn_implementation = "eager"
    small = type(model)(config).float().eval()
    for parameter in small.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.125)
    return small


def _head_name(model: Any) -> str:
    """The attribute of a transformers model that is its head."""
    head = model.get_output_embeddings()
    name: str | None = next((name for name, child in model.named_children() if child is head), None)
    if name is None:
        raise ValueError(f"expected a decoder-only model, got {type(model).__name__}")
    return name


def _copy_path(model: nn.Module, path: str) -> tuple[nn.Module, nn.Module]:
    """Copy the modules along a path and share all others; returns the root and the parent of the last module."""
    root = module = parent = _copy_module(model)
    for name in path.split("."):
        parent, child = module, _copy_module(getattr(module, name))
        setattr(parent, name, child)
        module = child
    return root, parent


def _copy_module(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    for table in ("_modules", "_parameters", "_buffers"):
        copied.__dict__[table] = copied.__dict__[table].copy()
    return copied


class _PassThrough(nn.Module):
    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states


class _Received(_PassThrough):
    """Returns the hidden states of the stage before."""

    hidden_states: Tensor | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        assert self.hidden_states is not None
        return self.hidden_states


class _Sent(_PassThrough):
    """Keeps the hidden states for the next stage."""

    hidden_states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        self.hidden_states = hidden_states
        return hidden_states


class _Skipped(nn.Module):
    """Replaces a module before the layers, as a position embedding: its result is not used."""

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return x if x.ndim > 2 else x.new_zeros((*x.shape, 1), dtype=torch.get_default_dtype())


class PipelineOutput(NamedTuple):
    """The output of a pipeline."""

    loss: Tensor


class PipelineModel(nn.Module):
    """The stages of this rank and their schedule, around the complete model.

    Parameters of other ranks are meta tensors in `module`, so names and shapes are the same as in the full model.
    Stages are modules that take `(x, *, targets, ...)`; the last one returns the summed loss, with shape (1,). All
    ranks of a pipeline get the same batches, and the same loss. Gradients are averaged over the group `replicas`.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[nn.Module],
        ties: Sequence[Tie],
        schedule: PipelineSchedule,
        micro_batches: int,
        device: torch.device,
        mesh: DeviceMesh,
        replicas: dist.ProcessGroup | None = None,
        *,
        timeout: float,
    ) -> None:
        super().__init__()
        self.module, self._replicas = module, replicas
        # A tuple, so that parameters are not registered a second time: they belong to `module`.
        self.stages, self.micro_batches, self._schedule, self._device = tuple(stages), micro_batches, schedule, device
        self._group = mesh["pp"].get_group()
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        check_micro_batches(schedule, ranks, micro_batches)
        self._indices = stage_indices(schedule, rank, ranks)
        self._count = ranks * len(self._indices)
        owners = {index: other for other in range(ranks) for index in stage_indices(schedule, other, ranks)}
        self._owners = [owners[index] for index in range(self._count)]
        self._has_first, self._has_last = 0 in self._indices, self._count - 1 in self._indices
        self._schedules: dict[Any, Any] = {}
        self._num_items = torch.ones((), device=device)
        self._tied = _restore_ties(ties, stages)
        self._tied_group = _tied_group(mesh, timeout) if ties and schedule != "zero-bubble" else None
        if self._tied_group is not None and self._has_last:
            for parameter in self._tied:
                parameter.is_copy = True  # type: ignore[attr-defined] # tied: counted once in the norm

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the stages too."""
        for stage in self.stages:
            stage.train(mode)
        return super().train(mode)

    def forward_backward(self, micro_batches: Sequence[Mapping[str, Any]], num_items: Tensor) -> Tensor:
        """Run forward and backward for all micro-batches; returns the summed loss divided by `num_items`.

        A micro-batch has `input_ids`, `targets` (shifted already) and, optionally, `documents`, `position_ids` or
        `attention_mask`. All are padded to the size of the largest, and their number to what the schedule needs, with
        ignored targets.
        """
        loss = self._forward_backward(micro_batches, num_items)
        if self._replicas is not None:
            grads = [to_local(parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
            pending = [dist.all_reduce(grad, group=self._replicas, async_op=True) for grad in grads]
            for grad, work in zip(grads, pending, strict=True):
                assert work is not None
                work.wait()
                grad /= dist.get_world_size(self._replicas)
        if self._tied_group is not None:
            for parameter in self._tied:
                assert parameter.grad is not None
                dist.all_reduce(to_local(parameter.grad), group=self._tied_group)
        return loss

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        return_logits: bool | None = None,
        **inputs: Any,
    ) -> PipelineOutput:
        """The loss of `labels` or `targets`, for an evaluation."""
        if return_logits or (labels is None and targets is None):
            raise ConfigError("a pipeline computes losses but no logits: predict and compute metrics with pp = 1")
        if torch.is_grad_enabled():
            raise ConfigError(
                "a pipeline cannot run only the forward pass with gradients enabled: use torch.no_grad(), or set pp = 1"
            )
        if targets is None:
            assert labels is not None
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if num_items_in_batch is None:
            num_items_in_batch = (targets != IGNORED).sum().clamp(min=1)
        batch = {"input_ids": input_ids, "targets": targets, **inputs}
        rows = -(-len(input_ids) // self.micro_batches)
        parts = {name: value.split(rows) for name, value in batch.items() if value is not None}
        loss = torch.zeros((), device=self._device)
        for values in zip(*parts.values(), strict=True):
            loss += self._forward_only(**dict(zip(parts, values, strict=True)))
        dist.all_reduce(loss, group=self._group)
        return PipelineOutput(loss / num_items_in_batch)

    def _forward_backward(self, micro_batches: Sequence[Mapping[str, Any]], num_items: Tensor) -> Tensor:
        batch = _pad(micro_batches, self.micro_batches)
        self._num_items, losses = num_items.to(self._device), list[Tensor]()
        shapes = tuple((name, tensor.shape) for name, tensor in batch.items())
        schedule = self._schedules.pop(shapes, None) or self._make_schedule()
        self._schedules[shapes] = schedule
        if len(self._schedules) > MAX_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]  # the one not used for longest
        inputs, target = batch.pop("input_ids"), batch["targets"] if self._has_last else None
        schedule.step(*([inputs] if self._has_first else []), target=target, losses=losses, **batch)
        loss = torch.zeros((), device=self._device)
        for part in losses:
            loss += part.detach()
        dist.all_reduce(loss, group=self._group)
        return loss

    def _forward_only(self, input_ids: Tensor, **inputs: Tensor) -> Tensor:
        """The summed loss of a micro-batch on the rank with the last stage, 0 on others."""
        hidden: tuple[Tensor, ...] = (input_ids,)
        rank, owners = dist.get_rank(self._group), self._owners
        for stage, index in sorted(zip(self.stages, self._indices, strict=True), key=lambda item: item[1]):
            if index > 0 and owners[index - 1] != rank:
                hidden = self._receive(owners[index - 1])
            output = stage(*hidden, **inputs)
            hidden = output if isinstance(output, tuple) else (output,)
            if index == self._count - 1:
                return hidden[0].sum()
            if owners[index + 1] != rank:
                self._send(hidden, owners[index + 1])
        return torch.zeros((), device=self._device)

    def _send(self, tensors: Sequence[Tensor], rank: int) -> None:
        target = dist.get_global_rank(self._group, rank)
        dist.send_object_list([[(tensor.shape, tensor.dtype) for tensor in tensors]], target, self._group)
        for tensor in tensors:
            dist.send(tensor.contiguous(), target, self._group)

    def _receive(self, rank: int) -> tuple[Tensor, ...]:
        source, kinds = dist.get_global_rank(self._group, rank), list[Any]([None])
        dist.recv_object_list(kinds, source, self._group)
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in kinds[0])
        for tensor in tensors:
            dist.recv(tensor, source, self._group)
        return tensors

    def _make_schedule(self) -> Any:
        """A schedule for micro-batches of one shape: its buffers have that shape."""
        from torch.distributed import pipelining

        kinds: dict[str, Callable[..., Any]] = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zero-bubble": pipelining.ScheduleZBVZeroBubble,
        }
        stages = [
            pipelining.PipelineStage(module, index, self._count, self._device, group=self._group)
            for module, index in zip(self.stages, self._indices, strict=True)
        ]
        argument = stages if self._schedule in TWO_STAGES else stages[0]
        return kinds[self._schedule](argument, self.micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, _target: Tensor) -> Tensor:
        return output.sum() / self._num_items


def move_other_stages_to_meta(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Replace parameters of `model` that none of this rank's stages has with meta tensors."""
    own = {id(parameter) for stage in stages for parameter in stage.parameters()}
    others: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in own:
                if parameter not in others:
                    others[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                setattr(module, name, others[parameter])


def find_tied_parameters(model: nn.Module) -> list[Tie]:
    """The shared parameters of a model: embedding and head, if they are tied."""
    places: dict[nn.Parameter, Tie] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    return [tie for tie in places.values() if len(tie) > 1]


def _restore_ties(ties: Sequence[Tie], stages: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Share parameters again that FSDP replaced in this rank's stages; returns those that this rank trains."""
    own = {module for stage in stages for module in stage.modules()}
    restored = []
    for tie in ties:
        current = next((getattr(module, name) for module, name in tie if module in own), None)
        if current is not None:
            for module, name in tie:
                setattr(module, name, current)
            if current.requires_grad:
                restored.append(current)
    return restored


def _tied_group(mesh: DeviceMesh, timeout: float) -> dist.ProcessGroup | None:
    """The first and the last rank of this rank's pipeline; None for ranks in between."""
    pipelines = mesh.mesh.flatten(1).T
    pairs = [[int(ranks[0]), int(ranks[-1])] for ranks in pipelines]
    group, _ = dist.new_subgroups_by_enumeration(pairs, timeout=timedelta(seconds=timeout))
    found: dist.ProcessGroup | None = group
    return found


def _pad(micro_batches: Sequence[Mapping[str, Any]], count: int) -> dict[str, Tensor]:
    """`count` micro-batches of equal size, concatenated; targets of what is added are ignored."""
    known = ("input_ids", "targets", "attention_mask", "documents", "position_ids")
    for name in (name for batch in micro_batches for name in batch if name not in known):
        raise DataError(f"expected input_ids, labels and attention_mask in the batches of a pipeline, got '{name}'")
    rows, tokens = (max(batch["input_ids"].shape[dim] for batch in micro_batches) for dim in (0, 1))
    padded: dict[str, Tensor] = {}
    for name in (name for name in known if any(name in batch for batch in micro_batches)):
        # Padding may be attended to: it follows all tokens, and its targets are ignored.
        fill = {"targets": IGNORED, "attention_mask": 1}.get(name, 0)
        like = next(batch[name] for batch in micro_batches if name in batch)
        padded[name] = like.new_full((count, rows, tokens), fill)
        for index, batch in enumerate(micro_batches):
            if name in batch:
                height, width = batch[name].shape
                padded[name][index, :height, :width] = batch[name]
        padded[name] = padded[name].flatten(0, 1)
    return padded
