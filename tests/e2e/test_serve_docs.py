"""The first Python example of docs/serving.md runs, with address, key and model replaced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.serving import ServerProcess

pytest.importorskip("openai", reason="needs the package 'openai'")


def test_the_python_example_prints_text(server: ServerProcess, root: Path):
    page = (root / "docs" / "serving.md").read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE).group(1)
    replacements = {
        "http://127.0.0.1:8000": server.url,
        'api_key="none"': f'api_key="{server.key}"',
        '"mine"': '"tiny"',
    }
    for old, new in replacements.items():
        assert old in code
        code = code.replace(old, new)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
