"""Trainable tokens (LoRA with `trainable_token_indices`) against PEFT: logits, gradients, directories, merging."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tests.parity.test_peft import CLOSE, LLAMA_TARGETS, TARGETS, hf_base, loss_gradients, randomize, save_base
from torch import Tensor

import whimbrel
from whimbrel.base.errors import CheckpointError
from whimbrel.model_io import merge_adapter
from whimbrel.model_io.adapter import load_adapter, save_adapter
from whimbrel.models import GPT, LoraConfig, apply_lora, lora_disabled, resize_vocabulary
from whimbrel.models.lora import token_modules, trainable_tokens

peft = pytest.importorskip("peft", reason="needs the package 'peft': pip install 'whimbrel[hf]'")

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")

CASES = {"llama": ("llama3-rope", False), "llama-tied": ("llama3-rope", True), "gpt2": ("gpt2", True)}
ADDED = 3


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def base(case: str, tmp_path: Path) -> Path:
    family, tied = CASES[case]
    return save_base(family, tmp_path / "base", tie_word_embeddings=tied)


def vocab_size(base: Path) -> int:
    return json.loads((base / "config.json").read_text())["vocab_size"]


def new_ids(base: Path) -> list[int]:
    return [vocab_size(base) + i for i in range(ADDED)]


def token_ids(base: Path) -> Tensor:
    """Sequences with old and new tokens, of which one row also has a repeated one."""
    ids = torch.randint(vocab_size(base) + ADDED, (2, 16), generator=torch.Generator().manual_seed(3))
    ids[:, 3:6] = torch.tensor(new_ids(base))
    ids[0, 9] = new_ids(base)[0]
    return ids


def logits_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def resized(base: Path) -> transformers.PreTrainedModel:
    model = hf_base(base)
    model.resize_token_embeddings(vocab_size(base) + ADDED)
    return model


def peft_model(model: transformers.PreTrainedModel, case: str, indices: object) -> peft.PeftModel:
    torch.manual_seed(1)
    family = CASES[case][0]
    settings = {"r": 4, "target_modules": TARGETS.get(family, LLAMA_TARGETS), "fan_in_fan_out": family == "gpt2"}
    return randomize(peft.get_peft_model(model, peft.LoraConfig(trainable_token_indices=indices, **settings)))


def our_model(base: Path) -> GPT:
    model = resize_vocabulary(whimbrel.load_model(base), vocab_size(base) + ADDED)
    tokens = dict.fromkeys(token_modules(model.config), new_ids(base))
    apply_lora(model, LoraConfig(rank=4, alpha=6), tokens=tokens)
    return randomize(model)


def peft_indices(base: Path, case: str) -> object:
    """The setting that trains the embedding and the head."""
    ids = new_ids(base)
    return ids if CASES[case][1] else {"embed_tokens": ids, "lm_head": ids}


def row_gradients(model: torch.nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Gradients of trained rows, by module of the GPT."""
    gradients = {}
    for name, gradient in loss_gradients(model, ids).items():
        if "trainable_tokens" in name:
            gradients["lm_head" if "lm_head" in name else "transformer.wte"] = gradient
    return gradients


def check_gradients(ours: GPT, theirs: torch.nn.Module, ids: Tensor) -> None:
    expected, found = row_gradients(theirs, ids), row_gradients(ours, ids)
    assert found.keys() == expected.keys() == set(trainable_tokens(ours))
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(found[name], gradient, **CLOSE, msg=name)


def test_peft_loads_our_tokens(base, case, tmp_path):
    """Onto a base model that was resized with `resize_token_embeddings`, whatever its new rows are."""
    ours, ids = our_model(base), token_ids(base)
    save_adapter(ours, tmp_path / "adapter", base_model=str(base))
    theirs = peft.PeftModel.from_pretrained(resized(base), tmp_path / "adapter", is_trainable=True)
    torch.testing.assert_close(logits_of(theirs, ids), logits_of(ours, ids), **CLOSE)
    check_gradients(ours, theirs, ids)
    merged = theirs.merge_and_unload()
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits_of(hf_base(tmp_path / "merged"), ids), logits_of(merged, ids), **CLOSE)


@pytest.mark.parametrize("new", [True, False])
def test_tokens_of_peft_load_here(base, case, new, tmp_path):
    """PEFT saves complete embeddings if they were resized, and only the trained rows otherwise."""
    ids = token_ids(base)
    if new:
        theirs = peft_model(resized(base), case, peft_indices(base, case))
    else:
        theirs, ids = peft_model(hf_base(base), case, [5, 2]), ids % 20
    theirs.save_pretrained(tmp_path / "adapter")
    loaded = whimbrel.load_model(tmp_path / "adapter")
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(theirs, ids), **CLOSE)
    ours = resize_vocabulary(whimbrel.load_model(base), loaded.config.vocab_size)
    load_adapter(ours, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(ours, ids), logits_of(theirs, ids), **CLOSE)
    check_gradients(ours, theirs, ids)
    with theirs.disable_adapter(), lora_disabled(ours):
        torch.testing.assert_close(logits_of(ours, ids), logits_of(theirs, ids), **CLOSE)


def test_new_rows_that_peft_did_not_train(tmp_path):
    """A list trains only the embedding of a model without tied head; the resized head is saved completely."""
    base = save_base("llama3-rope", tmp_path / "base", tie_word_embeddings=False)
    theirs, ids = peft_model(resized(base), "llama", new_ids(base)), token_ids(base)
    theirs.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(
        logits_of(whimbrel.load_model(tmp_path / "adapter"), ids), logits_of(theirs, ids), **CLOSE
    )


def test_saved_tensors_and_settings_are_those_of_peft(base, case, tmp_path):
    from safetensors.torch import load_file

    theirs = peft_model(hf_base(base), case, [5, 2])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = whimbrel.load_model(base)
    load_adapter(ours, tmp_path / "theirs")
    save_adapter(ours, tmp_path / "ours")
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    settings = json.loads((tmp_path / "ours/adapter_config.json").read_text())
    assert settings["trainable_token_indices"] == [5, 2]


def test_a_base_without_the_tokens_is_refused(tmp_path):
    base = save_base("llama3-rope", tmp_path / "base")
    save_adapter(our_model(base), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="trainable tokens from 0 to .*: resize the vocabulary"):
        load_adapter(whimbrel.load_model(base), tmp_path / "adapter")
