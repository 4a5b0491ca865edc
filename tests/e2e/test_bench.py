"""Benchmarks run with their smallest sizes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import whimbrel

from whimbrel.config import load_toml


def test_precision_benchmark_records_results(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, root / "bench" / "precision.py", "decode", "--tiny", "--out", out]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(out.read_text())["results"]["device"] == "cpu"


def test_every_published_result_has_a_benchmark_and_every_benchmark_a_script(root: Path) -> None:
    benchmarks = load_toml(root / "bench" / "benchmarks.toml")
    assert {path.stem for path in (root / "bench" / "results").glob("*.json")} == set(benchmarks)
    for entry in benchmarks.values():
        assert (root / "bench" / entry["run"].split()[0]).is_file()
    documented = set(re.findall(r"`whimbrel bench ([a-z][\w-]+)", (root / "docs" / "benchmarks.md").read_text()))
    assert documented <= set(benchmarks)
    assert len(documented) > 20


def test_command_runs_a_benchmark_with_options(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert whimbrel("bench") == 0
    assert "decode-gpt2-64" in capfd.readouterr().out
    assert whimbrel("bench", "precision-load", "--", "--tiny") == 0
    assert json.loads(Path("precision-load.json").read_text())["name"] == "precision load"
    assert whimbrel("bench", "precision-load", "--", "--no-such-option") == 2
    assert whimbrel("bench", "precision-lod") == 2
    assert "did you mean 'precision-load'" in capfd.readouterr().err
    monkeypatch.setattr("whimbrel.cli.bench.DIRECTORY", Path("elsewhere"))
    assert whimbrel("bench") == 2
    assert "part of the repository" in capfd.readouterr().err


def test_stored_results_have_hardware_versions_and_commit(root: Path) -> None:
    for path in (root / "bench" / "results").glob("*.json"):
        assert json.loads(path.read_text()).keys() >= {"name", "timestamp", "commit", "hardware", "versions", "results"}


def test_quickstart_calibration_records_losses_and_predictions(root: Path, tmp_path: Path, shakespeare: str) -> None:
    out, text = tmp_path / "results.json", tmp_path / "text.txt"
    text.write_text(shakespeare[:80_000])
    command = [sys.executable, root / "bench" / "quickstart.py", text, "--vocab-size", "512", "--depths", "1,2"]
    command += ["--tokens", "4096", "--text-bytes", "40000", "--out", out]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    rows = json.loads(out.read_text())["results"]["runs"]
    assert [row["depth"] for row in rows] == [1, 2]
    assert all(0 < row["bits_per_byte"] < 8 and row["predicted"] > 0 for row in rows)
