"""`whimbrel prepare`, `tokenizer` and `verify`: their output, and a one-line error for every kind of bad input."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whimbrel.base import files
from whimbrel.cli.main import main
from whimbrel.data import read_manifest, write_shard
from whimbrel.tokenization import load_tokenizer, train_tokenizer

GOOD = b'{"text": "a bird flies"}\n'


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def whimbrel(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return run


def test_prepare_then_verify(whimbrel, workdir: Path) -> None:
    Path("birds.jsonl").write_bytes(GOOD * 100)
    done = whimbrel("prepare", "birds.jsonl", "--shard_size", "150", "--total-tokens", "400", "--val_tokens", "4")
    assert done.code == 0
    banner = ["Output directory: data/birds400", "Tokens: 400", "Tokens per shard: 150"]
    assert done.out.splitlines()[:3] == banner
    assert "400/400 tokens in" in done.err
    assert read_manifest("data/birds400").tokens("train") == 400
    checked = whimbrel("verify", "data/birds400")
    assert checked.code == 0
    assert "ok birds_train_000002.bin: 100 tokens" in checked.out.splitlines()


def test_prepare_prints_the_totals(whimbrel, workdir: Path) -> None:
    Path("birds.jsonl").write_bytes(GOOD)
    done = whimbrel("prepare", "birds.jsonl")
    assert done.out.splitlines()[1] == "Tokens: all"
    assert done.out.splitlines()[-1] == "train: 4 tokens in 1 shard"


def test_tokenizer_train_and_show(whimbrel, workdir: Path) -> None:
    trained = whimbrel(
        "tokenizer", "train", "shakespeare", "--max-bytes", "100000", "--vocab-size", "300", "--out-dir", "tok"
    )
    assert (trained.code, trained.out) == (0, "wrote tok/tokenizer.json: 300 ids\n")
    shown = whimbrel("tokenizer", "show", "tok", "--text", "the")
    assert shown.code == 0
    assert "vocabulary: 300 ids" in shown.out
    assert "end-of-text: <|endoftext|> (299)" in shown.out
    assert load_tokenizer("tok").decode([int(line.split()[0]) for line in shown.out.splitlines()[4:]]) == "the"
    assert whimbrel("tokenizer", "show").out.startswith("vocabulary: 50,257 ids")


@pytest.mark.parametrize("verb", [["prepare"], ["tokenizer", "train"], ["tokenizer", "show"], ["verify"]])
def test_help_is_printed(verb: list[str], whimbrel) -> None:
    shown = whimbrel(*verb, "--help")
    assert shown.code == 0
    assert "Usage: whimbrel" in shown.out


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


LATIN1 = pa.array(["x", "y", b"\xe9t\xe9"], pa.binary()).view(pa.string())
ROWS = pa.table({"text": [f"{i} birds fly to the marsh" * 20 for i in range(500)]})
BAD = {
    "empty jsonl": ("a.jsonl", b"", "have no text"),
    "blank jsonl": ("a.jsonl", b"\n\n", "have no text"),
    "broken json": ("a.jsonl", GOOD * 3 + b'{"text": "cut\n', "a.jsonl, line 4: not JSON"),
    "no key": ("a.jsonl", GOOD + b'{"body": "x"}\n', "a.jsonl, line 2: no key 'text'"),
    "not an object": ("a.jsonl", GOOD + b"[1]\n", "a.jsonl, line 2: no key 'text'"),
    "not a string": ("a.jsonl", b'{"text": 5}\n', "a.jsonl, line 1: expected a string in 'text', got int"),
    "bad utf-8 in jsonl": ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "a.jsonl, line 2: not UTF-8 at byte 10"),
    "deep json": ("a.jsonl", GOOD + b"[" * 200_000 + b"\n", "a.jsonl, line 2: JSON nested too deeply"),
    "lone surrogate": ("a.jsonl", GOOD + b'{"text": "\\ud800"}\n', "lone surrogate at character"),
    "truncated gz": ("a.jsonl.gz", gzip.compress(GOOD * 999)[:-9], "a.jsonl.gz is not a readable gzip file"),
    "not gz": ("a.jsonl.gz", b"plain text", "a.jsonl.gz is not a readable gzip file"),
    "damaged gz": ("a.txt.gz", gzip.compress(bytes(99_999))[:40] + b"xx" * 40, "a.txt.gz is not a readable gzip"),
    "not zst": ("a.jsonl.zst", b"plain text", "a.jsonl.zst is not a readable zstd file"),
    "bad utf-8 in text": ("a.txt", b"bird \xe9", "a.txt, document 1: not UTF-8 at byte 5"),
    "empty text": ("a.txt", b"", "have no text"),
    "not parquet": ("a.parquet", b"PAR1 something else", "a.parquet is not a readable parquet file"),
    "empty parquet": ("a.parquet", b"", "a.parquet is not a readable parquet file"),
    "truncated parquet": ("a.parquet", parquet(ROWS)[:-20], "a.parquet is not a readable parquet file"),
    "damaged parquet": ("a.parquet", parquet(ROWS).replace(b"\x28\xb5\x2f\xfd", b"\0\0\0\0"), "a.parquet is not a"),
    "no text column": ("a.parquet", parquet(pa.table({"t": ["x"]})), "no column 'text': set --text-key to one of t"),
    "bad utf-8 in parquet": ("a.parquet", parquet(pa.table({"text": LATIN1})), "a.parquet, row 2: not UTF-8 at byte 0"),
    "null text": (
        "a.parquet",
        parquet(pa.table({"text": ["x", None]})),
        "row 1: expected a string, got null",
    ),
    "unknown kind": ("a.pdf", b"%PDF-1.4\n%\xe2\xe3", "got a.pdf (not UTF-8 at byte 10): leave it out"),
    "binary": (
        "birds",
        b"ab\0",
        "got birds (NUL at byte 2): leave it out, or rename it to birds.txt and set --encoding",
    ),
    "table": ("a.csv", b"text,label\nbird,1\n", "got a.csv: convert it to jsonl or parquet, or rename it to a.csv.txt"),
    "unknown kind, compressed": ("birds.gz", b"\x1f\x8b\x08\0", "rename it to birds.txt.gz"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_source_is_a_one_line_error_and_leaves_no_files(case: str, whimbrel, workdir: Path) -> None:
    name, content, fault = BAD[case]
    Path(name).write_bytes(content)
    done = whimbrel("prepare", name, "--out-dir", "out")
    lines = done.err.splitlines()
    assert done.code == 2
    assert len(lines) == 1
    assert lines[0].startswith("whimbrel")
    assert fault in lines[0]
    assert sorted(path.name for path in workdir.iterdir()) == [name]


def test_missing_source_is_a_one_line_error(whimbrel, workdir: Path) -> None:
    Path("empty").mkdir()
    Path("birds.txt").write_text("a bird")
    assert "got an empty string" in whimbrel("prepare", "").err
    assert "no such file: empty/**.txt" in whimbrel("prepare", "empty/**.txt").err
    assert "no such file: absent.txt" in whimbrel("prepare", "absent.txt").err
    assert "no such file: ../absent" in whimbrel("prepare", "../absent").err
    assert "files in directory empty, got no files" in whimbrel("prepare", "empty").err
    Path("empty/birds.py").touch()
    assert "files in directory empty, got 1 .py; name files" in whimbrel("prepare", "empty").err
    assert "no tokenizer at absent" in whimbrel("prepare", "empty", "--tokenizer", "absent").err


def test_hub_without_network_suggests_local_files(whimbrel, workdir: Path) -> None:
    pytest.importorskip("datasets")
    done = whimbrel("prepare", "--total-tokens", "20000000")
    assert done.code == 2
    assert done.out.splitlines()[0] == "Output directory: data/fineweb20M"
    (last,) = done.err.splitlines()
    assert "cannot open HuggingFaceFW/fineweb:sample-10BT" in last
    assert "network" in last
    assert not Path("data").exists()


def test_full_disk_leaves_no_files(whimbrel, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("birds.jsonl").write_bytes(GOOD * 100)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    done = whimbrel("prepare", "birds.jsonl", "--out-dir", "out", "--shard-size", "50")
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert "No space left on device" in line
    assert sorted(path.name for path in workdir.iterdir()) == ["birds.jsonl"]


def test_failed_preparation_leaves_the_directory_unchanged(whimbrel, workdir: Path) -> None:
    Path("birds.txt").write_text("a bird flies over birds " * 50)
    whimbrel("tokenizer", "train", "birds.txt", "--vocab-size", "260", "--out-dir", "out")
    Path("out/tokenizer.notes.json").write_text("mine")
    Path("out/mine.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    Path("bad.jsonl").write_bytes(b"{")
    assert whimbrel("prepare", "bad.jsonl", "--tokenizer", "out", "--out-dir", "out").code == 2
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    Path("empty").mkdir()
    assert whimbrel("prepare", "bad.jsonl", "--out-dir", "empty").code == 2
    assert Path("empty").is_dir(), "it was there before"


def test_full_disk_leaves_an_existing_tokenizer(whimbrel, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure comes after the manifest and some shards are written: they are removed, earlier files stay."""
    Path("birds.jsonl").write_bytes(GOOD * 100)
    load_tokenizer().save("out")
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    fsync, calls = files.os.fsync, iter(range(10**6))

    def nearly_full(descriptor: int) -> None:
        if next(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", nearly_full)
    done = whimbrel("prepare", "birds.jsonl", "--tokenizer", "out", "--out-dir", "out", "--shard-size", "50")
    assert "birds_train_00000" in done.err
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before


def test_tokenizer_train_does_not_overwrite_the_tokenizer_of_shards(whimbrel, workdir: Path) -> None:
    Path("birds.jsonl").write_bytes(GOOD)
    Path("waders.txt").write_text("the whimbrel is a wader " * 20)
    options = ("--vocab-size", "270", "--out-dir", "data")
    assert whimbrel("tokenizer", "train", "birds.jsonl", *options).code == 0
    assert whimbrel("prepare", "birds.jsonl", "--tokenizer", "data", "--out-dir", "data").code == 0
    before = Path("data/tokenizer.json").read_bytes()
    assert whimbrel("tokenizer", "train", "birds.jsonl", *options).code == 0  # the same tokenizer again
    refused = whimbrel("tokenizer", "train", "waders.txt", *options)
    assert refused.code == 2
    assert "choose another --out-dir" in refused.err
    assert Path("data/tokenizer.json").read_bytes() == before
    assert whimbrel("verify", "data").code == 0


def test_prepare_without_a_source_does_not_download(whimbrel, workdir: Path) -> None:
    refused = whimbrel("prepare")
    assert refused.code == 2
    assert refused.out == ""
    assert "expected a SOURCE" in refused.err
    assert "HuggingFaceFW/fineweb:sample-10BT" in refused.err
    assert list(workdir.iterdir()) == []


def test_prepare_does_not_overwrite_another_tokenizer(whimbrel, workdir: Path) -> None:
    Path("birds.txt").write_text("a bird flies over birds " * 50)
    whimbrel("tokenizer", "train", "birds.txt", "--vocab-size", "260", "--out-dir", "out")
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    done = whimbrel("prepare", "birds.txt", "--out-dir", "out")
    assert done.code == 2
    assert done.err.startswith("whimbrel: out/tokenizer.json is a different tokenizer")
    assert "--out-dir" in done.err
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    assert whimbrel("prepare", "birds.txt", "--tokenizer", "out", "--out-dir", "out").code == 0
    assert {name: (Path("out") / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("path", ["birds.txt", "birds.txt/deep/er"])
def test_out_dir_that_is_a_file_is_rejected_before_any_work(
    path: str, whimbrel, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("birds.txt").write_text("a bird")
    monkeypatch.setattr("whimbrel.data.prepare._ShardCollector", lambda *_: pytest.fail("work began"))
    done = whimbrel("prepare", "birds.txt", "--out_dir", path)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert f"expected a directory for --out-dir, got {path}" in done.err


def test_prepare_resumes_after_the_disk_was_full(whimbrel, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.table({"text": ["a bird flies"] * 1000})
    Path("birds.parquet").write_bytes(parquet(rows))
    arguments = ("prepare", "birds.parquet", "--shard-size", "500", "--workers", "1", "--out-dir")
    whimbrel(*arguments, "complete")
    fsync, calls = files.os.fsync, iter(range(10**6))

    def nearly_full(descriptor: int) -> None:
        if next(calls) > 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", nearly_full)
        assert whimbrel(*arguments, "out").code == 2
    left = sorted(path.name for path in Path("out").iterdir())
    assert "birds_train_000000.bin" in left
    assert not [name for name in left if name.startswith(".")]
    assert whimbrel(*arguments, "out").code == 0
    for path in Path("complete").iterdir():
        assert (Path("out") / path.name).read_bytes() == path.read_bytes()


def test_verify_reports_every_error(whimbrel, workdir: Path) -> None:
    Path("birds.jsonl").write_bytes(GOOD * 100)
    whimbrel("prepare", "birds.jsonl", "--out-dir", "out", "--shard-size", "60")
    shards = sorted(Path("out").glob("*.bin"))
    assert len(shards) == 7
    tokens = np.array([50256, 5, 60_000, *range(57)], dtype=np.uint16)
    shards[1].write_bytes(shards[1].read_bytes()[:-2])
    write_shard(shards[2], tokens)
    write_shard(shards[3], tokens[10:20])
    write_shard(shards[4], np.where(tokens == 60_000, 7, tokens).astype(np.uint16))
    shards[5].unlink()
    Path("out/foreign.bin").write_bytes(b"not a shard")
    done = whimbrel("verify", "out")
    assert done.code == 2
    for name, fault in (
        ("birds_train_000001.bin", "is truncated: the header says 60 tokens, the file has 59"),
        ("birds_train_000002.bin", "has token id 60000 at token 2"),
        ("birds_train_000003.bin", "has 10 tokens, expected 60"),
        ("birds_train_000004.bin", "has changed since it was written"),
        ("birds_train_000005.bin", "No such file"),
        ("foreign.bin", "is not listed in manifest.json"),
    ):
        assert [line for line in done.err.splitlines() if line.startswith(f"error {name}: ") and fault in line], name
    assert done.out.splitlines()[-1].startswith("2 ok, 6 failed")


def test_verify_checks_the_tokenizer(whimbrel, workdir: Path) -> None:
    Path("birds.jsonl").write_bytes(GOOD * 100)
    whimbrel("prepare", "birds.jsonl", "--out-dir", "out")
    assert whimbrel("verify", "out").code == 0
    file = Path("out/tokenizer.json")
    for change, fault in (
        (lambda: file.write_text("{}"), "is not a Hugging Face tokenizer.json"),
        (lambda: train_tokenizer(["a bird"], 257).save("out"), "is not the tokenizer of these shards"),
        (file.unlink, "is missing"),
    ):
        change()
        done = whimbrel("verify", "out")
        assert done.code == 2
        assert done.err.startswith("error tokenizer.json: out/tokenizer.json ")
        assert fault in done.err
        assert done.out.splitlines()[-1] == "1 ok, 1 failed, 400 tokens"


@pytest.mark.parametrize("content", ["[]", "5", "{", '{"tool": 5}', json.dumps({"shards": [{}]})])
def test_invalid_manifest_is_an_error(content: str, whimbrel, workdir: Path) -> None:
    Path("birds.jsonl").write_bytes(GOOD)
    whimbrel("prepare", "birds.jsonl", "--out-dir", "out")
    Path("out/manifest.json").write_text(content)
    for arguments in (("verify", "out"), ("prepare", "birds.jsonl", "--out-dir", "out")):
        done = whimbrel(*arguments)
        assert done.code == 2
        assert "out/manifest.json is not a valid shard manifest" in done.err


def test_verify_of_a_missing_or_empty_directory(whimbrel, workdir: Path) -> None:
    assert "no such directory: absent" in whimbrel("verify", "absent").err
    assert "has no token shards" in whimbrel("verify", ".").err


@pytest.mark.parametrize("separator", [r"\n\n", r"\r\n\r\n"])
def test_separator_accepts_escape_sequences(whimbrel, workdir: Path, separator: str) -> None:
    Path("a.txt").write_bytes(b"one two\r\n\r\nthree four\r\n\r\nfive")
    assert whimbrel("prepare", "a.txt", "--separator", separator, "--out-dir", "out").code == 0
    assert read_manifest("out").documents == 3


def test_arguments_that_are_not_utf8_are_a_one_line_error(whimbrel, workdir: Path) -> None:
    result = whimbrel("prepare", "a\udcff.txt")
    assert result.code == 2
    assert result.err == "whimbrel: expected UTF-8 arguments, got 'a\\udcff.txt'\n"
