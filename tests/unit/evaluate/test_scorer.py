"""`Scorer`: loading, and tokenization of contexts and continuations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.evaluate import Pair, Scorer
from whimbrel.model_io import save_model
from whimbrel.models import GPT
from whimbrel.precision import QuantizedWeight
from whimbrel.tokenization import Tokenizer, load_tokenizer


@pytest.fixture
def directory(scorer: Scorer, tmp_path: Path) -> Path:
    save_model(scorer.model, tmp_path / "model", scorer.tokenizer)
    return tmp_path / "model"


@pytest.fixture
def adds_bos(scorer: Scorer) -> Scorer:
    """A scorer whose tokenizer adds BOS, as that of Llama does."""
    copy = Tokenizer.from_json(scorer.tokenizer.to_json())
    copy.pipeline.post_processor = TemplateProcessing(
        single=f"{copy.eot_token} $A", special_tokens=[(copy.eot_token, copy.eot_id)]
    )
    return replace(scorer, tokenizer=copy)


def test_load_uses_the_tokenizer_of_the_directory(scorer, directory):
    loaded = Scorer.load(directory)
    assert loaded.tokenizer.fingerprint == scorer.tokenizer.fingerprint
    assert loaded.bos_id == scorer.tokenizer.eot_id
    pairs = loaded.encode_pairs([("To be", " or not")])
    assert loaded.score(pairs) == scorer.score(scorer.encode_pairs([("To be", " or not")]))


def test_dtype_and_quantize(directory):
    assert Scorer.load(directory, dtype=torch.bfloat16).model.token_embedding.weight.dtype == torch.bfloat16
    quantized = Scorer.load(directory, quantize="int8").model
    assert any(isinstance(weight, QuantizedWeight) for weight in quantized.parameters())


def test_bos_token_of_the_model_is_used(directory):
    for name in ("config.json", "generation_config.json"):
        table = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(table | {"bos_token_id": 7}))
    loaded = Scorer.load(directory)
    assert loaded.bos_id == 7
    assert loaded.encode_documents(["be"])[0].context == [7]


def test_tokenizer_larger_than_the_model_is_rejected(scorer, directory, tmp_path):
    with pytest.raises(ConfigError, match="at most 300 tokens .* got 50257"):
        Scorer.load(directory, tokenizer="gpt2")
    load_tokenizer("gpt2").save(directory)
    with pytest.raises(ConfigError, match="at most 300 tokens .* got 50257"):
        Scorer.load(directory)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="model.bin has no tokenizer"):
        Scorer.load(tmp_path / "model.bin")


def test_pairs_are_split_after_the_tokens_of_the_context(scorer):
    [pair] = scorer.encode_pairs([("To be", " or not")])
    assert scorer.tokenizer.decode(pair.context) == "To be"
    assert scorer.tokenizer.decode(pair.continuation) == " or not"
    assert [*pair.context, *pair.continuation] == scorer.tokenizer.encode("To be or not")


@pytest.mark.parametrize("spaces", [" ", "  ", "\n", " \n\t"])
def test_trailing_whitespace_moves_to_the_continuation(scorer, spaces):
    assert scorer.encode_pairs([(f"To be{spaces}", "or not")]) == scorer.encode_pairs([("To be", f"{spaces}or not")])


@pytest.mark.parametrize("context", ["", " "])
def test_empty_context_is_bos(scorer, adds_bos, context):
    for each in (scorer, adds_bos):
        [pair] = each.encode_pairs([(context, "or not")])
        assert pair == Pair([scorer.bos_id], scorer.tokenizer.encode(f"{context}or not"))


def test_pairs_keep_their_order(scorer):
    texts = [("", "a b"), ("To be", " or"), ("", "c d"), ("Not", " to be"), (" ", "e")]
    assert scorer.encode_pairs(texts) == [scorer.encode_pairs([text])[0] for text in texts]


def test_bos_is_not_added_twice(scorer, adds_bos):
    [without_bos], [with_bos] = (
        scorer.encode_pairs([("To be", " or not")]),
        adds_bos.encode_pairs([("To be", " or not")]),
    )
    assert with_bos == Pair([adds_bos.bos_id, *without_bos.context], without_bos.continuation)
    [spelled] = adds_bos.encode_pairs([(f"{adds_bos.tokenizer.eot_token}To be", " or not")])
    assert spelled == with_bos


def test_rolling_adds_one_bos(scorer, adds_bos):
    for each in (scorer, adds_bos):
        assert each.encode_documents(["To be", ""]) == [
            Pair([each.bos_id], scorer.tokenizer.encode("To be")),
            Pair([each.bos_id], []),
        ]


def test_prompt_has_the_special_tokens_of_the_tokenizer(scorer, adds_bos):
    assert scorer.encode_prompt("To be") == scorer.tokenizer.encode("To be")
    assert adds_bos.encode_prompt("To be") == [adds_bos.bos_id, *scorer.tokenizer.encode("To be")]
    assert scorer.encode_prompt("") == [scorer.bos_id]


def test_parse_special(scorer):
    [pair] = scorer.encode_pairs([("To be", f" {scorer.tokenizer.eot_token}")])
    assert pair.continuation[-1] == scorer.tokenizer.eot_id
    literal = replace(scorer, parse_special=False)
    [pair] = literal.encode_pairs([("To be", f" {scorer.tokenizer.eot_token}")])
    assert scorer.tokenizer.eot_id not in pair.continuation
    assert scorer.tokenizer.decode(pair.continuation) == f" {scorer.tokenizer.eot_token}"


def test_continuation_without_tokens_is_rejected():
    tokenizer = load_tokenizer("gpt2")
    joined = Scorer(GPT.__new__(GPT), tokenizer, tokenizer.eot_id)
    with pytest.raises(DataError, match="continuation 'ear' after 'the y', got none"):
        joined.encode_pairs([("the y", "ear")])


def test_lone_surrogate_is_rejected(scorer):
    with pytest.raises(DataError, match="lone surrogate at character 3"):
        scorer.encode_pairs([("abc\ud800", " d")])
