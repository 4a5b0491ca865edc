"""Beam search against exhaustive search."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.models import KINDS, add_noise

from whimbrel.base.errors import RequestError
from whimbrel.inference import beam_search, generate
from whimbrel.models import GPT, GPTConfig


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return add_noise(GPT(KINDS["llama3"]))


@torch.no_grad()
def test_enough_beams_find_the_most_likely_sequences():
    torch.manual_seed(0)
    config = GPTConfig(context_length=8, vocab_size=5, num_layers=1, embd_size=16, num_heads=2, vocab_multiple=1)
    model, prompt = add_noise(GPT(config)), [1, 2]
    scores = {}
    for text in itertools.product(range(5), repeat=3):
        logs = model(torch.tensor([[*prompt, *text]])).logits[0, 1:-1].log_softmax(-1)
        scores[text] = sum(logs[place, token].item() for place, token in enumerate(text))
    best = sorted(scores, key=lambda text: -scores[text])[:25]
    found = beam_search(model, prompt, num_beams=25, max_new_tokens=3, length_penalty=0.0)
    assert [tuple(beam.tokens) for beam in found] == best
    assert [beam.score for beam in found] == pytest.approx([scores[text] for text in best], abs=1e-4)


def test_one_beam_is_greedy_decoding(model):
    greedy = generate(model, [3, 4], max_new_tokens=20, temperature=0)
    [beam] = beam_search(model, [3, 4], num_beams=1, max_new_tokens=20)
    assert beam.tokens == greedy
    [beam] = beam_search(model, [3, 4], num_beams=1, max_new_tokens=20, stop_ids=greedy[5])
    assert beam.tokens == greedy[: greedy.index(greedy[5])]


def test_more_beams_score_higher_and_the_length_penalty_favors_long_sequences(model):
    best = [beam_search(model, [3, 4], num_beams=beams, max_new_tokens=12)[0].score for beams in (1, 8)]
    assert best[0] < best[1]
    ends = range(0, 97, 6)

    def length(penalty: float) -> int:
        return len(
            beam_search(model, [3, 4], num_beams=4, max_new_tokens=12, length_penalty=penalty, stop_ids=ends)[0].tokens
        )

    assert length(-2.0) < length(3.0)


def test_a_quantized_cache_changes_the_scores(model):
    plain, coded = (
        beam_search(model, [3, 4], num_beams=3, max_new_tokens=6, kv_cache_dtype=codec)[0] for codec in ("none", "int4")
    )
    assert plain.score != coded.score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams: expected .* got 0"),
        ({"num_beams": 1025}, "num_beams: expected .* got 1025"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected .* got 0"),
        ({"max_new_tokens": 32}, "at most 31 after a prompt of 2 tokens"),
    ],
)
def test_invalid_arguments_are_rejected(model, options, message):
    with pytest.raises(RequestError, match=message):
        beam_search(model, [1, 2], **{"max_new_tokens": 4} | options)
    assert beam_search(model, [1, 2], num_beams=1, max_new_tokens=31)


def test_non_finite_logits_are_rejected():
    model = GPT(GPTConfig(context_length=8, vocab_size=5, num_layers=1, embd_size=16, num_heads=2))
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(RequestError, match="finite logits"):
        beam_search(model, [1], max_new_tokens=2)
