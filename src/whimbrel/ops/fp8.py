"""Matmuls in fp8 with delayed scaling: scales, casts, and the references of the Triton kernels that cast.

An fp8 tensor has one scale, which maps its largest magnitude (amax) close to the largest number of the format. To know
amax before a cast, the tensor would have to be read twice. With delayed scaling, the kernel that computes a tensor also
casts it, with a scale from the amax of the last casts, and records the amax for the next ones. Values that exceed the
range saturate.

Activations and weights are e4m3 (4 bits of exponent, 3 of mantissa), gradients e5m2. Tensor cores multiply fp8 only
along the contiguous dimension of both operands, so a weight gradient needs transposed copies of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from whimbrel.base.errors import CheckpointError

__all__ = ["ALIGNMENT", "E4M3", "E5M2", "DelayedScaling", "Fp8", "cast_weights", "fp8_kernels", "fp8_linear"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16
"""All dimensions of fp8 matmuls on a GPU are multiples of this."""
EXPONENTS = {E4M3: 8, E5M2: 13}
"""The scaled amax is below two to this power: 256 of at most 448, 8192 of at most 57344. So values up to 1.75 and 7
times as large as those of the last casts do not saturate. The range of e5m2 leaves more room than that of e4m3."""
HISTORY = 16
"""Casts whose amax the scale of the next one depends on. The first so many casts are scaled by their own amax."""
AMAX_LANES = 32
"""The programs of a kernel record amax in this many places, since atomic operations on one are slow."""


class Fp8(NamedTuple):
    """A tensor in fp8: `codes * inverse_scale`."""

    codes: Tensor
    inverse_scale: Tensor
    """A 0-d fp32 tensor; on a GPU, its address is a multiple of 16 bytes."""


Cast = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""A kernel that casts to fp8: (0-d scale, places (AMAX_LANES,) to record amax) -> its results."""


class DelayedScaling:
    """The scales of the tensors of a model that are cast to fp8 in every micro-batch, numbered from 0.

    `advance` starts a micro-batch. The state is part of checkpoints, since the scales of a resumed run depend on it.
    """

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        self._dtypes = tuple(dtypes)
        self.reset()

    def reset(self) -> None:
        """Forget all casts."""
        count = len(self._dtypes)
        self.micro_batches = 0
        self._exponents = torch.tensor([EXPONENTS[dtype] for dtype in self._dtypes], dtype=torch.int32)
        self._history = torch.zeros(HISTORY, count)
        self._amax = torch.zeros(count, AMAX_LANES)

    @property
    def uses_current_scales(self) -> bool:
        """Whether tensors are cast twice, the second time by their own amax, because the history is too short."""
        return self.micro_batches <= HISTORY

    @torch.no_grad()
    def advance(self, device: torch.device) -> None:
        """Start a micro-batch: add the amax of the last casts to the history, and compute the scales of the next."""
        if self._amax.device != device:
            self._exponents, self._history, self._amax = (
                x.to(device) for x in (self._exponents, self._history, self._amax)
            )
        amax = self._amax.amax(1)
        # Zero: not cast, or a tensor of zeros. Not finite: the step fails or is skipped, but later ones need a scale.
        is_recorded = (amax > 0) & amax.isfinite()
        shifted = torch.cat((amax[None], self._history[:-1]))
        self._history = torch.where(is_recorded, shifted, self._history)
        scales, inverse_scales = power_of_two_scales(self._history.amax(0), self._exponents)
        self._scales, self._inverse_scales = _unbind_aligned(scales), _unbind_aligned(inverse_scales)
        self._amax = torch.zeros_like(self._amax)
        self._lanes = self._amax.unbind()
        self.micro_batches += 1

    def cast(self, index: int, kernel: Cast) -> tuple[tuple[Tensor, ...], Tensor]:
        """The results of a kernel that casts the tensor with this number, and the inverse of the scale."""
        lanes = self._lanes[index]
        scale, inverse_scale = self._scales[index], self._inverse_scales[index]
        if self.uses_current_scales:
            kernel(scale, lanes)
            scale, inverse_scale = power_of_two_scales(lanes.amax(), self._exponents[index])
        return kernel(scale, lanes), inverse_scale

    def state_dict(self) -> dict[str, Any]:
        """The history, and the amax that has been recorded since."""
        return {"micro_batches": self.micro_batches, "history": self._history.clone(), "amax": self._amax.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; raises for a state of other tensors."""
        history, amax = state["history"], state["amax"]
        expected = (self._history.shape, self._amax.shape)
        if (history.shape, amax.shape) != expected:
            raise CheckpointError(
                f"fp8 scales: expected the history of {len(self._dtypes)} tensors, got shapes {tuple(history.shape)} "
                f"and {tuple(amax.shape)}: pass the same model, or --resume.skip='[\"fp8_scales\"]'"
            )
        device = self._amax.device
        self.micro_batches = int(state["micro_batches"])
        self._history, self._amax = history.to(device, copy=True), amax.to(device, copy=True)


def power_of_two_scales(amax: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Scales that map amax below two to the power of `exponents`, and their inverses; 1 for an amax that has no scale.

    Multiplication by a power of two is exact, so a different scale changes only which values are subnormal or saturate.
    """
    _, amax_exponent = torch.frexp(amax)
    has_scale = (amax > 0) & amax.isfinite()
    shift = torch.where(has_scale, exponents - amax_exponent, 0).clamp(-126, 126).int()
    scale, inverse = (((sign * shift + 127) << 23).view(torch.float32) for sign in (1, -1))
    return scale, inverse


def _unbind_aligned(scales: Tensor) -> tuple[Tensor, ...]:
    """The elements as 0-d tensors whose addresses are multiples of 16 bytes, as cuBLASLt requires for scales."""
    return F.pad(scales[:, None], (0, 3))[:, 0].unbind()


@torch.no_grad()
def cast_weights(weights: Sequence[Tensor]) -> list[tuple[Fp8, Fp8]]:
    """Each weight (rows, columns) in e4m3, scaled by its own amax, as is and transposed.

    Reading them takes 0.3% of a micro-batch, so they are cast in each. A cache would have to know about all updates,
    also those that do not change the version of a tensor: of Triton kernels, through `data`, from a checkpoint.
    """
    amax = torch.stack([x.float() for x in torch._foreach_norm(list(weights), torch.inf)])
    exponents = torch.full_like(amax, EXPONENTS[E4M3], dtype=torch.int32)
    scales, inverse_scales = power_of_two_scales(amax, exponents)
    cast = []
    for weight, scale, inverse_scale in zip(
        weights, _unbind_aligned(scales), _unbind_aligned(inverse_scales), strict=True
    ):
        codes, transposed = fp8_kernels(weight).cast(weight, E4M3, scale, None)
        cast.append((Fp8(codes, inverse_scale), Fp8(transposed, inverse_scale)))
    return cast


def fp8_linear(
    x: Fp8, weight: Fp8, bias: Tensor | None = None, *, dtype: torch.dtype, fast_accumulation: bool = False
) -> Tensor:
    """`x @ weight.T + bias` for x (M, K) and weight (N, K), in `dtype`.

    `fast_accumulation` accumulates in the tensor cores, with fewer bits; otherwise partial sums are added in fp32. It
    is for sums over the width of a model, not over a batch.
    """
    if x.codes.is_cuda:
        return torch._scaled_mm(
            x.codes, weight.codes.t(), scale_a=x.inverse_scale, scale_b=weight.inverse_scale, bias=bias,
            out_dtype=dtype, use_fast_accum=fast_accumulation,
        )  # fmt: skip
    with torch.autocast(x.codes.device.type, enabled=False):
        product = (x.codes.float() @ weight.codes.float().T) * x.inverse_scale * weight.inverse_scale
    return (product if bias is None else product + bias.float()).to(dtype)


def fp8_kernels(x: Tensor) -> Any:
    """The Triton kernels on a GPU, otherwise the references below, with the same names and arguments."""
    if not x.is_cuda:
        return _Reference
    from whimbrel.ops import fp8_triton

    return fp8_triton


class _Reference:
    """What the kernels of `fp8_triton` compute, in torch."""

    @staticmethod
    def cast(x: Tensor, dtype: torch.dtype, scale: Tensor, lanes: Tensor | None) -> tuple[Tensor, Tensor]:
        """A matrix in fp8, as is and transposed."""
        codes = _encode(x, dtype, scale, lanes)
        return codes, _transpose(codes)

    @staticmethod
    def transpose(codes: Tensor) -> Tensor:
        return _transpose(codes)

    @staticmethod
    def add_norm(
        x: Tensor, y: Tensor, y_bias: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: Tensor, lanes: Tensor
    ) -> tuple[Tensor, ...]:
        """The norm (rows, width) in fp8; `x + y + y_bias`, and mean and 1 / standard deviation of each row."""
        total = (x + y + y_bias).to(x.dtype)
        wide = torch.promote_types(x.dtype, weight.dtype)
        normed, mean, rstd = torch.native_layer_norm(total.to(wide), (x.shape[-1],), weight, bias, eps)
        return _encode(normed.flatten(0, -2), E4M3, scale, lanes), total, mean.flatten(), rstd.flatten()

    @staticmethod
    def gelu(a: Tensor, *, tanh: bool, scale: Tensor, lanes: Tensor) -> tuple[Tensor, Tensor]:
        """GELU of a matrix in fp8, as is and transposed."""
        codes = _encode(F.gelu(a.float(), approximate="tanh" if tanh else "none"), E4M3, scale, lanes)
        return codes, _transpose(codes)

    @staticmethod
    def gelu_backward(
        dg: Tensor, a: Tensor, *, tanh: bool, scale: Tensor, lanes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the input of GELU in fp8, as is and transposed, and its column sums."""
        da = torch.ops.aten.gelu_backward(dg.float(), a.float(), approximate="tanh" if tanh else "none")
        codes = _encode(da, E5M2, scale, lanes)
        return codes, _transpose(codes), da.sum(0)

    @staticmethod
    def row_losses(
        logits: Tensor, targets: Tensor, vocab_size: int, softcap: float | None, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        """The loss of each row, 0 if its target is ignored, and the logarithm of the sum of exponentials."""
        z = _capped(logits, softcap)[:, :vocab_size]
        lse, valid = torch.logsumexp(z, dim=1), targets != ignore_index
        target_z = z.gather(1, torch.where(valid, targets, 0)[:, None]).squeeze(1)
        return torch.where(valid, lse - target_z, 0.0), lse

    @staticmethod
    def logits_gradient(
        logits: Tensor, targets: Tensor, lse: Tensor, vocab_size: int, softcap: float | None, ignore_index: int,
        scale: float, transposed: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of the summed loss in e5m2; its transpose is written to `transposed` (vocabulary, rows)."""
        z = _capped(logits, softcap)
        p, valid = (z - lse[:, None]).exp_(), targets != ignore_index
        p.scatter_add_(1, torch.where(valid, targets, 0)[:, None], -torch.ones_like(p[:, :1]))
        if softcap is not None:
            p *= 1 - (z / softcap).square_()
        p[:, vocab_size:] = 0
        codes = _encode(p * valid[:, None], E5M2, torch.tensor(scale), None)
        transposed.view(torch.uint8).copy_(codes.view(torch.uint8).t())
        return codes


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    z = logits.float()
    return z.clone() if softcap is None else softcap * torch.tanh(z / softcap)


def _encode(x: Tensor, dtype: torch.dtype, scale: Tensor, lanes: Tensor | None) -> Tensor:
    """Saturate and round to fp8; NaN stays NaN."""
    x = x.float()
    if lanes is not None and x.numel():
        lanes[0] = torch.maximum(lanes[0], x.abs().amax())
    limit = torch.finfo(dtype).max
    return (x * scale).clamp(-limit, limit).to(dtype)


def _transpose(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)
