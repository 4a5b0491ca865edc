"""Benchmarks run with their smallest sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("benchmark", ["decode", "load"])
def test_precision_benchmark_records_results(root: Path, tmp_path: Path, benchmark: str) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, root / "bench" / "precision.py", benchmark, "--tiny", "--out", out]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(out.read_text())["results"]["device"] == "cpu"


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
