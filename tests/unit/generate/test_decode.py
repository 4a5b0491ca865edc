"""Generation on a small model."""

from __future__ import annotations

import pytest
import torch

import whimbrel
from whimbrel.base.errors import RequestError
from whimbrel.generate import Sampling, generate, stream
from whimbrel.models import GPT, GPTConfig


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(context_length=16, vocab_size=50, num_layers=2, embd_size=32, num_heads=2, tied_head=False)
    return GPT(config)


def test_greedy_tokens_are_those_of_the_uncached_model(model):
    ids = [3, 1, 4]
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert generate(model, [3, 1, 4], max_new_tokens=12, temperature=0) == ids[3:]


def test_text_runs_past_the_context(model):
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
    assert generate(model, [1], max_new_tokens=30, seed=0, eos_id=end) == cut
    assert generate(model, [1], max_new_tokens=30, seed=0, eos_id=[end, 1000]) == cut


def test_tokens_stream_one_at_a_time(model):
    tokens = stream(model, [1], Sampling(temperature=0), max_new_tokens=5)
    first = next(tokens)
    assert [first, *tokens] == generate(model, [1], max_new_tokens=5, temperature=0)


def test_the_package_function_works_before_and_after_the_room_is_imported(model):
    assert whimbrel.generate(model, [1], max_new_tokens=2, seed=0) == generate(model, [1], max_new_tokens=2, seed=0)


def test_compiled_blocks_are_not_compiled_again_for_each_length(model):
    expected = generate(model, [1], max_new_tokens=12, temperature=0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(backend="eager")
    assert generate(model, [1], max_new_tokens=12, temperature=0) == expected
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "non-empty list"),
        ([[1, 2]], {}, r"shape \(1, 2\)"),
        ([0.5], {}, "token ids"),
        ([50], {}, "token id 50 is outside the model's vocabulary: ids run from 0 to 49"),
        ([-1], {}, "token id -1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([1], {"temperature": -1.0}, "temperature = -1.0"),
        ([1], {"temperature": float("nan")}, "temperature = nan"),
        ([1], {"seed": -1}, "seed = -1"),
        ([1], {"seed": 2**70}, "from 0 to 2"),
        ([1], {"top_k": 0}, "top_k = 0"),
        ([1], {"top_p": 1.5}, "top_p = 1.5"),
    ],
)
def test_requests_that_make_no_sense_are_refused(model, prompt, options, message):
    with pytest.raises(RequestError, match=message):
        generate(model, prompt, **options)


def test_a_model_that_diverged_is_refused(model):
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(RequestError, match="not numbers"):
        generate(model, [1], temperature=0)
