"""A request gets the same tokens in the engine as alone, regardless of batching, blocks and chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.inference.reference import generate_alone, outputs, run, small_model

from whimbrel.inference import Engine, EngineConfig, Request, SamplingParams, generate
from whimbrel.inference.paged_cache import PagedBatch

MODELS = {
    "learned": small_model(),
    "rope": small_model(position="rope", num_kv_heads=2, norm="rms"),
    "windows": small_model(
        position="rope", sliding_window=6, layer_types=("sliding_attention", "full_attention"), logit_softcap=20.0
    ),
}

requests = st.builds(
    Request,
    prompt_ids=st.lists(st.integers(0, 2), min_size=1, max_size=30).map(tuple),
    max_new_tokens=st.integers(1, 20),
    sampling=st.sampled_from(
        [
            SamplingParams(temperature=0),
            SamplingParams(),
            SamplingParams(temperature=0.8, top_k=10, top_p=0.9),
            SamplingParams(min_p=0.05, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.1),
            SamplingParams(temperature=0, logit_bias={3: 2.0}),
        ]
    ),
    seed=st.integers(0, 5),
    n=st.sampled_from([1, 1, 1, 3]),
    stop_ids=st.sampled_from([frozenset(), frozenset({3, 4, 5})]),
)
configs = st.builds(
    EngineConfig,
    block_size=st.sampled_from([1, 4, 16]),
    max_batch=st.sampled_from([3, 8, 64]),
    prefill_chunk=st.sampled_from([1, 7, 512]),
    prefix_cache=st.booleans(),
)


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    requests=st.lists(requests, min_size=1, max_size=7),
    config=configs,
    spare=st.sampled_from([0, 3, 400]),
    pauses=st.lists(st.integers(0, 6), min_size=7, max_size=7),
    left=st.sets(st.integers(0, 6)),
)
def test_a_request_gets_the_tokens_it_gets_alone(name, requests, config, spare, pauses, left):
    """Requests arrive and are aborted at any time; the pool holds little more than the longest one."""
    model = MODELS[name]
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    blocks = -(-min(longest, model.config.context_length) // config.block_size) + 1 + spare
    engine = Engine(model, EngineConfig(**{**fields(config), "num_blocks": blocks}))
    numbers, events = [], []
    for request, pause in zip(requests, pauses, strict=False):
        numbers.append(engine.add_request(request))
        events += [event for _ in range(pause) for event in engine.step()]
        for number in numbers:
            if number in left and pause % 2:
                engine.abort(number)
    events += run(engine)
    found = outputs(events)
    for number, request in zip(numbers, requests, strict=True):
        for sample in range(request.n):
            expected = generate_alone(model, request, sample)
            given_back = found.get((number, sample), [])
            assert given_back == (expected if number not in left else expected[: len(given_back)])
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, blocks - 1)


def fields(config: EngineConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}


def many(count: int = 12, **settings: object) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [
        Request(
            prompt_ids=tuple(torch.randint(40, (length,), generator=generator).tolist()),
            max_new_tokens=12,
            sampling=SamplingParams(temperature=index % 2),
            seed=index,
            **settings,
        )
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_tokens_equal_those_of_generate(chunk):
    model = MODELS["learned"]
    engine = Engine(model, EngineConfig(block_size=4, prefill_chunk=chunk))
    requests = many()
    for request in requests:
        engine.add_request(request)
    found = outputs(run(engine))
    for number, request in enumerate(requests):
        expected = generate(
            model,
            request.prompt_ids,
            max_new_tokens=min(12, 48 - len(request.prompt_ids)),
            temperature=request.sampling.temperature,
            seed=request.seed,
        )
        assert found[number, 0] == [*expected, "length"]


def test_the_latest_sequence_is_preempted_when_blocks_run_out():
    model = MODELS["rope"]
    requests = many()
    engine = Engine(model, EngineConfig(block_size=2, num_blocks=25, prefill_chunk=16))
    for request in requests:
        engine.add_request(request)
    events = run(engine)
    assert engine.stats().preemptions > 3
    assert outputs(events) == {(number, 0): generate_alone(model, request) for number, request in enumerate(requests)}
    firsts = list(dict.fromkeys(event.request_id for event in events))
    assert firsts == sorted(firsts), "first come, first served"


def test_penalties_survive_preemption():
    """With a vocabulary of 40 and a huge presence penalty, each token is sampled once, however often preempted."""
    sampling = SamplingParams(temperature=0, presence_penalty=1e4)
    engine = Engine(MODELS["rope"], EngineConfig(block_size=2, num_blocks=50))
    for first in range(6):
        engine.add_request(Request(prompt_ids=(first, 1, 2, 1), max_new_tokens=40, sampling=sampling))
    drawn = outputs(run(engine))
    assert engine.stats().preemptions > 3
    assert [sorted(tokens[:-1]) for tokens in drawn.values()] == [list(range(40))] * 6


def test_the_prefix_cache_skips_known_prompts():
    model = MODELS["rope"]
    engine = Engine(model, EngineConfig(block_size=4))
    first = Request(prompt_ids=tuple(range(21)), max_new_tokens=7, sampling=SamplingParams(temperature=0))
    engine.add_request(first)
    answer = outputs(run(engine))[0, 0][:-1]
    assert engine.stats().prefix_hits == 0
    engine.add_request(first)
    assert outputs(run(engine))[1, 0][:-1] == answer
    assert engine.stats().prefix_hits == 20
    # Sampled tokens are cached too, except the last, which was never processed.
    then = Request(prompt_ids=(*first.prompt_ids, *answer, 5), max_new_tokens=3, sampling=SamplingParams(temperature=0))
    engine.add_request(then)
    assert outputs(run(engine))[2, 0] == generate_alone(model, then)
    assert engine.stats().prefix_hits == 20 + 24
    without = Engine(model, EngineConfig(block_size=4, prefix_cache=False))
    for _ in range(2):
        without.add_request(first)
        run(without)
    assert without.stats().prefix_hits == 0
    assert without.pool.match(first.prompt_ids, 20)[0] == []


def test_padding_rows_do_not_change_the_tokens():
    model = MODELS["windows"]
    engine = Engine(model, EngineConfig(block_size=4, max_batch=8))
    batch_sizes = []

    class Padding:
        def padded_size(self, num_sequences: int) -> int:
            return -(-num_sequences // 8) * 8

        def __call__(self, tokens: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
            batch_sizes.append(len(tokens))
            return model(tokens, cache=batch).logits[:, -1]

    engine.runner._graphs = Padding()
    requests = many(11)
    for request in requests:
        engine.add_request(request)
    assert outputs(run(engine)) == {
        (number, 0): generate_alone(model, request) for number, request in enumerate(requests)
    }
    assert set(batch_sizes) == {8}


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_quantized_blocks_give_the_same_tokens_in_any_batch(codec):
    model = MODELS["rope"]
    requests = many(6)
    together = Engine(model, EngineConfig(block_size=4, num_blocks=20, prefill_chunk=7, kv_cache_dtype=codec))
    lone = Engine(model, EngineConfig(prefill_chunk=7, kv_cache_dtype=codec, prefix_cache=False))
    for request in requests:
        together.add_request(request)
    found = outputs(run(together))
    for number, request in enumerate(requests):
        assert lone.add_request(request) == number
        assert found[number, 0] == outputs(run(lone))[number, 0]
    assert together.pool.codec.name == codec


def test_non_finite_logits_end_only_their_own_request():
    model = small_model()
    with torch.no_grad():
        model.token_embedding.weight[7] = torch.nan
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=30))
    good = [request for request in many(20, stop_ids=frozenset({7})) if 7 not in request.prompt_ids]
    assert len(good) > 4
    bad = Request(prompt_ids=(1, 2, 7, 3, 4, 5, 6), max_new_tokens=5, seed=0, n=2)
    order = [*(request for one in good for request in (one, bad)), *good]
    for request in order:
        engine.add_request(request)
    found = outputs(run(engine))
    for number, request in enumerate(order):
        for sample in range(request.n):
            assert found[number, sample] == (["error"] if request is bad else generate_alone(model, request, sample))
    assert engine.stats().free_blocks == 29
    assert not any(tensor[1:].isnan().any() for tensor in engine.pool.tensors)
