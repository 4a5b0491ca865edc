"""Scores of pairs: each token once, whatever it is batched with."""

from __future__ import annotations

import copy

import pytest
import torch

from whimbrel.base.errors import ConfigError, DataError, PrecisionError
from whimbrel.evaluate import Pair, scoring
from whimbrel.evaluate.scoring import Window, is_cut, score, windows


def plain(model, context: list[int], continuation: list[int]) -> list[float]:
    """The log-probability of each token from the logits of one forward pass."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logs = model(ids[:, :-1]).logits.log_softmax(-1)
    places = range(len(context) - 1, ids.size(1) - 1)
    return [float(logs[0, place, ids[0, place + 1]]) for place in places]


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Counted:
    """A progress display that only counts."""

    def __init__(self) -> None:
        self.done = 0

    def advance(self, count: int) -> None:
        self.done += count


def test_a_pair_that_fits_is_one_window():
    assert list(windows(Pair([1, 2, 3], [4, 5]), 8)) == [Window([1, 2, 3, 4], [4, 5])]


def test_a_context_that_is_too_long_loses_its_beginning():
    assert list(windows(Pair([1, 2, 3, 4, 5], [6, 7]), 4)) == [Window([3, 4, 5, 6], [6, 7])]
    assert [is_cut(Pair([0] * size, [6, 7]), 4) for size in (3, 4)] == [False, True]


def test_a_continuation_that_is_too_long_takes_windows_and_the_last_sees_all_it_can():
    found = list(windows(Pair([0], list(range(1, 11))), 4))
    assert found == [
        Window([0, 1, 2, 3], [1, 2, 3, 4]),
        Window([4, 5, 6, 7], [5, 6, 7, 8]),
        Window([6, 7, 8, 9], [9, 10]),
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 12, 13, 50])
@pytest.mark.parametrize("context", [1, 3, 12])
def test_every_token_is_scored_once_and_after_the_one_before_it(length, context):
    ids = list(range(30))
    pair = Pair(ids[:context], ids[context:])
    found = list(windows(pair, length))
    assert [token for window in found for token in window.targets] == pair.continuation
    for inputs, targets in found:
        assert len(inputs) <= length
        assert inputs[-1] == targets[-1] - 1
        assert inputs == list(range(inputs[0], inputs[-1] + 1))


def test_a_score_is_the_sum_of_what_one_forward_pass_says(subject):
    context, continuation = random_ids(9), random_ids(14, seed=1)
    [found] = score(subject.model, [Pair(context, continuation)])
    assert found.loglikelihood == pytest.approx(sum(plain(subject.model, context, continuation)), abs=1e-4)
    assert not found.greedy


def test_what_greedy_decoding_writes_is_greedy_and_no_more_after_one_change(subject):
    ids = random_ids(5)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(subject.model(torch.tensor([ids])).logits[0, -1].argmax()))
    pairs = [Pair(ids[:5], ids[5:])]
    for place in range(6):
        changed = list(ids[5:])
        changed[place] = (changed[place] + 1) % 300
        pairs.append(Pair(ids[:5], changed))
    assert [found.greedy for found in score(subject.model, pairs)] == [True] + [False] * 6


def test_greedy_is_said_of_all_windows_together(subject):
    """The second of two windows is greedy; the first, of random tokens, is not."""
    ids = random_ids(65)
    with torch.no_grad():
        for _ in range(16):
            ids.append(int(subject.model(torch.tensor([ids[16:]])).logits[0, -1].argmax()))
    assert score(subject.model, [Pair(ids[:65], ids[65:])])[0].greedy
    assert not score(subject.model, [Pair(ids[:1], ids[1:])])[0].greedy


def test_neighbours_and_batch_sizes_change_no_score(subject):
    pairs = [Pair(random_ids(size, size), random_ids(1 + size % 7, size + 1)) for size in (3, 60, 1, 25, 90, 8, 8, 40)]
    alone = [score(subject.model, [pair])[0] for pair in pairs]
    for batch_size in (1, 3, 100, None):
        found = score(subject.model, pairs, batch_size=batch_size)
        assert [each.loglikelihood for each in found] == pytest.approx([each.loglikelihood for each in alone], abs=1e-4)
        assert [each.greedy for each in found] == [each.greedy for each in alone]


def test_logits_are_made_a_few_rows_at_a_time(subject, monkeypatch):
    pairs = [Pair(random_ids(4), random_ids(40, seed=2)), Pair(random_ids(8), random_ids(3, seed=3))]
    expected = score(subject.model, pairs)
    rows = []
    hook = subject.model.lm_head.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 16 * subject.model.config.padded_vocab_size)
    try:
        found = score(subject.model, pairs)
    finally:
        hook.remove()
    assert rows == [16, 16, 11]  # the 43 tokens that are scored, and none of the contexts
    assert [each.loglikelihood for each in found] == pytest.approx([each.loglikelihood for each in expected], abs=1e-4)


def test_without_a_number_of_rows_a_pass_has_a_number_of_tokens(subject, monkeypatch):
    monkeypatch.setattr(scoring, "TOKENS_AT_ONCE", {"cpu": 100})
    shapes = []
    hook = subject.model.token_embedding.register_forward_hook(
        lambda _, given, __: shapes.append(tuple(given[0].shape))
    )
    try:
        score(subject.model, [Pair(random_ids(size), [1]) for size in (10, 50, 45, 9, 8, 60)])
    finally:
        hook.remove()
    assert shapes == [(1, 60), (2, 50), (3, 10)]


def test_batches_that_memory_does_not_hold_are_halved_once(subject, monkeypatch):
    shapes, run = [], scoring._score_rows

    def small_memory(model, rows):
        shapes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("no more")
        return run(model, rows)

    pairs = [Pair(random_ids(size), [1, 2]) for size in range(1, 9)]
    expected = score(subject.model, pairs)
    monkeypatch.setattr(scoring, "_score_rows", small_memory)
    found = score(subject.model, pairs, batch_size=8)
    assert shapes == [8, 4, 2, 2, 2, 2]
    assert [each.loglikelihood for each in found] == pytest.approx([each.loglikelihood for each in expected], abs=1e-4)


def test_one_row_that_memory_does_not_hold_is_an_error(subject, monkeypatch):
    def no_memory(model, rows):
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(scoring, "_score_rows", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        score(subject.model, [Pair([1], [2]), Pair([1], [3])])


def test_progress_is_told_of_tokens(subject):
    shown = Counted()
    score(subject.model, [Pair([1, 2, 3], [4, 5]), Pair([1], [2])], progress=shown)
    assert shown.done == 4 + 1


def test_what_cannot_be_scored_is_refused(subject):
    with pytest.raises(ConfigError, match="batch_size = 0 must be at least 1"):
        score(subject.model, [Pair([1], [2])], batch_size=0)
    for pair in (Pair([], [2]), Pair([1], [])):
        with pytest.raises(DataError, match="a context or a continuation has no token"):
            score(subject.model, [pair])
    assert score(subject.model, []) == []


def test_numbers_that_are_none_are_no_score(subject):
    broken = copy.deepcopy(subject.model)
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(PrecisionError, match="numbers that are none"):
        score(broken, [Pair([1], [2])])
