"""Keys and values in pages: rows of any length share one pool, and one page may serve many rows."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from whimbrel.cache.blocks import SCRATCH, BlockManager
from whimbrel.cache.codec import find_codec
from whimbrel.ops import View, store
from whimbrel.ops.lowbit import GroupCodec

__all__ = ["BlockPool", "PagedBatch", "Shape"]


class Shape(Protocol):
    """What a pool asks of a model's config."""

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads of each."""

    @property
    def head_width(self) -> int:
        """Width of one head."""


class BlockPool(BlockManager):
    """The pages of all layers: a page number stands for one page in each. Page 0 takes what padding writes.

    Everything is allocated here, once, and filled with zeros: what a row has not written yet is masked, and a masked
    number must still be finite.
    """

    def __init__(
        self,
        config: Shape,
        num_blocks: int,
        block_size: int = 16,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        codec: str = "none",
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.dtype, self.device = dtype, torch.device(device)
        self.codec = find_codec(codec)
        widths = _widths(config.head_width, dtype, self.codec)
        # Tensors of their own, not parts of one: compiled code would copy a whole that it writes to by several names.
        self._layers = [
            {
                name: _zeros((num_blocks, block_size, config.kv_heads, width), kind, self.device)
                for name, (width, kind) in widths.items()
            }
            for _ in range(config.num_layers)
        ]

    @staticmethod
    def block_nbytes(config: Shape, block_size: int = 16, *, dtype: torch.dtype, codec: str = "none") -> int:
        """Bytes of one page, over all layers."""
        widths = _widths(config.head_width, dtype, find_codec(codec))
        token = sum(width * kind.itemsize for width, kind in widths.values())
        return config.num_layers * block_size * config.kv_heads * token

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy(self, source: int, target: int) -> None:
        """Make page `target` of every layer hold what page `source` holds."""
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    def clear(self, page: int) -> None:
        """Fill a page of every layer with zeros."""
        for tensor in self.tensors:
            tensor[page] = 0

    @property
    def tensors(self) -> list[Tensor]:
        """Keys, values and scales of all layers, (pages, page size, kv heads, ...) each."""
        return [tensor for layer in self._layers for tensor in layer.values()]

    def write(self, key_states: Tensor, value_states: Tensor, slots: Tensor, layer_idx: int) -> None:
        """Store the keys and values (tokens, kv heads, head size) of tokens in their slots, page by page counted."""
        layer = self._layers[layer_idx]
        keys, values = key_states.to(self.dtype), value_states.to(self.dtype)
        if self.codec is not None:
            (keys, key_scales), (values, value_scales) = self.codec.encode(keys), self.codec.encode(values)
            store(layer[_scales_of("keys")], layer[_scales_of("values")], key_scales, value_scales, slots)
        store(layer["keys"], layer["values"], keys, values, slots)

    def view(self, layer_idx: int, tables: Tensor, lengths: Tensor) -> View:
        """What rows with these page tables may read of a layer."""
        layer = self._layers[layer_idx]
        return View(
            layer["keys"],
            layer["values"],
            lengths=lengths,
            pages=tables,
            key_scales=layer.get(_scales_of("keys")),
            value_scales=layer.get(_scales_of("values")),
            codec=self.codec,
        )


class PagedBatch:
    """The cache of one forward pass over rows that stand at different places of different texts.

    Row b reads `counts[b]` new tokens after the `starts[b]` that its pages hold. A row shorter than the widest is
    padded at its end, a whole row of padding has count 0 and a table of zeros: padding is written to page 0, and stands
    where its row's last token does. All is computed on the device from the three tensors, once for all layers: the
    host waits for nothing, and the same addresses with other numbers in them make another batch (CUDA graphs).
    """

    def __init__(self, pool: BlockPool, tables: Tensor, starts: Tensor, counts: Tensor, *, stored: int = 0) -> None:
        self.pool = pool
        self.tables, self.starts, self.counts = tables, starts, counts
        """(rows, pages of the longest row), (rows,), (rows,)."""
        self._stored = stored
        self._slots: Tensor | None = None
        self._lengths: Tensor | None = None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Where the next tokens of each row stand, (rows, tokens); works out where they will be written, too."""
        offsets_T = torch.arange(tokens, device=device)
        starts_B1, counts_B1 = self.starts[:, None].long(), self.counts[:, None].long()
        positions_BT = starts_B1 + torch.minimum(offsets_T, (counts_B1 - 1).clamp(min=0))
        pages_BT = self.tables.long().gather(1, positions_BT // self.pool.block_size)
        slots_BT = pages_BT * self.pool.block_size + positions_BT % self.pool.block_size
        scratch = SCRATCH * self.pool.block_size
        self._slots = torch.where(offsets_T < counts_B1, slots_BT, scratch).flatten()
        # A row of padding sees the one token that it writes to the scratch page; seeing none, it would not be finite.
        self._lengths = (self.starts + self.counts).clamp(min=1)
        return positions_BT

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> View:
        """Write the new tokens of a layer, (rows, kv heads, tokens, head size), to their pages."""
        if self._slots is None or self._lengths is None:
            self.positions(key_states.size(2), key_states.device)
            return self.append(key_states, value_states, layer_idx)
        keys_THD, values_THD = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        self.pool.write(keys_THD, values_THD, self._slots, layer_idx)
        return self.pool.view(layer_idx, self.tables, self._lengths)

    def get_seq_length(self) -> int:
        """Tokens that the longest row holds before this pass."""
        return self._stored


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU they come from NumPy, whose memory is only taken as it is first written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def _scales_of(kind: str) -> str:
    return f"{kind} scales"


def _widths(head_width: int, dtype: torch.dtype, codec: GroupCodec | None) -> dict[str, tuple[int, torch.dtype]]:
    """Of everything that is kept for a token and head: how many numbers, and of which kind."""
    if codec is None:
        return {"keys": (head_width, dtype), "values": (head_width, dtype)}
    codes = codec.code_width(head_width), codec.code_dtype
    scales = codec.scale_width(head_width), codec.scale_dtype or dtype
    return {"keys": codes, "values": codes, _scales_of("keys"): scales, _scales_of("values"): scales}
