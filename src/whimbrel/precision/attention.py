"""Which attention kernels torch may use, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from whimbrel.base.errors import ConfigError, PrecisionError
from whimbrel.config import not_one_of

__all__ = ["BACKENDS", "backend_names", "sdpa_backends"]

BACKENDS: dict[str, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Every kernel that can be asked for."""
NONE_FITS = ("No viable backend for scaled_dot_product_attention", "No available kernel")
"""What torch says, on a CPU and on a GPU, where no kernel that may be used can be."""


def backend_names(asked: str | SDPBackend | Iterable[str | SDPBackend]) -> tuple[str, ...]:
    """The kernels that were asked for, one or several, as names or as torch's own members; others are refused."""
    listed = [asked] if isinstance(asked, str | SDPBackend) else list(asked)
    members = {member: name for name, member in BACKENDS.items()}
    names = tuple(str(members.get(item, item)) if isinstance(item, SDPBackend) else item for item in listed)
    for name in names:
        if name not in BACKENDS:
            raise ConfigError(not_one_of("sdpa_backend", name, BACKENDS))
    if not names:
        raise ConfigError(f"sdpa_backend is empty: name at least one of {', '.join(BACKENDS)}")
    return names


def sdpa_backends(
    asked: str | SDPBackend | Iterable[str | SDPBackend] | None, *, set_priority: bool = False
) -> AbstractContextManager[Any]:
    """Inside, attention uses only the kernels asked for, in their order with `set_priority`; None: torch's choice."""
    return contextlib.nullcontext() if asked is None else _only(backend_names(asked), set_priority)


@contextlib.contextmanager
def _only(names: tuple[str, ...], set_priority: bool) -> Iterator[None]:
    try:
        with sdpa_kernel([BACKENDS[name] for name in names], set_priority=set_priority):
            yield
    except RuntimeError as error:
        if not any(words in str(error) for words in NONE_FITS):
            raise
        raise PrecisionError(
            f"sdpa_backend = {', '.join(names)} has no kernel for this attention (device, dtype, head size, mask): add "
            "math, which takes every one, or leave sdpa_backend out"
        ) from error
