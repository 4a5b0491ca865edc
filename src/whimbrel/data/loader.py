"""`TokenDataLoader`: batches of token sequences from shards, with a position that can be saved and restored.

The order of sequences depends only on the data, the seed and the sequence length. A position is the number of tokens
read over all epochs, and its location in the shards is computed from it. Resuming is therefore immediate, and works
with a different batch size, number of ranks or gradient accumulation.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data.shards import TokenStream, open_stream

__all__ = ["TokenDataLoader", "derive_seed", "document_ids"]

IGNORE_INDEX = -100
"""Target that the loss ignores, as in torch.nn.functional.cross_entropy."""
MASK_CHECK_TOKENS = 1 << 24
"""Number of leading tokens searched for a document boundary."""
FEISTEL_ROUNDS = 4
MASK64 = (1 << 64) - 1

logger = logging.getLogger(__name__)

Batch = tuple[Tensor, Tensor]
Fill = Callable[[int, NDArray[Any]], NDArray[np.int64] | None]
"""Reads the batch at a position into an array of shape (2, B, T). Returns the length of each sequence; None: all T."""


class TokenDataLoader:
    """Reads the shards of one split as an infinite stream of tokens.

    A global batch is the next `world_size * B` sequences of `T` tokens; rank r gets sequences r*B to (r+1)*B. The
    position counts tokens of the global stream, so it stays valid if the batch size or the number of ranks changes.

    `seed` shuffles each epoch in blocks of `block` tokens (default T), each block once; None reads in order.
    `documents`: "join" lets sequences cross document boundaries; "mask" reads the same sequences, and `document_ids`
    returns the document ids for the attention mask; "pack" starts sequences at document boundaries and never splits a
    document that fits into T tokens; the rest of a sequence is padding that the loss ignores.

    `eot_id` is the token that starts a document. Default: the id in the manifest, or without a manifest that of GPT-2
    (uint16 shards) or Llama 3 (uint32). `verify` compares each shard with the SHA-256 in the manifest when it is first
    read.
    """

    def __init__(
        self,
        data_root: str | os.PathLike[str],
        B: int,
        T: int,
        *,
        split: str = "train",
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        seed: int | None = None,
        block: int | None = None,
        documents: Literal["join", "mask", "pack"] = "join",
        eot_id: int | None = None,
        vocab_size: int | None = None,
        verify: bool = False,
    ) -> None:
        for name, value in (("B", B), ("T", T), ("block", 1 if block is None else block)):
            if value < 1:
                raise ConfigError(f"expected {name} >= 1, got {value}")
        if not 0 <= rank < world_size:
            raise ConfigError(f"expected rank from 0 to {world_size - 1} for world_size={world_size}, got {rank}")
        if documents not in ("join", "mask", "pack"):
            raise ConfigError(f"expected documents to be 'join', 'mask' or 'pack', got '{documents}'")
        if documents == "pack" and block is not None:
            raise ConfigError(f"block={block} has no effect with documents='pack', which shuffles sequences: omit it")
        self.B, self.T, self.rank, self.world_size, self.documents = B, T, rank, world_size, documents
        stream, self.eot_id = open_stream(data_root, split, vocab_size, eot_id, verify=verify)
        self.root, self.stream, self.total_tokens = Path(data_root), stream, len(stream)
        if documents == "mask":
            _warn_if_no_boundary(stream, self.eot_id)
        self.position = 0
        self._sequences: Sequences = (
            PackedSequences(stream, T, self.eot_id, seed)
            if documents == "pack"
            else JoinedSequences(stream, T, block or T, seed)
        )
        self._identity = {
            "split": split,
            "stream_tokens": self.total_tokens,
            "seed": seed,
            "block": None if seed is None or documents == "pack" else block or T,
            "packed_rows": T if documents == "pack" else None,
        }
        device = torch.device(device)
        fetcher = PrefetchingFetcher if device.type == "cuda" else Fetcher
        self._fetcher = fetcher(self._fill, (B, T), stream.dtype, device)

    @property
    def epoch(self) -> int:
        """Number of completed passes over the stream."""
        return self.position // self.total_tokens

    def next_batch(self) -> Batch:
        """The next (x, y) of this rank: int64 of shape (B, T), on the device. y is x shifted by one token."""
        next_position = self._sequences.advance(self.position, self.world_size * self.B)
        batch = self._fetcher.fetch(self.position, next_position)
        before, self.position = self.epoch, next_position
        if self.epoch > before and self._identity["split"] == "train":  # validation data is read repeatedly on purpose
            logger.info("Epoch %d (%s training tokens)", self.epoch + 1, f"{self.total_tokens:,}")
        return batch

    def document_ids(self, x_BT: Tensor) -> Tensor | None:
        """Document ids of a batch for the attention mask; None if attention may cross documents ("join")."""
        return None if self.documents == "join" else document_ids(x_BT, self.eot_id)

    def split(self, rank: int, world_size: int) -> None:
        """Read as rank `rank` of `world_size`, unless the loader was made for several ranks already.

        Raises ConfigError if it was made for other ranks.
        """
        if self.world_size not in (1, world_size) or (self.world_size > 1 and self.rank != rank):
            raise ConfigError(
                f"expected a TokenDataLoader for rank {rank} of {world_size}, got one for rank {self.rank} of "
                f"{self.world_size}: omit rank and world_size; the trainer splits the data"
            )
        self.rank, self.world_size = rank, world_size

    def reset(self) -> None:
        """Restart at the first token."""
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """The position, and the stream and shuffling properties that it depends on."""
        return {"position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position. Raises DataError if it belongs to a different stream or order."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise DataError(
                    f"the saved position has {name}={state.get(name)}, this loader has {name}={value}: resume with the "
                    "same data and order"
                )
        self.position = int(state["position"])

    def _fill(self, position: int, buffer_2BT: NDArray[Any]) -> NDArray[np.int64] | None:
        start = self._sequences.advance(position, self.rank * self.B)
        return self._sequences.read(start, buffer_2BT[0], buffer_2BT[1])


def document_ids(x_BT: Tensor, eot_id: int) -> Tensor:
    """Number the documents within each sequence: 0 before the first end-of-text token, incremented at each one.

    Tokens of a sequence may attend to each other only if their ids are equal.
    """
    return (x_BT == eot_id).cumsum(dim=-1)


def _warn_if_no_boundary(stream: TokenStream, eot_id: int) -> None:
    """Warn if the first tokens contain no end-of-text token: document masking would then have no effect."""
    first = stream.shard(0)[:MASK_CHECK_TOKENS]
    if not (first == eot_id).any():
        logger.warning(
            "%s has no end-of-text token (%d) in its first %d tokens: attention is not masked there; set "
            "data.eot_id if another token separates documents", stream.paths[0], eot_id, len(first),
        )  # fmt: skip


# Sequences: which T tokens of the stream a position refers to.


class Sequences(Protocol):
    """How the stream is split into sequences of T tokens."""

    def advance(self, position: int, count: int) -> int:
        """The position `count` sequences after `position`."""

    def read(self, position: int, x_BT: NDArray[Any], y_BT: NDArray[Any]) -> NDArray[np.int64] | None:
        """Read the B sequences starting at `position` and their targets. Returns their lengths; None: all T."""


class JoinedSequences:
    """Consecutive sequences of T tokens that cross document boundaries, optionally in shuffled blocks."""

    def __init__(self, stream: TokenStream, T: int, block: int, seed: int | None) -> None:
        self._stream, self._T = stream, T
        self._order = BlockOrder(len(stream), block, seed)

    def advance(self, position: int, count: int) -> int:
        return position + count * self._T

    def read(self, position: int, x_BT: NDArray[Any], y_BT: NDArray[Any]) -> None:
        """Read sequences. The target of the last token of a shuffled block is its successor in the stream."""
        x, y, filled = x_BT.reshape(-1), y_BT.reshape(-1), 0
        for start, length in self._order.segments(position, x.size):
            tokens = np.empty(length + 1, dtype=x.dtype)
            self._stream.copy(start, tokens)
            x[filled : filled + length], y[filled : filled + length] = tokens[:-1], tokens[1:]
            filled += length


class PackedSequences:
    """Sequences of complete documents, padded with end-of-text; documents longer than T are cut every T tokens."""

    def __init__(self, stream: TokenStream, T: int, eot_id: int, seed: int | None) -> None:
        self._stream, self._eot_id, self._seed = stream, eot_id, seed
        starts = _document_starts(stream, eot_id)
        if not len(starts):
            raise DataError(
                f"documents='pack' needs end-of-text tokens, but {stream.paths[0].parent} contains no token {eot_id}: "
                "set data.eot_id to the token that separates documents"
            )
        self._bounds = _sequence_bounds(starts, len(stream), T)

    def advance(self, position: int, count: int) -> int:
        epoch, index = self._locate(position)
        epochs, index = divmod(index + count, len(self._bounds) - 1)
        return (epoch + epochs) * len(self._stream) + int(self._bounds[index])

    def read(self, position: int, x_BT: NDArray[Any], y_BT: NDArray[Any]) -> NDArray[np.int64]:
        """Read sequences, padded with end-of-text. Returns their lengths without padding."""
        x_BT.fill(self._eot_id)
        y_BT.fill(self._eot_id)
        lengths = np.empty(len(x_BT), dtype=np.int64)
        for i in range(len(x_BT)):
            epoch, index = self._locate(self.advance(position, i))
            if self._seed is not None:
                index = permute(index, len(self._bounds) - 1, derive_seed(self._seed, "rows", epoch))
            start, end = int(self._bounds[index]), int(self._bounds[index + 1])
            tokens = np.empty(end - start + 1, dtype=x_BT.dtype)
            self._stream.copy(start, tokens)
            x_BT[i, : end - start], y_BT[i, : end - start] = tokens[:-1], tokens[1:]
            lengths[i] = end - start
        return lengths

    def _locate(self, position: int) -> tuple[int, int]:
        """Epoch, and index of the sequence that starts at `position` (before shuffling)."""
        epoch, offset = divmod(position, len(self._stream))
        return epoch, int(np.searchsorted(self._bounds, offset))


def _document_starts(stream: TokenStream, eot_id: int, chunk: int = 1 << 22) -> NDArray[np.int64]:
    """Offsets in the stream at which documents start."""
    starts, before = [], 0
    for index in range(len(stream.paths)):
        shard = stream.shard(index)
        offsets = range(0, len(shard), chunk)
        starts += [np.flatnonzero(shard[offset : offset + chunk] == eot_id) + (before + offset) for offset in offsets]
        before += len(shard)
    return np.concatenate(starts)


def _sequence_bounds(starts: NDArray[np.int64], end: int, T: int) -> NDArray[np.int64]:
    """Cut greedily: each sequence ends at the last document end within T tokens, or after T if there is none."""
    edges = np.append(starts[starts > 0], end)  # other tools may start a split in the middle of a document
    bounds = [0]
    while bounds[-1] < end:
        limit = bounds[-1] + T
        last = int(edges[np.searchsorted(edges, limit, side="right") - 1]) if limit >= edges[0] else 0
        bounds.append(last if last > bounds[-1] else limit)
    return np.array(bounds, dtype=np.int64)


# Shuffling: computed for any position without storing a permutation.


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """Endless order over `num_tokens` tokens: sequential, or in blocks with a new permutation each epoch.

    The tokens after the last complete block come at the end of every epoch.
    """

    num_tokens: int
    block: int
    seed: int | None

    def segments(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """The `count` tokens starting at `position`, as (start in the stream, length)."""
        while count:
            epoch, offset = divmod(position, self.num_tokens)
            start, available = self._locate(epoch, offset)
            length = min(count, available)
            yield start, length
            position, count = position + length, count - length

    def _locate(self, epoch: int, offset: int) -> tuple[int, int]:
        """Where the token at `offset` of an epoch lies in the stream, and how many consecutive tokens follow it."""
        num_blocks = self.num_tokens // self.block
        index, offset_in_block = divmod(offset, self.block)
        if self.seed is None or index >= num_blocks:
            return offset, self.num_tokens - offset
        start = permute(index, num_blocks, derive_seed(self.seed, "blocks", epoch)) * self.block
        return start + offset_in_block, self.block - offset_in_block


def permute(index: int, size: int, seed: int) -> int:
    """The image of `index` under the permutation of range(size) that `seed` selects.

    A Feistel network is a bijection on pairs of half-width integers whatever its round function, so it permutes the
    next power of four above `size`. An image outside range(size) is mapped again until it falls inside ("cycle
    walking"), which restricts the bijection to range(size). No table is stored, so memory does not grow with the epoch.
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for i in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(right + (seed << 2) + i) & low)
        index = left << half | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """The finalizer of splitmix64: every input bit affects every output bit."""
    value = (value * 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK64
    return value ^ value >> 31


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed from `seed` and names, equal on every machine. Different names produce independent RNG streams."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# Transfer: tokens are copied to the device at their width on disk (2 or 4 bytes) and converted to int64 there.


class Fetcher:
    """Reads a batch when it is requested: without a copy to a GPU to overlap, reading ahead has no benefit."""

    def __init__(self, fill: Fill, shape: tuple[int, int], dtype: np.dtype[Any], device: torch.device) -> None:
        self._fill, self._device = fill, device
        self._buffer = np.empty((2, *shape), dtype=dtype)
        self._tensor = torch.from_numpy(self._buffer.view(f"i{dtype.itemsize}"))

    def fetch(self, position: int, _next_position: int) -> Batch:
        """The batch at `position`."""
        lengths = self._fill(position, self._buffer)
        return _to_int64(self._tensor.to(self._device), lengths)


class PrefetchingFetcher:
    """Reads the next batch on a thread and copies it to the GPU on a side stream while the current one is used.

    Two pinned buffers alternate. A buffer is refilled only after its copy to the device has completed.
    """

    def __init__(self, fill: Fill, shape: tuple[int, int], dtype: np.dtype[Any], device: torch.device) -> None:
        self._fill, self._dtype, self._device = fill, dtype, device
        self._copy_stream: torch.cuda.Stream = torch.cuda.Stream(device)
        # Unsigned tensors lack operators on some devices; the signed type of the same width has the same bits.
        signed = torch.int16 if dtype.itemsize == 2 else torch.int32
        self._buffers = [torch.empty((2, *shape), dtype=signed, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._next = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._prefetched: tuple[int, Future[tuple[Batch, torch.cuda.Event]]] | None = None

    def fetch(self, position: int, next_position: int) -> Batch:
        """The batch at `position`, usually prefetched; starts to prefetch the one at `next_position`."""
        if self._prefetched is None or self._prefetched[0] != position:
            self._prefetched = position, self._thread.submit(self._prefetch, position)
        batch, copied = self._prefetched[1].result()
        self._prefetched = next_position, self._thread.submit(self._prefetch, next_position)
        compute_stream = torch.cuda.current_stream(self._device)
        compute_stream.wait_event(copied)
        for tensor in batch:  # allocated on the copy stream: its memory must not be reused while it is being read
            tensor.record_stream(compute_stream)
        return batch

    def _prefetch(self, position: int) -> tuple[Batch, torch.cuda.Event]:
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        self._next = 1 - self._next
        copied.synchronize()
        lengths = self._fill(position, buffer.numpy().view(self._dtype))
        with torch.cuda.stream(self._copy_stream):
            batch = _to_int64(buffer.to(self._device, non_blocking=True), lengths)
            copied.record(self._copy_stream)
        return batch, copied


def _to_int64(raw_2BT: Tensor, lengths: NDArray[np.int64] | None) -> Batch:
    """Unsigned tokens in a signed tensor, as int64; targets in the padding become -100."""
    x, y = raw_2BT.to(torch.int64).bitwise_and_(0xFFFF if raw_2BT.dtype == torch.int16 else 0xFFFFFFFF)
    if lengths is not None:
        offsets = torch.arange(y.shape[1], device=y.device)
        y.masked_fill_(offsets >= torch.from_numpy(lengths).to(y.device)[:, None], IGNORE_INDEX)
    return x, y
