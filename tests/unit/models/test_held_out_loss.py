"""The held-out loss: weighted by tokens, independent of the batch size."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from whimbrel.models import GPT, GPTConfig
from whimbrel.models.held_out_loss import HeldOutLoss, LossAccumulator, held_out_loss, perplexity


def test_loss_is_the_mean_over_all_tokens_for_any_batch_size():
    torch.manual_seed(0)
    model = GPT(GPTConfig(context_length=16, vocab_size=50, num_layers=1, embd_size=16, num_heads=2, init_std=0.5))
    x, y = torch.randint(50, (7, 16)), torch.randint(50, (7, 16))
    with torch.no_grad():
        expected = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).item()
    for size in (1, 3, 7):
        batches = [{"input_ids": a, "targets": b} for a, b in zip(x.split(size), y.split(size), strict=True)]
        result = held_out_loss(model, batches)
        assert result.num_tokens == 7 * 16
        assert result.loss == pytest.approx(expected, rel=1e-6)


def test_ignored_targets_are_not_counted():
    torch.manual_seed(0)
    model = GPT(GPTConfig(context_length=16, vocab_size=50, num_layers=1, embd_size=16, num_heads=2, init_std=0.5))
    x, y = torch.randint(50, (3, 16)), torch.randint(50, (3, 16))
    y[:, 5:] = -100
    with torch.no_grad():
        expected = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).item()
    result = held_out_loss(model, [{"input_ids": x, "targets": y}])
    assert result.num_tokens == 3 * 5
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert math.isnan(HeldOutLoss(0.0, 0).bits_per_token)


def test_means_are_weighted_by_tokens_and_batches_without_tokens_are_ignored():
    total = LossAccumulator()
    assert total.result() is None
    total.add_mean(torch.tensor(2.0), torch.tensor(3))
    total.add_mean(torch.tensor(float("nan")), torch.tensor(0))
    total.add(torch.tensor(4.0), torch.tensor(1))
    assert total.result() == HeldOutLoss(10.0, 4)


def test_derived_numbers():
    result = HeldOutLoss(8 * math.log(2), 4)
    assert (result.loss, result.bits_per_token) == (2 * math.log(2), 2)
    assert result.perplexity == pytest.approx(4)
    assert result.bits_per_byte(16) == 0.5
    assert math.isnan(HeldOutLoss(0.0, 0).loss)
    assert perplexity(1e6) == math.inf
