"""The token shard: 256 int32 of header `[magic, version, num_tokens, 0...]`, then the tokens. llm.c reads the same."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import DataError
from whimbrel.base.files import atomic_file

__all__ = ["HEADER_BYTES", "Header", "MOST_TOKENS", "check_ids", "read_header", "read_shard", "write_shard"]

HEADER_INTS, HEADER_BYTES = 256, 1024
FORMS: dict[np.dtype[Any], tuple[int, int]] = {np.dtype(np.uint16): (20240520, 1), np.dtype(np.uint32): (20240801, 7)}
"""Magic number and version of each token type."""

MOST_TOKENS = 2**31 - 1
"""What the header's int32 can count."""


def write_shard(path: str | os.PathLike[str], tokens: NDArray[Any]) -> None:
    """Write 1-D uint16 or uint32 `tokens` as one shard; the file is whole or absent."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype not in FORMS:
        given = f"{tokens.ndim}-D {tokens.dtype}"
        raise DataError(f"cannot write {path}: given {given} tokens, a shard holds a 1-D array of uint16 or uint32")
    if not 0 < len(tokens) <= MOST_TOKENS:
        raise DataError(f"cannot write {path}: given {len(tokens):,} tokens, a shard holds 1 to {MOST_TOKENS:,}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = *FORMS[tokens.dtype], len(tokens)
    with atomic_file(path) as file:
        file.write(header.tobytes())
        file.write(np.ascontiguousarray(tokens, dtype=tokens.dtype.newbyteorder("<")).data)


class Header(NamedTuple):
    """A shard's header, checked against the file size."""

    dtype: np.dtype[Any]
    tokens: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """The dtype and number of a shard's tokens."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a pipe would block
            raise DataError(f"{path} is not a regular file: remove it or move it elsewhere")
        with open(path, "rb") as file:
            raw, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read shard {path}: {error.strerror}") from error
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{path} is not a token shard: {size} bytes, the header alone has {HEADER_BYTES}")
    magic, version, count = (int(number) for number in np.frombuffer(raw, dtype="<i4")[:3])
    dtype = next((dtype for dtype, form in FORMS.items() if form[0] == magic), None)
    if dtype is None:
        known = " or ".join(str(form[0]) for form in FORMS.values())
        raise DataError(f"{path} is not a token shard: magic number {magic}, expected {known}; remove or rename it")
    if version != FORMS[dtype][1]:
        raise DataError(f"{path} has shard version {version}, expected {FORMS[dtype][1]} for magic number {magic}")
    if count < 1:
        raise DataError(f"{path} is an empty shard: its header counts {count} tokens; remove it or prepare it again")
    if size != HEADER_BYTES + count * dtype.itemsize:
        held = (size - HEADER_BYTES) / dtype.itemsize
        fault = "truncated" if held < count else "longer than its header says"
        raise DataError(f"{path} is {fault}: the header counts {count:,} tokens, the file holds {held:,g}")
    return Header(dtype.newbyteorder("<"), count)


def read_shard(path: str | os.PathLike[str], vocab_size: int | None = None) -> NDArray[Any]:
    """Memory-map the tokens of a shard read-only. Checks header and size, and with `vocab_size` every token id."""
    dtype, count = read_header(path)
    try:
        tokens = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
    except OSError as error:
        raise DataError(f"cannot map shard {path}: {error.strerror}") from error
    if vocab_size is not None:
        for start in range(0, count, 1 << 24):
            check_ids(tokens[start : start + (1 << 24)], vocab_size, Path(path), start)
    return tokens


def check_ids(tokens: NDArray[Any], vocab_size: int, path: Path, start: int) -> None:
    """Refuse ids over the vocabulary; `start` is the place of `tokens` in the shard `path`."""
    if int(tokens.max()) >= vocab_size:
        place = int(np.argmax(tokens >= vocab_size))
        raise DataError(
            f"{path} holds token id {int(tokens[place])} at token {start + place:,}: the vocabulary has {vocab_size} "
            "ids; prepare the text again with this model's tokenizer"
        )
