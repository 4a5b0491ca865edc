"""`whimbrel export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.commands import whimbrel

from whimbrel.checkpoint import CheckpointManager, SharingPattern, StateComponent
from whimbrel.model_io import load_model, save_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import QuantizedWeight, quantize_
from whimbrel.tokenization import load_tokenizer, train_tokenizer
from whimbrel.train.checkpointing import model_state

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": False}
CONFIG = GPTConfig(context_length=32, vocab_size=260, num_layers=1, embd_size=32, num_heads=2, **LLAMA)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    torch.manual_seed(0)
    state = model_state(GPT(CONFIG), train_tokenizer(["to be or not to be"], 257))
    CheckpointManager(folder).save(5, [StateComponent("model", state, SharingPattern.GLOBAL)])
    return folder


def test_run_is_exported_as_a_directory(run, tmp_path, capsys):
    assert whimbrel("export", run, tmp_path / "out", "--dtype", "bf16") == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}/: ")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_model(run, dtype=torch.bfloat16)
    assert torch.equal(stored["model.embed_tokens.weight"], expected.token_embedding.weight[:260])
    assert load_tokenizer(tmp_path / "out").vocab_size == 257


def test_quantized_directory_is_dequantized_with_its_chat_template(run, tmp_path):
    model = load_model(run)
    quantize_(model, "int8")
    save_model(model, tmp_path / "int8", load_tokenizer(run / "checkpoints" / "step-00000005" / "model"))
    (tmp_path / "int8" / "chat_template.jinja").write_text("{{ messages }}")
    assert whimbrel("export", tmp_path / "int8", tmp_path / "plain", "--format", "hf") == 0
    plain = load_model(tmp_path / "plain")
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.dequantize() if isinstance(ours, QuantizedWeight) else ours, theirs), name
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert (tmp_path / "plain" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_gguf_suffix_selects_the_format(run, tmp_path, capsys):
    gguf = pytest.importorskip("gguf", reason="needs the package 'gguf': pip install 'whimbrel[gguf]'")
    assert whimbrel("export", run / "checkpoints" / "step-00000005", tmp_path / "model.gguf", "--dtype", "fp16") == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'model.gguf'}: ")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "F16"


@pytest.mark.parametrize(("form", "name"), [("gguf", "model"), ("hf", "model.gguf")])
def test_format_and_suffix_must_agree(run, tmp_path, capsys, form, name):
    assert whimbrel("export", run, tmp_path / name, "--format", form) == 2
    assert "GGUF file name ends in .gguf" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["model.ggf", "model.GGUF", "model.guff", "model.bin", "model.safetensors"])
def test_misspelled_suffix_is_rejected(run, tmp_path, capsys, name):
    assert whimbrel("export", run, tmp_path / name) == 2
    assert f"a file name that ends in .gguf, got {tmp_path / name}" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_llama2c_file_is_rejected(tmp_path, capsys):
    (tmp_path / "model.bin").write_bytes(b"")
    for out in ("out", "out.gguf"):
        assert whimbrel("export", tmp_path / "model.bin", tmp_path / out) == 2
        assert "expected a run, a checkpoint or a model directory" in capsys.readouterr().err


def test_missing_gguf_package_names_the_extra(run, tmp_path, monkeypatch, capsys):
    for module in [name for name in sys.modules if name.startswith("whimbrel.model_io.gguf")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert whimbrel("export", run, tmp_path / "model.gguf") == 2
    assert "pip install 'whimbrel[gguf]'" in capsys.readouterr().err
