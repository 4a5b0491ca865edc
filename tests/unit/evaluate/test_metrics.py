"""What is right, and how sure a mean is."""

from __future__ import annotations

import math

import pytest

from whimbrel.evaluate import Item, Score
from whimbrel.evaluate.metrics import accuracy, exact, normalised_accuracy, perplexity_per_item


def item(gold: int, *lengths: int) -> Item:
    return Item(tuple(("", "") for _ in lengths), gold, lengths)


def scores(*loglikelihoods: float) -> list[Score]:
    return [Score(each, greedy=False) for each in loglikelihoods]


def test_the_likeliest_choice_answers():
    assert accuracy.judge(item(1, 5, 5, 5), scores(-3.0, -2.0, -4.0)) == 1.0
    assert accuracy.judge(item(0, 5, 5, 5), scores(-3.0, -2.0, -4.0)) == 0.0


def test_the_first_of_equals_answers():
    assert accuracy.judge(item(0, 5, 5), scores(-2.0, -2.0)) == 1.0
    assert normalised_accuracy.judge(item(0, 5, 5), scores(-2.0, -2.0)) == 1.0


def test_length_is_taken_out():
    long_and_short = item(0, 20, 4), scores(-10.0, -4.0)
    assert accuracy.judge(*long_and_short) == 0.0
    assert normalised_accuracy.judge(*long_and_short) == 1.0


def test_exact_is_what_greedy_decoding_writes():
    assert [exact.judge(item(0, 3), [Score(-9.0, greedy)]) for greedy in (True, False)] == [1.0, 0.0]


def test_the_error_of_a_mean_is_that_of_a_sample():
    found = accuracy.combine([1.0, 0.0, 0.0, 1.0, 1.0])
    assert found.value == pytest.approx(0.6)
    assert found.stderr == pytest.approx(math.sqrt(0.6 * 0.4 / 4))
    assert accuracy.combine([1.0]) == (1.0, None)


def test_perplexity_is_of_whole_answers():
    logs = [perplexity_per_item.judge(item(0, 3), scores(log)) for log in (-1.0, -2.0, -3.0)]
    found = perplexity_per_item.combine(logs)
    assert found.value == pytest.approx(math.exp(2))
    assert found.stderr == pytest.approx(math.exp(2) / math.sqrt(3))
    assert perplexity_per_item.combine([-800.0, -900.0]).value == math.inf
