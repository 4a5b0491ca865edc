"""Sampling: distributions against transformers, frequencies, batch invariance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.synchronization import forbid_synchronization
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from whimbrel.base.errors import RequestError
from whimbrel.inference import History, SampleRNG, SamplingParams, log_probabilities, sample
from whimbrel.inference.sampling import Sampler, distribution, gumbel_max

VOCAB = 61
NOTHING = History((), 0)
BIAS = {3: 4.0, 8: -100.0}
SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2e-38},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"logit_bias": BIAS},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.7, "min_p": 0.2, "repetition_penalty": 1.3, "logit_bias": BIAS},
]


def sample_counts(
    logits_V: torch.Tensor, sampling: SamplingParams, count: int, history: History = NOTHING
) -> torch.Tensor:
    """How often each token is sampled in `count` tries."""
    rng = SampleRNG(0)
    keys = [rng.key() for _ in range(count)]
    tokens = sample(logits_V.expand(count, -1), [sampling] * count, keys, [history] * count)
    return tokens.bincount(minlength=logits_V.numel())


def hf_processors(sampling: SamplingParams) -> LogitsProcessorList:
    """The equivalent logits processors of transformers, in its order."""
    steps = LogitsProcessorList()
    if sampling.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias.items()]))
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_distributions_equal_those_of_transformers(settings):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, VOCAB, generator=generator) * 3
    histories = torch.randint(VOCAB, (40, 12), generator=generator)
    sampling = SamplingParams(**settings)
    # transformers overflows for tiny temperatures; subtracting the maximum is equivalent.
    given = logits - logits.amax(-1, keepdim=True) if sampling.temperature < 1e-10 else logits
    expected = hf_processors(sampling)(histories, given.clone()).softmax(-1)
    found = distribution(logits, [sampling] * 40, [History(tokens, 5) for tokens in histories.tolist()])
    torch.testing.assert_close(found, expected)
    assert torch.equal(found == 0, expected == 0)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 0.999])
def test_a_large_nucleus_equals_that_of_transformers(top_p):
    """Also if it is larger than TOP_P_CANDIDATES in some rows."""
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(4)) * torch.linspace(0.5, 3, 6)[:, None]
    sampling = SamplingParams(top_p=top_p)
    expected = hf_processors(sampling)(torch.zeros(6, 1, dtype=torch.long), logits.clone()).softmax(-1)
    found = distribution(logits, [sampling] * 6, [NOTHING] * 6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    # The cumulative sum in fp32 rounds differently, so one token more or less may be kept.
    assert ((found > 0) != (expected > 0)).sum(-1).max() <= 1
    assert (found > 0).sum(-1).max() > 1024 or top_p < 0.5


def test_presence_and_frequency_penalties_count_the_output():
    """OpenAI's formula: tokens of the prompt do not count."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    for prompt in ([], [2], [3, 3, 2, 2]):
        found = distribution(logits, [sampling], [History([*prompt, 1, 3, 3, 3], len(prompt))])
        torch.testing.assert_close(found, torch.tensor([[1.0, 2 - 0.75, 3.0, 4 - 1.25]]).softmax(-1))


def test_penalties_combine():
    logits = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    sampling = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    found = distribution(logits, [sampling], [History([1, 3, 3, 0], 2)])
    torch.testing.assert_close(found, torch.tensor([[0.5 - 0.75, -4.0, 3.0, 2 - 0.75]]).softmax(-1))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_token_frequencies_match_the_distribution(settings):
    """Pearson's chi-squared test: at most four standard deviations above the mean, rare tokens merged, fixed seed."""
    logits, count, history = (
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2,
        20_000,
        History((1, 5, 5, 9), 2),
    )
    sampling = SamplingParams(**settings)
    expected = distribution(logits[None], [sampling], [history])[0] * count
    seen = sample_counts(logits, sampling, count, history).float()
    possible = expected > 0
    assert not seen[~possible].any()
    rare = possible & (expected < 5)
    cells = [torch.cat((x[possible & ~rare], x[rare].sum()[None])) for x in (seen, expected)]
    freedom = len(cells[0]) - 1
    statistic = ((cells[0] - cells[1]).square() / cells[1].clamp(min=1)).sum().item()
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"top_k": 0}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.65}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.75}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"min_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.01}, [0, 0, 0, 1]),
        ({"temperature": 0}, [0, 0, 0, 1]),
    ],
)
def test_sampling_parameters_change_frequencies_as_expected(settings, expected):
    found = (sample_counts(torch.tensor([0.1, 0.2, 0.3, 0.4]).log(), SamplingParams(**settings), 4000) / 4000).tolist()
    assert found == pytest.approx(expected, abs=0.03)
    assert [frequency == 0 for frequency in found] == [frequency == 0 for frequency in expected]


def splitmix64(key: int, count: int) -> list[int]:
    """The published reference implementation."""
    numbers = []
    for _ in range(count):
        key = (key + 0x9E3779B97F4A7C15) % 2**64
        mixed = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        numbers.append(mixed ^ (mixed >> 31))
    return numbers


def test_gumbel_max_equals_a_reference_with_splitmix64():
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # as published
    chances = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])
    keys = [0, 1234567, 2**63 - 2, *range(5, 60)]
    waits = [[-math.log1p(-(number >> 11) / 2**53) for number in splitmix64(key, 5)] for key in keys]
    first = [max(range(5), key=lambda token, row=row: float(chances[token]) / row[token]) for row in waits]
    assert gumbel_max(chances.expand(len(keys), -1), keys).tolist() == first
    assert len(set(first)) == 4  # never a token of probability zero


def test_extreme_noise_samples_a_possible_token(monkeypatch):
    """The smallest and the largest noise."""
    for number in (0, 2**53 - 1):
        monkeypatch.setattr("whimbrel.inference.sampling._logical_shift", lambda mixed, bits, n=number: mixed * 0 + n)
        assert gumbel_max(torch.tensor([[0.0, 0.0, 1.0, 0.0]]), [5]).tolist() == [2]


def test_rounding_of_logits_rarely_changes_samples():
    """The order of summation may depend on the batch size; samples should rarely change with it."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50_000, generator=generator)
    others = logits * (1 + 1e-4 * torch.randn(200, 50_000, generator=generator))
    keys = torch.randint(2**63 - 1, (200,), generator=generator).tolist()
    asked = [SamplingParams()] * 200, keys, [NOTHING] * 200
    assert torch.equal(sample(logits.expand(200, -1), *asked), sample(others, *asked))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_are_bitwise_equal_alone_and_in_a_batch(device):
    generator = torch.Generator().manual_seed(2)
    # Many tied logits: a sort order that depends on other rows would show.
    logits = (torch.randn(60, 5000, generator=generator) * 2).bfloat16().to(device)
    samplings = [SamplingParams(**SETTINGS[row % len(SETTINGS)]) for row in range(60)]
    samplings[7::8] = [SamplingParams(temperature=0, frequency_penalty=1.0)] * len(samplings[7::8])
    samplings[3::8] = [SamplingParams(temperature=0)] * len(samplings[3::8])
    histories = [History(tokens, 4) for tokens in torch.randint(5000, (60, 12), generator=generator).tolist()]
    keys = torch.randint(2**63 - 1, (60,), generator=generator).tolist()
    together = sample(logits, samplings, keys, histories).tolist()
    whole = distribution(logits, samplings, histories)
    for row in range(60):
        parts = logits[row : row + 1], samplings[row : row + 1]
        assert sample(*parts, keys[row : row + 1], histories[row : row + 1]).tolist() == [together[row]]
        assert torch.equal(distribution(*parts, histories[row : row + 1])[0], whole[row])
    assert sample(logits.cpu(), samplings, keys, histories).tolist() == together


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_draw_equals_sample_without_synchronizing(device):
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(60, 5000, generator=generator) * 3).to(device)
    settings = [SamplingParams(**SETTINGS[row % len(SETTINGS)]) for row in range(60)]
    samplings = [replace(each, repetition_penalty=1.0, logit_bias=None) for each in settings]
    keys = torch.randint(2**63 - 1, (60,), generator=generator).to(device)
    sampler = Sampler(samplings, logits.device)
    with forbid_synchronization():
        drawn = sampler.draw(logits, keys)
    expected = sample(logits, samplings, keys.tolist(), [NOTHING] * 60)
    assert torch.equal(torch.where(drawn < 0, expected, drawn), expected)
    assert ((drawn >= 0) | torch.tensor([each.top_p == 0.6 for each in samplings], device=device)).all()


def test_greedy_rows_take_the_argmax_without_a_key():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [4.0, 0.0, 0.0, 3.9]])
    nothing = (None, None)
    assert sample(logits, [SamplingParams(temperature=0)] * 2, nothing, [NOTHING] * 2).tolist() == [1, 0]
    penalized = [SamplingParams(temperature=0), SamplingParams(temperature=0, presence_penalty=1.0)]
    assert sample(logits, penalized, nothing, [History((1,), 0), History((0,), 0)]).tolist() == [1, 3]
    biased = [SamplingParams(temperature=0, logit_bias={3: 5.0}), SamplingParams(temperature=0)]
    assert sample(logits, biased, nothing, [NOTHING] * 2).tolist() == [3, 0]
    assert logits.tolist() == [[1.0, 3.0, 3.0, 2.0], [4.0, 0.0, 0.0, pytest.approx(3.9)]]


def test_a_tiny_temperature_is_greedy():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert sample(logits, [SamplingParams(temperature=1e-300)], [9], [NOTHING]).tolist() == [1]
    assert distribution(logits, [SamplingParams(temperature=1e-300)], [NOTHING]).tolist() == [[0, 1, 0]]


def test_a_seed_reproduces_the_random_numbers_and_samples_differ():
    def numbers(*seed: int | None) -> list[float]:
        rng = SampleRNG(*seed)
        return [number for _ in range(5) for number in (rng.key(), rng.uniform())]

    assert numbers(7) == numbers(7) == numbers(7, 0)
    assert len({tuple(numbers(*seed)) for seed in [(7,), (8,), (7, 1), (7, 2), (None,), (None,)]}) == 6
    many = numbers(2**63 - 1, 5)
    assert all(0 <= key < 2**63 - 1 for key in many[::2])
    assert all(0 <= number < 1 for number in many[1::2])


def test_log_probabilities_ignore_sampling_parameters():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]).log()
    (first, best), (second, _) = log_probabilities(logits + 3, torch.tensor([1, 0]), top=2)
    assert (first, second) == (pytest.approx(math.log(0.2)), pytest.approx(math.log(0.7)))
    assert best == [(3, pytest.approx(math.log(0.4))), (2, pytest.approx(math.log(0.3)))]
    assert log_probabilities(logits, torch.tensor([1, 0]))[0][1] == []
    assert len(log_probabilities(logits, torch.tensor([1, 0]), top=9)[0][1]) == 4


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_non_finite_logits_are_rejected(number):
    with pytest.raises(RequestError, match="finite logits"):
        sample(torch.tensor([[0.0, 1.0], [0.0, number]]), [SamplingParams()] * 2, [5] * 2, [NOTHING] * 2)
    with pytest.raises(RequestError, match="finite logits"):
        distribution(torch.tensor([[0.0, 1.0], [0.0, number]]), [SamplingParams()] * 2, [NOTHING] * 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected .* got -1.0"),
        ({"temperature": math.inf}, "temperature: expected .* got inf"),
        ({"top_k": -1}, "top_k: expected .* got -1"),
        ({"top_p": 0.0}, "top_p: expected .* got 0.0"),
        ({"min_p": 1.1}, "min_p: expected .* got 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected .* got 0.0"),
        ({"presence_penalty": math.nan}, "presence_penalty: expected .* got nan"),
        ({"frequency_penalty": math.inf}, "frequency_penalty: expected .* got inf"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: .* token -1"),
        ({"logit_bias": {1: math.inf}}, "logit_bias: .* inf for token 1"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


def test_logit_bias_outside_the_vocabulary_is_rejected():
    SamplingParams(logit_bias={49: 1.0}).check_vocabulary(50)
    with pytest.raises(RequestError, match="logit_bias: .* from 0 to 49, got 50"):
        SamplingParams(logit_bias={50: 1.0}).check_vocabulary(50)


def test_sampling_parameters_are_hashable():
    assert len({SamplingParams(), SamplingParams(logit_bias={1: 2.0}), SamplingParams(), SamplingParams(top_k=3)}) == 3
