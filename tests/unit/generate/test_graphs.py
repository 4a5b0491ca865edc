"""Steps that are recorded once and replayed: the same tokens as steps that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from whimbrel.generate import Engine, EngineConfig, Request, Sampling, generate
from whimbrel.generate.graphs import DecodeGraphs
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
        torch.nn.init.normal_(parameter, std=0.3)  # logits far apart
    return model.to(device)


def texts(engine: Engine, prompts: list[list[int]], **sampling: float) -> list[list[int]]:
    drawn: dict[int, list[int]] = {
        engine.submit(
            Request(prompt_ids=tuple(ids), max_new_tokens=5 + 4 * i, sampling=Sampling(**sampling), seed=i)
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


def test_padded_batches_change_nothing() -> None:
    model = model_of("llama")
    engine = Engine(model, EngineConfig(max_batch=6))
    graphs = DecodeGraphs(model, engine.pool, max_batch=6, compile_step=False)
    engine.runner.decode, engine.runner.padded = graphs, graphs.padded
    wanted = [generate(model, ids, max_new_tokens=5 + 4 * i, temperature=0) for i, ids in enumerate(PROMPTS)]
    assert texts(engine, PROMPTS, temperature=0) == wanted


def test_a_compiled_step_draws_the_same() -> None:
    torch.manual_seed(0)
    model = GPT(replace(SHAPES["llama"], num_layers=1, layer_types=None)).eval()
    engine = Engine(model, EngineConfig(max_batch=1, compile=True))
    wanted = [generate(model, ids, max_new_tokens=5 + 4 * i, temperature=0) for i, ids in enumerate(PROMPTS)]
    assert texts(engine, PROMPTS, temperature=0) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cache", ["none", "int8"])
@pytest.mark.parametrize("kind", SHAPES)
def test_graphs_on_a_gpu(kind: str, cache: str, compiled: bool) -> None:
    model = model_of(kind, "cuda")
    engine = Engine(model, EngineConfig(max_batch=6, compile=compiled, cache=cache))
    wanted = [
        generate(model, ids, max_new_tokens=5 + 4 * i, temperature=0, cache=cache) for i, ids in enumerate(PROMPTS)
    ]
    for _ in range(2):  # the second time from pages that the first has left
        assert texts(engine, PROMPTS, temperature=0) == wanted
    drawn = texts(engine, PROMPTS, temperature=0.7)
    assert drawn == texts(Engine(model_of(kind), EngineConfig(cache=cache)), PROMPTS, temperature=0.7)  # as on a CPU
