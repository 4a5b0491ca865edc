"""Code under test that must not wait for the GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

__all__ = ["forbid_synchronization"]


@contextlib.contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Operations that synchronize with the GPU raise RuntimeError; without a GPU, nothing happens."""
    if not torch.cuda.is_available():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
