"""Examples of the documentation, and programs run in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def read_page(page: str) -> str:
    """A page, given by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def code_blocks(page: str, language: str) -> list[str]:
    """The fenced code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", read_page(page), re.DOTALL | re.MULTILINE)


def run_python(program: str, folder: Path) -> str:
    """Run a program in another process and return what it prints."""
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    return completed.stdout
