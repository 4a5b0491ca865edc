"""Recipes: what they make of linear layers, what a model trained with them is, and what they refuse."""

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
from whimbrel.precision.recipes import _tell_of_emulation

STEPS = 20
FP8, QAT = recipe_names("compute"), recipe_names("qat")
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
def plainly(text: Tensor) -> tuple[GPT, list[float]]:
    """A model whose gradients are those of training, neither of a beginning nor of an end; and its losses."""
    gpt = model()
    return gpt, train(gpt, text, STEPS)


@pytest.fixture
def trained(plainly: tuple[GPT, list[float]]) -> GPT:
    return copy.deepcopy(plainly[0])


@needs_torchao
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*FP8, *QAT, "int8"])
def test_gradients_are_near_those_of_the_plain_model(trained: GPT, text: Tensor, name: str, precision: str) -> None:
    """All of them together, and those of each linear layer alone."""
    low = copy.deepcopy(trained)
    taken = prepare(low, name).taken
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        own, plain = gradients(low, text), gradients(trained, text)
    assert len(taken) == 8
    assert own.keys() == plain.keys()
    x = batch(text, 2000)["input_ids"]
    with torch.inference_mode():
        inferred = low(x).logits
    assert torch.equal(inferred, low(x).logits)
    both = (torch.cat([grads[key] for key in plain]) for grads in (own, plain))
    assert torch.cosine_similarity(*both, dim=0) >= 0.95
    for layer in taken:
        assert torch.cosine_similarity(own[f"{layer}.weight"], plain[f"{layer}.weight"], dim=0) >= 0.9, layer


@needs_torchao
@pytest.mark.parametrize("name", [*FP8, *QAT, "int8"])
def test_loss_falls_as_without(plainly: tuple[GPT, list[float]], text: Tensor, name: str) -> None:
    gpt, reference = model(), plainly[1]
    prepare(gpt, name)
    losses = train(gpt, text, STEPS)
    assert reference[-1] < reference[0] - 1.5
    assert losses[-1] == pytest.approx(reference[-1], abs=0.05)
    assert losses != reference


@needs_torchao
@pytest.mark.parametrize("name", QAT)
@pytest.mark.parametrize("bias", ["all", "none"])
def test_what_was_rounded_in_training_is_what_the_finished_model_computes(text: Tensor, name: str, bias: str) -> None:
    """To the bit; a model that was saved plain and quantised later is the same too."""
    gpt = model(bias=bias)
    parameters = dict(gpt.named_parameters())
    prepare(gpt, name)
    assert all(own is parameters[key] for key, own in gpt.named_parameters())
    train(gpt, text, 3)
    x = batch(text, 7)["input_ids"]
    gpt.eval()
    before, plain = gpt(x).logits.detach(), model(bias=bias).eval()
    plain.load_state_dict(gpt.state_dict())
    for finished in (finalize(gpt, name), finalize(plain, name)):
        assert torch.equal(finished(x).logits, before)
        layer = finished.get_submodule("transformer.h.1.mlp.c_proj")
        assert type(layer) is nn.Linear
        assert isinstance(layer.weight, QuantizedWeight)
        assert layer.weight.format == RECIPES[name].finalize.fitted(layer.weight.shape)
        assert not layer.weight.requires_grad
        assert not layer.training


@needs_torchao
@pytest.mark.parametrize("name", FP8)
def test_fp8_ends_as_plain_linears_over_the_same_parameters(name: str) -> None:
    gpt = model()
    kinds, parameters = [type(module) for module in gpt.modules()], list(gpt.parameters())
    prepare(gpt, name)
    assert [type(module) for module in gpt.modules()] != kinds
    finalize(gpt, name)
    assert [type(module) for module in gpt.modules()] == kinds
    assert all(own is before for own, before in zip(gpt.parameters(), parameters, strict=True))


@needs_torchao
@pytest.mark.parametrize("name", ["tensorwise", "int4-weight-only"])
def test_a_layer_in_two_places_is_taken_in_both(name: str) -> None:
    linear, x = nn.Linear(128, 128), torch.randn(4, 128)
    net = nn.Sequential(linear, nn.Sequential(linear))
    plain = net(x).detach()
    prepare(net, name)
    assert type(net[0]) is type(net[1][0]) is not nn.Linear
    assert net[0].weight is net[1][0].weight is linear.weight
    assert not torch.equal(net(x), plain)
    rounded = net(x).detach()
    finalize(net, name)
    assert torch.equal(net(x), rounded if name in QAT else plain)


@needs_torchao
def test_neither_random_numbers_nor_meta_tensors_are_touched() -> None:
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
def test_what_is_left_out_is_told_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.lm_head = nn.Embedding(64, 64), nn.Linear(64, 64)
            self.tied = nn.Linear(64, 64)
            self.tied.weight = self.table.weight
            self.good, self.odd = nn.Linear(64, 96), nn.Linear(24, 64)
            self.attention = nn.MultiheadAttention(64, 2)

    _tell_of_emulation.cache_clear()
    with caplog.at_level(logging.INFO, "whimbrel"):
        choice = prepare(Net(), "rowwise", alignment=32)
    assert list(choice.taken) == ["good"]
    assert choice.left.keys() == {"lm_head", "tied", "odd", "attention.out_proj"}
    for name, reason in choice.left.items():
        assert [line for line in caplog.messages if f"leaves out {name}" in line] == [
            f"fp8_recipe = rowwise leaves out {name}: {reason}"
        ]
    assert choice.left["odd"] == "its shape (64, 24) is no multiple of fp8_dim_alignment = 32"
    assert choice.left["tied"] == "its weight is the embedding's too"
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        "fp8_recipe = rowwise is emulated on a CPU: the numbers are those of fp8, the speed is not",
        f"fp8_recipe = rowwise leaves 2 of 3 linear layers plain, first odd: {choice.left['odd']}",
    ]
    assert list(prepare(Net(), "rowwise", skip=("good",)).taken) == ["lm_head"]
    choice = prepare(Net(), "int8-dynamic-act-int4-weight")
    assert choice.left["odd"].startswith("its 24 columns are not a multiple of 32")


@needs_torchao
def test_what_cannot_be_done_is_refused_by_name() -> None:
    gpt = model()
    prepare(gpt, "rowwise")
    again = (
        r"qat_recipe = int4-weight-only is for a plain model, and transformer.h.0.attn.c_attn is a Float8Linear already"
    )
    with pytest.raises(PrecisionError, match=again):
        prepare(gpt, "int4-weight-only")
    gpt = model()
    quantize_(gpt, "int8")
    with pytest.raises(PrecisionError, match="c_attn is a linear with quantised weights already: finalize the model"):
        prepare(gpt, "tensorwise")
    with pytest.raises(PrecisionError, match="weights = int4 is for a model that is trained already: finalize it, or"):
        prepare(model(), "int4")
    with pytest.raises(PrecisionError, match=r"recipe = 'rowise' is not one of bf16, .*: did you mean 'rowwise'\?"):
        prepare(model(), "rowise")
    with pytest.raises(PrecisionError, match=r"qat_recipe = int4-weight-only finds no linear .* \(0: its 60 columns"):
        prepare(nn.Sequential(nn.Linear(60, 64)), "int4-weight-only")
    with pytest.raises(PrecisionError, match="fp8_recipe = rowwise exchanges layers inside of a model, and this is a"):
        prepare(nn.Linear(64, 64), "rowwise")
    with pytest.raises(PrecisionError, match="fp8_recipe = rowwise does not run on mps: use mixed_precision = bf16"):
        prepare(model(), "rowwise", device="mps")


@needs_torchao
@pytest.mark.parametrize(
    ("name", "capability", "settings", "message"),
    [
        ("tensorwise", (8, 6), {}, "needs a GPU of compute capability 8.9, and this one has 8.6: use mixed_precision"),
        (
            "tensorwise",
            (8, 9),
            {"alignment": 8},
            "fp8_dim_alignment = 8: products of fp8 on a GPU need multiples of 16",
        ),
        ("rowwise", (9, 0), {}, "gives bfloat16 on a GPU and products here are float32: use mixed_precision = bf16"),
        ("rowwise", (9, 0), {"precision": "fp16"}, "products here are float16"),
    ],
)
def test_a_gpu_that_cannot_is_told_of(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpt = model()
    with pytest.raises(PrecisionError, match=message):
        prepare(gpt, name, device="cuda", **settings)
    assert type(gpt.lm_head) is type(gpt.get_submodule("transformer.h.0.mlp.c_fc")) is nn.Linear
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert len(prepare(gpt, name, device="cuda", precision="bf16").taken) == 8
    with pytest.raises(
        PrecisionError, match=r"a batch of 15 tokens is no multiple of 16, which the weight gradients of"
    ):
        gpt(torch.zeros(3, 5, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao 0.18
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@needs_torchao
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FP8)
def test_fp8_on_a_gpu(plainly: tuple[GPT, list[float]], text: Tensor, name: str, compiled: bool) -> None:
    """Products of fp8, not emulated ones: near the plain model, also for one token at a time without gradients."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    gpt, device = copy.deepcopy(plainly[0]).cuda(), torch.device("cuda")
    low = copy.deepcopy(gpt)
    prepare(low, name, precision="bf16")
    if compiled:
        for block in low.blocks:
            block.compile(fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        own, plain = gradients(low, text.to(device)), gradients(gpt, text.to(device))
        with torch.inference_mode():
            assert low(text[:5].to(device)[None]).logits.isfinite().all()
    for key, expected in plain.items():
        assert torch.cosine_similarity(own[key].flatten(), expected.flatten(), dim=0) >= 0.9, key


def test_autocast_alone_changes_nothing() -> None:
    gpt = model()
    kinds = [type(module) for module in gpt.modules()]
    for name in recipe_names("amp"):
        assert prepare(gpt, name).taken == {}
        assert finalize(gpt, name) is gpt
    assert [type(module) for module in gpt.modules()] == kinds


@pytest.mark.parametrize("name", recipe_names("ptq"))
def test_a_finished_model_is_quantised_and_loaded_the_same(name: str) -> None:
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
    with pytest.raises(PrecisionError, match=r"loaded into a model without numbers .* torch.device\('meta'\)"):
        load_into(loaded, read, name)


def test_the_table_is_whole() -> None:
    assert {recipe.kind: list(recipe_names(recipe.kind)) for recipe in RECIPES.values()} == {
        "amp": ["bf16", "fp16"],
        "compute": ["tensorwise", "rowwise", "rowwise_with_gw_hp"],
        "qat": ["int8-dynamic-act-int4-weight", "int4-weight-only"],
        "ptq": ["int8", "int8-dynamic", "int4", "fp8"],
    }
    assert all(recipe.finalize is FORMATS[name] for name, recipe in RECIPES.items() if recipe.kind == "ptq")
    with pytest.raises(AttributeError):
        RECIPES["int4"].name = "other"  # type: ignore[misc]


@needs_torchao
def test_what_was_trained_is_quantised_whatever_its_namesakes_are() -> None:
    """`proj` is left out by its shape, and is how `inner.proj` ends."""
    net = nn.Sequential()
    net.proj, net.inner, net.rest = nn.Linear(100, 128), nn.Sequential(), nn.Linear(128, 128)
    net.inner.proj = nn.Linear(128, 128)
    assert set(prepare(net, "int4-weight-only", skip=("rest",)).taken) == {"inner.proj"}
    finalize(net, "int4-weight-only")
    held = {name for name, parameter in net.named_parameters() if isinstance(parameter, QuantizedWeight)}
    assert held == {"inner.proj.weight"}


@needs_torchao
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # both come from torch, as it traces
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
    own, plain = gradients(gpt, text), gradients(eager, text)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(own[key], plain[key]) for key in plain)
