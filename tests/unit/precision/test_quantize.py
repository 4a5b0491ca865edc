"""Quantizing, loading and swapping in place keep formats and parameter identity, in every combination."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from whimbrel.base.errors import PrecisionError
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import (
    FORMATS,
    QuantizedWeight,
    dequantize_,
    load_state,
    materialize_,
    quantize_,
    swap_on_conversion,
)

flag = torch.__future__.get_swap_module_params_on_conversion
set_flag = torch.__future__.set_swap_module_params_on_conversion


@pytest.fixture(params=[False, True], ids=["flag off", "flag on"])
def swapping(request: pytest.FixtureRequest) -> Iterator[bool]:
    set_flag(request.param)
    yield request.param
    set_flag(False)


def net(device: str = "cpu", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))


def quantized(name: str = "int8", device: str = "cpu", seed: int = 1) -> nn.Sequential:
    model = net(device, seed)
    quantize_(model, name)
    return model


def has_quantized_weights_of(model: nn.Module, source: nn.Module, name: str) -> bool:
    """Whether the linear layers have the quantized weights of another model."""
    return all(
        isinstance(module.weight, QuantizedWeight)
        and isinstance(module.weight, nn.Parameter)
        and torch.equal(module.weight, QuantizedWeight.quantize(source.get_submodule(path).weight, name))
        for path, module in model.named_modules() if isinstance(module, nn.Linear)
    )  # fmt: skip


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize(("assign", "device"), [(False, "cpu"), (True, "cpu"), (True, "meta")])
def test_loading_dense_into_quantized_stays_quantized(swapping: bool, assign: bool, device: str, name: str) -> None:
    source, model = net(seed=0).bfloat16() if device == "meta" else net(seed=0), quantized(name, device)
    before = {id(parameter) for parameter in model.parameters()}
    state = source.state_dict()
    tensors = dict(state)
    model.load_state_dict(state, assign=assign)
    assert has_quantized_weights_of(model, source, name)
    assert torch.equal(model[0].bias, source[0].bias)
    assert model[0].bias.dtype == model[0].weight.dtype == source[0].bias.dtype
    if swapping or not assign:
        assert {id(parameter) for parameter in model.parameters()} == before
    assert all(state[key] is tensor and type(tensor) is torch.Tensor for key, tensor in tensors.items())
    assert flag() == swapping


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_manually_assigned_quantized_weight_stays_quantized(swapping: bool, device: str) -> None:
    source, layer = nn.Linear(64, 128), nn.Linear(64, 128, device=device)
    layer.weight = nn.Parameter(QuantizedWeight.quantize(layer.weight, "int8"), requires_grad=False)
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer.weight, QuantizedWeight.quantize(source.weight, "int8"))
    assert isinstance(layer.weight, nn.Parameter)
    layer.register_parameter("other", nn.Parameter(QuantizedWeight.quantize(torch.ones(4, 8), "int8"), False))
    layer.load_state_dict(source.state_dict() | {"other": torch.zeros(4, 8)}, assign=True)
    assert isinstance(layer.other, QuantizedWeight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_stay_tied_when_assigned(swapping: bool, device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    quantize_(model, "int8")
    original = model[0].weight
    source = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    source[1].weight = source[0].weight
    model.load_state_dict(source.state_dict(), assign=True)
    assert model[0].weight is model[1].weight is original
    assert torch.equal(original, QuantizedWeight.quantize(source[0].weight, "int8"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_head_of_a_gpt_stays_tied_when_assigned(device: str) -> None:
    config = GPTConfig(num_layers=1, embd_size=32, num_heads=2, vocab_size=64, context_length=8)
    source = GPT(config)
    with torch.device(device):
        model = GPT(config)
    model.load_state_dict(source.state_dict(), assign=True)
    assert model.lm_head.weight is model.token_embedding.weight
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)


@pytest.mark.parametrize(("assign", "device"), [(False, "cpu"), (True, "cpu"), (True, "meta")])
@pytest.mark.parametrize("kinds", ["dense quantized", "quantized dense", "quantized quantized", "dense dense"])
def test_loading_keeps_parameter_objects_and_the_state_dict_unchanged(kinds: str, assign: bool, device: str) -> None:
    source = quantized(seed=3) if kinds.startswith("quantized") else net(seed=3)
    model = quantized(device=device) if kinds.endswith("quantized") else net(device)
    before, state = [id(parameter) for parameter in model.parameters()], source.state_dict()
    tensors, metadata = dict(state), copy.deepcopy(state._metadata)
    load_state(model, state, assign=assign)
    assert [id(parameter) for parameter in model.parameters()] == before
    assert isinstance(model[0].weight, QuantizedWeight) == kinds.endswith("quantized")
    numbers = [m[0].weight.dequantize() if isinstance(m[0].weight, QuantizedWeight) else m[0].weight
               for m in (model, source)]  # fmt: skip
    assert torch.allclose(*numbers, atol=2e-3)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(state[key] is tensor for key, tensor in tensors.items())
    assert state._metadata == metadata
    assert not flag()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_state(model, dict(state) | {"other": torch.ones(1)})
    load_state(model, dict(state) | {"other": torch.ones(1)}, strict=False)


@pytest.mark.parametrize(("assign", "device"), [(False, "cpu"), (True, "cpu"), (True, "meta")])
def test_loading_quantized_into_quantized_copies(swapping: bool, assign: bool, device: str) -> None:
    source, model = quantized(seed=3), quantized(device=device)
    model.load_state_dict(source.state_dict(), assign=assign)
    assert all(torch.equal(model[i].weight, source[i].weight) for i in (0, 2))
    other = quantized("fp8", device)
    other.load_state_dict(source.state_dict(), assign=assign)
    assert other[0].weight.format == FORMATS["fp8"]
    assert torch.equal(other[0].weight, QuantizedWeight.quantize(source[0].weight.dequantize(), "fp8"))


@pytest.mark.parametrize(("assign", "device"), [(False, "cpu"), (True, "cpu"), (True, "meta")])
def test_loading_quantized_into_dense_dequantizes(assign: bool, device: str) -> None:
    source, model = quantized(seed=3), net(device)
    with swap_on_conversion():
        model.load_state_dict(source.state_dict(), assign=assign)
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, source[0].weight.dequantize())
    assert model[0].bias.device.type == "cpu"
    dense = net()
    dense.load_state_dict(source.state_dict())  # also without the flag
    assert torch.equal(dense[0].weight, source[0].weight.dequantize())


def test_without_the_hook_torch_would_replace_the_quantized_weight() -> None:
    """The reason for the hook: `assign=True`."""
    model = quantized()
    for module in model.modules():
        module._load_state_dict_pre_hooks.clear()
    model.load_state_dict(net().state_dict(), assign=True)
    assert type(model[0].weight) is nn.Parameter


def test_a_deep_copy_stays_quantized_through_loading() -> None:
    model = copy.deepcopy(quantized())
    model.load_state_dict(net().state_dict(), assign=True)
    assert has_quantized_weights_of(model, net(), "int8")


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_loading_another_dtype_rounds_once(swapping: bool, own: torch.dtype) -> None:
    """Codes match the stored scales, not those of the other dtype."""
    source, model = net().to(torch.bfloat16 if own == torch.float32 else torch.float32), quantized().to(own)
    model.load_state_dict(source.state_dict())
    assert model[0].weight.dtype == own
    assert torch.equal(model[0].weight, QuantizedWeight.quantize(source[0].weight.to(own), "int8"))


def test_loading_into_a_transposed_weight() -> None:
    weight, numbers = QuantizedWeight.quantize(torch.randn(32, 128), "int4").t(), torch.randn(128, 32)
    loaded = weight.module_load(numbers, assign=True)
    assert loaded.transposed
    assert torch.equal(loaded.t(), QuantizedWeight.quantize(numbers.t(), "int4"))


def test_frozen_weights_stay_frozen() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    quantize_(model, "int8", trainable=True)
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True, True, True]


def test_dequantized_weights_require_gradients_again() -> None:
    """Except for those that were frozen before."""
    model = net()
    model[0].weight.requires_grad_(False)
    for trainable in (False, True):
        quantize_(model, "int8", trainable=trainable)
        dequantize_(copy.deepcopy(model))
        dequantize_(model)
        assert [parameter.requires_grad for parameter in model.parameters()] == [False, True, True, True]


def computed(kind: str) -> nn.Sequential:
    """A model whose last linear computes its weight from other parameters."""
    model = net()
    wrap = {
        "parametrization": lambda linear: parametrize.register_parametrization(linear, "weight", nn.Identity()),
        "spectral norm": nn.utils.parametrizations.spectral_norm,
        "old spectral norm": nn.utils.spectral_norm,
        "weight norm": nn.utils.parametrizations.weight_norm,
        "pruning": lambda linear: prune.l1_unstructured(linear, "weight", amount=0.3),
    }
    wrap[kind](model[2])
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["parametrization", "spectral norm", "old spectral norm", "weight norm", "pruning"])
def test_a_parametrized_linear_is_skipped_with_a_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = computed(kind).eval(), torch.randn(3, 128)
    before = model[2](x)
    choice = quantize_(model, "int8")
    assert list(choice.selected) == ["0"]
    assert "computed from other parameters" in choice.skipped["2"]
    assert "skips 1 of 2 linear layers" in caplog.text
    assert torch.equal(model[2](x), before)
    with pytest.raises(PrecisionError, match="no supported linear layer.*computed from other parameters"):
        quantize_(computed(kind)[2:], "int8")


def test_shape_and_dtype_mismatches_are_reported() -> None:
    wrong = net().state_dict() | {"0.weight": torch.ones(128, 32)}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight.*128, 32"):
        quantized().load_state_dict(wrong)
    with pytest.raises(PrecisionError, match="'0.weight': expected .* got torch.int64"):
        quantized().load_state_dict(net().state_dict() | {"0.weight": torch.ones(128, 64, dtype=torch.int64)})


# The flag


def test_the_global_flag_is_restored() -> None:
    for before in (False, True):
        set_flag(before)
        with swap_on_conversion():
            assert flag()
        assert flag() == before
        with pytest.raises(ZeroDivisionError), swap_on_conversion():
            raise ZeroDivisionError
        assert flag() == before
    set_flag(False)


def test_weak_references_are_reported() -> None:
    model = quantized()
    original = weakref.ref(model[0].weight)
    with pytest.raises(PrecisionError, match="cannot swap the weight Linear.weight: .*weak reference"):
        with swap_on_conversion():
            model.bfloat16()
    with pytest.raises(PrecisionError, match="cannot swap .*0.weight: .*weak reference"):
        with swap_on_conversion():
            model.load_state_dict(net().state_dict())
    assert not flag()
    dense = net()
    original = weakref.ref(dense[2].weight)
    with pytest.raises(PrecisionError, match="cannot swap the weight of 2: .*weak reference"):
        quantize_(dense, "int8")
    assert original() is dense[2].weight


def test_quantization_is_all_or_nothing() -> None:
    dense = net()
    original = weakref.ref(dense[2].weight)
    with pytest.raises(PrecisionError, match="cannot swap the weight of 2"):
        quantize_(dense, "int8")
    assert original() is dense[2].weight
    assert [type(parameter) for parameter in dense.parameters()] == [nn.Parameter] * 4
    assert all(torch.equal(a, b) for a, b in zip(dense.parameters(), net().parameters(), strict=True))


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"), swap_on_conversion():
        net().load_state_dict(net().state_dict() | {"0.bias": torch.ones(3)})


# Quantizing a model in place


def test_references_to_a_parameter_see_the_quantized_weight() -> None:
    model = net()
    original = list(model.parameters())
    choice = quantize_(model, "int8")
    assert list(choice.selected) == ["0", "2"]
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in original]
    assert isinstance(original[0], QuantizedWeight)
    assert not original[0].requires_grad
    dequantize_(model)
    assert type(original[0]) is nn.Parameter
    assert torch.equal(original[0], QuantizedWeight.quantize(net()[0].weight, "int8").dequantize())


def test_shared_weights_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    quantize_(model, "int8")
    assert isinstance(model[0].weight, QuantizedWeight)
    assert model[0].weight is model[1].weight
    model[1].load_state_dict({"weight": torch.ones(32, 32), "bias": torch.ones(32)}, assign=True)
    assert isinstance(model[1].weight, QuantizedWeight)


def test_materialize_allocates_shared_tensors_once() -> None:
    with torch.device("meta"):
        model = tiny(tied_head=True)
    model.register_buffer("beside", torch.empty(3, device="meta"))
    quantize_(model, "int8")
    before = [id(parameter) for parameter in model.parameters()]
    materialize_(model, "cpu")
    assert model.lm_head.weight is model.token_embedding.weight
    assert [id(parameter) for parameter in model.parameters()] == before
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert sum(isinstance(parameter, QuantizedWeight) for parameter in model.parameters()) == 8


class Named(nn.Module):
    """A model with get_output_embeddings, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.embed_out = nn.Linear(16, 16), nn.Linear(16, 64)

    def get_output_embeddings(self) -> nn.Module:
        return self.embed_out


def test_an_output_layer_of_another_name_is_skipped() -> None:
    assert list(quantize_(Named(), "int8").skipped) == ["embed_out"]
    assert not quantize_(Named(), "int8", skip=()).skipped


def tiny(**settings: object) -> GPT:
    shape = {"vocab_size": 64, "context_length": 16, "num_layers": 2, "embd_size": 64, "num_heads": 2}
    return GPT(GPTConfig(**shape | settings))  # type: ignore[arg-type]


def test_embedding_and_output_layer_are_skipped_by_default() -> None:
    model = tiny(tied_head=False)
    choice = quantize_(model, "int8")
    assert choice.skipped == {"lm_head": "excluded by name"}
    assert len(choice.selected) == 8
    assert type(model.lm_head.weight) is type(model.token_embedding.weight) is nn.Parameter
    other = tiny(tied_head=False)
    assert "lm_head" in quantize_(other, "int8", skip=()).selected
    tied = tiny(tied_head=True)
    assert quantize_(tied, "int8", skip=()).skipped == {"lm_head": "its weight is tied to an embedding"}
    assert tied.lm_head.weight is tied.token_embedding.weight


def test_int4_halves_the_bytes_of_int8_in_a_model_of_narrow_layers() -> None:
    """The shape of SmolLM2 135M, whose 576 columns are not a multiple of 128."""
    sizes = {}
    for name in ("int8", "int4"):
        with torch.device("meta"):
            model = GPT(
                GPTConfig(
                    vocab_size=49152, context_length=64, num_layers=30, embd_size=576, num_heads=9, num_kv_heads=3,
                    mlp_size=1536, norm="rms", position="rope", activation="silu", gated_mlp=True, bias="none",
                )
            )  # fmt: skip
        choice = quantize_(model, name)
        assert len(choice.selected) == 120
        sizes[name] = sum(linear.weight.nbytes for linear in choice.selected.values())
    assert sizes["int4"] < 0.57 * sizes["int8"]


@torch.no_grad()
def test_a_quantized_model_is_close_to_the_original() -> None:
    model = tiny(tied_head=False)
    tokens = torch.arange(16)[None] % 64
    logits = model(tokens).logits
    quantize_(model, "int8")
    assert torch.allclose(model(tokens).logits, logits, atol=0.02)
    assert not torch.equal(model(tokens).logits, logits)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: quantize_(quantized(), "int8"), "already quantized"),
        (lambda: quantize_(nn.Sequential(nn.GELU()), "int8"), "no linear layer"),
        (
            lambda: quantize_(nn.Sequential(nn.Linear(80, 8)), "int4"),
            r"no supported linear layer.*multiple of 32, got 80",
        ),
        (lambda: quantize_(net(), "int4", trainable=True), "int4 weights cannot be trained: use int8"),
        (lambda: quantize_(net(), "int3"), "got 'int3': did you mean"),
    ],
)
def test_invalid_requests_are_rejected_and_nothing_changes(work: object, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        work()  # type: ignore[operator]
