"""Text that a terminal would obey."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from tests.unit.tokenization.bytewise import byte_tokenizer

from whimbrel.base.errors import DataError
from whimbrel.cli.chat import chat
from whimbrel.cli.generate import generate
from whimbrel.cli.main import main
from whimbrel.cli.words import escaped
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig

GENERATE = importlib.import_module("whimbrel.inference")  # as an attribute of the package it is the function
HOSTILE = "\x1b]0;title\x07\x1b[2Jhidden\rshown\x9b31m\u202eno\x00\x08"
HARMLESS = "Tab\tand\nnewline, naïve 北京 👩\u200d🚀"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "model"
    shape = {"context_length": 32, "vocab_size": 257, "num_layers": 1, "embd_size": 16, "num_heads": 2}
    save_model(GPT(GPTConfig(**shape)), folder, byte_tokenizer())
    return folder


def test_controls_are_spelled_out_and_text_is_kept():
    assert escaped(HOSTILE) == r"\x1b]0;title\x07\x1b[2Jhidden\rshown\x9b31m\u202eno\x00\x08"
    assert escaped(HARMLESS) == HARMLESS


@pytest.mark.parametrize("terminal", [True, False])
def test_generate_escapes_what_a_model_writes_to_a_terminal_alone(model, terminal, monkeypatch, capsys):
    monkeypatch.setattr(GENERATE, "stream_text", lambda *given: [HOSTILE, HARMLESS])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    generate(model, "a", max_new_tokens=1, temperature=0, device="cpu")
    written = escaped(HOSTILE) if terminal else HOSTILE
    assert capsys.readouterr().out == f"a{written}{HARMLESS}\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_chat_escapes_what_a_model_writes_to_a_terminal_alone(model, terminal, monkeypatch, capsys):
    lines = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(GENERATE.Conversation, "ask", lambda *given: ((piece for piece in [HOSTILE]), 0))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    chat(model, device="cpu")
    assert capsys.readouterr().out == f"{escaped(HOSTILE) if terminal else HOSTILE}\n\n"


def test_errors_escape_what_they_repeat(monkeypatch, capsys):
    def fail(*given, **named):
        raise DataError(f"the template says {HOSTILE}")

    monkeypatch.setattr("whimbrel.cli.main.app", fail)
    with pytest.raises(SystemExit):
        main(["doctor"])
    said = capsys.readouterr().err
    assert r"\x1b[2J" in said
    assert escaped(said) == said
