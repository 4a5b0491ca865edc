"""Runs with fp8, fake-quantized (QAT) or int8 linear layers."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.callbacks import InterruptAt
from torch import nn

from whimbrel.base.errors import ConfigError, MissingExtraError, PrecisionError
from whimbrel.inference import generate
from whimbrel.model_io import load_model
from whimbrel.models import GPT
from whimbrel.precision import QuantizedWeight, finalize, prepare
from whimbrel.train import BaseTrainer, RunConfig, Trainer, TrainerCallback, load_run_config
from whimbrel.train.memory import predict_memory

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package 'torchao'")
Make = Callable[..., Any]
SIZE = {"model__embd_size": 128, "train__steps": 6, "checkpoint__every": 2}
RECIPES = {
    "tensorwise": {"train__fp8_recipe": "tensorwise", "train__precision": "bf16"},
    "rowwise_with_gw_hp": {"train__fp8_recipe": "rowwise_with_gw_hp", "train__fp8_dim_alignment": 32},
    "int8-dynamic-act-int4-weight": {"train__qat_recipe": "int8-dynamic-act-int4-weight"},
    "int4-weight-only": {"train__qat_recipe": "int4-weight-only", "train__precision": "bf16"},
    "int8": {"train__weight_dtype": "int8"},
}


def losses_of(config: RunConfig, *callbacks: Any) -> tuple[Trainer, list[str]]:
    losses: list[str] = []

    class Losses(TrainerCallback):
        def on_train_metrics(self, **event: Any) -> None:
            losses.append(event["metrics"]["loss"].hex())

    trainer = Trainer.from_config(config, callbacks=[Losses(), *callbacks])
    trainer.train()
    return trainer, losses


@pytest.mark.parametrize("name", RECIPES)
def test_a_killed_run_resumes_bit_identically(make_run: Make, tmp_path: Path, name: str) -> None:
    settings = SIZE | RECIPES[name]
    uninterrupted, reference = losses_of(make_run(**settings, output_dir=tmp_path / "uninterrupted"))
    interrupted = make_run(**settings, output_dir=tmp_path / "interrupted")
    with pytest.raises(KeyboardInterrupt):
        losses_of(interrupted, InterruptAt(3))
    again, last = losses_of(interrupted)
    assert again.resumed_from is not None
    assert again.resumed_from.name == "step-00000002"
    assert last == reference[2:]
    for own, other in zip(
        uninterrupted.unwrapped_model().parameters(), again.unwrapped_model().parameters(), strict=True
    ):
        assert torch.equal(own, other)


@pytest.mark.parametrize("name", ["tensorwise", "int8-dynamic-act-int4-weight"])
def test_checkpoints_contain_unquantized_weights(make_run: Make, tmp_path: Path, name: str) -> None:
    """They load like any checkpoint and finalize to the same model as the trained one."""
    trainer, _ = losses_of(make_run(**SIZE | RECIPES[name]))
    saved, own = load_model(tmp_path / "run"), trainer.unwrapped_model()
    assert all(type(module).__module__.startswith(("torch.nn", "whimbrel")) for module in saved.modules())
    weights = dict(saved.named_parameters())
    assert all(torch.equal(weights[key], parameter) for key, parameter in own.named_parameters())
    x = torch.randint(300, (2, 16))
    finalize(saved, name).eval()
    finalize(own, name).eval()
    assert torch.equal(saved(x).logits, own(x).logits)


def test_int8_weights_are_saved_as_int8(make_run: Make, tmp_path: Path) -> None:
    trainer, _ = losses_of(make_run(**SIZE | RECIPES["int8"]))
    saved, own = load_model(tmp_path / "run"), trainer.unwrapped_model()
    held = [type(parameter) for parameter in own.parameters()]
    assert held.count(QuantizedWeight) == 8
    assert [type(parameter) for parameter in saved.parameters()] == held
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), own.parameters(), strict=True))
    summary = trainer._summary()
    assert "int8 weights" in summary.features
    linears = sum(p.numel() for p in own.parameters() if isinstance(p, QuantizedWeight))
    plain = 4 * sum(p.numel() for p in own.parameters())
    assert summary.memory.gradients == plain
    assert plain - 3 * linears < summary.memory.weights < plain - 2.9 * linears


@pytest.mark.parametrize("name", ["rowwise_with_gw_hp", "int8-dynamic-act-int4-weight", "int8"])
def test_callbacks_see_unquantized_values(make_run: Make, tmp_path: Path, name: str) -> None:
    """Samples, norms, validation and EMA, which is saved as a model."""
    watched = {
        "ema__decay": 0.5,
        "log__norms": 2,
        "sample__every": 3,
        "validation__every": 3,
        "validation__tokens": 256,
    }
    texts: list[str] = []

    def sampler(model: GPT, tokenizer: Any, step: int) -> str:
        ids = generate(model, [tokenizer.eot_id], max_new_tokens=4, seed=step)
        texts.append(tokenizer.decode(list(ids)))
        return texts[-1]

    trainer = Trainer.from_config(make_run(**SIZE | RECIPES[name] | watched), callbacks=[], sample_func=sampler)
    trainer.train()
    assert len(texts) == 2
    norms = [line for line in trainer.state.log_history if "weight_norm/transformer.h.0.mlp.c_fc.weight" in line]
    assert [line["step"] for line in norms] == [2, 4, 6]
    assert all(3 < line["weight_norm/transformer.h.0.mlp.c_fc.weight"] < 6 for line in norms)
    assert all(line["grad_norm/transformer.h.0.mlp.c_fc.weight"] > 0 for line in norms)
    mean, last = load_model(tmp_path / "run" / "ema" / "step-00000006"), load_model(tmp_path / "run")
    assert [type(one) for one in mean.parameters()] == [type(one) for one in last.parameters()]
    assert not torch.equal(mean.lm_head.weight, last.lm_head.weight)


def test_arguments_reach_the_linears(args: Make, fit: Make, data: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The 4 x 16 and 16 x 3 layers are skipped unless the alignment allows them."""
    with pytest.raises(PrecisionError, match=r"fp8_recipe = rowwise: no supported linear layer in Net .*got \(16, 4\)"):
        fit(args(fp8_recipe="rowwise"))
    caplog.clear()
    with caplog.at_level(logging.INFO, "whimbrel"):
        trainer, losses = fit(args(fp8_recipe="rowwise", fp8_dim_alignment=4, max_steps=20))
    kinds = [type(module).__name__ for module in trainer.model.layers]
    assert kinds == ["Float8Linear", "Tanh", "Dropout", "Linear"]
    assert losses.values[-1] < 0.7 * losses.values[0]
    assert [line for line in caplog.messages if "skips layers.3" in line] == [
        "fp8_recipe = rowwise skips layers.3: expected dimensions in multiples of fp8_dim_alignment = 4, got (3, 16)"
    ]
    with pytest.raises(PrecisionError, match="layers.0 is a Float8Linear"):
        fit(args(fp8_recipe="rowwise", fp8_dim_alignment=4, overwrite_output_dir=True), trainer.model)
    trainer.train()
    assert [type(module).__name__ for module in trainer.model.layers] == kinds
    assert type(finalize(trainer.model, "rowwise").layers[0]) is nn.Linear


@pytest.mark.parametrize("recipe", [{"fp8_recipe": "rowwise_with_gw_hp"}, {"qat_recipe": "int4-weight-only"}])
def test_transformers_models_train_with_the_recipe(args: Make, tmp_path: Path, recipe: dict[str, str]) -> None:
    """transformers loads its checkpoint; under autocast its norms pass fp32 to linears."""
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(shape)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (8, 16))]
    given = args(save_strategy="steps", save_steps=4, max_steps=4, mixed_precision="bf16", learning_rate=1e-3, **recipe)
    BaseTrainer(given, model, train_dataset=rows, callbacks=[]).train()
    assert type(model.lm_head) is nn.Linear is not type(model.model.layers[0].mlp.up_proj)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000004" / "model")
    weights = dict(saved.named_parameters())
    assert all(torch.equal(weights[name], own) for name, own in model.named_parameters())


def test_quantized_weights_that_cannot_be_saved_raise_before_training(args: Make, fit: Make, net: Make) -> None:
    model = net()
    prepare(model, "int8")
    with pytest.raises(PrecisionError, match=r"got int8 for layers\.0\.weight"):
        fit(args(), model)


@pytest.mark.parametrize(
    "settings", [{"recompute": "full"}, {"recompute": "selective"}, {"optimizer_in_backward": True}]
)
@pytest.mark.parametrize("name", ["tensorwise", "int4-weight-only", "int8"])
def test_recipes_work_with_other_features(make_run: Make, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Activation checkpointing and stepping in backward do not change the losses."""
    recipe = SIZE | RECIPES[name] | {"train__steps": 3, "train__micro_batch": 8}
    _, reference = losses_of(make_run(**recipe, output_dir=tmp_path / "a"))
    more = {f"train__{key}": value for key, value in settings.items()}
    _, losses = losses_of(make_run(**recipe | more, output_dir=tmp_path / "b"))
    assert len(losses) == 3
    assert [float.fromhex(loss) for loss in losses] == pytest.approx(
        [float.fromhex(loss) for loss in reference], abs=2e-3
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__fp8_recipe": "rowwise", "train__qat_recipe": "int4-weight-only"},
            "train.fp8_recipe = rowwise and train.qat_recipe = int4-weight-only are mutually exclusive",
        ),
        (
            {"train__weight_dtype": "int8", "train__fp8_recipe": "rowwise"},
            "train.fp8_recipe = rowwise and train.weight_dtype = int8",
        ),
        (
            {"train__fp8_recipe": "rowwise", "train__projected_linears": True, "train__optimizer_in_backward": True},
            "train.fp8_recipe = rowwise and train.projected_linears = True are mutually",
        ),
        ({"train__weight_dtype": "int4"}, "train.weight_dtype: expected int8, got 'int4'"),
        (
            {"train__qat_recipe": "fp8"},
            "train.qat_recipe: expected one of int8-dynamic-act-int4-weight, int4-weight.* got 'fp8'",
        ),
        ({"train__fp8_dim_alignment": 32}, "train.fp8_dim_alignment = 32 needs train.fp8_recipe"),
        (
            {"train__fp8_recipe": "rowwise", "train__fp8_dim_alignment": 0},
            "fp8_dim_alignment > 0, got 0",
        ),
    ],
)
def test_conflicting_recipes_raise(make_run: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_run(**changes)


@pytest.mark.parametrize("name", ["tensorwise", "int4-weight-only"])
def test_memory_prediction_rejects_recipes_it_cannot_simulate(make_run: Make, name: str) -> None:
    with pytest.raises(ConfigError, match=f"memory prediction, got {name}"):
        predict_memory(make_run(**SIZE | RECIPES[name]))


def test_the_recipe_is_recorded_in_the_config(make_run: Make, tmp_path: Path) -> None:
    trainer, _ = losses_of(make_run(**SIZE | RECIPES["int4-weight-only"] | {"train__steps": 1}))
    written = load_run_config(tmp_path / "run" / "config.toml")
    assert written.train.qat_recipe == "int4-weight-only"
    assert "QAT int4-weight-only" in trainer._summary().features


def test_a_missing_torchao_raises_before_the_run(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match="qat_recipe = int4-weight-only needs the package 'torchao'"):
        losses_of(make_run(**SIZE | RECIPES["int4-weight-only"]))
    assert not list((tmp_path / "run").glob("**/*.safetensors"))
