"""Rows of T tokens out of a stream: joined end to end, or packed so that no document is cut that fits in a row.

A row is found by its position, a count of stream tokens over all epochs; no batch size or rank enters into it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import DataError
from whimbrel.base.seeds import derive_seed
from whimbrel.data.order import BlockOrder, permuted
from whimbrel.data.stream import TokenStream

__all__ = ["JoinedRows", "PackedRows", "Rows"]


class Rows(Protocol):
    """What the loader asks of an arrangement of rows."""

    def after(self, position: int, rows: int) -> int:
        """The position of the row that comes `rows` rows after the one at `position`."""

    def fill(self, position: int, x_BT: NDArray[Any], y_BT: NDArray[Any]) -> NDArray[np.int64] | None:
        """Read the rows from `position` on, with their next tokens; say how much of each is text, None for all."""


class JoinedRows:
    """Row after row from the stream, documents running on across rows; optionally in shuffled blocks."""

    def __init__(self, stream: TokenStream, T: int, block: int, seed: int | None) -> None:
        self._stream, self._T = stream, T
        self._order = BlockOrder(len(stream), block, seed)

    def after(self, position: int, rows: int) -> int:
        """Every row is T tokens."""
        return position + rows * self._T

    def fill(self, position: int, x_BT: NDArray[Any], y_BT: NDArray[Any]) -> None:
        """The next token is the stream's own, also at the end of a shuffled block."""
        x, y, filled = x_BT.reshape(-1), y_BT.reshape(-1), 0
        for start, length in self._order.pieces(position, x.size):
            piece = np.empty(length + 1, dtype=x.dtype)
            self._stream.copy(start, piece)
            x[filled : filled + length], y[filled : filled + length] = piece[:-1], piece[1:]
            filled += length


class PackedRows:
    """Each row is a run of whole documents, filled up with end-of-text; a longer one is cut every T tokens."""

    def __init__(self, stream: TokenStream, T: int, eot_id: int, seed: int | None) -> None:
        self._stream, self._eot_id, self._seed = stream, eot_id, seed
        starts = _document_starts(stream, eot_id)
        if not len(starts):
            raise DataError(
                f"documents='pack' needs end-of-text tokens, but {stream.paths[0].parent} contains no token {eot_id}: "
                "set data.eot_id to the token that separates documents"
            )
        self._bounds = _row_bounds(starts, len(stream), T)

    def after(self, position: int, rows: int) -> int:
        """Rows differ in length; their bounds are known."""
        epoch, number = self._number(position)
        epochs, number = divmod(number + rows, len(self._bounds) - 1)
        return (epoch + epochs) * len(self._stream) + int(self._bounds[number])

    def fill(self, position: int, x_BT: NDArray[Any], y_BT: NDArray[Any]) -> NDArray[np.int64]:
        """The text of each row, then end-of-text to the end."""
        x_BT.fill(self._eot_id)
        y_BT.fill(self._eot_id)
        lengths = np.empty(len(x_BT), dtype=np.int64)
        for index in range(len(x_BT)):
            epoch, number = self._number(self.after(position, index))
            if self._seed is not None:
                number = permuted(number, len(self._bounds) - 1, derive_seed(self._seed, "rows", epoch))
            start, end = int(self._bounds[number]), int(self._bounds[number + 1])
            piece = np.empty(end - start + 1, dtype=x_BT.dtype)
            self._stream.copy(start, piece)
            x_BT[index, : end - start], y_BT[index, : end - start] = piece[:-1], piece[1:]
            lengths[index] = end - start
        return lengths

    def _number(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, len(self._stream))
        return epoch, int(np.searchsorted(self._bounds, place))


def _document_starts(stream: TokenStream, eot_id: int, step: int = 1 << 22) -> NDArray[np.int64]:
    """Where documents start in the stream."""
    starts, before = [], 0
    for index in range(len(stream.paths)):
        shard = stream.shard(index)
        places = range(0, len(shard), step)
        starts += [np.flatnonzero(shard[place : place + step] == eot_id) + (before + place) for place in places]
        before += len(shard)
    return np.concatenate(starts)


def _row_bounds(starts: NDArray[np.int64], end: int, T: int) -> NDArray[np.int64]:
    """Cut greedily: each row ends at the last document end within T tokens, or after T where there is none."""
    edges = np.append(starts[starts > 0], end)  # other tools may cut a split mid-document
    bounds = [0]
    while bounds[-1] < end:
        reach = bounds[-1] + T
        last = int(edges[np.searchsorted(edges, reach, side="right") - 1]) if reach >= edges[0] else 0
        bounds.append(last if last > bounds[-1] else reach)
    return np.array(bounds, dtype=np.int64)
