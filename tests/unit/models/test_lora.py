"""LoRA adapters on a GPT: layers, selection of modules, merging, compilation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.support.models import KINDS, add_noise
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.config import build
from whimbrel.distributed.activation_checkpoint import apply_activation_checkpointing
from whimbrel.distributed.tensor_parallel import apply_tensor_parallel
from whimbrel.models import GPT, LoraConfig, apply_lora, lora, lora_disabled, lora_parameters, merge_lora
from whimbrel.models.lora import LoraLinear, initialize_lora, lora_adapters, lora_linears, remove_lora
from whimbrel.optim import OptimConfig, build_optimizer, classify_parameters
from whimbrel.precision import FORMATS, QuantizedWeight, dequantize_, quantize_

LLAMA = replace(KINDS["llama3"], embd_size=64, num_heads=4, num_kv_heads=2, mlp_size=96)
MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(97, (2, 12))


def make(weight_format: str | None = None, *, noise: bool = True, **settings: object) -> GPT:
    """A model with adapters that change its outputs."""
    torch.manual_seed(0)
    model = add_noise(GPT(LLAMA))
    if weight_format is not None:
        quantize_(model, weight_format)
    apply_lora(model, LoraConfig(**{"rank": 4, "alpha": 8, **settings}))
    with torch.no_grad():
        for _, parameter in lora_parameters(model) if noise else ():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def gradients(model: GPT, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in lora_parameters(model)}


def reference_linear(linear: LoraLinear, x: Tensor) -> Tensor:
    """A layer computed module by module, as PEFT does."""
    y, parts = F.linear(x, linear.weight, linear.bias), dict[int, Tensor]()
    for adapter in linear.adapters.values():
        base = y[..., adapter.start : adapter.stop]
        update = adapter.scaling * (x @ adapter.lora_A.T @ adapter.lora_B.T)
        if adapter.lora_magnitude_vector is not None:
            weight = linear.weight[adapter.start : adapter.stop]
            dense = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
            norm = (dense + adapter.scaling * adapter.lora_B @ adapter.lora_A).detach().norm(dim=1)
            bias = 0 if linear.bias is None else linear.bias[adapter.start : adapter.stop]
            gain = adapter.lora_magnitude_vector / norm
            parts[adapter.start] = gain * (base - bias + update) + bias
        else:
            parts[adapter.start] = base + update
    columns = []
    for start, rows in zip((0, *torch.tensor(linear.fused_rows).cumsum(0).tolist()), linear.fused_rows, strict=False):
        columns.append(parts.get(start, y[..., start : start + rows]))
    return torch.cat(columns, dim=-1)


def test_new_adapters_do_not_change_the_outputs_and_only_they_are_trained(ids):
    torch.manual_seed(0)
    expected = add_noise(GPT(LLAMA))(ids).logits
    model = make(noise=False)
    torch.testing.assert_close(model(ids).logits, expected, atol=0, rtol=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in lora_parameters(model)}
    assert "transformer.h.0.attn.c_attn.adapters.q_proj.lora_A" in trained
    assert "transformer.h.0.attn.c_attn.weight" in dict(model.named_parameters())
    rows = [(adapter.start, adapter.stop) for _, adapter in lora_adapters(model)][:6]
    assert rows == [(0, 64), (64, 96), (96, 128), (0, 64), (0, 96), (96, 192)]


def test_initialization_is_that_of_peft_and_depends_only_on_the_seed():
    models = [GPT(LLAMA) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        apply_lora(model, LoraConfig(use_dora=True), seed=seed)
    first, same, other = (dict(lora_parameters(model)) for model in models)
    for name, parameter in first.items():
        if name.endswith("lora_A"):
            bound = 1 / math.sqrt(parameter.shape[1])
            assert 0.9 * bound < parameter.abs().max() <= bound
            assert torch.equal(parameter, same[name])
            assert not torch.equal(parameter, other[name])
        elif name.endswith("lora_B"):
            assert not parameter.any()
    for linear, adapter in lora_adapters(models[0]):
        norms = linear.weight[adapter.start : adapter.stop].norm(dim=1)
        torch.testing.assert_close(adapter.lora_magnitude_vector, norms)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("modules", [None, ("k_proj", "down_proj", "gate_proj"), ("q_proj", "v_proj", "up_proj")])
@pytest.mark.parametrize("weight_format", [None, *FORMATS])
def test_fused_layers_equal_the_computation_of_each_module(weight_format, modules, use_dora):
    model = make(weight_format, modules=modules, use_dora=use_dora)
    for _, linear in lora_linears(model):
        x = torch.randn(2, 5, linear.in_features)
        found = []
        for compute in (linear, lambda x, linear=linear: reference_linear(linear, x)):
            inputs = x.clone().requires_grad_()
            linear.zero_grad()
            y = compute(inputs)
            y.square().sum().backward()
            found.append([y, inputs.grad, *(parameter.grad for parameter in linear.adapters.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_biases_are_not_scaled_by_dora():
    model = add_noise(GPT(replace(LLAMA, bias="all")))
    apply_lora(model, LoraConfig(rank=4, use_dora=True))
    add_noise(next(linear for _, linear in lora_linears(model)).adapters)
    for _, linear in lora_linears(model):
        x = torch.randn(3, linear.in_features)
        torch.testing.assert_close(linear(x), reference_linear(linear, x), atol=1e-4, rtol=1e-4)


def test_norms_of_a_quantized_weight_are_computed_in_chunks(monkeypatch):
    model = make("int4", use_dora=True)
    expected = [lora.row_norms(linear.weight, adapter) for linear, adapter in lora_adapters(model)]
    sizes = []
    decode = QuantizedWeight.dequantize
    monkeypatch.setattr(lora, "NORM_CHUNK", 64 * 7)
    monkeypatch.setattr(QuantizedWeight, "dequantize", lambda weight: sizes.append(weight.numel()) or decode(weight))
    for (linear, adapter), norms in zip(lora_adapters(model), expected, strict=True):
        torch.testing.assert_close(lora.row_norms(linear.weight, adapter), norms)
    assert max(sizes) <= 64 * 7


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (("q_proj", "down_proj"), {"q_proj", "down_proj"}),
        (("c_attn",), {"q_proj", "k_proj", "v_proj"}),
        (("mlp.c_fc", "self_attn.o_proj"), {"gate_proj", "up_proj", "o_proj"}),
        (None, MODULES),
    ],
)
def test_modules_are_selected_by_hugging_face_names_and_by_ours(modules, expected):
    model = make(modules=modules)
    assert {name for _, linear in lora_linears(model) for name in linear.adapters} == expected
    assert len(list(lora_adapters(model))) == LLAMA.num_layers * len(expected)


def test_one_module_can_be_selected_by_its_full_name():
    model = make(modules=("model.layers.1.self_attn.k_proj",))
    assert [name for name, _ in lora_linears(model)] == ["transformer.h.1.attn.c_attn"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules": ("q_prj",)}, "no module 'q_prj': did you mean 'q_proj'"),
        ({"modules": ("q_proj", "lm_head")}, "got 'lm_head': adapters of embeddings and the head are not supported"),
        ({"modules": ("model.embed_tokens",)}, "embeddings and the head are not supported"),
        ({"modules": ()}, "at least one name in lora.modules"),
        ({"rank": 0}, "lora.rank >= 1, got 0"),
        ({"alpha": 0.0}, "positive lora.alpha, got 0"),
        ({"dropout": 1.0}, "lora.dropout from 0 to below 1, got 1.0"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        apply_lora(GPT(LLAMA), LoraConfig(**settings))


def test_settings_come_from_a_table():
    config = build(LoraConfig, {"rank": 8, "use_dora": True, "modules": ["q_proj"]}, "lora")
    assert config == LoraConfig(rank=8, use_dora=True, modules=("q_proj",))
    with pytest.raises(ConfigError, match="lora.rnak"):
        build(LoraConfig, {"rnak": 8}, "lora")


def test_models_that_cannot_have_adapters_are_rejected():
    model = make()
    with pytest.raises(ConfigError, match="expected a model without adapters"):
        apply_lora(model, LoraConfig())
    with pytest.raises(ConfigError, match=r"cannot split the adapters of transformer\.h\.0.*parallel.tp = 1"):
        apply_tensor_parallel(model, SimpleNamespace(size=lambda: 2))
    model = GPT(LLAMA)
    model.transformer["h"][1].mlp.c_fc.__class__ = type("Float8Linear", (nn.Linear,), {})
    with pytest.raises(ConfigError, match=r"h\.1\.mlp\.c_fc to be nn.Linear, got Float8Linear"):
        apply_lora(model, LoraConfig())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_disabled_adapters_leave_the_base_model(ids):
    model = make()
    adapted = model(ids).logits
    with pytest.raises(ZeroDivisionError), lora_disabled(model):
        base = model(ids).logits
        raise ZeroDivisionError
    assert torch.equal(model(ids).logits, adapted)
    remove_lora(model)
    assert torch.equal(model(ids).logits, base)
    assert not torch.allclose(base, adapted, atol=1e-2)
    assert all(type(module) is nn.Linear for module in model.modules() if isinstance(module, nn.Linear))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("weight_format", [None, "int4"])
def test_merged_weights_compute_the_same_outputs(ids, weight_format, use_dora):
    model = make(weight_format, use_dora=use_dora)
    expected = model(ids).logits
    merge_lora(model)
    assert not list(lora_linears(model))
    assert not any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters())
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_merged_weights_can_be_quantized_again(ids):
    model, dense = make("int8"), make("int8")
    merge_lora(model, requantize=True)
    merge_lora(dense)
    quantize_(dense, "int8")
    assert isinstance(model.get_parameter("transformer.h.0.attn.c_attn.weight"), QuantizedWeight)
    assert torch.equal(model(ids).logits, dense(ids).logits)


def test_a_quantized_base_stays_quantized_in_training(ids):
    model = make("int4")
    before = {name: p.codes.clone() for name, p in model.named_parameters() if isinstance(p, QuantizedWeight)}
    optimizer = torch.optim.AdamW([parameter for _, parameter in lora_parameters(model)])
    gradients(model, ids)
    optimizer.step()
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedWeight)}
    assert len(weights) == 4 * LLAMA.num_layers
    assert all(torch.equal(weights[name].codes, codes) for name, codes in before.items())


def test_adapters_of_a_model_on_the_meta_device(ids):
    with torch.device("meta"):
        model = GPT(LLAMA)
        apply_lora(model, LoraConfig(rank=4))
    assert all(parameter.is_meta for _, parameter in lora_parameters(model))
    model.to_empty(device="cpu")
    model.tie_head()
    model.reset_parameters()
    initialize_lora(model, seed=0)
    expected = make(noise=False)
    for (name, one), (_, other) in zip(lora_parameters(model), lora_parameters(expected), strict=True):
        assert torch.equal(one, other), name


def test_adapters_keep_their_dtype_on_a_bf16_model(ids):
    model = GPT(LLAMA).to(torch.bfloat16)
    apply_lora(model, LoraConfig())
    assert {parameter.dtype for _, parameter in lora_parameters(model)} == {torch.float32}
    assert model(ids).logits.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    assert {parameter.grad.dtype for _, parameter in lora_parameters(model)} == {torch.float32}
    other = GPT(LLAMA)
    apply_lora(other, LoraConfig(), dtype=torch.bfloat16)
    assert {parameter.dtype for _, parameter in lora_parameters(other)} == {torch.bfloat16}
    assert other(ids).logits.dtype == torch.float32


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_does_not_change_gradients(ids, mode):
    model = make("int8", dropout=0.1)
    torch.manual_seed(1)
    expected = gradients(model, ids)
    apply_activation_checkpointing(model, mode)
    torch.manual_seed(1)
    for name, gradient in gradients(model, ids).items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("weight_format", "use_dora"), [(None, False), ("int4", False), ("int8", True)])
def test_blocks_compile_to_full_graphs_that_layers_share(ids, weight_format, use_dora):
    model = make(weight_format, use_dora=use_dora, modules=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"))
    expected = gradients(model, ids)
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        found = gradients(model, ids)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5, msg=name)
    weights = {linear.weight.shape for _, linear in lora_linears(model)}
    kept = {shape for x in saved if x.is_floating_point() for shape in (x.shape, x.shape[::-1])}
    assert bool(weights & kept) == (weight_format is None)  # decoded weights are not kept from forward to backward
    assert counters["stats"]["unique_graphs"] == 2  # the input of the first block requires no gradient
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "galore", "apollo"])
def test_optimizers_update_adapters_as_matrices(ids, name):
    model = make("int8", use_dora=True)
    parameters = classify_parameters(model)
    assert {item.role for item in parameters} == {"hidden", "scalar"}
    assert all((item.role == "scalar") == item.name.endswith("magnitude_vector") for item in parameters)
    optimizer = build_optimizer(
        OptimConfig(name=name, lr=1e-2, **({"rank": 2} if name in ("galore", "apollo") else {})), parameters
    )
    losses = []
    for _ in range(8):
        gradients(model, ids)
        losses.append(model(ids, labels=ids).loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]


def test_dropout_is_off_in_evaluation(ids):
    model = make(dropout=0.5)
    first: Callable[[], Tensor] = lambda: model(ids).logits  # noqa: E731
    assert not torch.equal(first(), first())
    model.eval()
    assert torch.equal(first(), first())


def test_dequantizing_under_adapters_keeps_the_function(ids):
    model = make("int8")
    expected = model(ids).logits
    dequantize_(model)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
