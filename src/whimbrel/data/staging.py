"""Raw tokens from host memory to int64 on the device: narrow on the wire, widened on arrival."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Batch", "DirectStage", "PrefetchStage", "widen"]

IGNORED = -100
"""The target that the loss leaves out."""

Batch = tuple[Tensor, Tensor]
Fill = Callable[[int, NDArray[Any]], NDArray[np.int64] | None]
"""Reads the batch at a position into an array of shape (2, B, T); says how much of each row is text, None for all."""


def widen(raw_2BT: Tensor, lengths: NDArray[np.int64] | None) -> Batch:
    """Signed tensors that hold unsigned tokens, as int64; targets past the end of a row's text become -100."""
    x, y = raw_2BT.to(torch.int64).bitwise_and_(0xFFFF if raw_2BT.dtype == torch.int16 else 0xFFFFFFFF)
    if lengths is not None:
        places = torch.arange(y.shape[1], device=y.device)
        y.masked_fill_(places >= torch.from_numpy(lengths).to(y.device)[:, None], IGNORED)
    return x, y


def _signed(dtype: np.dtype[Any]) -> torch.dtype:
    """Unsigned tensors lack operators on some devices; the signed type of the same width carries the bits."""
    return torch.int16 if dtype.itemsize == 2 else torch.int32


class DirectStage:
    """Reads a batch when it is asked for: where there is no copy to hide, nothing is gained by reading ahead."""

    def __init__(self, fill: Fill, shape: tuple[int, int], dtype: np.dtype[Any], device: torch.device) -> None:
        self._fill, self._device = fill, device
        self._buffer = np.empty((2, *shape), dtype=dtype)
        self._tensor = torch.from_numpy(self._buffer.view(f"i{dtype.itemsize}"))

    def take(self, position: int, _following: int) -> Batch:
        """The batch at `position`."""
        lengths = self._fill(position, self._buffer)
        return widen(self._tensor.to(self._device), lengths)


class PrefetchStage:
    """Reads the next batch on a thread and copies it from pinned memory on its own stream while this one is used."""

    def __init__(self, fill: Fill, shape: tuple[int, int], dtype: np.dtype[Any], device: torch.device) -> None:
        self._fill, self._dtype, self._device = fill, dtype, device
        self._copies: torch.cuda.Stream = torch.cuda.Stream(device)
        self._slots = [torch.empty((2, *shape), dtype=_signed(dtype), pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._slots]
        self._turn = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[tuple[Batch, torch.cuda.Event]]] | None = None

    def take(self, position: int, following: int) -> Batch:
        """The batch at `position`, normally on the device already; begins to fetch the one at `following`."""
        if self._ahead is None or self._ahead[0] != position:
            self._ahead = position, self._thread.submit(self._stage, position)
        batch, copied = self._ahead[1].result()
        self._ahead = following, self._thread.submit(self._stage, following)
        user = torch.cuda.current_stream(self._device)
        user.wait_event(copied)
        for tensor in batch:
            tensor.record_stream(user)
        return batch

    def _stage(self, position: int) -> tuple[Batch, torch.cuda.Event]:
        slot, copied = self._slots[self._turn], self._copied[self._turn]
        self._turn = 1 - self._turn
        copied.synchronize()
        lengths = self._fill(position, slot.numpy().view(self._dtype))
        with torch.cuda.stream(self._copies):
            batch = widen(slot.to(self._device, non_blocking=True), lengths)
            copied.record(self._copies)
        return batch, copied
