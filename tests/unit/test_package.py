"""The top-level package: cheap to import, with a lazily imported public API."""

from __future__ import annotations

import subprocess
import sys

import pytest

import whimbrel


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
