"""Adapter directories: what is written, and which directories are rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models import KINDS, add_noise

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.model_io import load_adapter, load_model, load_weights, merge_adapter, read_adapter, save_adapter
from whimbrel.model_io import save_model as save
from whimbrel.model_io.adapter import load_adapter_weights
from whimbrel.models import GPT, LoraConfig, apply_lora, lora_parameters, merge_lora

LLAMA = KINDS["llama3"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def model() -> GPT:
    """A model with adapters that change its outputs."""
    model = add_noise(GPT(LLAMA))
    apply_lora(model, LoraConfig(rank=4, alpha=6, modules=("q_proj", "up_proj")))
    with torch.no_grad():
        for _, parameter in lora_parameters(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.fixture
def folder(model: GPT, tmp_path: Path) -> Path:
    save_adapter(model, tmp_path / "adapter", base_model="some/base")
    return tmp_path / "adapter"


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_an_adapter_that_was_saved_is_read_back_exactly(model, folder):
    adapter = read_adapter(folder, LLAMA)
    assert adapter.config == LoraConfig(rank=4, alpha=6, modules=("q_proj", "up_proj"))
    assert adapter.base_model == "some/base"
    assert [module.target.module for module in adapter.modules[:2]] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
    ]
    assert adapter.modules[1].target.linear == "transformer.h.0.mlp.c_fc"
    assert adapter.modules[1].scaling == 1.5
    parameters = dict(lora_parameters(model))
    for module in adapter.modules:
        prefix = f"{module.target.linear}.adapters.{module.target.name}"
        assert torch.equal(module.down, parameters[f"{prefix}.lora_A"])
        assert torch.equal(module.up, parameters[f"{prefix}.lora_B"])


def test_a_loaded_adapter_can_be_trained_and_saved_again(model, folder, tmp_path):
    torch.manual_seed(0)
    again = add_noise(GPT(LLAMA))
    load_adapter(again, folder)
    ids = torch.randint(97, (2, 12))
    assert torch.equal(again(ids).logits, model(ids).logits)
    again(ids, labels=ids).loss.backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in again.parameters())
    save_adapter(again, tmp_path / "again")
    one, other = (load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"peft_type": "IA3"}, "expected peft_type = 'LORA', got 'IA3'"),
        ({"bias": "all"}, "expected bias = 'none', got 'all'"),
        ({"task_type": "SEQ_CLS"}, "expected task_type = 'CAUSAL_LM', got 'SEQ_CLS'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not supported"),
        ({"init_lora_weights": "pissa"}, "expected init_lora_weights = .* got 'pissa'"),
        ({"layer_replication": [[0, 1]]}, "layer_replication = .* is not supported"),
        ({"lora_bias": True}, "lora_bias = True is not supported"),
        ({"trainable_token_indices": [1]}, "rows of trainable tokens of shape .* for transformer.wte, got none"),
        ({"trainable_token_indices": [1, 1]}, "trainable_token_indices to be a list of token ids"),
        ({"trainable_token_indices": {"q_proj": [1]}}, "trainable_token_indices to be a list of token ids"),
        ({"use_qalora": True}, "use_qalora = True is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"some_new_setting": 3}, "some_new_setting = 3 is not supported"),
        ({"r": 8}, "expected rank 8 for .*q_proj .*, got 4"),
        ({"r": "many"}, "adapter_config.json"),
        ({"lora_alpha": -1}, "positive lora.alpha, got -1"),
        ({"rank_pattern": {"up_proj": 2}}, "expected rank 2 for .*up_proj .*, got 4"),
        ({"use_dora": True}, "lora_magnitude_vector of .* is missing"),
    ],
)
def test_settings_that_are_not_supported_are_rejected(folder, entries, message):
    change_config(folder, **entries)
    with pytest.raises(CheckpointError, match=message) as refused:
        read_adapter(folder, LLAMA)
    assert "\n" not in str(refused.value)


def test_entries_that_are_unset_or_have_no_effect_are_accepted(folder):
    change_config(
        folder, peft_version="9.9", revision="main", layers_pattern=None, megatron_core="megatron.core",
        init_lora_weights="gaussian", target_parameters=[], lora_bias=False, arrow_config=None, qalora_group_size=16,
        exclude_modules=None, loftq_config={}, auto_mapping={"base_model_class": "X"}, task_type=None,
    )  # fmt: skip
    assert len(read_adapter(folder, LLAMA).modules) == 2 * LLAMA.num_layers


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda name: name.replace("layers.2", "layers.9"), "expected adapters of linear layers of this model"),
        (lambda name: name.replace("mlp.up_proj", "lm_head"), "embeddings and the head are not supported"),
        (lambda name: name.replace("lora_A", "lora_embedding_A"), "is not supported: expected LoRA weights"),
        (lambda name: None if "layers.1.mlp.up_proj.lora_B" in name else name, "lora_B of .* is missing"),
        (lambda name: None, "has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(folder, rename, message):
    path = folder / "adapter_model.safetensors"
    tensors = {renamed: tensor for name, tensor in load_file(path).items() if (renamed := rename(name)) is not None}
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(folder, LLAMA)


def test_names_without_the_prefix_of_the_head_are_accepted(folder):
    path = folder / "adapter_model.safetensors"
    save_file({name.replace("model.model.model.", "model.model."): t for name, t in load_file(path).items()}, path)
    assert len(read_adapter(folder, LLAMA).modules) == 2 * LLAMA.num_layers


def test_other_architectures_and_incomplete_directories_are_rejected(folder):
    with pytest.raises(CheckpointError, match=r"expected lora_B of .*up_proj of shape \[64, 4\].*: use the base model"):
        read_adapter(folder, replace(LLAMA, mlp_size=64))
    with pytest.raises(CheckpointError, match="expected adapters of linear layers of this model"):
        read_adapter(folder, KINDS["gpt2"])
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match="cannot read .*adapter_model.safetensors"):
        read_adapter(folder, LLAMA)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"found only adapter_model.bin \(pickle\)"):
        read_adapter(folder, LLAMA)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_config.json: expected the directory of a PEFT adapter"):
        read_adapter(folder, LLAMA)


def test_weights_are_loaded_into_adapters_of_the_same_settings_only(model, folder):
    torch.manual_seed(0)
    same, other, none = (add_noise(GPT(LLAMA)) for _ in range(3))
    apply_lora(same, LoraConfig(rank=4, alpha=6, modules=("q_proj", "up_proj")))
    load_adapter_weights(same, folder)
    for (name, one), (_, expected) in zip(lora_parameters(same), lora_parameters(model), strict=True):
        assert torch.equal(one, expected), name
    apply_lora(other, LoraConfig(rank=4, alpha=6, modules=("q_proj", "up_proj"), use_rslora=True))
    with pytest.raises(CheckpointError, match="other modules, ranks or kinds than this model"):
        load_adapter_weights(other, folder)
    with pytest.raises(ConfigError, match="use load_adapter"):
        load_adapter_weights(none, folder)


def test_models_with_adapters_are_not_saved_without_them(model, tmp_path):
    with pytest.raises(ConfigError, match="call merge_lora first, or save the adapters with save_adapter"):
        save(model, tmp_path / "model")
    merge_lora(model)
    with pytest.raises(ConfigError, match="expected a model with adapters, got one without"):
        save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_the_base_model_that_was_loaded_is_recorded(tmp_path):
    save(GPT(LLAMA), tmp_path / "base")
    model = load_model(tmp_path / "base")
    apply_lora(model, LoraConfig(rank=2))
    save_adapter(model, tmp_path / "adapter")
    assert read_adapter(tmp_path / "adapter", LLAMA).base_model == str(tmp_path / "base")


def test_base_weights_are_loaded_into_a_model_that_has_adapters(model, folder, tmp_path):
    ids = torch.randint(97, (2, 12))
    expected = model(ids).logits
    torch.manual_seed(0)
    save(add_noise(GPT(LLAMA)), tmp_path / "base")
    with torch.no_grad():
        model.get_parameter("transformer.h.0.attn.c_attn.weight").zero_()
    load_weights(model, tmp_path / "base")
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_merging_writes_a_dense_model_directory(model, folder, tmp_path, quantize):
    ids = torch.randint(97, (2, 12))
    torch.manual_seed(0)
    save(add_noise(GPT(LLAMA)), tmp_path / "dense")
    base = load_model(tmp_path / "dense", quantize=quantize)
    save(base, tmp_path / "base")
    load_adapter(base, folder)
    merge_adapter(tmp_path / "base", folder, tmp_path / "merged")
    merged = load_model(tmp_path / "merged")
    assert all(type(parameter.data) is torch.Tensor for parameter in merged.parameters())
    torch.testing.assert_close(merged(ids).logits, base(ids).logits, atol=1e-4, rtol=1e-4)
