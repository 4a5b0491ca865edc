"""Paths that can be loaded: runs, checkpoints, model directories, tokenizer files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import whimbrel
from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.checkpoint import CheckpointManager, SharingPattern, StateComponent, checkpoint_path
from whimbrel.model_io import load_weights, locate_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.tokenization import Tokenizer, train_tokenizer

SHAPE = GPTConfig(context_length=8, vocab_size=300, num_layers=1, embd_size=8, num_heads=1)


class Saveable:
    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    def state_dict(self):
        return dict(self.model.named_parameters())

    def load_state_dict(self, state):
        self.model.load_state_dict(state, strict=False)

    def save_directory(self, state, folder):
        whimbrel.save_model(self.model, folder, self.tokenizer, state=state)

    def load_directory(self, folder):
        load_weights(self.model, folder)


@pytest.fixture(scope="module")
def models() -> dict[int, GPT]:
    torch.manual_seed(0)
    return {step: GPT(SHAPE) for step in (5, 10, 15)}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["to be or not to be"] * 9, vocab_size=270)


@pytest.fixture
def run(models, tokenizer, tmp_path) -> Path:
    """A run with three checkpoints, of which the newest is incomplete."""
    for step, model in models.items():
        component = StateComponent("model", Saveable(model, tokenizer), SharingPattern.GLOBAL)
        CheckpointManager(tmp_path).save(step, [component])
    (checkpoint_path(tmp_path, 15) / "manifest.json").unlink()
    return tmp_path


def test_run_loads_its_newest_intact_checkpoint(models, tokenizer, run):
    assert locate_model(run).directory == checkpoint_path(run, 10) / "model"
    assert torch.equal(whimbrel.load_model(str(run)).lm_head.weight, models[10].lm_head.weight)
    assert whimbrel.load_tokenizer(str(run)).fingerprint == tokenizer.fingerprint


def test_checkpoint_loads_its_model(models, tokenizer, run):
    older = checkpoint_path(run, 5)
    assert torch.equal(whimbrel.load_model(older).lm_head.weight, models[5].lm_head.weight)
    assert whimbrel.load_tokenizer(older).fingerprint == tokenizer.fingerprint


def test_model_directory_with_a_checkpoints_folder_is_not_a_run(models, run):
    directory = run / "mine"
    whimbrel.save_model(models[5], directory)
    (directory / "checkpoints").mkdir()
    assert locate_model(directory).directory == directory


def test_tokenizer_loads_by_name_file_or_directory(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert whimbrel.load_tokenizer().vocab_size == whimbrel.load_tokenizer("gpt2").vocab_size == 50257
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert whimbrel.load_tokenizer(path).fingerprint == tokenizer.fingerprint


def test_paths_without_a_model_or_tokenizer_are_rejected(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for load in (whimbrel.load_model, whimbrel.load_tokenizer):
        with pytest.raises(CheckpointError, match="has no complete checkpoint yet"):
            load(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="only damaged checkpoints .*whimbrel verify"):
        whimbrel.load_model(tmp_path)
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "config.toml").touch()  # a dry run
    with pytest.raises(CheckpointError, match="started has no complete checkpoint yet"):
        whimbrel.load_model(tmp_path / "started")
    with pytest.raises(CheckpointError, match="no run or model at"):
        whimbrel.load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no tokenizer at"):
        whimbrel.load_tokenizer(tmp_path / "nowhere")


def test_directory_with_only_a_tokenizer(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    with pytest.raises(CheckpointError, match="has no config.json: expected a run"):
        locate_model(tmp_path)
    assert whimbrel.load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
