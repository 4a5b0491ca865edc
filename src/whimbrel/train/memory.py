"""What a run will need in memory, found by walking through a step of it on tensors that have shapes alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import apply_activation_checkpointing
from whimbrel.models import GPT
from whimbrel.optim import GroupConfig, OptimConfig, ParameterRow, ProjectInBackward, parameter_table
from whimbrel.optim.config import LISTENS
from whimbrel.precision import PrecisionPlan, prepare, sdpa_backends
from whimbrel.train import build
from whimbrel.train.batches import accumulation_steps
from whimbrel.train.config import RunConfig, TrainConfig
from whimbrel.train.device import Stopwatch, choose_device
from whimbrel.train.memory_tracker import MemoryTracker, simulated_device
from whimbrel.train.objectives import ModelObjective
from whimbrel.train.step import TrainStep

__all__ = ["MemoryPrediction", "optimizer_names", "predict_memory", "dry_run", "skeleton", "with_optimizer"]

WORKSPACE = {"cuda": 64 * 2**20}
"""What a device's library of products takes for itself: 32 MiB on Hopper, once for forward and once for backward."""
FEW_BLOCKS = 4
"""From how many blocks it is seen what a step of the optimizer takes."""
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Bytes of a training step on a device. The most of each kind need not be there at once: `peak` says what is."""

    device: str
    optimizer: str
    in_backward: bool
    """Whether it works in backward, where gradients need not wait for its step."""
    micro_batch: int
    accumulation: int
    weights: int
    gradients: int
    """The most that there are at once."""
    states: int
    activations: int
    """The most of what forward keeps and backward makes, gradients of weights apart."""
    temporaries: int
    """The most that the optimizer takes and gives back in its step."""
    peak: int
    """The most that is allocated at once, the workspace of kernels included."""
    phase: str
    """When that is: forward, backward or step."""
    at_peak: dict[str, int]
    """What it then is."""
    moved: tuple[ParameterRow, ...]
    """Who got what of the optimizer."""


def optimizer_names() -> tuple[str, ...]:
    """Every optimizer that a configuration can name."""
    names: tuple[str, ...] = get_args(get_type_hints(OptimConfig)["name"])
    return names


def with_optimizer(config: RunConfig, name: str) -> RunConfig:
    """The same run with another optimizer, which gets those of the settings that it listens to."""
    if name == config.optim.name:
        return config
    special = {setting for listens in LISTENS.values() for setting in listens} - set(LISTENS[name])
    dropped = {field.name: field.default for field in fields(OptimConfig) if field.name in special}
    groups = config.optim.groups
    if "rank" not in LISTENS[name]:
        groups = tuple(
            GroupConfig(pattern=group.pattern, lr=group.lr, weight_decay=group.weight_decay)
            for group in groups
            if group.lr is not None or group.weight_decay is not None
        )
    return replace(config, optim=replace(config.optim, name=name, groups=groups, **dropped))  # type: ignore[arg-type]


def predict_memory(
    config: RunConfig, device: str | None = None, names: Iterable[str] | None = None
) -> list[MemoryPrediction]:
    """What the run needs with each of the named optimizers (None: its own), on a device that need not be here.

    Nothing of it takes memory. An optimizer that cannot work in backward is predicted as it is without. Blocks are
    predicted as they are without torch.compile, which keeps less of them for backward.
    """
    kind = choose_device(config.train.device).type if device is None else device
    config = _settled(config, kind)
    passes: list[_Walk] = []
    found = []
    for name in [config.optim.name] if names is None else names:
        own = with_optimizer(config, name)
        if own.train.optimizer_in_backward:
            try:
                found.append(_within(own, kind))
                continue
            except ConfigError:
                if name == config.optim.name:
                    raise
                own = replace(own, train=replace(own.train, optimizer_in_backward=False, projected_linears=False))
        passes = passes or [_passes(own, kind)]
        found.append(_beside(own, kind, passes[0]))
    return found


@dataclass(frozen=True, slots=True)
class _Walk:
    """What a ledger found in a step, or in a part of one."""

    peak: int
    phase: str
    at_peak: dict[str, int]
    most: dict[str, int]


def _passes(config: RunConfig, kind: str) -> _Walk:
    """Forward and backward of the last micro-batch, which finds the gradients of those before it."""
    with _simulation(kind) as ledger:
        model = _model(config, ledger)
        if (config.train.accumulation or 1) > 1:
            for parameter in model.parameters():
                parameter.grad = parameter.new_empty(parameter.shape)  # plain, also where the parameter is codes
                ledger.mark([parameter.grad], "gradients")
        return _walk(ledger, config, kind, model, NoOpOptimizer(model.parameters(), {"lr": 0.0}), micro_batches=1)


class NoOpOptimizer(Optimizer):
    """Moves nothing, and takes no memory for it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave all as it is."""


def _within(config: RunConfig, kind: str) -> MemoryPrediction:
    """With an optimizer that works in backward, and so has its part in what is there meanwhile."""
    accumulation = config.train.accumulation or 1
    with _simulation(kind) as ledger:
        model = _model(config, ledger)
        optimizer = build.create_optimizer(model, config, None, accumulation=accumulation)
        rows = parameter_table(model, optimizer)
        if isinstance(optimizer, ProjectInBackward):
            optimizer.make_busiest()
        for _ in range(1 if optimizer.state else 2):  # a state may be made in the first step only
            walk = _walk(ledger, config, kind, model, optimizer, micro_batches=min(accumulation, 2))
        return _prediction(config, kind, rows, walk)


def _beside(config: RunConfig, kind: str, passes: _Walk) -> MemoryPrediction:
    """With an optimizer that waits for its step: its state lies beside the passes, and its step comes after them."""
    with _simulation(kind) as ledger:
        model = _model(config, ledger)
        optimizer = build.create_optimizer(model, config, None)
        rows = parameter_table(model, optimizer)
        temporaries = _temporaries(ledger, model, optimizer)
    states = sum(row.state or 0 for row in rows)
    held = {"weights": passes.most["weights"], "gradients": passes.most["gradients"]}
    held |= {"states": states, "temporaries": temporaries}
    walk = _Walk(passes.peak + states, passes.phase, passes.at_peak | {"states": states}, passes.most | held)
    if sum(held.values()) > walk.peak:
        walk = replace(walk, peak=sum(held.values()), phase="step", at_peak=held)
    return _prediction(config, kind, rows, walk)


@contextlib.contextmanager
def _simulation(kind: str) -> Iterator[MemoryTracker]:
    with simulated_device(kind) as ledger, torch.random.fork_rng(devices=()):
        yield ledger


def _model(config: RunConfig, ledger: MemoryTracker) -> GPT:
    """The model, its gradients told apart from what else backward makes."""
    model = build.init_model(config) if config.train.weights is None else skeleton(config)
    ledger.mark([*model.parameters(), *model.buffers()], "weights")
    apply_activation_checkpointing(model, config.train.recompute)

    def mark(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            ledger.mark([parameter.grad], "gradients")

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(mark)
    return model


def skeleton(config: RunConfig, device: torch.device = HOST) -> GPT:
    """The model as it is trained, its numbers unset; made with nothing else beside it.

    Weights become codes on the meta device: simulated tensors cannot be swapped, and plain ones might not fit.
    """
    with _disable_current_modes(), torch.device("meta"):
        model = build.init_model(config)
        if config.train.weights is not None:
            prepare(model, config.train.weights)
    model.to_empty(device=device)
    model.tie_head()
    return model


def _walk(
    ledger: MemoryTracker, config: RunConfig, kind: str, model: GPT, optimizer: Optimizer, *, micro_batches: int
) -> _Walk:
    """A step of so many micro-batches: their passes, norm and clipping, and what the optimizer does."""
    shape = (2, config.train.micro_batch or 1, config.sequence_length)
    others = (config.train.accumulation or 1) - micro_batches
    tokens = [torch.empty(shape, dtype=torch.int64) for _ in range(others)]  # all of a step are there at once
    few = replace(config, train=replace(config.train, accumulation=micro_batches))
    loop = dry_run(few, model, HOST, optimizer, ledger.enter)
    loop.precision.scaler = None  # a few numbers, at which it looks
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    ledger.mark(states, "states")
    with _settings(config.train, kind):
        ledger.forget()
        loop.run(1)
    del tokens
    return _Walk(ledger.peak, ledger.phase, dict(ledger.at_peak), dict(ledger.most))


def _temporaries(ledger: MemoryTracker, model: GPT, optimizer: Optimizer) -> int:
    """The most that a step takes and gives back; of many blocks, which are alike, it is seen from the first few.

    Where each of them still adds to it, all are looked at. Otherwise it has come to the size that work is cut to.
    """
    blocks = [list(block.parameters()) for block in model.blocks]
    inside = {parameter for block in blocks for parameter in block}
    others = [parameter for parameter in model.parameters() if parameter not in inside]

    def moved(count: int) -> list[nn.Parameter]:
        return [parameter for block in blocks[:count] for parameter in block]

    few = min(len(blocks), FEW_BLOCKS)
    all_kinds = _step(ledger, optimizer, others + moved(few))
    half, most = (_step(ledger, optimizer, moved(count)) for count in (few // 2, few))
    if len(blocks) > few and most > 1.8 * half:
        most = _step(ledger, optimizer, moved(len(blocks)))
    return max(all_kinds, most)


def _step(ledger: MemoryTracker, optimizer: Optimizer, parameters: list[nn.Parameter]) -> int:
    """What a step takes and gives back where these have gradients."""
    gradients = [parameter.new_empty(parameter.shape) for parameter in parameters]
    for _ in range(1 if all(parameter in optimizer.state for parameter in parameters) else 2):  # a first makes states
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        ledger.forget()
        before = ledger.peak
        ledger.enter("on_pre_optimizer_step")
        optimizer.step()
        ledger.enter("on_optimizer_step")
        optimizer.zero_grad(set_to_none=True)
    return ledger.peak - before


def _prediction(config: RunConfig, kind: str, moved: tuple[ParameterRow, ...], walk: _Walk) -> MemoryPrediction:
    more = {"workspace": WORKSPACE.get(kind, 0)}
    if config.ema.decay is not None:
        more["mean of weights"] = sum(4 * math.prod(row.shape) * row.count for row in moved)
    return MemoryPrediction(
        device=kind,
        optimizer=config.optim.name,
        in_backward=config.train.optimizer_in_backward,
        micro_batch=config.train.micro_batch or 1,
        accumulation=config.train.accumulation or 1,
        weights=walk.most["weights"],
        gradients=walk.most.get("gradients", 0),
        states=sum(row.state or 0 for row in moved),
        activations=walk.most.get("activations", 0),
        temporaries=walk.most.get("temporaries", 0),
        peak=walk.peak + sum(more.values()),
        phase=walk.phase,
        at_peak={name: size for name, size in (walk.at_peak | more).items() if size},
        moved=moved,
    )


def _settled(config: RunConfig, kind: str) -> RunConfig:
    """The run with its micro-batches settled, and without what is not predicted."""
    train = config.train
    if (other := train.fp8_recipe or train.qat_recipe) is not None:
        raise ConfigError(
            f"memory is not predicted for linear layers that compute otherwise, as by {other}: leave that out "
            "(train.fp8_recipe, train.qat_recipe), or look at the peak of a few steps"
        )
    if train.micro_batch is None:
        here = choose_device(train.device)
        if here.type != kind:
            raise ConfigError(
                f"train.micro_batch is not given, and how many sequences fit on a {kind} device is found there: set "
                "--train.micro_batch=N"
            )
        with _simulation(kind):
            model = build.init_model(config)
        train = replace(train, micro_batch=build.choose_micro_batch(config, model, here))
    assert train.micro_batch is not None
    accumulation = accumulation_steps(config.tokens_per_step, train.micro_batch, config.sequence_length)
    unset: dict[str, Any] = {f.name: f.default for f in fields(TrainConfig) if "compile" in f.name}
    train = replace(train, tokens_per_step=None, accumulation=accumulation, **unset)
    if isinstance(train.recompute, float):  # a choice of the compiler
        train = replace(train, recompute="none")
    return replace(config, train=train)


def dry_run(
    config: RunConfig, model: GPT, device: torch.device, optimizer: Optimizer, dispatch: Callable[[str], object] = str
) -> TrainStep:
    """The loop of a run, its parts made as for the run itself, but for tokens: those are any."""
    documents = config.data.documents != "join"
    return TrainStep(
        model=model,
        optimizer=optimizer,
        scheduler=build.create_scheduler(optimizer, config, 1000, None),
        batches=_AnyTokens(config, device),  # type: ignore[arg-type]
        objective=ModelObjective(None, (lambda x: {"documents": x}) if documents else (lambda _: {})),
        precision=PrecisionPlan(config.train.precision, device),
        accumulation=config.train.accumulation or 1,
        stopwatch=Stopwatch(device),
        dispatch=dispatch,
        lr=lambda: 0.0,
        clip=config.train.clip,
    )


class _AnyTokens:
    """Micro-batches without end."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._shape, self._device = (config.train.micro_batch or 1, config.sequence_length), device
        self._vocab_size = config.model.vocab_size

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        x = torch.randint(self._vocab_size, self._shape, device=self._device)
        return x, x.clone()


@contextlib.contextmanager
def _settings(train: TrainConfig, kind: str) -> Iterator[None]:
    """Attention, and what becomes of activations, as in training."""
    with contextlib.ExitStack() as stack:
        if train.sdpa_backend in ("math", ("math",)):
            stack.enter_context(sdpa_backends("math"))
        if train.activation_offloading and kind != "cpu":
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_leave, _fetch))
        yield


def _leave(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """What goes to the host: nothing of it stays."""
    return tensor.shape, tensor.stride(), tensor.dtype


def _fetch(left: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> Tensor:
    shape, stride, dtype = left
    return torch.empty_strided(shape, stride, dtype=dtype)
