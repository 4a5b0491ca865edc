"""The code blocks of each tutorial run in order in one namespace and print the output shown."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Each code block of a page and the output shown below it."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_prints_the_output_shown_and_restores_the_swap_flag(page: Path) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    names: dict[str, object] = {"__name__": page.stem}
    shown = blocks(page)
    assert shown
    for number, (program, expected) in enumerate(shown, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, f"{page.name}, block {number}", "exec", dont_inherit=True), names)  # noqa: S102
        assert printed.getvalue() == expected, f"block {number}"
        assert torch.__future__.get_swap_module_params_on_conversion() is before, f"block {number}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_output_of_a_page_belongs_to_a_code_block(page: Path) -> None:
    assert page.read_text(encoding="utf-8").count("```text\n") == sum(bool(output) for _, output in blocks(page))


def test_tutorial_class_has_at_most_60_lines() -> None:
    (program,) = (code for code, _ in blocks(ROOT / "docs/tutorials/quantized-weights.md") if "_make_wrapper" in code)
    (tutorial_class,) = (node for node in ast.parse(program).body if isinstance(node, ast.ClassDef))
    assert tutorial_class.name == "MyQuantizedLinearWeight"
    assert tutorial_class.end_lineno is not None
    assert tutorial_class.end_lineno - tutorial_class.lineno + 1 <= 60
