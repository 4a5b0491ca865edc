"""Jobs for test_trainer.py: runs of the real `Trainer` under a layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import ParallelConfig
from whimbrel.models import GPT, GPTConfig
from whimbrel.optim import OptimConfig
from whimbrel.train.callbacks import EmaCallback, NormsCallback, SampleCallback
from whimbrel.train.config import CheckpointConfig, LogConfig, TrainConfig, TrainerConfig, ValidationConfig
from whimbrel.train.run_config import build_run_config
from whimbrel.train.run_directory import read_log
from whimbrel.train.trainer import BaseTrainer

LENGTH, VOCAB, EXAMPLES = 12, 61, 44
"""44 examples: five steps of eight an epoch, and a step of four that leaves the last micro-batches empty or short."""
SIZES = {"num_layers": 4, "num_heads": 4, "embd_size": 16, "vocab_size": VOCAB, "context_length": LENGTH}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"tied_head": True},
    "llama": {
        "position": "rope", "norm": "rms", "gated_mlp": True, "activation": "silu", "bias": "none",
        "num_kv_heads": 2, "qk_norm": "weighted", "tied_head": False,
    },
    "one-kv-head": {"num_kv_heads": 1},
    "value-embeddings": {"value_embeddings": 1},
    "dropout": {"dropout": 0.2},
}  # fmt: skip
Curve = list[dict[str, float]]
"""Loss, gradient norm and evaluation loss by step."""


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in MODELS:
        return GPT(GPTConfig(**SIZES, **MODELS[kind]))
    if kind == "frozen-embedding":
        model = make_model("gpt2")
        model.get_parameter("transformer.wte.weight").requires_grad_(False)
        return model
    import transformers

    if kind == "hf-gpt2":
        config: Any = transformers.GPT2Config(
            n_layer=4, n_head=4, n_embd=16, vocab_size=VOCAB, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1 if kind == "hf-one-kv-head" else 2,
        hidden_size=16, intermediate_size=32, vocab_size=VOCAB, max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def examples(count: int = EXAMPLES, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Token ids and labels, of which a third is masked in every third example."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        if index % 3 == 0:
            labels[: LENGTH // 3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def make_config(
    output_dir: Path, settings: dict[str, Any], steps: int, train: dict[str, Any], **sections: Any
) -> TrainerConfig:
    return TrainerConfig(
        output_dir=output_dir,
        parallel=ParallelConfig(**settings),
        train=TrainConfig(
            **{"steps": steps, "micro_batch": 2, "accumulation": 4, "precision": "fp32", "clip": 0.3, "device": "cpu"}
            | train
        ),
        optim=OptimConfig(lr=3e-3),
        log=LogConfig(every=1, progress=False),
        checkpoint=sections.pop("checkpoint", CheckpointConfig(at_end=False)),
        **sections,
    )


def run(config: TrainerConfig, kind: str) -> Curve:
    """Train; an existing run in the output directory is resumed."""
    trainer = BaseTrainer(
        config, model_init=partial(make_model, kind), train_dataset=examples(), eval_dataset=examples(6, seed=2)
    )
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    return [
        {"step": entry["step"]} | {name: entry[name] for name in names if name in entry}
        for entry in trainer.state.log_history
    ]


def run_on_lengths(config: TrainerConfig, kind: str, limit: int) -> tuple[list[float], int]:
    """Train on sequences of another length in every step, with at most `limit` schedules; returns losses, schedules."""
    batch, data = config.train.micro_batch * (config.train.accumulation or 1), examples()
    for index, example in enumerate(data):
        length = (4, 5, 6, 4, 7, 5)[index // batch % 6]
        data[index] = {name: values[:length] for name, values in example.items()}
    with mock.patch("whimbrel.distributed.pipeline.MAX_SCHEDULES", limit):
        trainer = BaseTrainer(config, make_model(kind), train_dataset=data)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, len(getattr(trainer.model, "_schedules", ()))


def run_in_parts(
    folder: Path, settings: dict[str, Any], kind: str, steps: int, until: int | None = None, train: Any = None
) -> Curve:
    """Train up to `steps`, or stop after `until` and save; an existing run in `folder` is resumed."""
    checkpoint = CheckpointConfig(every=until, at_end=False) if until else CheckpointConfig(at_end=False)
    config = make_config(
        folder, settings, until or steps, train or {}, checkpoint=checkpoint, validation=ValidationConfig(at_end=False)
    )
    return run(config, kind)


def per_rank(world_size: int, settings: dict[str, Any]) -> dict[str, int]:
    """Micro-batch and accumulation with which the ranks together have the global batch of one process."""
    replicas = world_size // (settings.get("pp", 1) * settings.get("tp", 1))
    return {"micro_batch": 2 // min(replicas, 2), "accumulation": 4 // max(1, replicas // 2)}


def run_with_monitors(config: TrainerConfig, kind: str) -> tuple[dict[str, float], list[str]]:
    """Train with an EMA, norms and samples; returns the last norms, and the samples on this rank."""
    samples: list[str] = []
    callbacks: list[Any] = [EmaCallback(0.5), NormsCallback(2)]
    if config.parallel == ParallelConfig():  # the model is complete on every rank
        callbacks.append(SampleCallback(lambda _, step: samples.append(f"step {step}") or samples[-1], 4))
    model_init = partial(make_model, kind)
    trainer = BaseTrainer(config, model_init=model_init, train_dataset=examples(), callbacks=callbacks)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if any("norm/" in name for name in entry)]
    return {name: value for name, value in logged[-1].items() if "norm/" in name}, samples


def rejection(config: TrainerConfig, options: dict[str, Any]) -> str:
    """The error of a run that must not start."""
    kinds: dict[str, Any] = {"ema": EmaCallback(0.9), "sample": SampleCallback(lambda *_: "", 1)}
    callbacks = [callback for name, callback in kinds.items() if options.pop(name, False)]
    model = make_model(options.pop("model", "gpt2"))
    trainer = BaseTrainer(config, model, train_dataset=examples(), callbacks=callbacks, **options)
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    raise AssertionError("the run was not rejected")


def finetune(table: dict[str, Any], parallel: dict[str, Any]) -> list[tuple[str, float]]:
    """A fine-tuning run from a configuration: training and validation losses."""
    config = build_run_config(table | {"parallel": parallel})
    BaseTrainer.from_config(config).train()
    lines = read_log(config.output_dir / "log.jsonl")
    return [(line["kind"], line["loss"]) for line in lines if "loss" in line]
