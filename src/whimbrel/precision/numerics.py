"""Mixed precision (autocast with gradient scaling), and global torch flags as context managers.

The flags are matmul precision, determinism, anomaly detection, the default dtype and SDPA backends.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from whimbrel.base.errors import ConfigError, PrecisionError, TrainingError
from whimbrel.config import not_one_of

__all__ = ["DTYPES", "SDPA_BACKENDS", "MixedPrecision", "sdpa_backend_names", "sdpa_backends", "torch_flags"]

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Autocast dtype of each precision."""
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
DEFAULT_DTYPES = ("float32", "float64", "bfloat16", "float16")
SDPA_BACKENDS: dict[str, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
NO_KERNEL_ERRORS = ("No viable backend for scaled_dot_product_attention", "No available kernel")
"""torch's error messages, on CPU and GPU, if no enabled kernel supports the inputs."""


# Mixed precision


class MixedPrecision:
    """fp32: no autocast; bf16: autocast; fp16: autocast with a `GradScaler`, so that small gradients do not underflow.

    Weights and optimizer state keep their dtype. Only fp16 has state: the state of the `GradScaler`.
    """

    def __init__(self, precision: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        if precision not in DTYPES:
            raise PrecisionError(not_one_of("precision", precision, DTYPES))
        self.precision, self.device, self.dtype = precision, device, DTYPES[precision]
        _check_device(precision, device)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager for forward passes."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale accumulated gradients before computing their norm or clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer. False if fp16 gradients overflowed: the step is skipped and the scale reduced."""
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def skip(self) -> None:
        """Skip the optimizer step after `unscale`, but update the loss scale."""
        if self.scaler is not None:
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """State of the `GradScaler`; empty without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `GradScaler`; the state of a run without fp16 is ignored."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def _check_device(precision: str, device: torch.device) -> None:
    """Raise if the hardware does not support the dtype."""
    other = {"bf16": "fp16", "fp16": "bf16"}.get(precision)
    if other is None:
        return
    if device.type == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        major, minor = torch.cuda.get_device_capability(device)
        raise PrecisionError(
            f"precision = bf16: expected a GPU of compute capability 8.0 or higher, got {major}.{minor}: use {other}"
        )
    try:
        with torch.autocast(device.type, dtype=DTYPES[precision]):
            torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    except RuntimeError as error:
        raise PrecisionError(
            f"precision = {precision} is not supported on {device.type} ({error}): use {other} or fp32"
        ) from error


# Global flags


@contextlib.contextmanager
def torch_flags(
    *,
    matmul_precision: Literal["highest", "high", "medium"] | None = None,
    detect_anomaly: bool = False,
    recompile_limit: int | None = None,
    deterministic: bool = False,
    default_dtype: str | None = None,
) -> Iterator[None]:
    """Context that sets flags and restores them at the end. None and False leave a flag unchanged.

    `deterministic` allows only deterministic kernels. `default_dtype` is only meant for constructing a model.
    """
    with ExitStack() as restore:
        if matmul_precision is not None:
            _set_matmul_precision(matmul_precision, restore)
        if detect_anomaly:
            restore.enter_context(_detect_anomaly())
        if recompile_limit is not None:
            import torch._dynamo as dynamo  # takes a second to import

            restore.enter_context(dynamo.config.patch(recompile_limit=recompile_limit))
        if deterministic:
            _set_deterministic(restore)
        if default_dtype is not None:
            if default_dtype not in DEFAULT_DTYPES:
                raise ConfigError(not_one_of("default_dtype", default_dtype, DEFAULT_DTYPES))
            restore.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(getattr(torch, default_dtype))
        yield


def _set_matmul_precision(precision: str, restore: ExitStack) -> None:
    """Torch has an old flag and a new one per backend, which the old one overwrites: restore both."""
    devices = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        current = ", ".join(device.fp32_precision for device in devices)
        raise ConfigError(
            f"matmul_precision = {precision!r} conflicts with torch.backends' fp32_precision, which this program has "
            f"set ({current}): use only one of them"
        ) from error
    for device in devices:
        restore.callback(setattr, device, "fp32_precision", device.fp32_precision)
    restore.callback(torch.set_float32_matmul_precision, before)
    torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def _detect_anomaly() -> Iterator[None]:
    """Replace torch's error by one line; the warning that precedes it shows the line of the forward pass."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(True)
    try:
        yield
    except RuntimeError as error:
        match = re.search(r"Function '(\w+)' returned nan values in its (\d+)th output", str(error))
        if match is None:
            raise
        raise TrainingError(
            f"detect_anomaly: NaN in gradient {match[2]} of {match[1]}: see torch's warning above for the line of the "
            "forward pass"
        ) from error
    finally:
        torch.autograd.set_detect_anomaly(*before)


def _set_deterministic(restore: ExitStack) -> None:
    restore.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)  # noqa: FBT003
    restore.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    torch.backends.cudnn.benchmark = False
    if CUBLAS not in os.environ:
        restore.callback(os.environ.pop, CUBLAS)
        os.environ[CUBLAS] = ":4096:8"  # required by deterministic cuBLAS; read when its handle is created


def sdpa_backend_names(backends: str | SDPBackend | Iterable[str | SDPBackend]) -> tuple[str, ...]:
    """Names of one or several backends, given as names or members of `SDPBackend`; raises for unknown ones."""
    listed = [backends] if isinstance(backends, str | SDPBackend) else list(backends)
    members = {member: name for name, member in SDPA_BACKENDS.items()}
    names = tuple(str(members.get(item, item)) if isinstance(item, SDPBackend) else item for item in listed)
    for name in names:
        if name not in SDPA_BACKENDS:
            raise ConfigError(not_one_of("sdpa_backend", name, SDPA_BACKENDS))
    if not names:
        raise ConfigError(f"sdpa_backend: expected at least one of {', '.join(SDPA_BACKENDS)}, got none")
    return names


def sdpa_backends(
    backends: str | SDPBackend | Iterable[str | SDPBackend] | None, *, set_priority: bool = False
) -> AbstractContextManager[Any]:
    """Restrict attention to these kernels, with `set_priority` in this order; None: no restriction."""
    return contextlib.nullcontext() if backends is None else _enable_only(sdpa_backend_names(backends), set_priority)


@contextlib.contextmanager
def _enable_only(names: tuple[str, ...], set_priority: bool) -> Iterator[None]:
    try:
        with sdpa_kernel([SDPA_BACKENDS[name] for name in names], set_priority=set_priority):
            yield
    except RuntimeError as error:
        if not any(message in str(error) for message in NO_KERNEL_ERRORS):
            raise
        raise PrecisionError(
            f"sdpa_backend = {', '.join(names)} does not support this attention (device, dtype, head size, mask): add "
            "math, which always works, or remove sdpa_backend"
        ) from error
