"""After `import whimbrel.hf`, transformers loads quantized directories of every family and computes the same logits."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers

import whimbrel.hf
from whimbrel.base.errors import ConfigError
from whimbrel.model_io import export_hf, load_model, save_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import FORMATS, QuantizedWeight

SMALL = {"vocab_size": 99, "context_length": 64, "num_layers": 2, "embd_size": 128, "num_heads": 4, "init_std": 0.1}
LLAMA_SHAPE = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "num_kv_heads": 2}
SHAPES = {
    "gpt2": GPTConfig(**SMALL),
    "llama": GPTConfig(**SMALL, **LLAMA_SHAPE, bias="none", tied_head=False),
    "llama-96": GPTConfig(**SMALL | {"embd_size": 96}, **LLAMA_SHAPE, bias="none", tied_head=False),
    "qwen2": GPTConfig(**SMALL, **LLAMA_SHAPE, bias="qkv"),
    "whimbrel": GPTConfig(**SMALL, residual_scale="attention"),
}


@pytest.fixture(params=SHAPES)
def dense_directory(request, tmp_path):
    torch.manual_seed(0)
    save_model(GPT(SHAPES[request.param]), tmp_path / "dense")
    assert json.loads((tmp_path / "dense/config.json").read_text())["model_type"] == request.param.split("-")[0]
    return tmp_path / "dense"


@pytest.mark.parametrize("weight_format", FORMATS)
def test_transformers_computes_the_same_logits(dense_directory, directory, weight_format, ids, logits):
    ours = load_model(dense_directory, quantize=weight_format)
    save_model(ours, directory, max_shard_size=9000)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(hf_model, ids), logits(ours, ids), atol=2e-5, rtol=0)
    linears = [m for m in hf_model.modules() if isinstance(m, torch.nn.Linear | transformers.pytorch_utils.Conv1D)]
    quantized = [type(m.weight) is QuantizedWeight for m in linears if m is not hf_model.lm_head]
    assert quantized
    assert all(quantized)
    assert type(hf_model.lm_head.weight) is torch.nn.Parameter


def test_greedy_text_equals_transformers(dense_directory, directory):
    ours = load_model(dense_directory, quantize="int8")
    save_model(ours, directory)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    prompt = [5, 17, 3]
    generated = hf_model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert generated[0, 3:].tolist() == whimbrel.generate(ours, prompt, max_new_tokens=20, temperature=0)


@pytest.mark.parametrize("weight_format", ["int8", "fp8"])
def test_dtype_applies_to_scales_not_codes(dense_directory, directory, weight_format):
    ours = load_model(dense_directory, quantize=weight_format)
    save_model(ours, directory)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    weights = [parameter for parameter in hf_model.parameters() if type(parameter) is QuantizedWeight]
    assert {(weight.dtype, weight.codes.dtype) for weight in weights} == {
        (torch.bfloat16, FORMATS[weight_format].dtype)
    }
    assert hf_model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_loading_a_dense_state_keeps_layers_quantized(dense_directory, directory):
    """Also with `assign=True`, which would replace the parameter, and for GPT-2, whose weights are transposed."""
    save_model(load_model(dense_directory, quantize="int8"), directory)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    before = {name: weight for name, weight in hf_model.named_parameters() if type(weight) is QuantizedWeight}
    state = transformers.AutoModelForCausalLM.from_pretrained(dense_directory).state_dict()
    hf_model.load_state_dict(state, assign=True)
    after = dict(hf_model.named_parameters())
    assert before
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(type(after[name]) is QuantizedWeight for name in before)


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_transformers_uses_a_quantized_embedding(dense_directory, directory, weight_format, ids, logits):
    ours = load_model(dense_directory, quantize=weight_format, quantize_embeddings=True)
    save_model(ours, directory)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(hf_model, ids), logits(ours, ids), atol=2e-5, rtol=0)
    assert type(hf_model.get_input_embeddings().weight) is QuantizedWeight
    assert type(hf_model.lm_head.weight) is QuantizedWeight
    assert (hf_model.lm_head.weight is hf_model.get_input_embeddings().weight) == ours.config.tied_head


LOAD = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"


@pytest.mark.parametrize("dense_directory", ["llama", "gpt2"], indirect=True)
@pytest.mark.parametrize("shard", [5 * 10**9, 9000])
def test_transformers_rejects_the_directory_without_whimbrel_hf(dense_directory, directory, shard):
    """Without the check, transformers would initialize the weights randomly. An unquantized export loads."""
    save_model(load_model(dense_directory, quantize="int8"), directory, max_shard_size=shard)
    result = subprocess.run([sys.executable, "-c", LOAD, directory], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "import whimbrel.hf first" in result.stderr
    export_hf(directory, directory.parent / "copy")
    assert "transformers_weights" not in json.loads((directory.parent / "copy/config.json").read_text())
    transformers.AutoModelForCausalLM.from_pretrained(directory.parent / "copy")


def test_saving_and_unknown_recipes_are_rejected(dense_directory, directory):
    save_model(load_model(dense_directory, quantize="int8"), directory)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with pytest.raises(ValueError, match="not serializable"):
        hf_model.save_pretrained(directory.with_name("again"))
    table = json.loads((directory / "config.json").read_text())
    table["quantization_config"]["recipe"] = "int3"
    (directory / "config.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="recipe from int8, .* got 'int3'"):
        transformers.AutoModelForCausalLM.from_pretrained(directory)
