"""Our safetensors files are the library's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from whimbrel.base import tensorfile
from whimbrel.base.tensorfile import TensorEntry, write_tensor_file


def test_the_library_reads_what_is_written_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorfile, "CHUNK", 3)
    entries = [
        TensorEntry("long", "int64", (2,), 16),
        TensorEntry("none", "float32", (0, 4), 0),
        TensorEntry("one", "uint8", (), 1),
    ]
    contents = [memoryview(bytes([1, *[0] * 7, 2, *[0] * 7])), memoryview(b""), memoryview(b"\x07")]
    write_tensor_file(tmp_path / "x.safetensors", entries, contents, {"format": "pt"})
    found = load_file(tmp_path / "x.safetensors")
    assert found["long"].tolist() == [1, 2]
    assert found["none"].shape == (0, 4)
    assert found["one"].shape == ()
    assert int(found["one"]) == 7
    raw = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "pt"}


def test_contents_are_asked_for_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    sizes = []

    def contents():
        for _ in range(3):
            sizes.append(path.stat().st_size)
            yield memoryview(bytes(100))

    write_tensor_file(path, [TensorEntry(name, "uint8", (100,), 100) for name in "abc"], contents())
    assert [size - sizes[0] for size in sizes] == [0, 100, 200]


def test_bytes_that_do_not_fill_the_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a' has 3 bytes where its entry says 4"):
        write_tensor_file(tmp_path / "x", [TensorEntry("a", "float32", (1,), 4)], [memoryview(b"abc")])
