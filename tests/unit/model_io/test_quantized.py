"""Quantized model directories: round trips, quantization while loading, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import whimbrel
from whimbrel.base.errors import CheckpointError, ConfigError, PrecisionError
from whimbrel.checkpoint import CheckpointManager, SharingPattern, StateComponent
from whimbrel.model_io import load_model, load_weights, save_model, weight_state_dict
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import FORMATS, QuantizedWeight, WeightFormat, dequantize_, quantize_
from whimbrel.train.checkpointing import model_state

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": False}
SMALL = {"context_length": 16, "vocab_size": 50, "num_layers": 2, "embd_size": 128, "num_heads": 4}
SHAPES = {
    "gpt2": GPTConfig(**SMALL),
    "llama": GPTConfig(**SMALL, **LLAMA, num_kv_heads=2),
    "llama of 96": GPTConfig(**SMALL | {"embd_size": 96}, **LLAMA),
    "whimbrel": GPTConfig(**SMALL, residual_scale="attention"),
}
FIRST = "model.layers.0.self_attn.k_proj.weight"


def random_model(shape: GPTConfig = SHAPES["llama"], weight_format: str | None = None) -> GPT:
    torch.manual_seed(0)
    model = GPT(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.zero_padding()
    if weight_format is not None:
        quantize_(model, weight_format)
    return model


def bits(state: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    return {
        name: (tensor.dtype, tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in state.items()
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(random_model(weight_format="int8"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_and_quantized_on_load_weights_are_bit_equal(shape, weight_format, tmp_path):
    model = random_model(SHAPES[shape])
    save_model(model, tmp_path / "dense")
    quantize_(model, weight_format)
    save_model(model, tmp_path / "single")
    save_model(model, tmp_path / "shards", max_shard_size=1)
    assert json.loads((tmp_path / "single/config.json").read_text())["model_type"] == shape.split()[0]
    x = torch.randint(50, (1, 9))
    for loaded in (
        load_model(tmp_path / "single"),
        load_model(tmp_path / "shards", quantize=weight_format),
        load_model(tmp_path / "dense", quantize=weight_format),
    ):
        assert bits(weight_state_dict(loaded)) == bits(weight_state_dict(model))
        assert torch.equal(loaded(x).logits, model(x).logits)
        linears = [m for m in loaded.modules() if isinstance(m, torch.nn.Linear) and m is not loaded.lm_head]
        assert all(isinstance(linear.weight, QuantizedWeight) for linear in linears)
        assert (loaded.lm_head.weight is loaded.token_embedding.weight) == model.config.tied_head


@pytest.mark.parametrize("weight_format", ["int8", "int8-dynamic", "int4", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_embeddings(shape, weight_format, tmp_path):
    model = random_model(SHAPES[shape])
    save_model(model, tmp_path / "dense")
    quantize_(model, weight_format, skip=(), embeddings=True)
    save_model(model, tmp_path / "coded")
    quantize_(only_linears := random_model(SHAPES[shape]), weight_format)
    size, linears_only_size = (sum(p.nbytes for p in m.parameters()) for m in (model, only_linears))
    assert size < linears_only_size
    x = torch.randint(50, (1, 9))
    for loaded in (
        load_model(tmp_path / "coded"),
        load_model(tmp_path / "dense", quantize=weight_format, quantize_embeddings=True),
    ):
        assert bits(weight_state_dict(loaded)) == bits(weight_state_dict(model))
        assert torch.equal(loaded(x).logits, model(x).logits)
        assert torch.equal(loaded(x, targets=x).loss, model(x, targets=x).loss)
        tables = [loaded.token_embedding.weight, loaded.lm_head.weight]
        assert all(isinstance(table, QuantizedWeight) for table in tables)
        assert (tables[0] is tables[1]) == model.config.tied_head
    dequantize_(model)
    reference = random_model(SHAPES[shape]).token_embedding.weight[:50].detach()
    assert torch.allclose(model.token_embedding.weight[:50], reference, atol=float(reference.abs().max()) / 7.5)


def test_quantize_embeddings_is_rejected_if_it_has_no_effect(saved, tmp_path):
    with pytest.raises(ConfigError, match="quantize_embeddings=True needs quantize"):
        load_model(saved, quantize_embeddings=True)
    with pytest.raises(CheckpointError, match="is not quantized"):
        load_model(saved, quantize="int8", quantize_embeddings=True)
    with pytest.raises(PrecisionError, match="does not quantize the embedding and the output layer"):
        load_model(saved, quantize="int4-weight-only", quantize_embeddings=True)
    with pytest.raises(PrecisionError, match="cannot find the token embedding"):
        quantize_(torch.nn.Sequential(torch.nn.Linear(8, 8)), "int8", embeddings=True)


def test_shards_can_separate_codes_and_scales(tmp_path):
    save_model(random_model(weight_format="int4"), tmp_path / "model", max_shard_size=1)
    places = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())["weight_map"]
    assert places[f"{FIRST}.codes"] != places[f"{FIRST}.scales"]


def test_files_have_codes_and_scales(tmp_path):
    model = random_model(weight_format="int4")
    save_model(model, tmp_path / "model")
    table = json.loads((tmp_path / "model/config.json").read_text())
    assert table["quantization_config"] == {
        "quant_method": "whimbrel",
        "version": 1,
        "recipe": "int4",
        "format": {"codes": "int4", "group": 128, "activations": None},
    }
    with safe_open(tmp_path / "model/model.safetensors", framework="np") as file:
        codes, scales = file.get_tensor(f"{FIRST}.codes"), file.get_tensor(f"{FIRST}.scales")
        assert FIRST not in file.keys()  # noqa: SIM118 (it is no dict)
        assert file.get_tensor("model.embed_tokens.weight").dtype == "float32"
    assert (codes.shape, codes.dtype, scales.shape) == ((64, 64), "uint8", (64, 1))
    weight = model.transformer["h"][0].attn.c_attn.weight.dequantize()[128:192]
    assert (weight[:, 0::2].numpy() == ((codes & 15).astype("float32") - 8) * scales).all()
    assert (weight[:, 1::2].numpy() == ((codes >> 4).astype("float32") - 8) * scales).all()


@pytest.mark.parametrize("weight_format", ["int8", "int4", "fp8"])
def test_dtype_is_applied_before_quantization(weight_format, tmp_path):
    model = random_model()
    save_model(model, tmp_path / "dense")
    quantize_(model.bfloat16(), weight_format)
    loaded = load_model(tmp_path / "dense", dtype=torch.bfloat16, quantize=weight_format)
    assert bits(weight_state_dict(loaded)) == bits(weight_state_dict(model))
    save_model(loaded, tmp_path / "quantized")
    assert json.loads((tmp_path / "quantized/config.json").read_text())["dtype"] == "bfloat16"
    wide = load_model(tmp_path / "quantized", dtype=torch.float32)
    weight, narrow = (m.transformer["h"][0].mlp.c_proj.weight for m in (wide, loaded))
    assert (weight.dtype, weight.scales.dtype) == (torch.float32, torch.float32)
    assert torch.equal(weight.codes.view(torch.uint8), narrow.codes.view(torch.uint8))


def test_load_weights_converts_between_dense_and_quantized(saved, tmp_path):
    quantized = random_model(weight_format="int8")
    dense = GPT(SHAPES["llama"])
    load_weights(dense, saved)
    expected = quantized.transformer["h"][1].mlp.c_fc.weight.dequantize()
    assert torch.equal(dense.transformer["h"][1].mlp.c_fc.weight, expected)
    save_model(random_model(), tmp_path / "dense")
    other = GPT(SHAPES["llama"])
    quantize_(other, "int8")
    ids_before = {name: id(parameter) for name, parameter in other.named_parameters()}
    for source in (tmp_path / "dense", saved):
        load_weights(other, source)
        assert bits(weight_state_dict(other)) == bits(weight_state_dict(quantized))
    assert {name: id(parameter) for name, parameter in other.named_parameters()} == ids_before
    mixed = GPT(SHAPES["llama"])
    quantize_(mixed, "int4")
    with pytest.raises(CheckpointError, match=r"in int4, got int8: quantize the unquantized model"):
        load_weights(mixed, saved)


def test_checkpoint_of_trained_quantized_weights_is_bit_exact(tmp_path):
    model = random_model()
    quantize_(model, "int8", trainable=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randint(50, (2, 9))
    model(x, targets=x).loss.backward()
    optimizer.step()
    manager = CheckpointManager(tmp_path)
    manager.save(1, [StateComponent("model", model_state(model), SharingPattern.GLOBAL)])
    before = bits(weight_state_dict(model))
    model(x, targets=x).loss.backward()
    optimizer.step()
    assert bits(weight_state_dict(model)) != before
    manager.load([StateComponent("model", model_state(model), SharingPattern.GLOBAL)])
    assert bits(weight_state_dict(model)) == before
    assert bits(weight_state_dict(load_model(tmp_path))) == before


def test_greedy_text_equals_that_of_the_model_quantized_in_memory(saved, tmp_path):
    save_model(random_model(), tmp_path / "dense")
    expected = whimbrel.generate(random_model(weight_format="int8"), [1, 2, 3], max_new_tokens=24, temperature=0)
    for loaded in (load_model(saved), whimbrel.load_model(tmp_path / "dense", quantize="int8")):
        assert whimbrel.generate(loaded, [1, 2, 3], max_new_tokens=24, temperature=0) == expected


def test_quantized_directory_cannot_be_quantized_again(saved):
    load_model(saved, quantize="int8")
    with pytest.raises(CheckpointError, match="already quantized as int8, not int4"):
        load_model(saved, quantize="int4")
    with pytest.raises(PrecisionError, match="quantize: expected one of int8-dynamic-act.* got 'int3'"):
        load_model(saved, quantize="int3")
    with pytest.raises(PrecisionError, match="quantize: expected one of int8-dynamic-act.* got 8"):
        load_model(saved, quantize=8)  # type: ignore[arg-type]


def test_mixed_or_unknown_formats_cannot_be_saved(tmp_path):
    model = random_model(weight_format="int8")
    other = random_model(weight_format="int4").transformer["h"][0].attn.c_attn.weight
    model.transformer["h"][0].attn.c_attn.weight = torch.nn.Parameter(other, requires_grad=False)
    with pytest.raises(CheckpointError, match="one format, got int4 and int8"):
        save_model(model, tmp_path / "model")
    own = random_model()
    quantize_(own, WeightFormat("mine", "int4", group_size=64))
    with pytest.raises(CheckpointError, match="expected weights in one of int8.* got mine"):
        save_model(own, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def in_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        table = json.loads((folder / "config.json").read_text())
        table["quantization_config"] |= changes
        (folder / "config.json").write_text(json.dumps(table))

    return edit


def in_file(**changes: Callable[[Tensor], Tensor] | None) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for part, change in changes.items():
            tensor = tensors.pop(f"{FIRST}.{part}")
            if change is not None:
                tensors[f"{FIRST}.{part}"] = change(tensor)
        save_file(tensors, folder / "model.safetensors")

    return edit


def store_dense_weights(folder: Path) -> None:
    save_model(random_model(), folder.with_name("dense"))
    (folder.with_name("dense") / "model.safetensors").replace(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (in_file(codes=None), f"has no tensor '{FIRST}.codes'"),
        (in_file(scales=None), f"has no tensor '{FIRST}.scales'"),
        (in_file(codes=None, scales=None), f"has no tensor '{FIRST}'"),
        (in_file(codes=lambda t: t[:32].clone()), rf"expected '{FIRST}.codes' of shape \[64, 128\] .* got \[32, 128\]"),
        (in_file(scales=lambda t: t[:, 0].clone()), rf"expected '{FIRST}.scales' of shape \[64, 1\] .* got \[64\]"),
        (in_file(codes=lambda t: t.int()), f"expected '{FIRST}' in int8 with torch.int8 codes .* got torch.int32"),
        (in_file(scales=lambda t: t.int()), "floating-point scales, got torch.int8 and torch.int32"),
        (store_dense_weights, "has no quantized tensors"),
        (in_config(version=2), "version 1, got 2: install a newer whimbrel"),
        (in_config(recipe="int3"), "recipe from int8, .* got 'int3'"),
        (in_config(format={"codes": "int8", "group": 32, "activations": None}), "for recipe int8, got"),
        (in_config(quant_method="gptq"), "quantization_config is not supported"),
    ],
)
def test_damaged_or_unknown_quantized_directories_are_rejected(saved, damage, message):
    damage(saved)
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(saved)
    assert str(saved) in str(error.value)


def test_quantized_weights_without_quantization_config_are_rejected(saved):
    table = json.loads((saved / "config.json").read_text())
    del table["quantization_config"]
    (saved / "config.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="has no tensor"):
        load_model(saved)
