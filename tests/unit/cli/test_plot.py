"""`whimbrel plot`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.commands import whimbrel

from whimbrel.cli.plot import _draw
from whimbrel.train.run_directory import log_line
from whimbrel.train.run_log import RunLog


def write_run(folder: Path, steps: int, tokens: int = 64) -> None:
    folder.mkdir()
    with (folder / "log.jsonl").open("w") as file:
        for step in range(steps):
            loss = float("nan") if step == 2 else 3 / (step + 1)
            numbers = {"lr": 1e-3, "grad_norm": 1.0, "seconds": 0.5, "tokens": tokens}
            file.write(log_line("step", step + 1, {"step": step, "total": steps, "loss": loss, **numbers}))
            if step % 2:
                file.write(log_line("log", step + 1, {"weight_norm/a": 1.0}))
                file.write(log_line("validation", step + 1, {"loss": 2.0}))


def run(*arguments: str) -> int:
    return whimbrel("plot", *arguments)


@pytest.fixture(autouse=True)
def folder(workdir: Path) -> Path:
    pytest.importorskip("matplotlib")
    write_run(workdir / "a", 6)
    write_run(workdir / "b", 4, tokens=128)
    return workdir


def test_all_panels_of_all_runs_are_plotted(folder: Path) -> None:
    assert run("a", "b/log.jsonl", "--out", "curves.svg") == 0
    text = (folder / "curves.svg").read_text()
    for label in ("loss", "learning rate", "gradient norm", "tokens/s", "train", "validation", "a · b"):
        assert f"<!-- {label} -->" in text
    assert "<!-- a: train 0.5000, validation 2.0000 -->" in text
    assert text.count("<!-- step -->") == 4


def test_rewards_of_preference_pairs_are_plotted_if_a_run_has_them(folder: Path) -> None:
    (folder / "dpo").mkdir()
    rewards = {"rewards/margins": 0.5, "rewards/accuracies": 0.75}
    lines = [log_line("step", step, {"loss": 0.6, "tokens": 64, "seconds": 0.5, **rewards}) for step in (1, 2)]
    lines.append(log_line("validation", 2, {"loss": 0.6, **{f"eval_{name}": 0.25 for name in rewards}}))
    (folder / "dpo" / "log.jsonl").write_text("".join(lines))
    assert run("a", "dpo", "--out", "curves.svg") == 0
    text = (folder / "curves.svg").read_text()
    assert "<!-- reward margin -->" in text
    assert "<!-- reward accuracy -->" in text
    assert text.count("<!-- step -->") == 6
    assert [list(line.get_ydata()) for line in drawn_lines([folder / "dpo"], "margin")] == [[0.5, 0.5], [0.25]]


def test_panels_and_x_axis_can_be_chosen(folder: Path) -> None:
    assert run("a", "--panels", "speed", "--tokens", "--out", "curves.svg") == 0
    text = (folder / "curves.svg").read_text()
    assert "<!-- tokens/s -->" in text
    assert text.count("<!-- tokens -->") == 1
    assert "<!-- loss -->" not in text


def fork(folder: Path) -> None:
    """A run resumed from another run's checkpoint of step 4, and evaluated before its first step."""
    folder.mkdir()
    lines = [log_line("validation", 4, {"loss": 1.0})]
    lines += [log_line("step", after, {"loss": 9 / after, "tokens": 100}) for after in (5, 6, 7)]
    lines.append(log_line("validation", 7, {"loss": 0.5}))
    (folder / "log.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    ("tokens", "trained", "held_out"), [(False, [5, 6, 7], [4, 7]), (True, [100, 200, 300], [0, 300])]
)
def test_resumed_run_is_plotted_at_its_own_steps(
    folder: Path, capsys: pytest.CaptureFixture[str], tokens: bool, trained: list[int], held_out: list[int]
) -> None:
    fork(folder / "fork")
    lines = drawn_lines([folder / "fork"], tokens=tokens)
    assert [list(line.get_xdata()) for line in lines] == [trained, held_out]
    assert run("fork", "--out", "fork.svg", *["--tokens"] * tokens) == 0
    noted = "fork/log.jsonl starts after step 4" in capsys.readouterr().out
    assert noted == tokens


def drawn_lines(runs: list[Path], panel: str = "loss", *, tokens: bool = False, span: int = 1) -> list[Any]:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    _draw(figure, [RunLog(run) for run in runs], [panel], tokens=tokens, span=span)
    return list(figure.axes[0].get_lines())


def test_validation_is_drawn_on_top_and_a_single_run_also_unsmoothed(folder: Path) -> None:
    raw, smoothed, validation = drawn_lines([folder / "a"], span=3)
    assert np.array(raw.get_ydata()) == pytest.approx([3, 1.5, np.nan, 0.75, 0.6, 0.5], nan_ok=True)
    expected = [3, (3 + 1.5) / 2, np.nan, (0.75 + 0.6) / 2, (0.75 + 0.6 + 0.5) / 3, (0.6 + 0.5) / 2]
    assert np.array(smoothed.get_ydata()) == pytest.approx(expected, nan_ok=True)
    assert raw.get_alpha() < 0.5
    assert validation.get_zorder() > max(raw.get_zorder(), smoothed.get_zorder())
    assert len(drawn_lines([folder / "a", folder / "b"], span=3)) == 4
    assert len(drawn_lines([folder / "a"], span=1)) == 2


@pytest.mark.parametrize(("panel", "largest"), [("memory", 0.789), ("speed", 64.2)])
def test_memory_and_speed_are_drawn_from_zero(folder: Path, panel: str, largest: float) -> None:
    (folder / "full").mkdir()
    lines = [
        log_line("step", step, {"loss": 1.0, "tokens": tokens, "seconds": 10.0, "peak_memory": memory * 2**30})
        for step, memory, tokens in ((1, 0.783, 641), (2, 0.789, 642))
    ]
    (folder / "full" / "log.jsonl").write_text("".join(lines))
    [line] = drawn_lines([folder / "full"], panel)
    low, high = line.axes.get_ylim()
    assert low == 0
    assert largest < high < 1.2 * largest


def test_runs_of_the_same_name_are_labelled_by_path(folder: Path) -> None:
    (folder / "other").mkdir()
    write_run(folder / "other" / "a", 3)
    assert run("a", "other/a", "--out", "curves.svg") == 0
    text = (folder / "curves.svg").read_text()
    assert "<!-- other/a: train not finite, validation 2.0000 -->" in text


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="xdg-open is for Linux and BSD")
def test_open_starts_the_viewer(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("PATH", str(folder))
    assert run("a", "--open") == 0
    assert capfd.readouterr() == ("wrote a/loss.png\ncould not open a/loss.png\n", "")  # no xdg-open
    viewer = folder / "xdg-open"
    for code, more in ((0, ""), (3, "could not open a/loss.png\n")):
        viewer.write_text(f'#!/bin/sh\necho "$@" >> opened\necho no application found >&2\nexit {code}\n')
        viewer.chmod(0o755)
        assert run("a", "--open") == 0
        assert capfd.readouterr() == (f"wrote a/loss.png\n{more}", "")
    assert run("a") == 0
    assert (folder / "opened").read_text() == "a/loss.png\n" * 2


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="xdg-open is for Linux and BSD")
def test_plot_does_not_wait_for_the_viewer(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("whimbrel.cli.plot.VIEWER_TIMEOUT", 0.1)
    viewer = folder / "xdg-open"
    viewer.write_text("#!/bin/sh\nread line < pipe\n")
    viewer.chmod(0o755)
    os.mkfifo(folder / "pipe")
    assert run("a", "--open") == 0
    assert "could not open" not in capfd.readouterr().out
    (folder / "pipe").write_text("closed\n")


def test_default_output_is_in_the_run_directory(folder: Path) -> None:
    assert run("a") == 0
    picture = (folder / "a" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert run("a", "b") == 0
    assert (folder / "a" / "loss.png").read_bytes() == picture
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["a", "--panels", "loss,weight"],
            "unknown panel 'weight' in --panels (choose from: loss, lr, norm, speed, memory, margin, accuracy)",
        ),
        (["a", "--panels", "lr,margin"], "a does not log 'margin' of --panels (logged panels: loss, lr, norm, speed)"),
        (["a", "b", "--panels", "margin"], "no run logs 'margin' of --panels (logged panels: loss, lr, norm, speed)"),
        (["a", "--out", "a.gif"], "expected --out to end in .png or .svg, got a.gif"),
        (["c"], "expected a run directory or its log.jsonl, got c"),
        (["epmty"], "expected a run directory or its log.jsonl, got epmty: did you mean empty?"),
        (["empty"], "empty/log.jsonl has no steps to plot"),
    ],
)
def test_error_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    write_run(folder / "empty", 0)
    assert run(*arguments) == 2
    assert capsys.readouterr().err == f"whimbrel: {line}\n"
    assert not list(folder.rglob("loss.png"))
