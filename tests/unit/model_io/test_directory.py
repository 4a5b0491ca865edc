"""Model directories: what is written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.tokenization.byte_tokenizer import byte_tokenizer

from whimbrel.base.errors import CheckpointError, ConfigError, WriteError
from whimbrel.inference import SamplingParams
from whimbrel.model_io import (
    generation_settings,
    load_model,
    load_weights,
    model_tokenizer,
    save_model,
    special_tokens,
)
from whimbrel.models import GPT, GPTConfig, preset, preset_names
from whimbrel.models.families import canonical, config_from_hf, config_to_hf, tensor_mappings
from whimbrel.tokenization import load_tokenizer

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": False}
SMALL = GPTConfig(context_length=16, vocab_size=50, num_layers=2, embd_size=16, num_heads=2, **LLAMA)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


@pytest.fixture
def saved(model: GPT, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, change: Callable[[dict], object]) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def test_a_directory_has_what_other_tools_look_for(tmp_path):
    tokenizer = load_tokenizer("gpt2")
    model = GPT(GPTConfig(context_length=16, num_layers=1, embd_size=16, num_heads=2))
    save_model(model, tmp_path / "model", tokenizer)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["model_type"], config["architectures"], config["dtype"]) == ("gpt2", ["GPT2LMHeadModel"], "float32")
    assert special_tokens(tmp_path / "model") == (50256, (50256,))
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights["transformer.wte.weight"].shape == (50257, 16)
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (16, 48)
    assert "lm_head.weight" not in weights
    assert load_tokenizer(tmp_path / "model").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("name", preset_names())
def test_every_shape_survives_its_config_file(name):
    config = preset(name)
    table = config_to_hf(config)
    assert canonical(config_from_hf(json.loads(json.dumps(table)))) == canonical(config)
    plain = name not in ("gpt2-baseline", "gpt2-fast")
    assert (table["model_type"] != "whimbrel") == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_softcap": 5.0},
        {"qk_norm": "unweighted"},
        {"gated_mlp": False},
        {"norm_affine": False},
        {"bias": "qkv", "qk_norm": "weighted"},
        {"position": "learned"},
    ],
)
def test_a_shape_that_no_family_holds_is_ours(changes):
    assert config_to_hf(SMALL)["model_type"] == "llama"
    assert config_to_hf(replace(SMALL, **changes))["model_type"] == "whimbrel"


@pytest.mark.parametrize("name", ["gpt2", "gpt2-fast", "llama3-8b", "qwen2-0.5b", "qwen3-0.6b"])
def test_the_places_of_a_file_cover_every_number_once(name):
    config = preset(name)
    with torch.device("meta"):
        sizes = {key: list(parameter.shape) for key, parameter in GPT(config).named_parameters()}
    covered = dict.fromkeys(sizes, 0)
    for mapping in tensor_mappings(config_to_hf(config)["model_type"], config):
        covered[mapping.name] += len(range(*mapping.rows.indices(sizes[mapping.name][0])))
    vocabulary = ("transformer.wte.weight", "lm_head.weight")
    for key, shape in sizes.items():
        assert covered[key] == (config.vocab_size if key in vocabulary else shape[0]), key


def test_weights_without_the_prefix_of_their_tree_are_found(model, saved):
    weights = load_file(saved / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    renamed["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(renamed, saved / "model.safetensors")
    x = torch.randint(50, (1, 9))
    assert torch.equal(load_model(saved)(x).logits, model(x).logits)


def test_loaded_weights_go_into_the_model_at_hand(model, saved):
    other = GPT(SMALL).to(torch.bfloat16)
    before = {name: id(parameter) for name, parameter in other.named_parameters()}
    load_weights(other, saved)
    assert {name: id(parameter) for name, parameter in other.named_parameters()} == before
    assert torch.equal(other.lm_head.weight, model.lm_head.weight.bfloat16())
    with pytest.raises(CheckpointError, match="embd_size = 16; this one has 32"):
        load_weights(GPT(replace(SMALL, embd_size=32)), saved)


def test_a_loaded_model_trains_and_keeps_its_head_tied(tmp_path):
    model = GPT(GPTConfig(context_length=16, vocab_size=50, num_layers=1, embd_size=16, num_heads=2))
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.token_embedding.weight
    assert not loaded.lm_head.weight[50:].any()
    x = torch.randint(50, (1, 9))
    loaded(x, targets=x).loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_nothing_is_overwritten_and_nothing_half_written(model, saved, tmp_path, monkeypatch):
    with pytest.raises(WriteError, match="exists and is not empty"):
        save_model(model, saved)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whimbrel.model_io.tensors.write_tensors", full)
    with pytest.raises(WriteError, match="No space left on device"):
        save_model(model, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_copy_of_the_weights_is_written_in_place_of_the_model(model, tmp_path):
    kept = {name: parameter.detach().clone() + 1 for name, parameter in model.named_parameters()}
    save_model(model, tmp_path / "copy", state=kept)
    loaded = dict(load_model(tmp_path / "copy").named_parameters())
    vocabulary = model.config.vocab_size
    for name, parameter in kept.items():
        rows = slice(vocabulary) if name in ("transformer.wte.weight", "lm_head.weight") else slice(None)
        assert torch.equal(loaded[name][rows], parameter[rows])


def test_a_tokenizer_larger_than_the_model_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="50257 tokens and the model 50: give the model's"):
        save_model(model, tmp_path / "model", load_tokenizer("gpt2"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type = 'bert' is not one of gpt2, llama"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"hidden_size": None}, "missing key 'hidden_size'"),
        ({"hidden_size": "16"}, "must be an integer"),
        ({"hidden_act": "gelu_fast"}, "hidden_act = 'gelu_fast' is not one of gelu_new"),
        ({"hidden_act": []}, r"hidden_act = \[\] is not one of gelu_new"),
        ({"model_type": []}, r"model_type = \[\] is not one of gpt2, llama"),
        ({"model_type": "whimbrel", "gpt": 5}, "expected an object for gpt, got 5"),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "layer_types": 5}, "layer_types = 5"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "num_hidden_layers": "2"},
            "expected an integer for num_hidden_layers",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": "2"},
            "expected an integer for max_window_layers",
        ),
        ({"rms_norm_eps": 0}, "norm_eps greater than 0"),
        ({"rope_parameters": 5}, "expected an object for rope_parameters"),
        ({"rope_parameters": None, "rope_scaling": "linear"}, "expected an object for rope_scaling"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta greater than 0"),
        ({"rope_parameters": {"rope_type": []}}, r"rope_type = \[\] is not one of default"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn' is not one of default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "missing key 'factor'"),
        ({"partial_rotary_factor": 0.5}, "expected partial_rotary_factor = 1"),
        ({"mlp_bias": True}, "mlp_bias without attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'model.layers.2."),
        ({"num_hidden_layers": 1}, "holds 9 tensors that its config.json has no place for"),
        ({"intermediate_size": 60}, r"of shape \[64, 16\]; its config.json says \[60, 16\]"),
    ],
)
def test_a_foreign_or_damaged_config_is_refused_by_name(saved, change, message):
    edit(saved / "config.json", lambda table: table.update(change))
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(saved)
    assert str(saved) in str(error.value)


def test_gpt2_variants_that_compute_something_else_are_refused(tmp_path):
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
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not readable JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a list, not an object"),
        (lambda folder: cut(folder / "model.safetensors"), "model.safetensors is not a whole safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor .*no weights"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "only pytorch_model.bin, which is pickled",
        ),
    ],
)
def test_a_damaged_directory_is_refused_by_name(saved, damage, message):
    damage(saved)
    with pytest.raises(CheckpointError, match=message):
        load_model(saved)


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no run or model at"):
        load_model(tmp_path / "nowhere")


def test_integer_weights_are_refused(saved):
    weights = load_file(saved / "model.safetensors")
    save_file({name: tensor.to(torch.int8) for name, tensor in weights.items()}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"as torch.int8: only floating-point"):
        load_model(saved)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder, index: (folder / "model-00002-of-00004.safetensors").unlink(), "not a file beside it"),
        (lambda folder, index: cut(folder / "model-00002-of-00004.safetensors"), "not a whole safetensors file"),
        (lambda folder, index: edit(index, lambda t: t.pop("weight_map")), "no 'weight_map'"),
        (
            lambda folder, index: edit(index, lambda t: t["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
            "not a file beside it",
        ),
        (
            lambda folder, index: edit(
                index, lambda t: t["weight_map"].update({"model.norm.weight": "model-00001-of-00004.safetensors"})
            ),
            "does not hold 'model.norm.weight'",
        ),
    ],
)
def test_damaged_shards_are_refused_by_name(model, tmp_path, damage, message):
    folder = tmp_path / "model"
    save_model(model, folder, max_shard_size=12_000)
    assert len(list(folder.glob("*.safetensors"))) == 4
    assert torch.equal(load_model(folder).lm_head.weight, model.lm_head.weight)
    damage(folder, folder / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_a_config_that_describes_more_than_the_files_hold_is_refused_at_once(saved: Path) -> None:
    edit(saved / "config.json", lambda table: table.update(hidden_size=10**7, head_dim=8))
    with pytest.raises(CheckpointError, match=r"describes .* parameters, but the weight files have only"):
        load_model(saved)
    edit(saved / "config.json", lambda table: table.update(num_hidden_layers=10**6))
    with pytest.raises(CheckpointError, match="num_layers of at most"):
        load_model(saved)


def test_a_deeply_nested_config_is_one_clear_error(saved: Path) -> None:
    (saved / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        load_model(saved)


def write_generation(directory: Path, **fields: object) -> None:
    (directory / "generation_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"])
@pytest.mark.parametrize(
    "value",
    ["0.7", [1] * 1000, {"a": 1}, True, float("nan"), float("inf")],
    ids=["text", "list", "object", "bool", "nan", "inf"],
)
def test_a_generation_setting_of_the_wrong_type_is_refused(saved, field, value):
    for do_sample in (True, False, None):
        write_generation(saved, do_sample=do_sample, **{field: value})
        for read in (generation_settings, special_tokens):
            with pytest.raises(CheckpointError, match=f"generation_config.json: expected {field} to be") as refused:
                read(saved)
            assert "\n" not in str(refused.value)
            assert len(str(refused.value)) < 300 + len(str(saved))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_k", -1), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.5), ("min_p", 2)]
    + [("repetition_penalty", 0), ("max_new_tokens", 0), ("do_sample", "yes")],
)
def test_a_generation_setting_out_of_range_is_refused_where_it_would_be_used(saved, field, value):
    write_generation(saved, **{"do_sample": True, field: value})
    with pytest.raises(CheckpointError, match=f"generation_config.json: expected {field} to be"):
        generation_settings(saved)
    write_generation(saved, do_sample=False, temperature=-1, top_k=-1, top_p=0)  # which greedy decoding does not use
    assert generation_settings(saved) == {"temperature": 0.0}


def test_a_top_k_of_0_is_off(saved):
    write_generation(saved, do_sample=True, top_k=0, temperature=0.7)
    assert not generation_settings(saved)["top_k"]
    SamplingParams(**generation_settings(saved))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("fields", [{"bos_token_id": "1"}, {"eos_token_id": [1, "2"]}, {"eos_token_id": {"a": 1}}])
def test_special_token_ids_of_the_wrong_type_are_refused(saved, file, fields):
    edit(saved / file, lambda table: table.update(fields))
    with pytest.raises(CheckpointError, match=rf"/{file}: expected {next(iter(fields))} to be a token id"):
        special_tokens(saved)


def test_the_opener_is_the_bos_token_of_the_model_else_of_the_tokenizer(saved):
    tokenizer = byte_tokenizer()
    for bos_id, opener in ((5, 5), (None, tokenizer.bos_id), (50256, tokenizer.bos_id)):
        edit(saved / "generation_config.json", lambda table, bos_id=bos_id: table.update(bos_token_id=bos_id))
        assert special_tokens(saved).opener(tokenizer) == opener


def test_a_gguf_file_is_named_as_one(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    for other in (None, "gpt2"):
        with pytest.raises(CheckpointError, match="is a GGUF file"):
            model_tokenizer(tmp_path / "model.gguf", other)
    with pytest.raises(CheckpointError, match="is a GGUF file"):
        load_model(tmp_path / "model.gguf")


def test_deep_json_in_a_config_is_refused(saved):
    (saved / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(CheckpointError, match="config.json is not readable JSON"):
        load_model(saved)
