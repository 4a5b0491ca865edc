"""scripts/lint.py detects each kind of violation."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house_lint", ROOT / "scripts" / "lint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("check_length_and_names", "x = 1\n" * 801, "801 lines"),
        ("check_length_and_names", "def f():\n" + "    x = 1\n" * 79, "f has 80 lines"),
        ("check_length_and_names", "def helper(): ...", "vague function name"),
        ("check_unfinished", "# TO" + "DO later", "unfinished"),
        ("check_safe_loading", "import pickle", "imports pickle"),
        ("check_safe_loading", "torch.load(path)", "weights_only"),
        ("check_safe_loading", "eval(text)", "eval"),
        ("check_output", "print(1)", "print outside"),
        ("check_public_names", '__all__ = ["missing"]', "unknown names: missing"),
        ("check_declared_packages", "import pandas", "undeclared packages: pandas"),
    ],
)
def test_violation_is_found(lint: ModuleType, rule: str, text: str, expected: str) -> None:
    file = lint.File(ROOT / "src" / "whimbrel" / "base" / "errors.py", text)
    assert any(expected in problem for problem in getattr(lint, rule)(file))


def test_machine_path_is_recognized(lint: ModuleType) -> None:
    assert lint.MACHINE_PATH.search("open('/ho" + "me/me/data')")
    assert not lint.MACHINE_PATH.search("https://example.org/homepage")


def test_small_file_with_one_importer_is_found(lint: ModuleType) -> None:
    package = ROOT / "src" / "whimbrel"
    files = [
        lint.File(package / "base" / "tiny.py", "x = 1"),
        lint.File(package / "base" / "big.py", "from whimbrel.base.tiny import x"),
    ]
    assert [problem for problem in lint.check_small_files(files) if "tiny" in problem]
