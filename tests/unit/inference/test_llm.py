"""`LLM`: batches, samples, streams, loading from a path."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.models import KINDS, add_noise

from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.base.progress import NoProgress
from whimbrel.inference import LLM, Completion, Request, SamplingParams, beam_search, generate
from whimbrel.model_io import open_model, save_model
from whimbrel.models import GPT, LoraConfig, apply_lora, lora_parameters, merge_lora
from whimbrel.precision import QuantizedWeight
from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, load_tokenizer

TOKENIZER = byte_tokenizer()

PROMPTS = [[3], [5, 6, 7, 8, 9, 10, 11, 12, 13], [1, 2, 3, 4], [3]]
GREEDY = SamplingParams(temperature=0)


def generate_batch(
    model: GPT, prompts: list[list[int]], sampling: SamplingParams | None = None, **options: object
) -> list[list[Completion]]:
    """The completions of each prompt."""
    engine = {name: options.pop(name) for name in ("tokenizer", "kv_cache_dtype") if name in options}
    return [output.outputs for output in LLM(model, **engine).generate(prompts, sampling, ignore_eos=True, **options)]


@pytest.fixture(scope="module")
def models() -> dict[str, GPT]:
    torch.manual_seed(0)
    return {kind: add_noise(GPT(config)) for kind, config in KINDS.items()}


@pytest.fixture(scope="module")
def model(models) -> GPT:
    return models["llama3"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01}], ids=str)
def test_prompts_in_a_batch_get_the_tokens_they_get_alone(models, kind, settings):
    """Also past the context of 32, which sequences of different lengths reach at different times."""
    model = models[kind]
    found = generate_batch(model, PROMPTS, SamplingParams(**settings), max_new_tokens=50, seed=4)
    for prompt, [completion] in zip(PROMPTS, found, strict=True):
        assert completion.tokens == generate(model, prompt, max_new_tokens=50, seed=4, **settings)
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("options", [{}, {"cpu_kernels": False}, {"compile": True}], ids=str)
def test_models_in_training_mode_generate_without_dropout(options):
    model = add_noise(GPT(replace(KINDS["llama3"], dropout=0.5)))
    llm, expected = LLM(model, **options), generate(model.eval(), [5, 6, 7] * 4, max_new_tokens=8, temperature=0)
    model.train()
    [output] = llm.generate([[5, 6, 7] * 4], GREEDY, max_new_tokens=8, ignore_eos=True)
    assert output.outputs[0].tokens == expected
    assert all(module.training for module in model.modules())


def test_a_finished_sequence_does_not_affect_the_others(model):
    alone = [generate(model, prompt, max_new_tokens=40, seed=1) for prompt in PROMPTS]
    ends = {alone[0][3], alone[1][9], alone[2][20]}
    for prompt, [found], tokens in zip(
        PROMPTS, generate_batch(model, PROMPTS, max_new_tokens=40, seed=1, stop_ids=ends), alone, strict=True
    ):
        stop = next((place for place, token in enumerate(tokens) if token in ends), None)
        assert found.tokens == tokens[:stop] == generate(model, prompt, max_new_tokens=40, seed=1, stop_ids=ends)
        assert found.finish_reason == ("length" if stop is None else "stop")


def test_other_sequences_continue_past_the_context_after_the_longest_ends(model):
    alone = [generate(model, prompt, max_new_tokens=50, seed=1) for prompt in PROMPTS]
    end = next(token for token in alone[1][:20] if token not in alone[0] + alone[2])
    found = generate_batch(model, PROMPTS, max_new_tokens=50, seed=1, stop_ids=end)
    assert [completion.tokens for [completion] in found] == [
        alone[0], alone[1][: alone[1].index(end)], alone[2], alone[3],
    ]  # fmt: skip


def test_samples_differ_and_share_one_prefill(model, monkeypatch):
    monkeypatch.setattr("whimbrel.inference.model_runner.create_decoder", lambda *_: None)
    read = []
    hidden_states = GPT.hidden_states
    monkeypatch.setattr(
        GPT, "hidden_states", lambda self, ids, **kw: read.append(tuple(ids.shape)) or hidden_states(self, ids, **kw)
    )
    [first, second] = generate_batch(model, PROMPTS[:2], n=3, max_new_tokens=6, seed=0)
    assert read == [(1, 1), (1, 9), *[(6, 1)] * 5]
    assert len({tuple(sample.tokens) for sample in first}) == 3
    monkeypatch.undo()
    assert first[0].tokens == generate(model, PROMPTS[0], max_new_tokens=6, seed=0)
    [again] = generate_batch(model, PROMPTS[1:2], n=2, max_new_tokens=6, seed=0)
    assert [sample.tokens for sample in again] == [sample.tokens for sample in second[:2]]


@torch.no_grad()
def test_logprobs_are_not_affected_by_sampling_parameters(model):
    settings = SamplingParams(temperature=0.5, repetition_penalty=1.5)
    [[found], [other]] = generate_batch(model, PROMPTS[1:3], settings, max_new_tokens=8, seed=0, logprobs=2)
    for prompt, completion in zip(PROMPTS[1:3], (found, other), strict=True):
        logs = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        for row, token, score in zip(logs, completion.tokens, completion.logprobs, strict=True):
            best = row.topk(2)
            assert score.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert [token for token, _ in score.top] == best.indices.tolist()
            assert [log for _, log in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert generate_batch(model, [[1]], GREEDY, max_new_tokens=2)[0][0].logprobs == []
    ended = generate_batch(
        model, PROMPTS[1:2], settings, max_new_tokens=8, seed=0, logprobs=0, stop_ids=found.tokens[3]
    )
    logprobs = [score.logprob for score in ended[0][0].logprobs]
    assert logprobs == pytest.approx([score.logprob for score in found.logprobs[:3]], abs=1e-4)
    assert ended[0][0].logprobs[0].top == ()


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_tokens_outside_the_context(model, penalty):
    """With a vocabulary of 97 and a context of 32, each token is generated once, including those of the prompt."""
    plain = generate(model, PROMPTS[2], max_new_tokens=97, temperature=0)
    assert set(plain) != set(range(97))
    found = generate(model, PROMPTS[2], max_new_tokens=97, temperature=0, **{penalty: 1e4})
    assert sorted(found) == list(range(97))
    beside = generate_batch(model, PROMPTS, SamplingParams(temperature=0, **{penalty: 1e4}), max_new_tokens=97)
    assert [sorted(completion.tokens) for [completion] in beside] == [sorted(found)] * 4


def test_the_repetition_penalty_counts_the_prompt(model):
    settings = {"temperature": 0, "max_new_tokens": 97 - 9}
    usual = generate(model, PROMPTS[1], **settings)
    assert {*usual} & {*PROMPTS[1]}
    biased = dict.fromkeys(range(97), 1e3)  # all logits positive, so a penalty puts each below the others
    fresh = generate(model, PROMPTS[1], **settings, logit_bias=biased, repetition_penalty=1e4)
    assert {*fresh, *PROMPTS[1]} == {*range(97)}


def test_logit_bias_forces_a_token(model):
    assert set(generate(model, [3], max_new_tokens=9, temperature=0, logit_bias={17: 1e4})) == {17}


def test_stop_strings_end_a_completion(models):
    tokenizer = load_tokenizer("gpt2")
    torch.manual_seed(0)
    model = GPT(KINDS["gpt2"].__class__(context_length=64, num_layers=1, embd_size=16, num_heads=2))
    [[plain]] = generate_batch(model, [[50]], max_new_tokens=20, seed=0, tokenizer=tokenizer)
    assert plain.text == tokenizer.decode(plain.tokens)
    stop = plain.text[len(plain.text) // 2 :][:6]
    [[found]] = generate_batch(model, [[50]], max_new_tokens=20, seed=0, tokenizer=tokenizer, stop=[stop])
    assert (found.finish_reason, found.hit_stop_string) == ("stop", True)
    assert found.text == plain.text[: plain.text.index(stop)]
    assert found.tokens == plain.tokens[: len(found.tokens)]
    assert stop in tokenizer.decode(found.tokens)
    assert stop not in tokenizer.decode(found.tokens[:-1])
    assert generate(model, [50], max_new_tokens=20, seed=0, tokenizer=tokenizer, stop=[stop]) == found.tokens
    begun = plain.text[-2:] + "which does not come"
    [[whole]] = generate_batch(model, [[50]], max_new_tokens=20, seed=0, tokenizer=tokenizer, stop=[begun])
    assert (whole.text, whole.finish_reason, whole.hit_stop_string) == (plain.text, "length", False)
    [[ended]] = generate_batch(
        model, [[50]], max_new_tokens=20, seed=0, tokenizer=tokenizer, stop=[stop], stop_ids=plain.tokens[1]
    )
    assert (ended.finish_reason, ended.hit_stop_string) == ("stop", False)


def test_progress_counts_completions(model):
    """Whether a stop token, a stop string or the length limit ends them."""

    class Counter(NoProgress):
        count = 0

        def advance(self, count: int) -> None:
            self.count += count

    progress, llm = Counter(), LLM(model, TOKENIZER)
    requests = [Request(prompt_ids=tuple(prompt), max_new_tokens=6, sampling=GREEDY, n=2) for prompt in PROMPTS]
    texts = [each.text for output in llm.complete(requests, progress=progress) for each in output.outputs]
    assert progress.count == len(texts) == 8
    stops = [[text[1]] if text else [] for text in texts[::2]]
    outputs = llm.complete(requests, stops, progress=progress)
    assert progress.count == 16
    assert any(each.hit_stop_string for output in outputs for each in output.outputs)


def test_a_quantized_cache_is_used(model):
    llm = LLM(model, kv_cache_dtype="int8")
    assert llm.engine.pool.tensors[0].dtype == torch.int8
    [[found]] = generate_batch(model, [[1]], GREEDY, max_new_tokens=3, kv_cache_dtype="int8")
    assert found.tokens == generate(model, [1], max_new_tokens=3, temperature=0, kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "non-empty"),
        ([], {}, "at least one, got none"),
        ([[1]], {"n": 0}, "n: expected .* got 0"),
        ([[1]], {"logprobs": -1}, "logprobs: expected .* got -1"),
        ([[1]], {"stop": ["a"]}, "pass tokenizer"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: expected .* got 0"),
    ],
)
def test_invalid_arguments_are_rejected(model, prompts, options, message):
    with pytest.raises(RequestError, match=message):
        generate_batch(model, prompts, **options)


@pytest.fixture(scope="module")
def small(models) -> GPT:
    """A model for the byte tokenizer."""
    torch.manual_seed(0)
    return add_noise(GPT(replace(KINDS["llama3"], vocab_size=257)))


@pytest.fixture
def directory(small, tmp_path) -> Path:
    save_model(small, tmp_path / "model", TOKENIZER)
    return tmp_path / "model"


def test_a_path_loads_model_tokenizer_and_generation_defaults(small, directory):
    own = {"do_sample": True, "temperature": 0.5, "top_k": 7, "eos_token_id": [3, TOKENIZER.eot_id]}
    (directory / "generation_config.json").write_text(json.dumps(own))
    sampling = {"temperature": 0.5, "top_k": 7}
    expected = generate(
        small, TOKENIZER.encode("So"), max_new_tokens=20, seed=2, stop_ids=[3, TOKENIZER.eot_id], **sampling
    )
    for source in (str(directory), directory, open_model(directory)):
        llm = LLM(source, device="cpu")
        assert llm.default_sampling == sampling
        assert llm.eos_ids == {3, TOKENIZER.eot_id}
        [output] = llm.generate("So", max_new_tokens=20, seed=2)
        assert output.prompt_ids == TOKENIZER.encode("So")
        assert output.outputs[0].tokens == expected
    (directory / "tokenizer.json").unlink()
    [output] = LLM(directory, TOKENIZER, device="cpu").generate(["So"], max_new_tokens=20, seed=2)
    assert output.outputs[0].tokens == expected


def test_weights_are_quantized_on_load(directory):
    assert isinstance(next(LLM(directory, device="cpu", quantize="int8").model.blocks).mlp.c_fc.weight, QuantizedWeight)


def test_streamed_text_is_the_text_of_generate(small):
    llm = LLM(small, TOKENIZER)
    [output] = llm.generate("Hello", GREEDY, max_new_tokens=12)
    assert "".join(llm.stream("Hello", GREEDY, max_new_tokens=12)) == output.outputs[0].text
    [output] = llm.generate(TOKENIZER.encode("Hello"), GREEDY, max_new_tokens=12)
    assert list(llm.stream_tokens("Hello", GREEDY, max_new_tokens=12)) == output.outputs[0].tokens
    with pytest.raises(RequestError, match="pass tokenizer"):
        LLM(small).stream([1], GREEDY)
    with pytest.raises(RequestError, match="pass tokenizer"):
        LLM(small).generate("Hello", GREEDY)


def test_streams_can_be_interleaved_and_closed(small):
    llm = LLM(small, TOKENIZER)
    prompts = ["one", "two", "three"]
    expected = [list(llm.stream_tokens(prompt, GREEDY, max_new_tokens=10)) for prompt in prompts]
    streams = [llm.stream_tokens(prompt, GREEDY, max_new_tokens=10) for prompt in prompts]
    found = [[next(stream)] for stream in streams]
    streams[0].close()
    for tokens, stream in zip(found[1:], streams[1:], strict=True):
        tokens += stream
    assert found == [expected[0][:1], *expected[1:]]
    assert not llm.engine.busy
    assert llm.engine.stats().free_blocks == llm.engine.stats().blocks


def test_chat_renders_the_conversation_with_the_template(small):
    llm = LLM(small, TOKENIZER)
    messages = [{"role": "user", "content": "Hi"}]
    found = llm.chat(messages, GREEDY, max_new_tokens=5)
    ids = DEFAULT_CHAT_TEMPLATE.encode(TOKENIZER, messages)
    assert found.prompt_ids == ids
    assert (
        found.outputs[0].tokens[:5]
        == generate(small, ids, max_new_tokens=5, temperature=0)[: len(found.outputs[0].tokens)]
    )


def test_beam_search_uses_the_engine_and_frees_its_blocks(small):
    llm = LLM(small, TOKENIZER, max_batch=3)
    found = llm.beam_search("Hi", num_beams=3, max_new_tokens=6)
    assert found == beam_search(small, TOKENIZER.encode("Hi"), num_beams=3, max_new_tokens=6, stop_ids=TOKENIZER.eot_id)
    assert llm.engine.stats().free_blocks == llm.engine.stats().blocks
    with pytest.raises(RequestError, match="at most 3"):
        llm.beam_search("Hi", num_beams=4)


def test_a_repeated_prompt_is_found_in_the_prefix_cache(small):
    llm = LLM(small, TOKENIZER, block_size=4)
    first, second = (llm.generate("Hello world", GREEDY, max_new_tokens=4)[0] for _ in range(2))
    assert first == second
    assert llm.engine.stats().prefix_hits == 8


def test_one_sequence_on_the_cpu_stays_in_consecutive_blocks(small):
    """Also when its blocks replace those of earlier sequences: then the cache is read without a gather."""
    llm = LLM(small, max_batch=1, block_size=4)
    pool, contiguous = llm.engine.pool, []
    for first in range(5):
        for _ in llm.stream_tokens([first] * 9, GREEDY, max_new_tokens=14):
            [[seq]] = llm.engine._sequences.values() or [[None]]
            contiguous.append(seq is None or seq.block_table.is_contiguous)
    assert pool.single_sequence
    assert all(contiguous)


@pytest.mark.parametrize("option", [{"quantize": "int8"}, {"device": "cpu"}], ids=["quantize", "device"])
def test_loading_options_are_rejected_for_a_loaded_model(models: dict[str, GPT], option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="expected None with a loaded model"):
        LLM(models["llama3"], **option)


def test_beam_search_on_an_engine_rejects_another_cache(models: dict[str, GPT]) -> None:
    llm = LLM(models["llama3"])
    with pytest.raises(RequestError, match="kv_cache_dtype: expected None with an engine"):
        beam_search(llm.engine, [1, 2], num_beams=1, max_new_tokens=2, kv_cache_dtype="int8")


def test_a_model_with_adapters_generates_what_the_merged_model_does():
    torch.manual_seed(0)
    model = add_noise(GPT(KINDS["llama3"]))
    base = generate_batch(model, PROMPTS, GREEDY, max_new_tokens=8)
    apply_lora(model, LoraConfig(rank=4))
    with torch.no_grad():
        for _, parameter in lora_parameters(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    adapted = generate_batch(model, PROMPTS, GREEDY, max_new_tokens=8)
    merge_lora(model)
    merged = generate_batch(model, PROMPTS, GREEDY, max_new_tokens=8)
    tokens = [[output.tokens for outputs in batch for output in outputs] for batch in (base, adapted, merged)]
    assert tokens[1] == tokens[2] != tokens[0]
