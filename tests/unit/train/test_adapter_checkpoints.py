"""Models with adapters, PEFT's and ours: training, checkpoints, exact resume, and loading by PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.model_io import load_adapter, load_model
from whimbrel.models import LoraConfig, apply_lora
from whimbrel.precision import quantize_
from whimbrel.train import TrainingArguments

peft = pytest.importorskip("peft")
Make = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def base(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def adapted(seed: int = 0, **changes: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"]} | changes
    model = base(seed)
    torch.manual_seed(seed + 1)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))


def prompted() -> Any:
    """A prompt-encoder adapter, whose file contains the computed prompt instead of the encoder."""
    model = base()
    torch.manual_seed(1)
    settings = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    return peft.get_peft_model(model, settings)


def added() -> Any:
    """An adapter added to a transformers model."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    model.add_adapter(peft.LoraConfig(r=2, lora_dropout=0.1, fan_in_fan_out=True, target_modules=["c_attn"]))
    return model


def gpt(folder: Path, seed: int = 0, quantize: str | None = None, **changes: Any) -> Any:
    """A GPT with the weights of `base`, and adapters."""
    if not (folder / f"base-{seed}").exists():
        base(seed).save_pretrained(folder / f"base-{seed}")
    model = load_model(folder / f"base-{seed}")
    if quantize is not None:
        quantize_(model, quantize)
    settings = {"rank": 4, "alpha": 8, "dropout": 0.2, "modules": ("q_proj", "v_proj", "down_proj")} | changes
    apply_lora(model, LoraConfig(**settings))
    return model


@pytest.fixture
def rows() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 64, (24, 9), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def settings(args: Make, tmp_path: Path) -> Callable[..., TrainingArguments]:
    return lambda name, steps: args(
        output_dir=str(tmp_path / name), max_steps=steps, save_strategy="steps", save_steps=2, async_save=True,
        gradient_accumulation_steps=2, save_total_limit=None,
    )  # fmt: skip


@pytest.mark.parametrize("make", [adapted, prompted, added, lambda: adapted(modules_to_save=["lm_head"])])
def test_a_model_with_adapters_resumes_bit_identically(settings: Make, fit: Make, rows: Any, make: Make) -> None:
    check_resume(settings, fit, rows, make)


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"quantize": "int8", "use_rslora": True}])
def test_a_gpt_with_adapters_resumes_bit_identically(
    settings: Make, fit: Make, rows: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    check_resume(settings, fit, rows, lambda: gpt(tmp_path, **changes))


def check_resume(settings: Make, fit: Make, rows: Any, make: Make) -> None:
    found = []
    for name, stops in (("uninterrupted", (6,)), ("interrupted", (2, 4, 6))):
        losses: list[str] = []
        for stop in stops:
            trainer, watched = fit(settings(name, stop), make(), train_dataset=rows, resume=True)
            losses += watched.hex
        found.append((losses, trainer.unwrapped_model().state_dict()))
    assert len(found[0][0]) == 6
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())


def test_peft_loads_the_model_of_a_checkpoint(settings: Make, fit: Make, rows: Any) -> None:
    """The frozen base model is not in it."""
    trainer, _ = fit(settings("run", 2), adapted(), train_dataset=rows)
    folder = trainer.checkpoint_manager.newest() / "model"
    assert (folder / "adapter_config.json").is_file()
    assert not (folder / "model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(base(), folder).eval()
    ids = rows[0]["input_ids"][None]
    with torch.no_grad():
        logits = trainer.unwrapped_model().eval()(input_ids=ids).logits
        assert torch.equal(again(input_ids=ids).logits, logits)
        assert not torch.equal(base().eval()(input_ids=ids).logits, logits)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: adapted(seed=5), "base model with different weights"),
        (lambda: adapted(lora_alpha=16), "has an adapter with lora_alpha = 8, but this model has 16"),
        (lambda: adapted(r=2), "has an adapter with r = 4, but this model has 2"),
        (prompted, "has an adapter with "),
    ],
)
def test_another_adapter_or_base_model_raises(settings: Make, fit: Make, rows: Any, other: Make, message: str) -> None:
    fit(settings("run", 2), adapted(), train_dataset=rows)
    with pytest.raises(CheckpointError, match=message) as refused:
        fit(settings("run", 4), other(), train_dataset=rows, resume=True)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_of_a_gpt_has_only_adapters_which_peft_loads(
    settings: Make, fit: Make, rows: Any, tmp_path: Path
) -> None:
    trainer, _ = fit(settings("run", 2), gpt(tmp_path), train_dataset=rows)
    folder = trainer.checkpoint_manager.newest() / "model"
    assert {path.name for path in folder.glob("*.safetensors")} == {"adapter_model.safetensors"}
    ids = rows[0]["input_ids"][None]
    again, ours = peft.PeftModel.from_pretrained(base(), folder).eval(), load_model(tmp_path / "base-0")
    load_adapter(ours, folder)
    with torch.no_grad():
        logits = trainer.unwrapped_model().eval()(input_ids=ids).logits
        assert torch.equal(ours.eval()(input_ids=ids).logits, logits)
        torch.testing.assert_close(again(input_ids=ids).logits, logits, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(base().eval()(input_ids=ids).logits, logits, atol=1e-3)
    trainer.save_model(tmp_path / "exported")
    assert (tmp_path / "exported/adapter_model.safetensors").read_bytes() == (
        folder / "adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, "base model with different weights"),
        ({"quantize": "int8"}, "base model with different weights"),
        ({"alpha": 16}, "has an adapter with lora_alpha = 8, but this model has 16"),
        ({"modules": ("q_proj",)}, "has an adapter with target_modules = "),
        ({"use_dora": True}, "has an adapter with use_dora = False, but this model has True"),
    ],
)
def test_a_gpt_with_another_adapter_or_base_model_raises(
    settings: Make, fit: Make, rows: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    fit(settings("run", 2), gpt(tmp_path), train_dataset=rows)
    with pytest.raises(CheckpointError, match=message) as refused:
        fit(settings("run", 4), gpt(tmp_path, **changes), train_dataset=rows, resume=True)
    assert "\n" not in str(refused.value)


def test_a_gpt_that_trains_more_than_adapters_is_not_saved(
    settings: Make, fit: Make, rows: Any, tmp_path: Path
) -> None:
    model = gpt(tmp_path)
    model.transformer["ln_f"].weight.requires_grad = True
    with pytest.raises(ConfigError, match=r"only adapters to be trained, got 'transformer.ln_f.weight'"):
        fit(settings("run", 2), model, train_dataset=rows)
