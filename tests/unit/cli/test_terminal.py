"""Terminal output: escaped control characters, tables, log messages and the progress bar."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from tests.support.byte_tokenizer import byte_tokenizer

from whimbrel import inference
from whimbrel.base.errors import DataError
from whimbrel.cli import terminal as terminal_output
from whimbrel.cli.generate import chat, generate
from whimbrel.cli.main import main
from whimbrel.cli.terminal import (
    ProgressBar,
    configure_logging,
    escape_controls,
    format_escapes,
    parse_escapes,
    print_table,
)
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig

HOSTILE = "\x1b]0;title\x07\x1b[2Jhidden\rshown\x9b31m\u202eno\x00\x08"
HARMLESS = "Tab\tand\nnewline, naïve 北京 👩\u200d🚀"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "model"
    shape = {"context_length": 32, "vocab_size": 257, "num_layers": 1, "embd_size": 16, "num_heads": 2}
    save_model(GPT(GPTConfig(**shape)), folder, byte_tokenizer())
    return folder


def test_control_characters_are_escaped():
    assert escape_controls(HOSTILE) == r"\x1b]0;title\x07\x1b[2Jhidden\rshown\x9b31m\u202eno\x00\x08"
    assert escape_controls(HARMLESS) == HARMLESS


@pytest.mark.parametrize("text", ["\\n\n", "\r\n\t\\x01\x01", "\u2028\\", "<|doc|>", HOSTILE])
def test_option_values_with_escapes_are_parsed_back(text: str):
    assert parse_escapes(format_escapes(text)) == text
    assert escape_controls(format_escapes(text)) == format_escapes(text).replace("\r", "\\r")


@pytest.mark.parametrize("terminal", [True, False])
def test_generate_escapes_control_characters_only_on_a_terminal(model, terminal, monkeypatch, capsys):
    monkeypatch.setattr(inference.LLM, "stream", lambda *args, **kwargs: [HOSTILE, HARMLESS])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    generate(model, "a", max_new_tokens=1, temperature=0, device="cpu")
    written = escape_controls(HOSTILE) if terminal else HOSTILE
    assert capsys.readouterr().out == f"a{written}{HARMLESS}\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_chat_escapes_control_characters_only_on_a_terminal(model, terminal, monkeypatch, capsys):
    lines = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(inference.Conversation, "ask", lambda *given: ((piece for piece in [HOSTILE]), 0))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    chat(model, device="cpu")
    assert capsys.readouterr().out == f"{escape_controls(HOSTILE) if terminal else HOSTILE}\n\n"


def test_error_messages_escape_control_characters(monkeypatch, capsys):
    def fail(*given, **named):
        raise DataError(f"invalid template {HOSTILE}")

    monkeypatch.setattr("whimbrel.cli.main.build_app", fail)
    with pytest.raises(SystemExit):
        main(["doctor"])
    printed = capsys.readouterr().err
    assert r"\x1b[2J" in printed
    assert escape_controls(printed) == printed


@pytest.fixture
def table_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The lines of a table on a terminal with so many columns."""

    def lines(width: int, *arguments: Any, **options: Any) -> list[str]:
        for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
            monkeypatch.setenv(name, value)
        print_table(*arguments, **options)
        printed = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]
        assert max(map(len, printed)) <= width
        return printed

    return lines


RUNS = [("runs/shakespeare-cpu", "finished", "500/500", "1.2345", "step-00000500")]
COLUMNS = ("run", "state", "step", "loss", "checkpoint")


def test_tables_in_a_pipe_have_no_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "note"), [("a", "long text"), ("b", "")])
    assert capsys.readouterr().out == "name  note\na     long text\nb\n"


def test_narrow_tables_leave_out_optional_columns_and_then_become_blocks(table_lines) -> None:
    header, row = table_lines(70, COLUMNS, RUNS, optional=["checkpoint", "loss"])
    assert (header.split(), row.split()) == (list(COLUMNS), list(RUNS[0]))
    header, row = table_lines(60, COLUMNS, RUNS, optional=["checkpoint", "loss"])
    assert (header.split(), row.split()) == (list(COLUMNS[:-1]), list(RUNS[0][:-1]))
    block = ["runs/shakespeare-cpu", *(f"  {name:10}  {value}" for name, value in zip(COLUMNS, RUNS[0], strict=True))]
    assert table_lines(40, COLUMNS, RUNS, optional=["checkpoint"]) == [block[0], *block[2:]]


def test_narrow_tables_wrap_between_words(table_lines) -> None:
    text = "one two three four five six seven eight nine ten"
    first, *more = table_lines(60, ("", ""), [("chat-qlora-int4:", text)])
    assert first.startswith("chat-qlora-int4:  one two")
    assert more
    for width in (40, 60):
        assert " ".join(table_lines(width, ("", ""), [("chat-qlora-int4:", text)])).split()[1:] == text.split()
    assert table_lines(40, ("", ""), [("chat-qlora-int4:", text)])[0] == "chat-qlora-int4:"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock; its last element is the current time."""
    times = [100.0]
    monkeypatch.setattr(terminal_output.time, "monotonic", lambda: times[-1])
    return times


def test_progress_estimates_the_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.start(None, "tokens")
    clock.append(clock[-1] + 10)
    bar.expect(100_000)
    bar.advance(2000)
    assert capsys.readouterr().err == "2,000/~100,000 tokens in 10.0s, 200 tokens/s, 0:08:10 left\n"
    bar.finish()
    assert capsys.readouterr().err == "2,000 tokens in 10.0s, 200 tokens/s\n"


def test_progress_rate_excludes_earlier_runs(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.start(10_000, "tokens", 9000)
    clock.append(clock[-1] + 10)
    bar.advance(500)
    assert capsys.readouterr().err == "9,500/10,000 tokens in 10.0s, 50 tokens/s, 0:00:10 left\n"


def test_closed_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.start(10, "tokens")
    bar.advance(5)
    bar.close()
    assert capsys.readouterr().err == ""


def test_live_progress_bar_is_removed(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    bar = ProgressBar()
    bar._console = Console(file=screen, force_terminal=True, width=200)
    bar.start(None, "tokens", 3000)
    live = bar._live
    assert live is not None
    clock.append(clock[-1] + 10)
    bar.expect(7000)
    bar.advance(1000)
    (task,) = live.tasks
    assert (task.completed, task.total) == (4000, 7000)
    assert task.description == "4,000/~7,000 tokens in 10.0s, 100 tokens/s, 0:00:30 left"
    bar.close()
    assert not live.live.is_started
    bar.close()
    assert capsys.readouterr().err == ""


def test_level_is_set_even_if_there_is_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("whimbrel")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    level = logger.level
    try:
        logger.setLevel(logging.NOTSET)
        configure_logging()
        assert logger.level == logging.INFO
        logger.setLevel(logging.ERROR)
        configure_logging()
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(level)


def test_log_messages_appear_above_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live bar replaces sys.stderr; messages that bypass it would leave a copy of the bar."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(written, encoding="utf-8", errors="backslashreplace"))
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    logger = logging.getLogger("whimbrel")
    monkeypatch.setattr(logger, "handlers", [])
    configure_logging()
    with Progress(console=console, auto_refresh=False):
        logging.getLogger("whimbrel.data").warning("Epoch 2")
    assert "Epoch 2" in console.file.getvalue()
    assert written.getvalue() == b""
