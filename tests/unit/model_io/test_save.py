"""`save_model`: the files it writes, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from whimbrel.base.errors import ConfigError, WriteError
from whimbrel.model_io import GenerationConfig, export_hf, load_model, load_tokenizer, open_model, save_model
from whimbrel.models import GPT, GPTConfig


def test_saved_directory_has_the_files_that_other_tools_expect(tmp_path):
    tokenizer = load_tokenizer("gpt2")
    model = GPT(GPTConfig(context_length=16, num_layers=1, embd_size=16, num_heads=2))
    save_model(model, tmp_path / "model", tokenizer)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["model_type"], config["architectures"], config["dtype"]) == ("gpt2", ["GPT2LMHeadModel"], "float32")
    assert open_model(tmp_path / "model").generation_config == GenerationConfig(
        bos_token_id=50256, eos_token_ids=(50256,)
    )
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights["transformer.wte.weight"].shape == (50257, 16)
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (16, 48)
    assert "lm_head.weight" not in weights
    assert load_tokenizer(tmp_path / "model").fingerprint == tokenizer.fingerprint


def test_saving_is_atomic_and_does_not_overwrite(model, saved, tmp_path, monkeypatch):
    with pytest.raises(WriteError, match="exists and is not empty"):
        save_model(model, saved)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whimbrel.model_io.weights.write_tensors", full)
    with pytest.raises(WriteError, match="No space left on device"):
        save_model(model, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_state_is_saved_instead_of_the_current_weights(model, tmp_path):
    state = {name: parameter.detach().clone() + 1 for name, parameter in model.named_parameters()}
    save_model(model, tmp_path / "copy", state=state)
    loaded = dict(load_model(tmp_path / "copy").named_parameters())
    vocabulary = model.config.vocab_size
    for name, parameter in state.items():
        rows = slice(vocabulary) if name in ("transformer.wte.weight", "lm_head.weight") else slice(None)
        assert torch.equal(loaded[name][rows], parameter[rows])


def test_tokenizer_larger_than_the_model_is_rejected(model, tmp_path):
    with pytest.raises(ConfigError, match="at most 50 tokens .* got 50257"):
        save_model(model, tmp_path / "model", load_tokenizer("gpt2"))


def test_export_keeps_all_chat_templates(saved, tmp_path):
    (saved / "chat_template.jinja").write_text("default")
    (saved / "additional_chat_templates").mkdir()
    (saved / "additional_chat_templates" / "tools.jinja").write_text("tools")
    export_hf(saved, tmp_path / "exported")
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == "default"
    assert (tmp_path / "exported" / "additional_chat_templates" / "tools.jinja").read_text() == "tools"
