"""From the scores of an item to a number, and from the numbers of all items to one with its standard error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from whimbrel.evaluate.scoring import Score

__all__ = ["Estimate", "Item", "Metric", "accuracy", "exact", "normalised_accuracy", "perplexity_per_item"]


@dataclass(frozen=True, slots=True)
class Item:
    """One question: what to score, and which of them is right."""

    pairs: tuple[tuple[str, str], ...]
    """Context and continuation of each choice."""
    gold: int
    lengths: tuple[int, ...]
    """The characters of each choice."""


class Estimate(NamedTuple):
    """A number that was measured on a sample of all the items there could be."""

    value: float
    stderr: float | None
    """None where one item tells nothing of the spread."""


class Metric(NamedTuple):
    """How an item is judged, and how judgements are summed up."""

    judge: Callable[[Item, Sequence[Score]], float]
    combine: Callable[[Sequence[float]], Estimate]


def _mean(values: Sequence[float]) -> Estimate:
    """The mean, and the standard deviation of the sample over the square root of its size."""
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), spread)


def _exp_of_negative_mean(values: Sequence[float]) -> Estimate:
    """Perplexity of log-likelihoods; its error is that of the mean, carried through the exponential to first order."""
    mean, spread = _mean(values)
    value = math.exp(-mean) if mean > -700 else math.inf
    return Estimate(value, None if spread is None else value * spread)


def _likeliest(values: Sequence[float]) -> int:
    """The first of the highest."""
    return max(range(len(values)), key=values.__getitem__)


def _right(item: Item, scores: Sequence[Score]) -> float:
    return float(_likeliest([each.loglikelihood for each in scores]) == item.gold)


def _right_by_length(item: Item, scores: Sequence[Score]) -> float:
    per_character = [each.loglikelihood / length for each, length in zip(scores, item.lengths, strict=True)]
    return float(_likeliest(per_character) == item.gold)


accuracy = Metric(_right, _mean)
"""The likeliest choice is the right one."""
normalised_accuracy = Metric(_right_by_length, _mean)
"""The choice that is likeliest per character is: a long answer has many chances to be unlikely."""
exact = Metric(lambda item, scores: float(scores[item.gold].greedy), _mean)
"""Greedy decoding would write the right answer."""
perplexity_per_item = Metric(lambda item, scores: scores[item.gold].loglikelihood, _exp_of_negative_mean)
"""The exponential of the mean negative log-likelihood of whole answers, however many tokens they have."""
