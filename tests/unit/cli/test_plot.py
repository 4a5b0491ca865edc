"""`whimbrel plot`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.commands import whimbrel

from whimbrel.cli.runs import _plot_panel
from whimbrel.train.run_directory import log_line, read_log


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
    for label in ("loss", "learning rate", "gradient norm", "tokens/s", "a, train", "a, validation", "b, train"):
        assert f"<!-- {label} -->" in text
    assert text.count("<!-- step -->") == 4


def test_rewards_of_preference_pairs_are_plotted_if_a_run_has_them(folder: Path) -> None:
    from matplotlib.figure import Figure

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
    axes = Figure().add_subplot()
    _plot_panel(axes, "margin", read_log(folder / "dpo" / "log.jsonl"), "dpo", tokens=False)
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.5, 0.5], [0.25]]


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
    from matplotlib.figure import Figure

    fork(folder / "fork")
    axes = Figure().add_subplot()
    _plot_panel(axes, "loss", read_log(folder / "fork" / "log.jsonl"), "fork", tokens=tokens)
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [trained, held_out]
    assert run("fork", "--out", "fork.svg", *["--tokens"] * tokens) == 0
    noted = "fork/log.jsonl starts after step 4" in capsys.readouterr().out
    assert noted == tokens


def test_default_output_is_in_the_run_directory(folder: Path) -> None:
    assert run("a") == 0
    assert (folder / "a" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["a", "--panels", "loss,weight"],
            "unknown panel 'weight' in --panels (choose from: loss, lr, norm, speed, margin, accuracy)",
        ),
        (["a", "--out", "a.gif"], "expected --out to end in .png or .svg, got a.gif"),
        (["c"], "expected a run directory or its log.jsonl, got c"),
        (["empty"], "empty/log.jsonl has no steps to plot"),
    ],
)
def test_error_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    write_run(folder / "empty", 0)
    assert run(*arguments) == 2
    assert capsys.readouterr().err == f"whimbrel: {line}\n"
