"""Tokenizers in llama2.c's format."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from whimbrel.base.errors import DataError
from whimbrel.model_io.llama2c import load_llama2c_tokenizer
from whimbrel.tokenization import load_tokenizer

LETTERS = [" ", "a", "b", "c", "d"]
MERGED = ["ab", " a", "abc", " ab", "cd", "abcd"]
"""In order of score, highest first."""


def write(path: Path, pieces: list[str]) -> Path:
    scores = [0.0] * (259 + len(LETTERS)) + [-float(rank) for rank in range(1, len(MERGED) + 1)]
    content = struct.pack("<i", max(len(piece.encode()) for piece in pieces))
    for piece, score in zip(pieces, scores, strict=False):
        content += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
    path.write_bytes(content)
    return path


def pieces() -> list[str]:
    return ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *MERGED]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tok.bin", pieces())


def merged_by_score(text: str) -> list[int]:
    """llama2.c's algorithm: repeatedly merge the neighbors whose merged piece has the highest score."""
    vocabulary = {piece: 259 + index for index, piece in enumerate([*LETTERS, *MERGED])}
    parts = list(" " + text)
    while True:
        joined = [left + right for left, right in pairwise(parts)]
        known = [(MERGED.index(piece), at) for at, piece in enumerate(joined) if piece in MERGED]
        if not known:
            return [vocabulary[part] for part in parts]
        _, at = min(known)
        parts[at : at + 2] = [joined[at]]


def test_pieces_merge_in_order_of_score(path):
    tokenizer, random = load_llama2c_tokenizer(path), Random(0)
    for _ in range(200):
        text = "".join(random.choices(LETTERS, k=random.randint(1, 12)))
        assert tokenizer.encode(text) == merged_by_score(text), text


def test_the_end_of_text_token_is_bos(path):
    tokenizer = load_llama2c_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.eot_token, tokenizer.eot_id) == (259 + 11, "<s>", 1)
    assert tokenizer.pipeline.encode("a").ids == [1, *tokenizer.encode("a")]


@pytest.mark.parametrize("text", ["abcd a b", "  two  spaces", "é 漢 🐦", "line\nline\ttab", "<s>"])
def test_decode_inverts_encode(path, tmp_path, text):
    tokenizer = load_llama2c_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "piece 269, byte"),
        (lambda content: content[:501], "expected a llama2.c tokenizer"),
        (lambda content: b"\0" * 4, "with 0"),
        (lambda content: content[:-4] + b"\xff\xfe\xfd\xfc", "piece 269"),
    ],
)
def test_a_corrupt_file_is_rejected(path, damage, message):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        load_llama2c_tokenizer(path)


def test_a_duplicate_piece_is_rejected(tmp_path):
    with pytest.raises(DataError, match="duplicate piece"):
        load_llama2c_tokenizer(write(tmp_path / "tok.bin", [*pieces()[:-1], "ab"]))
