"""Our decoder against transformers: small random models of every family, loaded and saved in both directions."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
import transformers
from tests.support.models import add_noise

import whimbrel
from whimbrel.cache import DynamicCache
from whimbrel.model_io import load_weights
from whimbrel.models import GPT, preset

CLOSE = {"atol": 1e-5, "rtol": 0}


def test_logits_of_a_transformers_directory(hf_model, ids, logits, directory):
    hf_model.save_pretrained(directory)
    ours = whimbrel.load_model(directory)
    torch.testing.assert_close(logits(ours, ids), logits(hf_model, ids), **CLOSE)
    assert ours.num_parameters() == hf_model.num_parameters()


def test_logits_of_a_sharded_transformers_directory(hf_model, ids, logits, directory):
    hf_model.save_pretrained(directory, max_shard_size="40KB")
    assert (directory / "model.safetensors.index.json").exists()
    torch.testing.assert_close(logits(whimbrel.load_model(directory), ids), logits(hf_model, ids), **CLOSE)


@pytest.mark.parametrize("shard_size", [5 * 10**9, 40_000])
def test_transformers_loads_our_directory_with_equal_weights(hf_model, ids, logits, directory, shard_size):
    hf_model.save_pretrained(directory)
    again = directory.with_name("again")
    whimbrel.save_model(whimbrel.load_model(directory), again, max_shard_size=shard_size)
    assert (again / "model.safetensors").exists() == (shard_size > 40_000)
    back, report = transformers.AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in hf_model.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    torch.testing.assert_close(logits(back, ids), logits(hf_model, ids), atol=0, rtol=0)
    if type(back) is not type(hf_model):  # Mistral without a window is saved as Llama
        assert (hf_model.config.model_type, hf_model.config.sliding_window) == ("mistral", None)


def test_loss_and_gradients_equal_transformers(hf_model, ids, directory):
    hf_model.save_pretrained(directory)
    ours = whimbrel.load_model(directory)
    loss = hf_model(ids, labels=ids).loss
    loss.backward()
    ours_loss = ours(ids[:, :-1], targets=ids[:, 1:]).loss
    ours_loss.backward()
    torch.testing.assert_close(ours_loss, loss, atol=1e-5, rtol=0)
    expected = hf_model.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours.token_embedding.weight.grad[:99], expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_equal_transformers(hf_model, ids, directory, side):
    hf_model.save_pretrained(directory)
    ours = whimbrel.load_model(directory)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 11) if side == "left" else slice(-11, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 11] = -100  # with left padding it would be predicted from a padding token
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)  # as `generate` in transformers derives them
    expected = hf_model(ids, attention_mask=mask, position_ids=position_ids, labels=labels)
    output = ours(input_ids=ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.logits[mask.bool()], expected.logits[mask.bool()], **CLOSE)
    torch.testing.assert_close(output.loss, expected.loss, **CLOSE)
    output.loss.backward()
    expected.loss.backward()
    gradient = hf_model.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours.token_embedding.weight.grad[:99], gradient, atol=1e-5, rtol=1e-3)


def test_packed_samples_equal_transformers(hf_model, ids, directory):
    hf_model.save_pretrained(directory)
    ours = whimbrel.load_model(directory)
    cuts = [[0, 13, 40], [0, 25, 40]]
    position_ids = torch.stack([
        torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(cut)]) for cut in cuts
    ])  # fmt: skip
    expected = hf_model(ids, position_ids=position_ids, use_cache=False)
    output = ours(ids, position_ids=position_ids)
    torch.testing.assert_close(output.logits, expected.logits, **CLOSE)


@pytest.mark.parametrize("steps", [[30, 1, 9], [20, 20]])
def test_padded_batches_with_a_transformers_cache(hf_model, ids, directory, steps):
    hf_model.save_pretrained(directory)
    ours = whimbrel.load_model(directory)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    cache, parts, end = transformers.DynamicCache(), [], 0
    with torch.no_grad():
        for part in ids.split(steps, dim=1):
            end += part.size(1)
            parts.append(ours(part, attention_mask=mask[:, :end], cache=cache).logits)
        expected = ours(ids, attention_mask=mask).logits
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask.bool()], expected[mask.bool()], **CLOSE)


def test_greedy_text_equals_transformers(hf_model, ids, directory):
    hf_model.save_pretrained(directory)
    ours = whimbrel.load_model(directory)
    prompt = ids[:1, :12]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = hf_model.generate(prompt, **options)[0, 12:].tolist()
    assert whimbrel.generate(ours, prompt[0], max_new_tokens=20, temperature=0) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_dtype_and_dtype_argument(hf_model, ids, logits, directory, dtype):
    hf_model.to(dtype).save_pretrained(directory)
    stored = whimbrel.load_model(directory)
    assert {parameter.dtype for parameter in stored.parameters()} == {dtype}
    whimbrel.save_model(stored, directory.with_name("again"))
    back = transformers.AutoModelForCausalLM.from_pretrained(directory.with_name("again"))
    assert back.dtype == dtype
    widened = whimbrel.load_model(directory, dtype=torch.float32)
    expected = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.testing.assert_close(logits(widened, ids), logits(expected, ids), **CLOSE)


def test_transformers_cache_works_with_our_model(hf_model, ids, logits, directory):
    hf_model.save_pretrained(directory)
    ours = whimbrel.load_model(directory)
    for cache in (transformers.DynamicCache(), DynamicCache()):
        with torch.no_grad():
            parts = [ours(part, cache=cache).logits for part in ids.split([30, 1, 9], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), logits(hf_model, ids), **CLOSE)


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("name", ["gpt2-baseline", "gpt2-fast"])
def test_other_configs_load_in_transformers_after_importing_whimbrel_hf(name, untied, ids, logits, directory):
    import whimbrel.hf

    torch.manual_seed(0)
    shape = {"context_length": 64, "vocab_size": 99, "num_layers": 3, "embd_size": 48, "num_heads": 4}
    start = {"tied_head": not untied, "zero_init_head": False, "zero_init_projections": False, "init_std": 0.1}
    start |= {"value_embeddings": 1} if name == "gpt2-fast" else {}
    ours = add_noise(GPT(replace(preset(name), **shape, **start)), 0.05)
    whimbrel.save_model(ours, directory, max_shard_size=100_000)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "whimbrel"
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert isinstance(hf_model, whimbrel.hf.WhimbrelForCausalLM)
    torch.testing.assert_close(logits(hf_model, ids), logits(ours, ids), **CLOSE)
    torch.testing.assert_close(hf_model(ids, labels=ids).loss, ours(ids[:, :-1], targets=ids[:, 1:]).loss)
    expected = whimbrel.generate(ours, ids[0, :9], max_new_tokens=12, temperature=0)
    assert (
        hf_model.generate(ids[:1, :9], max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 9:].tolist() == expected
    )
    hf_model.save_pretrained(directory.with_name("again"))
    back = GPT(ours.config)
    load_weights(back, directory.with_name("again"))
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, back.get_parameter(name)), name


def test_transformers_loads_our_tokenizer_with_equal_ids(fixtures, directory):
    shape = {"context_length": 8, "num_layers": 1, "embd_size": 8, "num_heads": 1}
    tokenizer = whimbrel.load_tokenizer("gpt2")
    whimbrel.save_model(GPT(replace(preset("gpt2-baseline"), **shape)), directory, tokenizer)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    cases = json.loads((fixtures / "gpt2_token_ids.json").read_text(encoding="utf-8"))
    texts = [case["text"] for case in cases if "<|endoftext|>" not in case["text"]]
    assert len(texts) > 200
    assert hf_tokenizer(texts).input_ids == [tokenizer.encode(text) for text in texts]
    assert hf_tokenizer.eos_token_id == tokenizer.eot_id
