"""`QuantizedWeight`: a tensor subclass that stores a weight matrix as codes and scales.

Shape and dtype are those of the dequantized weight. Matmuls, conversions, copies, slices of rows and optimizer
steps work as on a dense tensor; any operation that is not in the table `OPERATIONS` raises `PrecisionError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from whimbrel.base.errors import PrecisionError
from whimbrel.precision.formats import WeightFormat, find_format, quantize_tokens

__all__ = ["QuantizedWeight"]

ATEN = torch.ops.aten
Handler = Callable[..., Any]
GATHERS = {f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "wait_tensor", "_wrap_tensor_autograd")}
"""Names of the operations that gather rows from other ranks; torch registers some of them only when it needs them."""
MIN_INT_MM_ROWS = 32
"""`torch._int_mm` needs more than 16 rows on CUDA."""
MAX_GEMV_ROWS = 32
"""Inductor compiles `linear(x, int8 codes) * bf16 scales` to `_weight_int8pack_mm`, a kernel for the few rows of
decoding. With more rows than this, `quantized_linear` avoids the match, so that a matmul is used."""
OPERATIONS: dict[Any, Handler] = {}
"""Handlers of the supported operations, called as `handler(func, *args, **kwargs)`."""


class QuantizedWeight(Tensor):
    """A weight stored as codes and scales in a format. With `transposed`, it is transposed, but the codes are not."""

    codes: Tensor
    scales: Tensor
    format: WeightFormat
    transposed: bool
    frozen: bool = False
    """Whether the weight was frozen before it was quantized."""

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, weight_format: WeightFormat, transposed: bool = False
    ) -> QuantizedWeight:
        rows, columns = weight_format.weight_shape(codes)
        shape, strides = ((columns, rows), (1, columns)) if transposed else ((rows, columns), (columns, 1))
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=scales.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, weight_format: WeightFormat, transposed: bool = False) -> None:
        _check(codes, scales, weight_format)
        self.codes, self.scales, self.format, self.transposed = codes, scales, weight_format, transposed

    @classmethod
    @torch.no_grad()
    def quantize(cls, weight: Tensor, weight_format: str | WeightFormat) -> QuantizedWeight:
        """Quantize a dense matrix, rounding to nearest; its dtype becomes the dtype of the result and of the scales."""
        weight_format = find_format(weight_format).fit_to(weight.shape)
        if (reason := weight_format.unsupported_reason(weight.shape)) is not None:
            raise PrecisionError(reason)
        if not weight.is_floating_point():
            raise PrecisionError(
                f"{weight_format.name}: expected a weight of a floating-point dtype, got {weight.dtype}"
            )
        return cls(*weight_format.encode(weight.detach()), weight_format)

    def dequantize(self) -> Tensor:
        """The dense matrix."""
        weight = self.format.decode(self.codes, self.scales)
        return weight.t() if self.transposed else weight

    @torch.no_grad()
    def stochastic_copy_(self, values: Tensor, generator: torch.Generator | None = None) -> QuantizedWeight:
        """Overwrite the weight, rounding integers stochastically so that small updates add up over many steps."""
        if self.transposed:
            values = values.t()
        noise = torch.rand(values.shape, device=values.device, generator=generator)
        scales = self.format.codec.update_scales(self.scales, values)
        codes, scales = self.format.encode(values, scales=scales, noise=noise)
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        return self

    def quantize_like(self, values: Tensor) -> QuantizedWeight:
        """Quantize a dense matrix of the same shape to this format and orientation."""
        if not self.transposed:
            return type(self).quantize(values, self.format)
        return type(self)(*self.format.encode(values.t()), self.format, transposed=True)

    def share_memory_(self) -> QuantizedWeight:
        """Move codes and scales to shared memory."""
        self.codes.share_memory_()
        self.scales.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether codes and scales are in shared memory."""
        return bool(self.codes.is_shared() and self.scales.is_shared())

    @property
    def data(self) -> Tensor:
        """The same codes, detached from autograd."""
        return self.detach()

    @data.setter
    def data(self, _other: Tensor) -> None:
        raise PrecisionError(
            f"cannot set .data of {self.format.name} weights, since torch would not replace the codes: use copy_, or "
            "torch.utils.swap_tensors"
        )

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """One line, without values."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        shape, dtype = tuple(self.shape), str(self.dtype).removeprefix("torch.")
        return f"QuantizedWeight({self.format.name}, shape={shape}, dtype={dtype}, device='{self.device}'{grad})"

    # Flattening, for torch.compile, torch.save and copies

    def __tensor_flatten__(self) -> tuple[list[str], tuple[WeightFormat, bool]]:
        return ["codes", "scales"], (self.format, self.transposed)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[WeightFormat, bool], size: Any, stride: Any
    ) -> QuantizedWeight:
        return cls(inner["codes"], inner["scales"], *context)

    def _stable_hash_for_caching(self) -> str:
        """Cache key of compiled code, the same in every process."""
        layout = (tuple(self.shape), self.dtype, self.device.type, self.requires_grad)
        return repr((self.format, self.transposed, *layout, self.codes.stride(), self.scales.stride()))

    # Dispatch

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle linear layers and `load_state_dict`; everything else goes to `__torch_dispatch__`."""
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is Tensor.module_load:
            return _module_load(*args, **kwargs)
        if func is Tensor.storage:  # called by safetensors after untyped_storage has failed
            raise PrecisionError(
                f"safetensors does not support {args[0].format.name} weights: use whimbrel.save_model, save "
                "weight.codes and weight.scales, or dequantize_ the model first"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Call the handler, or decompose composite operations, which torch does not do in inference mode."""
        default = _collective if func._schema.name in GATHERS else _decompose
        handler: Handler = OPERATIONS.get(func, default)
        settings = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if torch.is_inference_mode_enabled() and not any(tensor.is_inference() for tensor in tensors):
            # Views of tensors created outside inference mode must also be created outside it.
            with torch.inference_mode(mode=False), torch.no_grad():
                return handler(func, *args, **settings)
        return handler(func, *args, **settings)


torch.serialization.add_safe_globals([QuantizedWeight, WeightFormat])


def _check(codes: Tensor, scales: Tensor, weight_format: WeightFormat) -> None:
    if codes.dtype != weight_format.dtype or codes.ndim != 2:
        raise PrecisionError(
            f"{weight_format.name}: expected a matrix of {weight_format.dtype} codes, got {codes.ndim}-D {codes.dtype}"
        )
    expected = weight_format.part_shapes(weight_format.weight_shape(codes))[1]
    if tuple(scales.shape) != expected or not scales.is_floating_point():
        raise PrecisionError(
            f"{weight_format.name}: expected floating-point scales of shape {expected}, got {scales.dtype} of "
            f"{tuple(scales.shape)}"
        )


def _decompose(func: Any, *args: Any, **kwargs: Any) -> Any:
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise PrecisionError(f"{func} is not supported for quantized weights: call dequantize() first")
    return result


def _dense(x: Any) -> Any:
    return x.dequantize() if isinstance(x, QuantizedWeight) else x


def _map_parts(weight: QuantizedWeight, fn: Callable[[Tensor], Tensor]) -> QuantizedWeight:
    """Apply `fn` to codes and to scales."""
    return QuantizedWeight(fn(weight.codes), fn(weight.scales), weight.format, weight.transposed)


# Matmuls


def quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, weight_format: WeightFormat, bias: Tensor | None
) -> Tensor:
    """`x @ weight.T + bias` in the dtype of `x`, with activations quantized as the format specifies.

    Scales per row are applied after the matmul, which then reads only codes. With groups of columns the weight is
    dequantized first: applying their scales to partial products would change the result.
    """
    if weight_format.activations in ("int8", "fp8"):
        y = _low_bit_matmul(x, codes, scales, weight_format)
    elif weight_format.activations is None and _can_scale_outputs(weight_format, x):
        factors = scales.to(x.dtype).flatten()
        if torch.compiler.is_compiling() and x.numel() > MAX_GEMV_ROWS * x.shape[-1]:
            factors = factors.float()  # Inductor replaces the matmul by a GEMV kernel if they are bf16
        y = (F.linear(x, weight_format.unpack(codes, x.dtype)) * factors).to(x.dtype)
    else:
        if weight_format.activations is not None:
            tokens, token_scales, zero_points = quantize_tokens(x, weight_format.activations)
            assert zero_points is not None
            x = ((tokens.float() - zero_points) * token_scales).to(x.dtype)
        return F.linear(x, weight_format.decode(codes, scales).to(x.dtype), bias)
    return y if bias is None else y + bias


def quantized_linear_backward(grad_y: Tensor, codes: Tensor, scales: Tensor, weight_format: WeightFormat) -> Tensor:
    """The gradient of `x`: `grad_y @ weight`, without quantizing `grad_y`."""
    if torch.compiler.is_compiling():
        codes = _decoded_in_backward(codes, grad_y)
    if _can_scale_outputs(weight_format, grad_y):
        return (grad_y * scales.to(grad_y.dtype).flatten()) @ weight_format.unpack(codes, grad_y.dtype)
    return grad_y @ weight_format.decode(codes, scales).to(grad_y.dtype)


def _decoded_in_backward(codes: Tensor, grad_y: Tensor) -> Tensor:
    """The same codes, but as a function of a gradient.

    torch.compile would otherwise find that forward and backward decode the same weight, and keep the decoded weights of
    all layers in memory between the two, since the matmul in backward needs them as complete tensors.
    """
    as_bytes = codes.view(torch.uint8)  # float8 does not support `where`
    return torch.where(grad_y.flatten()[0].isnan(), torch.zeros_like(as_bytes), as_bytes).view(codes.dtype)


def _can_scale_outputs(weight_format: WeightFormat, x: Tensor) -> bool:
    """Whether codes can be multiplied unscaled. In fp16 their sums overflow, and gradients times scales underflow."""
    return weight_format.group_size is None and x.dtype != torch.float16


def _low_bit_matmul(x: Tensor, codes: Tensor, scales: Tensor, weight_format: WeightFormat) -> Tensor:
    """Multiply quantized activations with codes; the result is scaled by token and by row."""
    tokens, token_scales, _ = quantize_tokens(x.reshape(-1, x.shape[-1]), str(weight_format.activations))
    if weight_format.activations == "int8":
        y = _int8_matmul(tokens, codes).float() * token_scales * scales.float().flatten()
    elif x.device.type == "cuda" and x.dtype == torch.bfloat16:
        y = torch._scaled_mm(
            tokens, codes.t(), scale_a=token_scales, scale_b=scales.float().t().contiguous(), out_dtype=torch.bfloat16
        )
    else:
        with torch.autocast(x.device.type, enabled=False):
            y = F.linear(tokens.float(), codes.float()) * token_scales * scales.float().flatten()
    return y.to(x.dtype).reshape(*x.shape[:-1], len(codes))


def _int8_matmul(tokens: Tensor, codes: Tensor) -> Tensor:
    """`tokens @ codes.T`, exact in int32."""
    if tokens.device.type == "cuda" and len(tokens) < MIN_INT_MM_ROWS:
        padded = F.pad(tokens, (0, 0, 0, MIN_INT_MM_ROWS - len(tokens)))
        return torch._int_mm(padded, codes.t())[: len(tokens)]
    return torch._int_mm(tokens, codes.t())


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, QuantizedWeight) or weight.transposed or isinstance(x, QuantizedWeight):
        y = x @ weight.t()  # dispatched below autograd, which records it
        return y if bias is None else y + bias.to(y.dtype)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return cast(Tensor, _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]
    return quantized_linear(x, weight.codes, weight.scales, weight.format, bias)


class _Linear(torch.autograd.Function):
    """Straight-through gradients; the weight gradient is dense, for an optimizer with stochastic rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        # Not the weight itself: a tensor saved in an autograd graph cannot be swapped when its module is converted.
        ctx.save_for_backward(x if weight.requires_grad else None, weight.codes, weight.scales)
        ctx.format = weight.format
        return quantized_linear(x, weight.codes, weight.scales, weight.format, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, codes, scales = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = quantized_linear_backward(grad_y, codes, scales, ctx.format) if for_x else None
        grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(scales.dtype) if for_weight else None
        return grad_x, grad_weight, rows.sum(dim=0) if for_bias else None


def _mm(_func: Any, left: Tensor, right: Tensor) -> Tensor:
    if isinstance(right, QuantizedWeight) and right.transposed and not isinstance(left, QuantizedWeight):
        return quantized_linear(left, right.codes, right.scales, right.format, None)
    return torch.mm(_dense(left), _dense(right))


def _addmm(_func: Any, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return bias * beta + _mm(None, left, right) * alpha


def _embedding(_func: Any, weight: QuantizedWeight, indices: Tensor, *_settings: Any) -> Tensor:
    """Dequantize some rows; padding_idx and the like only affect gradients."""
    if weight.transposed:
        raise PrecisionError(
            "embedding is not supported for the transpose of a quantized weight: transpose it back first"
        )
    codes = weight.codes.view(torch.uint8)[indices].view(weight.codes.dtype)  # float8 does not support indexing
    return weight.format.decode(codes, weight.scales[indices])


# Conversions and copies


def _to_copy(_func: Any, weight: QuantizedWeight, **changes: Any) -> QuantizedWeight:
    """Move codes and scales; the dtype applies to the scales."""
    dtype = changes.pop("dtype", None) or weight.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise PrecisionError(
            f"{weight.format.name} weights cannot be converted to {dtype}: use a floating-point dtype, or call "
            "dequantize() first"
        )
    changes.pop("memory_format", None)
    codes, scales = _parts_for_dtype(weight, dtype)
    codes, scales = ATEN._to_copy(codes, **changes), ATEN._to_copy(scales, dtype=dtype, **changes)
    return QuantizedWeight(codes, scales, weight.format, weight.transposed)


def _parts_for_dtype(weight: QuantizedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales for a dtype of smaller range: groups whose scale would underflow are re-quantized.

    All other codes stay the same. A scale that would overflow raises.
    """
    codes, scales, limits = weight.codes, weight.scales, torch.finfo(dtype)
    narrower = limits.smallest_normal > torch.finfo(scales.dtype).smallest_normal
    if not narrower or scales.device.type == "meta" or torch.compiler.is_compiling():
        return codes, scales
    if bool((scales > limits.max).any()):
        raise PrecisionError(
            f"the scales of {weight.format.name} weights exceed the range of {dtype}: use torch.bfloat16"
        )
    small = scales < limits.smallest_normal
    if not bool(small.any()):
        return codes, scales
    step = limits.smallest_normal * limits.eps  # spacing of subnormals; rounded up, so that no code is clipped
    raised = torch.where(small, (scales.float() / step).ceil().clamp(min=1) * step, scales.float())
    return weight.format.encode(weight.format.decode(codes, scales.float()), scales=raised)


def _copy_(_func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between dense and quantized tensors; codes are copied unchanged between equal formats."""
    if not isinstance(target, QuantizedWeight):
        return target.copy_(_dense(source), non_blocking)
    if isinstance(source, QuantizedWeight) and (source.format, source.transposed) == (target.format, target.transposed):
        target.codes.copy_(source.codes, non_blocking)
        target.scales.copy_(source.scales, non_blocking)
        return target
    values = _dense(source).expand(target.shape)
    codes, scales = target.format.encode((values.t() if target.transposed else values).to(target.dtype))
    target.codes.copy_(codes, non_blocking)
    target.scales.copy_(scales, non_blocking)
    return target


def _zero_(_func: Any, weight: QuantizedWeight) -> Tensor:
    """Not by multiplication: uninitialized memory may contain scales that are not finite."""
    return _copy_(None, weight, torch.zeros((), dtype=weight.dtype, device=weight.device))


def _each_part(func: Any, weight: QuantizedWeight, *_args: Any, **settings: Any) -> QuantizedWeight:
    """clone, detach, alias, empty_like: applied to codes and scales."""
    settings.pop("memory_format", None)
    dtype = settings.pop("dtype", None)
    result = _map_parts(weight, lambda part: func(part, **settings))
    return result if dtype in (None, result.dtype) else _to_copy(None, result, dtype=dtype)


def _dense_like(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> Tensor:
    """zeros_like and similar, such as for optimizer state: dense tensors."""
    settings = {"dtype": weight.dtype, "device": weight.device} | {k: v for k, v in settings.items() if v is not None}
    settings.pop("memory_format", None)
    stand_in = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return cast(Tensor, func(stand_in, *args, **settings))


def _equal(_func: Any, one: Tensor, other: Tensor) -> bool:
    if isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight) and one.format == other.format:
        same = torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
        return same and one.transposed == other.transposed and torch.equal(one.scales, other.scales)
    return torch.equal(_dense(one), _dense(other))


# Views


def _transpose(_func: Any, weight: QuantizedWeight, *dims: int) -> QuantizedWeight:
    if len({dim % 2 for dim in dims}) == 1:
        return _map_parts(weight, lambda part: part)
    return QuantizedWeight(weight.codes, weight.scales, weight.format, not weight.transposed)


def _view(func: Any, weight: QuantizedWeight, shape: Sequence[int]) -> QuantizedWeight:
    result = torch.empty(weight.shape, device="meta").reshape(shape).shape
    if result != weight.shape:
        raise PrecisionError(
            f"{func} of a quantized weight: expected the same shape {tuple(weight.shape)}, got {tuple(result)}: call "
            "dequantize() first"
        )
    return _map_parts(weight, lambda part: part)


def _slice(
    func: Any, weight: QuantizedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedWeight:
    complete = (start or 0) == 0 and (end is None or end >= weight.shape[dim]) and step == 1
    if dim % 2 != int(weight.transposed) and not complete:
        raise PrecisionError(f"{func} of a quantized weight (one scale per row) is only supported along dimension 0")
    return _map_parts(weight, lambda part: part if complete else func(part, 0, start, end, step))


def _split(func: Any, weight: QuantizedWeight, sizes: Any, dim: int = 0) -> list[QuantizedWeight]:
    if dim % 2 != int(weight.transposed):
        raise PrecisionError(f"{func} of a quantized weight (one scale per row) is only supported along dimension 0")
    pieces = zip(func(weight.codes, sizes), func(weight.scales, sizes), strict=True)
    return [QuantizedWeight(codes, scales, weight.format, weight.transposed) for codes, scales in pieces]


def _collective(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> QuantizedWeight:
    """Collectives over rows, on codes and scales; fp8 as bytes."""

    def run(part: Tensor) -> Tensor:
        sent = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
        return cast(Tensor, func(sent, *args, **settings)).view(part.dtype)

    return _map_parts(weight, run)


# In-place updates


def _update_(func: Any, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
    """In-place arithmetic on dense values, followed by stochastic rounding."""
    if not isinstance(weight, QuantizedWeight):
        return cast(Tensor, func(weight, *(_dense(arg) for arg in args), **settings))
    values = func(weight.dequantize().float(), *(_dense(arg) for arg in args), **settings)
    return weight.stochastic_copy_(values)


def _module_load(self: Tensor, other: Tensor, assign: bool = False) -> Tensor:
    """`load_state_dict` with swapping: the weight keeps its format regardless of what is loaded."""
    if not isinstance(self, QuantizedWeight):
        return _dense(other).detach() if assign else self.copy_(other).detach()
    if not assign:
        return self.copy_(other).detach()
    if isinstance(other, QuantizedWeight) and (other.format, other.transposed) == (self.format, self.transposed):
        return other.detach()
    return self.quantize_like(_dense(other))


for _operations, _handler in (
    ((ATEN.linear.default,), lambda _func, *args, **kwargs: _linear(*args, **kwargs)),
    ((ATEN.mm.default,), _mm),
    ((ATEN.mm.out,), lambda func, left, right, *, out: out.copy_(_mm(func, left, right))),
    ((ATEN.addmm.default,), _addmm),
    ((ATEN.embedding.default,), _embedding),
    ((ATEN._to_copy.default,), _to_copy),
    ((ATEN.copy_.default,), _copy_),
    ((ATEN.detach.default, ATEN.clone.default, ATEN.alias.default, ATEN.empty_like.default), _each_part),
    ((ATEN.contiguous.default, ATEN.pin_memory.default, ATEN._pin_memory.default), _each_part),
    ((ATEN.zeros_like.default, ATEN.ones_like.default, ATEN.full_like.default), _dense_like),
    ((ATEN.rand_like.default, ATEN.randn_like.default), _dense_like),
    ((ATEN.new_empty.default, ATEN.new_zeros.default, ATEN.new_ones.default, ATEN.new_full.default), _dense_like),
    ((ATEN.equal.default,), _equal),
    ((ATEN.t.default, ATEN.transpose.int), lambda f, w, *dims: _transpose(f, w, *(dims or (0, 1)))),
    ((ATEN.permute.default,), lambda f, w, dims: _transpose(f, w, 0, dims[0])),
    ((ATEN.view.default, ATEN._unsafe_view.default, ATEN.reshape.default), _view),
    ((ATEN.slice.Tensor,), _slice),
    ((ATEN.split.Tensor, ATEN.split_with_sizes.default), _split),
    ((ATEN.add_.Tensor, ATEN.sub_.Tensor, ATEN.mul_.Tensor, ATEN.div_.Tensor), _update_),
    ((ATEN.zero_.default,), _zero_),
    ((ATEN.addcdiv_.default, ATEN.addcmul_.default, ATEN.lerp_.Scalar, ATEN.addmm_.default), _update_),
):
    OPERATIONS.update(dict.fromkeys(_operations, _handler))
