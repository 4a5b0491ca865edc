"""Metrics of multiple-choice items and their standard errors."""

from __future__ import annotations

import math

import pytest

from whimbrel.evaluate import Item, Score
from whimbrel.evaluate.tasks import ACCURACY, EXACT_MATCH, NORMALIZED_ACCURACY, PERPLEXITY


def item(gold: int, *lengths: int) -> Item:
    return Item(tuple(("", "") for _ in lengths), gold, lengths)


def scores(*loglikelihoods: float) -> list[Score]:
    return [Score(each, is_greedy=False) for each in loglikelihoods]


def test_accuracy_takes_the_most_likely_choice():
    assert ACCURACY.evaluate(item(1, 5, 5, 5), scores(-3.0, -2.0, -4.0)) == 1.0
    assert ACCURACY.evaluate(item(0, 5, 5, 5), scores(-3.0, -2.0, -4.0)) == 0.0


def test_ties_are_broken_by_order():
    assert ACCURACY.evaluate(item(0, 5, 5), scores(-2.0, -2.0)) == 1.0
    assert NORMALIZED_ACCURACY.evaluate(item(0, 5, 5), scores(-2.0, -2.0)) == 1.0


def test_normalized_accuracy_is_per_character():
    long_and_short = item(0, 20, 4), scores(-10.0, -4.0)
    assert ACCURACY.evaluate(*long_and_short) == 0.0
    assert NORMALIZED_ACCURACY.evaluate(*long_and_short) == 1.0


def test_exact_match_is_greedy():
    assert [EXACT_MATCH.evaluate(item(0, 3), [Score(-9.0, greedy)]) for greedy in (True, False)] == [1.0, 0.0]


def test_standard_error_of_the_mean():
    found = ACCURACY.aggregate([1.0, 0.0, 0.0, 1.0, 1.0])
    assert found.value == pytest.approx(0.6)
    assert found.stderr == pytest.approx(math.sqrt(0.6 * 0.4 / 4))
    assert ACCURACY.aggregate([1.0]) == (1.0, None)


def test_perplexity_is_per_answer():
    logs = [PERPLEXITY.evaluate(item(0, 3), scores(log)) for log in (-1.0, -2.0, -3.0)]
    found = PERPLEXITY.aggregate(logs)
    assert found.value == pytest.approx(math.exp(2))
    assert found.stderr == pytest.approx(math.exp(2) / math.sqrt(3))
    assert PERPLEXITY.aggregate([-800.0, -900.0]).value == math.inf
