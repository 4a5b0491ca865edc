"""Steps that are recorded once and replayed: the same tokens as steps that are not."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from whimbrel.cache.paged import PagedBatch
from whimbrel.inference import Engine, EngineConfig, Request, SamplingParams, generate
from whimbrel.inference.model_runner import DecodeGraphs
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
            torch.nn.init.normal_(parameter, std=0.5)  # logits far apart, texts that do not repeat themselves
    return model.to(device)


def texts(engine: Engine, prompts: list[list[int]], **sampling: float) -> list[list[int]]:
    drawn: dict[int, list[int]] = {
        engine.add_request(
            Request(prompt_ids=tuple(ids), max_new_tokens=5 + 4 * i, sampling=SamplingParams(**sampling), seed=i)
        ): []
        for i, ids in enumerate(prompts)
    }
    while engine.busy:
        for event in engine.step():
            if event.token is not None:
                drawn[event.request].append(event.token)
    return list(drawn.values())


PROMPTS = [[5, 6, 7], [8], list(range(40)), [9, 3], [1, 1, 1, 1, 1]]


def test_sizes_of_batch() -> None:
    model = model_of("gpt2")
    graphs = DecodeGraphs(model, Engine(model, EngineConfig(max_batch=6)).pool, max_batch=6, compile_step=False)
    assert [graphs.padded(rows) for rows in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded as they are: compiling them takes long, and has a test of its own."""
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    monkeypatch.setattr("whimbrel.inference.engine.check_compiler", lambda *_: None)


def alone(model: GPT, **settings: Any) -> list[list[int]]:
    return [generate(model, ids, max_new_tokens=5 + 4 * i, temperature=0, **settings) for i, ids in enumerate(PROMPTS)]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("multi_step", [1, 2, 8, 100])
@pytest.mark.parametrize("pages", [None, 17])  # which are too few for all: rows start over
@pytest.mark.parametrize("kind", SHAPES)
def test_recorded_steps_change_nothing(
    kind: str, pages: int | None, multi_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if multi_step != 2:
        monkeypatch.setattr("whimbrel.inference.model_runner.MIN_TOKENS", 4)  # tables of many widths
    model = model_of(kind)
    engine = Engine(
        model, EngineConfig(max_batch=6, compile=True, multi_step=multi_step, block_size=4, num_blocks=pages)
    )
    for _ in range(2):  # the second time from pages that the first has left
        assert texts(engine, PROMPTS, temperature=0) == alone(model)
    assert engine.stats().preemptions > 0 or pages is None
    assert engine.stats().free_blocks == engine.stats().blocks
    assert engine.stats().new_tokens == 2 * sum(len(text) for text in alone(model))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("multi_step", [1, 8])
def test_attention_reads_the_pages_that_are_filled_and_not_the_whole_context(
    multi_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []

    class Noted(PagedBatch):
        def __init__(self, pool: Any, tables: torch.Tensor, *rest: Any, **named: Any) -> None:
            widths.append(tables.size(1))
            super().__init__(pool, tables, *rest, **named)

    monkeypatch.setattr("whimbrel.inference.model_runner.PagedBatch", Noted)
    monkeypatch.setattr("whimbrel.inference.model_runner.MIN_TOKENS", 8)
    model = model_of("gpt2")
    engine = Engine(model, EngineConfig(compile=True, block_size=4, multi_step=multi_step))
    assert texts(engine, [[5, 6, 7]] * 6, temperature=0)[5] == generate(
        model, [5, 6, 7], max_new_tokens=25, temperature=0
    )
    assert widths[0] <= 3  # of the 16 that the context of 64 tokens has
    assert max(widths) == -(-(3 + 24) // 4)


def test_graphs_of_coded_caches_have_widths_of_powers_of_two() -> None:
    """So attention, which there reads all of the table, costs at most twice what is filled."""
    model = GPT(replace(SHAPES["gpt2"], context_length=1200))
    pool = Engine(model, EngineConfig(max_batch=1, cache="int8")).pool
    graphs = DecodeGraphs(model, pool, max_batch=1, compile_step=False)
    assert [graphs.width(pages) for pages in (1, 16, 17, 75)] == [16, 16, 17, 75]  # on a CPU any width will do
    pool.device = torch.device("cuda")
    assert [graphs.width(pages) for pages in (1, 16, 17, 32, 33, 75)] == [16, 16, 32, 32, 64, 75]
    pool.codec = None
    assert graphs.width(1) == graphs.width(75) == 75  # the kernel stops at the length of each row


def test_a_step_is_compiled_once_for_one_row_and_once_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, options, **rest: compiled(step, backend=counter, **rest))
    monkeypatch.setattr("whimbrel.inference.model_runner.MIN_TOKENS", 8)
    model = model_of("llama")
    engine = Engine(model, EngineConfig(max_batch=6, compile=True, block_size=4))
    engine.warm_up()
    assert counter.frame_count == 2
    drawn: list[list[list[int]]] = []
    other = threading.Thread(target=lambda: drawn.append(texts(engine, PROMPTS, temperature=0)))
    other.start()  # as the server does
    other.join()
    assert drawn == [alone(model)]
    assert texts(engine, PROMPTS[:1], temperature=0) == alone(model)[:1]
    assert counter.frame_count == 2  # whatever the number of rows, and of pages


@pytest.mark.usefixtures("recorded")
def test_greedy_rows_are_drawn_several_tokens_at_a_time() -> None:
    engine = Engine(model_of("gpt2"), EngineConfig(compile=True, multi_step=8))
    engine.add_request(Request(prompt_ids=(1, 2), max_new_tokens=20, sampling=SamplingParams(temperature=0)))
    assert [len(engine.step()) for _ in range(4)] == [1, 8, 8, 3]
    for asked in (
        {"sampling": SamplingParams(temperature=0.5)},
        {"logprobs": 0},
        {"sampling": SamplingParams(temperature=0, presence_penalty=1)},
    ):
        engine.add_request(
            Request(prompt_ids=(1, 2), max_new_tokens=9, **{"sampling": SamplingParams(temperature=0), **asked})
        )
        assert [len(engine.step()) for _ in range(9)] == [1] * 9  # someone looks at each
        assert not engine.busy


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("prompt", [(1,), tuple(range(17))])  # whose last token is read by itself
def test_scores_of_a_prompt_are_told_before_tokens_are_drawn_ahead(prompt: tuple[int, ...]) -> None:
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
def test_what_was_drawn_past_a_stop_is_forgotten() -> None:
    model = model_of("llama")
    text = generate(model, [5, 6, 7], max_new_tokens=30, temperature=0)
    stop = next(token for token in text[3:] if token not in text[:3])
    engine = Engine(model, EngineConfig(compile=True, multi_step=8))
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
    assert texts(engine, [[5, 6, 7]], temperature=0) == [
        text[:5]
    ]  # pages known by what was read, not by what was drawn


@pytest.mark.usefixtures("recorded")
def test_numbers_that_are_not_finite_end_a_text() -> None:
    model = model_of("gpt2")
    engine = Engine(model, EngineConfig(compile=True))
    engine.add_request(Request(prompt_ids=(1, 2), max_new_tokens=9, sampling=SamplingParams(temperature=0)))
    engine.step()
    model.lm_head.weight.data.fill_(float("nan"))
    assert [event.finish_reason for event in engine.step()] == ["error"]
    assert not engine.busy


@pytest.mark.usefixtures("recorded")
def test_numbers_that_are_not_finite_past_a_stop_leave_no_trace() -> None:
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
    model.transformer["wpe"].weight.data[8 + text.index(stop)] = float("nan")  # where the stop would be read
    events = engine.step()
    assert events[-1].finish_reason == "stop"
    assert texts(engine, [[3]], temperature=0) == [generate(model_of("gpt2"), [3], max_new_tokens=5, temperature=0)]


def test_one_process_may_compile_for_many_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda step, options, **rest: compiled(step, backend="eager", **rest)
    )  # as many compilations, but quick ones
    model = model_of("gpt2")
    engines = [Engine(model, EngineConfig(max_batch=1, compile=True, num_blocks=pages)) for pages in range(20, 26)]
    for engine in engines:
        assert texts(engine, PROMPTS[:1], temperature=0) == alone(model)[:1]


def test_a_compiled_step_draws_the_same_at_any_width_of_the_block_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.inference.model_runner.MIN_TOKENS", 8)
    torch.manual_seed(0)
    model = GPT(replace(SHAPES["llama"], num_layers=1, layer_types=None)).eval()
    engine = Engine(model, EngineConfig(max_batch=1, compile=True, block_size=4))
    assert texts(engine, PROMPTS, temperature=0) == alone(model)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # inductor's advice; fp32 here stays exact
@pytest.mark.parametrize(("cache", "compiled"), [("none", False), ("none", True), ("int8", False), ("int4", False)])
@pytest.mark.parametrize("kind", SHAPES)
def test_graphs_on_a_gpu(kind: str, cache: str, compiled: bool) -> None:
    model = model_of(kind, "cuda")
    engine = Engine(model, EngineConfig(max_batch=6, compile=compiled, cache=cache))
    for _ in range(2):  # the second time from pages that the first has left
        assert texts(engine, PROMPTS, temperature=0) == alone(model, cache=cache)
    drawn = texts(engine, PROMPTS, temperature=0.7)
    assert drawn == texts(Engine(model_of(kind), EngineConfig(cache=cache)), PROMPTS, temperature=0.7)  # as on a CPU
