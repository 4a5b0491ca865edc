"""Fault injection: every system call of a save, and 200 random corruptions (2,000 with WHIMBREL_SOAK=1)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOAK = os.environ.get("WHIMBREL_SOAK") == "1"
HERE = Path(__file__).parent

RunScenario = Callable[[str], list[str | None]]


@pytest.fixture(scope="session")
def corruptions() -> int:
    """Number of corruptions to test."""
    return 2000 if SOAK else 200


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preloaded library that counts, kills or fails system calls."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("fault injection needs Linux and a C compiler (cc)")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "shim.c", "-ldl"], check=True)
    return library


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts for docs/reliability.md."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "faults":
                terminalreporter.write_line(value)


@pytest.fixture
def run_scenario(shim: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> RunScenario:
    """Run a scenario in a process with the shim preloaded. Returns an error message or None for each point."""

    def run(scenario: str) -> list[str | None]:
        environment = os.environ | {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, HERE / "scenarios.py", scenario, tmp_path],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        record_property("faults", f"{scenario}: {len(found)} points")
        return found

    return run
