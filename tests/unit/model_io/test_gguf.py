"""GGUF export: metadata, tensors, rejected models. tests/parity loads the files with other programs."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from tokenizers.processors import TemplateProcessing

from whimbrel.base.errors import CheckpointError, ConfigError, WriteError
from whimbrel.model_io import export_hf, load_model, save_model
from whimbrel.model_io.weights import TensorFiles
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.config import RopeScaling
from whimbrel.precision import quantize_
from whimbrel.tokenization import Tokenizer, train_tokenizer

gguf = pytest.importorskip("gguf", reason="needs the package 'gguf': pip install 'whimbrel[gguf]'")
from whimbrel.model_io.gguf import export_gguf  # noqa: E402 (it needs the extra)

LLAMA = GPTConfig(
    context_length=32,
    vocab_size=270,
    num_layers=2,
    embd_size=64,
    num_heads=4,
    num_kv_heads=2,
    mlp_size=96,
    norm="rms",
    norm_eps=1e-6,
    position="rope",
    rope_theta=500.0,
    activation="silu",
    gated_mlp=True,
    bias="none",
    tied_head=True,
)
GPT2 = GPTConfig(context_length=32, vocab_size=270, num_layers=1, embd_size=64, num_heads=4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["to be or not to be, that is the question"], 267, min_frequency=1)


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Path]:
    """Saves a model of this config; the tokenizer has three tokens fewer than the model."""

    def make(config: GPTConfig, tokenizer: Tokenizer = tokenizer, name: str = "model") -> Path:
        torch.manual_seed(0)
        save_model(GPT(config), tmp_path / name, tokenizer)
        return tmp_path / name

    return make


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def test_metadata_of_a_llama(saved, tmp_path, tokenizer):
    export_gguf(saved(LLAMA), tmp_path / "small.gguf", dtype=torch.float16)
    exported = fields(tmp_path / "small.gguf")
    assert exported["general.architecture"] == "llama"
    assert (exported["general.name"], exported["general.file_type"]) == ("small", gguf.LlamaFileType.MOSTLY_F16)
    assert {name.removeprefix("llama."): value for name, value in exported.items() if name.startswith("llama.")} == {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.value_length": 16,
        "block_count": 2,
        "context_length": 32,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "rope.dimension_count": 16,
        "rope.freq_base": 500.0,
        "vocab_size": 270,
    }
    metadata = {name.removeprefix("tokenizer.ggml."): value for name, value in exported.items() if "ggml" in name}
    assert (metadata["model"], metadata["pre"]) == ("gpt2", "gpt-2")
    assert metadata["tokens"][266:] == ["<|endoftext|>", "[PAD267]", "[PAD268]", "[PAD269]"]
    assert metadata["token_type"] == [*[1] * 266, 3, 5, 5, 5]
    assert len(metadata["merges"]) == 266 - 256
    assert (metadata["bos_token_id"], metadata["eos_token_id"]) == (tokenizer.eot_id, tokenizer.eot_id)
    assert (metadata["add_bos_token"], metadata["add_eos_token"]) == (False, False)
    assert "tokenizer.chat_template" not in exported


def test_matrices_have_the_dtype_and_other_tensors_are_fp32(saved, tmp_path):
    export_gguf(saved(LLAMA), tmp_path / "llama.gguf", dtype=torch.bfloat16)
    stored = kinds(tmp_path / "llama.gguf")
    assert "output.weight" not in stored, "a tied head is stored once"
    assert {name for name, kind in stored.items() if kind == "F32"} == {
        "output_norm.weight", *(f"blk.{layer}.{part}_norm.weight" for layer in (0, 1) for part in ("attn", "ffn")),
    }  # fmt: skip
    assert set(stored.values()) == {"F32", "BF16"}
    export_gguf(saved(GPT2, name="gpt2"), tmp_path / "gpt2.gguf", dtype=torch.float16)
    half = {name for name, kind in kinds(tmp_path / "gpt2.gguf").items() if kind == "F16"}
    assert half == {
        "token_embd.weight", *(f"blk.0.{part}.weight" for part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
    }  # fmt: skip


def test_default_dtype_is_the_stored_one(saved, tmp_path):
    model = load_model(saved(LLAMA), dtype=torch.bfloat16)
    save_model(model, tmp_path / "bf16", train_tokenizer(["to be or not"], 257))
    export_gguf(tmp_path / "bf16", tmp_path / "bf16.gguf")
    assert kinds(tmp_path / "bf16.gguf")["token_embd.weight"] == "BF16"
    with pytest.raises(ConfigError, match="float64"):
        export_gguf(tmp_path / "bf16", tmp_path / "more.gguf", dtype=torch.float64)


def test_rope_scaling_is_exported(saved, tmp_path):
    linear = replace(LLAMA, rope_scaling=RopeScaling(kind="linear", factor=4.0))
    export_gguf(saved(linear), tmp_path / "linear.gguf")
    exported = fields(tmp_path / "linear.gguf")
    assert (exported["llama.rope.scaling.type"], exported["llama.rope.scaling.factor"]) == ("linear", 4.0)
    llama3 = replace(LLAMA, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_context_length=32))
    export_gguf(saved(llama3, name="llama3"), tmp_path / "llama3.gguf")
    [factors] = [t.data for t in gguf.GGUFReader(tmp_path / "llama3.gguf").tensors if t.name == "rope_freqs.weight"]
    assert factors.shape == (8,)
    assert factors[0] == 1, "the highest frequency is unchanged"
    assert factors[-1] == pytest.approx(8), "the lowest is divided by the factor"


@pytest.mark.parametrize(
    ("config", "ignored"),
    [
        (LLAMA, None),
        (GPT2, None),
        (replace(LLAMA, rope_scaling=RopeScaling(kind="linear", factor=4.0), bias="all"), "rope scaling and biases"),
        (replace(GPT2, mlp_size=100), "the MLP width"),
        (replace(LLAMA, bias="qkv", head_size=32), "the head size"),
        (replace(LLAMA, qk_norm="weighted", head_size=32), "the head size"),
        (replace(LLAMA, qk_norm="weighted", head_size=128), None),
    ],
)
def test_metadata_that_transformers_ignores_is_logged(saved, tmp_path, caplog, config, ignored):
    export_gguf(saved(config), tmp_path / "model.gguf")
    assert [record.getMessage() for record in caplog.records] == (
        [] if ignored is None else [
            f"transformers does not read {ignored} from {tmp_path / 'model.gguf'}: pass "
            f"config=AutoConfig.from_pretrained('{tmp_path / 'model'}') to from_pretrained"
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(GPT2, residual_scale="attention"), "no architecture for model_type 'whimbrel'"),
        (replace(GPT2, activation="gelu"), "'gpt2' does not support activation gelu"),
        (replace(LLAMA, activation="gelu_tanh"), "'llama' does not support activation gelu_tanh"),
        (replace(LLAMA, sliding_window=8), "'llama' does not support a sliding window of 8"),
        (replace(LLAMA, qk_norm="weighted", bias="attention"), "'qwen3' does not support biases"),
        (
            replace(LLAMA, qk_norm="weighted", rope_scaling=RopeScaling(kind="llama3", factor=8.0)),
            "'qwen3' does not support rope scaling of kind llama3",
        ),
    ],
)
def test_unsupported_models_are_rejected(saved, tmp_path, config, message):
    with pytest.raises(ConfigError, match=message) as error:
        export_gguf(saved(config), tmp_path / "model.gguf")
    assert "--format hf" in str(error.value)
    assert not (tmp_path / "model.gguf").exists()


def test_window_as_long_as_the_context_is_exported_as_llama(saved, tmp_path):
    directory = saved(replace(LLAMA, sliding_window=32))
    assert json.loads((directory / "config.json").read_text())["model_type"] == "mistral"
    export_gguf(directory, tmp_path / "model.gguf")
    assert fields(tmp_path / "model.gguf")["general.architecture"] == "llama"


def test_special_tokens_and_chat_template_are_exported(saved, tmp_path, caplog):
    directory = saved(LLAMA)
    edit(directory / "generation_config.json", bos_token_id=3, eos_token_id=[4, 5, 6, 7])
    edit(directory / "tokenizer_config.json", chat_template="{{ messages }}")
    export_gguf(directory, tmp_path / "model.gguf")
    exported = fields(tmp_path / "model.gguf")
    assert [exported[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot", "eom")] == [3, 4, 5, 6]
    assert exported["tokenizer.chat_template"] == "{{ messages }}"
    assert "(7,)" in caplog.text
    (directory / "chat_template.jinja").write_text("{{ other }}")
    edit(directory / "generation_config.json", bos_token_id=None, eos_token_id=None)
    edit(directory / "config.json", bos_token_id=None, eos_token_id=None)
    export_gguf(directory, tmp_path / "again.gguf")
    exported = fields(tmp_path / "again.gguf")
    assert exported["tokenizer.chat_template"] == "{{ other }}"
    assert (exported["tokenizer.ggml.bos_token_id"], exported["tokenizer.ggml.eos_token_id"]) == (266, 266)


def byte_level(**settings: Any) -> Pipeline:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pipeline = Pipeline(models.BPE({letter: index for index, letter in enumerate(alphabet)}, [], **settings))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return pipeline


def with_splitter(splitter: Any) -> Pipeline:
    pipeline = byte_level()
    pipeline.pre_tokenizer = splitter
    return pipeline


def appends_two_eos_tokens() -> Pipeline:
    pipeline = byte_level()
    pipeline.post_processor = TemplateProcessing(
        single="$A <|endoftext|> <|endoftext|>", special_tokens=[("<|endoftext|>", 256)]
    )
    return pipeline


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            byte_level(byte_fallback=True),
            "got BPE with byte_fallback: export a directory instead, then .*convert_hf_to_gguf.py",
        ),
        (byte_level(ignore_merges=True), "ignore_merges true"),
        (with_splitter(pre_tokenizers.ByteLevel(add_prefix_space=True)), "add_prefix_space"),
        (with_splitter(pre_tokenizers.Whitespace()), '"type": "Whitespace"'),
        (
            with_splitter(
                pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel()])
            ),
            "Digits",
        ),
        (appends_two_eos_tokens(), r"adds ids \(\) before and \(256, 256\) after a text"),
    ],
)
def test_unsupported_tokenizers_are_rejected(saved, tmp_path, pipeline, message):
    with pytest.raises(ConfigError, match=message):
        export_gguf(saved(LLAMA, Tokenizer(pipeline)), tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_quantized_weights_are_dequantized(saved, tmp_path, tokenizer):
    for name, config in (("llama", LLAMA), ("gpt2", GPT2)):
        model = load_model(saved(config, name=name))
        quantize_(model, "int8")
        save_model(model, tmp_path / f"{name}-int8", tokenizer)
        export_hf(tmp_path / f"{name}-int8", tmp_path / f"{name}-dense")
        for source in ("int8", "dense"):
            export_gguf(tmp_path / f"{name}-{source}", tmp_path / source / f"{name}.gguf")
        files = [(tmp_path / source / f"{name}.gguf").read_bytes() for source in ("int8", "dense")]
        assert files[0] == files[1]


def test_only_one_tensor_is_in_memory(saved, tmp_path, monkeypatch):
    alive: list[weakref.ref[Any]] = []
    read = TensorFiles.read

    def watched(self: TensorFiles, name: str) -> torch.Tensor:
        tensor = read(self, name)
        assert not [tensor for tensor in alive if tensor() is not None], (
            f"another tensor is in memory when {name} is read"
        )
        alive.append(weakref.ref(tensor))
        return tensor

    directory = saved(LLAMA)
    monkeypatch.setattr(TensorFiles, "read", watched)
    export_gguf(directory, tmp_path / "model.gguf", dtype=torch.float32)
    assert len(alive) >= 20


def test_failed_export_leaves_no_file(saved, tmp_path):
    directory = saved(LLAMA)
    model = load_model(directory)
    with torch.no_grad():
        next(iter(model.blocks)).mlp.c_proj.weight[0, 0] = 1e5
    save_model(model, tmp_path / "large")
    (tmp_path / "large" / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"down_proj.*beyond the range of fp16.*bf16"):
        export_gguf(tmp_path / "large", out / "model.gguf", dtype=torch.float16)
    assert not list(out.iterdir())
    export_gguf(tmp_path / "large", out / "model.gguf", dtype=torch.bfloat16)
    with pytest.raises(WriteError, match="exists"):
        export_gguf(tmp_path / "large", out / "model.gguf")


def test_invalid_paths_are_rejected(saved, tmp_path):
    directory = saved(LLAMA)
    with pytest.raises(ConfigError, match=r"ends in \.gguf"):
        export_gguf(directory, tmp_path / "model.bin")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        export_gguf(directory, tmp_path / "model.gguf")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"got the file .*model\.bin"):
        export_gguf(tmp_path / "model.bin", tmp_path / "model.gguf")
    edit(directory / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="quantization_config"):
        export_gguf(directory, tmp_path / "model.gguf")
