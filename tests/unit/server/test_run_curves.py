"""The curves of a run while its log grows."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from whimbrel.base.errors import DataError
from whimbrel.server import run_curves
from whimbrel.server.run_curves import RunCurves
from whimbrel.train.run_directory import log_line


def write_steps(run: Path, first: int, last: int) -> None:
    with (run / "log.jsonl").open("a") as file:
        for step in range(first, last + 1):
            numbers = {"loss": 1 / step, "lr": 1e-3, "grad_norm": 1.0, "seconds": 0.5, "tokens": 64}
            file.write(log_line("step", step, {"total": last, **numbers}))


def test_a_long_log_takes_little_memory(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 20_000)
    curves = RunCurves(tmp_path)
    tracemalloc.start()
    try:
        assert curves.get(2.0, since=0, version=1) is not None
        assert tracemalloc.get_traced_memory()[0] < 20_000 * 150
    finally:
        tracemalloc.stop()


def test_expensive_curves_are_updated_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_curves, "PAUSE", 1e12)  # as if each update took hours
    write_steps(tmp_path, 1, 3)
    curves = RunCurves(tmp_path)
    first = curves.get(2.0, since=0, version=1)
    assert first is not None
    write_steps(tmp_path, 4, 6)
    assert curves.get(2.0, since=1, version=2) is None
    assert curves.get(2.0, since=0, version=3) is first  # for another browser tab
    smoother = curves.get(100.0, since=0, version=4)
    assert smoother is not None
    assert (smoother["step"], smoother["span"]) == ([1, 2, 3], 3)


def test_an_invalid_line_is_reported_until_it_is_repaired(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    log = tmp_path / "log.jsonl"
    valid = log.read_text()
    log.write_text(valid + "nonsense\n")
    curves = RunCurves(tmp_path)
    for version in (1, 2):
        with pytest.raises(DataError, match=r"log.jsonl:4 is not JSON"):
            curves.get(2.0, since=0, version=version)
    log.write_text(valid)
    write_steps(tmp_path, 4, 4)
    curve = curves.get(2.0, since=0, version=3)
    assert curve is not None
    assert curve["step"] == [1, 2, 3, 4]
    assert curve["tokens"] == [64, 128, 192, 256]
