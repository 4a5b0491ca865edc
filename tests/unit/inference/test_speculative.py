"""Speculative decoding: the same output, or the same distribution, in fewer steps."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from tests.support.models import KINDS, add_noise

from whimbrel.base.errors import RequestError
from whimbrel.inference import (
    LLM,
    Draft,
    History,
    Logprob,
    ModelDraft,
    NgramDraft,
    Proposal,
    SampleRNG,
    SamplingParams,
    distribution,
    generate,
    sample,
)
from whimbrel.inference.speculative import verify
from whimbrel.models import GPT, GPTConfig

GREEDY = SamplingParams(temperature=0)
NOTHING = History((), 0)
PROMPTS = [[3], [5, 6, 7, 8, 9, 5, 6, 7], list(range(40))]


@pytest.fixture(scope="module")
def models() -> dict[str, GPT]:
    torch.manual_seed(0)
    return {kind: add_noise(GPT(config)) for kind, config in KINDS.items()}


def speculate(
    model: GPT, prompt: list[int], sampling: SamplingParams, draft: Draft | None = None, **options: object
) -> list[int]:
    """The tokens of one request with a draft."""
    return list(LLM(model, max_batch=1, prefix_cache=False).stream_tokens(prompt, sampling, draft=draft, **options))


def drafts(models: dict[str, GPT], kind: str) -> dict[str, object]:
    """Drafts that are always, sometimes and rarely right, and one with a shorter context."""
    torch.manual_seed(1)
    near = GPT(KINDS[kind])
    near.load_state_dict(models[kind].state_dict())
    add_noise(near, 0.02)
    short = GPT(GPTConfig(context_length=7, vocab_size=97, num_layers=1, embd_size=16, num_heads=2))
    return {
        "itself": ModelDraft(models[kind]),
        "near": ModelDraft(near),
        "short": ModelDraft(short),
        "ngram": NgramDraft(),
        "none": None,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_equals_decoding_without_a_draft(models, kind):
    """Also past the context of 32."""
    model = models[kind]
    for prompt in PROMPTS if kind == "alternating" else PROMPTS[1:2]:
        plain = generate(model, prompt, max_new_tokens=45, temperature=0)
        for name, draft in drafts(models, kind).items():
            found = speculate(model, prompt, GREEDY, draft, max_new_tokens=45, num_draft_tokens=3)
            assert found == plain, name


def test_penalties_apply_with_a_draft(models):
    model = models["llama3"]
    settings = {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {9: 1.5}}
    plain = generate(model, PROMPTS[1], max_new_tokens=24, **settings)
    assert plain != generate(model, PROMPTS[1], max_new_tokens=24, temperature=0)
    for draft in drafts(models, "llama3").values():
        assert speculate(model, PROMPTS[1], SamplingParams(**settings), draft, max_new_tokens=24) == plain


def test_draft_and_model_apply_the_same_penalties(models, forward_sizes):
    """So a model that drafts for itself is always right, in a sequence without repeated tokens."""
    model, sampling = models["gpt2"], SamplingParams(temperature=0, presence_penalty=1e4)
    found = speculate(model, list(range(8)), sampling, ModelDraft(model), max_new_tokens=20, num_draft_tokens=3)
    assert [count for count in forward_sizes[1:] if count > 2] == [8 + 3, 4, 4, 4, 4]
    assert len(set(found)) == 20
    found = speculate(model, list(range(8)), sampling, ModelDraft(model), max_new_tokens=97, num_draft_tokens=3)
    assert set(found) == set(range(97))  # past the context, including the tokens of the prompt


def test_accepted_drafts_save_steps(models, forward_sizes):
    model = models["gpt2"]
    speculate(model, [3, 4], GREEDY, ModelDraft(model), max_new_tokens=20, num_draft_tokens=3)
    # The target verifies the prompt and 3 draft tokens, then its last token and 3 more; the draft decodes one by one.
    assert [count for count in forward_sizes if count > 2] == [5, 4, 4, 4, 4]
    forward_sizes.clear()
    text = speculate(model, [3, 4], GREEDY, NgramDraft(), max_new_tokens=25)
    forward_sizes.clear()
    speculate(model, [3, 4, *text, 3, 4], GREEDY, NgramDraft(), max_new_tokens=3, num_draft_tokens=4)
    assert forward_sizes[0] == 29 + 2  # the n-gram was seen before, so drafts cover all tokens needed


def test_a_stop_token_in_a_draft_ends_the_sequence(models):
    model = models["gpt2"]
    plain = generate(model, [3], max_new_tokens=20, temperature=0)
    end = plain[6]
    cut = plain[: plain.index(end)]
    for draft in drafts(models, "gpt2").values():
        assert speculate(model, [3], GREEDY, draft, max_new_tokens=20, stop_ids=[end]) == cut


def test_a_seed_reproduces_speculative_output(models):
    model, sampling = models["qwen3"], SamplingParams(top_p=0.9)
    plain = generate(model, PROMPTS[1], max_new_tokens=40, seed=3, top_p=0.9)
    assert speculate(model, PROMPTS[1], sampling, max_new_tokens=40, seed=3) == plain
    guessed = [
        speculate(model, PROMPTS[1], sampling, ModelDraft(model), max_new_tokens=40, seed=seed) for seed in (3, 3, 4)
    ]
    assert guessed[0] == guessed[1] != guessed[2]


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "sampled"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 3}], ids=str)
def test_verified_tokens_have_the_distribution_of_the_model(deterministic, settings):
    """Frequencies of two draft tokens and the next one match the product of the target probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(3, 4, generator=generator), torch.randn(2, 4, generator=generator)
    sampling, rng, count = SamplingParams(**settings), SampleRNG(0), 800
    model = distribution(logits, [sampling] * 3, [NOTHING] * 3)
    draft = distribution(other, [SamplingParams(temperature=1.5)] * 2, [NOTHING] * 2)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(count):
        if deterministic:
            proposal = Proposal([2, 1])
        else:
            proposal = Proposal(torch.multinomial(draft, 1, generator=generator)[:, 0].tolist(), draft)
        out = verify(logits, proposal, NOTHING, sampling, rng)
        assert out[:-1] == proposal.tokens[: len(out) - 1]
        # After a rejection the model samples in the next step; here from the remaining logits.
        while len(out) < 3:
            out += sample(logits[len(out) : len(out) + 1], [sampling], [rng.key()], [NOTHING]).tolist()
        seen[tuple(out)] += 1
    expected = torch.einsum("i,j,k->ijk", *model) * count
    assert sum(seen[place] for place in seen if expected[place] == 0) == 0
    often = [tuple(place) for place in (expected >= 5).nonzero().tolist()]
    statistic = sum((seen[place] - expected[place].item()) ** 2 / expected[place].item() for place in often)
    assert len(often) > 15
    assert statistic <= len(often) + 4 * math.sqrt(2 * len(often))


def test_a_draft_model_only_processes_new_tokens(models, forward_sizes):
    ids = list(range(20))
    texts = [(ids, 20), ([*ids, 1, 2], 2), ([*ids[:9], 7, 7, 7], 3), ([*ids[:9], 7, 7], 1), ([8, *ids], 21)]
    for kind in ("gpt2", "mistral"):
        draft = ModelDraft(models[kind])
        for text, read in texts:
            forward_sizes.clear()
            found = draft._next_logits(text)
            assert sum(forward_sizes) == read
            torch.testing.assert_close(found, models[kind](torch.tensor([text])).logits[0, -1:], rtol=1e-4, atol=1e-4)


def test_several_sequences_with_drafts_run_in_one_batch(models):
    """Each is verified on its own, and a sequence without a draft is not affected."""
    model = models["llama3"]
    llm = LLM(model, max_batch=4)
    streams = [
        llm.stream_tokens(prompt, GREEDY, max_new_tokens=30, draft=draft)
        for prompt, draft in zip(PROMPTS, (NgramDraft(), ModelDraft(model), None), strict=True)
    ]
    found = [[] for _ in streams]
    for step in range(30):
        for tokens, stream in zip(found, streams, strict=True):
            tokens.append(next(stream))
            assert len(tokens) == step + 1
    assert found == [generate(model, prompt, max_new_tokens=30, temperature=0) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_one_draft_for_several_prompts_keeps_their_state_apart(models, forward_sizes, kind):
    """As many steps, and as many tokens processed by the draft model, as with a draft for each prompt."""
    model = models["gpt2"]
    make = NgramDraft if kind == "ngram" else lambda: ModelDraft(model)
    prompts = [PROMPTS[1], [9, *PROMPTS[1]]]

    def run(drafts: list[Draft]) -> tuple[list[list[int]], list[int]]:
        forward_sizes.clear()
        llm = LLM(model, max_batch=2, prefix_cache=False)
        options = {"sampling": GREEDY, "max_new_tokens": 20, "stop_ids": frozenset()}
        requests = [llm._request(prompt, draft=draft, **options) for prompt, draft in zip(prompts, drafts, strict=True)]
        return [output.outputs[0].tokens for output in llm.complete(requests)], sorted(forward_sizes)

    shared = make()
    separate = run([make(), make()])
    assert run([shared, shared]) == separate
    assert run([shared, shared]) == separate  # also when it is used again
    assert separate[0] == [generate(model, prompt, max_new_tokens=20, temperature=0) for prompt in prompts]


def test_logprobs_are_those_without_a_draft(models):
    model = models["gpt2"]
    plain, drafted = (
        LLM(model, max_batch=1).generate([[3, 4]], GREEDY, max_new_tokens=12, logprobs=2, draft=draft)
        for draft in (None, ModelDraft(model))
    )
    assert plain[0].outputs[0].tokens == drafted[0].outputs[0].tokens
    for one, other in zip(plain[0].outputs[0].logprobs, drafted[0].outputs[0].logprobs, strict=True):
        assert isinstance(one, Logprob)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected .* got 0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: expected .* got 0"),
        ({"prompt": []}, "non-empty"),
        ({"sampling": SamplingParams(logit_bias={97: 1.0})}, "logit_bias: .* got 97"),
        ({"seed": -1}, "seed: expected .* got -1"),
    ],
)
def test_invalid_arguments_are_rejected(models, options, message):
    usual = {"prompt": [1], "sampling": GREEDY, "max_new_tokens": 3}
    with pytest.raises(RequestError, match=message):
        speculate(models["gpt2"], **usual | options)


def test_unusable_drafts_are_rejected(models):
    other = ModelDraft(GPT(GPTConfig(context_length=8, vocab_size=50, num_layers=1, embd_size=16, num_heads=2)))
    with pytest.raises(RequestError, match="vocabulary of 97 tokens, got 50"):
        speculate(models["gpt2"], [1], GREEDY, other, max_new_tokens=3)
    with pytest.raises(RequestError, match="max_ngram: .* got 0"):
        NgramDraft(0)
    with pytest.raises(RequestError, match="n = 1"):
        LLM(models["gpt2"]).generate([[1]], GREEDY, n=2, draft=NgramDraft())
