"""`generate`: greedy, sampled, quantized cache, past the context."""

from __future__ import annotations

import pytest
import torch
from tests.support.models import KINDS, add_noise

import whimbrel
from whimbrel.base.errors import RequestError, WhimbrelError
from whimbrel.cache import DynamicCache
from whimbrel.inference import LLM, SamplingParams, decode_one, generate, prefill
from whimbrel.models import GPT, GPTConfig


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(context_length=16, vocab_size=50, num_layers=2, embd_size=32, num_heads=2, tied_head=False)
    return GPT(config)


@torch.no_grad()
def uncached(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without a cache: a full forward pass per token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_those_of_the_uncached_model(kind):
    torch.manual_seed(1)
    model = add_noise(GPT(KINDS[kind]))
    for prompt in ([3], [3, 1, 4, 1, 5], list(range(20))):
        count = 32 - len(prompt)
        assert generate(model, prompt, max_new_tokens=count, temperature=0) == uncached(model, prompt, count)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_bf16_tokens_differ_only_within_the_measured_error(kind):
    """Where bf16 selects another token than fp32, their logits differ by less than twice the bf16 error."""
    torch.manual_seed(2)
    model = add_noise(GPT(KINDS[kind]))
    ids = torch.randint(97, (2, 32))
    exact = model(ids).logits
    bf16_model = GPT(KINDS[kind]).bfloat16()
    bf16_model.load_state_dict(model.state_dict())
    error = (bf16_model(ids).logits.float() - exact).abs().max()
    assert 0 < error < exact.std() / 2  # otherwise the bound below would be meaningless
    cache = DynamicCache(KINDS[kind])
    found = [prefill(bf16_model, ids[:, :2], cache)]
    found += [decode_one(bf16_model, ids[:, position], cache) for position in range(2, 32)]
    tokens = torch.stack(found, 1).argmax(-1, keepdim=True)
    gaps = exact[:, 1:].amax(-1) - exact[:, 1:].gather(2, tokens)[..., 0]
    assert gaps.max() <= 2 * error
    assert (gaps == 0).float().mean() > 0.8


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "mistral"])
@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
@torch.no_grad()
def test_a_quantized_cache_changes_logits_within_its_error(kind, codec):
    torch.manual_seed(3)
    model = GPT(KINDS[kind])
    ids = torch.randint(97, (2, 32))
    exact = model(ids).logits
    cache = DynamicCache(KINDS[kind], codec=codec)
    found = [prefill(model, ids[:, :2], cache)]
    found += [decode_one(model, ids[:, position], cache) for position in range(2, 32)]
    off = (torch.stack(found, 1) - exact[:, 1:]).norm() / exact[:, 1:].norm()
    assert 1e-4 < off < {"int8": 0.005, "fp8": 0.02, "int4": 0.08}[codec]


def test_generation_continues_past_the_context(model):
    tokens = generate(model, range(10), max_new_tokens=50, temperature=0)
    assert len(tokens) == 50
    whole = [*range(10), *tokens]
    # After position 16 the window restarts from the newest 8 tokens and grows again.
    assert int(model(torch.tensor([whole[17 - 8 : 17]])).logits[0, -1].argmax()) == whole[17]
    assert len(generate(model, list(range(40)), max_new_tokens=3)) == 3


def test_a_seed_gives_the_same_text(model):
    drawn = [generate(model, torch.tensor([1, 2]), max_new_tokens=30, seed=seed) for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert generate(model, [1], max_new_tokens=30) != generate(model, [1], max_new_tokens=30)


def test_generation_stops_at_the_end_of_text(model):
    tokens = generate(model, [1], max_new_tokens=30, seed=0)
    end = tokens[5]
    cut = tokens[: tokens.index(end)]
    assert generate(model, [1], max_new_tokens=30, seed=0, stop_ids=end) == cut
    assert generate(model, [1], max_new_tokens=30, seed=0, stop_ids=[end, 1000]) == cut


def test_tokens_stream_one_at_a_time(model):
    tokens = LLM(model).stream_tokens([1], SamplingParams(temperature=0), max_new_tokens=5)
    first = next(tokens)
    assert [first, *tokens] == generate(model, [1], max_new_tokens=5, temperature=0)


def test_generate_is_exported_by_the_top_level_package(model):
    assert whimbrel.generate(model, [1], max_new_tokens=2, seed=0) == generate(model, [1], max_new_tokens=2, seed=0)


def test_compiled_blocks_are_not_recompiled_for_each_length(model):
    expected = generate(model, [1], max_new_tokens=12, temperature=0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(backend="eager")
    assert generate(model, [1], max_new_tokens=12, temperature=0) == expected
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_an_unknown_cache_is_rejected(model):
    with pytest.raises(WhimbrelError, match="int3"):
        generate(model, [1], kv_cache_dtype="int3")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "non-empty list"),
        ([[1, 2]], {}, r"shape \(1, 2\)"),
        ([[1], [1, 2]], {}, r"token ids, got \[\[1\], \[1, 2\]\]"),
        ("a text", {}, "token ids, got 'a text'"),
        ([True], {}, "token ids"),
        ([0.5], {}, "token ids"),
        ([50], {}, "from 0 to 49, got 50"),
        ([-1], {}, "got -1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens: expected .* got 0"),
        ([1], {"temperature": -1.0}, "temperature: expected .* got -1.0"),
        ([1], {"temperature": float("nan")}, "temperature: expected .* got nan"),
        ([1], {"seed": -1}, "seed: expected .* got -1"),
        ([1], {"seed": 2**70}, "from 0 to 2"),
        ([1], {"top_k": -1}, "top_k: expected .* got -1"),
        ([1], {"top_p": 1.5}, "top_p: expected .* got 1.5"),
        ([1], {"logit_bias": {50: 1.0}}, "logit_bias: .* got 50"),
        ([1], {"stop": ["x"]}, "pass tokenizer"),
    ],
)
def test_invalid_arguments_are_rejected(model, prompt, options, message):
    with pytest.raises(RequestError, match=message):
        generate(model, prompt, **options)


def test_non_finite_logits_are_rejected(model):
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(RequestError, match="finite logits"):
        generate(model, [1], temperature=0)
