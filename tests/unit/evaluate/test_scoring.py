"""`score`: each token once, independent of batching."""

from __future__ import annotations

import copy

import pytest
import torch

from whimbrel.base.errors import ConfigError, DataError, PrecisionError
from whimbrel.evaluate import Pair, scoring
from whimbrel.evaluate.scoring import Window, is_truncated, score, windows
from whimbrel.inference.model_runner import ModelRunner
from whimbrel.inference.paged_cache import ContiguousCache, PagedBatch
from whimbrel.models import GPT


def token_log_probabilities(model, context: list[int], continuation: list[int]) -> list[float]:
    """The log-probability of each token from the logits of one forward pass."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logs = model(ids[:, :-1]).logits.log_softmax(-1)
    places = range(len(context) - 1, ids.size(1) - 1)
    return [float(logs[0, place, ids[0, place + 1]]) for place in places]


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class CountingProgress:
    """A progress display that counts."""

    def __init__(self) -> None:
        self.done = 0

    def advance(self, count: int) -> None:
        self.done += count


def test_pair_that_fits_is_one_window():
    assert list(windows(Pair([1, 2, 3], [4, 5]), 8)) == [Window([1, 2, 3, 4], [4, 5])]


def test_long_context_is_truncated_on_the_left():
    assert list(windows(Pair([1, 2, 3, 4, 5], [6, 7]), 4)) == [Window([3, 4, 5, 6], [6, 7])]
    assert [is_truncated(Pair([0] * size, [6, 7]), 4) for size in (3, 4)] == [False, True]


def test_long_continuation_is_split_and_the_last_window_has_the_maximum_context():
    found = list(windows(Pair([0], list(range(1, 11))), 4))
    assert found == [
        Window([0, 1, 2, 3], [1, 2, 3, 4]),
        Window([4, 5, 6, 7], [5, 6, 7, 8]),
        Window([6, 7, 8, 9], [9, 10]),
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 12, 13, 50])
@pytest.mark.parametrize("context", [1, 3, 12])
def test_windows_score_every_token_once(length, context):
    ids = list(range(30))
    pair = Pair(ids[:context], ids[context:])
    found = list(windows(pair, length))
    assert [token for window in found for token in window.targets] == pair.continuation
    for inputs, targets in found:
        assert len(inputs) <= length
        assert inputs[-1] == targets[-1] - 1
        assert inputs == list(range(inputs[0], inputs[-1] + 1))


def test_score_equals_the_sum_of_log_probabilities(scorer):
    context, continuation = random_ids(9), random_ids(14, seed=1)
    [found] = score(scorer.model, [Pair(context, continuation)])
    assert found.loglikelihood == pytest.approx(
        sum(token_log_probabilities(scorer.model, context, continuation)), abs=1e-4
    )
    assert not found.is_greedy


def test_greedy_continuations_are_recognized(scorer):
    ids = random_ids(5)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(scorer.model(torch.tensor([ids])).logits[0, -1].argmax()))
    pairs = [Pair(ids[:5], ids[5:])]
    for place in range(6):
        changed = list(ids[5:])
        changed[place] = (changed[place] + 1) % 300
        pairs.append(Pair(ids[:5], changed))
    assert [found.is_greedy for found in score(scorer.model, pairs)] == [True] + [False] * 6


def test_greedy_requires_all_windows(scorer):
    """The second of two windows is greedy; the first, of random tokens, is not."""
    ids = random_ids(65)
    with torch.no_grad():
        for _ in range(16):
            ids.append(int(scorer.model(torch.tensor([ids[16:]])).logits[0, -1].argmax()))
    assert score(scorer.model, [Pair(ids[:65], ids[65:])])[0].is_greedy
    assert not score(scorer.model, [Pair(ids[:1], ids[1:])])[0].is_greedy


def test_scores_do_not_depend_on_the_batch(scorer):
    pairs = [Pair(random_ids(size, size), random_ids(1 + size % 7, size + 1)) for size in (3, 60, 1, 25, 90, 8, 8, 40)]
    alone = [score(scorer.model, [pair])[0] for pair in pairs]
    for batch_size in (1, 3, 100, None):
        found = score(scorer.model, pairs, batch_size=batch_size)
        assert [each.loglikelihood for each in found] == pytest.approx([each.loglikelihood for each in alone], abs=1e-4)
        assert [each.is_greedy for each in found] == [each.is_greedy for each in alone]


def test_logits_of_a_forward_pass_are_limited(scorer, monkeypatch):
    pairs = [Pair(random_ids(4), random_ids(40, seed=2)), Pair(random_ids(8), random_ids(3, seed=3))]
    expected = score(scorer.model, pairs)
    rows = []
    hook = scorer.model.lm_head.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    monkeypatch.setattr(scoring, "MAX_LOGITS", {"cpu": 16 * scorer.model.config.padded_vocab_size})
    try:
        found = score(scorer.model, pairs)
    finally:
        hook.remove()
    assert max(rows) <= 16 + 2
    assert 43 <= sum(rows) <= 43 + 2  # only the scored tokens, not the contexts
    assert [each.loglikelihood for each in found] == pytest.approx([each.loglikelihood for each in expected], abs=1e-4)


def test_batches_are_limited_by_tokens(scorer, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_BATCH_TOKENS", 100)
    shapes = []
    hook = scorer.model.token_embedding.register_forward_hook(lambda _, given, __: shapes.append(tuple(given[0].shape)))
    try:
        score(scorer.model, [Pair(random_ids(size), [1]) for size in (10, 50, 45, 9, 8, 60)])
    finally:
        hook.remove()
    assert shapes == [(1, 60), (2, 50), (3, 10)]


def limit_memory(monkeypatch: pytest.MonkeyPatch, tokens: int) -> list[int]:
    """Forward passes over more than `tokens` tokens run out of memory; returns the number of tokens of each."""
    sizes, prefill = [], ModelRunner.prefill

    def small_memory(self, chunks, offsets):
        sizes.append(sum(len(chunk.tokens) for chunk in chunks))
        if sizes[-1] > tokens:
            raise torch.OutOfMemoryError("no more")
        return prefill(self, chunks, offsets)

    monkeypatch.setattr(ModelRunner, "prefill", small_memory)
    return sizes


def test_batch_is_halved_on_out_of_memory(scorer, monkeypatch):
    pairs = [Pair(random_ids(size), [1, 2]) for size in range(1, 9)]
    expected = score(scorer.model, pairs)
    monkeypatch.setattr(scoring, "MAX_BATCH_TOKENS", 128)
    sizes = limit_memory(monkeypatch, 20)
    shown = CountingProgress()
    found = score(scorer.model, pairs, progress=shown)
    assert sizes[:4] == [44, 42, 24, 9]  # at most 128, 64, 32 and 16 tokens, padding included
    assert shown.done == sum(range(2, 10))
    assert [each.loglikelihood for each in found] == pytest.approx([each.loglikelihood for each in expected], abs=1e-4)


def test_out_of_memory_with_one_token_is_an_error(scorer, monkeypatch):
    limit_memory(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError):
        score(scorer.model, [Pair([1], [2]), Pair([1], [3])])


def test_the_engine_runs_the_model(scorer, monkeypatch):
    """All forward passes have a paged cache: there is no second way to run the model."""
    caches, hidden_states = [], GPT.hidden_states
    monkeypatch.setattr(
        GPT,
        "hidden_states",
        lambda self, ids, cache=None: caches.append(cache) or hidden_states(self, ids, cache=cache),
    )
    score(scorer.model, [Pair(random_ids(size), [1, 2]) for size in (1, 5, 90)])
    assert {type(cache) for cache in caches} <= {PagedBatch, ContiguousCache}


def test_a_model_context_is_used_completely(scorer):
    """64 inputs and one more target, for a context of 64 tokens."""
    context, continuation = random_ids(60), random_ids(5, seed=1)
    [found] = score(scorer.model, [Pair(context, continuation)])
    expected = sum(token_log_probabilities(scorer.model, context, continuation))
    assert found.loglikelihood == pytest.approx(expected, abs=1e-4)


def test_progress_counts_tokens(scorer):
    shown = CountingProgress()
    score(scorer.model, [Pair([1, 2, 3], [4, 5]), Pair([1], [2])], progress=shown)
    assert shown.done == 4 + 1


def test_invalid_arguments_are_rejected(scorer):
    with pytest.raises(ConfigError, match="batch_size: .* got 0"):
        score(scorer.model, [Pair([1], [2])], batch_size=0)
    for pair in (Pair([], [2]), Pair([1], [])):
        with pytest.raises(DataError, match="at least one token in each context"):
            score(scorer.model, [pair])
    assert score(scorer.model, []) == []


def test_nan_logits_are_an_error(scorer):
    broken = copy.deepcopy(scorer.model)
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(PrecisionError, match="NaN logits"):
        score(broken, [Pair([1], [2])])
