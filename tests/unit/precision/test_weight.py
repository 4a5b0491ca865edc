"""QuantizedWeight as a tensor: conversion, products, copies, views, compilation, serialization."""

from __future__ import annotations

import copy
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file, save_model
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn import functional as F

from whimbrel.base.errors import PrecisionError
from whimbrel.precision import FORMATS, QuantizedWeight, quantize_

NAMES = list(FORMATS)
every_format = pytest.mark.parametrize("name", NAMES)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized_weight(name: str, rows: int = 64, columns: int = 256) -> QuantizedWeight:
    return QuantizedWeight.quantize(randn(rows, columns), name)


def layer(name: str, *, trainable: bool = False) -> nn.Linear:
    linear = nn.Linear(256, 64)
    with torch.no_grad():
        linear.weight.copy_(randn(64, 256) * 0.1)
    quantize_(linear, name, skip=(), trainable=trainable)
    return linear


def parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(weight, QuantizedWeight)
    return weight.codes, weight.scales


# Module conversions: codes and scales move, the parameter object stays


@every_format
def test_float_conversions_change_scales_and_keep_codes(name: str) -> None:
    linear = layer(name)
    before, same = copy.deepcopy(linear.weight), linear.weight
    for convert, dtype in (("bfloat16", torch.bfloat16), ("half", torch.float16), ("float", torch.float32)):
        getattr(linear, convert)()
        codes, scales = parts(linear.weight)
        assert linear.weight is same
        assert isinstance(linear.weight, nn.Parameter)
        assert linear.weight.dtype == scales.dtype == linear.bias.dtype == dtype
        assert torch.equal(codes.view(torch.uint8), before.codes.view(torch.uint8))
    assert torch.allclose(parts(linear.weight)[1], before.scales, rtol=2e-2)
    linear.to(torch.float64)
    assert linear.weight.dtype == linear.weight.dequantize().dtype == torch.float64


@every_format
def test_half_requantizes_groups_whose_scales_underflow(name: str) -> None:
    """Within the spacing of fp16 subnormals; codes of other rows stay the same."""
    dense = randn(64, 256) * 0.02
    dense[0] *= 1e-5
    dense[1] = 0
    weight = QuantizedWeight.quantize(dense, name)
    half = weight.half()
    error = (half.dequantize().float() - weight.dequantize()).abs()
    assert float(weight.dequantize()[0].abs().max()) > 5e-7
    assert float(error[0].max()) <= 2**-23
    assert float(error[1].max()) == 0
    assert torch.equal(half.codes[2:].view(torch.uint8), weight.codes[2:].view(torch.uint8))
    with pytest.raises(PrecisionError, match=r"exceed the range of torch.float16: use torch.bfloat16"):
        QuantizedWeight.quantize(dense * 1e12, name).half()


@pytest.mark.parametrize(
    "write", [lambda m, f: save_file(m.state_dict(), f), save_model, lambda m, f: save(m.state_dict())]
)
def test_safetensors_reports_in_one_line_that_it_is_unsupported(write: Any, tmp_path: Path) -> None:
    model = nn.Sequential(layer("int8"))
    with pytest.raises(
        PrecisionError, match="safetensors does not support int8 weights.*whimbrel.save_model"
    ) as refused:
        write(model, str(tmp_path / "model.safetensors"))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "model.safetensors").exists()


@every_format
def test_zero_works_on_uninitialized_memory(name: str) -> None:
    """Scales may be zero or not finite."""
    weight = quantized_weight(name)
    weight.scales[0], weight.scales[1] = 0.0, torch.nan
    weight[:32].zero_()
    assert torch.equal(weight[:32], QuantizedWeight.quantize(torch.zeros(32, 256), name))
    assert torch.equal(weight[32:], quantized_weight(name)[32:])


@every_format
def test_embedding_lookup(name: str) -> None:
    weight, ids = quantized_weight(name), torch.tensor([[3, 0, 63], [3, 7, 7]])
    assert torch.equal(F.embedding(ids, weight), F.embedding(ids, weight.dequantize()))
    with pytest.raises(PrecisionError, match="transpose it back"):
        F.embedding(ids, weight.t())


@every_format
def test_to_empty_and_meta_keep_the_layout(name: str) -> None:
    linear = layer(name)
    same, shapes = linear.weight, [part.shape for part in parts(linear.weight)]
    linear.to("meta")
    assert linear.weight is same
    assert all(part.device.type == "meta" for part in (*parts(linear.weight), linear.bias))
    linear.to_empty(device="cpu")
    assert linear.weight is same
    assert isinstance(linear.weight, QuantizedWeight)
    assert [part.shape for part in parts(linear.weight)] == shapes
    assert all(part.device.type == "cpu" for part in parts(linear.weight))
    assert linear(randn(2, 256)).shape == (2, 64)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn])
@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning")
def test_non_float_conversions_are_rejected(dtype: torch.dtype) -> None:
    with pytest.raises(PrecisionError, match=rf"cannot be converted to {dtype}"):
        quantized_weight("int8").to(dtype)
    linear = layer("int8")
    with pytest.raises(PrecisionError, match="cannot be converted to torch.complex64"):
        linear.to(torch.complex64)
    assert linear.weight.dtype == torch.float32


def test_optimizer_and_tied_layers_keep_their_reference_through_conversion() -> None:
    linear = layer("int8", trainable=True)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    tied = nn.Linear(256, 64, bias=False)
    tied.weight = linear.weight
    both = nn.ModuleList([linear, tied]).bfloat16()
    assert both[0].weight is both[1].weight is optimizer.param_groups[0]["params"][0]
    assert optimizer.param_groups[0]["params"][0].dtype == torch.bfloat16
    before = linear.weight.dequantize().clone()
    linear(randn(8, 256).bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert not torch.equal(tied.weight.dequantize(), before)


# Matmuls


@every_format
def test_linear_matches_the_dequantized_weight(name: str) -> None:
    linear, x = layer(name), randn(3, 5, 256, seed=1)
    y = F.linear(x, linear.weight.dequantize(), linear.bias)
    error = (linear(x) - y).norm() / y.norm()
    assert error < (1e-6 if FORMATS[name].activations is None else 0.04)
    assert (error > 1e-4) == (FORMATS[name].activations is not None)  # activations are quantized, or not


@every_format
def test_all_matmul_functions_agree(name: str) -> None:
    weight, x, bias = quantized_weight(name), randn(5, 256), randn(64)
    y = F.linear(x, weight, bias)
    for other in (
        x @ weight.t() + bias, torch.addmm(bias, x, weight.mT), torch.matmul(x[None], weight.transpose(0, 1))[0] + bias
    ):  # fmt: skip
        assert torch.allclose(y, other, atol=1e-4)
    left = randn(3, 64, seed=2)
    assert torch.allclose(left @ weight, left @ weight.dequantize(), atol=1e-4)
    assert torch.allclose(weight @ x.t(), weight.dequantize() @ x.t(), atol=1e-4)


@every_format
def test_autocast(name: str) -> None:
    linear, x = layer(name), randn(4, 256, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), linear(x), atol=0.06)


@every_format
def test_gradients_match_the_dequantized_weight(name: str) -> None:
    linear, x = layer(name), randn(4, 256).requires_grad_()
    (linear(x) * randn(4, 64, seed=3)).sum().backward()
    other = x.detach().clone().requires_grad_()
    (F.linear(other, linear.weight.dequantize(), linear.bias) * randn(4, 64, seed=3)).sum().backward()
    assert torch.allclose(x.grad, other.grad, atol=1e-5)
    assert linear.weight.grad is None
    assert torch.allclose(linear.bias.grad, 2 * randn(4, 64, seed=3).sum(0), atol=1e-5)  # of both


def test_weight_gradients_for_every_position_in_a_matmul() -> None:
    """Also transposed or as left operand, over several uses and backward calls."""
    weight, x, y = nn.Parameter(quantized_weight("int8")), randn(3, 64, seed=1), randn(5, 256, seed=2)
    dense = weight.dequantize().clone().requires_grad_()
    for own in (weight, dense):
        for _ in range(2):
            loss = (F.linear(x, own.t()) * randn(3, 256, seed=3)).sum() + (F.linear(own, y) * randn(64, 5)).sum()
            loss = loss + F.linear(y, own).square().sum() + (x @ own).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert torch.allclose(weight.grad, dense.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_fp16_matmuls_do_not_overflow(name: str) -> None:
    """Codes are up to 127 times as large as the weights."""
    linear = layer(name).half()
    x = 40 * linear.weight.dequantize().sign()
    y = F.linear(x.float(), linear.weight.dequantize().float(), linear.bias.float())
    with torch.autocast("cpu", dtype=torch.float16):
        cast = linear.float()(x.float())
    for product in (linear.half()(x), cast):
        assert product.dtype == torch.float16
        assert torch.allclose(product.float(), y, rtol=0.05, atol=0.5)
    other = x.clone().requires_grad_()
    linear(other).backward(torch.full((64, 64), 3e-5, dtype=torch.float16))  # times a scale that is zero in fp16
    small = 3e-5 * linear.weight.dequantize().float().sum(dim=0)
    assert torch.allclose(other.grad.float(), small.expand_as(other.grad), rtol=0.05, atol=2e-6)


@every_format
def test_empty_batches(name: str) -> None:
    assert layer(name)(randn(2, 0, 256)).shape == (2, 0, 64)


@every_format
def test_inference_mode_gives_the_same_results(name: str) -> None:
    linear, x = layer(name), randn(4, 256)
    with torch.no_grad():
        y = linear(x)
    with torch.inference_mode():
        own = layer(name)  # created in inference mode
        for weight in (linear.weight, own.weight):
            assert torch.equal(F.linear(x, weight, linear.bias), y)
            assert torch.allclose(x @ weight.t() + linear.bias, y, atol=1e-4)
            assert torch.allclose(x[None] @ weight.mT + linear.bias, y, atol=1e-4)
            assert torch.equal(weight[8:16].dequantize(), weight.dequantize()[8:16])
            assert [part.shape for part in weight.chunk(4)] == [(16, 256)] * 4
            assert weight.to(torch.bfloat16).scales.dtype == torch.bfloat16
            assert weight.copy_(randn(64, 256) * 0.1) is weight
            with pytest.raises(PrecisionError, match="aten.abs.default is not supported"):
                weight.abs()
        assert linear.bfloat16().weight.dtype == torch.bfloat16


@every_format
def test_compiled_matches_eager(name: str) -> None:
    torch._dynamo.reset()
    linear, x = layer(name), randn(4, 256)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), linear(x), atol=1e-5)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(one).sum().backward()
    linear(other).sum().backward()
    assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_inductor_matches_eager() -> None:
    torch._dynamo.reset()
    linear, x = layer("int4"), randn(4, 256)
    with torch.no_grad():
        assert torch.allclose(torch.compile(linear, fullgraph=True)(x), linear(x), atol=1e-4)


def test_inductor_uses_no_gemv_kernel_for_many_rows() -> None:
    """Its kernel for int8 weights is for decoding, not for the many rows of a training step."""
    torch._dynamo.reset()
    linear, x = layer("int8").bfloat16(), randn(2, 64, 256).bfloat16()
    counters.clear()
    with torch.no_grad(), inductor.patch(fx_graph_cache=False):
        torch.testing.assert_close(torch.compile(linear, fullgraph=True)(x), linear(x), rtol=2**-6, atol=0.05)
    assert counters["inductor"]["woq_matcher_count"] == 0


# Copies, views, serialization


@every_format
def test_copies_are_equal_and_independent(name: str) -> None:
    weight = quantized_weight(name)
    for other in (copy.deepcopy(weight), weight.clone(), weight.detach().clone()):
        assert isinstance(other, QuantizedWeight)
        assert torch.equal(weight, other)
        other.codes.view(torch.uint8)[0, 0] ^= 1
        assert not torch.equal(weight, other)
    linear = layer(name)
    twin = copy.deepcopy(linear)
    assert isinstance(twin.weight, nn.Parameter)
    assert torch.equal(twin.weight, linear.weight)
    assert twin.weight.codes.data_ptr() != linear.weight.codes.data_ptr()


@pytest.mark.parametrize(("source", "target"), list(itertools.product(NAMES, NAMES)))
def test_copying_between_formats(source: str, target: str) -> None:
    one, other = quantized_weight(source), QuantizedWeight.quantize(torch.ones(64, 256), target)
    same, codes = other, other.codes
    other.copy_(one)
    assert other is same
    assert other.codes is codes
    assert torch.equal(other, QuantizedWeight.quantize(one.dequantize(), target)) or source == target
    if source == target:
        assert torch.equal(other, one)


@every_format
def test_copying_from_and_to_dense_tensors(name: str) -> None:
    weight, numbers = quantized_weight(name), randn(64, 256, seed=5)
    dense = torch.zeros(64, 256, dtype=torch.bfloat16)
    dense.copy_(weight)
    assert torch.equal(dense, weight.dequantize().bfloat16())
    weight.copy_(numbers)
    assert torch.equal(weight, QuantizedWeight.quantize(numbers, name))


@every_format
def test_slices_of_rows_include_their_scales(name: str) -> None:
    weight = quantized_weight(name)
    full = weight.dequantize()
    for cut in (weight[8:24], weight.narrow(0, 8, 16), weight.split([8, 16, 40])[1]):
        assert isinstance(cut, QuantizedWeight)
        assert torch.equal(cut.dequantize(), full[8:24])
    assert torch.equal(torch.cat([part.dequantize() for part in weight.chunk(4)]), full)
    weight[8:24].copy_(torch.ones(16, 256))
    assert torch.allclose(weight.dequantize()[8:24], torch.ones(16, 256), rtol=0.1)  # a view: the base has changed
    assert torch.equal(weight.t().dequantize(), weight.dequantize().t())
    assert torch.equal(weight.t()[:, 8:24].dequantize(), weight.dequantize().t()[:, 8:24])
    assert weight.t().t().transposed is weight.permute(0, 1).transposed is False
    assert torch.equal(weight.T.dequantize(), weight.t().dequantize())
    assert weight.view(64, 256).shape == weight.view(-1, 256).shape == weight.shape


@every_format
def test_torch_save_and_load_with_weights_only(name: str) -> None:
    file, weight = io.BytesIO(), quantized_weight(name)
    torch.save({"weight": weight, "layer": layer(name).state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["weight"], weight)
    assert loaded["weight"].format == FORMATS[name]


def test_setting_data_is_rejected() -> None:
    linear = layer("int8")
    linear.weight.data.copy_(torch.ones(64, 256))
    assert torch.allclose(linear.weight.dequantize(), torch.ones(64, 256), rtol=0.01)
    with pytest.raises(PrecisionError, match="cannot set .data"):
        linear.weight.data = torch.zeros(64, 256)


def test_share_memory() -> None:
    linear = layer("int4").share_memory()
    assert linear.weight.is_shared()
    assert all(part.is_shared() for part in parts(linear.weight))
    assert not quantized_weight("int4").is_shared()


def test_nbytes_counts_codes_and_scales() -> None:
    assert quantized_weight("int8").nbytes == 64 * 256 + 64 * 4
    assert quantized_weight("int4").nbytes == 64 * 128 + 64 * 2 * 4


@pytest.mark.parametrize(
    ("work", "named"),
    [
        (torch.abs, "aten.abs.default is not supported"),
        (lambda w: w + 1, "aten.add.Tensor"),
        (lambda w: w[:, 3:9], "along dimension 0"),
        (lambda w: w.split(8, dim=1), "along dimension 0"),
        (lambda w: w.view(32, 512), "expected the same shape"),
        (lambda w: w[3], "aten.select.int"),
        (lambda w: w.sum(), "aten.sum"),
    ],
)
def test_unsupported_operations_are_named(work: object, named: str) -> None:
    with pytest.raises(PrecisionError, match=named) as error:
        work(quantized_weight("int8"))  # type: ignore[operator]
    assert "dequantize()" in str(error.value) or "dimension 0" in str(error.value)


def test_mismatched_parts_are_rejected() -> None:
    codes, scales = parts(quantized_weight("int8"))
    for wrong in ((codes, scales[:3]), (codes.float(), scales), (codes, scales.int())):
        with pytest.raises(PrecisionError, match="int8: expected"):
            QuantizedWeight(*wrong, FORMATS["int8"])
    with pytest.raises(PrecisionError, match="multiple of 32, got 200"):
        QuantizedWeight.quantize(randn(8, 200), "int4")
    with pytest.raises(PrecisionError, match="floating-point dtype, got torch.int64"):
        QuantizedWeight.quantize(torch.ones(8, 128, dtype=torch.int64), "int8")


def test_optimizer_state_is_dense() -> None:
    weight = quantized_weight("int8")
    for tensor in (torch.zeros_like(weight), torch.ones_like(weight), weight.new_zeros(3), torch.full_like(weight, 2)):
        assert type(tensor) is torch.Tensor
        assert tensor.dtype == torch.float32
        assert tensor.device == weight.device
    assert isinstance(torch.empty_like(weight), QuantizedWeight)


def test_repr_is_one_line() -> None:
    assert repr(quantized_weight("int4")) == "QuantizedWeight(int4, shape=(64, 256), dtype=float32, device='cpu')"
    assert "requires_grad=True" in repr(layer("int8", trainable=True).weight)
