from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from whimbrel.base.errors import DataError
from whimbrel.data import read_shard, write_shard

TOKENS = np.array([50256, 1, 2, 3], dtype=np.uint16)


@pytest.mark.parametrize(
    ("dtype", "magic", "version"), [(np.uint16, 20240520, 1), (np.uint32, 20240801, 7)], ids=["uint16", "uint32"]
)
def test_the_file_is_header_then_tokens(dtype: type, magic: int, version: int, tmp_path: Path) -> None:
    tokens = np.array([50256, 7, np.iinfo(dtype).max], dtype=dtype)
    write_shard(tmp_path / "a.bin", tokens)
    raw = (tmp_path / "a.bin").read_bytes()
    header = np.frombuffer(raw[:1024], dtype="<i4")
    assert header[:3].tolist() == [magic, version, 3]
    assert not header[3:].any()
    assert raw[1024:] == tokens.astype(tokens.dtype.newbyteorder("<")).tobytes()
    read = read_shard(tmp_path / "a.bin")
    assert read.dtype == dtype
    assert read.tolist() == tokens.tolist()


@pytest.mark.parametrize(
    "tokens",
    [
        np.zeros((2, 2), dtype=np.uint16),
        np.zeros(3, dtype=np.int64),
        np.zeros(3, dtype=np.float32),
        np.zeros(0, dtype=np.uint16),
    ],
    ids=["2-D", "int64", "float32", "empty"],
)
def test_write_refuses_what_a_shard_cannot_hold(tokens: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.bin"):
        write_shard(tmp_path / "a.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_a_strided_view_is_written_in_order(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", TOKENS[::2])
    assert read_shard(tmp_path / "a.bin").tolist() == [50256, 2]


def damaged(path: Path, change: str) -> None:
    write_shard(path, TOKENS)
    raw = bytearray(path.read_bytes())
    match change:
        case "truncated":
            del raw[-1:]
        case "longer":
            raw += b"\0\0"
        case "magic":
            raw[:4] = b"PK\3\4"
        case "version":
            raw[4:8] = (9).to_bytes(4, "little")
        case "count":
            raw[8:12] = (0).to_bytes(4, "little")
        case "short":
            raw = raw[:100]
        case "nothing":
            raw = bytearray()
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("truncated", "is truncated: the header counts 4 tokens, the file holds 3.5"),
        ("longer", "longer than its header says"),
        ("magic", "magic number 67324752, expected 20240520 or 20240801"),
        ("version", "shard version 9, expected 1"),
        ("count", "empty shard"),
        ("short", "100 bytes, the header alone has 1024"),
        ("nothing", "0 bytes, the header alone has 1024"),
    ],
)
def test_a_damaged_shard_is_named_with_its_fault(change: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "x_train_000000.bin"
    damaged(path, change)
    with pytest.raises(DataError) as error:
        read_shard(path)
    assert fault in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_id_over_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", TOKENS)
    assert len(read_shard(tmp_path / "a.bin", vocab_size=50257)) == 4
    with pytest.raises(DataError, match=r"a\.bin holds token id 50256 at token 0: the vocabulary has 50256 ids"):
        read_shard(tmp_path / "a.bin", vocab_size=50256)


def test_a_missing_shard_is_an_error_of_the_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.bin: No such file"):
        read_shard(tmp_path / "absent.bin")
