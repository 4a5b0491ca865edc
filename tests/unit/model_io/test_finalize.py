"""`finalize_model`: files, model card, held-out loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from whimbrel.base.errors import CheckpointError, ConfigError, PrecisionError, WriteError
from whimbrel.model_io import HeldOutResult, finalize_model, load_model, load_tokenizer, save_model, weight_state_dict
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import quantize_
from whimbrel.tokenization import train_tokenizer

SHAPE = GPTConfig(context_length=16, vocab_size=300, num_layers=1, embd_size=128, num_heads=4, init_std=0.2)


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


@pytest.fixture
def source(model: GPT, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    save_model(model, folder, train_tokenizer(["to be or not to be"] * 9, vocab_size=270))
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [7, 9], "top_p": 0.5}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    (folder / "special_tokens_map.json").write_text('{"pad_token": "x"}')
    return folder


def distance(model: GPT) -> HeldOutResult:
    """A stand-in for the held-out loss: the mean absolute logit."""
    with torch.no_grad():
        return HeldOutResult(float(model(torch.arange(16)[None]).logits.abs().mean()), 16, 16, "a text")


def test_finalized_directory_is_complete(model, source, tmp_path):
    result = finalize_model(
        source, tmp_path / "out", recipe="int8", evaluate=distance, chat_template="{{ messages }}",
        generation={"top_p": 0.9, "max_new_tokens": 7}, settings={"optim": {"lr": 0.25}},
    )  # fmt: skip
    out = tmp_path / "out"
    expected = GPT(SHAPE)
    expected.load_state_dict(model.state_dict())
    quantize_(expected, "int8")
    written = weight_state_dict(load_model(out))
    assert written.keys() == weight_state_dict(expected).keys()
    for name, tensor in weight_state_dict(expected).items():
        assert torch.equal(written[name], tensor)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["top_p"], generation["max_new_tokens"]) == ([7, 9], 0.9, 7)
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == 3
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert load_tokenizer(out).fingerprint == load_tokenizer(source).fingerprint
    assert {path.suffix for path in out.iterdir()} == {".json", ".safetensors", ".jinja", ".md"}
    before, after = distance(model), distance(expected)
    assert (result.before.held_out, result.after.held_out) == (before, after)
    assert before.loss != after.loss
    assert (result.recipe, result.unquantized, result.num_parameters) == ("int8", ("lm_head",), model.num_parameters())
    assert result.after.num_bytes == (out / "model.safetensors").stat().st_size < 0.8 * result.before.num_bytes


def test_model_card_and_record_have_the_results(source, tmp_path):
    result = finalize_model(
        source, tmp_path / "out", recipe="int4", evaluate=distance, settings={"optim": {"lr": 0.25}}
    )
    card, record = (tmp_path / "out/README.md").read_text(), json.loads((tmp_path / "out/finalize.json").read_text())
    for side in (result.before, result.after):
        assert side.held_out is not None
        for number in (
            f"{side.held_out.loss:.4f}",
            f"{side.held_out.perplexity:.3f}",
            f"{side.num_bytes:,}",
            side.format,
        ):
            assert number in card
    assert record["after"]["measured"]["loss"] == result.after.held_out.loss
    assert record["before"] | {"measured": None} == {
        "format": "float32", "bytes": result.before.num_bytes, "measured": None
    }  # fmt: skip
    for expected_text in ("# out", "gpt2", "int4", "16 tokens of a text", "import whimbrel.hf", "lr = 0.25", "lm_head"):
        assert expected_text in card
    assert card.startswith("---\n")
    assert "license:" not in card


def test_without_recipe_and_evaluation(model, source, tmp_path):
    result = finalize_model(source, tmp_path / "my out", dtype=torch.bfloat16)
    assert (result.recipe, result.after.format, result.after.held_out) == (None, "bfloat16", None)
    assert torch.equal(load_model(tmp_path / "my out").lm_head.weight, model.lm_head.weight.bfloat16())
    table = json.loads((tmp_path / "my out/config.json").read_text())
    assert (table["dtype"], "quantization_config" in table) == ("bfloat16", False)
    card = (tmp_path / "my out/README.md").read_text()
    assert "Not measured." in card
    assert "import whimbrel.hf" not in card
    assert "whimbrel generate 'my out'" in card


def test_quantized_model_keeps_its_format(source, tmp_path):
    finalize_model(source, tmp_path / "one", recipe="int8")
    again = finalize_model(tmp_path / "one", tmp_path / "two")
    assert (again.recipe, again.before.format) == ("int8", "int8, float32")
    first, second = (weight_state_dict(load_model(tmp_path / name)) for name in ("one", "two"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ConfigError, match="one is already quantized as int8"):
        finalize_model(tmp_path / "one", tmp_path / "three", recipe="int4")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"recipe": "int3"}, PrecisionError, "quantize: expected one of .*int8.* got 'int3'"),
        ({"recipe": "bf16"}, PrecisionError, "quantize: expected one of .* got 'bf16'"),
        ({"out": "source"}, WriteError, "source exists and is not empty"),
        ({"source": "nowhere"}, CheckpointError, "no run or model at nowhere"),
        ({"source": "model.bin"}, ConfigError, "got the file model.bin"),
    ],
)
def test_invalid_arguments_are_rejected_without_leaving_files(source, workdir, changes, error, message):
    Path("model.bin").write_bytes(bytes(28))
    before = sorted(path.name for path in workdir.iterdir())
    with pytest.raises(error, match=message):
        finalize_model(**{"source": "source", "out": "out"} | changes)
    assert sorted(path.name for path in workdir.iterdir()) == before


def test_failing_evaluation_leaves_no_files(source, workdir):
    def fails(_: GPT) -> HeldOutResult:
        raise ConfigError("no such text")

    with pytest.raises(ConfigError, match="no such text"):
        finalize_model("source", "out", recipe="int8", evaluate=fails)
    assert [path.name for path in workdir.iterdir()] == ["source"]
