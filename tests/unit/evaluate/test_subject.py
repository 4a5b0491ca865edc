"""The model under test: what is loaded, and where text is cut into tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.evaluate import Pair, Subject
from whimbrel.model_io import save_model
from whimbrel.models import GPT
from whimbrel.precision import QuantizedWeight
from whimbrel.tokenization import Tokenizer, load_tokenizer


@pytest.fixture
def directory(subject: Subject, tmp_path: Path) -> Path:
    save_model(subject.model, tmp_path / "model", subject.tokenizer)
    return tmp_path / "model"


@pytest.fixture
def opening(subject: Subject) -> Subject:
    """One whose tokenizer opens texts by itself, as Llama's does."""
    copy = Tokenizer.from_json(subject.tokenizer.to_json())
    copy.pipeline.post_processor = TemplateProcessing(
        single=f"{copy.eot_token} $A", special_tokens=[(copy.eot_token, copy.eot_id)]
    )
    return replace(subject, tokenizer=copy)


def test_a_directory_is_loaded_with_its_tokenizer(subject, directory):
    loaded = Subject.load(directory)
    assert loaded.tokenizer.fingerprint == subject.tokenizer.fingerprint
    assert loaded.opener_id == subject.tokenizer.eot_id
    pairs = loaded.pairs([("To be", " or not")])
    assert loaded.score(pairs) == subject.score(subject.pairs([("To be", " or not")]))


def test_dtype_and_weights_are_as_asked(directory):
    assert Subject.load(directory, dtype=torch.bfloat16).model.token_embedding.weight.dtype == torch.bfloat16
    quantised = Subject.load(directory, quantize="int8").model
    assert any(isinstance(weight, QuantizedWeight) for weight in quantised.parameters())


def test_the_beginning_of_text_token_opens_where_there_is_one(directory):
    for name in ("config.json", "generation_config.json"):
        table = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(table | {"bos_token_id": 7}))
    loaded = Subject.load(directory)
    assert loaded.opener_id == 7
    assert loaded.rolling(["be"])[0].context == [7]


def test_a_tokenizer_that_is_not_the_models_own_is_refused(subject, directory, tmp_path):
    with pytest.raises(ConfigError, match="at most 300 tokens .* got 50257"):
        Subject.load(directory, tokenizer="gpt2")
    load_tokenizer("gpt2").save(directory)
    with pytest.raises(ConfigError, match="at most 300 tokens .* got 50257"):
        Subject.load(directory)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="model.bin has no tokenizer"):
        Subject.load(tmp_path / "model.bin")


def test_a_continuation_is_what_comes_after_the_tokens_of_its_context(subject):
    [pair] = subject.pairs([("To be", " or not")])
    assert subject.tokenizer.decode(pair.context) == "To be"
    assert subject.tokenizer.decode(pair.continuation) == " or not"
    assert [*pair.context, *pair.continuation] == subject.tokenizer.encode("To be or not")


@pytest.mark.parametrize("spaces", [" ", "  ", "\n", " \n\t"])
def test_spaces_at_the_end_of_a_context_are_moved(subject, spaces):
    assert subject.pairs([(f"To be{spaces}", "or not")]) == subject.pairs([("To be", f"{spaces}or not")])


@pytest.mark.parametrize("context", ["", " "])
def test_nothing_before_a_continuation_is_the_opener(subject, opening, context):
    for each in (subject, opening):
        [pair] = each.pairs([(context, "or not")])
        assert pair == Pair([subject.opener_id], subject.tokenizer.encode(f"{context}or not"))


def test_pairs_with_and_without_a_context_keep_their_order(subject):
    texts = [("", "a b"), ("To be", " or"), ("", "c d"), ("Not", " to be"), (" ", "e")]
    assert subject.pairs(texts) == [subject.pairs([text])[0] for text in texts]


def test_a_tokenizer_that_opens_texts_opens_contexts_once(subject, opening):
    [plain], [opened] = subject.pairs([("To be", " or not")]), opening.pairs([("To be", " or not")])
    assert opened == Pair([opening.opener_id, *plain.context], plain.continuation)
    [spelled] = opening.pairs([(f"{opening.tokenizer.eot_token}To be", " or not")])
    assert spelled == opened


def test_whole_texts_come_after_one_opener(subject, opening):
    for each in (subject, opening):
        assert each.rolling(["To be", ""]) == [
            Pair([each.opener_id], subject.tokenizer.encode("To be")),
            Pair([each.opener_id], []),
        ]


def test_a_prompt_is_opened_as_the_tokenizer_says(subject, opening):
    assert subject.prompt("To be") == subject.tokenizer.encode("To be")
    assert opening.prompt("To be") == [opening.opener_id, *subject.tokenizer.encode("To be")]
    assert subject.prompt("") == [subject.opener_id]


def test_special_tokens_in_a_text_are_parsed_unless_told_otherwise(subject):
    [pair] = subject.pairs([("To be", f" {subject.tokenizer.eot_token}")])
    assert pair.continuation[-1] == subject.tokenizer.eot_id
    literal = replace(subject, parse_special=False)
    [pair] = literal.pairs([("To be", f" {subject.tokenizer.eot_token}")])
    assert subject.tokenizer.eot_id not in pair.continuation
    assert subject.tokenizer.decode(pair.continuation) == f" {subject.tokenizer.eot_token}"


def test_a_continuation_without_a_token_of_its_own_is_refused():
    tokenizer = load_tokenizer("gpt2")
    joined = Subject(GPT.__new__(GPT), tokenizer, tokenizer.eot_id)
    with pytest.raises(DataError, match="no token of 'ear' is its own after 'the y'"):
        joined.pairs([("the y", "ear")])


def test_half_a_surrogate_pair_is_refused(subject):
    with pytest.raises(DataError, match="lone surrogate at character 3"):
        subject.pairs([("abc\ud800", " d")])
