"""Options of requests, the events they return, and invalid ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.inference.reference import generate_alone, outputs, run, small_model
from torch._inductor import config as inductor

from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.inference import Engine, EngineConfig, Event, Logprob, Request, SamplingParams

GREEDY = SamplingParams(temperature=0)
MODEL = small_model(position="rope")
PROMPT = tuple(torch.randint(40, (21,), generator=torch.Generator().manual_seed(3)).tolist())


def logs(tokens: list[int]) -> torch.Tensor:
    """The log-probabilities of what comes after each of `tokens`, from one pass without a cache."""
    with torch.inference_mode():
        return MODEL(torch.tensor([tokens])).logits[0].log_softmax(-1)


def assert_scored(score: Logprob, logs_V: torch.Tensor, token: int, number: int) -> None:
    assert score.logprob == pytest.approx(float(logs_V[token]), abs=2e-5)
    best = logs_V.topk(number)
    assert [each for each, _ in score.top] == best.indices.tolist()
    assert [each for _, each in score.top] == pytest.approx(best.values.tolist(), abs=2e-5)


def test_new_tokens_come_with_logprobs_if_requested():
    engine = Engine(MODEL)
    num_logprobs = [None, 0, 4, 2]
    for number in num_logprobs:
        engine.add_request(
            Request(
                prompt_ids=PROMPT, max_new_tokens=5, sampling=SamplingParams(temperature=2), seed=1, logprobs=number
            )
        )
    events = run(engine)
    for request, number in enumerate(num_logprobs):
        own = [event for event in events if event.request_id == request]
        tokens = [event.token for event in own]
        assert len(tokens) == 5
        expected = logs([*PROMPT, *tokens])[len(PROMPT) - 1 :]
        for event, logs_V in zip(own, expected, strict=False):
            if number is None:
                assert (event.logprob, event.top) == (None, ())
            else:  # log-probabilities of the model, not affected by temperature 2
                assert_scored(Logprob(event.logprob, event.top), logs_V, event.token, number)


def assert_prompt_scored(events: list[Event], prompt: tuple[int, ...], number: int) -> None:
    first, *others = events
    assert first.token is None
    assert first.prompt is not None
    assert len(first.prompt) == len(prompt)
    assert first.prompt[0] == (None, ())
    for score, logs_V, token in zip(first.prompt[1:], logs(list(prompt)), prompt[1:], strict=False):
        assert_scored(score, logs_V, token, number)
    assert [event for event in others if event.prompt is not None] == []


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_are_complete_with_chunks_and_prefix_cache(chunk, warm):
    engine = Engine(MODEL, EngineConfig(block_size=4, prefill_chunk=chunk))
    if warm:
        engine.add_request(Request(prompt_ids=PROMPT, max_new_tokens=1))
        run(engine)
    request = Request(prompt_ids=PROMPT, max_new_tokens=3, sampling=GREEDY, prompt_logprobs=3)
    number = engine.add_request(request)
    events = run(engine)
    assert_prompt_scored(events, PROMPT, 3)
    assert outputs(events)[number, 0] == generate_alone(MODEL, request)
    assert engine.stats().prefix_hits == 0


def test_a_preempted_prompt_is_scored_once():
    """An earlier sequence takes the blocks of a partly prefilled prompt; known scores are not computed again."""
    engine = Engine(MODEL, EngineConfig(block_size=1, num_blocks=46, prefill_chunk=3))
    older = Request(prompt_ids=PROMPT[:5], max_new_tokens=30, sampling=GREEDY)
    younger = Request(prompt_ids=PROMPT, max_new_tokens=10, sampling=GREEDY, prompt_logprobs=2)
    engine.add_request(older)
    events = [event for _ in range(18) for event in engine.step()]
    engine.add_request(younger)
    events += run(engine)
    assert engine.stats().preemptions > 0
    assert_prompt_scored([event for event in events if event.request_id == 1], PROMPT, 2)
    assert outputs(events) == {(0, 0): generate_alone(MODEL, older), (1, 0): generate_alone(MODEL, younger)}


@pytest.mark.parametrize("samples", [1, 3])
def test_a_prompt_can_be_scored_without_sampling(samples):
    engine = Engine(MODEL)
    whole = tuple(index % 40 for index in range(48))
    for prompt in (PROMPT, whole, (5,)):
        number = engine.add_request(Request(prompt_ids=prompt, max_new_tokens=0, prompt_logprobs=0, n=samples))
        events = run(engine)
        assert_prompt_scored(events, prompt, 0)
        assert events[1:] == [Event(number, sample, finish_reason="length") for sample in range(samples)]


def test_samples_share_the_blocks_of_the_prompt_and_differ():
    engine = Engine(MODEL, EngineConfig(block_size=4, num_blocks=100))
    request = Request(prompt_ids=PROMPT, max_new_tokens=6, seed=11, n=5)
    engine.add_request(request)
    events = engine.step()
    assert sorted(event.sample for event in events) == [0, 1, 2, 3, 4]
    assert engine.stats().free_blocks == 99 - 6, "one prompt of 21 tokens"
    events += engine.step()
    assert engine.stats().free_blocks == 99 - 5 - 5, "five full blocks, and a last one for each"
    events += run(engine)
    found = outputs(events)
    assert found == {(0, sample): generate_alone(MODEL, request, sample) for sample in range(5)}
    assert len({tuple(text) for text in found.values()}) == 5
    assert engine.stats().free_blocks == 99


def test_requests_without_a_seed_differ():
    engine = Engine(MODEL)
    for _ in range(2):
        engine.add_request(Request(prompt_ids=PROMPT, max_new_tokens=20, n=2))
    assert len({tuple(text) for text in outputs(run(engine)).values()}) == 4


@pytest.mark.parametrize("when", range(6))
def test_abort_frees_blocks_at_once(when):
    engine = Engine(MODEL, EngineConfig(block_size=4, num_blocks=100, prefill_chunk=8))
    number = engine.add_request(Request(prompt_ids=PROMPT, max_new_tokens=9, n=3))
    for _ in range(when):
        engine.step()
    engine.abort(number)
    assert not engine.busy
    assert engine.stats().free_blocks == 99
    assert engine.step() == []
    engine.abort(number)
    engine.abort(12345)


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("left", [{0}, {1}, {0, 2}])
def test_samples_can_be_aborted_one_by_one(when, left):
    engine = Engine(MODEL, EngineConfig(block_size=4, prefill_chunk=8))
    request = Request(prompt_ids=PROMPT, max_new_tokens=9, seed=2, n=3, prompt_logprobs=0)
    number = engine.add_request(request)
    events = [event for _ in range(when) for event in engine.step()]
    for sample in left:
        engine.abort(number, sample)
    after = run(engine)
    assert not {event.sample for event in after} & left
    for sample in {0, 1, 2} - left:
        assert outputs(events + after)[number, sample] == generate_alone(MODEL, request, sample)
    assert [event.prompt is not None for event in events + after].count(True) == 1
    for sample in left:
        engine.abort(number, sample)


def test_a_stop_token_ends_a_sequence_and_is_not_returned():
    engine = Engine(MODEL)
    free = generate_alone(MODEL, Request(prompt_ids=PROMPT, max_new_tokens=20, seed=4))
    stop = free[7]
    request = Request(prompt_ids=PROMPT, max_new_tokens=20, seed=4, stop_ids=frozenset({stop, 1000}))
    engine.add_request(request)
    *events, last = run(engine)
    assert [event.token for event in events] == free[: free.index(stop)]
    assert last == Event(0, 0, finish_reason="stop")


def test_a_sequence_ends_with_the_context():
    engine = Engine(MODEL)
    engine.add_request(Request(prompt_ids=PROMPT, max_new_tokens=1000, sampling=GREEDY))
    events = run(engine)
    assert len(PROMPT) + len(events) == 48
    assert [event.finish_reason for event in events] == [None] * 26 + ["length"]


def test_stats_count_tokens_and_sequences():
    engine = Engine(MODEL, EngineConfig(block_size=4, num_blocks=50, max_batch=2))
    for _ in range(3):
        engine.add_request(Request(prompt_ids=PROMPT, max_new_tokens=4))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks) == (2, 1, 49)
    run(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.new_tokens, stats.prefix_hits, stats.preemptions) == (63, 12, 20, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": ()}, "at least one token"),
        ({"prompt_ids": (1, 40)}, "from 0 to 39, got 40"),
        ({"prompt_ids": (-1,)}, "got -1"),
        ({"prompt_ids": (1,) * 48}, "at most 47 tokens .the model's context., got 48"),
        ({"prompt_ids": (1,) * 50, "max_new_tokens": 0}, "at most 49 tokens .the model's context., got 50"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected .* got -1"),
        ({"n": 0}, "n: expected .* got 0"),
        ({"n": 9}, "n: expected .* got 9"),
        ({"seed": -1}, "seed: expected .* got -1"),
        ({"seed": 2**63}, "seed: expected .* got 9223372036854775808"),
        ({"logprobs": -1}, "logprobs: expected .* got -1"),
        ({"prompt_logprobs": -2}, "prompt_logprobs: expected .* got -2"),
        ({"sampling": SamplingParams(logit_bias={40: 1.0})}, "logit_bias: .* got 40"),
    ],
)
def test_unservable_requests_are_rejected_at_once(changes, message):
    engine = Engine(MODEL, EngineConfig(block_size=4, num_blocks=16, max_batch=8))
    with pytest.raises(RequestError, match=message):
        engine.add_request(Request(**{"prompt_ids": (1, 2, 3, 4), "max_new_tokens": 3, **changes}))
    assert not engine.busy


def test_a_pool_smaller_than_the_context_limits_the_length():
    engine = Engine(MODEL, EngineConfig(block_size=4, num_blocks=8))
    assert engine.context_length == 28
    request = Request(prompt_ids=(1, 2, 3, 4), max_new_tokens=24, sampling=GREEDY)
    for asked in (24, 25, 48):
        engine.add_request(replace(request, max_new_tokens=asked))
        events = run(engine)
        assert list(outputs(events).values()) == [generate_alone(MODEL, request)]
        assert events[-1].finish_reason == "length"
    for prompt, new, limit in ((28, 1, 27), (30, 0, 29)):
        with pytest.raises(RequestError, match=f"at most {limit} tokens .the KV cache., got {prompt}"):
            engine.add_request(replace(request, prompt_ids=(1,) * prompt, max_new_tokens=new))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size: expected .* got 0"),
        ({"max_batch": 0}, "max_batch: expected .* got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected .* got 0"),
        ({"multi_step": 0}, "multi_step.*got 0"),
        ({"num_blocks": 1}, "num_blocks: expected .* got 1"),
        ({"kv_cache_dtype": "int9"}, "kv_cache_dtype: expected one of none, fp8, int8, int4, got 'int9'"),
        ({"num_blocks": 10**12}, "num_blocks: expected .* got 1000000000000"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        Engine(MODEL, EngineConfig(**settings))


@inductor.patch({"cpp.cxx": "no-such-compiler"})
def test_a_missing_compiler_is_reported_when_the_engine_is_built():
    with pytest.raises(ConfigError, match=r"compile needs a working C\+\+ compiler"):
        Engine(MODEL, EngineConfig(compile=True))
    Engine(MODEL)


def test_the_default_pool_fits_a_full_batch():
    assert Engine(MODEL, EngineConfig(block_size=5, max_batch=3)).stats().blocks == 3 * 10
