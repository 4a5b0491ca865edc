"""Block bookkeeping of the paged KV cache: allocation, reference counts, prefix caching, block tables.

Nothing here touches tensors except through `BlockManager.copy` and `clear`, which `BlockPool` implements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from itertools import count, pairwise

from whimbrel.base.errors import ConfigError, RequestError

__all__ = ["NULL_BLOCK", "BlockManager", "BlockTable"]

NULL_BLOCK = 0
"""The block that padding is written to; never allocated."""

EMPTY_PREFIX = 0


class BlockManager(ABC):
    """Reference-counted blocks with a prefix cache.

    A full block is identified by a chained key: (id of the prefix before it, its own tokens). Two sequences with the
    same key share the block. The keys live in a dict, which compares them and not just their hashes, so a hash
    collision cannot return the wrong block. A block whose reference count drops to zero stays cached until its memory
    is needed; the least recently used one is evicted first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size: expected at least 1, got {block_size}")
        if num_blocks < 2:
            raise ConfigError(f"num_blocks: expected at least 2 (the first is reserved for padding), got {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._ref_counts = [0] * num_blocks
        self._free = dict.fromkeys(range(num_blocks - 1, NULL_BLOCK, -1))  # an ordered set; the last is used first
        self._evictable: dict[int, None] = {}  # unreferenced cached blocks, least recently used first
        self._cached: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> (prefix id, block)
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> key
        self._prefix_ids = count(EMPTY_PREFIX + 1)
        self.single_sequence = False
        """Whether only one sequence uses the blocks at a time: it then gets consecutive blocks, even if cached."""

    @abstractmethod
    def copy(self, source: int, target: int) -> None:
        """Copy the contents of block `source` to block `target`."""

    @abstractmethod
    def clear(self, block: int) -> None:
        """Fill a block with zeros."""

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated, including unreferenced cached blocks."""
        return len(self._free) + len(self._evictable)

    def ref_count(self, block: int) -> int:
        """Number of block tables that reference the block."""
        return self._ref_counts[block]

    def allocate(self, count: int, after: int = NULL_BLOCK) -> list[int]:
        """Allocate `count` blocks, after block `after` if possible; cached blocks are evicted only if none are free."""
        if count > self.available:
            raise RequestError(f"expected {count} free KV-cache blocks, got {self.available}: raise num_blocks")
        blocks = []
        for _ in range(count):
            after = self._take(after + 1)
            self._ref_counts[after] = 1
            blocks.append(after)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Increment reference counts; cached blocks are no longer evictable."""
        for block in blocks:
            self._evictable.pop(block, None)
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement reference counts, last block first: it is only matched after the others, so it is evicted first."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._keys:
                    self._evictable[block] = None
                else:
                    self._free[block] = None

    def discard(self, blocks: Sequence[int]) -> None:
        """Release blocks with non-finite contents: remove them from the prefix cache and zero them."""
        for block in blocks:
            if self._ref_counts[block] == 1:
                if block in self._keys:
                    del self._cached[self._keys.pop(block)]
                self.clear(block)
        self.release(blocks)

    def match(self, tokens: Sequence[int], max_tokens: int, prefix: int = EMPTY_PREFIX) -> tuple[list[int], int]:
        """Cached blocks for a prefix of at most `max_tokens` tokens, retained, and the id of that prefix.

        The tokens follow those of `prefix`.
        """
        blocks, size = [], self.block_size
        for start in range(0, max_tokens - size + 1, size):
            entry = self._cached.get((prefix, tuple(tokens[start : start + size])))
            if entry is None:
                break
            prefix, block = entry
            blocks.append(block)
        self.retain(blocks)
        return blocks, prefix

    def add_to_cache(self, prefix: int, tokens: tuple[int, ...], block: int) -> int:
        """Add a full block to the prefix cache; returns the id of the prefix that ends with it.

        If another block has the same key, that one stays in the cache.
        """
        key = prefix, tokens
        if key not in self._cached:
            self._cached[key] = next(self._prefix_ids), block
            self._keys[block] = key
        return self._cached[key][0]

    def _take(self, preferred: int) -> int:
        """Remove an unreferenced block from the pool and return it; `preferred` if possible."""
        if preferred in self._free or (preferred in self._evictable and self.single_sequence):
            block = preferred
        else:
            block = next(reversed(self._free)) if self._free else next(iter(self._evictable))
        if block in self._free:
            del self._free[block]
        else:
            del self._evictable[block]
            del self._cached[self._keys.pop(block)]
        return block


class BlockTable:
    """The blocks of one sequence, in order, and the number of tokens stored in them."""

    __slots__ = ("_manager", "_num_cached", "_prefix", "adapter", "blocks", "num_tokens")

    def __init__(self, manager: BlockManager, adapter: int = 0) -> None:
        self._manager = manager
        self.adapter = adapter
        """The adapter that computes the keys and values, 0 for none; only its sequences share blocks."""
        self.blocks = array("i")
        self.num_tokens = 0
        """Number of tokens whose keys and values are stored."""
        self._num_cached, self._prefix = 0, self._empty_prefix  # full blocks in the prefix cache, and their prefix

    def match_prefix(self, tokens: Sequence[int], max_tokens: int) -> None:
        """Start an empty table with cached blocks for a prefix of at most `max_tokens` tokens."""
        blocks, self._prefix = self._manager.match(tokens, max_tokens, self._empty_prefix)
        self.blocks.extend(blocks)
        self._num_cached = len(blocks)
        self.num_tokens = len(blocks) * self._manager.block_size

    def blocks_needed(self, tokens: int) -> int:
        """Number of blocks that `reserve(tokens)` will allocate."""
        missing = -(-(self.num_tokens + tokens) // self._manager.block_size) - len(self.blocks)
        return max(missing, 0) + (tokens > 0 and self._last_block_is_shared())

    def reserve(self, tokens: int) -> None:
        """Allocate blocks for `tokens` more; a shared, partly filled last block is copied before it is written to."""
        needed = self.blocks_needed(tokens)
        if not needed:
            return
        fresh = self._manager.allocate(needed, self.blocks[-1] if self.blocks else NULL_BLOCK)
        if tokens > 0 and self._last_block_is_shared():
            index = self.num_tokens // self._manager.block_size
            shared, self.blocks[index] = self.blocks[index], fresh.pop()
            self._manager.copy(shared, self.blocks[index])
            self._manager.release([shared])
        self.blocks.extend(fresh)

    def advance(self, tokens: Sequence[int], num_tokens: int, *, start: int = 0, cache: bool = True) -> None:
        """Record that `num_tokens` of `tokens[start:]` are stored; add the blocks that became full to the cache."""
        self.num_tokens = num_tokens
        size = self._manager.block_size
        while cache and (self._num_cached + 1) * size <= num_tokens:
            first = start + self._num_cached * size
            block_tokens = tuple(tokens[first : first + size])
            self._prefix = self._manager.add_to_cache(self._prefix, block_tokens, self.blocks[self._num_cached])
            self._num_cached += 1

    def fork(self) -> BlockTable:
        """A table that shares these blocks (copy on write)."""
        other = BlockTable(self._manager, self.adapter)
        other.blocks = self.blocks[: -(-self.num_tokens // self._manager.block_size)]
        other.num_tokens, other._num_cached, other._prefix = self.num_tokens, self._num_cached, self._prefix
        self._manager.retain(other.blocks)
        return other

    def release(self, *, discard: bool = False) -> None:
        """Empty the table; `discard` zeros blocks and removes them from the prefix cache."""
        (self._manager.discard if discard else self._manager.release)(self.blocks)
        self.blocks = array("i")
        self.num_tokens, self._num_cached, self._prefix = 0, 0, self._empty_prefix

    @property
    def _empty_prefix(self) -> int:
        """Prefix ids are positive, and negative ones are the empty prefixes of adapters."""
        return EMPTY_PREFIX - self.adapter

    @property
    def is_contiguous(self) -> bool:
        """Whether the blocks are consecutive, so that their tokens are one slice of the pool."""
        return all(block + 1 == following for block, following in pairwise(self.blocks))

    def _last_block_is_shared(self) -> bool:
        index, filled = divmod(self.num_tokens, self._manager.block_size)
        return filled > 0 and self._manager.ref_count(self.blocks[index]) > 1
