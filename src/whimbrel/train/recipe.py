"""What a configuration names: the model, token shards, tokenizer, and how many sequences fit in a pass."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.progress import format_bytes
from whimbrel.data import TokenDataLoader, read_manifest
from whimbrel.data.shards import has_split
from whimbrel.models import GPT
from whimbrel.precision import torch_switches
from whimbrel.tokenization import Tokenizer, load_tokenizer
from whimbrel.train.batches import default_micro_batch
from whimbrel.train.config import RunConfig

__all__ = ["build_batches", "build_validation", "choose_micro_batch", "draw_model", "find_tokenizer"]

MAX_EPOCHS_PER_STEP = 16
"""Maximum number of epochs in one optimizer step; more is a mistake in the settings."""
BYTES_EACH = 16
"""Of a parameter: itself, its gradient and Adam's two moments, in fp32."""


def draw_model(config: RunConfig) -> GPT:
    """The model with its initial weights where torch makes its tensors: on the CPU, a seed means the same for all."""
    itemsize = torch.empty(0, dtype=getattr(torch, config.train.default_dtype or "float32")).itemsize
    needed, memory = config.model.matrix_parameters * itemsize, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ConfigError(
            f"the model has {config.model.matrix_parameters:,} parameters ({format_bytes(needed)}), more than this "
            f"machine's memory ({format_bytes(memory)}): choose a smaller model, or train.default_dtype = 'bfloat16'"
        )
    torch.manual_seed(config.train.seed)
    with torch_switches(default_dtype=config.train.default_dtype):
        return GPT(config.model)


def build_batches(config: RunConfig, device: torch.device, micro_batch: int) -> TokenDataLoader:
    """The loader of the training tokens; one that the model has no row for is refused when it is read."""
    loader = TokenDataLoader(
        config.data.path,
        micro_batch,
        config.sequence_length,
        device=device,
        seed=config.data.shuffle_seed,
        documents=config.data.documents,
        eot_id=config.data.eot_id,
        vocab_size=config.model.vocab_size,
        verify=config.data.verify,
    )
    if config.tokens_per_step > MAX_EPOCHS_PER_STEP * loader.total_tokens:
        raise ConfigError(
            f"train.tokens_per_step = {config.tokens_per_step:,} is over {MAX_EPOCHS_PER_STEP} epochs of the "
            f"{loader.total_tokens:,} training tokens in {config.data.path}: lower it or prepare more text"
        )
    return loader


def build_validation(config: RunConfig, device: torch.device, micro_batch: int) -> TokenDataLoader | None:
    """The loader of the held-out tokens, in the order they lie; None where there are none and none were asked for."""
    path = config.validation.path or config.data.path
    asked = config.validation.path is not None or config.validation.every is not None
    if not asked and not has_split(path, "val"):
        return None
    loader = TokenDataLoader(
        path,
        config.validation.micro_batch or micro_batch,
        config.sequence_length,
        split="val",
        device=device,
        documents="join" if config.data.documents == "join" else "mask",
        eot_id=config.data.eot_id,
        vocab_size=config.model.vocab_size,
        verify=config.data.verify,
    )
    _warn_of_shared_shards(config.data.path, path)
    tokens = config.validation.tokens or loader.total_tokens
    if min(tokens, loader.total_tokens - 1) < loader.T:
        raise ConfigError(
            f"validation has {tokens} tokens in {path}, fewer than one sequence of {loader.T}: hold out more, or lower "
            "data.sequence_length"
        )
    return loader


def _warn_of_shared_shards(training: Path, validation: Path) -> None:
    """Warn if a validation shard is identical to a training shard, by the hashes in the manifests."""
    manifests = read_manifest(training), read_manifest(validation)
    if manifests[0] is None or manifests[1] is None:
        return
    trained = {shard.sha256: shard.file for shard in manifests[0].of_split("train")}
    for shard in manifests[1].of_split("val"):
        if shard.sha256 in trained:
            logging.getLogger(__name__).warning(
                "validation shard %s has the same content as training shard %s: the validation loss measures "
                "memorization", validation / shard.file, training / trained[shard.sha256],
            )  # fmt: skip


def find_tokenizer(config: RunConfig, eot_id: int) -> Tokenizer | None:
    """The tokenizer that the shards were made with, for checkpoints to carry; None where it is not known."""
    path = config.data.path
    manifest, beside = read_manifest(path), (path / "tokenizer.json").exists()
    tokenizer = load_tokenizer(path if beside else "gpt2")
    vocab_size = tokenizer.vocab_size if manifest is None else manifest.tokenizer.vocab_size
    if manifest is None and tokenizer.eot_id != eot_id:
        return None
    if manifest is not None and manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        if not beside:
            return None
        raise DataError(f"{path / 'tokenizer.json'} is not the tokenizer that its shards were made with: restore it")
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{path} was made with a vocabulary of {vocab_size} tokens and model.vocab_size is "
            f"{config.model.vocab_size}: set --model.vocab_size={vocab_size}, or prepare with another tokenizer"
        )
    return tokenizer


def choose_micro_batch(config: RunConfig, model: GPT, device: torch.device) -> int:
    """The micro-batch asked for, or the one that fits beside weights, gradients, optimizer and a chunk of logits."""
    if config.train.micro_batch is not None:
        return config.train.micro_batch
    return default_micro_batch(
        config.model,
        config.tokens_per_step,
        config.sequence_length,
        device,
        itemsize=4 if config.train.precision == "fp32" else 2,
        reserve=BYTES_EACH * model.num_parameters() + 2 * 2**30,
    )
