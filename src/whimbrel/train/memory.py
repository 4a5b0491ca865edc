"""Predict the memory of a training step by running it on a simulated device (`memory_tracker`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import Layout, World, apply_activation_checkpointing
from whimbrel.model_io import locate_model, open_model, read_config
from whimbrel.models import GPT
from whimbrel.optim import GroupConfig, OptimConfig, ParameterRow, ProjectInBackward, parameter_table
from whimbrel.optim.build import OPTIONS_BY_OPTIMIZER
from whimbrel.precision import MixedPrecision, prepare, quantize_, sdpa_backends
from whimbrel.train import build
from whimbrel.train.build import accumulation_steps
from whimbrel.train.config import TrainConfig
from whimbrel.train.device import Stopwatch, choose_device
from whimbrel.train.finetune import create_objective
from whimbrel.train.initial_model import add_adapters, init_model, resize
from whimbrel.train.memory_tracker import MemoryTracker, simulated_device
from whimbrel.train.objectives import ModelObjective, Objective
from whimbrel.train.run_config import RunConfig
from whimbrel.train.samples import added_tokens, choose_template, is_preference
from whimbrel.train.step import TrainStep

__all__ = [
    "CUBLAS_WORKSPACE_BYTES",
    "Holdings",
    "Measurement",
    "MemoryPrediction",
    "build_dry_run_step",
    "empty_model",
    "measure_optimizer",
    "measure_passes",
    "meta_model",
    "optimizer_names",
    "predict_memory",
    "predict_step",
    "resolve",
    "with_optimizer",
]

CUBLAS_WORKSPACE_BYTES = 64 * 2**20
"""On Hopper, 32 MiB for forward and 32 MiB for backward."""
SAMPLED_BLOCKS = 4
"""Number of blocks on which the optimizer step is measured, instead of on all of them."""
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Bytes of a training step. The categories reach their maxima at different times; `at_peak` adds up to `peak`."""

    device: str
    optimizer: str
    in_backward: bool
    """Whether the optimizer runs in backward, so that gradients are freed early."""
    micro_batch: int
    accumulation: int
    weights: int
    gradients: int
    states: int
    activations: int
    """What forward saves and backward allocates, without the gradients of weights."""
    temporaries: int
    """What the optimizer allocates and frees in its step."""
    peak: int
    """Maximum allocated at once, including the workspace of kernels."""
    phase: str
    """When the peak occurs: forward, backward or step."""
    at_peak: dict[str, int]
    """Composition of the peak."""
    parameters: tuple[ParameterRow, ...]
    """How the optimizer updates each parameter."""
    layout: str = str(Layout())
    """Sizes of the mesh. The bytes are for one rank, the one that needs the most."""


def optimizer_names() -> tuple[str, ...]:
    """All values of `optim.name`."""
    names: tuple[str, ...] = get_args(get_type_hints(OptimConfig)["name"])
    return names


def with_optimizer(config: RunConfig, name: str) -> RunConfig:
    """The same run with another optimizer, keeping the settings that it supports."""
    if name == config.optim.name:
        return config
    options = {option for options in OPTIONS_BY_OPTIMIZER.values() for option in options}
    unsupported = options - set(OPTIONS_BY_OPTIMIZER[name])
    defaults = {field.name: field.default for field in fields(OptimConfig) if field.name in unsupported}
    groups = config.optim.groups
    if "rank" not in OPTIONS_BY_OPTIMIZER[name]:
        groups = tuple(
            GroupConfig(pattern=group.pattern, lr=group.lr, weight_decay=group.weight_decay)
            for group in groups
            if group.lr is not None or group.weight_decay is not None
        )
    return replace(config, optim=replace(config.optim, name=name, groups=groups, **defaults))  # type: ignore[arg-type]


def predict_memory(
    config: RunConfig, device: str | None = None, names: Iterable[str] | None = None
) -> list[MemoryPrediction]:
    """Predict a run's memory for each named optimizer (None: the configured one) and any device, present or not.

    Nothing is allocated. Optimizers that do not support optimizer_in_backward are predicted without it. torch.compile
    is ignored, although it saves fewer activations.
    """
    device_type = choose_device(config.train.device).type if device is None else device
    config = resolve(config, device_type)
    passes: Measurement | None = None
    predictions = []
    for name in [config.optim.name] if names is None else names:
        variant = with_optimizer(config, name)
        if variant.train.optimizer_in_backward:
            try:
                predictions.append(_predict_in_backward(variant, device_type))
                continue
            except ConfigError:
                if name == config.optim.name:
                    raise
                variant = replace(
                    variant, train=replace(variant.train, optimizer_in_backward=False, projected_linears=False)
                )
        # Forward and backward are the same for every optimizer that runs after them.
        passes = passes or measure_passes(variant, device_type)
        predictions.append(_predict_after_backward(variant, device_type, passes))
    return predictions


@dataclass(frozen=True, slots=True)
class Measurement:
    """Memory measured by a tracker in a step or part of one."""

    peak: int
    phase: str
    at_peak: dict[str, int]
    max: dict[str, int]
    profile: dict[tuple[str, int], int]
    """Maximum of activations, by phase and bytes of live gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Bytes that a process, or one rank of several, holds besides activations."""

    weights: int
    gradients: int
    states: int
    temporaries: int
    keeps_gradients: bool = False
    """Whether gradients are allocated all the time, like DDP's buckets."""
    on_host: bool = False
    """Whether weights, gradients and states are in host memory."""
    gathered: int = 0
    """Complete parameters that FSDP has gathered in forward and backward."""
    unreduced: int = 0
    """Complete gradients that FSDP is about to reduce."""
    always: Mapping[str, int] = field(default_factory=dict)
    """Anything else, by name."""


def measure_passes(config: RunConfig, device_type: str) -> Measurement:
    """Forward and backward of the last micro-batch, with the accumulated gradients of the earlier ones."""
    with simulation(device_type) as tracker:
        model = create_model(config, tracker)
        if (config.train.accumulation or 1) > 1:
            for parameter in _trainable(model.parameters()):
                parameter.grad = parameter.new_empty(parameter.shape)  # dense, even for quantized parameters
                tracker.mark([parameter.grad], "gradients")
        optimizer = NoOpOptimizer(model.parameters(), {"lr": 0.0})
        return _measure_step(tracker, config, device_type, model, optimizer, micro_batches=1)


class NoOpOptimizer(Optimizer):
    """Updates nothing and has no state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure


def _predict_in_backward(config: RunConfig, device_type: str) -> MemoryPrediction:
    """Predict with optimizer_in_backward: optimizer and passes overlap, so they are simulated together."""
    accumulation = config.train.accumulation or 1
    with simulation(device_type) as tracker:
        model = create_model(config, tracker)
        optimizer = build.create_optimizer(model, config, None, accumulation=accumulation)
        rows = parameter_table(model, optimizer)
        if isinstance(optimizer, ProjectInBackward):
            optimizer.simulate_peak_step()
        for _ in range(1 if optimizer.state else 2):  # some optimizers create their state in the first step
            measured = _measure_step(tracker, config, device_type, model, optimizer, micro_batches=min(accumulation, 2))
        return _prediction(config, device_type, rows, measured)


def _predict_after_backward(config: RunConfig, device_type: str, passes: Measurement) -> MemoryPrediction:
    """Predict with the optimizer after backward: states add to the passes, temporaries do not overlap them."""
    rows, temporaries = measure_optimizer(config, device_type)
    holdings = Holdings(
        weights=passes.max["weights"],
        gradients=passes.max["gradients"],
        states=sum(row.state_bytes or 0 for row in rows),
        temporaries=temporaries,
    )
    return predict_step(config, device_type, rows, passes, holdings)


def predict_step(
    config: RunConfig, device_type: str, rows: tuple[ParameterRow, ...], passes: Measurement, holdings: Holdings
) -> MemoryPrediction:
    """Find the moment at which activations of `passes`, and what is held at that time, need the most memory.

    A rank that holds a fraction of the gradients holds that fraction of those measured at any time in `passes`.
    """
    constant = {"weights": holdings.weights, "states": holdings.states}
    moments = []
    for (phase, live), activations in passes.profile.items():
        gradients = live * holdings.gradients // passes.max["gradients"]
        held = constant | {"gradients": holdings.gradients if holdings.keeps_gradients else gradients}
        gathered = {"gathered parameters": holdings.gathered}
        if phase == "backward":
            gathered |= {"unreduced gradients": holdings.unreduced}
        moments.append((phase, held, {"activations": activations} | gathered))
    moments.append(("step", constant | {"gradients": holdings.gradients}, {"temporaries": holdings.temporaries}))
    if holdings.on_host:
        moments = [(phase, {}, other) for phase, _, other in moments]
    phase, held, other = max(moments, key=lambda moment: sum(moment[1].values()) + sum(moment[2].values()))
    at_peak = held | other | dict(holdings.always)
    maxima = {"weights": holdings.weights, "gradients": holdings.gradients, "temporaries": holdings.temporaries}
    measured = replace(passes, peak=sum(at_peak.values()), phase=phase, at_peak=at_peak, max=passes.max | maxima)
    return replace(_prediction(config, device_type, rows, measured), states=holdings.states)


def measure_optimizer(config: RunConfig, device_type: str) -> tuple[tuple[ParameterRow, ...], int]:
    """The parameters with their states, and the bytes of temporaries of a step."""
    with simulation(device_type) as tracker:
        model = create_model(config, tracker)
        optimizer = build.create_optimizer(model, config, None)
        return parameter_table(model, optimizer), measure_temporaries(tracker, model, optimizer)


@contextlib.contextmanager
def simulation(device_type: str) -> Iterator[MemoryTracker]:
    with simulated_device(device_type) as tracker, torch.random.fork_rng(devices=()):
        yield tracker


def create_model(config: RunConfig, tracker: MemoryTracker) -> GPT:
    """Create the model on the simulated device; its weights and their gradients are tracked as such."""
    is_dense = config.train.weight_dtype is None and config.lora is None
    model = init_model(config) if is_dense else empty_model(config)
    tracker.mark([*model.parameters(), *model.buffers()], "weights")
    apply_activation_checkpointing(model, config.train.recompute)

    def mark(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            tracker.mark([parameter.grad], "gradients")

    for parameter in _trainable(model.parameters()):
        parameter.register_post_accumulate_grad_hook(mark)
    return model


def _trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def empty_model(config: RunConfig, device: torch.device = HOST) -> GPT:
    """The model in its training form (quantized and with adapters if configured), with uninitialized weights.

    Weights are quantized on the meta device: fake tensors cannot be swapped, and the dense weights might not fit.
    """
    model = meta_model(config)
    model.to_empty(device=device)
    model.tie_head()
    return model


def meta_model(config: RunConfig) -> GPT:
    """The model in its training form on the meta device."""
    with _disable_current_modes(), torch.device("meta"):
        model = init_model(config)
        if config.train.weight_dtype is not None:
            prepare(model, config.train.weight_dtype)
        if config.lora is not None:
            if (weight_format := _frozen_format(config)) is not None:
                quantize_(model, weight_format)
            vocab_size, tokens = _added_tokens(config)
            add_adapters(resize(model, vocab_size), config, tokens)
    return model


def _added_tokens(config: RunConfig) -> tuple[int | None, list[int]]:
    """The vocabulary size of the run, and the ids of the special tokens that `data.template` adds."""
    if config.data.template is None or config.model.path is None or not config.model.path.exists():
        return None, []
    source = open_model(config.model.path)
    tokenizer = choose_template(source, config.data.template)[1]
    return tokenizer.vocab_size, added_tokens(source.tokenizer, tokenizer)


def _frozen_format(config: RunConfig) -> str | None:
    """The format of the frozen linear layers: `model.weights`, or as stored in `model.path`."""
    path = config.model.path
    if config.model.weights is not None or config.lora is None or path is None or not path.is_dir():
        return config.model.weights
    location = locate_model(path)
    stored = None if location.is_adapter else read_config(location.directory).weight_format
    return None if stored is None else stored.name


def _measure_step(
    tracker: MemoryTracker, config: RunConfig, device_type: str, model: GPT, optimizer: Optimizer, *, micro_batches: int
) -> Measurement:
    """Run a step with `micro_batches` micro-batches (forward, backward, clipping, optimizer) and measure it."""
    batches, others = _RandomBatches(config, HOST), (config.train.accumulation or 1) - micro_batches
    loaded = [batches.next_batch() for _ in range(others)]  # a step loads all of its micro-batches first
    shortened = replace(config, train=replace(config.train, accumulation=micro_batches))
    step = build_dry_run_step(shortened, model, HOST, optimizer, tracker.on_event)
    step.precision.scaler = None  # its few scalars do not matter, and it branches on their values
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    tracker.mark(states, "states")
    with _attention_and_offloading(config.train, device_type):
        tracker.reset_peak()
        step.run(1)
    del loaded
    return Measurement(tracker.peak, tracker.phase, dict(tracker.at_peak), dict(tracker.max), dict(tracker.profile))


def measure_temporaries(tracker: MemoryTracker, model: GPT, optimizer: Optimizer) -> int:
    """What an optimizer step allocates and frees.

    All blocks have the same shapes, so a few of them are enough if temporaries do not grow with their number
    (optimizers process parameters in batches of limited size). If they do grow, all blocks are measured.
    """
    blocks = [_trainable(block.parameters()) for block in model.blocks]
    block_parameters = {parameter for block in blocks for parameter in block}
    others = [parameter for parameter in _trainable(model.parameters()) if parameter not in block_parameters]

    def parameters_of_first(count: int) -> list[nn.Parameter]:
        return [parameter for block in blocks[:count] for parameter in block]

    num_sampled = min(len(blocks), SAMPLED_BLOCKS)
    with_others = _measure_optimizer(tracker, optimizer, others + parameters_of_first(num_sampled))
    half, full = (
        _measure_optimizer(tracker, optimizer, parameters_of_first(count)) for count in (num_sampled // 2, num_sampled)
    )
    if len(blocks) > num_sampled and full > 1.8 * half:
        full = _measure_optimizer(tracker, optimizer, parameters_of_first(len(blocks)))
    return max(with_others, full)


def _measure_optimizer(tracker: MemoryTracker, optimizer: Optimizer, parameters: list[nn.Parameter]) -> int:
    """Temporaries of an optimizer step in which only these parameters have gradients."""
    gradients = [parameter.new_empty(parameter.shape) for parameter in parameters]
    has_states = all(parameter in optimizer.state for parameter in parameters)
    for _ in range(1 if has_states else 2):  # the first step may create the states
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        tracker.reset_peak()
        before = tracker.peak
        tracker.on_event("on_pre_optimizer_step")
        optimizer.step()
        tracker.on_event("on_optimizer_step")
        optimizer.zero_grad(set_to_none=True)
    return tracker.peak - before


def _prediction(
    config: RunConfig, device_type: str, rows: tuple[ParameterRow, ...], measured: Measurement
) -> MemoryPrediction:
    extra = {"workspace": CUBLAS_WORKSPACE_BYTES if device_type == "cuda" else 0}
    if config.ema.decay is not None:
        extra["EMA weights"] = sum(4 * math.prod(row.shape) * row.count for row in rows)
    return MemoryPrediction(
        device=device_type,
        optimizer=config.optim.name,
        in_backward=config.train.optimizer_in_backward,
        micro_batch=config.train.micro_batch or 1,
        accumulation=config.train.accumulation or 1,
        weights=measured.max["weights"],
        gradients=measured.max.get("gradients", 0),
        states=sum(row.state_bytes or 0 for row in rows),
        activations=measured.max.get("activations", 0),
        temporaries=measured.max.get("temporaries", 0),
        peak=measured.peak + sum(extra.values()),
        phase=measured.phase,
        at_peak={name: size for name, size in (measured.at_peak | extra).items() if size},
        parameters=rows,
    )


def resolve(config: RunConfig, device_type: str, data_ranks: int = 1) -> RunConfig:
    """Choose the micro-batch, and remove settings that are not predicted."""
    train = config.train
    if (recipe := train.fp8_recipe or train.qat_recipe) is not None:
        raise ConfigError(
            f"expected no train.fp8_recipe or train.qat_recipe for a memory prediction, got {recipe}: remove it, or "
            "measure the peak of a few steps"
        )
    if train.micro_batch is None:
        local = choose_device(train.device)
        if local.type != device_type:
            raise ConfigError(
                f"expected train.micro_batch for a prediction for {device_type} on a machine with {local.type}: set "
                "--train.micro_batch=N"
            )
        with simulation(device_type):
            model = init_model(config) if config.lora is None else meta_model(config)
            world = World(Layout(dp_replicate=data_ranks))
        train = replace(train, micro_batch=build.choose_micro_batch(config, model, local, world))
    assert train.micro_batch is not None
    accumulation = accumulation_steps(config.tokens_per_step, train.micro_batch, config.sequence_length, data_ranks)
    uncompiled: dict[str, Any] = {f.name: f.default for f in fields(TrainConfig) if "compile" in f.name}
    train = replace(train, tokens_per_step=None, accumulation=accumulation, **uncompiled)
    if isinstance(train.recompute, float):  # the compiler decides what to recompute
        train = replace(train, recompute="none")
    return replace(config, train=train)


def build_dry_run_step(
    config: RunConfig,
    model: GPT,
    device: torch.device,
    optimizer: Optimizer,
    dispatch: Callable[[str], object] = lambda event: None,
) -> TrainStep:
    """Create a run's training step with random tokens as data; everything else is built as in training."""
    objective: Objective
    if config.data.sources is not None:
        objective = create_objective(config, model)
    else:
        inputs = () if config.data.documents == "join" else ("documents",)
        objective = ModelObjective(None, lambda x: dict.fromkeys(inputs, x))
    return TrainStep(
        model=model,
        optimizer=optimizer,
        scheduler=build.create_scheduler(optimizer, config, 1000, None),
        batches=_RandomBatches(config, device),  # type: ignore[arg-type]
        objective=objective,
        precision=MixedPrecision(config.train.precision, device),
        accumulation=config.train.accumulation or 1,
        stopwatch=Stopwatch(device),
        dispatch=dispatch,
        lr=lambda: 0.0,
        clip=config.train.clip,
    )


class _RandomBatches:
    """Endless micro-batches of random tokens; two samples per sequence if samples are packed."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        packed, rows = config.data.packing, config.train.micro_batch or 1
        self._shape: tuple[int, ...] = (rows, config.sequence_length)
        if is_preference(config) and not packed:
            self._shape = (rows, 2, config.sequence_length)

    def next_batch(self) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """Inputs and targets; for samples, the batch of the run's objective."""
        config, objective = self._config, self._config.objective
        x = torch.randint(config.model.vocab_size, self._shape, device=self._device)
        if config.data.sources is None:
            return x, x.clone()
        batch = {"input_ids": x, "targets": x.clone()}
        if config.data.packing:
            index, half = torch.arange(config.sequence_length, device=self._device), -(-config.sequence_length // 2)
            batch["documents"] = (index // half).expand(self._shape).clone()
            batch["position_ids"] = (index % half).expand(self._shape).clone()
        if objective.name == "dpo" and (config.lora is None or objective.reference == "precomputed"):
            batch["reference_log_probs"] = torch.zeros(self._shape, device=self._device)
        if objective.name == "distill":
            values = (*self._shape, objective.k)
            batch["teacher_ids"] = torch.zeros(values, dtype=torch.int32, device=self._device)
            batch["teacher_log_probs"] = torch.full(values, -math.log(objective.k), device=self._device)
        return batch


@contextlib.contextmanager
def _attention_and_offloading(train: TrainConfig, device_type: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if train.sdpa_backend in ("math", ("math",)):
            stack.enter_context(sdpa_backends("math"))
        if train.activation_offloading and device_type != "cpu":
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_offload, _reload))
        yield


def _offload(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """Drop the tensor: host memory is not counted."""
    return tensor.shape, tensor.stride(), tensor.dtype


def _reload(offloaded: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> Tensor:
    shape, stride, dtype = offloaded
    return torch.empty_strided(shape, stride, dtype=dtype)
