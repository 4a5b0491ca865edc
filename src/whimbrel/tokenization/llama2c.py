"""Tokenizers in llama2.c's binary format: pieces with scores, turned into the `tokenizers` form of the same BPE."""

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

SPECIAL = ("<unk>", "<s>", "</s>")
"""The first three ids; the 256 single bytes follow."""
SPACE = "▁"


def load_llama2c_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a llama2.c file; `<s>` opens a document, as it does in the models that llama2.c trains."""
    pieces = _read_pieces(Path(path))
    vocabulary = {piece: index for index, (piece, _) in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise DataError(f"{path} names a piece twice: it is not a llama2.c tokenizer")
    model = BPE(vocabulary, _merges(pieces, vocabulary), unk_token=SPECIAL[0], fuse_unk=True, byte_fallback=True)
    pipeline = Pipeline(model)
    pipeline.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return Tokenizer(pipeline, eot_token="<s>")


def _read_pieces(path: Path) -> list[tuple[str, float]]:
    """Every piece and its score, in the order of ids."""
    data = path.read_bytes()
    pieces: list[tuple[str, float]] = []
    at = 4  # the first number is the length of the longest piece
    while at < len(data):
        try:
            score, length = struct.unpack_from("<fi", data, at)
            raw = struct.unpack_from(f"{length}s", data, at + 8)[0]
            text = raw.decode("utf-8")
        except (struct.error, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not a llama2.c tokenizer: piece {len(pieces)}, byte {at}: {error}") from error
        special = len(pieces) < len(SPECIAL)
        pieces.append((SPECIAL[len(pieces)] if special else text.replace(" ", SPACE), score))
        at += 8 + length
    if len(pieces) < len(SPECIAL) + 256:
        raise DataError(f"{path} has {len(pieces)} pieces; a llama2.c tokenizer has at least {len(SPECIAL) + 256}")
    return pieces


def _merges(pieces: list[tuple[str, float]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to build a piece from two others, best score first: the order in which llama2.c merges."""
    found = [
        (-score, vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in pieces[len(SPECIAL) + 256 :]
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return [(left, right) for _, _, _, left, right in sorted(found)]
