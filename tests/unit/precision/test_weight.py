"""A quantised weight is a tensor: converted, copied, cut, multiplied, compiled and saved as one, or refused by name."""

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
from torch.nn import functional as F

from whimbrel.base.errors import PrecisionError
from whimbrel.precision import FORMATS, QuantizedWeight, quantize_

NAMES = list(FORMATS)
every_format = pytest.mark.parametrize("name", NAMES)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(name: str, rows: int = 64, columns: int = 256) -> QuantizedWeight:
    return QuantizedWeight.quantize(drawn(rows, columns), name)


def layer(name: str, *, trainable: bool = False) -> nn.Linear:
    linear = nn.Linear(256, 64)
    with torch.no_grad():
        linear.weight.copy_(drawn(64, 256) * 0.1)
    quantize_(linear, name, skip=(), trainable=trainable)
    return linear


def parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(weight, QuantizedWeight)
    return weight.codes, weight.scales


# Conversions of a module: the payload moves, the object stays


@every_format
def test_floats_change_scales_and_leave_codes(name: str) -> None:
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
def test_half_keeps_weights_whose_scales_fp16_cannot_hold(name: str) -> None:
    """Within the steps of fp16's smallest numbers, as a plain weight would; codes of other rows stay."""
    plain = drawn(64, 256) * 0.02
    plain[0] *= 1e-5
    plain[1] = 0
    weight = QuantizedWeight.quantize(plain, name)
    half = weight.half()
    error = (half.dequantize().float() - weight.dequantize()).abs()
    assert float(weight.dequantize()[0].abs().max()) > 5e-7
    assert float(error[0].max()) <= 2**-23
    assert float(error[1].max()) == 0
    assert torch.equal(half.codes[2:].view(torch.uint8), weight.codes[2:].view(torch.uint8))
    with pytest.raises(PrecisionError, match=r"exceed the range of torch.float16: use torch.bfloat16"):
        QuantizedWeight.quantize(plain * 1e12, name).half()


@pytest.mark.parametrize(
    "write", [lambda m, f: save_file(m.state_dict(), f), save_model, lambda m, f: save(m.state_dict())]
)
def test_safetensors_refuses_it_in_one_line(write: Any, tmp_path: Path) -> None:
    model = nn.Sequential(layer("int8"))
    with pytest.raises(PrecisionError, match=r"safetensors cannot hold it.*whimbrel.save_model") as refused:
        write(model, str(tmp_path / "model.safetensors"))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "model.safetensors").exists()


@every_format
def test_zeroed_rows_are_zero_whatever_they_held(name: str) -> None:
    """Also memory that was never written, with scales that are zero or not finite."""
    weight = made(name)
    weight.scales[0], weight.scales[1] = 0.0, torch.nan
    weight[:32].zero_()
    assert torch.equal(weight[:32], QuantizedWeight.quantize(torch.zeros(32, 256), name))
    assert torch.equal(weight[32:], made(name)[32:])


@every_format
def test_rows_are_looked_up_as_in_an_embedding(name: str) -> None:
    weight, ids = made(name), torch.tensor([[3, 0, 63], [3, 7, 7]])
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
    assert linear(drawn(2, 256)).shape == (2, 64)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn])
@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning")
def test_other_casts_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(PrecisionError, match=rf"int8 codes cannot become {dtype}.*dequantize"):
        made("int8").to(dtype)
    linear = layer("int8")
    with pytest.raises(PrecisionError, match="cannot become torch.complex64"):
        linear.to(torch.complex64)
    assert linear.weight.dtype == torch.float32


def test_those_who_hold_a_weight_hold_it_afterwards() -> None:
    linear = layer("int8", trainable=True)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    tied = nn.Linear(256, 64, bias=False)
    tied.weight = linear.weight
    both = nn.ModuleList([linear, tied]).bfloat16()
    assert both[0].weight is both[1].weight is optimizer.param_groups[0]["params"][0]
    assert optimizer.param_groups[0]["params"][0].dtype == torch.bfloat16
    before = linear.weight.dequantize().clone()
    linear(drawn(8, 256).bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert not torch.equal(tied.weight.dequantize(), before)


# Products


@every_format
def test_a_linear_multiplies_by_what_the_codes_stand_for(name: str) -> None:
    linear, x = layer(name), drawn(3, 5, 256, seed=1)
    y = F.linear(x, linear.weight.dequantize(), linear.bias)
    error = (linear(x) - y).norm() / y.norm()
    assert error < (1e-6 if FORMATS[name].activations is None else 0.04)
    assert (error > 1e-4) == (FORMATS[name].activations is not None)  # tokens are rounded, or they are not


@every_format
def test_products_agree_with_one_another(name: str) -> None:
    weight, x, bias = made(name), drawn(5, 256), drawn(64)
    y = F.linear(x, weight, bias)
    for other in (
        x @ weight.t() + bias, torch.addmm(bias, x, weight.mT), torch.matmul(x[None], weight.transpose(0, 1))[0] + bias
    ):  # fmt: skip
        assert torch.allclose(y, other, atol=1e-4)
    left = drawn(3, 64, seed=2)
    assert torch.allclose(left @ weight, left @ weight.dequantize(), atol=1e-4)
    assert torch.allclose(weight @ x.t(), weight.dequantize() @ x.t(), atol=1e-4)


@every_format
def test_autocast_holds(name: str) -> None:
    linear, x = layer(name), drawn(4, 256, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), linear(x), atol=0.06)


@every_format
def test_gradients_are_those_of_the_plain_product(name: str) -> None:
    linear, x = layer(name), drawn(4, 256).requires_grad_()
    (linear(x) * drawn(4, 64, seed=3)).sum().backward()
    other = x.detach().clone().requires_grad_()
    (F.linear(other, linear.weight.dequantize(), linear.bias) * drawn(4, 64, seed=3)).sum().backward()
    assert torch.allclose(x.grad, other.grad, atol=1e-5)
    assert linear.weight.grad is None
    assert torch.allclose(linear.bias.grad, 2 * drawn(4, 64, seed=3).sum(0), atol=1e-5)  # of both


def test_gradients_of_a_weight_wherever_it_stands_in_a_product() -> None:
    """Also of its transpose, or as what is multiplied; over several uses and several calls of backward."""
    weight, x, y = nn.Parameter(made("int8")), drawn(3, 64, seed=1), drawn(5, 256, seed=2)
    plain = weight.dequantize().clone().requires_grad_()
    for own in (weight, plain):
        for _ in range(2):
            loss = (F.linear(x, own.t()) * drawn(3, 256, seed=3)).sum() + (F.linear(own, y) * drawn(64, 5)).sum()
            loss = loss + F.linear(y, own).square().sum() + (x @ own).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert torch.allclose(weight.grad, plain.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_products_of_half_precision_do_not_overflow(name: str) -> None:
    """Codes are up to 127 times as large as the weight that they stand for."""
    linear = layer(name).half()
    x = 40 * linear.weight.dequantize().sign()
    y = F.linear(x.float(), linear.weight.dequantize().float(), linear.bias.float())
    with torch.autocast("cpu", dtype=torch.float16):
        cast = linear.float()(x.float())
    for product in (linear.half()(x), cast):
        assert product.dtype == torch.float16
        assert torch.allclose(product.float(), y, rtol=0.05, atol=0.5)
    other = x.clone().requires_grad_()
    linear(other).backward(torch.full((64, 64), 3e-5, dtype=torch.float16))  # times a scale, that is zero in fp16
    small = 3e-5 * linear.weight.dequantize().float().sum(dim=0)
    assert torch.allclose(other.grad.float(), small.expand_as(other.grad), rtol=0.05, atol=2e-6)


@every_format
def test_a_batch_may_be_empty(name: str) -> None:
    assert layer(name)(drawn(2, 0, 256)).shape == (2, 0, 64)


@every_format
def test_inference_mode_changes_nothing(name: str) -> None:
    linear, x = layer(name), drawn(4, 256)
    with torch.no_grad():
        y = linear(x)
    with torch.inference_mode():
        own = layer(name)  # made in it
        for weight in (linear.weight, own.weight):
            assert torch.equal(F.linear(x, weight, linear.bias), y)
            assert torch.allclose(x @ weight.t() + linear.bias, y, atol=1e-4)
            assert torch.allclose(x[None] @ weight.mT + linear.bias, y, atol=1e-4)
            assert torch.equal(weight[8:16].dequantize(), weight.dequantize()[8:16])
            assert [part.shape for part in weight.chunk(4)] == [(16, 256)] * 4
            assert weight.to(torch.bfloat16).scales.dtype == torch.bfloat16
            assert weight.copy_(drawn(64, 256) * 0.1) is weight
            with pytest.raises(PrecisionError, match="aten.abs.default is not among"):
                weight.abs()
        assert linear.bfloat16().weight.dtype == torch.bfloat16


@every_format
def test_compiled_as_eager(name: str) -> None:
    torch._dynamo.reset()
    linear, x = layer(name), drawn(4, 256)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), linear(x), atol=1e-5)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(one).sum().backward()
    linear(other).sum().backward()
    assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    linear, x = layer("int4"), drawn(4, 256)
    with torch.no_grad():
        assert torch.allclose(torch.compile(linear, fullgraph=True)(x), linear(x), atol=1e-4)


# Copies, views, files


@every_format
def test_copies_are_equal_and_apart(name: str) -> None:
    weight = made(name)
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
    one, other = made(source), QuantizedWeight.quantize(torch.ones(64, 256), target)
    same, codes = other, other.codes
    other.copy_(one)
    assert other is same
    assert other.codes is codes
    assert torch.equal(other, QuantizedWeight.quantize(one.dequantize(), target)) or source == target
    if source == target:
        assert torch.equal(other, one)


@every_format
def test_copying_from_and_to_plain(name: str) -> None:
    weight, numbers = made(name), drawn(64, 256, seed=5)
    plain = torch.zeros(64, 256, dtype=torch.bfloat16)
    plain.copy_(weight)
    assert torch.equal(plain, weight.dequantize().bfloat16())
    weight.copy_(numbers)
    assert torch.equal(weight, QuantizedWeight.quantize(numbers, name))


@every_format
def test_rows_are_cut_with_their_scales(name: str) -> None:
    weight = made(name)
    whole = weight.dequantize()
    for cut in (weight[8:24], weight.narrow(0, 8, 16), weight.split([8, 16, 40])[1]):
        assert isinstance(cut, QuantizedWeight)
        assert torch.equal(cut.dequantize(), whole[8:24])
    assert torch.equal(torch.cat([part.dequantize() for part in weight.chunk(4)]), whole)
    weight[8:24].copy_(torch.ones(16, 256))
    assert torch.allclose(weight.dequantize()[8:24], torch.ones(16, 256), rtol=0.1)  # a view: the whole has changed
    assert torch.equal(weight.t().dequantize(), weight.dequantize().t())
    assert torch.equal(weight.t()[:, 8:24].dequantize(), weight.dequantize().t()[:, 8:24])
    assert weight.t().t().turned is weight.permute(0, 1).turned is False
    assert torch.equal(weight.T.dequantize(), weight.t().dequantize())
    assert weight.view(64, 256).shape == weight.view(-1, 256).shape == weight.shape


@every_format
def test_saved_and_loaded_without_pickled_code(name: str) -> None:
    file, weight = io.BytesIO(), made(name)
    torch.save({"weight": weight, "layer": layer(name).state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["weight"], weight)
    assert loaded["weight"].format == FORMATS[name]


def test_data_is_not_set_to_no_effect() -> None:
    linear = layer("int8")
    linear.weight.data.copy_(torch.ones(64, 256))
    assert torch.allclose(linear.weight.dequantize(), torch.ones(64, 256), rtol=0.01)
    with pytest.raises(PrecisionError, match="the data of a weight of int8 codes cannot be set.*copy_"):
        linear.weight.data = torch.zeros(64, 256)


def test_parts_are_shared_with_other_processes() -> None:
    linear = layer("int4").share_memory()
    assert linear.weight.is_shared()
    assert all(part.is_shared() for part in parts(linear.weight))
    assert not made("int4").is_shared()


def test_bytes_are_those_of_codes_and_scales() -> None:
    assert made("int8").nbytes == 64 * 256 + 64 * 4
    assert made("int4").nbytes == 64 * 128 + 64 * 2 * 4


@pytest.mark.parametrize(
    ("work", "named"),
    [
        (torch.abs, "aten.abs.default is not among the operations"),
        (lambda w: w + 1, "aten.add.Tensor"),
        (lambda w: w[:, 3:9], "slice dimension 0"),
        (lambda w: w.split(8, dim=1), "split dimension 0"),
        (lambda w: w.view(32, 512), "tear codes from their scales"),
        (lambda w: w[3], "aten.select.int"),
        (lambda w: w.sum(), "aten.sum"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(work: object, named: str) -> None:
    with pytest.raises(PrecisionError, match=named) as error:
        work(made("int8"))  # type: ignore[operator]
    assert "dequantize()" in str(error.value) or "dimension 0" in str(error.value)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    codes, scales = parts(made("int8"))
    for wrong in ((codes, scales[:3]), (codes.float(), scales), (codes, scales.int())):
        with pytest.raises(PrecisionError, match="int8 has"):
            QuantizedWeight(*wrong, FORMATS["int8"])
    with pytest.raises(PrecisionError, match="cannot be int4: its 200 columns"):
        QuantizedWeight.quantize(drawn(8, 200), "int4")
    with pytest.raises(PrecisionError, match=r"torch.int64 cannot be int8: convert it to a float dtype"):
        QuantizedWeight.quantize(torch.ones(8, 128, dtype=torch.int64), "int8")


def test_state_of_an_optimizer_is_plain() -> None:
    weight = made("int8")
    for tensor in (torch.zeros_like(weight), torch.ones_like(weight), weight.new_zeros(3), torch.full_like(weight, 2)):
        assert type(tensor) is torch.Tensor
        assert tensor.dtype == torch.float32
        assert tensor.device == weight.device
    assert isinstance(torch.empty_like(weight), QuantizedWeight)


def test_it_shows_itself_in_a_line() -> None:
    assert repr(made("int4")) == "QuantizedWeight(int4, shape=(64, 256), dtype=float32, device='cpu')"
    assert "requires_grad=True" in repr(layer("int8", trainable=True).weight)
