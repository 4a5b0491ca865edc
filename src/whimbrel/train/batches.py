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
LARGEST_MICRO_BATCH = 65_536
"""Tokens in one pass beyond which a GPU gains nothing more."""
CPU_MICRO_BATCH = 4096
"""Tokens in one pass on a CPU: enough to fill its cores, little enough to stay near its caches."""


class Batches(Protocol):
    """Where micro-batches come from."""

    def begin(self, epoch: int) -> None:
        """Go to the start of a pass, or stay where a resume has put the cursor in it."""

    def next_batch(self) -> Any | None:
        """The next one, on the device; None where the pass has ended."""

    def exhausted(self) -> bool:
        """Whether the pass has ended."""

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Optimizer steps that so many passes take."""

    @property
    def epoch(self) -> float:
        """Passes done, with the part of the one under way."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor."""


class TokenBatches:
    """Token shards: a cyclic stream, so a step may cross from one pass into the next, and ends the one it began in."""

    def __init__(self, loader: TokenDataLoader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self._pass = 0

    def begin(self, epoch: int) -> None:
        """The stream goes on; the pass ends where it crosses into a further one."""
        self._pass = max(epoch, self.loader.epoch)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        x, y = self.loader.next_batch()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def exhausted(self) -> bool:
        """Whether the stream has crossed into a further pass."""
        return self.loader.epoch > self._pass

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Whole steps that cover so many passes."""
        loader = self.loader
        tokens = accumulation * loader.B * loader.T * loader.world_size
        return max(1, -int(-epochs * loader.total_tokens // tokens))

    @property
    def epoch(self) -> float:
        """Tokens read over tokens there are."""
        return self.loader.position / self.loader.total_tokens

    def state_dict(self) -> dict[str, Any]:
        """The loader's cursor, and hashes that identify its tokens."""
        return self.loader.state_dict() | self._identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor of the same stream."""
        kinds = {"tokenizer": "shards of another tokenizer", "tokens": "shards with other tokens"}
        for name, kind in kinds.items():
            theirs, ours = state.get(name), self._identity[name]
            if theirs is not None and ours is not None and theirs != ours:
                raise DataError(
                    f"{self.loader.root} has {kind} than the checkpoint was trained on ({name} {ours[:12]}, there "
                    f"{theirs[:12]}): resume with the same data, or choose another output_dir"
                )
        self.loader.load_state_dict(state)

    @cached_property
    def _identity(self) -> dict[str, str | None]:
        """Hashes of the tokenizer, where a manifest names it, and of the tokens at both ends of the stream."""
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
    """The batches of whatever was given as a dataset; a token loader has its own size, any other needs one."""
    if isinstance(dataset, TokenDataLoader):
        if batch_size not in (None, dataset.B):
            raise ConfigError(
                f"the token loader gives batches of B = {dataset.B} and the batch size is set to {batch_size}: make "
                "them equal"
            )
        _check_unused_settings(loader, "a token loader, which reads ahead by itself")
        return TokenBatches(dataset, device)
    assert batch_size is not None
    if isinstance(dataset, DataLoader):
        own = dataset.batch_size
        if own is not None and batch_size not in (own, DEFAULT_BATCH_SIZE):
            raise ConfigError(
                f"the DataLoader has batch size {own}, but the batch size is set to {batch_size}: make them equal"
            )
        if shuffle:
            _check_unused_settings(loader, "a DataLoader, which has its own")
        return LoaderBatches(dataset, device, seed=seed)
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise ConfigError(
            f"a {type(dataset).__name__} is no dataset: give a TokenDataLoader, a sequence or an iterable of dicts"
        )
    return DatasetBatches(dataset, batch_size, device, collate=collate, seed=seed, shuffle=shuffle, loader=loader)


def _check_unused_settings(loader: LoaderConfig, kind: str) -> None:
    for field in fields(LoaderConfig):
        if (value := getattr(loader, field.name)) != field.default:
            setting = f"loader.{field.name}"
            raise ConfigError(f"{setting} = {value} has no effect on {kind}: leave {argument_name(setting)} out")


def held_out(batches: TokenBatches, tokens: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `tokens` (None: all) of a stream as batches, each sequence once whatever the batch size."""
    loader = batches.loader
    left = min(tokens or loader.total_tokens, loader.total_tokens - 1) // loader.T
    loader.reset()
    while left > 0:
        x, y = batches.next_batch()
        y[left:] = IGNORE_INDEX
        left -= loader.B
        yield x, y


def token_count(batch: Any) -> int:
    """Tokens that went in; for inputs that are no tokens, examples."""
    inputs = batch.get("input_ids") if isinstance(batch, Mapping) else batch[0]
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        return inputs.numel()
    tensors = batch.values() if isinstance(batch, Mapping) else batch
    return next((len(value) for value in tensors if isinstance(value, Tensor) and value.ndim), 0)


def accumulation_steps(tokens_per_step: int, micro_batch: int, sequence_length: int) -> int:
    """Micro-batches in an optimizer step; a total that they do not divide is refused with the nearest that they do."""
    tokens = micro_batch * sequence_length
    if tokens_per_step % tokens:
        below = tokens_per_step // tokens * tokens
        nearest = f"{below} or {below + tokens}" if below else f"{tokens}"
        raise ConfigError(
            f"train.tokens_per_step = {tokens_per_step} is not a multiple of train.micro_batch x sequence length = "
            f"{micro_batch} x {sequence_length} = {tokens}: the nearest legal total is {nearest}"
        )
    return tokens_per_step // tokens


def default_micro_batch(
    config: GPTConfig, tokens_per_step: int, sequence_length: int, device: torch.device, *, itemsize: int, reserve: int
) -> int:
    """The most sequences a pass can take: a divisor of the step that fits in 80% of free memory less `reserve`."""
    sequences = tokens_per_step // sequence_length
    if tokens_per_step % sequence_length:
        below = sequences * sequence_length
        raise ConfigError(
            f"train.tokens_per_step = {tokens_per_step} is not a multiple of the sequence length {sequence_length}: "
            f"the nearest legal totals are {below or sequence_length} and {below + sequence_length}"
        )
    free = free_memory(device)
    limit = (CPU_MICRO_BATCH if free is None else LARGEST_MICRO_BATCH) // sequence_length
    if free is not None:
        room = int(0.8 * free) - reserve
        limit = min(limit, room // (activation_bytes(config, itemsize) * sequence_length))
    return max(count for count in range(1, min(sequences, max(limit, 1)) + 1) if sequences % count == 0)


def activation_bytes(config: GPTConfig, itemsize: int) -> int:
    """About how many bytes a token leaves behind for backward: what each block's norms, products and MLP keep."""
    attention = (2 * config.num_heads + 2 * config.kv_heads) * config.head_width
    mlp = config.mlp_width * (4 if config.gated_mlp else 2)
    return config.num_layers * (6 * config.embd_size + attention + mlp) * itemsize
