"""`prepare` with the files people have: other encodings, damaged rows, few long documents, duplicates, typos."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.cli.main import main
from whimbrel.data import Manifest, read_manifest, read_shard
from whimbrel.data.prepare import encode_on_threads, prepare, split_text
from whimbrel.data.sources import resolve_source
from whimbrel.tokenization import load_tokenizer

GPT2 = load_tokenizer("gpt2")


def documents(folder: Path, split: str = "train") -> list[str]:
    tokens = np.concatenate([read_shard(path) for path in sorted(folder.glob(f"*_{split}_*.bin"))])
    pieces = np.split(tokens, np.flatnonzero(tokens == GPT2.eot_id))[1:]
    return [GPT2.decode(piece[1:].tolist()) for piece in pieces]


def run(source: Path, out: Path, **options) -> Manifest:
    return prepare([str(source)], out, GPT2, name="a", **options)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-8-sig"])
def test_encodings_give_the_same_documents(tmp_path: Path, encoding: str) -> None:
    texts = ["Le café\r\nest ouvert.", "Übergrößenträger", "señor"]
    (tmp_path / "a.txt").write_bytes("\n--\n".join(texts).encode(encoding))
    run(tmp_path / "a.txt", tmp_path / "out", separator="\n--\n", encoding=encoding)
    assert documents(tmp_path / "out") == texts


def test_encoding_of_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "café"}\n{"text": "naïve"}\n'.encode("latin-1"))
    run(tmp_path / "a.jsonl", tmp_path / "out", encoding="latin-1")
    assert documents(tmp_path / "out") == ["café", "naïve"]


def test_bytes_that_are_invalid_in_the_encoding_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n--\ntw\x81o\n--\nthree")  # 0x81 is not assigned in cp1252
    with pytest.raises(DataError, match=r"a\.txt, document 2.*--skip-bad"):
        run(tmp_path / "a.txt", tmp_path / "out", separator="\n--\n", encoding="cp1252")
    manifest = run(tmp_path / "a.txt", tmp_path / "out", separator="\n--\n", encoding="cp1252", skip_bad=True)
    assert documents(tmp_path / "out") == ["one", "three"]
    assert (manifest.documents, manifest.skipped) == (2, 1)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "ascii"])
def test_documents_with_invalid_bytes_are_skipped_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    """A lone surrogate in UTF-16, a number that is no character in UTF-32, and a byte above 127 in ASCII."""
    invalid = {"utf-16": b"\x00\xd8", "utf-16-le": b"\x00\xd8", "utf-32": b"\xff" * 4, "ascii": "é".encode()}[encoding]
    first, rest = "one\n--\ntw".encode(encoding), "o\n--\nthree".encode(encoding)
    rest = rest[{"utf-16": 2, "utf-32": 4}.get(encoding, 0) :]  # the byte order mark
    (tmp_path / "a.txt").write_bytes(first + invalid + rest)
    with pytest.raises(DataError, match=r"a\.txt, document 2.*--skip-bad"):
        run(tmp_path / "a.txt", tmp_path / "out", separator="\n--\n", encoding=encoding)
    run(tmp_path / "a.txt", tmp_path / "out", separator="\n--\n", encoding=encoding, skip_bad=True)
    assert documents(tmp_path / "out") == ["one", "three"]


@pytest.mark.parametrize("encoding", ["nope", "hex", "undefined", "a\0b", ""])
def test_unknown_encoding_is_rejected(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="unknown --encoding"):
        run(tmp_path / "a.txt", tmp_path / "out", encoding=encoding)


def test_encoding_without_effect_is_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="no source is one"):
        run(tmp_path / "a.parquet", tmp_path / "out", encoding="latin-1")


def write_bad_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.txt").write_text("good one")
    (folder / "b.txt").write_bytes("café".encode("latin-1"))
    (folder / "c.jsonl").write_text('{"text": "good two"}\n{"text": null}\nnot json\n{"body": "x"}\n[1]\n')
    pq.write_table(pa.table({"text": ["good three", None]}), folder / "d.parquet")


@pytest.mark.parametrize("workers", [1, 3])
def test_skip_bad_counts_what_it_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int) -> None:
    write_bad_files(tmp_path / "texts")
    manifest = run(tmp_path / "texts", tmp_path / "out", skip_bad=True, backend=encode_on_threads(workers))
    assert documents(tmp_path / "out") == ["good one", "good two", "good three"]
    assert (manifest.documents, manifest.skipped) == (3, 6)
    assert read_manifest(tmp_path / "out") == manifest
    assert "skipped 6 documents" in caplog.text
    assert "b.txt, document 1: not UTF-8" in caplog.text


def test_without_skip_bad_the_error_names_the_remedies(tmp_path: Path) -> None:
    write_bad_files(tmp_path / "texts")
    with pytest.raises(DataError, match=r"b\.txt, document 1: not UTF-8.*--encoding.*--skip-bad"):
        run(tmp_path / "texts", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_bad_documents_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n')
    with pytest.raises(DataError, match="no text"):
        run(tmp_path / "a.jsonl", tmp_path / "out", skip_bad=True)


def test_tokenizer_train_skips_bad_documents(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bad_files(Path("texts"))
    arguments = ["tokenizer", "train", "texts", "--vocab-size", "260", "--out-dir", "out"]
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "--skip-bad" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--skip-bad"])
    assert "skipped 6 documents" in capsys.readouterr().err


def test_one_long_document_is_split_for_validation(shakespeare: str, tmp_path: Path) -> None:
    text = shakespeare[:200_000]
    (tmp_path / "book.txt").write_text(text)
    manifest = run(tmp_path / "book.txt", tmp_path / "out", val_tokens=2000)
    assert 2000 <= manifest.tokens("val") <= 2000 + 2 * 2000 // 8
    held_out, train = documents(tmp_path / "out", "val"), documents(tmp_path / "out")
    assert all(part in text for part in (*held_out, *train))
    assert not any(part in "".join(train) for part in held_out)
    # Nothing is lost: the parts together are the text.
    assert sum(map(len, (*held_out, *train))) == len(text)


@pytest.mark.parametrize("val_tokens", [5000, 20_000])
def test_validation_of_twenty_files_has_about_the_size_requested(
    shakespeare: str, tmp_path: Path, val_tokens: int
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(shakespeare[number * 50_000 : (number + 1) * 50_000])
    manifest = run(tmp_path / "texts", tmp_path / "out", val_tokens=val_tokens)
    assert val_tokens <= manifest.tokens("val") <= 1.25 * val_tokens


def test_split_is_the_same_for_any_number_of_workers_and_after_a_resume(shakespeare: str, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").write_text(shakespeare[number * 30_000 : (number + 1) * 30_000])
    options = {"val_tokens": 3000, "shard_size": 10_000}
    run(tmp_path / "texts", tmp_path / "a", **options, backend=encode_on_threads(1))

    def interrupted(*arguments):
        for number, item in enumerate(encode_on_threads(1)(*arguments)):
            if number == 4:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "texts", tmp_path / "b", **options, backend=interrupted)
    assert read_manifest(tmp_path / "b").resume is not None
    run(tmp_path / "texts", tmp_path / "b", **options, backend=encode_on_threads(3))
    assert read_manifest(tmp_path / "a").shards == read_manifest(tmp_path / "b").shards


@pytest.mark.parametrize("text", ["", "short", "word " * 100, "line\n" * 100, "x" * 500, "ab\n" + "y" * 400 + " z"])
def test_split_text_keeps_every_character(text: str) -> None:
    parts = split_text(text, 64)
    assert "".join(parts) == text
    assert all(0 < len(part) <= 64 for part in parts) or not text
    assert all(part.endswith("\n") for part in parts) or "line" not in text
    assert all(part.startswith(" ") for part in parts[1:]) or "word" not in text


def test_a_source_listed_twice_is_read_once(workdir: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("only once")
    prepare(["texts", "texts/a.txt", "./texts"], "out", GPT2, name="a")
    assert documents(Path("out")) == ["only once"]
    assert "a.txt is listed more than once" in caplog.text


def test_a_copy_of_a_source_is_reported(workdir: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("the same text")
    prepare(["a.txt", "b.txt"], "out", GPT2, name="a")
    assert "b.txt is a copy of a.txt" in caplog.text


@pytest.mark.parametrize(
    "source", ["../nope", "nope", "data/nope", "./data/nope", "/nope/nope", "nope.txt", "data/*.txt"]
)
def test_misspelled_path_is_reported_as_a_missing_file(workdir: Path, source: str) -> None:
    Path("data").mkdir()
    with pytest.raises(DataError, match="no such file: "):
        resolve_source(source)


def test_similar_file_is_suggested(workdir: Path) -> None:
    Path("birds.txt").write_text("text")
    Path("birds.jsonl").write_text("{}")
    for typed, expected in (("bird.txt", "birds.txt"), ("bird.jsonl", "birds.jsonl"), ("bird.md", "birds.")):
        with pytest.raises(DataError, match=rf"no such file: {typed} \(did you mean {expected}"):
            resolve_source(typed)


def test_only_similar_names_of_sources_are_suggested(workdir: Path) -> None:
    for name in ("env.sh", "much.txt", ".nosuch.txt", "nosuch.png"):
        Path(name).write_text("text")
    with pytest.raises(DataError, match="no such file: nosuch.txt;"):
        resolve_source("nosuch.txt")
    Path("no-such").mkdir()
    with pytest.raises(DataError, match=r"no such file: nosuch.txt \(did you mean no-such\?\);"):
        resolve_source("nosuch.txt")


@pytest.mark.parametrize("source", ["nope.txt", "bird*.md", "corpus.txt.gz"])
def test_a_common_suffix_is_not_similar(workdir: Path, source: str) -> None:
    for name in ("bin.txt", "birds.txt", "x.txt.gz"):
        Path(name).write_text("text")
    with pytest.raises(DataError, match="no such file") as caught:
        resolve_source(source)
    assert "did you mean" not in str(caught.value)
