"""Options of `whimbrel generate`: each has an effect, and conflicting ones are rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer

from whimbrel.base.errors import WhimbrelError
from whimbrel.cli.generate import generate
from whimbrel.inference import LLM, SamplingParams, beam_search, stream_text
from whimbrel.inference import generate as tokens_after
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eot_id


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context_length=64, vocab_size=257, num_layers=2, embd_size=32, num_heads=2, tied_head=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.lm_head.weight[128:] *= 0.1  # mostly ASCII
    return model


@pytest.fixture
def directory(model: GPT, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model", TOKENIZER)
    return tmp_path / "model"


@pytest.fixture
def run_generate(directory, capsys):
    def run(text: str = "So", **options: object) -> str:
        generate(directory, text, **{"max_new_tokens": 20, "seed": 1, "device": "cpu"} | options)
        return capsys.readouterr().out

    return run


def printed(tokens: list[int], text: str = "So", stops: tuple[str, ...] = ()) -> str:
    prompt = TOKENIZER.encode(text)
    return text + "".join(stream_text(TOKENIZER, prompt, tokens, stops)) + "\n"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"repetition_penalty": 3.0},
        {"kv_cache_dtype": "int4"},
    ],
    ids=str,
)
def test_sampling_option_is_applied(model, run_generate, options):
    defaults = {"temperature": 0.8, "max_new_tokens": 20, "seed": 1, "stop_ids": END}
    assert (
        run_generate(**options)
        == printed(tokens_after(model, TOKENIZER.encode("So"), **defaults | options))
        != run_generate()
    )


def test_sampling_defaults_come_from_generation_config(model, directory, run_generate):
    config = {"do_sample": True, "temperature": 1.3, "min_p": 0.1, "repetition_penalty": 2.0, "eos_token_id": END}
    (directory / "generation_config.json").write_text(json.dumps(config))
    expected = {
        "temperature": 1.3,
        "min_p": 0.1,
        "repetition_penalty": 2.0,
        "max_new_tokens": 20,
        "seed": 1,
        "stop_ids": END,
    }
    prompt = TOKENIZER.encode("So")
    assert run_generate() == printed(tokens_after(model, prompt, **expected))
    assert run_generate(min_p=0.6) == printed(tokens_after(model, prompt, **expected | {"min_p": 0.6}))
    (directory / "generation_config.json").write_text(json.dumps(config | {"do_sample": False}))
    greedy = {"temperature": 0, "repetition_penalty": 2.0, "max_new_tokens": 20, "stop_ids": END}
    assert run_generate() == printed(tokens_after(model, prompt, **greedy))


def test_stop_string_ends_generation(run_generate):
    full = run_generate(temperature=0)
    stops = [full[8:10], full[12:14]]
    assert run_generate(temperature=0, stop=stops) == full[: full.index(stops[0], 2)] + "\n"


def test_n_completions_are_sampled_from_one_seed(model, run_generate):
    [output] = LLM(model, TOKENIZER).generate(["So"], SamplingParams(temperature=0.8), n=3, max_new_tokens=20, seed=1)
    samples = output.outputs
    texts = [printed(sample.tokens) for sample in samples]
    assert run_generate(n=3) == "\n".join(texts)
    assert run_generate() == texts[0]
    stop = texts[1][9:11]
    assert run_generate(n=3, stop=[stop]) == "\n".join(printed(sample.tokens, stops=(stop,)) for sample in samples)


def test_beam_search_prints_the_best_beams(model, run_generate):
    found = beam_search(model, TOKENIZER.encode("So"), num_beams=4, max_new_tokens=20, stop_ids=END)
    assert run_generate(num_beams=4, seed=None) == printed(found[0].tokens)
    assert run_generate(num_beams=4, seed=None, n=2) == printed(found[0].tokens) + "\n" + printed(found[1].tokens)


@pytest.mark.parametrize("draft", ["ngram", "itself"])
def test_draft_does_not_change_greedy_output(directory, run_generate, draft):
    name = str(directory) if draft == "itself" else draft
    assert run_generate(temperature=0, draft=name) == run_generate(temperature=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "--n of at least 1, got 0"),
        ({"n": 2, "draft": "ngram"}, "--draft cannot be combined with --n"),
        ({"num_beams": 2}, "--seed cannot be combined with --num-beams"),
        ({"num_beams": 2, "seed": None, "temperature": 1.0}, "--temperature cannot be combined"),
        ({"num_beams": 2, "seed": None, "top_p": 0.5}, "--top-p cannot be combined"),
        ({"num_beams": 2, "seed": None, "repetition_penalty": 2.0}, "--repetition-penalty cannot be combined"),
        ({"num_beams": 2, "seed": None, "draft": "ngram"}, "--draft cannot be combined"),
        ({"num_beams": 2, "seed": None, "n": 3}, "--n of at most --num-beams 2, got 3"),
        ({"num_beams": 0, "seed": None, "n": 1}, "--n of at most --num-beams 0, got 1"),
        ({"kv_cache_dtype": "int3"}, "int3"),
        ({"stop": [""]}, "non-empty strings"),
    ],
)
def test_invalid_or_conflicting_options_are_rejected(run_generate, capsys, options, message):
    with pytest.raises(WhimbrelError, match=message):
        run_generate(**options)
    assert capsys.readouterr().out == ""  # no output, not even the prompt


def test_draft_with_another_vocabulary_is_rejected(run_generate, tmp_path):
    other = tmp_path / "other"
    save_model(GPT(GPTConfig(context_length=64, vocab_size=300, num_layers=1, embd_size=32, num_heads=2)), other)
    with pytest.raises(WhimbrelError, match="vocabulary of 257 tokens, got 300"):
        run_generate(draft=str(other))
