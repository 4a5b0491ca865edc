"""From logits to the next token: sampling parameters per row, one random key per sampled token.

Rows do not affect each other, not even by rounding: sums along a row are integer sums, which are exact in any
order. So a request gets the same tokens alone and in any batch. If the logits themselves are rounded differently (a
model may add up a larger batch in another order), samples rarely change: tokens are sampled with the Gumbel-max trick,
where the noise of each token is independent. With a cumulative distribution each token would depend on all before it,
and thousands of small differences would add up.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError

__all__ = [
    "History",
    "SampleRNG",
    "Sampler",
    "SamplingParams",
    "check_finite",
    "distribution",
    "gumbel_max",
    "log_probabilities",
    "non_finite_error",
    "sample",
]

FIXED_POINT_SCALE = 2**40
"""Probabilities are added up as integers, in units of 1 / FIXED_POINT_SCALE."""

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""Counter increment of splitmix64 (Steele, Lea, Flood, 2014)."""

SPLITMIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
"""Shift and factor of each mixing round of splitmix64, as signed 64-bit integers."""

TOP_P_CANDIDATES = 1024
"""Tokens among which the `top_p` nucleus is searched first: sorting a large vocabulary can be slower than the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters: bias, penalties, temperature, top_k, top_p, min_p, applied in this order."""

    temperature: float = 1.0
    """Above 1 flattens the distribution, below 1 sharpens it; 0 is greedy decoding."""
    top_k: int | None = None
    """Sample from the `top_k` most likely tokens; None or 0 turns it off, as in transformers."""
    top_p: float | None = None
    """Sample from the smallest set of most likely tokens whose probabilities sum to at least `top_p`."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the prompt or the output are divided by this, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, once per occurrence."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise RequestError(f"temperature: expected 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_k is not None and self.top_k < 0:
            raise RequestError(f"top_k: expected at least 0 (0 turns it off), got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RequestError(f"top_p: expected a number in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p: expected a number from 0 to 1, got {self.min_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise RequestError(f"repetition_penalty: expected a positive number, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise RequestError(f"{name}: expected a finite number, got {getattr(self, name)}")
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or not math.isfinite(bias):
                raise RequestError(f"logit_bias: expected token ids and finite numbers, got {bias} for token {token}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without random numbers."""
        return self.temperature == 0

    @property
    def is_argmax(self) -> bool:
        """Whether the token is the argmax of the unmodified logits."""
        return self.greedy and not self.has_penalties and not self.logit_bias

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError if `logit_bias` has token ids outside the vocabulary."""
        unknown = next((token for token in self.logit_bias or () if token >= vocab_size), None)
        if unknown is not None:
            raise RequestError(
                f"logit_bias: expected token ids from 0 to {vocab_size - 1}, got {unknown}", field="logit_bias"
            )


class History(NamedTuple):
    """The tokens that penalties are computed from."""

    tokens: Sequence[int]
    """The prompt and the output so far."""
    prompt_length: int


class SampleRNG:
    """Random number generator of one sample of a request; a seed gives the same numbers on every device."""

    def __init__(self, seed: int | None = None, sample: int = 0) -> None:
        if seed is not None and not 0 <= seed < 2**63:
            raise RequestError(f"seed: expected an integer from 0 to 2**63 - 1, got {seed}")
        self._generator = torch.Generator()
        self._keys: deque[int] = deque()  # generated by `next_keys`, not used yet
        if seed is None:
            self._generator.seed()
        else:  # so that sample 1 of a seed is not sample 0 of the next seed
            self._generator.manual_seed((seed + sample * GOLDEN_GAMMA) % 2**63)

    def key(self) -> int:
        """The next key for `sample` or `gumbel_max`, in [0, 2**63 - 1)."""
        return self._keys.popleft() if self._keys else self._random_key()

    def next_keys(self, count: int) -> list[int]:
        """What the next calls of `key` will return."""
        while len(self._keys) < count:
            self._keys.append(self._random_key())
        return list(islice(self._keys, count))

    def _random_key(self) -> int:
        return int(torch.randint(2**63 - 1, (), generator=self._generator))

    def uniform(self) -> float:
        """The next random number in [0, 1)."""
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()


def non_finite_error() -> RequestError:
    """The error for logits that are NaN or infinite."""
    return RequestError("expected finite logits, got NaN or infinity: the weights are damaged or training diverged")


def check_finite(logits_BV: Tensor) -> None:
    """Raise RequestError if a row of logits has no finite maximum."""
    if not logits_BV.amax(-1).isfinite().all():
        raise non_finite_error()


@torch.no_grad()
def sample(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    keys: Sequence[int],
    histories: Sequence[History],
    *,
    check: bool = True,
) -> Tensor:
    """One token per row, (B,) on the device of the logits.

    Row b uses `keys[b]` unless it is greedy, and `histories[b]` if it has penalties. `check` raises RequestError on
    logits that are not finite.
    """
    if check:
        check_finite(logits_BV)
    logits_BV = _apply_bias_and_penalties(logits_BV, params, histories)
    sampler, tokens_B = Sampler(params, logits_BV.device), logits_BV.argmax(-1)
    if sampler.num_rows:
        rows = sampler.rows
        tokens_B[rows] = gumbel_max(
            sampler.probabilities(logits_BV[rows]), torch.tensor(keys, device=rows.device)[rows]
        )
    return tokens_B


class Sampler:
    """Samples rows with the same parameters each time, without bias and penalties.

    The parameters are on the device, so that `draw` does not synchronize with the host.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        sampled = [(row, each) for row, each in enumerate(params) if not each.greedy]
        self.num_rows = len(sampled)
        self.rows = torch.tensor([row for row, _ in sampled], dtype=torch.long, device=device)
        """The rows that are not greedy."""

        def column(values: Iterable[float]) -> Tensor:
            return torch.tensor([*values], device=device)[:, None]

        smallest = torch.finfo(torch.float32).tiny
        self._temperatures = column(max(smallest, each.temperature) for _, each in sampled)
        counts = {index: each.top_k for index, (_, each) in enumerate(sampled) if each.top_k}
        masses = {index: each.top_p or 1 for index, (_, each) in enumerate(sampled) if each.top_p not in (None, 1)}
        fractions = [each.min_p or 0.0 for _, each in sampled]
        self._max_count = max(counts.values(), default=0)
        self._count_rows, self._counts = torch.tensor([*counts], device=device), column(counts.values())
        self._mass_rows = torch.tensor([*masses], device=device) if masses else None
        self._masses = column(math.ceil(mass * FIXED_POINT_SCALE) for mass in masses.values())
        self._fractions = column(fractions) if masses or any(fractions) else None

    def probabilities(self, logits_RV: Tensor) -> Tensor:
        """Probabilities of the rows that are not greedy, after temperature, top_k, top_p and min_p."""
        probabilities_RV, is_complete_R = self._filter(logits_RV, TOP_P_CANDIDATES)
        if is_complete_R is not None and not is_complete_R.all():
            probabilities_RV, _ = self._filter(logits_RV, logits_RV.size(1))
        return probabilities_RV

    @torch.no_grad()
    def draw(self, logits_BV: Tensor, keys_B: Tensor) -> Tensor:
        """One token per row, (B,); -1 if its nucleus (`top_p`) has TOP_P_CANDIDATES tokens or more."""
        tokens_B, rows = logits_BV.argmax(-1), self.rows
        if self.num_rows:
            probabilities_RV, is_complete_R = self._filter(logits_BV[rows], TOP_P_CANDIDATES)
            tokens_R = gumbel_max(probabilities_RV, keys_B[rows])
            tokens_B[rows] = tokens_R if is_complete_R is None else torch.where(is_complete_R, tokens_R, -1)
        return tokens_B

    def _filter(self, logits_RV: Tensor, nucleus_width: int) -> tuple[Tensor, Tensor | None]:
        """Probabilities, and whether each nucleus has less than `nucleus_width` tokens; None if all have.

        Tokens tied with the last one kept are kept too, so the result does not depend on the order of ties.
        """
        logits_RV = logits_RV.float()
        # The maximum becomes 0, so no temperature, however low, overflows.
        scaled_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / self._temperatures
        if self._max_count:
            rows = self._count_rows
            scaled_RV[rows] = _keep_top_k(scaled_RV[rows], self._counts, self._max_count)
        probabilities_RV = scaled_RV.softmax(-1)
        if self._fractions is None:
            return probabilities_RV, None
        is_complete_R = None
        if (rows_M := self._mass_rows) is not None:
            width = min(nucleus_width, logits_RV.size(1))
            kept_MV, fits_M = _keep_top_p(scaled_RV[rows_M], probabilities_RV[rows_M], self._masses, width)
            scaled_RV[rows_M] = kept_MV
            if width < logits_RV.size(1):
                is_complete_R = torch.ones(len(logits_RV), dtype=torch.bool, device=logits_RV.device)
                is_complete_R[rows_M] = fits_M
        minimum_R1 = self._fractions * probabilities_RV.amax(-1, keepdim=True)
        return scaled_RV.masked_fill(probabilities_RV < minimum_R1, -torch.inf).softmax(-1), is_complete_R


@torch.no_grad()
def gumbel_max(probabilities_BV: Tensor, keys_B: Tensor | Sequence[int]) -> Tensor:
    """One token per row, (B,), sampled from probabilities that need not be normalized.

    argmax(log p + Gumbel noise), written as argmax(p / exponential noise): the logarithm is monotonic.
    """
    keys_B = torch.as_tensor(keys_B, device=probabilities_BV.device)
    return (probabilities_BV / _exponential_noise(keys_B, probabilities_BV)).argmax(-1)


def _exponential_noise(keys_B: Tensor, like_BV: Tensor) -> Tensor:
    """Exponential noise (B, V): token v of a row uses number v of the splitmix64 stream of the row's key.

    Accurate to fp32 however small, and never 0 or infinite.
    """
    counts_V = torch.arange(1, like_BV.size(1) + 1, device=like_BV.device)
    mixed_BV = keys_B[:, None] + counts_V.mul_(GOLDEN_GAMMA - 2**64)
    for shift, factor in SPLITMIX_ROUNDS:
        mixed_BV.bitwise_xor_(_logical_shift(mixed_BV, shift)).mul_(factor)
    uniform_BV = _logical_shift(mixed_BV, 11).float().add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return uniform_BV.neg_().log1p_().neg_()


def _logical_shift(numbers: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, as if the numbers were unsigned."""
    return (numbers >> bits).bitwise_and_(2 ** (64 - bits) - 1)


@torch.no_grad()
def distribution(logits_BV: Tensor, params: Sequence[SamplingParams], histories: Sequence[History]) -> Tensor:
    """The probabilities (B, V) that tokens are sampled with; one-hot for greedy rows."""
    check_finite(logits_BV)
    logits_BV = _apply_bias_and_penalties(logits_BV, params, histories)
    probabilities_BV = torch.zeros_like(logits_BV, dtype=torch.float32)
    probabilities_BV.scatter_(1, logits_BV.argmax(-1, keepdim=True), 1.0)
    sampler = Sampler(params, logits_BV.device)
    if sampler.num_rows:
        probabilities_BV[sampler.rows] = sampler.probabilities(logits_BV[sampler.rows])
    return probabilities_BV


@torch.no_grad()
def log_probabilities(logits_BV: Tensor, tokens_B: Tensor, top: int = 0) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each row: the log-probability of its token, and the `top` most likely tokens with theirs.

    Computed from the raw logits, before temperature, penalties and top-k/top-p/min-p filtering. With `top` 1 it is the
    token of greedy decoding, even if several are equally likely.
    """
    logs_BV = logits_BV.float().log_softmax(-1)
    token_logprobs = logs_BV.gather(1, tokens_B[:, None])[:, 0].tolist()
    ids = logits_BV.argmax(-1, keepdim=True) if top == 1 else logs_BV.topk(min(top, logs_BV.size(1)), dim=-1).indices
    values = logs_BV.gather(1, ids)
    best = (list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True))
    return list(zip(token_logprobs, best, strict=True))


def _apply_bias_and_penalties(
    logits_BV: Tensor, params: Sequence[SamplingParams], histories: Sequence[History]
) -> Tensor:
    """Logits after bias and penalties, in fp32; the same tensor if no row has either."""
    penalties = [
        (row, token, float(count), each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
        for row, each in enumerate(params)
        if each.has_penalties
        for token, count in _output_counts(histories[row]).items()
    ]
    biases = [(row, token, bias) for row, each in enumerate(params) for token, bias in (each.logit_bias or {}).items()]
    if not penalties and not biases:
        return logits_BV
    logits_BV = logits_BV.to(torch.float32, copy=True)
    if biases:
        rows, tokens, bias = (torch.tensor(column, device=logits_BV.device) for column in zip(*biases, strict=True))
        logits_BV[rows, tokens] += bias
    if penalties:
        rows, tokens, *penalty_columns = (
            torch.tensor(column, device=logits_BV.device) for column in zip(*penalties, strict=True)
        )
        counts, repetition, presence, frequency = penalty_columns
        selected = logits_BV[rows, tokens]
        selected = torch.where(selected > 0, selected / repetition, selected * repetition)
        logits_BV[rows, tokens] = selected - presence * (counts > 0) - frequency * counts
    return logits_BV


def _output_counts(history: History) -> Counter[int]:
    """Each token of the prompt and the output, and how often it is in the output."""
    counts = Counter(dict.fromkeys(history.tokens[: history.prompt_length], 0))
    counts.update(history.tokens[history.prompt_length :])
    return counts


def _keep_top_k(scaled_RV: Tensor, counts_R1: Tensor, max_count: int) -> Tensor:
    """-inf for all but the `counts` largest of each row."""
    width = min(max_count, scaled_RV.size(1))
    largest_RK = scaled_RV.topk(width).values
    smallest_R1 = largest_RK.gather(1, counts_R1.clamp(max=width) - 1)
    return scaled_RV.masked_fill(scaled_RV < smallest_R1, -torch.inf)


def _keep_top_p(scaled_RV: Tensor, probabilities_RV: Tensor, masses_R1: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """-inf for all but the fewest most likely tokens of each row whose probabilities sum to at least `masses`.

    They are searched among the `width` most likely; also returns whether there are fewer, so that none is missed.
    """
    units_RV = (probabilities_RV * FIXED_POINT_SCALE).long()
    largest_RK, ids_RK = scaled_RV.topk(width)
    units_RK = units_RV.gather(1, ids_RK)
    before_RK = units_RK.cumsum(-1) - units_RK
    kept_R1 = (before_RK < masses_R1).sum(-1, keepdim=True)
    return scaled_RV.masked_fill(scaled_RV < largest_RK.gather(1, kept_R1 - 1), -torch.inf), kept_R1[:, 0] < width
