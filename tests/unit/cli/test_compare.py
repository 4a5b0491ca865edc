"""`whimbrel compare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from whimbrel.cli.main import main
from whimbrel.train.run_directory import log_line


def write_run(folder: Path, losses: list[float], *, lr: float = 1e-3, tokens: int = 100) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'output_dir = "{folder}"\n[optim]\nlr = {lr}\n[train]\nseed = 1\n')
    with (folder / "log.jsonl").open("w") as file:
        for step, loss in enumerate(losses):
            numbers = {"lr": lr, "grad_norm": 1.0, "seconds": 0.5, "tokens": tokens}
            file.write(log_line("step", step + 1, {"step": step, "total": len(losses), "loss": loss, **numbers}))
            if step % 2:
                file.write(log_line("validation", step + 1, {"loss": loss + 0.5}))


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The table, each row by its columns."""
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    assert not ended.value.code
    return [[cell for cell in line.split("  ") if cell.strip()] for line in capsys.readouterr().out.splitlines()]


def cells(table: list[list[str]], name: str) -> list[str]:
    (row,) = [[cell.strip() for cell in row] for row in table if row and row[0].strip() == name]
    return row[1:]


def test_settings_and_metrics_are_compared(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("runs/a"), [4.0, 3.0, 2.0, 2.5])
    write_run(Path("runs/b"), [4.0, 3.5, 1.0], lr=2e-3, tokens=200)
    table = compare(capsys, "runs/a", "runs/b")
    assert cells(table, "setting") == ["runs/a", "runs/b"]
    assert cells(table, "optim.lr") == ["0.001", "0.002"]
    assert not any("seed" in cell or "output_dir" in cell for row in table for cell in row)
    assert cells(table, "steps") == ["4", "3"]
    assert cells(table, "tokens") == ["400", "600"]
    assert cells(table, "train loss, last") == ["2.5000", "1.0000"]
    assert cells(table, "train loss, best") == ["2.0000 after 3", "1.0000 after 3"]
    assert cells(table, "validation loss, last") == ["3.0000", "4.0000"]
    assert cells(table, "validation loss, best") == ["3.0000 after 4", "4.0000 after 2"]
    assert cells(table, "tokens/s") == ["200", "400"]
    assert cells(table, "training time") == ["2.0 s", "1.5 s"]
    assert cells(table, "train loss at 400 tokens") == ["2.5000", "3.5000"]
    assert cells(table, "validation loss at 400 tokens") == ["3.0000", "4.0000"]
    assert cells(table, "losses compared with the first run") == ["-", "first differ at step 2"]


def test_supervised_tokens_and_rewards_of_fine_tuning_runs(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("plain"), [4.0])
    rewards = {"rewards/margins": 0.5, "rewards/accuracies": 0.75}
    for name, entries in (("sft", {"supervised_tokens": 30.0}), ("dpo", rewards)):
        Path(name).mkdir()
        step = log_line("step", 1, {"step": 0, "total": 1, "loss": 1.0, "tokens": 100, "seconds": 0.5, **entries})
        evaluated = {f"eval_{entry}": 0.25 for entry in entries if "rewards" in entry}
        Path(name, "log.jsonl").write_text(step + log_line("validation", 1, {"loss": 1.0, **evaluated}))
    table = compare(capsys, "plain", "sft", "dpo")
    assert cells(table, "supervised tokens/s") == ["-", "60", "-"]
    assert cells(table, "train reward margin, last") == ["-", "-", "0.5000"]
    assert cells(table, "validation reward accuracy, last") == ["-", "-", "0.2500"]
    write_run(Path("other"), [4.0])
    assert not any("reward" in row[0] or "supervised" in row[0] for row in compare(capsys, "plain", "other") if row)


def test_bit_identical_losses_are_recognized(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("a"), [4.0, 0.3, float("nan")])
    write_run(Path("b"), [4.0, 0.3, float("nan")])
    write_run(Path("c"), [4.0, 0.1 + 0.2, 1.0])  # the next float after 0.3
    write_run(Path("d"), [4.0])
    table = compare(capsys, "a", "b", "c", "d")
    same = ["identical in all 3 steps", "first differ at step 2", "identical in the only common step"]
    assert cells(table, "losses compared with the first run") == ["-", *same]
    assert cells(table, "train loss, last") == ["not finite", "not finite", "1.0000", "4.0000"]
    assert cells(table, "train loss, best")[0] == "0.3000 after 2"
    assert not any(row and row[0].startswith("settings") for row in table)
    assert cells(table, "train loss at 100 tokens") == ["4.0000"] * 4


def fork(folder: Path, first: int, losses: list[float]) -> None:
    """A run resumed from another run's checkpoint, and evaluated before its first step."""
    write_run(folder, [])
    lines = [log_line("validation", first, {"loss": 3.5})]
    for after, loss in enumerate(losses, start=first + 1):
        lines.append(
            log_line("step", after, {"step": after - 1, "total": 9, "loss": loss, "seconds": 0.5, "tokens": 9})
        )
    (folder / "log.jsonl").write_text("".join(lines))


def test_resumed_run_without_its_first_steps(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("a"), [4.0, 3.0, 2.0, 2.5])
    fork(Path("b"), 2, [2.0, 2.25])
    table = compare(capsys, "a", "b")
    assert cells(table, "steps") == ["4", "4"]
    assert cells(table, "tokens") == ["400", "18 since step 2"]
    assert cells(table, "validation loss, best") == ["3.0000 after 4", "3.5000 after 2"]
    assert cells(table, "losses compared with the first run") == ["-", "first differ at step 4"]
    assert not any("tokens" in row[0] and "by" in row[0] for row in table if row)
    fork(Path("c"), 2, [2.0, 2.25, 2.0])
    assert cells(compare(capsys, "b", "c"), "validation loss at 18 tokens") == ["3.5000", "3.5000"]


def test_wide_table_is_not_wrapped_in_a_pipe(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"runs/{'long' * 12}-{number}" for number in range(4)]
    for name in names:
        write_run(Path(name), [1.0])
    assert [cell.strip() for cell in compare(capsys, *names)[0]] == names


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["a"], "expected two or more runs, got only a"),
        (["a", "b"], "expected a run directory or its log.jsonl, got b"),
        (["a", "epmty"], "expected a run directory or its log.jsonl, got epmty: did you mean empty?"),
        (["a", "empty"], "empty/log.jsonl has no steps to compare"),
    ],
)
def test_error_is_one_line(workdir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    write_run(Path("a"), [1.0])
    write_run(Path("empty"), [])
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"whimbrel: {line}\n"
