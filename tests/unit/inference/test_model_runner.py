"""Recorded and compiled decode steps give the same tokens as eager ones."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from whimbrel.inference import Engine, EngineConfig, Request, SamplingParams, generate
from whimbrel.inference.model_runner import DecodeGraphs
from whimbrel.inference.paged_cache import PagedBatch
from whimbrel.models import GPT, GPTConfig

SHAPES = {
    "gpt2": GPTConfig(context_length=64, vocab_size=97, num_layers=2, embd_size=32, num_heads=2),
    "llama": GPTConfig(
        context_length=64, vocab_size=97, num_layers=2, embd_size=64, num_heads=4, num_kv_heads=2, position="rope",
        norm="rms", activation="silu", gated_mlp=True, bias="none", sliding_window=9,
        layer_types=("sliding_attention", "full_attention"),
    ),
}  # fmt: skip


def model_of(kind: str, device: str = "cpu") -> GPT:
    torch.manual_seed(0)
    model = GPT(SHAPES[kind]).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5)  # well-separated logits and non-repeating output
    return model.to(device)


def generate_all(engine: Engine, prompts: list[list[int]], **sampling: float) -> list[list[int]]:
    drawn: dict[int, list[int]] = {
        engine.add_request(
            Request(prompt_ids=tuple(ids), max_new_tokens=5 + 4 * i, sampling=SamplingParams(**sampling), seed=i)
        ): []
        for i, ids in enumerate(prompts)
    }
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                drawn[event.request_id].append(event.token)
    return list(drawn.values())


PROMPTS = [[5, 6, 7], [8], list(range(40)), [9, 3], [1, 1, 1, 1, 1]]


def test_batch_sizes_are_powers_of_two_and_the_maximum() -> None:
    model = model_of("gpt2")
    graphs = DecodeGraphs(model, Engine(model, EngineConfig(max_batch=6)).pool, max_batch=6, compile_step=False)
    assert [graphs.padded_size(size) for size in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record steps without compiling them, which takes long and has its own test."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    monkeypatch.setattr("whimbrel.inference.engine.check_compiler", lambda *_: None)


def alone(model: GPT, **settings: Any) -> list[list[int]]:
    return [generate(model, ids, max_new_tokens=5 + 4 * i, temperature=0, **settings) for i, ids in enumerate(PROMPTS)]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("multi_step", [1, 2, 8, 100])
@pytest.mark.parametrize("blocks", [None, 17])  # too few blocks for all sequences, so some are preempted
@pytest.mark.parametrize("kind", SHAPES)
def test_recorded_steps_give_the_same_tokens(
    kind: str, blocks: int | None, multi_step: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if multi_step != 2 and not ahead:
        monkeypatch.setattr("whimbrel.inference.model_runner.MIN_TABLE_TOKENS", 4)  # block tables of many widths
    model = model_of(kind)
    engine = Engine(
        model, EngineConfig(max_batch=6, compile=True, multi_step=multi_step, block_size=4, num_blocks=blocks)
    )
    engine._runs_ahead = ahead  # only a GPU does
    for _ in range(2):  # the second time with the prefix cache
        assert generate_all(engine, PROMPTS, temperature=0) == alone(model)
    assert engine.stats().preemptions > 0 or blocks is None
    assert engine.stats().free_blocks == engine.stats().blocks
    assert engine.stats().new_tokens == 2 * sum(len(text) for text in alone(model))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("multi_step", [1, 8])
def test_attention_reads_only_filled_blocks(multi_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []

    class RecordingBatch(PagedBatch):
        def __init__(self, pool: Any, tables: torch.Tensor, *rest: Any, **named: Any) -> None:
            widths.append(tables.size(1))
            super().__init__(pool, tables, *rest, **named)

    monkeypatch.setattr("whimbrel.inference.model_runner.PagedBatch", RecordingBatch)
    monkeypatch.setattr("whimbrel.inference.model_runner.MIN_TABLE_TOKENS", 8)
    model = model_of("gpt2")
    engine = Engine(model, EngineConfig(compile=True, block_size=4, multi_step=multi_step))
    assert generate_all(engine, [[5, 6, 7]] * 6, temperature=0)[5] == generate(
        model, [5, 6, 7], max_new_tokens=25, temperature=0
    )
    assert widths[0] <= 3  # of the 16 that the context of 64 tokens has
    assert max(widths) == -(-(3 + 24) // 4)


def test_block_tables_are_as_wide_as_the_device_needs() -> None:
    model = GPT(replace(SHAPES["gpt2"], context_length=1200))
    pool = Engine(model, EngineConfig(max_batch=1, kv_cache_dtype="int8")).pool
    graphs = DecodeGraphs(model, pool, max_batch=1, compile_step=False)
    assert [graphs.table_width(blocks) for blocks in (1, 16, 17, 75)] == [16, 16, 17, 75]  # on a CPU any width will do
    pool.device = torch.device("cuda")
    assert graphs.table_width(1) == graphs.table_width(75) == 75  # the kernel stops at the length of each row


def test_a_step_is_compiled_once_for_one_sequence_and_once_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, options, **rest: compiled(step, backend=counter, **rest))
    monkeypatch.setattr("whimbrel.inference.model_runner.MIN_TABLE_TOKENS", 8)
    model = model_of("llama")
    engine = Engine(model, EngineConfig(max_batch=6, compile=True, block_size=4))
    engine.warm_up()
    assert counter.frame_count == 2
    drawn: list[list[list[int]]] = []
    other = threading.Thread(target=lambda: drawn.append(generate_all(engine, PROMPTS, temperature=0)))
    other.start()  # as the server does
    other.join()
    assert drawn == [alone(model)]
    assert generate_all(engine, PROMPTS[:1], temperature=0) == alone(model)[:1]
    assert counter.frame_count == 2  # whatever the number of rows, and of blocks


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.5, "top_p": 0.8},
    {"min_p": 0.1, "top_p": 0.95, "top_k": 40},
    {"presence_penalty": 1.0},
]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("width", [4, 1024])
@pytest.mark.parametrize("multi_step", [1, 3, 8])
def test_sampled_tokens_do_not_depend_on_the_steps_between_synchronizations(
    multi_step: int, width: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the nuclei (`top_p`) of some steps are too large to sample from without the host."""
    model = model_of("llama")
    requests = [
        Request(prompt_ids=(5, 6, 7 + row), max_new_tokens=17 + row, seed=row, sampling=SamplingParams(**settings))
        for row, settings in enumerate(SAMPLING)
    ]
    expected = [tokens for request in requests for tokens in tokens_of(Engine(model), [request])]
    monkeypatch.setattr("whimbrel.inference.sampling.TOP_P_CANDIDATES", width)
    without_penalties = Engine(model, EngineConfig(compile=True, multi_step=multi_step))
    without_penalties._runs_ahead = ahead
    assert tokens_of(without_penalties, requests[:-1]) == expected[:-1]
    everything = Engine(model, EngineConfig(compile=True, multi_step=multi_step))
    everything._runs_ahead = ahead
    assert tokens_of(everything, requests) == expected


def tokens_of(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """The tokens of each request, all run together."""
    ids = [engine.add_request(request) for request in requests]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                tokens[event.request_id].append(event.token)
    return [tokens[request_id] for request_id in ids]


@pytest.mark.usefixtures("recorded")
def test_sequences_decode_several_tokens_per_step() -> None:
    engine = Engine(model_of("gpt2"), EngineConfig(compile=True, multi_step=8))
    engine.add_request(Request(prompt_ids=(1, 2), max_new_tokens=20, sampling=SamplingParams(temperature=0)))
    assert [len(engine.step()) for _ in range(4)] == [1, 8, 8, 3]
    engine.add_request(Request(prompt_ids=(1, 2), max_new_tokens=12, sampling=SamplingParams(top_p=0.9)))
    assert [len(engine.step()) for _ in range(3)] == [1, 8, 3]
    for asked in (
        {"sampling": SamplingParams(logit_bias={3: 1.0})},
        {"logprobs": 0},
        {"sampling": SamplingParams(temperature=0, presence_penalty=1)},
    ):
        engine.add_request(
            Request(prompt_ids=(1, 2), max_new_tokens=9, **{"sampling": SamplingParams(temperature=0), **asked})
        )
        assert [len(engine.step()) for _ in range(9)] == [1] * 9  # the host needs every token
        assert not engine.busy


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("prompt", [(1,), tuple(range(17))])  # whose last token is processed alone
def test_prompt_logprobs_come_before_multi_step_tokens(prompt: tuple[int, ...]) -> None:
    engine = Engine(model_of("gpt2"), EngineConfig(compile=True, multi_step=8, prefill_chunk=16))
    engine.add_request(
        Request(prompt_ids=prompt, max_new_tokens=9, sampling=SamplingParams(temperature=0), prompt_logprobs=1)
    )
    events = []
    while engine.busy:
        events += engine.step()
    assert len(events[0].prompt or ()) == len(prompt)
    assert [event.token is not None for event in events] == [False] + [True] * 9


@pytest.mark.usefixtures("recorded")
def test_steps_run_ahead_of_the_host_until_the_batch_changes() -> None:
    engine = Engine(model_of("gpt2"), EngineConfig(compile=True, multi_step=4))
    engine._runs_ahead = True
    request = Request(prompt_ids=(1, 2), max_new_tokens=22, sampling=SamplingParams(temperature=0))

    def step() -> tuple[int, bool]:
        return len(engine.step()), engine._launched is not None

    engine.add_request(request)
    assert [step() for _ in range(3)] == [(1, False), (4, True), (4, True)]
    second = engine.add_request(replace(request, prompt_ids=(3, 4)))
    # It is admitted when the launched steps have been read.
    assert [step() for _ in range(3)] == [(4, False), (2, False), (8, True)]
    engine.abort(second)
    assert step() == (4, False)
    assert not engine.busy
    assert engine.stats().free_blocks == engine.stats().blocks


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_after_a_stop_token_are_dropped(ahead: bool) -> None:
    model = model_of("llama")
    text = generate(model, [5, 6, 7], max_new_tokens=30, temperature=0)
    stop = next(token for token in text[3:] if token not in text[:3])
    engine = Engine(model, EngineConfig(compile=True, multi_step=8))
    engine._runs_ahead = ahead
    request = Request(
        prompt_ids=(5, 6, 7), max_new_tokens=30, sampling=SamplingParams(temperature=0), stop_ids=frozenset({stop})
    )
    engine.add_request(request)
    events = []
    while engine.busy:
        events += engine.step()
    assert [event.token for event in events[:-1]] == text[: text.index(stop)]
    assert events[-1].finish_reason == "stop"
    assert events[-1].token is None
    assert engine.stats().free_blocks == engine.stats().blocks
    assert generate_all(engine, [[5, 6, 7]], temperature=0) == [
        text[:5]
    ]  # the cache knows what was processed, not what was sampled


@pytest.mark.usefixtures("recorded")
def test_non_finite_logits_end_a_sequence() -> None:
    model = model_of("gpt2")
    engine = Engine(model, EngineConfig(compile=True))
    engine.add_request(Request(prompt_ids=(1, 2), max_new_tokens=9, sampling=SamplingParams(temperature=0)))
    engine.step()
    model.lm_head.weight.data.fill_(float("nan"))
    assert [event.finish_reason for event in engine.step()] == ["error"]
    assert not engine.busy


@pytest.mark.usefixtures("recorded")
def test_non_finite_blocks_after_a_stop_token_are_cleared() -> None:
    model = model_of("gpt2")
    text = generate(model, [5, 6, 7, 8, 9, 1, 2, 3], max_new_tokens=7, temperature=0)
    stop = next(token for token in text[1:] if token != text[0])
    engine = Engine(model, EngineConfig(compile=True, num_blocks=2))
    stops = frozenset({stop})
    engine.add_request(
        Request(
            prompt_ids=(5, 6, 7, 8, 9, 1, 2, 3),
            max_new_tokens=7,
            sampling=SamplingParams(temperature=0),
            stop_ids=stops,
        )
    )
    engine.step()
    model.transformer["wpe"].weight.data[8 + text.index(stop)] = float("nan")  # the slot of the stop token
    events = engine.step()
    assert events[-1].finish_reason == "stop"
    assert generate_all(engine, [[3]], temperature=0) == [
        generate(model_of("gpt2"), [3], max_new_tokens=5, temperature=0)
    ]


def test_many_engines_can_compile_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda step, options, **rest: compiled(step, backend="eager", **rest)
    )  # as many compilations, but with a fast backend
    model = model_of("gpt2")
    engines = [Engine(model, EngineConfig(max_batch=1, compile=True, num_blocks=blocks)) for blocks in range(20, 26)]
    for engine in engines:
        assert generate_all(engine, PROMPTS[:1], temperature=0) == alone(model)[:1]


def test_a_compiled_step_gives_the_same_tokens_at_any_block_table_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.inference.model_runner.MIN_TABLE_TOKENS", 8)
    torch.manual_seed(0)
    model = GPT(replace(SHAPES["llama"], num_layers=1, layer_types=None)).eval()
    engine = Engine(model, EngineConfig(max_batch=1, compile=True, block_size=4))
    assert generate_all(engine, PROMPTS, temperature=0) == alone(model)


@pytest.mark.gpu
# inductor suggests TF32; fp32 must stay exact here
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize(
    ("kv_cache_dtype", "compiled"), [("none", False), ("none", True), ("int8", False), ("int4", False)]
)
@pytest.mark.parametrize("kind", SHAPES)
def test_cuda_graphs_give_the_same_tokens(kind: str, kv_cache_dtype: str, compiled: bool) -> None:
    model = model_of(kind, "cuda")
    engine = Engine(model, EngineConfig(max_batch=6, compile=compiled, kv_cache_dtype=kv_cache_dtype))
    for _ in range(2):  # the second time with the prefix cache
        assert generate_all(engine, PROMPTS, temperature=0) == alone(model, kv_cache_dtype=kv_cache_dtype)
    drawn = generate_all(engine, PROMPTS, temperature=0.7)
    # same as on the CPU
    assert drawn == generate_all(
        Engine(model_of(kind), EngineConfig(kv_cache_dtype=kv_cache_dtype)), PROMPTS, temperature=0.7
    )
