"""Loading model directories, and what is rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from whimbrel.base.errors import CheckpointError
from whimbrel.model_io import load_model, load_weights, open_model, save_model
from whimbrel.models import GPT, GPTConfig


def edit(path: Path, change: Callable[[dict], object]) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def test_tensor_names_without_the_model_prefix_are_accepted(model, saved):
    weights = load_file(saved / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    renamed["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(renamed, saved / "model.safetensors")
    x = torch.randint(50, (1, 9))
    assert torch.equal(load_model(saved)(x).logits, model(x).logits)


def test_load_weights_copies_in_place(model, saved):
    other = GPT(model.config).to(torch.bfloat16)
    before = {name: id(parameter) for name, parameter in other.named_parameters()}
    load_weights(other, saved)
    assert {name: id(parameter) for name, parameter in other.named_parameters()} == before
    assert torch.equal(other.lm_head.weight, model.lm_head.weight.bfloat16())
    with pytest.raises(CheckpointError, match="expected .* embd_size = 32, got 16"):
        load_weights(GPT(replace(model.config, embd_size=32)), saved)


@pytest.mark.parametrize("value_embeddings", [0, 1])  # as a Llama, and in the format of Whimbrel
def test_dropout_is_a_setting_of_training_and_not_stored(model, tmp_path, value_embeddings):
    config = replace(model.config, num_layers=2, value_embeddings=value_embeddings, layer_types=None, dropout=0.5)
    trained = GPT(config)
    save_model(trained, tmp_path / "dropout")
    loaded = load_model(tmp_path / "dropout")
    assert loaded.config.dropout == 0
    assert not any(module.training for module in loaded.modules())
    x = torch.randint(50, (2, 9))
    assert torch.equal(loaded.train()(x).logits, trained.eval()(x).logits)
    loaded.set_dropout(0.5)
    torch.manual_seed(0)
    expected = trained.train()(x).logits
    torch.manual_seed(0)
    assert torch.equal(loaded(x).logits, expected)


def test_loaded_model_trains_with_a_tied_head(tmp_path):
    model = GPT(GPTConfig(context_length=16, vocab_size=50, num_layers=1, embd_size=16, num_heads=2))
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.token_embedding.weight
    assert not loaded.lm_head.weight[50:].any()
    x = torch.randint(50, (1, 9))
    loaded(x, targets=x).loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type: expected one of gpt2, llama.* got 'bert'"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"hidden_size": None}, "missing key 'hidden_size'"),
        ({"hidden_size": "16"}, "expected an integer"),
        ({"hidden_act": "gelu_fast"}, "hidden_act: expected one of gelu_new.* got 'gelu_fast'"),
        ({"hidden_act": []}, r"hidden_act: expected one of gelu_new.* got \[\]"),
        ({"model_type": []}, r"model_type: expected one of gpt2, llama.* got \[\]"),
        ({"model_type": "whimbrel", "gpt": 5}, "expected an object for gpt, got 5"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "layer_types": 5},
            "layer_types: expected a list, got 5",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "num_hidden_layers": "2"},
            "expected an integer for num_hidden_layers",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": "2"},
            "expected an integer for max_window_layers",
        ),
        ({"rms_norm_eps": 0}, "norm_eps > 0"),
        ({"rope_parameters": 5}, "expected an object for rope_parameters"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "expected an object for rope_scaling"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta > 0"),
        ({"rope_parameters": {"rope_type": []}}, r"rope_type: expected one of default.* got \[\]"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type: expected one of default.* got 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "missing key 'factor'"),
        ({"partial_rotary_factor": 0.5}, "expected partial_rotary_factor = 1"),
        ({"mlp_bias": True}, "mlp_bias without attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 3}, "has no tensor 'model.layers.2."),
        ({"num_hidden_layers": 1}, "has 9 tensors that do not match its config.json"),
        ({"intermediate_size": 60}, r"expected .* of shape \[60, 16\] .* got \[64, 16\]"),
    ],
)
def test_invalid_config_json_is_rejected(saved, change, message):
    edit(saved / "config.json", lambda table: table.update(change))
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(saved)
    assert str(saved) in str(error.value)


def test_unsupported_gpt2_options_are_rejected(tmp_path):
    save_model(GPT(GPTConfig(num_layers=1, embd_size=16, num_heads=2, vocab_size=50)), tmp_path / "model")
    edit(tmp_path / "model" / "config.json", lambda table: table.update(scale_attn_by_inverse_layer_idx=True))
    with pytest.raises(CheckpointError, match="expected scale_attn_by_inverse_layer_idx = False"):
        load_model(tmp_path / "model")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "expected a JSON object, got list"),
        (lambda folder: cut(folder / "model.safetensors"), "not a complete safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: expected model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "only pytorch_model.bin .pickle.",
        ),
    ],
)
def test_damaged_directory_is_rejected(saved, damage, message):
    damage(saved)
    with pytest.raises(CheckpointError, match=message):
        load_model(saved)


def test_missing_model_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="no run or model at"):
        load_model(tmp_path / "nowhere")


def test_integer_weights_are_rejected(saved):
    weights = load_file(saved / "model.safetensors")
    save_file({name: tensor.to(torch.int8) for name, tensor in weights.items()}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected floating-point weights, got torch.int8"):
        load_model(saved)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder, index: (folder / "model-00002-of-00004.safetensors").unlink(), "not in its directory"),
        (lambda folder, index: cut(folder / "model-00002-of-00004.safetensors"), "not a complete safetensors file"),
        (lambda folder, index: edit(index, lambda t: t.pop("weight_map")), "expected 'weight_map'"),
        (
            lambda folder, index: edit(index, lambda t: t["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
            "not in its directory",
        ),
        (
            lambda folder, index: edit(
                index, lambda t: t["weight_map"].update({"model.norm.weight": "model-00001-of-00004.safetensors"})
            ),
            "has no tensor 'model.norm.weight'",
        ),
    ],
)
def test_damaged_shards_are_rejected(model, tmp_path, damage, message):
    folder = tmp_path / "model"
    save_model(model, folder, max_shard_size=12_000)
    assert len(list(folder.glob("*.safetensors"))) == 4
    assert torch.equal(load_model(folder).lm_head.weight, model.lm_head.weight)
    damage(folder, folder / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_config_larger_than_the_weight_files_is_rejected(saved: Path) -> None:
    edit(saved / "config.json", lambda table: table.update(hidden_size=10**7, head_dim=8))
    with pytest.raises(CheckpointError, match=r"describes .* parameters, but the weight files have only"):
        load_model(saved)
    edit(saved / "config.json", lambda table: table.update(num_hidden_layers=10**6))
    with pytest.raises(CheckpointError, match="num_layers <="):
        load_model(saved)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000])
def test_deeply_nested_config_is_rejected(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="nested too deeply|not valid JSON"):
        load_model(saved)


def test_gguf_files_are_rejected_by_name(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    for other in (None, "gpt2"):
        with pytest.raises(CheckpointError, match="is a GGUF file"):
            open_model(tmp_path / "model.gguf", other)
    with pytest.raises(CheckpointError, match="is a GGUF file"):
        load_model(tmp_path / "model.gguf")
