"""Resizing the vocabulary: shapes and logits are those of transformers' `resize_token_embeddings`."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.parity.conftest import SHAPES
from tests.support.models import add_noise

from whimbrel.model_io import load_model, save_model
from whimbrel.models import resize_vocabulary


@pytest.mark.parametrize("family", ["gpt2", "llama2", "smollm", "qwen3"])
@pytest.mark.parametrize("vocab_size", [103, 150])
def test_shapes_and_logits_match_transformers(family: str, vocab_size: int, tmp_path, ids: torch.Tensor) -> None:
    name, settings = SHAPES[family]
    torch.manual_seed(0)
    theirs = add_noise(
        transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)), 0.1
    ).eval()
    theirs.save_pretrained(tmp_path / "base")
    ours = resize_vocabulary(load_model(tmp_path / "base"), vocab_size)
    theirs.resize_token_embeddings(vocab_size, mean_resizing=True)
    save_model(ours, tmp_path / "resized")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "resized").eval()
    shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    assert {key: tuple(value.shape) for key, value in saved.state_dict().items()} == shapes
    assert saved.config.vocab_size == theirs.config.vocab_size == vocab_size
    tied = [model.get_input_embeddings().weight is model.get_output_embeddings().weight for model in (saved, theirs)]
    assert tied == [settings.get("tie_word_embeddings", family == "gpt2")] * 2
    new_ids = torch.cat((ids, torch.full((2, 1), vocab_size - 1)), dim=1)
    with torch.no_grad():
        logits = ours(new_ids).logits
        torch.testing.assert_close(saved(new_ids).logits, logits, rtol=0, atol=1e-4)
        # transformers adds noise to the mean: a covariance of 1e-9 times that of the embedding.
        torch.testing.assert_close(theirs(new_ids).logits, logits, rtol=0, atol=1e-2)
