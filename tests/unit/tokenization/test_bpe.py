"""Training byte-level BPE tokenizers, and the conditions for the tiktoken backend."""

from __future__ import annotations

import json

import pytest

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.tokenization import Tokenizer, train_tokenizer


def test_a_trained_tokenizer_compresses_and_is_lossless(shakespeare: str) -> None:
    tokenizer = train_tokenizer([shakespeare], 512)
    assert (tokenizer.vocab_size, tokenizer.eot_id, tokenizer.backend) == (512, 511, "tiktoken")
    ids = tokenizer.encode(shakespeare)
    assert tokenizer.decode(ids) == shakespeare
    assert len(ids) < 0.55 * len(shakespeare)
    tokenizer._tiktoken = None
    assert tokenizer.encode(shakespeare) == ids


def test_training_is_deterministic(shakespeare: str) -> None:
    first, second = (train_tokenizer([shakespeare[:200_000]], 400) for _ in range(2))
    assert first.to_json() == second.to_json()


def test_training_rejects_invalid_arguments(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="257"):
        train_tokenizer(["text"], 256)
    for absurd in (10**9, 10**30):
        with pytest.raises(ConfigError, match=f"vocab_size: expected at most 16,777,216, got {absurd}"):
            train_tokenizer(["text"], absurd)
    for absurd in (-1, 0, 10**30):
        with pytest.raises(ConfigError, match=f"min_frequency: expected 1 .* got {absurd}"):
            train_tokenizer(["text"], 300, min_frequency=absurd)
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(iter(()), 300)
    assert train_tokenizer(["ab ab ab"], 300).vocab_size < 300
    assert "of the requested 300 tokens" in caplog.text


def test_merges_out_of_rank_order_use_the_tokenizers_backend(shakespeare: str) -> None:
    """`tiktoken` merges by id, so it must not be used if ids and merges are in different orders."""
    content = json.loads(train_tokenizer([shakespeare[:50_000]], 300).to_json())
    vocabulary = content["model"]["vocab"]
    last, before = ("".join(merge) for merge in content["model"]["merges"][:-3:-1])
    vocabulary[last], vocabulary[before] = vocabulary[before], vocabulary[last]
    assert Tokenizer.from_json(json.dumps(content)).backend == "tokenizers"
    content["normalizer"] = {"type": "Lowercase"}
    assert Tokenizer.from_json(json.dumps(content)).encode("A") == Tokenizer.from_json(json.dumps(content)).encode("a")
