"""LoRA adapters of our GPT against PEFT: directories, logits, gradients and merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tests.parity.conftest import SHAPES
from tests.support.models import add_noise
from torch import Tensor

import whimbrel
from whimbrel.model_io import merge_adapter
from whimbrel.model_io.adapter import load_adapter, save_adapter
from whimbrel.models import GPT
from whimbrel.models.lora import LoraConfig, apply_lora, lora_parameters, merge_lora
from whimbrel.precision import dequantize_

peft = pytest.importorskip("peft", reason="needs the package 'peft': pip install 'whimbrel[hf]'")

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
FAMILIES = ("llama3-rope", "gpt2", "qwen2", "mistral")
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "rslora-dora": {"use_rslora": True, "use_dora": True},
}
"""Settings with the same names in PEFT and here."""
TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"]}
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def base(family: str, tmp_path: Path) -> Path:
    """The directory of a small transformers model."""
    return save_base(family, tmp_path / "base")


def save_base(family: str, path: Path, **settings: object) -> Path:
    name, shape = SHAPES[family]
    torch.manual_seed(0)
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    config = getattr(transformers, name)(**shape | dropout | settings)
    add_noise(transformers.AutoModelForCausalLM.from_config(config), 0.1).save_pretrained(path)
    return path


def hf_base(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def peft_model(path: Path, family: str, **settings: object) -> peft.PeftModel:
    """A model with PEFT adapters whose parameters are all nonzero."""
    torch.manual_seed(1)
    defaults = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS.get(family, LLAMA_TARGETS)}
    if family == "gpt2":
        defaults["fan_in_fan_out"] = True
    model = peft.get_peft_model(hf_base(path), peft.LoraConfig(**defaults | settings))
    return randomize(model)


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Change the adapters, so that B is not zero and magnitudes are not norms."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def our_model(path: Path, **settings: object) -> GPT:
    model = whimbrel.load_model(path)
    apply_lora(model, LoraConfig(rank=4, alpha=6, **settings))
    return randomize(model)


def peft_names(model: GPT) -> dict[str, str]:
    """Our names of the adapters' parameters, by those in a PEFT model (`named_parameters`)."""
    from whimbrel.model_io.adapter import PREFIX, _module_names

    modules, names = _module_names(model), {}
    for name, _ in lora_parameters(model):
        prefix, _, kind = name.rpartition(".")
        names[f"{PREFIX}{modules[prefix]}.{kind}.default.weight"] = name
    return names


def loss_gradients(model: torch.nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.train()
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_with_an_adapter_of_peft(base, family, kind, ids, logits, tmp_path):
    theirs = peft_model(base, family, **KINDS[kind])
    theirs.save_pretrained(tmp_path / "adapter")
    ours = whimbrel.load_model(base)
    config = load_adapter(ours, tmp_path / "adapter")
    assert (config.rank, config.alpha) == (4, 6)
    torch.testing.assert_close(logits(ours, ids), logits(theirs.eval(), ids), **CLOSE)
    expected, gradients, names = loss_gradients(theirs, ids), loss_gradients(ours, ids), peft_names(ours)
    assert expected.keys() == names.keys()
    assert gradients.keys() == set(names.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[names[name]], gradient, **CLOSE, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_our_adapter(base, kind, ids, logits, tmp_path):
    ours = our_model(base, **KINDS[kind])
    save_adapter(ours, tmp_path / "adapter", base_model=str(base))
    theirs = peft.PeftModel.from_pretrained(hf_base(base), tmp_path / "adapter")
    assert not theirs.training
    torch.testing.assert_close(logits(theirs, ids), logits(ours.eval(), ids), **CLOSE)
    found = {name for name, _ in theirs.named_parameters() if "lora_" in name}
    assert found == peft_names(ours).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_equal_merge_and_unload(base, family, kind, tmp_path):
    theirs = peft_model(base, family, **KINDS[kind])
    theirs.save_pretrained(tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    expected = theirs.merge_and_unload().state_dict()
    merged = hf_base(tmp_path / "merged").state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_dropout_draws_as_peft_does(base, family, kind, ids, tmp_path):
    theirs = peft_model(base, family, lora_dropout=0.3, **KINDS[kind])
    theirs.save_pretrained(tmp_path / "adapter")
    ours = whimbrel.load_model(base)
    load_adapter(ours, tmp_path / "adapter")
    found = []
    for model in (theirs, ours):
        torch.manual_seed(3)
        found.append(loss_gradients(model, ids))
    for name, ours_name in peft_names(ours).items():
        torch.testing.assert_close(found[1][ours_name], found[0][name], **CLOSE, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": r".*\.(1|2)\.mlp\.down_proj"},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 3}, "alpha_pattern": {"mlp.up_proj": 12}},
    ],
)
def test_selected_modules_and_patterns_in_both_directions(settings, ids, logits, tmp_path):
    base = save_base("llama3-rope", tmp_path / "base")
    theirs = peft_model(base, "llama3-rope", **settings)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = whimbrel.load_model(base)
    load_adapter(ours, tmp_path / "adapter")
    expected = logits(theirs.eval(), ids)
    torch.testing.assert_close(logits(ours, ids), expected, **CLOSE)
    save_adapter(ours, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(hf_base(base), tmp_path / "again")
    torch.testing.assert_close(logits(again, ids), expected, **CLOSE)


def test_default_modules_are_those_of_all_linear(base, family, tmp_path):
    theirs = peft_model(base, family, target_modules="all-linear")
    assert {name for name, p in theirs.named_parameters() if p.requires_grad} == peft_names(our_model(base)).keys()


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_quantized_base_equals_peft_on_the_dequantized_weights(weight_format, kind, ids, logits, tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    base = save_base("llama3-rope", tmp_path / "base", **shape)
    quantized = whimbrel.load_model(base, quantize=weight_format)
    dense = whimbrel.load_model(base, quantize=weight_format)
    dequantize_(dense)
    whimbrel.save_model(dense, tmp_path / "dense")
    theirs = peft_model(tmp_path / "dense", "llama3-rope", **KINDS[kind])
    theirs.save_pretrained(tmp_path / "adapter")
    load_adapter(quantized, tmp_path / "adapter")
    torch.testing.assert_close(logits(quantized, ids), logits(theirs.eval(), ids), **CLOSE)
    expected, gradients = loss_gradients(theirs, ids), loss_gradients(quantized, ids)
    for name, ours_name in peft_names(quantized).items():
        torch.testing.assert_close(gradients[ours_name], expected[name], **CLOSE, msg=name)
    merge_lora(quantized)
    whimbrel.save_model(quantized, tmp_path / "merged")
    merged, unloaded = hf_base(tmp_path / "merged").state_dict(), theirs.merge_and_unload().state_dict()
    for name, tensor in unloaded.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-6, msg=name)


def test_bf16_base_with_fp32_adapters_under_autocast(ids, tmp_path):
    base = save_base("llama3-rope", tmp_path / "base")
    theirs = peft_model(base, "llama3-rope").to(torch.bfloat16)
    theirs.base_model._cast_adapter_dtype("default")
    theirs.save_pretrained(tmp_path / "adapter")
    ours = whimbrel.load_model(base, dtype=torch.bfloat16)
    load_adapter(ours, tmp_path / "adapter")
    assert {p.dtype for _, p in lora_parameters(ours)} == {torch.float32}
    reference = whimbrel.load_model(base)
    load_adapter(reference, tmp_path / "adapter")
    gradients = []
    for model, autocast in ((ours, True), (ours, False), (theirs, True), (reference, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            gradients.append(loss_gradients(model, ids))
    names = peft_names(ours)
    for name, ours_name in names.items():
        exact, scale = gradients[3][ours_name], gradients[3][ours_name].norm()
        errors = [(g.float() - exact).norm() / scale for g in (gradients[0][ours_name], gradients[2][name])]
        assert gradients[0][ours_name].dtype == torch.float32
        assert errors[0] < 2 * errors[1] + 0.02  # bf16 has 8 bits of precision; PEFT's error is the yardstick
        assert (gradients[1][ours_name] - exact).norm() / scale < 2 * errors[1] + 0.02


def test_training_steps_equal_peft(ids, tmp_path):
    base = save_base("qwen2", tmp_path / "base")
    ours = our_model(base)
    save_adapter(ours, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(hf_base(base), tmp_path / "adapter", is_trainable=True)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            loss_gradients(model, ids)
            optimizer.step()
    parameters, trained = dict(lora_parameters(ours)), dict(theirs.named_parameters())
    for name, ours_name in peft_names(ours).items():
        torch.testing.assert_close(parameters[ours_name], trained[name], **CLOSE, msg=name)


def test_names_of_files_and_tensors_are_those_of_peft(base, family, tmp_path):
    from safetensors.torch import load_file

    theirs, ours = peft_model(base, family, use_dora=True), our_model(base, use_dora=True)
    theirs.save_pretrained(tmp_path / "theirs")
    save_adapter(ours, tmp_path / "ours")
    tensors = [load_file(tmp_path / which / "adapter_model.safetensors") for which in ("theirs", "ours")]
    shapes = [{name: tensor.shape for name, tensor in stored.items()} for stored in tensors]
    assert shapes[0] == shapes[1]
    tables = [json.loads((tmp_path / which / "adapter_config.json").read_text()) for which in ("theirs", "ours")]
    assert tables[1].keys() <= tables[0].keys()
    for name in ("peft_type", "r", "lora_alpha", "use_dora", "bias", "fan_in_fan_out", "modules_to_save"):
        assert tables[0][name] == tables[1][name], name
    assert set(tables[0]["target_modules"]) == set(tables[1]["target_modules"])
