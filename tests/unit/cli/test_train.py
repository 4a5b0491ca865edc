"""`whimbrel train`, and general behavior of the command line: errors, --version, --trace."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import wait_until, whimbrel
from tests.support.runs import prepare_text

from whimbrel.checkpoint import latest_checkpoint, list_checkpoints
from whimbrel.cli.main import main
from whimbrel.model_io import load_model
from whimbrel.train import load_run_config, read_log

RECIPE = """
output_dir = "run"
[model]
context_length = 32
vocab_size = 300
num_layers = 2
embd_size = 32
num_heads = 2
[data]
path = "shards"
[train]
steps = 6
tokens_per_step = 256
device = "cpu"
[validation]
every = 3
[sample]
every = 3
max_new_tokens = 8
"""


@pytest.fixture
def folder(workdir: Path, shakespeare: str) -> Iterator[Path]:
    """An empty directory with shards and a recipe; signal handlers are restored after the test."""
    prepare_text(workdir, shakespeare[:20_000], val_tokens=800)
    (workdir / "recipe.toml").write_text(RECIPE)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield workdir
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_plain_output_has_one_line_per_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel("train", "recipe.toml") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "Using device: cpu",
        "Total batch size: 256",
        "Tokens per micro-batch: 256",
        "Gradient accumulation steps: 1",
    ]
    steps = [line for line in lines if line.startswith("step:")]
    assert len(steps) == 6
    for number, line in enumerate(steps, 1):
        speed = r"train_time:\d+ms token/s:\d+\.\d\d"
        state = r"lr:\d\.\d\de[-+]\d\d norm:\d+\.\d\d eta:0:\d\d:\d\d"
        assert re.fullmatch(rf"step:{number}/6 train_loss:\d+\.\d{{4}} {speed} {state}", line)
    assert lines[-1].startswith("Next: whimbrel generate run ")
    text = "\n".join(lines)
    assert re.search(r"^validation after step 3: loss \d\.\d{4}$", text, re.M)
    assert re.search(r"^sample after step 6:$", text, re.M)
    assert re.search(r"^Total time: \d+\.\d\ds \(\d+\.\d\d minutes\)$", text, re.M)
    assert "Total tokens processed: 1,536" in lines
    assert re.search(r"^Average tokens/sec: \d+\.\d\d$", text, re.M)
    assert not any(line.startswith("Compile time") for line in lines)


def test_finished_run_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whimbrel("train", "recipe.toml", "--train.steps=1")
    capsys.readouterr()
    assert whimbrel("train", "recipe.toml", "--train.steps=1") == 0
    assert "Already at step 1 of 1: nothing to do" in capsys.readouterr().out
    assert whimbrel("train", "recipe.toml", "--train.steps=2") == 0
    capsys.readouterr()
    assert whimbrel("train", "recipe.toml", "--train.steps=1") == 0
    assert "Already at step 2, past the last step, 1: nothing to do" in capsys.readouterr().out


def test_printed_commands_are_quoted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel("train", "recipe.toml", "--train.steps=1", "--output_dir=runs/a b") == 0
    printed = capsys.readouterr()
    assert "Next: whimbrel generate 'runs/a b' (" in printed.out
    assert "whimbrel watch 'runs/a b'\n" in printed.err


def test_version_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel("--version") == 0
    assert re.fullmatch(r"whimbrel \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_progress_bar(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    assert whimbrel("train", "recipe.toml", "--train.clip=1.0") == 0
    out = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"step 6/6  loss \d\.\d{4}  lr \d\.\d\de-\d\d  norm \d+\.\d\d  [\d,]+ tok/s", out)
    assert "Total tokens processed: 1,536" in out


def test_overrides_reach_the_run(folder: Path) -> None:
    assert whimbrel("train", "recipe.toml", "--train.steps=2", "--train.tokens-per-step=128", "--optim.lr=1e-3") == 0
    steps = [line for line in read_log(folder / "run" / "log.jsonl") if line["kind"] == "step"]
    assert [(line["tokens"], line["lr"]) for line in steps] == [(128, 1e-3)] * 2


def test_override_value_may_follow_a_space(folder: Path) -> None:
    arguments = ("--train.steps", "2", "--plain", "--train.tokens_per_step=128", "recipe.toml", "--optim.lr", "1e-3")
    assert whimbrel("train", *arguments) == 0
    steps = [line for line in read_log(folder / "run" / "log.jsonl") if line["kind"] == "step"]
    assert [(line["tokens"], line["lr"]) for line in steps] == [(128, 1e-3)] * 2


def test_negative_switch_may_stand_next_to_overrides(folder: Path) -> None:
    assert whimbrel("train", "recipe.toml", "--train.steps", "1", "--no-watch", "--plain") == 0
    assert len(read_log(folder / "run" / "log.jsonl")) > 0


def test_validation_can_be_turned_off(folder: Path) -> None:
    assert whimbrel("train", "recipe.toml", "--train.steps=2", "--validation=none", "--sample=none") == 0
    assert [line["kind"] for line in read_log(folder / "run" / "log.jsonl")] == ["step"] * 2


def test_timed_saves_can_be_turned_off(folder: Path) -> None:
    written = folder / "run" / "config.toml"
    assert whimbrel("train", "recipe.toml", "--checkpoint.every_minutes=none", "--train.steps=1") == 0
    assert load_run_config(written).checkpoint.every_minutes is None
    assert whimbrel("train", str(written), "--train.steps=2") == 0  # resumes with the recorded settings
    assert load_run_config(written).checkpoint.every_minutes is None


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "none.toml"], "whimbrel: no such configuration file: none.toml"),
        (["train", "recipe.toml", "--optim.lrr=1"], "whimbrel: unknown setting 'optim.lrr': did you mean 'optim.lr'?"),
        (["train", "recipe.toml", "--lr=1"], "whimbrel: unknown setting 'lr': did you mean 'optim.lr'?"),
        (
            ["train", "recipe.toml", "--name=x"],
            "whimbrel: unknown setting 'name': did you mean 'optim.name' or 'schedule.name' or 'objective.name'?",
        ),
        (["train", "recipe.toml", "--train.steps=x"], "whimbrel: train.steps: expected an integer, got 'x'"),
        (
            ["train", "recipe.toml", "extra"],
            "whimbrel train: Got unexpected extra argument(s) (extra)",
        ),
        (
            ["train", "recipe.toml", "--optim.lrr", "1"],
            "whimbrel: unknown setting 'optim.lrr': did you mean 'optim.lr'?",
        ),
        (["train", "recipe.toml", "--optim.lr"], "whimbrel: expected a value for --optim.lr"),
        (["train", "recipe.toml", "--optim.lr", "--plain"], "whimbrel: expected a value for --optim.lr"),
        (["train", "--train.compile", "recipe.toml"], "whimbrel: expected --train.compile=true or"),
        (["memory", "recipe.toml", "--train.compile"], "whimbrel: expected --train.compile=true or"),
        (["train", "--plian", "recipe.toml"], "whimbrel: unknown option --plian: did you mean --plain?"),
        (["train", "--trian.steps", "3"], "whimbrel: unknown option --trian.steps: did you mean --train.steps?"),
        (["train", "recipe.toml", "--data.path=gone"], "whimbrel: no such directory: gone"),
        (["train"], "whimbrel train: Missing argument"),
        (["trian"], "whimbrel: No such command 'trian'. Did you mean 'train'?"),
        (["plot", "nowhere"], "whimbrel: expected a run directory"),
    ],
)
def test_error_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert whimbrel(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1
    assert not (folder / "run").exists()


def test_progress_bar_is_removed_on_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert whimbrel("train", "recipe.toml", "--optim.lr=1e30", "--train.steps=30") == 2
    out = capsys.readouterr().out
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == 1


def test_trace_shows_the_traceback(folder: Path) -> None:
    with pytest.raises(ValueError, match="no such configuration file"):
        main(["train", "none.toml", "--trace"])


def test_unexpected_error_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("two\nlines")

    monkeypatch.setattr("whimbrel.train.Trainer.train", fail)
    assert whimbrel("train", "recipe.toml") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "TypeError: two lines" in line
    assert "--trace" in line
    with pytest.raises(TypeError, match="two"):
        main(["train", "recipe.toml", "--trace"])


def test_settings_are_listed_with_type_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel("train", "--settings") == 0
    listed = capsys.readouterr().out
    for setting in (
        "--model.preset (string)", "--model.rope_scaling.factor (number)", "--optim.lr (number; default 0.0003)",
        "--optim.betas (2 numbers; default 0.9,0.999)", "--train.compile (true or false; default false)",
        "--train.recompute (none, full, selective or number; default none)",
    ):  # fmt: skip
        assert f"{setting}\n" in listed


def test_plot_writes_the_curves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    whimbrel("train", "recipe.toml")
    assert whimbrel("plot", "run") == 0
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert whimbrel("plot", "run", "run/log.jsonl", "--tokens", "--out", "curves.svg") == 0
    assert "tokens" in (folder / "curves.svg").read_text()
    assert whimbrel("plot", "run", "--out", "curves.bmp") == 2
    assert ".png or .svg" in capsys.readouterr().err


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "whimbrel", "train", "recipe.toml", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return out


def test_killed_run_resumes_to_the_same_result(folder: Path) -> None:
    long = ["--train.steps=60", "--checkpoint.every=10", "--schedule.name=cosine", "--sample=none"]
    finish(start(*long, "--output_dir=uninterrupted"))
    killed = start(*long, "--output_dir=killed")
    wait_until(killed, lambda: len(list_checkpoints(folder / "killed")) >= 2)
    killed.kill()
    killed.communicate()
    finish(start(*long, "--output_dir=killed"))
    traces = []
    for name in ("uninterrupted", "killed"):
        lines = read_log(folder / name / "log.jsonl")
        traces.append([(line["kind"], line["after"], line["loss"].hex()) for line in lines])
    assert traces[0] == traces[1]
    assert len(traces[0]) == 60 + 20
    files = [latest_checkpoint(folder / name) for name in ("uninterrupted", "killed")]
    a, b = (load_model(path / "model").state_dict() for path in files if path is not None)
    assert all((a[name] == b[name]).all() for name in a)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_exits_0(folder: Path, number: signal.Signals) -> None:
    process = start("--train.steps=100000", "--validation.every=none", "--sample=none")
    log = folder / "run" / "log.jsonl"
    wait_until(process, lambda: log.exists() and log.stat().st_size > 1000)
    process.send_signal(number)
    assert re.search(
        r"Stopped at step \d+, saved to run/checkpoints/step-\d+: rerun the same command to resume", finish(process)
    )
    newest = latest_checkpoint(folder / "run")
    assert newest is not None
    assert read_log(log)[-1]["after"] == int(newest.name.removeprefix("step-"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_standard_output_does_not_end_a_run(folder: Path) -> None:
    arguments = [sys.executable, "-m", "whimbrel", "train", "recipe.toml"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("No space left on device") == 1
    assert "Exception ignored" not in done.stderr
    assert list(list_checkpoints(Path("run"))) == [6]


def test_closed_pipe_does_not_end_a_run(folder: Path) -> None:
    arguments = [sys.executable, "-m", "whimbrel", "train", "recipe.toml"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0, errors
    assert errors.count("Broken pipe; training continues") == 1
    assert list(list_checkpoints(Path("run"))) == [6]


def test_start_from_scratch_is_reported(folder: Path) -> None:
    arguments = [sys.executable, "-m", "whimbrel", "train", "recipe.toml"]
    for expected in (1, 0):
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert done.stderr.count("No checkpoint found in run: starting a new run") == expected


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["train", "recipe.toml", "--nproc", "2"], TORCHRUN, "torchrun has already started this process: pass --nproc"),
        (["train", "recipe.toml", "--max-restarts", "1"], TORCHRUN, "pass --max-restarts to torchrun instead"),
        (["train", "recipe.toml", "--nproc", "0"], {}, "expected --nproc of at least 1, got 0"),
        (["train", "recipe.toml", "--max-restarts", "-1"], {}, "expected --max-restarts of at least 0, got -1"),
        (["generate", "model"], TORCHRUN, "whimbrel generate runs in one process, got WORLD_SIZE=2"),
    ],
)
def test_processes_that_cannot_be_started_are_refused(
    folder: Path,
    arguments: list[str],
    variables: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert whimbrel(*arguments) == 2
    assert message in capsys.readouterr().err
