"""The order in which an epoch visits the stream: pieces of it, each token once, any place found without a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whimbrel.base.seeds import derive_seed

__all__ = ["BlockOrder", "permuted"]

ROUNDS = 4
MASK = (1 << 64) - 1


def permuted(index: int, size: int, seed: int) -> int:
    """Where `index` goes in the permutation of range(size) that `seed` names.

    A Feistel network over the next power of four, walked until it lands inside: no table, whatever the size.
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mix(right + (seed << 2) + turn) & low)
        index = left << half | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """A 64-bit finaliser: every input bit reaches every output bit."""
    value = (value * 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """An endless reading of `tokens` tokens: as they stand, or in blocks shuffled anew each epoch.

    The tokens after the last whole block close every epoch.
    """

    tokens: int
    block: int
    seed: int | None

    def pieces(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """`count` tokens from `position` on, as (start in the stream, length)."""
        while count:
            epoch, place = divmod(position, self.tokens)
            start, room = self._locate(epoch, place)
            length = min(count, room)
            yield start, length
            position, count = position + length, count - length

    def _locate(self, epoch: int, place: int) -> tuple[int, int]:
        """Where the token at `place` of an epoch stands in the stream, and how many follow it in order."""
        whole = self.tokens // self.block
        number, inside = divmod(place, self.block)
        if self.seed is None or number >= whole:
            return place, self.tokens - place
        return permuted(
            number, whole, derive_seed(self.seed, "blocks", epoch)
        ) * self.block + inside, self.block - inside
