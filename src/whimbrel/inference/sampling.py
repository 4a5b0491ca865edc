"""From logits to the next token: settings per row, one key per draw.

Rows do not influence each other, not even in rounding: what is added up along a row is added as whole numbers, whose
sums are exact in any order. So a request draws the same tokens alone and beside any neighbours. And where the logits
themselves are rounded otherwise (a model may add up a larger batch in another order), a draw seldom notices: a token is
the winner of a race, in which every token's luck is its own. Along a cumulative distribution each would depend on all
before it, and thousands of small differences would add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError

__all__ = [
    "SampleRNG",
    "History",
    "SamplingParams",
    "check_numbers",
    "distribution",
    "draw",
    "log_probabilities",
    "sample",
]

PARTS = 2**40
"""Probabilities are added up in whole numbers of this part of one."""

GOLDEN, *MIX = (0x9E3779B97F4A7C15 - 2**64, (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
"""Of splitmix64 (Steele, Lea, Flood, 2014), as signed numbers: the step of its counter; shifts and factors."""

FEW = 1024
"""Tokens among which `top_p` is looked for first, as sorting all of them takes longer than the model may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a token is drawn: bias, penalties, temperature, top_k, top_p, min_p, in this order."""

    temperature: float = 1.0
    """Above 1 flattens the distribution, below 1 sharpens it; 0 takes the likeliest token."""
    top_k: int | None = None
    """Sample from the `top_k` most likely tokens; None or 0 turns it off, as in transformers."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens that together have probability `top_p`."""
    min_p: float | None = None
    """Draw from tokens that have at least this part of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the prompt or drawn before are divided by this, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens drawn before."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens drawn before, as often as they were."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise RequestError(f"temperature = {self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k is not None and self.top_k < 0:
            raise RequestError(f"top_k = {self.top_k} must be at least 0: 0 turns it off")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RequestError(f"top_p = {self.top_p} must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p = {self.min_p} must be from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise RequestError(f"repetition_penalty = {self.repetition_penalty} must be a positive number: 1 is none")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise RequestError(f"{name} = {getattr(self, name)} must be a finite number: 0 is none")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not math.isfinite(bias):
                raise RequestError(f"logit_bias of token {token} is {bias}: give token ids and finite numbers")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, and no number is drawn."""
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Whether the token taken is the model's own likeliest."""
        return self.greedy and not self.penalised and not self.logit_bias

    @property
    def penalised(self) -> bool:
        """Whether tokens of the text so far are drawn less or more."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a bias of tokens that a model does not have; to be asked before the first token."""
        strange = next((token for token in self.logit_bias or () if token >= vocab_size), None)
        if strange is not None:
            raise RequestError(
                f"logit_bias of token {strange}: the vocabulary's ids run from 0 to {vocab_size - 1}",
                field="logit_bias",
            )


class History(NamedTuple):
    """A text so far, of which penalties count the tokens."""

    tokens: Sequence[int]
    """The prompt and what was drawn after it."""
    prompt: int
    """How many of them are the prompt."""


class SampleRNG:
    """The random numbers of one request, or of one of its samples: the same seed gives the same ones on any device."""

    def __init__(self, seed: int | None = None, sample: int = 0) -> None:
        if seed is not None and not 0 <= seed < 2**63:
            raise RequestError(f"seed = {seed} must be a whole number from 0 to 2**63 - 1")
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:  # the samples of a seed are apart from those of the seeds beside it
            self._generator.manual_seed((seed + sample * 0x9E3779B97F4A7C15) % 2**63)

    def key(self) -> int:
        """The next key to draw a token by, at least 0 and below 2**63 - 1."""
        return int(torch.randint(2**63 - 1, (), generator=self._generator))

    def uniform(self) -> float:
        """The next number, at least 0 and below 1."""
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()


def check_numbers(logits_BV: Tensor) -> None:
    """Refuse to choose among what are no numbers."""
    if not logits_BV.amax(-1).isfinite().all():
        raise RequestError("the model's logits are not numbers: its weights are damaged, or its training diverged")


@torch.no_grad()
def sample(
    logits_BV: Tensor,
    samplings: Sequence[SamplingParams],
    keys: Sequence[int],
    histories: Sequence[History],
) -> Tensor:
    """One token per row, (B,) on the device of the logits.

    Row b is drawn by `keys[b]`, which is not looked at where the row is greedy; `histories[b]` is what its penalties
    count, and is not looked at where it has none.
    """
    check_numbers(logits_BV)
    logits_BV = _adjusted(logits_BV, samplings, histories)
    tokens_B = logits_BV.argmax(-1)
    drawn = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits_BV.device)
        probabilities_RV = _restricted(logits_BV[rows], [samplings[row] for row in drawn])
        tokens_B[rows] = draw(probabilities_RV, [keys[row] for row in drawn])
    return tokens_B


@torch.no_grad()
def draw(probabilities_BV: Tensor, keys: Sequence[int]) -> Tensor:
    """One token of each row, (B,), as often as its probability says.

    Tokens wait for as long as an exponential distribution says, shorter in the measure of their probability; the first
    wins. By how much the probabilities are too large or small together does not matter.
    """
    return (probabilities_BV / _exponential_noise(keys, probabilities_BV)).argmax(-1)


def _exponential_noise(keys: Sequence[int], like_BV: Tensor) -> Tensor:
    """Waiting times (B, V): that of token v comes from number v of the stream of its row's key (splitmix64).

    They are as exact as fp32 can be, however short, and never nothing or for ever.
    """
    counts_V = torch.arange(1, like_BV.size(1) + 1, device=like_BV.device)
    mixed_BV = torch.tensor(keys, device=like_BV.device)[:, None] + counts_V.mul_(GOLDEN)
    for shift, factor in MIX:
        mixed_BV.bitwise_xor_(_shifted(mixed_BV, shift)).mul_(factor)
    uniform_BV = _shifted(mixed_BV, 11).float().add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return uniform_BV.neg_().log1p_().neg_()


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in, as if the numbers had no sign."""
    return (numbers >> bits).bitwise_and_(2 ** (64 - bits) - 1)


@torch.no_grad()
def distribution(logits_BV: Tensor, samplings: Sequence[SamplingParams], histories: Sequence[History]) -> Tensor:
    """The probabilities (B, V) that tokens are drawn with; all of it on one token where a row is greedy."""
    check_numbers(logits_BV)
    logits_BV = _adjusted(logits_BV, samplings, histories)
    likeliest_BV = torch.zeros_like(logits_BV, dtype=torch.float32).scatter(1, logits_BV.argmax(-1, keepdim=True), 1.0)
    drawn = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits_BV.device)
        likeliest_BV[rows] = _restricted(logits_BV[rows], [samplings[row] for row in drawn])
    return likeliest_BV


@torch.no_grad()
def log_probabilities(logits_BV: Tensor, tokens_B: Tensor, top: int = 0) -> list[tuple[float, list[tuple[int, float]]]]:
    """Of each row: the log-probability of its token, and the `top` likeliest tokens with theirs.

    They are those of the model itself, before temperature, penalties and restrictions.
    """
    logs_BV = logits_BV.float().log_softmax(-1)
    own = logs_BV.gather(1, tokens_B[:, None])[:, 0].tolist()
    values, ids = logs_BV.topk(min(top, logs_BV.size(1)), dim=-1)
    best = (list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True))
    return list(zip(own, best, strict=True))


def _adjusted(logits_BV: Tensor, samplings: Sequence[SamplingParams], histories: Sequence[History]) -> Tensor:
    """Logits after bias and penalties, in fp32; as they came where no row asks for either."""
    penalties = [
        (row, token, float(drawn), sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        for row, sampling in enumerate(samplings)
        if sampling.penalised
        for token, drawn in _times_drawn(histories[row]).items()
    ]
    biases = [
        (row, token, bias)
        for row, sampling in enumerate(samplings)
        for token, bias in (sampling.logit_bias or {}).items()
    ]
    if not penalties and not biases:
        return logits_BV
    logits_BV = logits_BV.to(torch.float32, copy=True)
    if biases:
        rows, tokens, bias = (torch.tensor(column, device=logits_BV.device) for column in zip(*biases, strict=True))
        logits_BV[rows, tokens] += bias
    if penalties:
        rows, tokens, *numbers = (
            torch.tensor(column, device=logits_BV.device) for column in zip(*penalties, strict=True)
        )
        drawn, repetition, presence, frequency = numbers
        found = logits_BV[rows, tokens]
        found = torch.where(found > 0, found / repetition, found * repetition)
        logits_BV[rows, tokens] = found - presence * (drawn > 0) - frequency * drawn
    return logits_BV


def _times_drawn(history: History) -> Counter[int]:
    """Each token of a text and how often it was drawn: 0 where it is in the prompt alone."""
    times = Counter(dict.fromkeys(history.tokens[: history.prompt], 0))
    times.update(history.tokens[history.prompt :])
    return times


def _restricted(logits_RV: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """The probabilities of rows that are drawn, after temperature, top_k, top_p and min_p.

    Tokens as likely as the last one that is kept are kept too, so no order among equals has to be settled.
    """
    logits_RV = logits_RV.float()
    lowest = torch.finfo(torch.float32).tiny
    temperatures = torch.tensor([max(lowest, sampling.temperature) for sampling in samplings], device=logits_RV.device)
    # The largest is 0: no temperature, however low, makes infinities of it.
    scaled_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperatures[:, None]
    limited = {row: sampling.top_k for row, sampling in enumerate(samplings) if sampling.top_k}
    if limited:
        rows = torch.tensor(list(limited), device=logits_RV.device)
        scaled_RV[rows] = _keep_count(scaled_RV[rows], list(limited.values()))
    probabilities_RV = scaled_RV.softmax(-1)
    nuclei = {row: sampling.top_p for row, sampling in enumerate(samplings) if sampling.top_p not in (None, 1)}
    shares = [sampling.min_p or 0.0 for sampling in samplings]
    if not nuclei and not any(shares):
        return probabilities_RV
    if nuclei:
        rows = torch.tensor(list(nuclei), device=logits_RV.device)
        scaled_RV[rows] = _keep_mass(scaled_RV[rows], probabilities_RV[rows], [top_p or 1 for top_p in nuclei.values()])
    least_R1 = torch.tensor(shares, device=logits_RV.device)[:, None] * probabilities_RV.amax(-1, keepdim=True)
    return scaled_RV.masked_fill(probabilities_RV < least_R1, -torch.inf).softmax(-1)


def _keep_count(scaled_RV: Tensor, counts: Sequence[int]) -> Tensor:
    """Each row without all but its `counts` largest."""
    places = [min(count, scaled_RV.size(1)) - 1 for count in counts]
    largest_RK = scaled_RV.topk(max(places) + 1).values
    smallest_R1 = largest_RK.gather(1, torch.tensor(places, device=scaled_RV.device)[:, None])
    return scaled_RV.masked_fill(scaled_RV < smallest_R1, -torch.inf)


def _keep_mass(scaled_RV: Tensor, probabilities_RV: Tensor, masses: Sequence[float]) -> Tensor:
    """Each row without all but the fewest likeliest that together have the probability `masses` says."""
    parts_RV, vocab_size = _parts(probabilities_RV), scaled_RV.size(1)
    masses_R1 = torch.tensor([math.ceil(mass * PARTS) for mass in masses], device=scaled_RV.device)[:, None]
    width = min(FEW, vocab_size)
    while True:
        largest_RK, ids_RK = scaled_RV.topk(width)
        parts_RK = parts_RV.gather(1, ids_RK)
        before_RK = parts_RK.cumsum(-1) - parts_RK
        kept_R1 = (before_RK < masses_R1).sum(-1, keepdim=True)
        if width == vocab_size or not (kept_R1 == width).any():
            return scaled_RV.masked_fill(scaled_RV < largest_RK.gather(1, kept_R1 - 1), -torch.inf)
        width = vocab_size


def _parts(probabilities_RV: Tensor) -> Tensor:
    return (probabilities_RV * PARTS).long()
