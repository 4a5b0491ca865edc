"""The C++ decoder computes the logits of the model, for all architectures and weight formats that it supports."""

from __future__ import annotations

import copy
import ctypes
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.inference import Engine, EngineConfig, Request, SamplingParams, cpu_decoder
from whimbrel.inference.block_manager import BlockTable
from whimbrel.inference.cpu_decoder import create_decoder, unsupported_reason
from whimbrel.inference.model_runner import Chunk, ModelRunner
from whimbrel.inference.paged_cache import BlockPool
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora
from whimbrel.ops.compiler import find_compiler
from whimbrel.precision import WeightFormat, dequantize_, quantize_

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

BASE: dict[str, Any] = {
    "context_length": 64, "vocab_size": 301, "num_layers": 3, "embd_size": 96, "num_heads": 6, "init_std": 0.2,
    "embd_init_std": 0.5,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "position": "rope", "norm": "rms", "bias": "none", "activation": "silu", "gated_mlp": True, "num_kv_heads": 2,
    "tied_head": False, "mlp_size": 200,
}  # fmt: skip
SHAPES = {
    "gpt2": {},
    "gelu": {"activation": "gelu", "bias": "attention"},
    "llama": LLAMA,
    "heads-of-24": LLAMA | {"head_size": 24},  # not a multiple of the vector width
    "qwen3": LLAMA | {"qk_norm": "weighted", "bias": "qkv", "tied_head": True},
    "sliding-window": LLAMA | {"sliding_window": 5},
    "gpt2-fast": LLAMA
    | {"activation": "relu2", "gated_mlp": False, "norm_affine": False, "qk_norm": "unweighted", "embedding_skip": True}
    | {"logit_softcap": 15.0, "residual_scale": "attention"},
}
TOKENS = [[(7 * i + 3 * j) % 301 for j in range(24)] for i in range(5)]
TOLERANCE = 1e-4
"""For sums of a few hundred products in fp32, in another order, over three layers."""
PREFILL = 3  # of 5 sequences: short enough for the decoder in every format


def random_model(shape: str, dtype: torch.dtype = torch.float32, weights: str | None = None) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**(BASE | SHAPES[shape]))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.zero_padding()
    model.to(dtype)
    if weights is not None:
        quantize_(model, weights, embeddings=True)
    return model


def block_pool(model: GPT, dtype: torch.dtype = torch.float32) -> BlockPool:
    return BlockPool(model.config, 40, 4, dtype=dtype)


def all_logits(runner: ModelRunner, pool: BlockPool, tokens: Sequence[Sequence[int]]) -> Tensor:
    """The logits (sequences, steps, vocabulary) after a prompt and after each of the tokens that follow it."""
    tables = [BlockTable(pool) for _ in tokens]
    for table in tables:
        table.reserve(len(tokens[0]))
    chunks = [Chunk(table, list(ids[:PREFILL])) for table, ids in zip(tables, tokens, strict=True)]
    logits = [torch.cat(runner.prefill(chunks, [[PREFILL - 1]] * len(tables)))]
    for step in range(PREFILL, len(tokens[0])):
        for table in tables:
            table.num_tokens = step
        logits.append(runner.decode([Chunk(table, [ids[step]]) for table, ids in zip(tables, tokens, strict=True)]))
    return torch.stack(logits, dim=1)


def compare(model: GPT, reference: GPT, cache: torch.dtype = torch.float32) -> float:
    """The largest difference between the logits of the decoder and those of PyTorch, relative to the largest logit."""
    pool, other_pool = block_pool(model, cache), block_pool(reference)
    runner = ModelRunner(model, pool)
    ours = all_logits(runner, pool, TOKENS)
    assert runner._cpu_decoder is not None
    theirs = all_logits(ModelRunner(reference, other_pool, cpu_kernels=False), other_pool, TOKENS)
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_pytorch(shape: str, weights: str | None) -> None:
    model = random_model(shape, weights=weights)
    assert compare(model, model) < TOLERANCE


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_multiplied_in_fp32(dtype: torch.dtype, weights: str | None) -> None:
    """The result is that of a fp32 model with the same weights."""
    model = random_model("llama", dtype, weights)
    reference = copy.deepcopy(model).float()  # of quantized weights, only the scales: codes are then decoded to fp32
    if weights is not None:
        dequantize_(reference)
    assert compare(model, reference) < TOLERANCE
    # Every key and value is rounded, and the layers amplify errors.
    assert compare(model, reference, cache=dtype) < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_groups_of_int4_weights(group_size: int) -> None:
    torch.manual_seed(0)
    config = GPTConfig(**(BASE | LLAMA | {"embd_size": 6 * group_size, "mlp_size": 3 * group_size}))
    model = GPT(config).eval()
    quantize_(model, "int4")
    assert {block.mlp.c_proj.weight.format.group_size for block in model.blocks} == {group_size}
    assert compare(model, model) < TOLERANCE


def test_a_sequence_has_the_same_bits_in_any_batch_and_with_any_number_of_threads() -> None:
    results = []
    before = torch.get_num_threads()
    for weights in (None, "int8", "int4"):
        model = random_model("llama", torch.bfloat16, weights)
        for threads, sequences in ((1, 5), (1, 1), (2, 5), (3, 3), (4, 1)):  # alone, it tries other numbers of threads
            torch.set_num_threads(threads)
            pool = block_pool(model, torch.bfloat16)
            results.append(all_logits(ModelRunner(model, pool), pool, TOKENS[:sequences])[0])
        torch.set_num_threads(before)
        assert all(torch.equal(results[-1], other) for other in results[-5:])


def test_changed_and_replaced_parameters_are_seen() -> None:
    model = random_model("gpt2")
    pool = block_pool(model)
    runner = ModelRunner(model, pool)

    def first() -> Tensor:
        return all_logits(runner, pool, TOKENS[:1])[0, 0]

    before, decoder = first(), runner._cpu_decoder
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert not torch.equal(first(), before)
    assert runner._cpu_decoder is decoder
    for module in (model.token_embedding, model.lm_head):  # tied
        module.weight = nn.Parameter(torch.zeros_like(module.weight))
    assert not first().any()
    assert runner._cpu_decoder is not decoder


def greedy(model: GPT, **settings: Any) -> tuple[list[int], str | None]:
    engine = Engine(model, EngineConfig(max_batch=2, **settings))
    engine.add_request(Request(prompt_ids=(5, 6, 7), max_new_tokens=12, sampling=SamplingParams(temperature=0)))
    events = [event for _ in iter(lambda: engine.busy, False) for event in engine.step()]
    return [event.token for event in events if event.token is not None], events[-1].finish_reason


def test_engine_generates_the_same_text_with_and_without_it() -> None:
    model = random_model("llama")
    assert greedy(model) == greedy(model, cpu_kernels=False)


def test_logits_that_are_not_finite_end_a_request() -> None:
    model = random_model("llama")
    with torch.no_grad():
        list(model.blocks)[1].mlp.c_proj.weight[0, 0] = float("nan")
    assert greedy(model) == ([], "error")


def test_it_works_in_a_forked_process() -> None:
    """Threads of the parent do not exist there."""
    model = random_model("gpt2")
    before, pool = torch.get_num_threads(), block_pool(model)
    torch.set_num_threads(2)
    try:
        runner = ModelRunner(model, pool)
        expected = all_logits(runner, pool, TOKENS[:1])
        if (child := os.fork()) == 0:
            status = 2
            try:
                status = 0 if torch.equal(all_logits(runner, pool, TOKENS[:1]), expected) else 1
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [[301], [-1], [1] * 65])
def test_invalid_tokens_are_refused(tokens: list[int]) -> None:
    model = random_model("gpt2")
    pool = block_pool(model)
    table = BlockTable(pool)
    table.reserve(len(tokens))
    decoder = create_decoder(model, pool)
    assert decoder is not None
    with pytest.raises((DataError, ConfigError), match="expected"):
        decoder.run([(table, tokens)], [[0]])


def test_other_default_dtypes_do_not_matter() -> None:
    model = random_model("gpt2")
    pool = block_pool(model)
    expected = all_logits(ModelRunner(model, pool), pool, TOKENS[:1])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(all_logits(ModelRunner(model, pool), pool, TOKENS[:1]), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_modules_that_are_replaced_or_hooked_later_are_seen() -> None:
    model = random_model("llama")
    pool = block_pool(model)
    runner = ModelRunner(model, pool)
    runner.warm_up()
    assert runner._decoder() is not None
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert runner._decoder() is None
    handle.remove()
    runner = ModelRunner(model, pool)
    assert runner._decoder() is not None
    apply_lora(model, LoraConfig())
    assert runner._decoder() is None


def test_a_prompt_runs_where_it_would_run_alone() -> None:
    model = random_model("llama", torch.bfloat16)
    pool = block_pool(model, torch.bfloat16)
    runner = ModelRunner(model, pool)
    prompts = [TOKENS[0][:3], TOKENS[1][:20], TOKENS[2][:16]]

    def last_logits(selected: list[list[int]]) -> list[Tensor]:
        tables = [BlockTable(pool) for _ in selected]
        for table, ids in zip(tables, selected, strict=True):
            table.reserve(len(ids))
        chunks = [Chunk(table, ids) for table, ids in zip(tables, selected, strict=True)]
        found = runner.prefill(chunks, [[len(ids) - 1] for ids in selected])
        for table in tables:
            table.release()
        return found

    alone = [last_logits([ids])[0] for ids in prompts]
    assert [logits.dtype for logits in alone] == [torch.float32, torch.bfloat16, torch.float32]
    together = last_logits(prompts)
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[2], alone[2])
    torch.testing.assert_close(together[1], alone[1])


def unsupported_models() -> Iterator[tuple[str, GPT]]:
    yield "fp8", random_model("llama", weights="fp8")
    yield "int8-dynamic", random_model("llama", weights="int8-dynamic")
    lora = random_model("llama")
    apply_lora(lora, LoraConfig())
    yield "LoraLinear", lora
    yield "value_embeddings", GPT(replace(random_model("llama").config, value_embeddings=1))
    hooked = random_model("llama")
    next(iter(hooked.blocks)).attn.register_forward_hook(lambda *_: None)
    yield "hooks", hooked
    overridden = random_model("llama")
    overridden.lm_head.forward = lambda x: x  # type: ignore[method-assign]
    yield "lm_head", overridden
    grouped = random_model("llama")
    quantize_(grouped, WeightFormat("grouped", "int8", group_size=32))
    yield "groups of 32", grouped
    yield "meta", random_model("llama").to("meta")
    yield "contiguous", random_model("llama").double()


@pytest.mark.filterwarnings("ignore")
def test_other_models_run_in_pytorch() -> None:
    for words, model in unsupported_models():
        reason = unsupported_reason(model, block_pool(model))
        assert reason is not None, words
        assert words in reason
    model = random_model("llama")
    assert "KV caches" in str(unsupported_reason(model, BlockPool(model.config, 4, codec="int8")))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No compiled code, in memory or on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_decoder._find_library.cache_clear()
    yield tmp_path / "whimbrel"
    cpu_decoder._find_library.cache_clear()


def test_without_a_compiler_pytorch_is_used(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decoder, "find_compiler", lambda: None)
    model = random_model("gpt2")
    assert create_decoder(model, block_pool(model)) is None
    assert len(greedy(model)[0]) == 12


def test_code_that_does_not_compile_is_reported_once(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int main() { return nothing; }")
    monkeypatch.setattr(cpu_decoder, "SOURCE", source)
    model = random_model("gpt2")
    with caplog.at_level(logging.WARNING):
        assert [create_decoder(model, block_pool(model)) for _ in range(2)] == [None, None]
    assert [("PyTorch" in message, "nothing" in message) for message in caplog.messages] == [(True, True)]
    assert list(empty_cache.glob("*")) == []


def test_code_is_compiled_once_and_cached(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("gpt2")
    assert create_decoder(model, block_pool(model)) is not None
    (file,) = empty_cache.iterdir()
    cpu_decoder._find_library.cache_clear()
    monkeypatch.setattr(cpu_decoder, "find_compiler", lambda: None)  # no longer needed
    assert create_decoder(model, block_pool(model)) is not None
    assert list(empty_cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "whimbrel").write_text("a file where the directory would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_decoder._find_library.cache_clear()
    model = random_model("gpt2")
    with caplog.at_level(logging.WARNING):
        assert create_decoder(model, block_pool(model)) is not None
    cpu_decoder._find_library.cache_clear()
    assert "compiled again" in caplog.text


def test_a_cache_that_others_can_write_is_not_used(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if another user owned the directory."""
    opened: list[str] = []
    load = ctypes.CDLL
    monkeypatch.setattr(cpu_decoder, "is_private", lambda _: False)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: opened.append(path) or load(path))
    model = random_model("gpt2")
    with caplog.at_level(logging.WARNING):
        assert create_decoder(model, block_pool(model)) is not None
    assert "other users can write to" in caplog.text
    assert [Path(path).is_relative_to(empty_cache) for path in opened] == [False]


def test_a_damaged_library_is_compiled_again(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("gpt2")
    assert create_decoder(model, block_pool(model)) is not None
    (file,) = empty_cache.iterdir()
    damaged = tmp_path / "other" / "whimbrel" / file.name  # another path: this process has loaded the first one
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"not a library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    cpu_decoder._find_library.cache_clear()
    assert create_decoder(model, block_pool(model)) is not None
    assert damaged.stat().st_size > 1000


def test_a_library_that_others_can_write_is_not_loaded(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("gpt2")
    assert create_decoder(model, block_pool(model)) is not None
    empty_cache.chmod(0o777)
    cpu_decoder._find_library.cache_clear()
    monkeypatch.setattr(cpu_decoder, "find_compiler", lambda: None)
    assert create_decoder(model, block_pool(model)) is None
