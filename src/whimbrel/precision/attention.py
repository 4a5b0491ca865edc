"""Which attention kernels torch may use, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from whimbrel.base.errors import ConfigError
from whimbrel.config import nearest

__all__ = ["BACKENDS", "backend_names", "sdpa_backends"]

BACKENDS: dict[str, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Every kernel that can be asked for."""


def backend_names(asked: str | SDPBackend | Iterable[str | SDPBackend]) -> tuple[str, ...]:
    """The kernels that were asked for, one or several, as names or as torch's own members; others are refused."""
    listed = [asked] if isinstance(asked, str | SDPBackend) else list(asked)
    members = {member: name for name, member in BACKENDS.items()}
    names = tuple(str(members.get(item, item)) if isinstance(item, SDPBackend) else item for item in listed)
    for name in names:
        if name not in BACKENDS:
            hint = nearest(str(name), BACKENDS)
            raise ConfigError(
                f"sdpa_backend = {name!r} is not one of {', '.join(BACKENDS)}{hint if '?' in hint else ''}"
            )
    if not names:
        raise ConfigError(f"sdpa_backend is empty: name at least one of {', '.join(BACKENDS)}")
    return names


def sdpa_backends(
    asked: str | SDPBackend | Iterable[str | SDPBackend] | None, *, set_priority: bool = False
) -> AbstractContextManager[Any]:
    """Inside, attention uses only the kernels asked for, in their order with `set_priority`; None: torch's choice."""
    if asked is None:
        return contextlib.nullcontext()
    kernels = [BACKENDS[name] for name in backend_names(asked)]
    return sdpa_kernel(kernels, set_priority=set_priority)
