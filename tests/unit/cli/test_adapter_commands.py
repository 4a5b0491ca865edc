"""Commands on a run with adapters: chat, eval, finalize, export, and their options."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.commands import whimbrel
from tests.support.models import add_noise

from whimbrel.evaluate import Scorer, perplexity
from whimbrel.model_io import export_hf, load_model, save_adapter, save_model
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora
from whimbrel.models.lora import lora_parameters
from whimbrel.tokenization import ChatTemplate

TEXT = "To be, or not to be, that is the question. " * 20


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shape = GPTConfig(context_length=64, vocab_size=257, num_layers=1, embd_size=128, num_heads=2, tied_head=False)
    save_model(add_noise(GPT(shape), 0.05), tmp_path / "base", byte_tokenizer())
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    model = load_model(base)
    apply_lora(model, LoraConfig(rank=2))
    with torch.no_grad():
        for _, parameter in lora_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2)
    save_adapter(model, tmp_path / "adapter")
    ChatTemplate("<{{ messages[-1]['content'] }}>").save(tmp_path / "adapter")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "adapter"


@pytest.fixture
def merged(adapter: Path, tmp_path: Path) -> Path:
    export_hf(adapter, tmp_path / "merged")
    return tmp_path / "merged"


def test_chat_answers_as_the_merged_model(adapter, merged, monkeypatch, capsys):
    answers = []
    for path in (adapter, merged):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert whimbrel("chat", path, "--temperature", 0, "--max-new-tokens", 12, "--device", "cpu") == 0
        answers.append(capsys.readouterr().out)
    assert answers[0].strip()
    assert answers[0] == answers[1]


def test_eval_scores_as_the_merged_model(adapter, merged, base, tmp_path):
    moved = base.rename(tmp_path / "moved")
    options = ("--text", tmp_path / "text.txt", "--device", "cpu", "--out", tmp_path / "out.json")
    assert whimbrel("eval", adapter, "--base", moved, *options) == 0
    written = json.loads((tmp_path / "out.json").read_text())["texts"]
    [result] = written.values()
    assert result["bits_per_byte"] == pytest.approx(perplexity(Scorer.load(merged), [TEXT]).bits_per_byte, rel=1e-5)
    assert result["bits_per_byte"] != pytest.approx(perplexity(Scorer.load(moved), [TEXT]).bits_per_byte, rel=1e-2)


def test_finalize_tells_the_loss_before_and_after_merging_and_quantizing(adapter, tmp_path, capsys):
    options = ("--data", tmp_path / "text.txt", "--device", "cpu")
    assert whimbrel("finalize", adapter, tmp_path / "int4", "--merge", "--quantize", "int4", *options) == 0
    assert whimbrel("finalize", adapter, tmp_path / "dense", "--merge", *options) == 0
    found = {name: json.loads((tmp_path / name / "finalize.json").read_text()) for name in ("int4", "dense")}
    losses = {(n, side): found[n][side]["measured"]["loss"] for n in found for side in ("before", "after")}
    assert losses["int4", "before"] == losses["dense", "before"] == pytest.approx(losses["dense", "after"], rel=1e-5)
    assert losses["int4", "after"] != pytest.approx(losses["int4", "before"], rel=1e-5)
    assert f"{losses['int4', 'after']:.4f}" in capsys.readouterr().out


def test_finalize_without_merging(adapter, base, tmp_path, capsys):
    assert whimbrel("finalize", adapter, tmp_path / "peft") == 0
    assert f"adapter of {base}" in capsys.readouterr().out
    assert not (tmp_path / "peft" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("adapter", ("--quantize", "int8"), "--quantize needs --merge for a model with adapters"),
        ("adapter", ("--dtype", "bf16"), "--dtype needs --merge"),
        ("base", ("--merge",), "--merge needs a run or directory with adapters"),
        ("base", ("--base", "base"), "--base is for adapters, but"),
    ],
)
def test_options_without_effect_are_refused(adapter, tmp_path, monkeypatch, capsys, source, options, message):
    monkeypatch.chdir(tmp_path)
    assert whimbrel("finalize", source, "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "eval", "finalize", "export"])
def test_a_missing_base_model_is_reported_with_the_remedy(adapter, base, tmp_path, capsys, command):
    base.rename(tmp_path / "moved")
    arguments = {"finalize": [tmp_path / "out"], "export": [tmp_path / "out"], "serve": ["--port", 0]}
    arguments |= {"generate": ["a prompt"], "eval": ["--text", tmp_path / "text.txt"]}
    assert whimbrel(command, adapter, *arguments.get(command, [])) == 2
    error = capsys.readouterr().err
    assert "which does not exist: pass its base model (--base)" in error
    assert len(error.strip().splitlines()) == 1
