"""The examples of docs/cache.md run as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PRINTED = [
    "(1, 1, 100) 4 [DynamicLayer, DynamicLayer]\n",
    "11 10\n",
    "none 4194304\nfp8 2162688\nint4 1671168\n1000 64 1000\n",
    "True [[4], [2]]\n",
    "ndarray (1, 2, 5, 4)\n",
]


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_example_prints_the_expected_output(root: Path, tmp_path: Path, number: int) -> None:
    programs = re.findall(r"```python\n(.*?)```", (root / "docs" / "cache.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(programs) == len(PRINTED)
    if "transformers" in programs[number]:
        pytest.importorskip("transformers")
    command = [sys.executable, "-W", "ignore", "-c", programs[number]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PRINTED[number]
