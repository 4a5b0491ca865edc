"""The examples of docs/cache.md run as shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.documentation import code_blocks, run_python

PRINTED = [
    "(1, 1, 100) 4 [DynamicLayer, DynamicLayer]\n",
    "11 10\n",
    "none 4194304\nfp8 2162688\nint4 1671168\n1000 64 1000\n",
    "True [[4], [2]]\n",
    "ndarray (1, 2, 5, 4)\n",
]


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_example_prints_the_expected_output(tmp_path: Path, number: int) -> None:
    programs = code_blocks("docs/cache.md", "python")
    assert len(programs) == len(PRINTED)
    if "transformers" in programs[number]:
        pytest.importorskip("transformers")
    assert run_python(programs[number], tmp_path) == PRINTED[number]
