"""The options of `whimbrel generate`: none is ignored, and none stands beside one that it contradicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.unit.tokenization.byte_tokenizer import byte_tokenizer

from whimbrel.base.errors import ConfigError, WhimbrelError
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
def written(directory, capsys):
    """What is printed."""

    def run(text: str = "So", **options: object) -> str:
        generate(directory, text, **{"max_new_tokens": 20, "seed": 1, "device": "cpu"} | options)
        return capsys.readouterr().out

    return run


def shown(tokens: list[int], text: str = "So", stops: tuple[str, ...] = ()) -> str:
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
        {"cache": "int4"},
    ],
    ids=str,
)
def test_every_way_to_draw_is_heeded(model, written, options):
    usual = {"temperature": 0.8, "max_new_tokens": 20, "seed": 1, "eos_id": END}
    assert written(**options) == shown(tokens_after(model, TOKENIZER.encode("So"), **usual | options)) != written()


def test_the_models_own_settings_hold_where_none_is_given(model, directory, written):
    own = {"do_sample": True, "temperature": 1.3, "min_p": 0.1, "repetition_penalty": 2.0, "eos_token_id": END}
    (directory / "generation_config.json").write_text(json.dumps(own))
    drawn = {
        "temperature": 1.3,
        "min_p": 0.1,
        "repetition_penalty": 2.0,
        "max_new_tokens": 20,
        "seed": 1,
        "eos_id": END,
    }
    prompt = TOKENIZER.encode("So")
    assert written() == shown(tokens_after(model, prompt, **drawn))
    assert written(min_p=0.6) == shown(tokens_after(model, prompt, **drawn | {"min_p": 0.6}))
    (directory / "generation_config.json").write_text(json.dumps(own | {"do_sample": False}))
    greedy = {"temperature": 0, "repetition_penalty": 2.0, "max_new_tokens": 20, "eos_id": END}
    assert written() == shown(tokens_after(model, prompt, **greedy))


def test_a_stop_string_ends_the_text(written):
    plain = written(temperature=0)
    stops = [plain[8:10], plain[12:14]]
    assert written(temperature=0, stop=stops) == plain[: plain.index(stops[0], 2)] + "\n"


def test_several_texts_are_samples_of_one_seed(model, written):
    [output] = LLM(model, TOKENIZER).generate(["So"], SamplingParams(temperature=0.8), n=3, max_new_tokens=20, seed=1)
    samples = output.outputs
    texts = [shown(sample.tokens) for sample in samples]
    assert written(n=3) == "\n".join(texts)
    assert written() == texts[0]
    stop = texts[1][9:11]
    assert written(n=3, stop=[stop]) == "\n".join(shown(sample.tokens, stops=(stop,)) for sample in samples)


def test_beams_are_the_likeliest_texts(model, written):
    found = beam_search(model, TOKENIZER.encode("So"), beams=4, max_new_tokens=20, eos_id=END)
    assert written(beams=4, seed=None) == shown(found[0].tokens)
    assert written(beams=4, seed=None, n=2) == shown(found[0].tokens) + "\n" + shown(found[1].tokens)


@pytest.mark.parametrize("draft", ["ngram", "itself"])
def test_a_draft_changes_no_word(directory, written, draft):
    name = str(directory) if draft == "itself" else draft
    assert written(temperature=0, draft=name) == written(temperature=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "--n 0 must be at least 1"),
        ({"n": 2, "draft": "ngram"}, "--draft goes ahead of one text"),
        ({"beams": 2}, "leave --seed out"),
        ({"beams": 2, "seed": None, "top_p": 0.5}, "leave --top-p out"),
        ({"beams": 2, "seed": None, "repetition_penalty": 2.0}, "leave --repetition-penalty out"),
        ({"beams": 2, "seed": None, "draft": "ngram"}, "leave --draft out"),
        ({"beams": 2, "seed": None, "n": 3}, "--n 3 texts of --beams 2"),
        ({"beams": 0, "seed": None, "n": 1}, "--n 1 texts of --beams 0|beams = 0"),
        ({"cache": "int3"}, "int3"),
        ({"stop": [""]}, "non-empty strings"),
    ],
)
def test_options_that_contradict_or_mean_nothing_are_refused(written, capsys, options, message):
    with pytest.raises(WhimbrelError, match=message):
        written(**options)
    assert capsys.readouterr().out == ""  # not even the text to go on from


def test_a_draft_of_other_tokens_is_refused(written, tmp_path):
    other = tmp_path / "other"
    save_model(GPT(GPTConfig(context_length=64, vocab_size=300, num_layers=1, embd_size=32, num_heads=2)), other)
    with pytest.raises(WhimbrelError, match="vocabulary of 257 tokens, got 300"):
        written(draft=str(other))
    with pytest.raises(ConfigError, match="leave --temperature out"):
        written(beams=2, seed=None, temperature=1.0)
