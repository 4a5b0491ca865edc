"""The top-level package: cheap to import, with a lazily imported public API."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import whimbrel

ROOT = Path(__file__).resolve().parents[2]


def test_import_loads_no_heavy_package() -> None:
    heavy = "{'torch', 'numpy', 'pyarrow', 'transformers', 'tokenizers'}"
    code = f"import sys, whimbrel; print(*sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_dir_lists_the_public_api() -> None:
    expected = {
        "GPT",
        "GPTConfig",
        "Trainer",
        "TrainingArguments",
        "generate",
        "load_model",
        "load_tokenizer",
        "save_model",
        "train",
    }
    assert expected <= set(dir(whimbrel))


@pytest.mark.parametrize("name", dir(whimbrel))
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(whimbrel, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        whimbrel.nope  # noqa: B018


@pytest.mark.parametrize("name", ["checkpoint", "data", "train"])
def test_every_public_name_of_a_lazy_package_resolves(name: str) -> None:
    package = importlib.import_module(f"whimbrel.{name}")
    assert all(getattr(package, public) is not None for public in package.__all__)
    assert dir(package) == sorted(package.__all__)


def test_the_wheel_is_small_and_complete(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs the package 'hatchling'")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    assert wheel.stat().st_size <= 3_000_000
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} <= packed
    assert {"whimbrel/data/shakespeare.txt.gz", "whimbrel/server/static/chat.html", "whimbrel/py.typed"} <= packed
