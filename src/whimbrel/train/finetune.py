"""Builds a fine-tuning run from its configuration: `[model] path`, samples in `[data]`, `[lora]` and `[objective]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError
from whimbrel.data.packing import PackedRows, PaddedSamples, TokenizedSamples
from whimbrel.distributed import World
from whimbrel.distributed.strategy import splits
from whimbrel.model_io import load_model
from whimbrel.models import GPT, lora_disabled
from whimbrel.precision import MixedPrecision
from whimbrel.tokenization import ChatTemplate, Tokenizer
from whimbrel.train.build import (
    RunParts,
    SampleFunction,
    accumulation_steps,
    build_callbacks,
    fetch_from_mirror,
    with_micro_batch,
    with_recorded_micro_batch,
)
from whimbrel.train.device import choose_device
from whimbrel.train.distill import Distillation, precompute_teacher
from whimbrel.train.initial_model import initial_model
from whimbrel.train.objectives import ModelObjective, Objective
from whimbrel.train.preference import DPO, ORPO
from whimbrel.train.run_config import RunConfig
from whimbrel.train.samples import PreparedSamples, prepare_samples
from whimbrel.train.target_values import precompute_reference

__all__ = ["build_dataset", "build_finetuning_run", "create_objective"]

Collate = Callable[[list[Any]], Any]


def build_finetuning_run(config: RunConfig, world: World, sample_func: SampleFunction | None = None) -> RunParts:
    """Build the model with its adapters, the datasets, the objective and the callbacks."""
    device = choose_device(config.train.device)
    world.run_on_main(partial(fetch_from_mirror, config))
    config = with_recorded_micro_batch(config, world.dp_size)
    samples = prepare_samples(config, world)
    model = initial_model(config, world, device, samples.tokenizer.vocab_size, samples.added_tokens)
    recorded = with_micro_batch(config, model, device, world)
    train, collate = build_dataset(samples.train, config, samples.tokenizer.eot_id)
    val = None if samples.val is None else build_dataset(samples.val, config, samples.tokenizer.eot_id)[0]
    objective, datasets = _build_objective(recorded, model, {"train": train, "val": val}, collate, samples, world)
    if config.sample.every is not None and samples.template is not None:
        sample_func = sample_func or _chat_sample_func(config, samples.template)
    return RunParts(
        config=_resolve_steps(recorded, world),
        recorded_config=recorded,
        model=model,
        train_dataset=datasets["train"],
        eval_dataset=datasets["val"],
        tokenizer=samples.tokenizer,
        callbacks=build_callbacks(config, samples.tokenizer, sample_func),
        data_collator=collate,
        objective=objective,
    )


def build_dataset(samples: TokenizedSamples, config: RunConfig, pad_id: int) -> tuple[Any, Collate | None]:
    """The samples as a dataset of packed or padded sequences, with its collate function if it is not the default."""
    if config.data.packing:
        return PackedRows(samples, config.sequence_length, pad_id=pad_id, seed=config.train.seed), None
    # The same length for all batches, so that compiled code is not recompiled.
    multiple = config.sequence_length if config.train.compile else 1
    rows = PaddedSamples(samples, pad_id=pad_id, pad_to_multiple_of=multiple)
    return rows, partial(_collate_pairs, rows) if samples.pair else rows.collate


def _collate_pairs(rows: PaddedSamples, examples: list[Any]) -> dict[str, Tensor]:
    """Collate into tensors of shape (pairs, 2, tokens)."""
    return {name: values.view(-1, 2, values.size(-1)) for name, values in rows.collate(examples).items()}


def _resolve_steps(config: RunConfig, world: World) -> RunConfig:
    """Convert `tokens` to steps and `tokens_per_step` to gradient accumulation; the trainer converts epochs."""
    train = config.train
    assert train.micro_batch is not None
    accumulation = accumulation_steps(config.tokens_per_step, train.micro_batch, config.sequence_length, world.dp_size)
    steps = train.steps if train.tokens is None else train.tokens // config.tokens_per_step
    return replace(
        config, train=replace(train, steps=steps, tokens=None, tokens_per_step=None, accumulation=accumulation)
    )


def create_objective(config: RunConfig, model: GPT) -> Objective:
    """The configured objective. Precomputed log-probabilities of a reference or teacher come with the batches."""
    settings = config.objective
    if settings.name == "orpo":
        return ORPO(settings.beta)
    if settings.name == "dpo":
        dpo = DPO(settings.beta, settings.loss, settings.label_smoothing)
        is_base = settings.reference in (None, "base") and config.lora is not None
        return replace(dpo, reference=partial(lora_disabled, model)) if is_base else dpo
    if settings.name == "distill":
        return Distillation(settings.temperature)
    return ModelObjective(count_name="supervised_tokens")


def _build_objective(
    config: RunConfig,
    model: GPT,
    datasets: Mapping[str, Any],
    collate: Collate | None,
    samples: PreparedSamples,
    world: World,
) -> tuple[Objective | None, Mapping[str, Any]]:
    """The objective, and the datasets with the precomputed log-probabilities that it needs."""
    objective = create_objective(config, model)
    if isinstance(objective, DPO) and objective.reference is None:
        datasets = _precomputed_reference(config, model, datasets, collate, samples, world)
    elif isinstance(objective, Distillation):
        datasets = _precomputed_teacher(config, model, datasets, collate, samples, world)
    # With pipeline parallelism, the last stage computes the loss.
    return None if world.layout.pp > 1 else objective, datasets


def _precompute_options(config: RunConfig, collate: Collate | None, world: World) -> dict[str, Any]:
    precision = MixedPrecision(config.train.precision, choose_device(config.train.device))
    options = {"batch_size": config.train.micro_batch, "autocast": precision.autocast, "world": world}
    return options if collate is None else options | {"data_collator": collate}


def _precomputed_reference(
    config: RunConfig,
    model: GPT,
    datasets: Mapping[str, Any],
    collate: Collate | None,
    samples: PreparedSamples,
    world: World,
) -> dict[str, Any]:
    if splits(world, config.parallel):
        raise ConfigError(
            "objective.reference = precomputed needs the complete model on each device, got one sharded across ranks: "
            "train adapters ([lora]) with objective.reference = base, or use ddp"
        )
    model.to(choose_device(config.train.device))
    context = {"reference": partial(lora_disabled, model)} if config.lora is not None else {}
    options = _precompute_options(config, collate, world) | context
    paths = {name: samples.directory / f"reference-{name}" for name in datasets}
    return {
        name: None if rows is None else precompute_reference(model, rows, paths[name], **options)
        for name, rows in datasets.items()
    }


def _precomputed_teacher(
    config: RunConfig,
    model: GPT,
    datasets: Mapping[str, Any],
    collate: Collate | None,
    samples: PreparedSamples,
    world: World,
) -> dict[str, Any]:
    settings, paths = config.objective, {name: samples.directory / f"teacher-{name}" for name in datasets}
    assert settings.teacher is not None  # checked by ObjectiveConfig
    teacher = model  # unused if everything is precomputed already, and on ranks other than 0
    if world.is_main and not all(paths[name].exists() for name, rows in datasets.items() if rows is not None):
        dtype = torch.float32 if config.train.precision == "fp32" else torch.bfloat16
        teacher = load_model(settings.teacher, device=choose_device(config.train.device), dtype=dtype)
        if teacher.config.vocab_size != model.config.vocab_size:
            raise ConfigError(
                f"expected a teacher with the model's vocabulary ({model.config.vocab_size} tokens), got "
                f"{teacher.config.vocab_size} in {settings.teacher}: choose models with the same tokenizer"
            )
    options = _precompute_options(config, collate, world) | {"k": settings.k, "temperature": settings.temperature}
    return {
        name: None if rows is None else precompute_teacher(teacher, rows, paths[name], **options)
        for name, rows in datasets.items()
    }


def _chat_sample_func(config: RunConfig, template: ChatTemplate) -> SampleFunction:
    """A function that answers `sample.prompt` with the inference engine."""

    def sample(model: GPT, tokenizer: Tokenizer, step: int) -> str:
        from whimbrel.inference import generate, stream_text

        settings = config.sample
        prompt = template.encode(tokenizer, [{"role": "user", "content": settings.prompt}])
        ids = generate(
            model, prompt, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature,
            top_k=settings.top_k, seed=config.train.seed + step, stop_ids=tokenizer.eot_id,
        )  # fmt: skip
        return "".join(stream_text(tokenizer, prompt, ids))

    return sample
