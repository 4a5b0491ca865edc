"""Resizing the vocabulary: existing tokens are unchanged, new ones are average tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.models import KINDS, add_noise

from whimbrel.base.errors import ConfigError
from whimbrel.models import GPT, resize_vocabulary
from whimbrel.precision import quantize_


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen3"])
@pytest.mark.parametrize("vocab_size", [98, 112, 113, 200])  # 97 tokens are padded to 112 rows
@pytest.mark.parametrize("tied_head", [True, False])
def test_new_tokens_are_average_tokens(kind: str, vocab_size: int, tied_head: bool) -> None:
    torch.manual_seed(0)
    model = add_noise(GPT(replace(KINDS[kind], tied_head=tied_head)))
    ids = torch.randint(97, (2, 8))
    embedding = model.token_embedding.weight.detach().clone()
    with torch.no_grad():
        before = model(ids).logits
        resized = resize_vocabulary(model, vocab_size)
        after = model(ids).logits
    assert resized is model
    assert model.config.vocab_size == vocab_size == after.size(-1)
    assert model.token_embedding.weight.size(0) == model.config.padded_vocab_size == model.lm_head.out_features
    assert (model.lm_head.weight is model.token_embedding.weight) == tied_head
    assert torch.equal(model.token_embedding.weight[:97], embedding[:97])
    assert torch.equal(model.token_embedding.weight[97], embedding[:97].mean(0))
    assert not model.token_embedding.weight[vocab_size:].any()
    assert not model.lm_head.weight[vocab_size:].any()
    # The matrix product may be blocked differently for another number of rows; fp32 sums of 32 products.
    torch.testing.assert_close(after[..., :97], before, rtol=0, atol=1e-5)
    expected = before.mean(-1, keepdim=True).expand_as(after[..., 97:])
    torch.testing.assert_close(after[..., 97:], expected, rtol=0, atol=1e-5)
    loss = model(torch.full((1, 4), vocab_size - 1), labels=torch.full((1, 4), vocab_size - 1)).loss
    loss.backward()
    assert model.token_embedding.weight.grad.shape == model.token_embedding.weight.shape
    reloaded = GPT(model.config)
    reloaded.load_state_dict(model.state_dict())


def test_the_same_size_changes_nothing_and_a_smaller_one_is_rejected() -> None:
    model = GPT(KINDS["gpt2"])
    weight = model.token_embedding.weight
    assert resize_vocabulary(model, 97).token_embedding.weight is weight
    with pytest.raises(ConfigError, match="at least 97 tokens, got 96"):
        resize_vocabulary(model, 96)
    frozen = GPT(KINDS["llama3"]).requires_grad_(False)
    assert not resize_vocabulary(frozen, 300).token_embedding.weight.requires_grad


def test_a_quantized_head_is_rejected() -> None:
    model = GPT(replace(KINDS["llama3"], tied_head=False))
    quantize_(model, "int8", skip=())
    with pytest.raises(ConfigError, match="the head is quantized"):
        resize_vocabulary(model, 200)
    assert model.config.vocab_size == 97
