from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.files import sha256_file
from whimbrel.data import TokenDataLoader, read_manifest, read_shard
from whimbrel.data.pipeline import encode_on_threads, in_order
from whimbrel.data.prepare import default_directory, prepare
from whimbrel.data.sources import FINEWEB, open_source, source_name
from whimbrel.data.sources import documents as read_documents
from whimbrel.data.verify import verify_shards
from whimbrel.tokenization import Tokenizer, load_tokenizer, train_tokenizer

GPT2 = load_tokenizer("gpt2")
FORMS = ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.txt.gz", "a.txt.zst")


def tokens_of(folder: Path, split: str = "train") -> list[int]:
    return [int(t) for path in sorted(folder.glob(f"*_{split}_*.bin")) for t in read_shard(path)]


def expected_tokens(texts: list[str], tokenizer: Tokenizer = GPT2) -> list[int]:
    return [t for text in texts for t in (tokenizer.eot_id, *tokenizer.encode(text))]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_source_gives_the_same_tokens(corpus, texts: list[str], form: str, tmp_path: Path) -> None:
    source = corpus.write(tmp_path / form, texts)
    if ".txt" in form:
        texts = [text.strip("\r\n") for text in texts]
    out = tmp_path / "out"
    manifest = prepare([str(source)], out, GPT2, name="a", separator="<|doc|>" if ".txt" in form else None)
    assert tokens_of(out) == expected_tokens(texts)
    assert manifest == read_manifest(out)
    assert (manifest.documents, manifest.tokens("train"), manifest.tokens("val")) == (400, len(tokens_of(out)), 0)
    assert load_tokenizer(out).fingerprint == GPT2.fingerprint
    assert all(finding.fault is None for finding in verify_shards(out))


def test_a_text_file_is_one_document_without_separator(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", GPT2, name="a")
    assert tokens_of(tmp_path / "out") == expected_tokens(["One.\n\nTwo.\n"])


def test_folders_and_globs_are_read_in_order_of_name(corpus, texts: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    (folder / "b").mkdir(parents=True)
    corpus.write(folder / "b" / "2.jsonl", texts[20:30])
    corpus.write(folder / "a.parquet", texts[:20])
    (folder / "ignored.png").write_bytes(b"\x89PNG")
    assert list(read_documents([str(folder)])) == texts[:30]
    assert list(read_documents([str(folder / "**" / "*.jsonl")])) == texts[20:30]
    assert list(read_documents([str(folder / "**.parquet")])) == texts[:20]
    assert [origin.name for origin in open_source(str(folder))] == ["a.parquet", "b/2.jsonl"]


def test_hidden_names_of_a_folder_are_not_read(corpus, texts: list[str], tmp_path: Path) -> None:
    for name in ("seen.txt", ".hidden.txt", ".git/in.txt", "deep/.cache/in.txt"):
        (tmp_path / ".data" / name).parent.mkdir(parents=True, exist_ok=True)
        corpus.write(tmp_path / ".data" / name, [name])
    assert list(read_documents([str(tmp_path / ".data")])) == ["seen.txt"]


@pytest.mark.parametrize("form", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_a_document_that_is_too_long_is_refused(
    corpus, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(corpus.write(tmp_path / form, ["word " * 800_000, "more " * 800_000]))
    monkeypatch.setattr("whimbrel.data.batches.MOST_DOCUMENT", 1 << 21)
    with pytest.raises(DataError, match=rf"{form} holds a document of more than 2 MiB: part it .*--separator"):
        list(read_documents([source]))
    monkeypatch.setattr("whimbrel.data.batches.MOST_DOCUMENT", 5_000_000)
    separator = "<|doc|>" if ".txt" in form else None
    assert len(list(read_documents([source], separator=separator))) == 2


def test_a_long_text_is_refused_before_anything_is_read(
    corpus, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (str(corpus.write(tmp_path / name, texts)) for name in ("a.jsonl", "b.txt"))
    monkeypatch.setattr("whimbrel.data.batches.MOST_DOCUMENT", 1000)
    monkeypatch.setattr("whimbrel.data.sources.jsonl_batches", lambda *_: pytest.fail("read"))
    with pytest.raises(DataError, match=r"b\.txt holds a document"):
        prepare([first, second], tmp_path / "out", GPT2, name="a")


@pytest.mark.parametrize("form", FORMS)
def test_batches_say_how_much_of_the_file_is_read(corpus, form: str, tmp_path: Path) -> None:
    source = str(corpus.write(tmp_path / form, corpus.documents(4000)))
    (origin,) = open_source(source)
    shares = [batch.read for batch in origin.batches("text", "<|doc|>", 0)]
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.5 < shares[-2] <= shares[-1] == 1.0
    assert [batch.read for batch in origin.batches("text", "<|doc|>", 2)] == shares[2:]


def test_lines_longer_than_a_block_and_without_a_last_newline(corpus, tmp_path: Path) -> None:
    texts = ["x" * 3_000_000, "short", "y" * 1_500_000]
    source = corpus.write(tmp_path / "a.jsonl", texts)
    source.write_bytes(source.read_bytes().rstrip() + b"")
    assert list(read_documents([str(source)])) == texts
    (tmp_path / "a.txt").write_text("<|doc|>".join(texts))
    assert list(read_documents([str(tmp_path / "a.txt")], separator="<|doc|>")) == texts


@pytest.mark.parametrize("shard_size", [1000, 7777, 10**6])
def test_bytes_do_not_depend_on_workers(corpus, shard_size: int, tmp_path: Path) -> None:
    sources = [
        str(corpus.write(tmp_path / name, corpus.documents(150, i))) for i, name in enumerate(("a.parquet", "b.jsonl"))
    ]
    made = []
    for workers in (1, 2, 5):
        out = tmp_path / f"out{workers}"
        prepare(
            sources,
            out,
            GPT2,
            name="a",
            shard_size=shard_size,
            val_tokens=3000,
            total_tokens=12_345,
            engine=encode_on_threads(workers),
        )
        made.append(corpus.bytes_of(out))
    assert made[0] == made[1] == made[2]
    lengths = [len(read_shard(path)) for path in sorted((tmp_path / "out1").glob("*_train_*.bin"))]
    assert sum(lengths) == 12_345
    assert set(lengths[:-1]) <= {shard_size}


def test_held_out_documents_are_whole_and_kept_from_training(corpus, texts: list[str], tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "a.jsonl", texts + texts)  # every document twice: both go to one side
    manifest = prepare([str(source)], tmp_path / "out", GPT2, name="a", val_tokens=5000)
    splits = {}
    for split in ("train", "val"):
        tokens = np.array(tokens_of(tmp_path / "out", split))
        pieces = np.split(tokens, np.flatnonzero(tokens == GPT2.eot_id))[1:]
        splits[split] = {tuple(piece.tolist()) for piece in pieces}
    known = {tuple(expected_tokens([text])) for text in texts}
    assert not splits["train"] & splits["val"]
    assert splits["train"] | splits["val"] == known
    longest = max(len(document) for document in splits["val"])
    assert 5000 <= manifest.tokens("val") < 5000 + longest


def test_a_validation_source_is_its_own_split(corpus, texts: list[str], tmp_path: Path) -> None:
    train, val = corpus.write(tmp_path / "t.jsonl", texts[:50]), corpus.write(tmp_path / "v.parquet", texts[50:60])
    prepare([str(train)], tmp_path / "out", GPT2, name="a", val=[str(val)], total_tokens=1000)
    assert tokens_of(tmp_path / "out") == expected_tokens(texts[:50])[:1000]
    assert tokens_of(tmp_path / "out", "val") == expected_tokens(texts[50:60])
    x, _ = TokenDataLoader(tmp_path / "out", 2, 8, split="val").next_batch()
    assert x[0, 0] == GPT2.eot_id


def test_a_source_that_ends_early_is_told(corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = corpus.write(tmp_path / "a.jsonl", ["few words"])
    prepare([str(source)], tmp_path / "out", GPT2, name="a", total_tokens=100)
    assert "the source ended at 3 of the 100 training tokens asked for" in caplog.text


def test_a_trained_tokenizer_and_a_wide_vocabulary(
    corpus, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus.write(tmp_path / "a.jsonl", texts)
    small = train_tokenizer(texts, 400)
    prepare([str(source)], tmp_path / "small", small, name="a")
    assert tokens_of(tmp_path / "small") == expected_tokens(texts, small)
    wide = Tokenizer.from_json(small.to_json())
    monkeypatch.setattr(wide, "vocab_size", 70_000)
    prepare([str(source)], tmp_path / "wide", wide, name="a")
    shard = read_shard(next((tmp_path / "wide").glob("*.bin")))
    assert shard.dtype == np.uint32
    assert shard.tolist() == expected_tokens(texts, small)


KILLED = """
import sys, time
import whimbrel.data.writing as writing
from whimbrel.data.pipeline import encode_on_threads
from whimbrel.data.prepare import prepare
from whimbrel.tokenization import load_tokenizer

plain = writing.write_shard
def slow(path, tokens):
    plain(path, tokens)
    print(path.name, flush=True)
    time.sleep(0.05)
writing.write_shard = slow
source, out, workers = sys.argv[1:]
prepare([source], out, load_tokenizer(), name="a", shard_size=20_000, val_tokens=9_000,
        engine=encode_on_threads(int(workers)))
"""


@pytest.mark.parametrize(("form", "lines"), [("a.parquet", 1), ("a.jsonl.gz", 8), ("a.parquet", 14)])
def test_killed_and_resumed_is_byte_identical(corpus, form: str, lines: int, tmp_path: Path) -> None:
    source = str(corpus.write(tmp_path / form, corpus.documents(1200)))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    prepare([source], whole, GPT2, name="a", shard_size=20_000, val_tokens=9_000)
    command = [sys.executable, "-c", KILLED, source, str(broken)]
    with subprocess.Popen([*command, "2"], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(lines):
            process.stdout.readline()
        time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert read_manifest(broken).resume is not None
    (broken / ".partial-1-a_train_000009.bin").write_bytes(b"left by the dead")
    with pytest.raises(DataError, match="unfinished"):
        TokenDataLoader(broken, 1, 8)
    resumed = subprocess.run([*command, "1"], capture_output=True, text=True, check=True)
    assert corpus.bytes_of(broken) == corpus.bytes_of(whole)
    if lines > 8:
        assert "a_train_000000.bin" not in resumed.stdout, "whole shards are not made again"


def test_preparing_again_changes_nothing(corpus, texts: list[str], tmp_path: Path) -> None:
    source = str(corpus.write(tmp_path / "a.jsonl", texts))
    first = prepare([source], tmp_path / "out", GPT2, name="a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare([source], tmp_path / "out", GPT2, name="a") == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_of_something_else_is_refused(corpus, texts: list[str], tmp_path: Path) -> None:
    source = str(corpus.write(tmp_path / "a.jsonl", texts))
    other = str(corpus.write(tmp_path / "b.jsonl", texts[1:]))
    out = tmp_path / "out"
    prepare([source], out, GPT2, name="a")
    before = corpus.bytes_of(out)
    for match, sources, tokenizer, options in (
        ("other sources", [other], GPT2, {}),
        ("other tokenizer", [source], train_tokenizer(texts, 300), {}),
        (r"other settings \(shard_size=100000000\)", [source], GPT2, {"shard_size": 500}),
        (r"other settings \(total_tokens=None\)", [source], GPT2, {"total_tokens": 500}),
    ):
        with pytest.raises(DataError, match=match):
            prepare(sources, out, tokenizer, name="a", **options)
    assert corpus.bytes_of(out) == before
    (out / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"shards without a manifest\.json"):
        prepare([source], out, GPT2, name="a")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shard_size": 0}, "shard_size=0"),
        ({"total_tokens": 0}, "total_tokens=0"),
        ({"val_tokens": -1}, "val_tokens=-1"),
        ({"val_tokens": 5, "val": ["a.jsonl"]}, "give one"),
        ({"name": "x_val"}, "cannot name shards"),
        ({"name": "a/b"}, "cannot name shards"),
        ({"separator": "|"}, "no source is one"),
        ({"separator": ""}, "separator='' parts nothing"),
        ({"val": [""]}, "a source is empty"),
    ],
)
def test_requests_that_cannot_be_are_refused(corpus, options: dict, match: str, workdir: Path) -> None:
    corpus.write(workdir / "a.jsonl", ["text"])
    with pytest.raises(ConfigError, match=match):
        prepare(["a.jsonl"], "out", GPT2, **{"name": "a", **options})
    assert not (workdir / "out").exists()


def test_names_and_directories_follow_the_source(tmp_path: Path) -> None:
    assert source_name("HuggingFaceFW/fineweb:sample-10BT") == "fineweb"
    assert source_name("texts/my_val_set.jsonl.gz") == "my-val-set"
    assert source_name(str(tmp_path / "x" / "*.parquet")) == "x"
    assert default_directory("fineweb", [FINEWEB], 20_000_000) == Path("data/fineweb20M")
    assert default_directory("fineweb", [FINEWEB], None) == Path("data/fineweb10B")
    assert default_directory("fineweb", ["fineweb/*.parquet"], None) == Path("data/fineweb")
    assert default_directory("wiki", ["wiki"], 1_500_000_000) == Path("data/wiki1.5B")
    assert default_directory("wiki", ["wiki"], None) == Path("data/wiki")


def test_results_come_in_order_and_little_is_read_ahead() -> None:
    read = 0

    def items():
        nonlocal read
        for number in range(100):
            read += 1
            yield number

    def slow_when_even(number: int) -> int:
        time.sleep(0.002 * (number % 2 == 0))
        return number * number

    for done, result in enumerate(in_order(slow_when_even, items(), workers=3), 1):
        assert result == (done - 1) ** 2
        assert read <= done + 2 * 3


@pytest.mark.parametrize(
    ("file", "digest"),
    [("val-000000.parquet", "25e220a97a3d491b3612c31c51ff960d84971ce9f86977d7610cb9b971f38d94")],
)
def test_the_shared_corpus_gives_its_known_shard(file: str, digest: str, shared_data: Path, tmp_path: Path) -> None:
    manifest = prepare([str(shared_data / "webmix" / file)], tmp_path, GPT2, name="webmix")
    assert (manifest.shards[0].sha256, manifest.tokens("train")) == (digest, 1_500_147)
    assert sha256_file(tmp_path / "webmix_train_000000.bin") == digest


@pytest.mark.ray
def test_a_ray_cluster_makes_the_same_bytes(corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from whimbrel.data.cluster import encode_on_ray

    sources = [
        str(corpus.write(tmp_path / f"{i}.{form}", corpus.documents(120, i)))
        for i, form in enumerate(("parquet", "jsonl", "jsonl.zst"))
    ]
    options = {"name": "a", "shard_size": 20_000, "val_tokens": 3000}
    prepare(sources, tmp_path / "threads", GPT2, **options)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        prepare(sources, tmp_path / "ray", GPT2, engine=encode_on_ray, **options)
        assert corpus.bytes_of(tmp_path / "ray") == corpus.bytes_of(tmp_path / "threads")
        (tmp_path / "2.jsonl.zst").write_bytes(b"junk")
        with pytest.raises(DataError, match=r"2\.jsonl\.zst is not a readable zstd file"):
            prepare(sources, tmp_path / "bad", GPT2, engine=encode_on_ray, name="a")
    finally:
        ray.shutdown()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"])
def test_a_separator_of_line_ends_matches_lf_and_crlf(tmp_path: Path, newline: str, separator: str) -> None:
    texts = ["one\ntwo", "three", "x" * 1_500_000, "four"]
    raw = "\n\n".join(texts).replace("\n", newline).encode()
    (tmp_path / "a.txt").write_bytes(raw)
    expected = [text.replace("\n", newline) for text in texts]
    assert list(read_documents([str(tmp_path / "a.txt")], separator=separator)) == expected


def test_a_separator_that_does_not_occur_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert len(list(read_documents([str(tmp_path / "a.txt")], separator="\n\n"))) == 1
    assert "does not contain the separator" in caplog.text


def test_validation_documents_are_distinct(corpus, texts: list[str], tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "a.jsonl", [text for text in texts for _ in range(4)])
    prepare([str(source)], tmp_path / "out", GPT2, name="a", val_tokens=5000)
    tokens = np.array(tokens_of(tmp_path / "out", "val"))
    pieces = [tuple(piece.tolist()) for piece in np.split(tokens, np.flatnonzero(tokens == GPT2.eot_id))[1:]]
    assert len(pieces) == len(set(pieces)) > 0


def test_a_file_cannot_be_both_training_and_validation(corpus, texts: list[str], tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "a.jsonl", texts)
    copy = shutil.copy(source, tmp_path / "b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl.*a\.jsonl have the same content"):
        prepare([str(source)], tmp_path / "out", GPT2, name="a", val=[str(copy)])
    assert not (tmp_path / "out").exists()


def test_a_changed_token_is_found_when_shards_are_verified(corpus, texts: list[str], tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "a.jsonl", texts)
    prepare([str(source)], tmp_path / "out", GPT2, name="a", shard_size=5000)
    second = sorted((tmp_path / "out").glob("*.bin"))[1]
    raw = bytearray(second.read_bytes())
    raw[-2] ^= 1
    second.write_bytes(raw)
    TokenDataLoader(tmp_path / "out", 1, 8000).next_batch()
    loader = TokenDataLoader(tmp_path / "out", 1, 4000, verify=True)
    loader.next_batch()
    with pytest.raises(DataError, match=rf"{second.name} was changed"):
        loader.next_batch()


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop("shards") and table.pop("tokenizer"),
        lambda table: table.update(extra=1),
        lambda table: table["tokenizer"].update(vocab_size="many"),
        lambda table: table["shards"][0].update(file="../other.bin"),
        lambda table: table["shards"][0].update(split="test"),
        lambda table: table["shards"][0].update(tokens=-1),
    ],
    ids=["missing", "extra", "type", "path", "split", "count"],
)
def test_a_malformed_manifest_is_one_clear_error(corpus, tmp_path: Path, change: Callable[[dict], object]) -> None:
    source = corpus.write(tmp_path / "a.jsonl", corpus.documents(5))
    prepare([str(source)], tmp_path / "out", GPT2, name="a")
    file = tmp_path / "out" / "manifest.json"
    table = json.loads(file.read_text())
    change(table)
    file.write_text(json.dumps(table))
    with pytest.raises(DataError, match=r"manifest\.json is not a manifest"):
        read_manifest(tmp_path / "out")
    file.write_text("[" * 100_000)
    with pytest.raises(DataError, match="nested too deeply"):
        read_manifest(tmp_path / "out")
