"""A weight matrix that is stored as codes and scales, and is a tensor to everything around it.

It has the shape of the weight and, as its dtype, that of the numbers it stands for: products, conversions, copies,
slices of rows and optimizers' steps work on it as on a plain one. What is not in its table of operations is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from whimbrel.base.errors import PrecisionError
from whimbrel.precision import product
from whimbrel.precision.formats import WeightFormat, weight_format

__all__ = ["QuantizedWeight"]

ATEN = torch.ops.aten
Handler = Callable[..., Any]
GATHERS = [
    name for name in ("all_gather_into_tensor", "wait_tensor", "_wrap_tensor_autograd")
    if hasattr(torch.ops._c10d_functional, name)
]  # fmt: skip
"""What gathers rows from other ranks goes through; which of them there are depends on torch."""
OPERATIONS: dict[Any, Handler] = {}
"""What can be done with a quantised weight, by torch's name for it; a handler gets its arguments as they came."""


class QuantizedWeight(Tensor):
    """Codes, scales and their format. `turned` is its transpose, over the same codes."""

    codes: Tensor
    scales: Tensor
    format: WeightFormat
    turned: bool
    frozen: bool = False
    """Whether it was frozen before it was quantised."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, form: WeightFormat, turned: bool = False) -> QuantizedWeight:
        rows, columns = form.shape_of(codes)
        return torch.Tensor._make_wrapper_subclass(
            cls, (columns, rows) if turned else (rows, columns), strides=(1, columns) if turned else (columns, 1),
            dtype=scales.dtype, device=codes.device,
        )  # fmt: skip

    def __init__(self, codes: Tensor, scales: Tensor, form: WeightFormat, turned: bool = False) -> None:
        _check(codes, scales, form)
        self.codes, self.scales, self.format, self.turned = codes, scales, form, turned

    @classmethod
    @torch.no_grad()
    def quantize(cls, weight: Tensor, form: str | WeightFormat) -> QuantizedWeight:
        """The nearest codes of a plain matrix; scales, and what it looks like, have its dtype."""
        form = weight_format(form).fitted(weight.shape)
        if (reason := form.unfit(weight.shape)) is not None:
            raise PrecisionError(f"a weight of shape {tuple(weight.shape)} cannot be {form.name}: {reason}")
        if not weight.is_floating_point():
            raise PrecisionError(f"a weight of {weight.dtype} cannot be {form.name}: convert it to a float dtype first")
        return cls(*form.encode(weight.detach()), form)

    def dequantize(self) -> Tensor:
        """The plain matrix."""
        weight = self.format.decode(self.codes, self.scales)
        return weight.t() if self.turned else weight

    @torch.no_grad()
    def store_(self, numbers: Tensor, generator: torch.Generator | None = None) -> QuantizedWeight:
        """Take on other numbers, integers rounded up or down by chance: small changes add up over many steps."""
        if self.turned:
            numbers = numbers.t()
        noise = torch.rand(numbers.shape, device=numbers.device, generator=generator)
        codes, scales = self.format.encode(
            numbers, scales=self.format.codec.update_scales(self.scales, numbers), noise=noise
        )
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        return self

    def alike(self, numbers: Tensor) -> QuantizedWeight:
        """A plain matrix of this shape in the same format, and turned as this is."""
        if not self.turned:
            return type(self).quantize(numbers, self.format)
        return type(self)(*self.format.encode(numbers.t()), self.format, turned=True)

    def share_memory_(self) -> QuantizedWeight:
        """Let other processes see both parts."""
        self.codes.share_memory_()
        self.scales.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether they do."""
        return bool(self.codes.is_shared() and self.scales.is_shared())

    @property
    def data(self) -> Tensor:
        """The same codes, outside of any graph."""
        return self.detach()

    @data.setter
    def data(self, _other: Tensor) -> None:
        raise PrecisionError(
            f"the data of a weight of {self.format.name} codes cannot be set, as torch would leave the codes: copy_ "
            "into it, or swap it (torch.utils.swap_tensors)"
        )

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """What it takes, which is less than its dtype says."""
        return self.codes.nbytes + self.scales.nbytes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """In one line, without the numbers."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        shape, dtype = tuple(self.shape), str(self.dtype).removeprefix("torch.")
        return f"QuantizedWeight({self.format.name}, shape={shape}, dtype={dtype}, device='{self.device}'{grad})"

    # What torch.compile, torch.save and copies take it apart with

    def __tensor_flatten__(self) -> tuple[list[str], tuple[WeightFormat, bool]]:
        return ["codes", "scales"], (self.format, self.turned)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[WeightFormat, bool], size: Any, stride: Any
    ) -> QuantizedWeight:
        return cls(inner["codes"], inner["scales"], *context)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code hangs on, the same in every process."""
        lies = (tuple(self.shape), self.dtype, self.device.type, self.requires_grad)
        return repr((self.format, self.turned, *lies, self.codes.stride(), self.scales.stride()))

    # How torch reaches it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Linear layers, and loading into or from modules, are ours; all else goes on to the table of operations."""
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is Tensor.module_load:
            return _module_load(*args, **kwargs)
        if func is Tensor.storage:  # what safetensors asks for, after untyped_storage has failed
            raise PrecisionError(
                f"a weight of {args[0].format.name} codes has no storage of its own and safetensors cannot hold it: "
                "save a GPT with whimbrel.save_model, save weight.codes and weight.scales, or dequantize_ the model"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """One operation of the table, or one that consists of such, as inference mode hands them over."""
        handler: Handler = OPERATIONS.get(func, _composed)
        settings = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if torch.is_inference_mode_enabled() and not any(tensor.is_inference() for tensor in tensors):
            # it did not make them, so that views of them are none of its tensors either
            with torch.inference_mode(mode=False), torch.no_grad():
                return handler(func, *args, **settings)
        return handler(func, *args, **settings)


torch.serialization.add_safe_globals([QuantizedWeight, WeightFormat])


def _check(codes: Tensor, scales: Tensor, form: WeightFormat) -> None:
    """Codes of another dtype, or scales that are not one for each group, would be read as other numbers."""
    if codes.dtype != form.dtype or codes.ndim != 2:
        raise PrecisionError(f"{form.name} has codes of {form.dtype} in a matrix, not {codes.dtype} of {codes.ndim}-D")
    wanted = form.parts(form.shape_of(codes))[1]
    if tuple(scales.shape) != wanted or not scales.is_floating_point():
        raise PrecisionError(
            f"{form.name} has one scale for each of {wanted} groups here, not {scales.dtype} of {tuple(scales.shape)}"
        )


def _composed(func: Any, *args: Any, **settings: Any) -> Any:
    """What an operation outside of the table consists of, or no."""
    made = func.decompose(*args, **settings)
    if made is NotImplemented:
        raise PrecisionError(f"{func} is not among the operations of a quantised weight: call its dequantize() first")
    return made


def _plain(x: Any) -> Any:
    return x.dequantize() if isinstance(x, QuantizedWeight) else x


def _like(weight: QuantizedWeight, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
    """The same done to codes and to scales."""
    return QuantizedWeight(change(weight.codes), change(weight.scales), weight.format, weight.turned)


# Products


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, QuantizedWeight) or weight.turned or isinstance(x, QuantizedWeight):
        y = x @ weight.t()  # by the table, above which torch keeps account of gradients
        return y if bias is None else y + bias.to(y.dtype)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return cast(Tensor, _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]
    return product.linear(x, weight.codes, weight.scales, weight.format, bias)


class _Linear(torch.autograd.Function):
    """Gradients as if what was rounded were not: the weight's is plain, for an optimizer that rounds by chance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        # Not the weight itself: a tensor that a graph holds on to cannot be swapped when its module is converted.
        ctx.save_for_backward(x if weight.requires_grad else None, weight.codes, weight.scales)
        ctx.format = weight.format
        return product.linear(x, weight.codes, weight.scales, weight.format, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, codes, scales = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = product.transposed(grad_y, codes, scales, ctx.format) if for_x else None
        grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).to(scales.dtype) if for_weight else None
        return grad_x, grad_weight, rows.sum(dim=0) if for_bias else None


def _mm(_func: Any, left: Tensor, right: Tensor) -> Tensor:
    if isinstance(right, QuantizedWeight) and right.turned and not isinstance(left, QuantizedWeight):
        return product.linear(left, right.codes, right.scales, right.format, None)
    return torch.mm(_plain(left), _plain(right))


def _mm_out(_func: Any, left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(_mm(None, left, right))


def _addmm(_func: Any, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return bias * beta + _mm(None, left, right) * alpha


def _embedding(_func: Any, weight: QuantizedWeight, indices: Tensor, *_settings: Any) -> Tensor:
    """The numbers of some rows; padding_idx and the like say something of gradients alone."""
    if weight.turned:
        raise PrecisionError("the transpose of a quantised weight cannot be looked up by rows: transpose it back first")
    codes = weight.codes.view(torch.uint8)[indices].view(weight.codes.dtype)  # of fp8 no rows can be taken
    return weight.format.decode(codes, weight.scales[indices])


def _linear_operation(_func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _linear(x, weight, bias)


# Conversions and copies


def _to_copy(_func: Any, weight: QuantizedWeight, **changes: Any) -> QuantizedWeight:
    """Move codes and scales; another dtype is that of the scales."""
    dtype = changes.pop("dtype", None) or weight.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise PrecisionError(
            f"a weight of {weight.format.name} codes cannot become {dtype}: convert to a float dtype, or call its "
            "dequantize() first"
        )
    changes.pop("memory_format", None)
    codes, scales = _fit_scales(weight, dtype)
    codes, scales = ATEN._to_copy(codes, **changes), ATEN._to_copy(scales, dtype=dtype, **changes)
    return QuantizedWeight(codes, scales, weight.format, weight.turned)


def _fit_scales(weight: QuantizedWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales for a dtype of a smaller range: groups whose scale would vanish there are rounded again.

    All other codes stay as they are. A scale that is too large is refused.
    """
    codes, scales, limits = weight.codes, weight.scales, torch.finfo(dtype)
    narrower = limits.smallest_normal > torch.finfo(scales.dtype).smallest_normal
    if not narrower or scales.device.type == "meta" or torch.compiler.is_compiling():
        return codes, scales
    if bool((scales > limits.max).any()):
        raise PrecisionError(
            f"the scales of a weight of {weight.format.name} codes exceed the range of {dtype}: use torch.bfloat16"
        )
    small = scales < limits.smallest_normal
    if not bool(small.any()):
        return codes, scales
    step = limits.smallest_normal * limits.eps  # of subnormal numbers; rounded up, so that no code is cut off
    raised = torch.where(small, (scales.float() / step).ceil().clamp(min=1) * step, scales.float())
    return weight.format.encode(weight.format.decode(codes, scales.float()), scales=raised)


def _copy_(_func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Numbers from one to the other; codes as they are where both have the same format."""
    if not isinstance(target, QuantizedWeight):
        return target.copy_(_plain(source), non_blocking)
    if isinstance(source, QuantizedWeight) and (source.format, source.turned) == (target.format, target.turned):
        target.codes.copy_(source.codes, non_blocking)
        target.scales.copy_(source.scales, non_blocking)
        return target
    numbers = _plain(source).expand(target.shape)
    codes, scales = target.format.encode((numbers.t() if target.turned else numbers).to(target.dtype))
    target.codes.copy_(codes, non_blocking)
    target.scales.copy_(scales, non_blocking)
    return target


def _zero_(_func: Any, weight: QuantizedWeight) -> Tensor:
    """Zero, whatever the numbers were: memory that was never written may hold scales that are not finite."""
    return _copy_(None, weight, torch.zeros((), dtype=weight.dtype, device=weight.device))


def _same(func: Any, weight: QuantizedWeight, *_args: Any, **settings: Any) -> QuantizedWeight:
    """Clone, detach, alias, empty_like: of both parts, as each lies."""
    settings.pop("memory_format", None)
    dtype = settings.pop("dtype", None)
    made = _like(weight, lambda part: func(part, **settings))
    return made if dtype in (None, made.dtype) else _to_copy(None, made, dtype=dtype)


def _plain_like(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> Tensor:
    """Zeros and the like of its shape, such as the state of an optimizer: plain tensors."""
    settings = {"dtype": weight.dtype, "device": weight.device} | {k: v for k, v in settings.items() if v is not None}
    settings.pop("memory_format", None)
    stand_in = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return cast(Tensor, func(stand_in, *args, **settings))


def _equal(_func: Any, one: Tensor, other: Tensor) -> bool:
    if isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight) and one.format == other.format:
        same = torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
        return same and one.turned == other.turned and torch.equal(one.scales, other.scales)
    return torch.equal(_plain(one), _plain(other))


# Views


def _turn(_func: Any, weight: QuantizedWeight, *dims: int) -> QuantizedWeight:
    if len({dim % 2 for dim in dims}) == 1:
        return _like(weight, lambda part: part)
    return QuantizedWeight(weight.codes, weight.scales, weight.format, not weight.turned)


def _view(func: Any, weight: QuantizedWeight, shape: Sequence[int]) -> QuantizedWeight:
    wanted = torch.empty(weight.shape, device="meta").reshape(shape).shape
    if wanted != weight.shape:
        raise PrecisionError(
            f"{func} of {tuple(weight.shape)} as {tuple(wanted)} would tear codes from their scales: call dequantize() "
            "of the quantised weight first"
        )
    return _like(weight, lambda part: part)


def _slice(
    func: Any, weight: QuantizedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedWeight:
    whole = (start or 0) == 0 and (end is None or end >= weight.shape[dim]) and step == 1
    if dim % 2 != int(weight.turned) and not whole:
        raise PrecisionError(f"{func} cuts the rows of a quantised weight, whose scales are by row: slice dimension 0")
    return _like(weight, lambda part: part if whole else func(part, 0, start, end, step))


def _split(func: Any, weight: QuantizedWeight, sizes: Any, dim: int = 0) -> list[QuantizedWeight]:
    if dim % 2 != int(weight.turned):
        raise PrecisionError(f"{func} cuts the rows of a quantised weight, whose scales are by row: split dimension 0")
    pieces = zip(func(weight.codes, sizes), func(weight.scales, sizes), strict=True)
    return [QuantizedWeight(codes, scales, weight.format, weight.turned) for codes, scales in pieces]


def _by_part(func: Any, weight: QuantizedWeight, *args: Any, **settings: Any) -> QuantizedWeight:
    """What is done alike to rows of codes and rows of scales: gathering them from other ranks, fp8 as bytes."""

    def change(part: Tensor) -> Tensor:
        carried = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
        return cast(Tensor, func(carried, *args, **settings)).view(part.dtype)

    return _like(weight, change)


# Steps


def _step_(func: Any, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
    """In-place arithmetic: on plain numbers, which are then rounded by chance."""
    if not isinstance(weight, QuantizedWeight):
        return cast(Tensor, func(weight, *(_plain(arg) for arg in args), **settings))
    moved = func(weight.dequantize().float(), *(_plain(arg) for arg in args), **settings)
    return weight.store_(moved)


def _module_load(self: Tensor, other: Tensor, assign: bool = False) -> Tensor:
    """`load_state_dict` with swapping: the module's own kind of weight stays, whatever the kind that arrives."""
    if not isinstance(self, QuantizedWeight):
        return _plain(other).detach() if assign else self.copy_(other).detach()
    if not assign:
        return self.copy_(other).detach()
    if isinstance(other, QuantizedWeight) and (other.format, other.turned) == (self.format, self.turned):
        return other.detach()
    return self.alike(_plain(other))


for _operations, _handler in (
    ((ATEN.linear.default,), _linear_operation),
    ((ATEN.mm.default,), _mm),
    ((ATEN.mm.out,), _mm_out),
    ((ATEN.addmm.default,), _addmm),
    ((ATEN.embedding.default,), _embedding),
    ((ATEN._to_copy.default,), _to_copy),
    ((ATEN.copy_.default,), _copy_),
    ((ATEN.detach.default, ATEN.clone.default, ATEN.alias.default, ATEN.empty_like.default), _same),
    ((ATEN.contiguous.default, ATEN.pin_memory.default, ATEN._pin_memory.default), _same),
    ((ATEN.zeros_like.default, ATEN.ones_like.default, ATEN.full_like.default), _plain_like),
    ((ATEN.rand_like.default, ATEN.randn_like.default), _plain_like),
    ((ATEN.new_empty.default, ATEN.new_zeros.default, ATEN.new_ones.default, ATEN.new_full.default), _plain_like),
    ((ATEN.equal.default,), _equal),
    ((ATEN.t.default, ATEN.transpose.int), lambda f, w, *dims: _turn(f, w, *(dims or (0, 1)))),
    ((ATEN.permute.default,), lambda f, w, dims: _turn(f, w, 0, dims[0])),
    ((ATEN.view.default, ATEN._unsafe_view.default, ATEN.reshape.default), _view),
    ((ATEN.slice.Tensor,), _slice),
    ((ATEN.split.Tensor, ATEN.split_with_sizes.default), _split),
    ((ATEN.add_.Tensor, ATEN.sub_.Tensor, ATEN.mul_.Tensor, ATEN.div_.Tensor), _step_),
    ((ATEN.zero_.default,), _zero_),
    ((ATEN.addcdiv_.default, ATEN.addcmul_.default, ATEN.lerp_.Scalar, ATEN.addmm_.default), _step_),
    ([getattr(torch.ops._c10d_functional, name).default for name in GATHERS], _by_part),
):
    OPERATIONS.update(dict.fromkeys(_operations, _handler))
