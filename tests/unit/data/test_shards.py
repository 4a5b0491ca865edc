"""The shard format, and the shards of a split as one stream."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from whimbrel.base.errors import DataError
from whimbrel.data import TokenDataLoader, read_shard, write_shard
from whimbrel.data.shards import has_split, split_files

EOT = 50256
TOKENS = np.array([50256, 1, 2, 3], dtype=np.uint16)


@pytest.mark.parametrize(
    ("dtype", "magic", "version"), [(np.uint16, 20240520, 1), (np.uint32, 20240801, 7)], ids=["uint16", "uint32"]
)
def test_file_is_header_followed_by_tokens(dtype: type, magic: int, version: int, tmp_path: Path) -> None:
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
def test_write_shard_rejects_invalid_arrays(tokens: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.bin"):
        write_shard(tmp_path / "a.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_strided_view_is_written_in_order(tmp_path: Path) -> None:
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
        ("truncated", "is truncated: the header says 4 tokens, the file has 3.5"),
        ("longer", "longer than its header says"),
        ("magic", "magic number 67324752, expected 20240520 or 20240801"),
        ("version", "shard version 9, expected 1"),
        ("count", "empty shard"),
        ("short", "100 bytes, but the header"),
        ("nothing", "0 bytes, but the header"),
    ],
)
def test_damaged_shard_is_reported_with_path_and_reason(change: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "x_train_000000.bin"
    damaged(path, change)
    with pytest.raises(DataError) as error:
        read_shard(path)
    assert fault in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_token_id_outside_the_vocabulary_is_reported_with_its_offset(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", TOKENS)
    assert len(read_shard(tmp_path / "a.bin", vocab_size=50257)) == 4
    with pytest.raises(DataError, match=r"a\.bin .*token id 50256 at token 0"):
        read_shard(tmp_path / "a.bin", vocab_size=50256)


def test_missing_shard_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.bin: No such file"):
        read_shard(tmp_path / "absent.bin")


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (["TinyStories_train.bin"], ["TinyStories_val.bin"]),
        (["fineweb_train_000001.bin", "fineweb_train_000002.bin"], ["fineweb_val_000000.bin"]),
        (["a-train-1.bin"], ["a-valid-1.bin"]),
        (["train.bin"], ["validation.bin"]),
        (["my_val_set_train_0.bin"], ["my_train_set_val_0.bin"]),
    ],
)
def test_split_names_of_other_tools_are_recognized(tmp_path: Path, train: list[str], val: list[str]) -> None:
    for number, name in enumerate([*train, *val]):
        write_shard(tmp_path / name, np.array([EOT, number, number], dtype=np.uint16))
    assert [path.name for path in split_files(tmp_path, "train")] == train
    assert [path.name for path in split_files(tmp_path, "val")] == val
    assert has_split(tmp_path, "val")
    assert TokenDataLoader(tmp_path, 1, 2).total_tokens == 3 * len(train)


def test_mixing_names_with_and_without_split_is_rejected(tmp_path: Path) -> None:
    write_shard(tmp_path / "fineweb_000000.bin", np.array([EOT, 1, 2], dtype=np.uint16))
    assert [path.name for path in split_files(tmp_path, "train")] == ["fineweb_000000.bin"]
    assert not has_split(tmp_path, "val")
    write_shard(tmp_path / "fineweb_val_000000.bin", np.array([EOT, 1, 2], dtype=np.uint16))
    for split in ("train", "val"):
        with pytest.raises(DataError, match=r"expected .* got fineweb_000000\.bin"):
            split_files(tmp_path, split)


def test_many_shards_use_few_file_descriptors(tmp_path: Path) -> None:
    for index in range(100):
        write_shard(tmp_path / f"x_train_{index:06d}.bin", np.array([EOT, index], dtype=np.uint16))
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from whimbrel.data import TokenDataLoader
x, _ = TokenDataLoader(sys.argv[1], 1, 200, seed=1, block=2).next_batch()
print(sorted(x[0].tolist()) == sorted([50256] * 100 + list(range(100))))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_named_pipe_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x_train_000000.bin")
    with pytest.raises(DataError, match="not a regular file"):
        TokenDataLoader(tmp_path, 1, 4)


def test_shards_without_a_split_in_their_name_are_training_data(tmp_path: Path) -> None:
    for index in range(2):
        write_shard(tmp_path / f"fineweb_{index:06d}.bin", TOKENS)
    assert TokenDataLoader(tmp_path, 1, 4).total_tokens == 2 * len(TOKENS)
    with pytest.raises(DataError, match="has no val shards"):
        TokenDataLoader(tmp_path, 1, 4, split="val")


def test_missing_manifest_logs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shard(tmp_path / "some_train_000000.bin", TOKENS)
    write_shard(tmp_path / "some_val_000000.bin", TOKENS)
    for split in ("train", "val"):
        TokenDataLoader(tmp_path, 1, 4, split=split)
    (record,) = caplog.records
    assert f"{tmp_path} has no manifest.json" in record.getMessage()


def test_invalid_shards_are_found_on_opening(tmp_path: Path) -> None:
    def refused(match: str, **options: object) -> None:
        with pytest.raises(DataError, match=match):
            TokenDataLoader(tmp_path, 1, 4, **options)

    refused("has no train shards")
    write_shard(tmp_path / "x_train_000000.bin", np.array([EOT, 2, 3], dtype=np.uint16))
    (tmp_path / "x_train_000001.bin").write_bytes(b"PK" * 2000)
    refused(r"x_train_000001\.bin is not a token shard: magic number")
    write_shard(tmp_path / "x_train_000001.bin", np.array([EOT, 2, 3], dtype=np.uint32))
    refused(r"x_train_000001\.bin has uint32 tokens")
    refused("expected split train or val, got 'test'", split="test")
    with pytest.raises(DataError, match="no such directory"):
        TokenDataLoader(tmp_path / "absent", 1, 4)


def test_token_id_outside_the_vocabulary_is_an_error_on_reading(tmp_path: Path) -> None:
    write_shard(tmp_path / "x_train_000000.bin", TOKENS)
    loader = TokenDataLoader(tmp_path, 1, 4, vocab_size=50256)
    with pytest.raises(DataError, match=r"x_train_000000\.bin has token id 50256 at token 0"):
        loader.next_batch()
