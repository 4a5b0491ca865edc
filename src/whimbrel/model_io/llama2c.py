"""llama2.c files: models of version 0 (a header of seven int32, then all weights in fp32), and tokenizers."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from whimbrel.base.errors import CheckpointError, ConfigError, DataError
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import materialize_
from whimbrel.tokenization import Tokenizer

__all__ = ["load_llama2c", "load_llama2c_tokenizer", "read_llama2c_config"]

MAGIC = 0x616B3432
"""The first int32 of version 1 and later; version 0 has no magic number."""
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
"""The first three ids of a tokenizer; the 256 single bytes follow."""
SPACE = "▁"


class Header(NamedTuple):
    """A negative `vocab_size` means that the head is not tied."""

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_length: int


def read_llama2c_config(path: Path) -> GPTConfig:
    return _config(path, _read_header(path))


def load_llama2c(path: Path) -> GPT:
    """Load a llama2.c file, in fp32 on the CPU."""
    header = _read_header(path)
    config = _config(path, header)
    shapes = _shapes(header, config)
    expected = 4 * (len(header) + sum(int(np.prod(shape)) for shape in shapes.values()))
    if path.stat().st_size != expected:
        raise CheckpointError(
            f"{path}: expected {expected} bytes for this header, got {path.stat().st_size}: the file is truncated, or "
            "not a llama2.c model"
        )
    flat = torch.from_numpy(np.fromfile(path, dtype="<f4", offset=4 * len(header)))
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), flat.split(sizes), strict=True)}
    with torch.device("meta"):
        model = GPT(config)
    materialize_(model, "cpu")
    model.zero_padding()
    _copy_weights(model, tensors)
    return model


def _read_header(path: Path) -> Header:
    numbers = np.fromfile(path, dtype="<i4", count=len(Header._fields)).tolist()
    if len(numbers) < len(Header._fields):
        raise CheckpointError(f"{path} is too short for a llama2.c model")
    if numbers[0] == MAGIC:
        raise CheckpointError(f"{path}: expected llama2.c version 0, got version {numbers[1]}: export it as version 0")
    return Header(*numbers)


def _config(path: Path, header: Header) -> GPTConfig:
    try:
        return GPTConfig(
            context_length=header.context_length,
            vocab_size=abs(header.vocab_size),
            num_layers=header.num_layers,
            embd_size=header.dim,
            num_heads=header.num_heads,
            num_kv_heads=header.num_kv_heads,
            mlp_size=header.hidden_dim,
            norm="rms",
            position="rope",
            activation="silu",
            gated_mlp=True,
            bias="none",
            tied_head=header.vocab_size > 0,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path} is not a llama2.c model: {error}") from error


def _shapes(header: Header, config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all arrays, in file order."""
    layers, dim, hidden = header.num_layers, header.dim, header.hidden_dim
    keys, half_head = config.kv_heads * config.head_dim, config.head_dim // 2
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, dim),
        "attention_norm": (layers, dim),
        "query": (layers, dim, dim),
        "key": (layers, keys, dim),
        "value": (layers, keys, dim),
        "output": (layers, dim, dim),
        "mlp_norm": (layers, dim),
        "gate": (layers, hidden, dim),
        "down": (layers, dim, hidden),
        "up": (layers, hidden, dim),
        "final_norm": (dim,),
        "rope_cosine": (config.context_length, half_head),
        "rope_sine": (config.context_length, half_head),
    }
    return shapes if config.tied_head else shapes | {"head": (config.vocab_size, dim)}


@torch.no_grad()
def _copy_weights(model: GPT, tensors: dict[str, Tensor]) -> None:
    config = model.config
    state = dict(model.named_parameters())
    state["transformer.wte.weight"][: config.vocab_size] = tensors["embedding"]
    state["transformer.ln_f.weight"].copy_(tensors["final_norm"])
    if not config.tied_head:
        state["lm_head.weight"][: config.vocab_size] = tensors["head"]
    for layer in range(config.num_layers):
        layer_tensors = {name: tensor[layer] for name, tensor in tensors.items() if tensor.size(0) == config.num_layers}
        query, key = (_split_rope_rows(layer_tensors[name], config.head_dim) for name in ("query", "key"))
        block = f"transformer.h.{layer}"
        state[f"{block}.ln_1.weight"].copy_(layer_tensors["attention_norm"])
        state[f"{block}.attn.c_attn.weight"].copy_(torch.cat((query, key, layer_tensors["value"])))
        state[f"{block}.attn.c_proj.weight"].copy_(layer_tensors["output"])
        state[f"{block}.ln_2.weight"].copy_(layer_tensors["mlp_norm"])
        state[f"{block}.mlp.c_fc.weight"].copy_(torch.cat((layer_tensors["gate"], layer_tensors["up"])))
        state[f"{block}.mlp.c_proj.weight"].copy_(layer_tensors["down"])


def _split_rope_rows(weight: Tensor, head_size: int) -> Tensor:
    """Reorder the rows of each head: llama2.c pairs (2i, 2i + 1), we pair (i, i + size / 2)."""
    rows, columns = weight.shape
    return weight.view(-1, head_size // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


# Tokenizer: pieces with scores, converted to the same BPE in `tokenizers`


def load_llama2c_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a llama2.c tokenizer. Its document separator is `<s>`, as in models trained by llama2.c."""
    pieces = _read_pieces(Path(path))
    vocabulary = {piece: index for index, (piece, _) in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise DataError(f"expected a llama2.c tokenizer, got {path} with duplicate pieces")
    model = BPE(vocabulary, _merges(pieces, vocabulary), unk_token=SPECIAL_TOKENS[0], fuse_unk=True, byte_fallback=True)
    pipeline = Pipeline(model)
    pipeline.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return Tokenizer(pipeline, eot_token="<s>")


def _read_pieces(path: Path) -> list[tuple[str, float]]:
    """All pieces with their scores, in id order.

    File format: int32 length of the longest piece, then for each piece float32 score, int32 length, UTF-8 bytes.
    """
    data = path.read_bytes()
    pieces: list[tuple[str, float]] = []
    offset = 4
    while offset < len(data):
        try:
            score, length = struct.unpack_from("<fi", data, offset)
            text = struct.unpack_from(f"{length}s", data, offset + 8)[0].decode("utf-8")
        except (struct.error, UnicodeDecodeError) as error:
            where = f"piece {len(pieces)}, byte {offset}"
            raise DataError(f"expected a llama2.c tokenizer, got {path}: {where}: {error}") from error
        # llama2.c writes special tokens with newlines around them.
        special = len(pieces) < len(SPECIAL_TOKENS)
        pieces.append((SPECIAL_TOKENS[len(pieces)] if special else text.replace(" ", SPACE), score))
        offset += 8 + length
    minimum = len(SPECIAL_TOKENS) + 256
    if len(pieces) < minimum:
        raise DataError(f"expected a llama2.c tokenizer of at least {minimum} pieces, got {path} with {len(pieces)}")
    return pieces


def _merges(pieces: list[tuple[str, float]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every split of a piece into two others, highest score first: the order in which llama2.c merges."""
    splits = [
        (-score, vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in pieces[len(SPECIAL_TOKENS) + 256 :]
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return [(left, right) for _, _, _, left, right in sorted(splits)]
