"""Torch's global switches: set for a run, and back as they were when it ends."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Literal

import torch

from whimbrel.base.errors import ConfigError, TrainingError

__all__ = ["torch_switches"]

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def torch_switches(
    *,
    matmul_precision: Literal["highest", "high", "medium"] | None = None,
    detect_anomaly: bool = False,
    recompile_limit: int | None = None,
    deterministic: bool = False,
    default_dtype: str | None = None,
) -> Iterator[None]:
    """Inside, these hold; afterwards, also after an error, what held before. None and False leave a switch alone.

    `deterministic` allows only kernels that give the same bits every time. `default_dtype` is for building a model:
    wrap that alone in it.
    """
    with ExitStack() as restore:
        if matmul_precision is not None:
            _set_matmul_precision(matmul_precision, restore)
        if detect_anomaly:
            restore.enter_context(_anomalies())
        if recompile_limit is not None:
            import torch._dynamo as dynamo  # a second to import, so only where it is needed

            restore.enter_context(dynamo.config.patch(recompile_limit=recompile_limit))
        if deterministic:
            _be_deterministic(restore)
        if default_dtype is not None:
            restore.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(_dtype(default_dtype))
        yield


def _set_matmul_precision(precision: str, restore: ExitStack) -> None:
    """Torch has this switch twice: what the newer one held, by kind of device, is put back after the older one."""
    devices = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        held = ", ".join(device.fp32_precision for device in devices)
        raise ConfigError(
            f"matmul_precision = {precision!r} cannot be set beside torch.backends' fp32_precision, which this program "
            f"has set ({held}): leave one of them out"
        ) from error
    for device in devices:
        restore.callback(setattr, device, "fp32_precision", device.fp32_precision)
    restore.callback(torch.set_float32_matmul_precision, before)
    torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def _anomalies() -> Iterator[None]:
    """A gradient that is NaN is an error that names its operation; torch warns with the line that called it."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(True)
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"Function '(\w+)' returned nan values in its (\d+)th output", str(error))
        if found is None:
            raise
        raise TrainingError(
            f"detect_anomaly found NaN in gradient {found[2]} that {found[1]} gives: keep the line of the forward pass "
            "that torch's warning before this shows away from where it has no gradient"
        ) from error
    finally:
        torch.autograd.set_detect_anomaly(*before)


def _be_deterministic(restore: ExitStack) -> None:
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
        os.environ[CUBLAS] = ":4096:8"  # without it cuBLAS refuses; read when its handle is made


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"default_dtype = {name!r} is not one of float32, float64, bfloat16, float16")
    return dtype
