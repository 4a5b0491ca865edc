"""State as it was at one moment, in host memory that every save uses again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whimbrel.checkpoint.tensors import by_alignment
from whimbrel.checkpoint.tree import pack, unpack

__all__ = ["HostMemory", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one component: tensors in host memory, and the JSON that says where each goes."""

    tensors: dict[str, Tensor]
    tree: Any

    def state(self) -> Any:
        """The state as its owner knows it."""
        return unpack(self.tensors, self.tree)


class HostMemory:
    """One block per component, pinned where its tensors come from a CUDA device, in the layout of its file.

    Copies from a device are ordered with the work that is queued there and nobody waits for them here: `arrived` does,
    and must have returned before a snapshot is read. A snapshot holds until the next one of the same component.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}
        self._copied: list[torch.cuda.Event] = []

    def reserve(self, key: str, state: Any) -> None:
        """Have memory ready for such a state."""
        tensors, _ = pack(state)
        self._block(key, tensors)

    def copy(self, key: str, state: Any) -> Snapshot:
        """Copy a state; its tensors may change as soon as this returns."""
        tensors, tree = pack(state)
        block, offset, copies = self._block(key, tensors), 0, {}
        for name in by_alignment(tensors, tensors):
            source = tensors[name]
            part = block[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
            copies[name] = part.copy_(source, non_blocking=True)
            offset += source.nbytes
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            self._copied.append(torch.cuda.current_stream(device).record_event())
        return Snapshot(copies, tree)

    def arrived(self) -> None:
        """Wait until all copies are in host memory."""
        for event in self._copied:
            event.synchronize()
        self._copied.clear()

    def release(self) -> None:
        """Give the memory back."""
        self._blocks.clear()

    def _block(self, key: str, tensors: Mapping[str, Tensor]) -> Tensor:
        size = sum(tensor.nbytes for tensor in tensors.values())
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        block = self._blocks.get(key)
        if block is None or block.numel() < size or (pinned and not block.is_pinned()):
            self._blocks.pop(key, None)  # the old block goes before the new one comes
            del block
            block = self._blocks[key] = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        return block
