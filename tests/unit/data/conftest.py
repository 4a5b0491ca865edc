"""Documents for tests, and files of every supported type."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


class Corpus:
    """Builder of test documents and source files."""

    def documents(self, count: int, seed: int = 0) -> list[str]:
        """Texts of very different lengths, in several scripts, some containing special tokens as text."""
        pick = random.Random(seed)
        words = ["bird", "Ünïcode", "日本", "<|endoftext|>", "  ", "1984", "don't", "\n", "fly", "marsh", "🐦"]
        return [" ".join(pick.choices(words, k=pick.randint(1, 400))) for _ in range(count)]

    def write(self, path: Path, texts: list[str]) -> Path:
        """Write `texts` in the format of the file name."""
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=50)
            return path
        if ".jsonl" in path.suffixes:
            raw = "".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(texts)).encode()
        else:
            raw = "<|doc|>".join(texts).encode()
        if path.suffix == ".gz":
            raw = gzip.compress(raw)
        if path.suffix == ".zst":
            raw = pa.Codec("zstd").compress(raw, asbytes=True)
        path.write_bytes(raw)
        return path

    def bytes_of(self, folder: Path) -> dict[str, bytes]:
        """The content of every file in a directory, by name."""
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Generates texts and writes them to files."""
    return Corpus()


@pytest.fixture(scope="session")
def texts(corpus: Corpus) -> list[str]:
    """Four hundred documents."""
    return corpus.documents(400)
