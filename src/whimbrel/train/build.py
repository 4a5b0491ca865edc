"""Builds the parts of a trainer from its configuration: model, data, optimizer, scheduler, callbacks.

The order in which a model is wrapped is fixed in `wrap_model`: quantized, fp8 or fake-quantized linears -> pipeline
stages -> device -> tensor parallelism -> activation checkpointing -> compile -> DDP or FSDP -> allocation of parameters
that were created on the meta device, because ranks have only parts of them (`create_model`). A checkpoint is loaded
after all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from whimbrel.base.errors import CheckpointError, ConfigError, DataError, WhimbrelError
from whimbrel.checkpoint import CheckpointManager, list_checkpoints
from whimbrel.checkpoint import read_manifest as read_checkpoint_manifest
from whimbrel.data import TokenDataLoader, read_manifest
from whimbrel.data.shards import has_split
from whimbrel.distributed import (
    DiLoCo,
    PipelineModel,
    World,
    activation_memory_budget,
    apply_activation_checkpointing,
    apply_tensor_parallel,
    check_same_weights,
    find_blocks,
    offload_activations,
    shard_or_replicate,
)
from whimbrel.distributed.deferred_init import materialize_, move_
from whimbrel.distributed.pipeline import (
    CausalLMStage,
    check_micro_batches,
    check_stages,
    find_tied_parameters,
    min_micro_batches,
    move_other_stages_to_meta,
    split_layers,
    stage_indices,
)
from whimbrel.distributed.state import is_dtensor
from whimbrel.distributed.strategy import pipeline_averages_gradients, uses_fsdp
from whimbrel.model_io import load_tokenizer as load_model_tokenizer
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.gpt import GPTStage
from whimbrel.ops.compiler import check_compiler
from whimbrel.optim import (
    BaseOptimizer,
    LowRankOptimizer,
    OptimConfig,
    ParameterInfo,
    Schedule,
    build_optimizer,
    classify_parameters,
    lr_factor,
    project_in_backward,
    step_in_backward,
)
from whimbrel.precision import MixedPrecision, prepare, sdpa_backends, torch_flags
from whimbrel.tokenization import Tokenizer, load_tokenizer
from whimbrel.train.batches import TokenBatches
from whimbrel.train.callbacks import (
    DivergenceCallback,
    EarlyStoppingCallback,
    EmaCallback,
    MemoryCallback,
    NormsCallback,
    ProfilerCallback,
    SampleCallback,
)
from whimbrel.train.checkpointing import check_savable
from whimbrel.train.config import TrainerConfig
from whimbrel.train.device import choose_device, free_memory
from whimbrel.train.initial_model import initial_model
from whimbrel.train.objectives import Objective
from whimbrel.train.run_config import RunConfig
from whimbrel.train.step import Scheduler

__all__ = [
    "OptimizerChoice",
    "RunParts",
    "SampleFunction",
    "SchedulerChoice",
    "accumulation_steps",
    "build_callbacks",
    "build_run",
    "check_run_directory_unchanged",
    "choose_micro_batch",
    "classified_parameters",
    "compile_ahead",
    "create_optimizer",
    "create_outer_optimizer",
    "create_scheduler",
    "default_micro_batch",
    "fetch_from_mirror",
    "flops_per_token",
    "no_tokenizer_parallelism",
    "num_parameters",
    "set_compile_cache",
    "torch_settings",
    "with_micro_batch",
    "with_recorded_micro_batch",
    "wrap_model",
]

logger = logging.getLogger(__name__)

COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
MAX_EPOCHS_PER_STEP = 16
"""More epochs than this in one optimizer step is treated as a configuration error."""
MAX_MICRO_BATCH_TOKENS = 65_536
"""Tokens per forward pass above which a GPU gets no faster."""
CPU_MICRO_BATCH_TOKENS = 4096
"""Tokens per forward pass on a CPU: enough to keep its cores busy, few enough for its caches."""
ADAM_BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments in fp32."""

OptimizerChoice = Optimizer | OptimConfig | str | Callable[..., Optimizer] | None
SchedulerChoice = Scheduler | str | None
Model = TypeVar("Model", bound=nn.Module)
SampleFunction = Callable[[GPT, Tokenizer, int], str]
"""`(model, tokenizer, step) -> text`: generates a sample during training."""


# A run from a configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything needed to construct a trainer."""

    config: RunConfig
    """The config with run length resolved to steps and tokens_per_step resolved to gradient accumulation."""
    recorded_config: RunConfig
    """The original config with device and micro-batch filled in, as written to `config.toml`."""
    model: GPT
    train_dataset: Any
    eval_dataset: Any
    tokenizer: Tokenizer | None
    callbacks: list[Any]
    data_collator: Callable[[list[Any]], Any] | None = None
    objective: Objective | None = None

    def trainer_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the trainer besides model and callbacks."""
        names = ("train_dataset", "eval_dataset", "data_collator", "objective")
        return {name: getattr(self, name) for name in names} | {"processing_class": self.tokenizer}


def build_run(config: RunConfig, world: World, sample_func: SampleFunction | None = None) -> RunParts:
    """Build the model, data, tokenizer and callbacks; `sample_func` replaces the inference engine for `[sample]`."""
    device = choose_device(config.train.device)
    world.run_on_main(partial(fetch_from_mirror, config))
    config = with_recorded_micro_batch(config, world.dp_size)
    model = initial_model(config, world, device)
    if config.model.path is not None:
        _warn_if_tokenizer_differs(config.data.shards, config.model.path)
    recorded = with_micro_batch(config, model, device, world)
    assert recorded.train.micro_batch is not None
    loader = _build_train_loader(config, device, recorded.train.micro_batch, world)
    tokenizer = _find_tokenizer(config, loader.eot_id)
    return RunParts(
        config=_resolve_steps(recorded, TokenBatches(loader, device)),
        recorded_config=recorded,
        model=model,
        train_dataset=loader,
        eval_dataset=_build_eval_loader(config, device, recorded.train.micro_batch, world),
        tokenizer=tokenizer,
        callbacks=build_callbacks(config, tokenizer, sample_func),
    )


def with_micro_batch(config: RunConfig, model: GPT, device: torch.device, world: World) -> RunConfig:
    """The config with micro-batch size (the same on all ranks) and device filled in."""
    micro_batch = min(world.all_gather_object(choose_micro_batch(config, model, device, world)))
    device_name = config.train.device or device.type
    return replace(config, train=replace(config.train, micro_batch=micro_batch, device=device_name))


def fetch_from_mirror(config: RunConfig) -> None:
    """Download a checkpoint to resume from if the run directory is gone."""
    if config.checkpoint.mirror is not None and config.resume.path is None and not config.overwrite_output_dir:
        manager = CheckpointManager(config.output_dir, mirror=config.checkpoint.mirror, world=World())
        manager.fetch(resume=config.resume.latest, overwrite=False)


def _warn_if_tokenizer_differs(data: Path, model: Path) -> None:
    """Warn if the shards were made with another tokenizer than the model was trained with."""
    manifest = read_manifest(data)
    try:
        tokenizer = load_model_tokenizer(model)
    except (WhimbrelError, OSError):
        return  # the model has no tokenizer that can be read
    if manifest is not None and manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        logger.warning(
            "the tokenizer of model.path = %s differs from that of the shards in %s: prepare the text with --tokenizer "
            "%s unless they are equivalent", model, data, model,
        )  # fmt: skip


def choose_micro_batch(config: RunConfig, model: GPT, device: torch.device, world: World) -> int:
    """`train.micro_batch`, or the largest that fits with weights, gradients, optimizer state and a logits chunk."""
    if config.train.micro_batch is not None:
        return config.train.micro_batch
    parts = world.dp_size * min_micro_batches(config.parallel.pipeline_schedule, world.layout.pp)
    return default_micro_batch(
        config.model,
        config.tokens_per_step // parts if config.tokens_per_step % parts == 0 else config.tokens_per_step,
        config.sequence_length,
        device,
        itemsize=4 if config.train.precision == "fp32" else 2,
        reserve=_training_bytes(model) + 2 * 2**30,
    )


def _training_bytes(model: GPT) -> int:
    """Estimated bytes of all weights, and of the gradients and optimizer state of trainable ones."""
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    return frozen + ADAM_BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters() if p.requires_grad)


def accumulation_steps(tokens_per_step: int, micro_batch: int, sequence_length: int, ranks: int = 1) -> int:
    """Micro-batches per optimizer step of each of the ranks that read different data.

    Raises ConfigError with the nearest valid values if it is not an integer.
    """
    tokens = micro_batch * sequence_length * ranks
    if tokens_per_step % tokens:
        below = tokens_per_step // tokens * tokens
        nearest = f"{below} or {below + tokens}" if below else f"{tokens}"
        over_ranks = (" x ranks", f" x {ranks}", ", or a different number of processes") if ranks > 1 else ("", "", "")
        raise ConfigError(
            f"train.tokens_per_step = {tokens_per_step} is not a multiple of train.micro_batch x sequence length"
            f"{over_ranks[0]} = {micro_batch} x {sequence_length}{over_ranks[1]} = {tokens}: use {nearest}"
            f"{over_ranks[2]}"
        )
    return tokens_per_step // tokens


def default_micro_batch(
    config: GPTConfig, tokens_per_step: int, sequence_length: int, device: torch.device, *, itemsize: int, reserve: int
) -> int:
    """The largest micro-batch that divides the step and fits in 80% of free memory minus `reserve` bytes."""
    sequences = tokens_per_step // sequence_length
    if tokens_per_step % sequence_length:
        below = sequences * sequence_length
        nearest = f"{below} or {below + sequence_length}" if below else f"{sequence_length}"
        raise ConfigError(
            f"train.tokens_per_step = {tokens_per_step} is not a multiple of the sequence length {sequence_length}: "
            f"use {nearest}"
        )
    free = free_memory(device)
    limit = (CPU_MICRO_BATCH_TOKENS if free is None else MAX_MICRO_BATCH_TOKENS) // sequence_length
    if free is not None:
        budget = int(0.8 * free) - reserve
        limit = min(limit, budget // (activation_bytes(config, itemsize) * sequence_length))
    return max(count for count in range(1, min(sequences, max(limit, 1)) + 1) if sequences % count == 0)


def activation_bytes(config: GPTConfig, itemsize: int) -> int:
    """Estimated bytes of activations per token: what norms, matrix products and MLPs save for backward."""
    attention = (2 * config.num_heads + 2 * config.kv_heads) * config.head_dim
    mlp = config.intermediate_size * (4 if config.gated_mlp else 2)
    return config.num_layers * (6 * config.embd_size + attention + mlp) * itemsize


def check_run_directory_unchanged(requested: RunConfig, micro_batch: int | None, ranks: int) -> None:
    """Raise ConfigError if another run has since written a checkpoint with a different micro-batch size."""
    if with_recorded_micro_batch(requested, ranks).train.micro_batch not in (None, micro_batch):
        raise ConfigError(f"{requested.output_dir} changed while this run was starting: start it again")


def with_recorded_micro_batch(config: RunConfig, ranks: int) -> RunConfig:
    """Resume with the checkpoint's micro-batch unless one is set: another size would change the summation order.

    With a different number of ranks, it is used only if it divides a step of this run.
    """
    if config.train.micro_batch is not None or config.overwrite_output_dir:
        return config
    resume_path = config.resume.path
    for path in [resume_path] if resume_path is not None else reversed(list_checkpoints(config.output_dir).values()):
        try:
            recorded = read_checkpoint_manifest(path).metadata.get("micro_batch")
        except CheckpointError:
            continue  # damaged: loading skips it too, with a warning
        if isinstance(recorded, int) and config.tokens_per_step % (recorded * config.sequence_length * ranks) == 0:
            return replace(config, train=replace(config.train, micro_batch=recorded))
        break
    return config


def _resolve_steps(config: RunConfig, batches: TokenBatches) -> RunConfig:
    """Convert the run length to steps and tokens_per_step to gradient accumulation."""
    train = config.train
    assert train.micro_batch is not None
    ranks = batches.loader.world_size
    accumulation = accumulation_steps(config.tokens_per_step, train.micro_batch, config.sequence_length, ranks)
    if train.tokens is not None:
        steps = train.tokens // config.tokens_per_step
    else:
        steps = train.steps if train.steps is not None else batches.steps_for(train.epochs or 0.0, accumulation)
    return replace(
        config,
        train=replace(train, steps=steps, tokens=None, epochs=None, tokens_per_step=None, accumulation=accumulation),
    )


def _build_train_loader(config: RunConfig, device: torch.device, micro_batch: int, world: World) -> TokenDataLoader:
    """The training tokens; a token id outside the model's vocabulary raises when it is read."""
    loader = TokenDataLoader(
        config.data.shards,
        micro_batch,
        config.sequence_length,
        rank=world.dp_rank,
        world_size=world.dp_size,
        device=device,
        seed=config.data.shuffle_seed,
        documents=config.data.documents,
        eot_id=config.data.eot_id,
        vocab_size=config.model.vocab_size,
        verify=config.data.verify,
    )
    if config.tokens_per_step > MAX_EPOCHS_PER_STEP * loader.total_tokens:
        raise ConfigError(
            f"train.tokens_per_step = {config.tokens_per_step:,} is more than {MAX_EPOCHS_PER_STEP} epochs of the "
            f"{loader.total_tokens:,} training tokens in {config.data.shards}: lower it or prepare more text"
        )
    return loader


def _build_eval_loader(
    config: RunConfig, device: torch.device, micro_batch: int, world: World
) -> TokenDataLoader | None:
    """The held-out tokens in their order on disk; None if there are none and validation is not requested."""
    path = config.validation.path or config.data.shards
    requested = config.validation.path is not None or config.validation.every is not None
    if not requested and not has_split(path, "val"):
        return None
    loader = TokenDataLoader(
        path,
        config.validation.micro_batch or micro_batch,
        config.sequence_length,
        split="val",
        rank=world.dp_rank,
        world_size=world.dp_size,
        device=device,
        documents="join" if config.data.documents == "join" else "mask",
        eot_id=config.data.eot_id,
        vocab_size=config.model.vocab_size,
        verify=config.data.verify,
    )
    _warn_if_shards_overlap(config.data.shards, path)
    if config.validation.tokens is not None and config.validation.tokens < loader.T:
        raise ConfigError(
            f"validation.tokens = {config.validation.tokens} is less than one sequence of {loader.T} tokens: increase "
            "it, or lower data.sequence_length"
        )
    if loader.total_tokens <= loader.T:  # the target of a sequence's last token is the token after it
        raise ConfigError(
            f"expected at least {loader.T + 1} validation tokens for sequences of {loader.T}, got "
            f"{loader.total_tokens} in {path}: hold out more, or lower data.sequence_length"
        )
    return loader


def _warn_if_shards_overlap(training: Path, validation: Path) -> None:
    """Warn if a validation shard is identical to a training shard, by the hashes in the manifests."""
    manifests = read_manifest(training), read_manifest(validation)
    if manifests[0] is None or manifests[1] is None:
        return
    train_files = {shard.sha256: shard.file for shard in manifests[0].shards_of("train")}
    for shard in manifests[1].shards_of("val"):
        if shard.sha256 in train_files:
            logger.warning(
                "validation shard %s has the same content as training shard %s: the validation loss measures "
                "memorization", validation / shard.file, training / train_files[shard.sha256],
            )  # fmt: skip


def _find_tokenizer(config: RunConfig, eot_id: int) -> Tokenizer | None:
    """The tokenizer of the shards, to be saved in checkpoints; None if it is not known."""
    path = config.data.shards
    manifest, has_file = read_manifest(path), (path / "tokenizer.json").exists()
    tokenizer = load_tokenizer(path if has_file else "gpt2")
    vocab_size = tokenizer.vocab_size if manifest is None else manifest.tokenizer.vocab_size
    if manifest is None and tokenizer.eot_id != eot_id:
        return None
    if manifest is not None and manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        if not has_file:
            return None
        raise DataError(f"{path / 'tokenizer.json'} is not the tokenizer that its shards were made with: restore it")
    if vocab_size > config.model.vocab_size and config.model.path is not None:
        raise ConfigError(
            f"expected shards with the vocabulary of model.path ({config.model.vocab_size} tokens), got {vocab_size} "
            f"in {path}: prepare the text with --tokenizer {config.model.path}"
        )
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{path} was made with a vocabulary of {vocab_size} tokens and model.vocab_size is "
            f"{config.model.vocab_size}: set --model.vocab_size={vocab_size}, or prepare with another tokenizer"
        )
    return tokenizer


def _engine_sample_func(config: RunConfig) -> SampleFunction:
    """Samples from the inference engine, with the settings of `[sample]`."""

    def sample(model: GPT, tokenizer: Tokenizer, step: int) -> str:
        from whimbrel.inference import generate, stream_text

        # No BOS token: documents in the training data start with end-of-text.
        prompt = tokenizer.encode_prompt(config.sample.prompt, add_special_tokens=False).ids or [tokenizer.eot_id]
        ids = generate(
            model, prompt, max_new_tokens=config.sample.max_new_tokens, temperature=config.sample.temperature,
            top_k=config.sample.top_k, seed=config.train.seed + step,
        )  # fmt: skip
        return config.sample.prompt + "".join(stream_text(tokenizer, prompt, ids))

    return sample


def build_callbacks(config: RunConfig, tokenizer: Tokenizer | None, sample_func: SampleFunction | None) -> list[Any]:
    """The callbacks that the configuration enables."""
    log, checkpoint = config.log, config.checkpoint
    callbacks: list[Any] = []
    if config.sample.every is not None:
        if tokenizer is None:
            raise ConfigError(
                f"sample.every needs the tokenizer, but {config.data.shards} has no tokenizer.json: add it, or remove "
                "sample.every"
            )
        sample = sample_func or _engine_sample_func(config)
        callbacks.append(
            SampleCallback(lambda model, step: sample(cast(GPT, model), tokenizer, step), config.sample.every)
        )
    if config.ema.decay is not None:
        callbacks.append(EmaCallback(config.ema.decay, config.ema.every))
    if config.divergence.action is not None:
        callbacks.append(DivergenceCallback(config.divergence))
    if config.early_stopping.patience is not None:
        callbacks.append(
            EarlyStoppingCallback(
                config.early_stopping.patience, config.early_stopping.threshold, checkpoint.metric,
                checkpoint.greater_is_better,
            )
        )  # fmt: skip
    if log.every is not None:
        callbacks.append(MemoryCallback())
    if log.norms is not None:
        callbacks.append(NormsCallback(log.norms))
    if log.profile is not None:
        callbacks.append(ProfilerCallback(*log.profile))
    return callbacks


# Parts of every trainer


def set_compile_cache() -> None:
    """Keep compiled code in ~/.cache/whimbrel for the next run, instead of /tmp.

    Call it first: torch reads the variable once, and building an optimizer already triggers that.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "whimbrel" / "compiled"
    os.environ.setdefault(COMPILE_CACHE, str(cache))


def wrap_model(model: nn.Module, config: TrainerConfig, device: torch.device, world: World) -> nn.Module:
    """Convert linears, split layers over ranks, move to `device`, checkpoint activations, compile and shard.

    All in place, except that DDP and pipelines wrap the model.
    """
    train, layout = config.train, world.layout
    check_same_weights(model, world)
    if train.linear_recipe is not None:
        alignment = None if train.fp8_recipe is None else train.fp8_dim_alignment
        prepare(model, train.linear_recipe, device=device, precision=train.precision, fp8_dim_alignment=alignment)
    ties = find_tied_parameters(model) if layout.pp > 1 else []
    stages = [model] if layout.pp == 1 else _split_stages(model, config, device, world)
    for stage in stages:
        is_plain = all(type(parameter) is nn.Parameter for parameter in stage.parameters())
        if layout.tp > 1 or not (is_plain and uses_fsdp(world, config.parallel)):
            move_(stage, device)  # FSDP moves one block at a time: the complete model might not fit
        if layout.tp > 1:
            assert world.mesh is not None
            apply_tensor_parallel(stage, world.mesh["tp"])
    if train.recompute != "none":
        apply_activation_checkpointing(model, train.recompute, compiled=train.compile)
    for stage in stages if train.compile else ():
        _compile(stage, config, device)
    average_gradients = not train.optimizer_in_backward
    stages = [
        shard_or_replicate(stage, world, config.parallel, device, average_gradients=average_gradients)
        for stage in stages
    ]
    materialize_(model, stages, torch.device("cpu") if config.parallel.cpu_offload else device)
    if layout.pp == 1:
        return stages[0]
    assert world.mesh is not None
    schedule, micro_batches = config.parallel.pipeline_schedule, train.accumulation or 1
    replicas = world.dp_group if layout.dp > 1 and pipeline_averages_gradients(world, config.parallel) else None
    return PipelineModel(
        model, stages, ties, schedule, micro_batches, device, world.mesh, replicas, timeout=config.parallel.timeout
    )


def _split_stages(model: nn.Module, config: TrainerConfig, device: torch.device, world: World) -> list[nn.Module]:
    """The pipeline stages of this rank; parameters of all others are moved to the meta device."""
    assert world.mesh is not None
    schedule, ranks = config.parallel.pipeline_schedule, world.layout.pp
    check_micro_batches(schedule, ranks, config.train.accumulation or 1)
    head: Any = model.lm_head if isinstance(model, GPT) else getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or hasattr(model, "peft_config"):
        raise ConfigError(
            f"expected a GPT or a decoder-only transformers model for a pipeline, got {type(model).__name__}: set "
            "parallel.pp = 1 and use fsdp"
        )
    indices = stage_indices(schedule, world.mesh.get_local_rank("pp"), ranks)
    costs = [float(sum(p.numel() for p in block.parameters())) for block in find_blocks(model)]
    ranges = split_layers(costs, ranks * len(indices), last=float(sum(p.numel() for p in head.parameters())))
    if not isinstance(model, GPT):
        check_stages(model, ranges)
    stages: list[Any] = [
        GPTStage(model, ranges[index]) if isinstance(model, GPT) else CausalLMStage(model, ranges[index])
        for index in indices
    ]
    for stage in stages:
        stage.autocast = MixedPrecision(config.train.precision, device).autocast
    move_other_stages_to_meta(model, stages)
    return stages


def _compile(model: nn.Module, config: TrainerConfig, device: torch.device) -> None:
    """Compile in place. With the scope "block" all blocks share the graph of the first, since they share their code."""
    if config.train.compile_backend == "inductor":
        check_compiler(device, "train.compile (torch_compile)")
    settings = {"backend": config.train.compile_backend, "mode": config.train.compile_mode}
    if settings["mode"] == "default":
        del settings["mode"]  # torch refuses a mode for backends other than inductor
    if isinstance(model, GPT) and (settings != {"backend": "inductor"} or isinstance(config.train.recompute, float)):
        model.fuses_blocks = False  # hand-written blocks would ignore these settings
    for module in find_blocks(model) if config.train.compile_scope == "block" else [model]:
        if type(module).__module__.startswith("torch.nn."):
            raise ConfigError(
                f"torch.compile skips built-in torch.nn modules, got {type(module).__name__}: wrap it in your own "
                "nn.Module, change compile_scope, or disable train.compile (torch_compile)"
            )
        module.compile(**settings)


def compile_ahead(
    model: nn.Module, objective: Objective, loader: TokenDataLoader, precision: MixedPrecision, device: torch.device
) -> None:
    """Compile with one forward and backward pass on zeros; leaves no gradients in the model."""
    if isinstance(model, PipelineModel):
        return  # its first step compiles
    x = torch.zeros(loader.B, loader.T, dtype=torch.int64, device=device)
    with precision.autocast():
        loss = objective(model, (x, x), torch.ones((), device=device)).loss
    assert loss is not None
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss, parameters, allow_unused=True)  # unlike backward(), it triggers no gradient hooks
    if isinstance(model, GPT) and model.fp8 is not None:
        model.fp8.reset()  # zeros are not text
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def torch_settings(config: TrainerConfig, device: torch.device) -> Iterator[None]:
    """Apply the configured global torch flags, attention kernels and activation offloading; restore them on exit."""
    train = config.train
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            torch_flags(
                matmul_precision=train.matmul_precision,
                detect_anomaly=train.detect_anomaly,
                recompile_limit=train.recompile_limit,
                deterministic=train.deterministic,
            )
        )
        stack.enter_context(sdpa_backends(train.sdpa_backend, set_priority=train.sdpa_set_priority))
        if train.activation_offloading:
            stack.enter_context(offload_activations(device))
        if isinstance(train.recompute, float):
            stack.enter_context(activation_memory_budget(train.recompute))
        stack.enter_context(no_tokenizer_parallelism(config.loader.workers))
        yield


@contextlib.contextmanager
def no_tokenizer_parallelism(workers: int) -> Iterator[None]:
    """Set TOKENIZERS_PARALLELISM=false while there are dataloader workers: forked tokenizer threads can deadlock."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    if workers:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if workers and before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        elif workers:
            os.environ["TOKENIZERS_PARALLELISM"] = str(before)


def create_optimizer(
    model: nn.Module,
    config: TrainerConfig,
    choice: OptimizerChoice,
    *,
    accumulation: int = 1,
    world: World | None = None,
) -> Optimizer:
    """The optimizer passed in, selected by name, or built from the config; wrapped for optimizer_in_backward."""
    check_savable(model)  # before anything is trained that could not be saved
    world = world or World()
    if choice is not None and not isinstance(choice, str) and config.optim != OptimConfig(lr=config.optim.lr):
        logger.warning("ignoring the optimizer settings in the arguments, because an optimizer was passed in")
    if isinstance(choice, Optimizer):
        optimizer = choice
        known = {id(parameter) for parameter in model.parameters()}
        if world.mesh is not None and any(id(p) not in known for group in choice.param_groups for p in group["params"]):
            raise ConfigError(
                "expected an optimizer over the model's parameters, got others (sharding replaces them): pass "
                "a function that creates the optimizer, or its name"
            )
    elif callable(choice):
        optimizer = choice([p for p in model.parameters() if p.requires_grad and not p.is_meta])
    else:
        settings = (
            config.optim if choice is None else config.optim.with_name(choice) if isinstance(choice, str) else choice
        )
        if config.train.optimizer_in_backward and settings.has_option("start") and settings.start is None:
            # Bases from the first gradients would need all gradients in memory at the same time.
            settings = replace(settings, start="random")
        _check_split_matrices(settings, world)
        optimizer = build_optimizer(
            settings, classified_parameters(model), seed=config.train.seed, process_group=world.replica_group
        )
        if isinstance(optimizer, BaseOptimizer):
            optimizer.skip_nonfinite = False  # the trainer checks loss and norm itself, without waiting for the device
    if config.train.optimizer_in_backward:
        return _wrap_in_backward(optimizer, model, config, accumulation, world)
    return optimizer


def _check_split_matrices(config: OptimConfig, world: World) -> None:
    """Raise ConfigError for an optimizer that needs all rows or columns of matrices that ranks split."""
    layout = world.layout
    if layout.tp > 1 and config.name != "adamw":
        raise ConfigError(
            f"optim.name = {config.name} updates complete matrices, which parallel.tp = {layout.tp} splits: use adamw, "
            "or parallel.dp_shard instead of tp"
        )
    if layout.dp_shard > 1 and config.projects_rows:
        setting = f"optim.name = {config.name}" if config.side is None else f"optim.side = {config.side}"
        remedy = "galore_warm" if config.side is None else "right"
        raise ConfigError(
            f"{setting} projects the rows of wide matrices, which fsdp shards: use {remedy}, or parallel.strategy = ddp"
        )


def create_outer_optimizer(model: nn.Module, config: TrainerConfig, world: World, total_steps: int) -> DiLoCo | None:
    """The outer optimizer of `parallel.strategy = "diloco"`; None for other strategies."""
    if not world.independent:
        return None
    for name, is_set in {
        "train.precision = fp16": config.train.precision == "fp16",
        "ema.decay": config.ema.decay,
    }.items():
        if is_set:
            raise ConfigError(f"parallel.strategy = diloco does not work with {name}: remove it, or use ddp")
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return DiLoCo(parameters, config.parallel, world, total_steps)


def _wrap_in_backward(
    optimizer: Optimizer, model: nn.Module, config: TrainerConfig, accumulation: int, world: World
) -> Optimizer:
    """Project gradients in backward if the optimizer needs only projections, else step there.

    Raises ConfigError for settings that need all gradients at once.
    """
    train, layout = config.train, world.layout
    sharded = any(map(is_dtensor, model.parameters()))
    conflicts = {
        "train.precision = fp16": train.precision == "fp16",
        f"parallel.tp = {layout.tp}": layout.tp > 1,
        f"parallel.pp = {layout.pp}": layout.pp > 1,
        "parallel.strategy = diloco": world.independent,
        "train.projected_linears and fsdp": train.projected_linears and sharded,
    }
    if isinstance(optimizer, LowRankOptimizer) and optimizer.can_project:
        reason = "train.optimizer_in_backward projects gradients before their scale is known"
    else:
        reason = "train.optimizer_in_backward updates weights before all gradients are known"
        conflicts |= {
            f"{world.size} processes": world.size > 1,
            f"{accumulation} micro-batches per step": accumulation > 1,
            f"train.clip = {train.clip} (max_grad_norm)": train.clip is not None,
            "train.on_nonfinite = skip": train.on_nonfinite == "skip",
            f"train.projected_linears, as {type(optimizer).__name__} needs full gradients": train.projected_linears,
        }
    for name in (name for name, is_set in conflicts.items() if is_set):
        raise ConfigError(f"{reason}, which does not work with {name}: disable one of them")
    if isinstance(optimizer, LowRankOptimizer) and optimizer.can_project:
        return project_in_backward(
            optimizer,
            accumulation=accumulation,
            model=model if train.projected_linears else None,
            process_group=world.replica_group,
        )
    return step_in_backward(optimizer)


def classified_parameters(model: nn.Module) -> list[ParameterInfo]:
    """Each parameter with its role; for a GPT also how fused weights (QKV, gated MLP) split into matrices."""
    splits: dict[str, tuple[int, ...]] = {}
    if isinstance(model, GPT):
        config = model.config
        q, kv = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
        for name, _ in model.named_parameters():
            if "c_attn" in name and name.endswith("weight"):
                splits[name] = (q, kv, kv)
            elif "c_fc" in name and name.endswith("weight") and config.gated_mlp:
                splits[name] = (config.intermediate_size, config.intermediate_size)
    return classify_parameters(model, splits)


def create_scheduler(optimizer: Optimizer, config: TrainerConfig, total: int, choice: SchedulerChoice) -> Scheduler:
    """The scheduler passed in, selected by name, or built from the config, for `total` steps."""
    if isinstance(choice, ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau is not supported (it needs a metric): pass another scheduler")
    if choice is not None and not isinstance(choice, str):
        if getattr(choice, "optimizer", optimizer) is not optimizer:
            raise ConfigError("the scheduler belongs to a different optimizer: pass both as optimizers=(...)")
        return choice
    schedule = config.schedule if choice is None else config.schedule.with_name(choice)
    return Schedule(optimizer, lambda step: lr_factor(schedule, step, total))


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """FLOPs per token of a forward and backward pass.

    6 per parameter (4 if it is frozen), and attention if the model's config has `num_hidden_layers` and `hidden_size`.
    """
    if isinstance(model, GPT):
        return model.flops_per_token(sequence_length)
    config = getattr(model, "config", None)
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    attention = 12 * layers * width * sequence_length if isinstance(layers, int) and isinstance(width, int) else 0
    return 4 * num_parameters(model) + 2 * num_parameters(model, trainable=True) + attention


def num_parameters(model: nn.Module, *, trainable: bool | None = None) -> int:
    """Number of parameters: all, only trainable ones, or only frozen ones; for a GPT, without padding rows."""
    if isinstance(model, GPT):
        return model.num_parameters(trainable=trainable)
    return sum(p.numel() for p in model.parameters() if trainable is None or p.requires_grad == trainable)
