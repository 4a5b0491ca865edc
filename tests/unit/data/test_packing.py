"""Tokenized samples: truncation, packing into rows, padding, fingerprints, and equal gradients."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.chat_templates import THINKING
from tests.support.models import KINDS, add_noise

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data.conversations import Conversation, ConversationReader, Document, PreferencePair
from whimbrel.data.packing import (
    PackedRows,
    PaddedSamples,
    TokenizedSamples,
    first_fit,
    mark_supervised,
    tokenize_samples,
)
from whimbrel.models import GPT
from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, Chat, ChatTemplate, apply_builtin_template

TEMPLATE, TOKENIZER = apply_builtin_template("chatml", byte_tokenizer())


def chat(*lengths: int) -> Chat:
    """Questions of 2 characters, and answers of the given lengths."""
    roles = (("user", 2, "?"), ("assistant", None, "a"))
    return Chat([{"role": r, "content": c * (n or length)} for length in lengths for r, n, c in roles])


def conversations(count: int, seed: int = 0, longest: int = 60) -> list[Conversation]:
    pick = random.Random(seed)
    return [
        Conversation(f"line {n}", chat(*(pick.randint(1, longest) for _ in range(pick.randint(1, 3)))))
        for n in range(count)
    ]


def tokenize(samples: Any, **settings: Any) -> TokenizedSamples:
    return tokenize_samples(samples, TOKENIZER, TEMPLATE, **settings)


def text(ids: Any) -> str:
    return TOKENIZER.decode(ids)


def test_first_fit_is_the_textbook_algorithm() -> None:
    pick = random.Random(1)
    for _ in range(200):
        lengths = [pick.randint(1, 20) for _ in range(pick.randint(0, 40))]
        free: list[int] = []
        expected = []
        for length in lengths:
            row = next((row for row, space in enumerate(free) if space >= length), len(free))
            if row == len(free):
                free.append(20)
            free[row] -= length
            expected.append(row)
        assert first_fit(lengths, 20) == expected


def test_rows_contain_every_sample_once_with_its_targets() -> None:
    samples = tokenize(conversations(50))
    rows = PackedRows(samples, 300, pad_id=TOKENIZER.eot_id, seed=3)
    assert sorted(np.concatenate([rows.members(n) for n in range(len(rows))]).tolist()) == list(range(50))
    num_tokens = num_targets = 0
    for number in range(len(rows)):
        row = rows[number]
        assert {name: len(values) for name, values in row.items()} == dict.fromkeys(row, 300)
        for document, member in enumerate(rows.members(number)):
            here = row["documents"] == document
            ids, mask = samples[int(member)]
            assert row["input_ids"][here].tolist() == ids.tolist()
            assert row["position_ids"][here].tolist() == list(range(len(ids)))
            expected = [int(token) if kept else -100 for token, kept in zip(ids[1:], mask[1:], strict=True)]
            assert row["targets"][here].tolist() == [*expected, -100]
        padding = row["documents"] == len(rows.members(number))
        assert (row["targets"][padding] == -100).all()
        assert (row["input_ids"][padding] == TOKENIZER.eot_id).all()
        num_tokens += 300 - padding.sum()
        num_targets += (row["targets"] != -100).sum()
    assert num_tokens == samples.stats.tokens == samples.lengths.sum()
    assert num_targets == samples.stats.supervised_tokens == samples.mask.sum()
    assert rows.fill_rate == num_tokens / (300 * len(rows)) > 0.8
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "llama3"])
def test_packed_rows_have_the_loss_and_gradients_of_padded_samples(kind: str) -> None:
    """Positions and attention restart per sample; rotary models do not need `position_ids`, attention is relative."""
    torch.manual_seed(0)
    config = KINDS[kind]
    model = add_noise(
        GPT(type(config)(**{**_fields(config), "vocab_size": TOKENIZER.vocab_size, "context_length": 256}))
    )
    model.double()
    samples = tokenize(conversations(9, longest=20))
    packed = PackedRows(samples, 256, pad_id=0)
    padded = PaddedSamples(samples, pad_id=0)
    batch = padded.collate([padded[n] for n in range(len(padded))])
    loss = model(batch["input_ids"], targets=batch["targets"], num_items_in_batch=samples.stats.supervised_tokens).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for number in range(len(packed)):
        row = {name: torch.from_numpy(values)[None] for name, values in packed[number].items()}
        if config.position == "learned":
            row = _one_document_per_batch_row(row)
        row.pop("position_ids", None)
        part = model(row.pop("input_ids"), **row, num_items_in_batch=samples.stats.supervised_tokens).loss
        part.backward()
        total += part.detach()
    torch.testing.assert_close(total, loss.detach().double(), rtol=0, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-6)


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _one_document_per_batch_row(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scatter the samples of a packed row by `documents` and `position_ids`, for models with absolute positions."""
    documents, positions = row["documents"][0], row["position_ids"][0]
    shape = (int(documents.max()) + 1, int(positions.max()) + 1)
    ids, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    ids[documents, positions] = row["input_ids"][0]
    targets[documents, positions] = row["targets"][0]
    return {"input_ids": ids, "targets": targets}


def test_too_long_samples_are_truncated_after_a_turn_or_dropped() -> None:
    samples = [Conversation("a", chat(5, 50, 10)), Conversation("b", chat(400)), Conversation("c", chat(5))]
    whole = tokenize(samples)
    assert whole.stats.longest == whole.lengths.max()
    first_turn = text(whole[0][0]).index("<|im_end|>", 40) + len("<|im_end|>")
    truncated = tokenize(samples, max_tokens=60)
    assert (truncated.stats.samples, truncated.stats.truncated, truncated.stats.dropped) == (2, 1, 1)
    assert text(truncated[0][0]) == text(whole[0][0])[:first_turn]
    assert truncated[0][0][-1] == TOKENIZER.eot_id
    assert truncated[0][1][-1]
    assert truncated.stats.longest == whole.stats.longest
    dropped = tokenize(samples, max_tokens=60, too_long="drop")
    assert (dropped.stats.samples, dropped.stats.truncated, dropped.stats.dropped) == (1, 0, 2)
    exact = tokenize(samples, max_tokens=int(whole.lengths[0]))
    assert (exact.stats.truncated, exact.stats.dropped) == (0, 1)
    with pytest.raises(DataError, match="no samples of at most 10 tokens .3 dropped, the longest has"):
        tokenize(samples, max_tokens=10)
    with pytest.raises(DataError, match="at most 100 tokens, got one of"):
        PackedRows(whole, 100, pad_id=0)


def test_train_on_last_is_never_truncated() -> None:
    samples = [Conversation("a", chat(5, 50)), Conversation("b", chat(5))]
    kept = tokenize(samples, max_tokens=60, train_on="last")
    assert (kept.stats.samples, kept.stats.dropped) == (1, 1)


def test_documents_are_supervised_and_end_with_end_of_text() -> None:
    samples = tokenize(
        [Document("a", "A story. <|im_end|>"), Conversation("b", chat(3)), Document("c", "x" * 50)], max_tokens=40
    )
    ids, mask = samples[0]
    assert text(ids) == "A story. <|im_end|><|im_end|>"
    assert ids.tolist().count(TOKENIZER.eot_id) == 1
    assert mask.tolist() == [False] + [True] * (len(ids) - 1)
    assert text(samples[2][0]) == "x" * 40
    assert (samples.stats.samples, samples.stats.truncated) == (3, 1)
    with pytest.raises(DataError, match="b: expected valid Unicode"):
        tokenize([Document("a", "ok"), Document("b", "\ud800")])


def test_the_terminal_view_marks_supervised_parts() -> None:
    samples = tokenize([Conversation("a", chat(3, 2)), Document("b", "é🐦")])
    assert mark_supervised(TOKENIZER, *samples[0]) == (
        "<|im_start|>user\n??<|im_end|>\n<|im_start|>assistant\n[[aaa<|im_end|>]]\n"
        "<|im_start|>user\n??<|im_end|>\n<|im_start|>assistant\n[[aa<|im_end|>]]\n"
    )
    ids, mask = samples[0]
    assert mark_supervised(TOKENIZER, ids, mask, ("", "")) == text(ids)
    assert mark_supervised(TOKENIZER, ids, np.zeros_like(mask)) == text(ids)


def test_fingerprints_cover_data_template_and_settings() -> None:
    def fingerprint(samples: Any = None, row_tokens: int = 300, seed: int = 0, **settings: Any) -> str:
        return PackedRows(
            tokenize(samples or conversations(20), **settings), row_tokens, pad_id=0, seed=seed
        ).fingerprint

    same = fingerprint()
    assert fingerprint() == same
    others = [
        fingerprint(conversations(20, seed=1)),
        fingerprint(conversations(21)),
        fingerprint(row_tokens=301),
        fingerprint(seed=1),
        fingerprint(train_on="all"),
        fingerprint(max_tokens=299),
        PaddedSamples(tokenize(conversations(20)), pad_id=0).fingerprint,
        PackedRows(tokenize_samples(conversations(20), TOKENIZER, ChatTemplate(THINKING)), 300, pad_id=0).fingerprint,
    ]
    assert len({same, *others}) == len(others) + 1


def test_saved_samples_are_loaded_unchanged(tmp_path) -> None:
    samples = tokenize(conversations(20))
    samples.save(tmp_path / "samples")
    samples.save(tmp_path / "samples")
    loaded = TokenizedSamples.load(tmp_path / "samples")
    assert loaded.fingerprint == samples.fingerprint
    assert loaded.stats == samples.stats
    assert PackedRows(loaded, 300, pad_id=0).fingerprint == PackedRows(samples, 300, pad_id=0).fingerprint
    ids = np.load(tmp_path / "samples" / "ids.npy")
    np.save(tmp_path / "samples" / "ids.npy", ids + 1)
    with pytest.raises(DataError, match="no readable samples .the fingerprint.*tokenize them again"):
        TokenizedSamples.load(tmp_path / "samples")
    with pytest.raises(DataError, match="no readable samples"):
        TokenizedSamples.load(tmp_path)


def test_conversations_need_a_template() -> None:
    assert len(tokenize_samples([Document("a", "A story.")], TOKENIZER, None)) == 1
    with pytest.raises(ConfigError, match="expected a chat template"):
        tokenize_samples(conversations(1), TOKENIZER, None)
    with pytest.raises(ConfigError, match="train_on: expected one of assistant, last, all, got 'user'"):
        tokenize(conversations(1), train_on="user")
    with pytest.raises(ConfigError, match="too_long: expected one of truncate, drop, got 'cut'"):
        tokenize(conversations(1), too_long="cut")


def test_splits_are_disjoint_and_deterministic() -> None:
    samples = tokenize([Conversation(str(n), chat(n + 1)) for n in range(40)])
    train, validation = samples.split(0.1, seed=0)
    assert (len(train), len(validation)) == (36, 4)
    assert sorted([*train.lengths, *validation.lengths]) == samples.lengths.tolist()
    assert train.stats.tokens + validation.stats.tokens == samples.stats.tokens
    assert train.stats.supervised_tokens + validation.stats.supervised_tokens == samples.stats.supervised_tokens
    assert samples.split(0.1, seed=0)[1].fingerprint == validation.fingerprint
    assert samples.split(0.1, seed=1)[1].fingerprint != validation.fingerprint
    with pytest.raises(DataError, match="leaves samples for training"):
        samples.split(0.999, seed=0)


def pairs(count: int) -> list[PreferencePair]:
    question = {"role": "user", "content": "?"}
    answers = [
        ({"role": "assistant", "content": "a" * (n + 1)}, {"role": "assistant", "content": "b" * 9})
        for n in range(count)
    ]
    return [
        PreferencePair(str(n), Chat([question, good]), Chat([question, bad])) for n, (good, bad) in enumerate(answers)
    ]


def test_preference_pairs_stay_together() -> None:
    samples = tokenize(pairs(20))
    assert samples.pair
    assert (len(samples), samples.stats.samples) == (40, 20)
    rows = PackedRows(samples, 250, pad_id=0)
    for number in range(len(rows)):
        members = rows.members(number)
        assert members[0::2].tolist() == (members[1::2] - 1).tolist()
        assert (members[0::2] % 2 == 0).all()
    padded = PaddedSamples(samples, pad_id=0, pad_to_multiple_of=8)
    assert len(padded) == 20
    batch = padded.collate([padded[4], padded[7]])
    assert batch["input_ids"].shape == batch["targets"].shape
    assert batch["input_ids"].size(0) == 4
    assert batch["input_ids"].size(1) % 8 == 0
    answers = [text(row[row != -100].tolist()) for row in batch["targets"]]
    assert answers == ["aaaaa<|im_end|>", "b" * 9 + "<|im_end|>", "a" * 8 + "<|im_end|>", "b" * 9 + "<|im_end|>"]
    train, validation = samples.split(0.25, seed=0)
    assert (len(train), len(validation), train.pair) == (30, 10, True)
    kept = tokenize(pairs(20), max_tokens=int(samples.lengths[1]))
    assert (kept.stats.samples, kept.stats.dropped, kept.stats.truncated) == (9, 11, 0)


def test_conversations_that_the_template_rejects_are_reported_or_skipped(tmp_path) -> None:
    template, tokenizer = apply_builtin_template("llama3", byte_tokenizer())
    good = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'
    bad = good.replace("}]}", '}, {"role": "tool", "content": "3"}]}')
    path = tmp_path / "a.jsonl"
    path.write_text(f"{good}\n{bad}\n{good}\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .*rejects these messages: .*chatml"):
        tokenize_samples(ConversationReader([str(path)]), tokenizer, template)
    reader = ConversationReader([str(path)], skip_bad=True)
    samples = tokenize_samples(reader, tokenizer, template)
    assert len(samples) == 2 == reader.report.samples
    assert reader.report.skipped == {"rejected by the chat template": 1}


def test_samples_are_stored_compactly_and_unterminated_ones_counted() -> None:
    samples = tokenize(conversations(10))
    assert (samples.ids.dtype, samples.mask.dtype) == (np.uint16, np.bool_)
    assert samples.stats.unterminated == 0
    assert tokenize_samples(conversations(10), TOKENIZER, DEFAULT_CHAT_TEMPLATE).stats.unterminated == 10
