"""Perplexity and bits per byte of text and token shards."""

from __future__ import annotations

import math

import pytest
import torch

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data.prepare import prepare
from whimbrel.evaluate import Scorer, held_out_evaluation, perplexity, shard_perplexity, text_perplexity
from whimbrel.model_io import save_model
from whimbrel.tokenization import train_tokenizer

TEXTS = ["To be, or not to be", "naïve café: 日本語", "", "That is the question. " * 40]


def test_results_equal_those_of_one_forward_pass(scorer):
    ids = [scorer.bos_id, *scorer.tokenizer.encode(TEXTS[0])]
    with torch.no_grad():
        loss = float(scorer.model(torch.tensor([ids[:-1]]), targets=torch.tensor([ids[1:]])).loss)
    found = perplexity(scorer, TEXTS[:1])
    assert (found.documents, found.tokens, found.bytes) == (1, len(ids) - 1, len(TEXTS[0]))
    assert found.bits_per_token == pytest.approx(loss / math.log(2), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(loss * (len(ids) - 1) / math.log(2) / len(TEXTS[0]), rel=1e-5)


def test_models_in_training_mode_are_scored_without_dropout(scorer):
    expected = perplexity(scorer, TEXTS)
    scorer.model.set_dropout(0.5)
    try:
        scorer.model.train()
        assert perplexity(scorer, TEXTS) == expected
        assert scorer.model.training
    finally:
        scorer.model.set_dropout(0)


def test_documents_add_up_and_bytes_are_utf8(scorer):
    found = perplexity(scorer, TEXTS)
    alone = [perplexity(scorer, [text]) for text in TEXTS if text]
    assert found.documents == 4
    assert found.bytes == sum(len(text.encode("utf-8")) for text in TEXTS) > sum(map(len, TEXTS))
    assert found.tokens == sum(len(scorer.tokenizer.encode(text)) for text in TEXTS)
    assert found.loglikelihood == pytest.approx(sum(each.loglikelihood for each in alone), rel=1e-6)


def test_long_text_is_scored_in_windows(scorer):
    ids = scorer.tokenizer.encode(TEXTS[3])
    assert len(ids) > 3 * 64
    tokens, total = [scorer.bos_id, *ids], 0.0
    with torch.no_grad():
        for begin in range(0, len(ids), 64):
            end = min(begin + 64, len(ids))
            start = max(0, end - 64)
            logs = scorer.model(torch.tensor([tokens[start:end]])).logits[0].log_softmax(-1)
            total += sum(float(logs[index - start, tokens[index + 1]]) for index in range(begin, end))
    assert perplexity(scorer, [TEXTS[3]]).loglikelihood == pytest.approx(total, rel=1e-6)


def test_text_is_scored_in_chunks(scorer, monkeypatch):
    expected = perplexity(scorer, TEXTS * 3)
    calls, score = [], Scorer.score
    monkeypatch.setattr(Scorer, "score", lambda self, pairs, **kw: calls.append(len(pairs)) or score(self, pairs, **kw))
    monkeypatch.setattr(text_perplexity, "CHUNK_TOKENS", 100)
    found = perplexity(scorer, iter(TEXTS * 3))
    assert calls == [3, 3, 3, 0]
    assert found.tokens == expected.tokens
    assert found.loglikelihood == pytest.approx(expected.loglikelihood, rel=1e-6)


def test_limit_stops_reading(scorer):
    def endless():
        yield from TEXTS[:2]
        pytest.fail("read too far")

    found = perplexity(scorer, endless(), limit=2)
    assert (found.documents, found.bytes) == (2, sum(len(text.encode()) for text in TEXTS[:2]))
    with pytest.raises(ConfigError, match="limit: .* got 0"):
        perplexity(scorer, TEXTS, limit=0)


@pytest.mark.parametrize("nothing", [[], ["", ""]])
def test_text_without_tokens_is_rejected(scorer, nothing):
    with pytest.raises(DataError, match=f"got {len(nothing)} documents without tokens"):
        perplexity(scorer, nothing)


def test_token_shards_equal_their_text(scorer, tmp_path, monkeypatch):
    documents = [text for text in TEXTS if text]
    folder = tmp_path / "text"
    folder.mkdir()
    for number, text in enumerate(documents):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "train.txt").write_text("something else")
    shards, train = tmp_path / "shards", [str(tmp_path / "train.txt")]
    prepare(train, shards, scorer.tokenizer, name="speech", val=[str(folder)])
    found = shard_perplexity(scorer, shards)
    expected = perplexity(scorer, documents)
    assert (found.documents, found.tokens, found.bytes) == (expected.documents, expected.tokens, expected.bytes)
    assert found.loglikelihood == pytest.approx(expected.loglikelihood, rel=1e-6)
    monkeypatch.setattr(text_perplexity, "READ_TOKENS", 7)  # documents span several reads
    assert shard_perplexity(scorer, shards) == found
    assert shard_perplexity(scorer, shards, limit=1).documents == 1
    other = train_tokenizer(["another text"], 260)
    with pytest.raises(DataError, match="different tokenizer"):
        shard_perplexity(Scorer(scorer.model, other, other.eot_id), shards)


def test_held_out_loss_is_the_mean_over_sequences_of_equal_length(scorer, tmp_path):
    save_model(scorer.model, tmp_path / "model", scorer.tokenizer)
    (tmp_path / "text.txt").write_text(TEXTS[3])
    ids = torch.tensor([scorer.tokenizer.eot_id, *scorer.tokenizer.encode(TEXTS[3])])[:65]
    with torch.no_grad():
        losses = [float(scorer.model(x[None, :-1], targets=x[None, 1:]).loss) for x in (ids[:33], ids[32:])]
    evaluate = held_out_evaluation(tmp_path / "model", str(tmp_path / "text.txt"), max_tokens=64, sequence_length=32)
    result = evaluate(scorer.model)
    assert (result.num_tokens, result.sequence_length, result.dataset) == (64, 32, "text.txt")
    assert result.loss == pytest.approx(sum(losses) / 2, rel=1e-5)
