"""After `import whimbrel.hf`, `transformers` opens quantised directories of every family and computes what we do."""

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
TREE = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "num_kv_heads": 2}
SHAPES = {
    "gpt2": GPTConfig(**SMALL),
    "llama": GPTConfig(**SMALL, **TREE, bias="none", tied_head=False),
    "llama of 96": GPTConfig(**SMALL | {"embd_size": 96}, **TREE, bias="none", tied_head=False),
    "qwen2": GPTConfig(**SMALL, **TREE, bias="qkv"),
    "whimbrel": GPTConfig(**SMALL, residual_scale="attention"),
}


@pytest.fixture(params=SHAPES)
def plain(request, tmp_path):
    torch.manual_seed(0)
    save_model(GPT(SHAPES[request.param]), tmp_path / "plain")
    assert json.loads((tmp_path / "plain/config.json").read_text())["model_type"] == request.param.split()[0]
    return tmp_path / "plain"


@pytest.mark.parametrize("form", FORMATS)
def test_transformers_computes_the_same_logits(plain, directory, form, ids, logits):
    ours = load_model(plain, quantize=form)
    save_model(ours, directory, max_shard_size=9000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(theirs, ids), logits(ours, ids), atol=2e-5, rtol=0)
    linears = [m for m in theirs.modules() if isinstance(m, torch.nn.Linear | transformers.pytorch_utils.Conv1D)]
    kept = [type(m.weight) is QuantizedWeight for m in linears if m is not theirs.lm_head]
    assert kept
    assert all(kept)
    assert type(theirs.lm_head.weight) is torch.nn.Parameter


def test_greedy_text_equals_transformers(plain, directory):
    ours = load_model(plain, quantize="int8")
    save_model(ours, directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    prompt = [5, 17, 3]
    written = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert written[0, 3:].tolist() == whimbrel.generate(ours, prompt, max_new_tokens=20, temperature=0)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_dtype_applies_to_scales_not_codes(plain, directory, form):
    ours = load_model(plain, quantize=form)
    save_model(ours, directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    weights = [parameter for parameter in theirs.parameters() if type(parameter) is QuantizedWeight]
    assert {(weight.dtype, weight.codes.dtype) for weight in weights} == {(torch.bfloat16, FORMATS[form].dtype)}
    assert theirs.get_input_embeddings().weight.dtype == torch.bfloat16


def test_loading_a_dense_state_keeps_layers_quantized(plain, directory):
    """Also where torch would put what arrives in the place of the weight; of GPT-2's layers it is the transpose."""
    save_model(load_model(plain, quantize="int8"), directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    before = {name: weight for name, weight in theirs.named_parameters() if type(weight) is QuantizedWeight}
    state = transformers.AutoModelForCausalLM.from_pretrained(plain).state_dict()
    theirs.load_state_dict(state, assign=True)
    after = dict(theirs.named_parameters())
    assert before
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(type(after[name]) is QuantizedWeight for name in before)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_transformers_uses_a_quantized_embedding(plain, directory, form, ids, logits):
    ours = load_model(plain, quantize=form, quantize_embeddings=True)
    save_model(ours, directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(theirs, ids), logits(ours, ids), atol=2e-5, rtol=0)
    assert type(theirs.get_input_embeddings().weight) is QuantizedWeight
    assert type(theirs.lm_head.weight) is QuantizedWeight
    assert (theirs.lm_head.weight is theirs.get_input_embeddings().weight) == ours.config.tied_head


LOAD = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"


@pytest.mark.parametrize("plain", ["llama", "gpt2"], indirect=True)
@pytest.mark.parametrize("shard", [5 * 10**9, 9000])
def test_transformers_rejects_the_directory_without_whimbrel_hf(plain, directory, shard):
    """It would initialize the weights at random. A plain copy of it opens."""
    save_model(load_model(plain, quantize="int8"), directory, max_shard_size=shard)
    alone = subprocess.run([sys.executable, "-c", LOAD, directory], capture_output=True, text=True, check=False)
    assert alone.returncode != 0
    assert "import whimbrel.hf first" in alone.stderr
    export_hf(directory, directory.parent / "copy")
    assert "transformers_weights" not in json.loads((directory.parent / "copy/config.json").read_text())
    transformers.AutoModelForCausalLM.from_pretrained(directory.parent / "copy")


def test_saving_and_unknown_recipes_are_rejected(plain, directory):
    save_model(load_model(plain, quantize="int8"), directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with pytest.raises(ValueError, match="not serializable"):
        theirs.save_pretrained(directory.with_name("again"))
    table = json.loads((directory / "config.json").read_text())
    table["quantization_config"]["recipe"] = "int3"
    (directory / "config.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="recipe from int8, .* got 'int3'"):
        transformers.AutoModelForCausalLM.from_pretrained(directory)
