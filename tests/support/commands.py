"""Commands run in this process, and processes of commands."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whimbrel.cli.main import main


def whimbrel(*arguments: object) -> int:
    """Run a command line in this process. Returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def wait_until(
    process: subprocess.Popen[Any], condition: Callable[[], bool], output: Path | None = None, timeout: float = 600
) -> None:
    """Wait for a condition while the process runs. Fails if it exits first, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        log = "" if output is None else output.read_text(errors="replace")
        assert process.poll() is None, f"the process exited with {process.returncode}: {log}"
        assert time.monotonic() < deadline, log
        time.sleep(0.01)
