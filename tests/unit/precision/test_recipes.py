"""Recipes: prepare, finalize and load_into, layer selection, and rejected combinations."""

from __future__ import annotations

import copy
import importlib.util
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whimbrel.base.errors import PrecisionError
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import (
    FORMATS,
    RECIPES,
    QuantizedWeight,
    finalize,
    load_into,
    prepare,
    quantize_,
    recipe_names,
)
from whimbrel.precision.recipes import _warn_about_emulation

STEPS = 20
FP8 = tuple(name for name in recipe_names("fp8") if name != "delayed")  # see models/test_fp8_blocks.py
QAT = recipe_names("qat")
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package 'torchao'")


def model(**settings: Any) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab_size": 128, "context_length": 64, "num_layers": 2, "num_heads": 2, "embd_size": 128}
    return GPT(GPTConfig(**shape | settings))


@pytest.fixture(scope="module")
def text(shakespeare: str) -> Tensor:
    return torch.tensor([min(ord(letter), 127) for letter in shakespeare[:40_000]])


def batch(text: Tensor, step: int) -> dict[str, Tensor]:
    starts = torch.randint(len(text) - 65, (4, 1), generator=torch.Generator().manual_seed(step))
    windows = text[(starts + torch.arange(65)).to(text.device)]
    return {"input_ids": windows[:, :-1], "targets": windows[:, 1:]}


def train(gpt: GPT, text: Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = gpt(**batch(text, step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gradients(gpt: GPT, text: Tensor) -> dict[str, Tensor]:
    gpt.zero_grad()
    gpt(**batch(text, 1000)).loss.backward()
    return {name: own.grad.flatten() for name, own in gpt.named_parameters() if own.grad is not None}


@pytest.fixture(scope="module")
def baseline(text: Tensor) -> tuple[GPT, list[float]]:
    """A partly trained model, for gradients of realistic scale; and its losses."""
    gpt = model()
    return gpt, train(gpt, text, STEPS)


@pytest.fixture
def trained(baseline: tuple[GPT, list[float]]) -> GPT:
    return copy.deepcopy(baseline[0])


@needs_torchao
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*FP8, *QAT, "int8"])
def test_gradients_are_close_to_the_unquantized_model(trained: GPT, text: Tensor, name: str, precision: str) -> None:
    """Overall and for each linear layer."""
    low = copy.deepcopy(trained)
    taken = prepare(low, name).selected
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        own, unquantized = gradients(low, text), gradients(trained, text)
    assert len(taken) == 8
    assert own.keys() == unquantized.keys()
    x = batch(text, 2000)["input_ids"]
    with torch.inference_mode():
        inferred = low(x).logits
    assert torch.equal(inferred, low(x).logits)
    both = (torch.cat([grads[key] for key in unquantized]) for grads in (own, unquantized))
    assert torch.cosine_similarity(*both, dim=0) >= 0.95
    for layer in taken:
        assert torch.cosine_similarity(own[f"{layer}.weight"], unquantized[f"{layer}.weight"], dim=0) >= 0.9, layer


@needs_torchao
@pytest.mark.parametrize("name", [*FP8, *QAT, "int8"])
def test_the_loss_falls_as_in_full_precision(baseline: tuple[GPT, list[float]], text: Tensor, name: str) -> None:
    gpt, reference = model(), baseline[1]
    prepare(gpt, name)
    losses = train(gpt, text, STEPS)
    assert reference[-1] < reference[0] - 1.5
    assert losses[-1] == pytest.approx(reference[-1], abs=0.05)
    assert losses != reference


@needs_torchao
@pytest.mark.parametrize("name", QAT)
@pytest.mark.parametrize("bias", ["all", "none"])
def test_the_finalized_model_computes_exactly_what_was_trained(text: Tensor, name: str, bias: str) -> None:
    """Bit-identical, also if saved unquantized and quantized later."""
    gpt = model(bias=bias)
    parameters = dict(gpt.named_parameters())
    prepare(gpt, name)
    assert all(own is parameters[key] for key, own in gpt.named_parameters())
    train(gpt, text, 3)
    x = batch(text, 7)["input_ids"]
    gpt.eval()
    before, unquantized = gpt(x).logits.detach(), model(bias=bias).eval()
    unquantized.load_state_dict(gpt.state_dict())
    for finished in (finalize(gpt, name), finalize(unquantized, name)):
        assert torch.equal(finished(x).logits, before)
        layer = finished.get_submodule("transformer.h.1.mlp.c_proj")
        assert type(layer) is nn.Linear
        assert isinstance(layer.weight, QuantizedWeight)
        assert layer.weight.format == RECIPES[name].finalize.fit_to(layer.weight.shape)
        assert not layer.weight.requires_grad
        assert not layer.training


@needs_torchao
@pytest.mark.parametrize("name", FP8)
def test_finalize_restores_standard_linears_after_fp8(name: str) -> None:
    gpt = model()
    kinds, parameters = [type(module) for module in gpt.modules()], list(gpt.parameters())
    prepare(gpt, name)
    assert [type(module) for module in gpt.modules()] != kinds
    finalize(gpt, name)
    assert [type(module) for module in gpt.modules()] == kinds
    assert all(own is before for own, before in zip(gpt.parameters(), parameters, strict=True))


@needs_torchao
@pytest.mark.parametrize("name", ["tensorwise", "int4-weight-only"])
def test_a_shared_layer_is_converted_everywhere(name: str) -> None:
    linear, x = nn.Linear(128, 128), torch.randn(4, 128)
    net = nn.Sequential(linear, nn.Sequential(linear))
    unquantized = net(x).detach()
    prepare(net, name)
    assert type(net[0]) is type(net[1][0]) is not nn.Linear
    assert net[0].weight is net[1][0].weight is linear.weight
    assert not torch.equal(net(x), unquantized)
    rounded = net(x).detach()
    finalize(net, name)
    assert torch.equal(net(x), rounded if name in QAT else unquantized)


@needs_torchao
def test_prepare_uses_neither_rng_nor_memory() -> None:
    for name in (FP8[0], QAT[0]):
        gpt, state = model(), torch.get_rng_state()
        prepare(gpt, name)
        finalize(gpt, FP8[0])
        assert torch.equal(torch.get_rng_state(), state)
        with torch.device("meta"):
            skeleton = GPT(gpt.config)
        own = dict(skeleton.named_parameters())
        prepare(skeleton, name, device="cpu")
        assert all(own[key] is parameter for key, parameter in skeleton.named_parameters())
        copy.deepcopy(gpt)


@needs_torchao
def test_skipped_layers_are_logged_once_with_the_reason_unless_they_are_excluded_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.lm_head = nn.Embedding(64, 64), nn.Linear(64, 64)
            self.tied = nn.Linear(64, 64)
            self.tied.weight = self.table.weight
            self.good, self.odd = nn.Linear(64, 96), nn.Linear(24, 64)
            self.attention = nn.MultiheadAttention(64, 2)

    _warn_about_emulation.cache_clear()
    with caplog.at_level(logging.INFO, "whimbrel"):
        choice = prepare(Net(), "rowwise", fp8_dim_alignment=32)
    assert list(choice.selected) == ["good"]
    assert choice.skipped.keys() == {"lm_head", "tied", "odd", "attention.out_proj"}
    for name, reason in choice.skipped.items():
        logged = [] if name == "lm_head" else [f"fp8_recipe = rowwise skips {name}: {reason}"]
        assert [line for line in caplog.messages if f"skips {name}" in line] == logged
    assert "fp8_dim_alignment = 32, got (64, 24)" in choice.skipped["odd"]
    assert "tied to an embedding" in choice.skipped["tied"]
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        "fp8_recipe = rowwise is emulated on a CPU: same results as fp8, without its speed",
        f"fp8_recipe = rowwise skips 2 of 3 linear layers, first odd: {choice.skipped['odd']}",
    ]
    assert list(prepare(Net(), "rowwise", skip=("good",)).selected) == ["lm_head"]
    choice = prepare(Net(), "int8-dynamic-act-int4-weight")
    assert choice.skipped["odd"].endswith("multiple of 32, got 24")


@needs_torchao
def test_invalid_requests_are_rejected() -> None:
    gpt = model()
    prepare(gpt, "rowwise")
    with pytest.raises(PrecisionError, match="expected an unconverted model, but .*c_attn is a Float8Linear"):
        prepare(gpt, "int4-weight-only")
    gpt = model()
    quantize_(gpt, "int8")
    with pytest.raises(PrecisionError, match="c_attn is a Linear with quantized weights"):
        prepare(gpt, "tensorwise")
    with pytest.raises(PrecisionError, match="quantize = int4 quantizes a trained model"):
        prepare(model(), "int4")
    with pytest.raises(PrecisionError, match=r"recipe: expected one of bf16.* got 'rowise': did you mean 'rowwise'\?"):
        prepare(model(), "rowise")
    with pytest.raises(PrecisionError, match=r"int4-weight-only: no supported linear layer .*got 60"):
        prepare(nn.Sequential(nn.Linear(60, 64)), "int4-weight-only")
    with pytest.raises(PrecisionError, match="expected a model that contains linear layers"):
        prepare(nn.Linear(64, 64), "rowwise")
    with pytest.raises(PrecisionError, match="not supported on mps: use mixed_precision = bf16"):
        prepare(model(), "rowwise", device="mps")


@needs_torchao
@pytest.mark.parametrize(
    ("name", "capability", "settings", "message"),
    [
        ("tensorwise", (8, 6), {}, "compute capability 8.9 .* got 8.6: use mixed_precision"),
        (
            "tensorwise",
            (8, 9),
            {"fp8_dim_alignment": 8},
            "fp8_dim_alignment: expected a multiple of 16 .* got 8",
        ),
        ("rowwise", (9, 0), {}, "expected bfloat16 outputs, got float32"),
        ("rowwise", (9, 0), {"precision": "fp16"}, "expected bfloat16 outputs, got float16"),
    ],
)
def test_unsupported_gpus_and_dtypes_are_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpt = model()
    with pytest.raises(PrecisionError, match=message):
        prepare(gpt, name, device="cuda", **settings)
    assert type(gpt.lm_head) is type(gpt.get_submodule("transformer.h.0.mlp.c_fc")) is nn.Linear
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert len(prepare(gpt, name, device="cuda", precision="bf16").selected) == 8
    with pytest.raises(PrecisionError, match="multiple of 16 tokens .* got 15"):
        gpt(torch.zeros(3, 5, dtype=torch.int64))


@needs_torchao
@pytest.mark.parametrize(("width", "warns"), [(768, True), (2048, False)])
def test_layers_too_narrow_for_fp8_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, width: int, warns: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    prepare(model(embd_size=width, num_layers=1), "tensorwise", device="cuda", precision="bf16")
    assert ("tensorwise: layers of width 768 are probably slower than in bf16" in caplog.text) == warns


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao 0.18
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@needs_torchao
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FP8)
def test_fp8_on_a_gpu(baseline: tuple[GPT, list[float]], text: Tensor, name: str, compiled: bool) -> None:
    """Real fp8: close to full precision, also token by token without gradients."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    gpt, device = copy.deepcopy(baseline[0]).cuda(), torch.device("cuda")
    low = copy.deepcopy(gpt)
    prepare(low, name, precision="bf16")
    if compiled:
        for block in low.blocks:
            block.compile(fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        own, unquantized = gradients(low, text.to(device)), gradients(gpt, text.to(device))
        with torch.inference_mode():
            assert low(text[:5].to(device)[None]).logits.isfinite().all()
    for key, expected in unquantized.items():
        assert torch.cosine_similarity(own[key].flatten(), expected.flatten(), dim=0) >= 0.9, key


def test_amp_recipes_do_not_change_the_model() -> None:
    gpt = model()
    kinds = [type(module) for module in gpt.modules()]
    for name in recipe_names("amp"):
        assert prepare(gpt, name).selected == {}
        assert finalize(gpt, name) is gpt
    assert [type(module) for module in gpt.modules()] == kinds


@pytest.mark.parametrize("name", recipe_names("ptq"))
def test_finalize_and_load_into_give_the_same_weights(name: str) -> None:
    gpt = model().eval()
    state = {key: tensor.clone() for key, tensor in gpt.state_dict().items()}
    x = torch.randint(128, (2, 16))
    finalize(gpt, name)
    with torch.device("meta"):
        skeleton = GPT(gpt.config).eval()

    def read(filled: nn.Module) -> None:
        filled.tie_head()
        for key, own in filled.named_parameters():
            with torch.no_grad():
                own.copy_(state[key])

    loaded = load_into(skeleton, read, name)
    assert torch.equal(loaded(x).logits, gpt(x).logits)
    assert isinstance(loaded.get_submodule("transformer.h.0.mlp.c_fc").weight, QuantizedWeight)
    with pytest.raises(PrecisionError, match="expected a model on the meta device"):
        load_into(loaded, read, name)


def test_the_table_of_recipes_is_complete() -> None:
    assert {recipe.kind: list(recipe_names(recipe.kind)) for recipe in RECIPES.values()} == {
        "amp": ["bf16", "fp16"],
        "fp8": ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"],
        "qat": ["int8-dynamic-act-int4-weight", "int4-weight-only"],
        "ptq": ["int8", "int8-dynamic", "int4", "fp8"],
    }
    assert all(recipe.finalize is FORMATS[name] for name, recipe in RECIPES.items() if recipe.kind == "ptq")
    with pytest.raises(AttributeError):
        RECIPES["int4"].name = "other"  # type: ignore[misc]


@needs_torchao
def test_finalize_quantizes_trained_layers_regardless_of_names() -> None:
    """`proj` is skipped because of its shape and is a suffix of `inner.proj`."""
    net = nn.Sequential()
    net.proj, net.inner, net.rest = nn.Linear(100, 128), nn.Sequential(), nn.Linear(128, 128)
    net.inner.proj = nn.Linear(128, 128)
    assert set(prepare(net, "int4-weight-only", skip=("rest",)).selected) == {"inner.proj"}
    finalize(net, "int4-weight-only")
    quantized = {name for name, parameter in net.named_parameters() if isinstance(parameter, QuantizedWeight)}
    assert quantized == {"inner.proj.weight"}


@needs_torchao
# Both warnings come from torch during tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["tensorwise", "int4-weight-only"])
def test_compiled_blocks_share_one_graph(text: Tensor, name: str) -> None:
    gpt = model()
    prepare(gpt, name)
    eager = copy.deepcopy(gpt)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in gpt.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    own, unquantized = gradients(gpt, text), gradients(eager, text)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(own[key], unquantized[key]) for key in unquantized)


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", QAT)
def test_qat_rejects_16_bit_weights(name: str, dtype: torch.dtype) -> None:
    """Scales computed from them in training would differ from those stored afterwards."""
    gpt = model().to(dtype)
    with pytest.raises(PrecisionError, match=rf"expected fp32 weights, got {dtype} in .*c_attn"):
        prepare(gpt, name)
    assert all(type(module).__module__.startswith(("torch.nn", "whimbrel")) for module in gpt.modules())


@pytest.mark.parametrize("name", [*QAT, "int8", "bf16"])
def test_dim_alignment_applies_to_fp8_only(name: str) -> None:
    with pytest.raises(PrecisionError, match="fp8_dim_alignment = 32 has no effect"):
        prepare(model(), name, fp8_dim_alignment=32)


def test_fp8_weights_need_a_supported_gpu_and_are_emulated_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with torch.device("meta"):
        empty = model()
    with pytest.raises(PrecisionError, match=r"quantize = fp8: .* 8.9 .* got 8.0: use quantize = int8"):
        load_into(empty, lambda _: None, "fp8", device="cuda")
    assert not any(isinstance(parameter, QuantizedWeight) for parameter in empty.parameters())
    _warn_about_emulation.cache_clear()
    with caplog.at_level("WARNING"):
        finalize(model(), "fp8")
        finalize(model(), "fp8")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "quantize = fp8 is emulated on a CPU"
    ]
