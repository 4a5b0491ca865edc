"""DiLoCo: workers train independently for many steps, then average their parameter deltas.

Every `sync_every` steps, the difference between the parameters at the last synchronization and now is averaged over
the workers and applied by an outer optimizer, SGD with Nesterov momentum (Douillard et al., 2023). No gradient is sent
in between, so replicas can be connected by a slow network. With `fragments` > 1, parts of the model are synchronized
at different steps, which lowers the peak traffic (Streaming DiLoCo, Douillard et al., 2025).

Deltas can be compressed: `delta_dtype = "int8"` sends one byte per value and one scale per 256 values; `delta_rank`
sends the factors of a low-rank approximation of each matrix (PowerSGD, Vogels et al., 2019). What compression drops is
added to the next delta.

There are two sets of parameters: the outer parameters, which are the same on all workers and are evaluated and saved,
and the local parameters of each worker, which have diverged from them since the last synchronization.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.layout import ParallelConfig
from whimbrel.distributed.world import World
from whimbrel.ops.lowbit import BLOCK_SIZE, INT8, PowerCodec

__all__ = ["DiLoCo", "factor_shapes"]

CODEC = PowerCodec(INT8)
"""Of int8 deltas: evenly spaced levels, one scale per block."""
Tensors = dict[str, Tensor]


class DiLoCo:
    """The outer optimizer of this worker, for `total_steps` inner steps; all workers start with equal parameters."""

    def __init__(
        self, parameters: Mapping[str, Tensor], config: ParallelConfig, world: World, total_steps: int
    ) -> None:
        for name, parameter in parameters.items():
            if not parameter.dtype.is_floating_point or type(parameter.data) is not Tensor:
                raise ConfigError(f"parallel.strategy = diloco expects unquantized weights, got {name}: use ddp")
        self.bytes_sent = 0
        """Bytes that this worker sent in synchronizations so far, as in a ring."""
        self.worker_state, self.outer_state = WorkerState(self), OuterState(self)
        self._parameters, self._config, self._group = dict(parameters), config, world.dp_group
        self._workers, self._total_steps = world.dp_size, total_steps
        self._outer: Tensors = {}
        """Outer parameters, in fp32: those after the last synchronization."""
        self._is_loaded = False
        self._momenta = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        self._residuals: Tensors = {}
        self._bases: Tensors = {}
        if config.delta_dtype is not None or config.delta_rank is not None:
            self._residuals = {name: torch.zeros_like(momentum) for name, momentum in self._momenta.items()}
        for index, (name, parameter) in enumerate(parameters.items() if config.delta_rank is not None else ()):
            if (shapes := factor_shapes(parameter.shape, config.delta_rank)) is not None:
                generator = torch.Generator().manual_seed(index)  # equal on all workers
                self._bases[name] = torch.randn(shapes[1], generator=generator).to(parameter.device)

    def start(self) -> None:
        """Take the parameters as the outer ones, unless those were just loaded from a checkpoint."""
        if not self._is_loaded:
            self._outer = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        self._is_loaded = False

    @torch.no_grad()
    def step(self, inner_step: int) -> None:
        """Synchronize the fragments that are due after inner step number `inner_step` (from 1).

        The last step ends with the mean of all workers, without momentum: no later step would correct its overshoot.
        """
        names, every = list(self._parameters), self._config.sync_every
        if inner_step == self._total_steps:
            self._synchronize(names, lr=1.0, momentum=0.0)
            return
        fragments = min(self._config.fragments, len(names))
        for fragment in range(fragments):
            if (inner_step + fragment * every // fragments) % every == 0:
                self._synchronize(names[fragment::fragments], self._config.outer_lr, self._config.outer_momentum)

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Temporarily replace the local parameters with the outer ones, which must not be modified."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        self.worker_state.own = own
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._outer[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]
            self.worker_state.own = None

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the model with the outer parameters; no step may follow."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self._outer[name])

    def _synchronize(self, names: Sequence[str], lr: float, momentum: float) -> None:
        deltas = {name: self._outer[name] - self._parameters[name] for name in names}
        for name, residual in self._residuals.items():
            if name in deltas:
                deltas[name] += residual
        for name, delta in self._average(deltas).items():
            velocity, anchor = self._momenta[name], self._outer[name]
            velocity.mul_(momentum).add_(delta)
            anchor.sub_(delta.add(velocity, alpha=momentum), alpha=lr)
            self._parameters[name].copy_(anchor)

    def _average(self, deltas: Tensors) -> Tensors:
        """The mean of the deltas over all workers, bit-identical on each; sets the residuals."""
        if self._config.delta_rank is not None:
            return self._average_low_rank(deltas)
        flat = _flatten(deltas)
        if self._config.delta_dtype is None:
            return _unflatten(self._mean(flat), deltas)
        mean, sent = self._average_int8(flat)
        for name, residual in _unflatten(flat - sent, deltas).items():
            self._residuals[name].copy_(residual)
        return _unflatten(mean, deltas)

    def _average_int8(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over workers, and the values this worker contributed to it, after quantization.

        As in a ring all-reduce, each worker averages one part and sends it to the others: two bytes per value in total.
        """
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % (BLOCK_SIZE * self._workers)))
        stored = _quantize(padded)
        sent = _dequantize(stored)
        own = _dequantize([self._exchange(part) for part in stored]).view(self._workers, -1).mean(0)
        mean = _dequantize([self._gather(part) for part in _quantize(own)])
        return mean[: flat.numel()], sent[: flat.numel()]

    def _average_low_rank(self, deltas: Tensors) -> Tensors:
        """One power iteration from the last basis: the mean of P = D Q, orthonormalized, then the mean of Q = D^T P."""
        matrices = {name: delta.flatten(1) for name, delta in deltas.items() if name in self._bases}
        # Vectors and small matrices are sent complete, together with the first factors.
        factors = {name: delta for name, delta in deltas.items() if name not in matrices}
        factors |= {name: matrix @ self._bases[name] for name, matrix in matrices.items()}
        means = _unflatten(self._mean(_flatten(factors)), factors)
        if not matrices:
            return means
        left = {name: torch.linalg.qr(means[name]).Q for name in matrices}
        right = {name: matrix.T @ left[name] for name, matrix in matrices.items()}
        for name, matrix in matrices.items():
            self._residuals[name].copy_((matrix - left[name] @ right[name].T).view_as(deltas[name]))
        for name, basis in _unflatten(self._mean(_flatten(right)), right).items():
            self._bases[name].copy_(basis)
            means[name] = (left[name] @ basis.T).view_as(deltas[name])
        return means

    def _mean(self, flat: Tensor) -> Tensor:
        dist.all_reduce(flat, group=self._group)
        self.bytes_sent += 2 * (self._workers - 1) * flat.nbytes // self._workers
        return flat / self._workers

    def _exchange(self, tensor: Tensor) -> Tensor:
        """Send part i to worker i; returns the parts that all workers sent to this one."""
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=self._group)
        self.bytes_sent += (self._workers - 1) * tensor.nbytes // self._workers
        return received

    def _gather(self, tensor: Tensor) -> Tensor:
        gathered = [torch.empty_like(tensor) for _ in range(self._workers)]
        dist.all_gather(gathered, tensor, group=self._group)
        self.bytes_sent += (self._workers - 1) * tensor.nbytes
        return torch.cat(gathered)


class OuterState:
    """Outer state that is the same on all workers; the outer parameters themselves are saved as the model."""

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco

    def state_dict(self) -> dict[str, Any]:
        """Momenta, bases of low-rank deltas, and outer parameters that the model rounds."""
        diloco = self._diloco
        rounded = {name: a for name, a in diloco._outer.items() if diloco._parameters[name].dtype != a.dtype}
        return {"momenta": diloco._momenta, "bases": diloco._bases, "parameters": rounded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`, after the model."""
        diloco = self._diloco
        diloco.start()
        for name, saved in state["parameters"].items():
            diloco._outer[name].copy_(saved)
        _restore(diloco._momenta, state["momenta"])
        _restore(diloco._bases, state["bases"])
        diloco._is_loaded = True


class WorkerState:
    """The local parameters of one worker and its compression residuals (error feedback)."""

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco
        self.own: Tensors | None = None
        """The parameters, while the model has the outer ones."""

    def state_dict(self) -> dict[str, Any]:
        """Parameters and residuals."""
        own = self.own or {name: parameter.data for name, parameter in self._diloco._parameters.items()}
        return {"parameters": own, "residuals": self._diloco._residuals}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`, after the outer state."""
        _restore(self._diloco._parameters, state["parameters"])
        _restore(self._diloco._residuals, state["residuals"])


def _restore(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy the saved tensors; tensors of a different compression are left unchanged."""
    for name, tensor in tensors.items():
        if name in saved and saved[name].shape == tensor.shape:
            tensor.copy_(saved[name])


def _flatten(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def _unflatten(flat: Tensor, like: Tensors) -> Tensors:
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {name: part.view_as(tensor) for (name, tensor), part in zip(like.items(), parts, strict=True)}


def _quantize(flat: Tensor) -> Sequence[Tensor]:
    """Codes and scales."""
    stored = CODEC.allocate(flat.shape, flat.device)
    CODEC.encode_(stored, flat)
    return stored


def _dequantize(stored: Sequence[Tensor]) -> Tensor:
    return CODEC.decode(stored, stored[0].numel())


def factor_shapes(shape: Sequence[int], rank: int | None) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The two factors of a matrix's delta; None if `rank` is None or they would not be smaller than the matrix."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // rows
    if rank is None or rank * (rows + columns) >= rows * columns:
        return None
    return (rows, rank), (columns, rank)
