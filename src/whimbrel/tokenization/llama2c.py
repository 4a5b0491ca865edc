"""Tokenizers in llama2.c's binary format: pieces with scores, converted to the same BPE in `tokenizers`."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from whimbrel.base.errors import DataError
from whimbrel.tokenization.tokenizer import Tokenizer

__all__ = ["load_llama2c_tokenizer"]

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
"""The first three ids; the 256 single bytes follow."""
SPACE = "▁"


def load_llama2c_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a llama2.c tokenizer. Its document separator is `<s>`, as in models trained by llama2.c."""
    pieces = _read_pieces(Path(path))
    vocabulary = {piece: index for index, (piece, _) in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise DataError(f"expected a llama2.c tokenizer, got {path}, which has a duplicate piece")
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
