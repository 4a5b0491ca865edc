"""Micro-batches for training: from token shards, datasets or DataLoaders, with a position that can be saved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data import TokenDataLoader, read_manifest
from whimbrel.models import IGNORE_INDEX, GPTConfig
from whimbrel.train.arguments import argument_name
from whimbrel.train.config import LoaderConfig
from whimbrel.train.dataset_batches import Collate, DatasetBatches, LoaderBatches
from whimbrel.train.device import free_memory

__all__ = [
    "Batches",
    "TokenBatches",
    "accumulation_steps",
    "default_micro_batch",
    "held_out",
    "make_batches",
    "token_count",
]

SAMPLED_TOKENS = 65536
"""Number of tokens at each end of a stream that are hashed to identify it."""
DEFAULT_BATCH_SIZE = 8
"""Default batch size of the training arguments; a DataLoader's own size takes precedence over it."""
MAX_MICRO_BATCH_TOKENS = 65_536
"""Tokens per forward pass above which a GPU gets no faster."""
CPU_MICRO_BATCH_TOKENS = 4096
"""Tokens per forward pass on a CPU: enough to keep its cores busy, few enough for its caches."""


class Batches(Protocol):
    """A source of micro-batches with a position that can be saved and restored."""

    def begin(self, epoch: int) -> None:
        """Start an epoch, or continue it if a resume restored a position inside it."""

    def next_batch(self) -> Any | None:
        """The next micro-batch, on the device; None at the end of the epoch."""

    def exhausted(self) -> bool:
        """Whether the epoch has ended."""

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Number of optimizer steps in `epochs` epochs."""

    @property
    def epoch(self) -> float:
        """Completed epochs, including the fraction of the current one."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position."""


class TokenBatches:
    """Batches of token shards, read as a cyclic stream: a step may cross an epoch boundary, which ends its epoch."""

    def __init__(self, loader: TokenDataLoader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self._pass = 0

    def begin(self, epoch: int) -> None:
        """Start an epoch; it ends when the stream wraps around."""
        self._pass = max(epoch, self.loader.epoch)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (B, T)."""
        x, y = self.loader.next_batch()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def exhausted(self) -> bool:
        """Whether the stream has wrapped around since `begin`."""
        return self.loader.epoch > self._pass

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Number of optimizer steps that cover `epochs` epochs, rounded up."""
        loader = self.loader
        tokens = accumulation * loader.B * loader.T * loader.world_size
        return max(1, -int(-epochs * loader.total_tokens // tokens))

    @property
    def epoch(self) -> float:
        """Tokens read divided by the tokens in the data."""
        return self.loader.position / self.loader.total_tokens

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, and hashes that identify its tokens."""
        return self.loader.state_dict() | self._identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position; raises DataError if the shards differ from those it was saved with."""
        for name in ("tokenizer", "tokens"):
            theirs, ours = state.get(name), self._identity[name]
            if theirs is not None and ours is not None and theirs != ours:
                raise DataError(
                    f"expected shards with the {name} of the checkpoint ({theirs[:12]}), got {ours[:12]} in "
                    f"{self.loader.root}: resume with the same data, or choose another output_dir"
                )
        self.loader.load_state_dict(state)

    @cached_property
    def _identity(self) -> dict[str, str | None]:
        """Hashes of the tokenizer, if a manifest names it, and of the tokens at both ends of the stream."""
        stream, manifest = self.loader.stream, read_manifest(self.loader.root)
        count, digest = min(SAMPLED_TOKENS, len(stream)), hashlib.sha256()
        for start in (0, len(stream) - count):
            tokens = np.empty(count, stream.dtype)
            stream.copy(start, tokens)
            digest.update(tokens.astype(np.uint32).tobytes())
        tokenizer = None if manifest is None else manifest.tokenizer.fingerprint
        return {"tokenizer": tokenizer, "tokens": digest.hexdigest()}


def make_batches(
    dataset: Any, batch_size: int | None, device: torch.device, *,
    collate: Collate, seed: int, shuffle: bool, loader: LoaderConfig,
) -> TokenBatches | DatasetBatches:  # fmt: skip
    """Batches of a dataset, DataLoader or TokenDataLoader; `batch_size` may be None only for a TokenDataLoader."""
    if isinstance(dataset, TokenDataLoader):
        if batch_size not in (None, dataset.B):
            raise ConfigError(
                f"expected batch size {dataset.B}, the B of the TokenDataLoader, got {batch_size}: make them equal"
            )
        _check_unused_settings(loader, "a TokenDataLoader")
        return TokenBatches(dataset, device)
    assert batch_size is not None
    if isinstance(dataset, DataLoader):
        own = dataset.batch_size
        if own is not None and batch_size not in (own, DEFAULT_BATCH_SIZE):
            raise ConfigError(f"expected batch size {own}, that of the DataLoader, got {batch_size}: make them equal")
        if shuffle:
            _check_unused_settings(loader, "a DataLoader")
        return LoaderBatches(dataset, device, seed=seed)
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise ConfigError(
            f"expected a dataset, got {type(dataset).__name__}: pass a TokenDataLoader, sequence or iterable"
        )
    return DatasetBatches(dataset, batch_size, device, collate=collate, seed=seed, shuffle=shuffle, loader=loader)


def _check_unused_settings(loader: LoaderConfig, kind: str) -> None:
    for field in fields(LoaderConfig):
        if (value := getattr(loader, field.name)) != field.default:
            setting = f"loader.{field.name}"
            raise ConfigError(f"{setting} = {value} has no effect on {kind}: leave {argument_name(setting)} out")


def held_out(batches: TokenBatches, tokens: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `tokens` (None: all) of a stream as batches; each sequence occurs once, for any batch size."""
    loader = batches.loader
    sequences = min(tokens or loader.total_tokens, loader.total_tokens - 1) // loader.T
    loader.reset()
    while sequences > 0:
        x, y = batches.next_batch()
        y[sequences:] = IGNORE_INDEX  # the last batch may wrap around to the start
        sequences -= loader.B
        yield x, y


def token_count(batch: Any) -> int:
    """Number of tokens in a batch; if its inputs are not token ids, the number of examples."""
    inputs = batch.get("input_ids") if isinstance(batch, Mapping) else batch[0]
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        return inputs.numel()
    tensors = batch.values() if isinstance(batch, Mapping) else batch
    return next((len(value) for value in tensors if isinstance(value, Tensor) and value.ndim), 0)


def accumulation_steps(tokens_per_step: int, micro_batch: int, sequence_length: int) -> int:
    """Micro-batches per optimizer step; raises ConfigError with the nearest valid values if it is not an integer."""
    tokens = micro_batch * sequence_length
    if tokens_per_step % tokens:
        below = tokens_per_step // tokens * tokens
        nearest = f"{below} or {below + tokens}" if below else f"{tokens}"
        raise ConfigError(
            f"train.tokens_per_step = {tokens_per_step} is not a multiple of train.micro_batch x sequence length = "
            f"{micro_batch} x {sequence_length} = {tokens}: use {nearest}"
        )
    return tokens_per_step // tokens


def default_micro_batch(
    config: GPTConfig, tokens_per_step: int, sequence_length: int, device: torch.device, *, itemsize: int, reserve: int
) -> int:
    """The largest micro-batch that divides the step and fits in 80% of free memory minus `reserve` bytes."""
    sequences = tokens_per_step // sequence_length
    if tokens_per_step % sequence_length:
        below = sequences * sequence_length
        raise ConfigError(
            f"train.tokens_per_step = {tokens_per_step} is not a multiple of the sequence length {sequence_length}: "
            f"use {below or sequence_length} or {below + sequence_length}"
        )
    free = free_memory(device)
    limit = (CPU_MICRO_BATCH_TOKENS if free is None else MAX_MICRO_BATCH_TOKENS) // sequence_length
    if free is not None:
        budget = int(0.8 * free) - reserve
        limit = min(limit, budget // (activation_bytes(config, itemsize) * sequence_length))
    return max(count for count in range(1, min(sequences, max(limit, 1)) + 1) if sequences % count == 0)


def activation_bytes(config: GPTConfig, itemsize: int) -> int:
    """Estimated bytes of activations per token: what norms, matrix products and MLPs save for backward."""
    attention = (2 * config.num_heads + 2 * config.kv_heads) * config.head_dim
    mlp = config.intermediate_size * (4 if config.gated_mlp else 2)
    return config.num_layers * (6 * config.embd_size + attention + mlp) * itemsize
