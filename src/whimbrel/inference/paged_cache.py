"""Paged KV cache: the block pool, and caches of one forward pass over sequences stored in it."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from whimbrel.cache.buffer import find_codec
from whimbrel.inference.block_manager import NULL_BLOCK, BlockManager
from whimbrel.ops import KVView, write_blocks
from whimbrel.ops.lowbit import GroupCodec

__all__ = ["BlockPool", "ContiguousCache", "KVShape", "PagedBatch"]


class KVShape(Protocol):
    """The part of a model config that determines the size of a block."""

    @property
    def num_layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class BlockPool(BlockManager):
    """The memory of all blocks: block i is row i of every layer's tensors. Block 0 is reserved for padding.

    Everything is allocated once and filled with zeros: slots that were never written are masked in attention, and a
    masked value must still be finite.
    """

    def __init__(
        self,
        config: KVShape,
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
        widths = _widths(config.head_dim, dtype, self.codec)
        # Separate tensors, not views of one: compiled code that writes to several views of a tensor copies all of it.
        self._layers = [
            {
                name: _zeros((num_blocks, block_size, config.kv_heads, width), tensor_dtype, self.device)
                for name, (width, tensor_dtype) in widths.items()
            }
            for _ in range(config.num_layers)
        ]
        # The same memory as (1, kv heads, slots, ...), for a sequence in consecutive blocks.
        self._slots = [
            {name: tensor.flatten(0, 1).transpose(0, 1)[None] for name, tensor in layer.items()}
            for layer in self._layers
        ]

    @staticmethod
    def block_nbytes(config: KVShape, block_size: int = 16, *, dtype: torch.dtype, codec: str = "none") -> int:
        """Bytes of one block, over all layers."""
        widths = _widths(config.head_dim, dtype, find_codec(codec))
        token_nbytes = sum(width * tensor_dtype.itemsize for width, tensor_dtype in widths.values())
        return config.num_layers * block_size * config.kv_heads * token_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy(self, source: int, target: int) -> None:
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    def clear(self, block: int) -> None:
        for tensor in self.tensors:
            tensor[block] = 0

    @property
    def tensors(self) -> list[Tensor]:
        """Keys, values and scales of all layers, (blocks, block size, kv heads, ...) each."""
        return [tensor for layer in self._layers for tensor in layer.values()]

    @property
    def layers(self) -> list[dict[str, Tensor]]:
        """Keys, values and scales of each layer, by name."""
        return self._layers

    def write(self, key_states: Tensor, value_states: Tensor, slots: Tensor, layer_idx: int) -> None:
        """Store keys and values (tokens, kv heads, head size) in their slots (block * block_size + offset)."""
        layer = self._layers[layer_idx]
        keys, values = key_states.to(self.dtype), value_states.to(self.dtype)
        if self.codec is not None:
            (keys, key_scales), (values, value_scales) = self.codec.encode(keys), self.codec.encode(values)
            write_blocks(layer["key_scales"], layer["value_scales"], key_scales, value_scales, slots)
        write_blocks(layer["keys"], layer["values"], keys, values, slots)

    def view(self, layer_idx: int, tables: Tensor, lengths: Tensor) -> KVView:
        """View of a layer for attention over sequences with these block tables and lengths."""
        layer = self._layers[layer_idx]
        return KVView(
            layer["keys"],
            layer["values"],
            lengths=lengths,
            block_tables=tables,
            key_scales=layer.get("key_scales"),
            value_scales=layer.get("value_scales"),
            codec=self.codec,
        )

    def append_slice(
        self, key_states: Tensor, value_states: Tensor, first_slot: int, num_stored: int, layer_idx: int
    ) -> KVView:
        """Store one sequence's new keys and values (1, kv heads, tokens, head size) after the `num_stored` before.

        `first_slot` is the slot of its first token; its slots are consecutive, so they are read without a gather.
        """
        slots, tokens = self._slots[layer_idx], key_states.size(2)
        visible: dict[str, Tensor] = {}
        new = {"keys": key_states, "values": value_states}
        if self.codec is not None:
            new["keys"], new["key_scales"] = self.codec.encode(key_states.to(self.dtype))
            new["values"], new["value_scales"] = self.codec.encode(value_states.to(self.dtype))
        for name, tensor in new.items():
            visible[name] = slots[name].narrow(2, first_slot, num_stored + tokens)
            visible[name].narrow(2, num_stored, tokens).copy_(tensor)
        return KVView(
            visible["keys"],
            visible["values"],
            key_scales=visible.get("key_scales"),
            value_scales=visible.get("value_scales"),
            codec=self.codec,
        )


class PagedBatch:
    """The KV cache of one forward pass over several sequences at different positions.

    Row b reads `counts[b]` new tokens after the `starts[b]` stored in its blocks. Rows shorter than the widest are
    padded at the end; a row of padding only has count 0 and a block table of zeros. Padding is written to block 0, at
    the position of its row's last token. Everything is computed on the device from the three tensors, once for all
    layers: the host never synchronizes, and a CUDA graph can replay the pass with other values at the same addresses.
    """

    def __init__(self, pool: BlockPool, tables: Tensor, starts: Tensor, counts: Tensor, *, stored: int = 0) -> None:
        self.pool = pool
        self.tables, self.starts, self.counts = tables, starts, counts
        """(rows, blocks of the longest row), (rows,), (rows,)."""
        self._stored = stored
        self._slots: Tensor | None = None
        self._lengths: Tensor | None = None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Positions of the new tokens (rows, tokens); also computes the slots they will be written to."""
        offsets_T = torch.arange(tokens, device=device)
        starts_B1, counts_B1 = self.starts[:, None].long(), self.counts[:, None].long()
        positions_BT = starts_B1 + torch.minimum(offsets_T, (counts_B1 - 1).clamp(min=0))
        blocks_BT = self.tables.long().gather(1, positions_BT // self.pool.block_size)
        slots_BT = blocks_BT * self.pool.block_size + positions_BT % self.pool.block_size
        padding_slot = NULL_BLOCK * self.pool.block_size
        self._slots = torch.where(offsets_T < counts_B1, slots_BT, padding_slot).flatten()
        # A row of padding attends to the one token it writes to block 0: attention over nothing would be NaN.
        self._lengths = (self.starts + self.counts).clamp(min=1)
        return positions_BT

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> KVView:
        """Store the new tokens of a layer, (rows, kv heads, tokens, head size), in their blocks."""
        if self._slots is None or self._lengths is None:
            self.positions(key_states.size(2), key_states.device)
            return self.append(key_states, value_states, layer_idx)
        keys_THD, values_THD = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        self.pool.write(keys_THD, values_THD, self._slots, layer_idx)
        return self.pool.view(layer_idx, self.tables, self._lengths)

    def get_seq_length(self) -> int:
        """Number of tokens stored before this pass for the longest sequence."""
        return self._stored


class ContiguousCache:
    """The KV cache of one forward pass over one sequence whose blocks are consecutive.

    Its keys and values are a slice of the pool: no gather and no mask, so on a CPU a step is as fast as with a
    cache of a single sequence, and rounds identically.
    """

    def __init__(self, pool: BlockPool, first_block: int, stored: int) -> None:
        self._pool, self._first_slot, self._stored = pool, first_block * pool.block_size, stored

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Positions of the new tokens (tokens,)."""
        return torch.arange(self._stored, self._stored + tokens, device=device)

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> KVView:
        """Store the new tokens of a layer, (1, kv heads, tokens, head size)."""
        return self._pool.append_slice(key_states, value_states, self._first_slot, self._stored, layer_idx)

    def get_seq_length(self) -> int:
        """Tokens stored before this pass."""
        return self._stored


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU from NumPy, which gets zeroed memory lazily from the OS instead of writing to all of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def _widths(head_dim: int, dtype: torch.dtype, codec: GroupCodec | None) -> dict[str, tuple[int, torch.dtype]]:
    """For each tensor of a layer: elements per token and head, and their dtype."""
    if codec is None:
        return {"keys": (head_dim, dtype), "values": (head_dim, dtype)}
    codes = codec.code_width(head_dim), codec.code_dtype
    scales = codec.scale_width(head_dim), codec.scale_dtype or dtype
    return {"keys": codes, "values": codes, "key_scales": scales, "value_scales": scales}
