"""Start-up time: `--help`, and commands that compute nothing, do not import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from whimbrel.cli.data import SHARD_SIZE
from whimbrel.cli.main import COMMANDS, build_app, main
from whimbrel.data import manifest
from whimbrel.train.run_directory import log_line

RUN = """
import sys
from whimbrel.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
heavy = {"torch", "transformers", "fastapi"} & set(sys.modules)
print(code, *sorted(heavy), file=sys.stderr)
"""


def imported_by(*arguments: str) -> list[str]:
    """The heavy packages that a successful command imports."""
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=True)
    code, *heavy = done.stderr.splitlines()[-1].split()
    assert code == "0", done.stderr
    return heavy


@pytest.fixture
def runs(workdir: Path) -> Path:
    for name in ("a", "b"):
        (workdir / "runs" / name).mkdir(parents=True)
        steps = [{"step": n, "total": 3, "loss": 3.0 / (n + 1), "tokens": 8, "seconds": 0.1} for n in range(3)]
        (workdir / "runs" / name / "log.jsonl").write_text(
            "".join(log_line("step", n + 1, step) for n, step in enumerate(steps))
        )
    return workdir


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("tokenizer", "train")], ids=" ".join)
def test_help_does_not_import_torch(command: tuple[str, ...]) -> None:
    assert imported_by(*command, "--help") == []


@pytest.mark.parametrize("arguments", [("runs",), ("compare", "runs/a", "runs/b"), ("verify", "runs/a")], ids=" ".join)
def test_listing_comparing_and_verifying_runs_does_not_import_torch(runs: Path, arguments: tuple[str, ...]) -> None:
    assert imported_by(*arguments) == []


def test_plot_does_not_import_torch(runs: Path) -> None:
    pytest.importorskip("matplotlib")
    assert imported_by("plot", "runs/a") == []


def test_prepare_and_verify_of_shards_do_not_import_torch(workdir: Path) -> None:
    Path("birds.txt").write_text("a bird flies over the marsh")
    assert imported_by("prepare", "birds.txt", "--out-dir", "out") == []
    assert imported_by("verify", "out") == []


def test_control_does_not_import_torch(runs: Path) -> None:
    code = "import sys, whimbrel.train.control; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_the_command_that_is_run_is_imported() -> None:
    code = "import sys; from whimbrel.cli.main import build_app; build_app('runs'); sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_paragraphs_wrap_to_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    out = capsys.readouterr().out
    assert (
        "Prints one line per shard or checkpoint. Errors are printed to standard error, and the exit code is 2" in out
    )


def test_an_unknown_command_is_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generat"])
    assert ended.value.code == 2
    assert "'generat'" in capsys.readouterr().err
    assert len(build_app("generat").registered_commands) > 1


def test_the_default_shard_size_is_that_of_the_library() -> None:
    assert SHARD_SIZE == manifest.SHARD_SIZE
