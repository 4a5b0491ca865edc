"""Generation defaults of a model directory: special tokens and sampling parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.byte_tokenizer import byte_tokenizer

from whimbrel.base.errors import CheckpointError
from whimbrel.inference import SamplingParams
from whimbrel.model_io import GenerationConfig, ModelLocation, read_generation_config, save_model
from whimbrel.models import GPT, GPTConfig

SMALL = GPTConfig(context_length=16, vocab_size=300, num_layers=1, embd_size=16, num_heads=2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(GPT(SMALL), tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, change: Callable[[dict], object]) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def read(directory: Path) -> GenerationConfig:
    return read_generation_config(ModelLocation(directory), byte_tokenizer(), SMALL.vocab_size)


def sampling(directory: Path) -> dict[str, Any]:
    return dict(read(directory).sampling)


def write_generation(directory: Path, **fields: object) -> None:
    (directory / "generation_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"])
@pytest.mark.parametrize(
    "value",
    ["0.7", [1] * 1000, {"a": 1}, True, float("nan"), float("inf")],
    ids=["text", "list", "object", "bool", "nan", "inf"],
)
def test_fields_of_the_wrong_type_are_rejected(saved, field, value):
    for do_sample in (True, False, None):
        write_generation(saved, do_sample=do_sample, **{field: value})
        with pytest.raises(CheckpointError, match=f"generation_config.json: expected {field} to be") as error:
            read(saved)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300 + len(str(saved))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_k", -1), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.5), ("min_p", 2)]
    + [("repetition_penalty", 0), ("max_new_tokens", 0), ("do_sample", "yes")],
)
def test_values_out_of_range_are_rejected_if_they_are_used(saved, field, value):
    write_generation(saved, **{"do_sample": True, field: value})
    with pytest.raises(CheckpointError, match=f"generation_config.json: expected {field} to be"):
        read(saved)
    write_generation(saved, do_sample=False, temperature=-1, top_k=-1, top_p=0)  # unused by greedy decoding
    assert sampling(saved) == {"temperature": 0.0}


def test_top_k_0_disables_top_k(saved):
    write_generation(saved, do_sample=True, top_k=0, temperature=0.7)
    assert not sampling(saved)["top_k"]
    SamplingParams(**sampling(saved))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("fields", [{"bos_token_id": "1"}, {"eos_token_id": [1, "2"]}, {"eos_token_id": {"a": 1}}])
def test_special_token_ids_of_the_wrong_type_are_rejected(saved, file, fields):
    edit(saved / file, lambda table: table.update(fields))
    with pytest.raises(CheckpointError, match=rf"/{file}: expected {next(iter(fields))} to be a token id"):
        read(saved)


def test_bos_token_falls_back_to_the_tokenizer(saved):
    tokenizer = byte_tokenizer()
    for bos_id, expected in ((5, 5), (None, tokenizer.bos_id), (50256, tokenizer.bos_id)):
        edit(saved / "generation_config.json", lambda table, bos_id=bos_id: table.update(bos_token_id=bos_id))
        assert read(saved).bos_token_id == expected


@pytest.mark.parametrize(
    ("eos", "expected", "ignored"),
    [
        (7, (7,), None),
        ([9, 7], (9, 7), None),
        (None, (256,), None),
        (50256, (256,), r"ignoring eos_token_id \[50256\], expected ids from 0 to 299"),
        ([300, 7, -1], (7,), r"ignoring eos_token_id \[-1, 300\]"),
    ],
)
def test_eos_token_ids_outside_the_vocabulary_are_ignored_with_a_warning(saved, caplog, eos, expected, ignored):
    assert byte_tokenizer().eot_id == 256
    edit(saved / "generation_config.json", lambda table: table.update(eos_token_id=eos))
    assert read(saved).eos_token_ids == expected
    assert len(caplog.messages) == (ignored is not None)
    for message in caplog.messages:
        assert re.search(ignored, message)


def test_max_new_tokens_is_separate_from_sampling_parameters(saved):
    write_generation(saved, max_new_tokens=5, repetition_penalty=1.5, temperature=0.5)
    assert read(saved).max_new_tokens == 5
    assert sampling(saved) == {"repetition_penalty": 1.5}
