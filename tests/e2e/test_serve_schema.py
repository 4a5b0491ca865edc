"""Schemathesis against the server's OpenAPI document: what it allows is accepted, what it forbids is rejected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.serving import ServerProcess

pytest.importorskip("schemathesis", reason="needs the package 'schemathesis'")


def test_responses_conform_to_the_openapi_document(server: ServerProcess, tmp_path: Path):
    options = ["--max-examples=5", "--generation-deterministic", "--phases=coverage,fuzzing", "--no-color"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options),
            *("--header", f"Authorization: Bearer {server.key}", "--request-timeout=30", "--warnings=off"),
        ],
        cwd=tmp_path,
        env=os.environ | {"SCHEMATHESIS_HOOKS": "tests.e2e.schema_hooks", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "6 tested" in done.stdout.lower() or "Tested: 6" in done.stdout
