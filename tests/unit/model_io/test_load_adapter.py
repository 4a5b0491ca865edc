"""Loading adapters with their base model: runs, checkpoints, PEFT directories, quantized bases, tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.models import add_noise
from torch import Tensor

import whimbrel
from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.checkpoint import CheckpointManager, SharingPattern, StateComponent, checkpoint_path
from whimbrel.config import dump_toml
from whimbrel.inference import LLM
from whimbrel.model_io import export_hf, finalize_adapter, finalize_model, load, load_adapter, open_model, save_adapter
from whimbrel.model_io.adapter import BASE_INFO
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora, resize_vocabulary
from whimbrel.models.lora import find_lora_config, lora_parameters
from whimbrel.tokenization import ChatTemplate
from whimbrel.train.checkpointing import GPTAdapterState

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": False}
SHAPE = GPTConfig(context_length=32, vocab_size=260, num_layers=2, embd_size=32, num_heads=2, mlp_size=64, **LLAMA)
IDS = torch.arange(24)[None]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"


def logits(model: GPT) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    whimbrel.save_model(add_noise(GPT(SHAPE), 0.1), tmp_path / "base", byte_tokenizer())
    return tmp_path / "base"


def adapted(base: Path, quantize: str | None = None, **settings: object) -> GPT:
    """The base model with adapters that are not zero."""
    model = whimbrel.load_model(base, quantize=quantize)
    apply_lora(model, LoraConfig(rank=4, alpha=8, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in lora_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    save_adapter(adapted(base), tmp_path / "adapter")
    return tmp_path / "adapter"


def save_run(model: GPT, run: Path, base: Path | None) -> Path:
    """A run with one checkpoint, as the trainer saves it."""
    component = StateComponent("model", GPTAdapterState(model, byte_tokenizer()), SharingPattern.GLOBAL)
    CheckpointManager(run).save(5, [component])
    if base is not None:
        (run / "config.toml").write_text(dump_toml({"model": {"path": str(base)}}))
    return run


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_an_adapter_is_merged_with_an_unquantized_base(base, tmp_path, settings):
    model = adapted(base, **settings)
    save_adapter(model, tmp_path / "adapter")
    loaded = whimbrel.load_model(tmp_path / "adapter")
    assert find_lora_config(loaded) is None
    expected = logits(model)
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert not torch.allclose(logits(loaded), logits(whimbrel.load_model(base)), atol=1e-2)
    kept = whimbrel.load_model(tmp_path / "adapter", merge=False)
    assert torch.equal(logits(kept), logits(model))


def test_dropout_of_adapters_is_off_after_loading(base, tmp_path):
    save_adapter(adapted(base, dropout=0.5), tmp_path / "adapter")
    loaded = whimbrel.load_model(tmp_path / "adapter", quantize="int8")
    assert find_lora_config(loaded).dropout == 0.5
    assert torch.equal(loaded(IDS).logits, loaded(IDS).logits)
    loaded.train()
    assert not torch.equal(loaded(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_base_that_was_quantized_in_training_is_quantized_again_and_keeps_its_adapter(
    base, tmp_path, weights, settings
):
    model = adapted(base, weights, **settings)
    run = save_run(model, tmp_path / "run", base)
    loaded = whimbrel.load_model(run)
    assert find_lora_config(loaded) is not None
    assert torch.equal(logits(loaded), logits(model))
    merged = whimbrel.load_model(run, merge=True)
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=1e-4)


def test_cached_dora_gains_are_used_without_gradients_only(base):
    from whimbrel.models.lora import cache_gains

    model = adapted(base, use_dora=True)
    cache_gains(model)
    before = logits(model)
    with torch.no_grad():
        for name, parameter in lora_parameters(model):
            if name.endswith("magnitude_vector"):
                parameter.mul_(2)
    assert torch.equal(logits(model), before)
    assert not torch.allclose(model(IDS).logits, before)
    cache_gains(model)
    assert not torch.allclose(logits(model), before)


def test_base_of_a_run_is_that_of_its_config(base, adapter, tmp_path):
    run = save_run(adapted(base), tmp_path / "run", base)
    table_file = checkpoint_path(run, 5) / "model" / "adapter_config.json"
    assert json.loads(table_file.read_text())["base_model_name_or_path"] == str(base)
    expected = logits(whimbrel.load_model(run))
    moved = base.rename(tmp_path / "moved")
    (run / "config.toml").write_text(dump_toml({"model": {"path": str(moved)}}))
    for path in (run, checkpoint_path(run, 5), checkpoint_path(run, 5) / "model"):
        assert torch.equal(logits(whimbrel.load_model(path)), expected)


def test_a_relative_base_is_recorded_by_its_absolute_path(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_adapter(adapted(Path("base")), "adapter")
    save_adapter(adapted(Path("base")), "named", base_model="owner/name")
    recorded = [json.loads(Path(name, "adapter_config.json").read_text()) for name in ("adapter", "named")]
    assert [table["base_model_name_or_path"] for table in recorded] == [str(base), "owner/name"]
    expected = logits(whimbrel.load_model("adapter"))
    monkeypatch.chdir(Path(tmp_path.anchor))
    assert torch.equal(logits(whimbrel.load_model(tmp_path / "adapter")), expected)


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16])
def test_weights_of_another_base_are_refused(base, tmp_path, trained):
    """The base of a run is recognized in any dtype and format, also merged and saved again."""
    model = whimbrel.load_model(base, dtype=trained)
    apply_lora(model, LoraConfig(rank=4))
    run = save_run(model, tmp_path / "run", base)
    export_hf(base, tmp_path / "bf16", dtype=torch.bfloat16)
    finalize_model(base, tmp_path / "int4", recipe="int4")
    for name in ("base", "bf16", "int4"):
        for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
            whimbrel.load_model(run, base=tmp_path / name, dtype=dtype)
    for quantize in ("int8", "int4"):
        whimbrel.load_model(run, quantize=quantize)

    with torch.no_grad():
        tuned = whimbrel.load_model(base)  # as after a short fine-tuning of all weights
        for name, parameter in tuned.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.add_(noise, alpha=0.02 * float(parameter.std()))
    whimbrel.save_model(tuned, tmp_path / "tuned", byte_tokenizer())
    torch.manual_seed(1)
    whimbrel.save_model(add_noise(GPT(SHAPE), 0.1), tmp_path / "other", byte_tokenizer())
    for name, quantize in (("tuned", None), ("other", None), ("other", "int4")):
        with pytest.raises(CheckpointError, match=rf"different weights than .*{name}: .* \(--base\)"):
            whimbrel.load_model(run, base=tmp_path / name, quantize=quantize)
    LLM(str(base), adapters={"run": run}, device="cpu")
    with pytest.raises(CheckpointError, match="different weights than"):
        LLM(str(tmp_path / "other"), adapters={"run": run}, device="cpu")


def test_a_missing_base_is_reported_with_the_remedy(base, adapter, tmp_path):
    expected = logits(whimbrel.load_model(adapter))
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"adapter of .*base, which does not exist: .* \(--base\)"):
        whimbrel.load_model(adapter)
    assert torch.equal(logits(whimbrel.load_model(adapter, base=moved)), expected)
    assert open_model(adapter, base=moved).location.root == moved
    with pytest.raises(ConfigError, match="--base is for adapters, but"):
        whimbrel.load_model(moved, base=moved)
    table = json.loads((adapter / "adapter_config.json").read_text())
    for name, message in ((None, "without a recorded base model"), (str(adapter), "is recorded as its own base model")):
        (adapter / "adapter_config.json").write_text(json.dumps(table | {"base_model_name_or_path": name}))
        with pytest.raises(CheckpointError, match=message):
            whimbrel.load_model(adapter)


def test_a_base_model_in_the_hub_cache(base, adapter, tmp_path, monkeypatch):
    expected = logits(whimbrel.load_model(adapter))
    cached = tmp_path / "hub" / "models--someone--base"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    snapshot = Path(shutil.copytree(base, cached / "snapshots" / ("0" * 40)))
    save_adapter(adapted(snapshot), tmp_path / "snapshot")
    recorded = json.loads((tmp_path / "snapshot" / "adapter_config.json").read_text())
    assert (recorded["base_model_name_or_path"], recorded["revision"]) == ("someone/base", "0" * 40)
    table = json.loads((adapter / "adapter_config.json").read_text())
    for name in ("someone/base", "someone/else"):
        (adapter / "adapter_config.json").write_text(json.dumps(table | {"base_model_name_or_path": name}))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        if name == "someone/base":
            for path in (adapter, tmp_path / "snapshot"):
                assert torch.equal(logits(whimbrel.load_model(path)), expected)
            finalize_adapter(adapter, tmp_path / "copy")
            assert json.loads((tmp_path / "copy/adapter_config.json").read_text())["base_model_name_or_path"] == name
        else:
            with pytest.raises(
                CheckpointError,
                match="adapter of someone/else, which is not in the local cache: pass --base someone/else",
            ):
                whimbrel.load_model(adapter)


def test_an_adapter_of_a_run_with_adapters(base, adapter, tmp_path):
    first = whimbrel.load_model(adapter)
    assert first.name_or_path == str(adapter)
    apply_lora(first, LoraConfig(rank=2))
    with torch.no_grad():
        for name, parameter in lora_parameters(first):
            if name.endswith("lora_B"):
                parameter.add_(0.1)
    save_adapter(first, tmp_path / "second")
    torch.testing.assert_close(logits(whimbrel.load_model(tmp_path / "second")), logits(first), atol=1e-5, rtol=1e-5)


def test_tokenizer_template_and_stop_tokens_of_the_adapter_come_first(base, adapter):
    ChatTemplate("base {{ messages[0]['content'] }}").save(base)
    loaded = load(adapter)
    assert loaded.tokenizer.fingerprint == byte_tokenizer().fingerprint
    assert loaded.chat_template.source.startswith("base")
    assert loaded.generation_config.eos_token_ids == (256,)
    assert whimbrel.load_tokenizer(adapter).fingerprint == byte_tokenizer().fingerprint
    other = byte_tokenizer(("<|im_end|>", "<|endoftext|>"))
    other.save(adapter)
    ChatTemplate(TEMPLATE).save(adapter)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    loaded = load(adapter)
    assert loaded.tokenizer.eot_token == "<|im_end|>"
    assert loaded.chat_template.source == TEMPLATE
    assert loaded.generation_config.eos_token_ids == (257, 256)
    assert LLM(str(adapter)).template.source == TEMPLATE


def test_tokens_that_were_added_for_training(base, tmp_path):
    model = whimbrel.load_model(base)
    tokenizer = byte_tokenizer().with_special_tokens([f"<|{i}|>" for i in range(6)])
    resize_vocabulary(model, tokenizer.vocab_size)
    apply_lora(model, LoraConfig(rank=2))
    save_adapter(model, tmp_path / "adapter")
    tokenizer.save(tmp_path / "adapter")
    loaded = load(tmp_path / "adapter")
    assert loaded.model.config.vocab_size == tokenizer.vocab_size == 263
    assert torch.equal(loaded.model.token_embedding.weight, model.token_embedding.weight)
    finalize_model(tmp_path / "adapter", tmp_path / "merged")
    assert torch.equal(whimbrel.load_model(tmp_path / "merged").lm_head.weight, model.lm_head.weight)


def test_finalize_merges_and_requantizes(base, adapter, tmp_path):
    other = byte_tokenizer(("<|im_end|>", "<|endoftext|>"))
    other.save(adapter)
    ChatTemplate(TEMPLATE).save(adapter)
    finalize_model(adapter, tmp_path / "merged")
    expected = whimbrel.load_model(adapter)
    assert torch.equal(logits(whimbrel.load_model(tmp_path / "merged")), logits(expected))
    merged, source = load(tmp_path / "merged"), load(adapter)
    assert merged.tokenizer.fingerprint == source.tokenizer.fingerprint
    assert merged.chat_template.source == TEMPLATE
    assert set(merged.generation_config.eos_token_ids) == set(source.generation_config.eos_token_ids)
    result = finalize_model(adapter, tmp_path / "int8", recipe="int8")
    assert (result.before.format, result.after.format) == ("float32", "int8, float32")
    assert torch.equal(
        logits(whimbrel.load_model(tmp_path / "int8")),
        logits(whimbrel.load_model(tmp_path / "merged", quantize="int8")),
    )


def test_finalize_without_merging_copies_the_adapter(base, tmp_path):
    model = adapted(base, "int8")
    run = save_run(model, tmp_path / "run", base)
    ChatTemplate(TEMPLATE).save(base)
    finalize_adapter(run, tmp_path / "peft")
    shutil.rmtree(run)
    names = {file.name for file in (tmp_path / "peft").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json", BASE_INFO} <= names
    assert not names & {"config.json", "model.safetensors"}
    assert torch.equal(logits(whimbrel.load_model(tmp_path / "peft")), logits(model))
    assert load(tmp_path / "peft").chat_template.source == TEMPLATE
    with pytest.raises(ConfigError, match="expected a run or directory with adapters"):
        finalize_adapter(base, tmp_path / "other")
    again = whimbrel.load_model(base, quantize="int8")
    load_adapter(again, tmp_path / "peft")
    assert torch.equal(logits(again), logits(model))
