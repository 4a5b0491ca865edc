"""DiLoCo: workers train independently for many steps, then average how far they moved.

Every `sync_every` steps, the difference between the parameters at the last synchronization and now is averaged over
the workers and applied by an outer optimizer, SGD with Nesterov momentum (Douillard et al., 2023). Nothing is sent in
between, so replicas can be connected by a slow network. With `fragments` > 1, parts of the model are synchronized at
different steps, which lowers the peak traffic (Streaming DiLoCo, Douillard et al., 2025). With int8, a delta is
exchanged as one byte per value and one scale per 256 values; what rounding drops is added to the next delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whimbrel.distributed.layout import ParallelConfig

__all__ = ["DiLoCo"]

BLOCK = 256
"""Values per scale of an int8 delta."""


class DiLoCo:
    """The outer optimizer of this worker. All workers must start with equal parameters."""

    def __init__(self, parameters: Sequence[Tensor], config: ParallelConfig, group: dist.ProcessGroup | None) -> None:
        self.bytes_sent = 0
        """Payload of this worker's collectives so far."""
        self._parameters, self._config, self._group = list(parameters), config, group
        self._anchors = [p.detach().float().clone() for p in self._parameters]
        """Parameters after the last synchronization, equal on all workers."""
        self._momenta = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._residuals = [torch.zeros_like(anchor) for anchor in self._anchors if config.delta_dtype is not None]

    @torch.no_grad()
    def step(self, inner_step: int) -> None:
        """Synchronize the fragments that are due after inner step number `inner_step` (from 1)."""
        every, fragments = self._config.sync_every, min(self._config.fragments, len(self._parameters))
        for fragment in range(fragments):
            if (inner_step + fragment * every // fragments) % every == 0:
                self._synchronize(range(fragment, len(self._parameters), fragments))

    @torch.no_grad()
    def finish(self) -> None:
        """Synchronize everything, at the end of training."""
        self._synchronize(range(len(self._parameters)))

    def _synchronize(self, indices: Sequence[int]) -> None:
        deltas = [self._anchors[i] - self._parameters[i].detach() for i in indices]
        for i, delta in zip(indices, self._average(indices, deltas), strict=True):
            momentum, anchor = self._momenta[i], self._anchors[i]
            momentum.mul_(self._config.outer_momentum).add_(delta)
            anchor.sub_(delta.add(momentum, alpha=self._config.outer_momentum), alpha=self._config.outer_lr)
            self._parameters[i].copy_(anchor)

    def _average(self, indices: Sequence[int], deltas: list[Tensor]) -> list[Tensor]:
        """The mean of the deltas over all workers, bit-identical on each."""
        workers = dist.get_world_size(self._group)
        if self._config.delta_dtype is None:
            flat = torch.cat([delta.reshape(-1) for delta in deltas])
            dist.all_reduce(flat, group=self._group)
            self.bytes_sent += flat.nbytes
            mean = flat / workers
        else:
            flat = torch.cat(
                [(delta + self._residuals[i]).reshape(-1) for i, delta in zip(indices, deltas, strict=True)]
            )
            mean, sent = self._average_int8(flat, workers)
            for i, residual in zip(indices, (flat - sent).split([d.numel() for d in deltas]), strict=True):
                self._residuals[i].copy_(residual.view_as(self._residuals[i]))
        parts = mean.split([delta.numel() for delta in deltas])
        return [part.view_as(delta) for part, delta in zip(parts, deltas, strict=True)]

    def _average_int8(self, flat: Tensor, workers: int) -> tuple[Tensor, Tensor]:
        """The mean over workers, and the values this worker contributed to it, after quantization.

        As in a ring all-reduce, each worker averages one part and sends it to the others: two bytes per value in total.
        """
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % (BLOCK * workers)))
        codes, scales = quantize(padded)
        sent = dequantize(codes, scales)
        own = dequantize(self._exchange(codes), self._exchange(scales)).view(workers, -1).mean(0)
        codes, scales = quantize(own)
        mean = dequantize(self._gather(codes, workers), self._gather(scales, workers))
        return mean[: flat.numel()], sent[: flat.numel()]

    def _exchange(self, tensor: Tensor) -> Tensor:
        """Send part i to worker i; returns the parts that all workers sent to this one."""
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=self._group)
        self.bytes_sent += tensor.nbytes
        return received

    def _gather(self, tensor: Tensor, workers: int) -> Tensor:
        gathered = tensor.new_empty((workers * len(tensor), *tensor.shape[1:]))
        dist.all_gather_into_tensor(gathered, tensor, group=self._group)
        self.bytes_sent += tensor.nbytes
        return gathered

    def state_dict(self) -> dict[str, Any]:
        """Anchors and momenta, equal on all workers, and this worker's residuals."""
        return {"anchors": self._anchors, "momenta": self._momenta, "residuals": self._residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        for name, tensors in (("anchors", self._anchors), ("momenta", self._momenta), ("residuals", self._residuals)):
            for tensor, saved in zip(tensors, state[name], strict=True):
                tensor.copy_(saved)


def quantize(flat: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes (blocks, BLOCK) and fp32 scales (blocks, 1) of a tensor whose size is a multiple of BLOCK."""
    blocks = flat.view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return (blocks / scales).round_().to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The values of int8 codes, flattened."""
    return (codes.float() * scales).view(-1)
