"""Packed samples: positions restart, attention stays within a sample, gradients equal those of separate samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.models import KINDS, add_noise
from torch import Tensor

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.cache import DynamicCache
from whimbrel.models import GPT, IGNORE_INDEX
from whimbrel.models.gpt import GPTStage

LENGTHS = (9, 3, 12)
SUMMATION_ERROR = 4e-6
"""fp32 sums of a few hundred terms in two orders, relative to the largest gradient: about 32 eps."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def samples() -> list[Tensor]:
    return [torch.randint(97, (length,)) for length in LENGTHS]


def packed(parts: list[Tensor]) -> dict[str, Tensor]:
    """One row with all samples; targets are shifted within each."""
    return {
        "input_ids": torch.cat(parts)[None],
        "targets": torch.cat([shifted(part) for part in parts])[None],
        "position_ids": torch.cat([torch.arange(len(part)) for part in parts])[None],
        "documents": torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])[None],
    }


def shifted(sample: Tensor) -> Tensor:
    return torch.cat([sample[1:], torch.tensor([IGNORE_INDEX])])


def gradients(model: GPT, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    model.zero_grad()
    for batch in batches:
        model(**batch, num_items_in_batch=sum(LENGTHS) - len(LENGTHS)).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("with_documents", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "mistral", "gpt2-fast"])
def test_gradients_of_a_packed_row_are_the_sum_of_those_of_its_samples(kind, with_documents):
    model, parts = add_noise(GPT(KINDS[kind])), samples()
    row = packed(parts)
    if not with_documents:
        del row["documents"]
    expected = gradients(model, [{"input_ids": part[None], "targets": shifted(part)[None]} for part in parts])
    tolerance = SUMMATION_ERROR * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients(model, [row]).items():
        torch.testing.assert_close(gradient, expected[name], atol=tolerance, rtol=0, msg=name)


def test_learned_positions_need_position_ids():
    model, parts = add_noise(GPT(KINDS["gpt2"])), samples()
    row = packed(parts)
    apart = torch.cat([model(part[None]).logits[0] for part in parts])
    together = model(row["input_ids"], documents=row["documents"], position_ids=row["position_ids"]).logits[0]
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(row["input_ids"], documents=row["documents"]).logits[0], apart, atol=1e-2)


def test_padding_after_packed_samples():
    model, parts = add_noise(GPT(KINDS["mistral"])), samples()
    ids, positions = (packed(parts)[name] for name in ("input_ids", "position_ids"))
    mask = torch.ones_like(ids)
    mask[:, -LENGTHS[-1] :] = 0
    logits = model(ids, position_ids=positions, attention_mask=mask).logits[0, : LENGTHS[0] + LENGTHS[1]]
    apart = torch.cat([model(part[None]).logits[0] for part in parts[:2]])
    torch.testing.assert_close(logits, apart, atol=1e-5, rtol=1e-5)
    mask = torch.ones_like(ids)
    mask[:, 4] = 0  # no other token attends to it
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 97
    kept = [index for index in range(ids.size(1)) if index != 4]
    one, other = (model(x, position_ids=positions, attention_mask=mask).logits[:, kept] for x in (ids, changed))
    assert torch.equal(one, other)


def test_consecutive_positions_compute_the_same_function_as_none():
    model, ids = add_noise(GPT(KINDS["mistral"])), torch.randint(97, (2, 20))
    positions = torch.arange(20).expand(2, 20)
    torch.testing.assert_close(model(ids, position_ids=positions).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_pipeline_stages_take_position_ids(kind):
    model, row = add_noise(GPT(KINDS[kind])), packed(samples())
    expected = model(**row, num_items_in_batch=1).loss
    middle, count = 1, model.config.num_layers
    first, last = (GPTStage(model, layers) for layers in (range(middle), range(middle, count)))
    inputs = {name: row[name] for name in ("targets", "documents", "position_ids")}
    torch.testing.assert_close(last(first(row["input_ids"], **inputs), **inputs)[0], expected)


def test_invalid_position_ids_are_rejected():
    model = GPT(replace(KINDS["llama3"], context_length=32))
    ids = torch.randint(97, (2, 20))
    with pytest.raises(DataError, match=r"position_ids of the shape of input_ids, \[2, 20\], got \[1, 20\]"):
        model(ids, position_ids=torch.arange(20)[None])
    with pytest.raises(DataError, match="position_ids from 0 to 31, got 32"):
        model(ids, position_ids=torch.full_like(ids, 32))
    with pytest.raises(DataError, match="position_ids from 0 to 31, got -1"):
        model(ids, position_ids=torch.full_like(ids, -1))
    with pytest.raises(ConfigError, match="position_ids cannot be combined with a cache"):
        model(ids, cache=DynamicCache(), position_ids=torch.zeros_like(ids))
