"""`prepare`: the shards it writes, how it resumes, what it refuses and what it reports."""

from __future__ import annotations

import json
import os
import re
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
from whimbrel.data import manifest as manifest_module
from whimbrel.data.prepare import default_directory, encode_on_threads, map_in_order, prepare
from whimbrel.data.shards import verify_shards
from whimbrel.data.sources import FINEWEB, source_name
from whimbrel.tokenization import Tokenizer, load_tokenizer, train_tokenizer

GPT2 = load_tokenizer("gpt2")


FORMS = ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.txt.gz", "a.txt.zst")


def tokens_of(folder: Path, split: str = "train") -> list[int]:
    return [int(t) for path in sorted(folder.glob(f"*_{split}_*.bin")) for t in read_shard(path)]


def expected_tokens(texts: list[str], tokenizer: Tokenizer = GPT2) -> list[int]:
    return [t for text in texts for t in (tokenizer.eot_id, *tokenizer.encode(text))]


@pytest.mark.parametrize("form", FORMS)
def test_every_file_type_gives_the_same_tokens(corpus, texts: list[str], form: str, tmp_path: Path) -> None:
    source = corpus.write(tmp_path / form, texts)
    if ".txt" in form:
        texts = [text.strip("\r\n") for text in texts]
    out = tmp_path / "out"
    manifest = prepare([str(source)], out, GPT2, name="a", separator="<|doc|>" if ".txt" in form else None)
    assert tokens_of(out) == expected_tokens(texts)
    assert manifest == read_manifest(out)
    assert (manifest.documents, manifest.tokens("train"), manifest.tokens("val")) == (400, len(tokens_of(out)), 0)
    assert load_tokenizer(out).fingerprint == GPT2.fingerprint
    assert all(finding.error is None for finding in verify_shards(out))


def test_text_file_without_separator_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", GPT2, name="a")
    assert tokens_of(tmp_path / "out") == expected_tokens(["One.\n\nTwo.\n"])


def test_long_text_file_is_rejected_before_reading(
    corpus, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (str(corpus.write(tmp_path / name, texts)) for name in ("a.jsonl", "b.txt"))
    monkeypatch.setattr("whimbrel.data.sources.MAX_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr("whimbrel.data.sources._jsonl_batches", lambda *_: pytest.fail("read"))
    with pytest.raises(DataError, match=r"b\.txt has a document"):
        prepare([first, second], tmp_path / "out", GPT2, name="a")


@pytest.mark.parametrize("shard_size", [1000, 7777, 10**6])
def test_shards_do_not_depend_on_the_number_of_workers(corpus, shard_size: int, tmp_path: Path) -> None:
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
            backend=encode_on_threads(workers),
        )
        made.append(corpus.bytes_of(out))
    assert made[0] == made[1] == made[2]
    lengths = [len(read_shard(path)) for path in sorted((tmp_path / "out1").glob("*_train_*.bin"))]
    assert sum(lengths) == 12_345
    assert set(lengths[:-1]) <= {shard_size}


def test_held_out_documents_are_complete_and_excluded_from_training(corpus, texts: list[str], tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "a.jsonl", texts + texts)  # every document twice: both copies go to the same split
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


def test_validation_source_becomes_the_val_split(corpus, texts: list[str], tmp_path: Path) -> None:
    train, val = corpus.write(tmp_path / "t.jsonl", texts[:50]), corpus.write(tmp_path / "v.parquet", texts[50:60])
    prepare([str(train)], tmp_path / "out", GPT2, name="a", val=[str(val)], total_tokens=1000)
    assert tokens_of(tmp_path / "out") == expected_tokens(texts[:50])[:1000]
    assert tokens_of(tmp_path / "out", "val") == expected_tokens(texts[50:60])
    x, _ = TokenDataLoader(tmp_path / "out", 2, 8, split="val").next_batch()
    assert x[0, 0] == GPT2.eot_id


def test_short_source_logs_a_warning(corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = corpus.write(tmp_path / "a.jsonl", ["few words"])
    prepare([str(source)], tmp_path / "out", GPT2, name="a", total_tokens=100)
    assert "only 3 of the 100 training tokens" in caplog.text


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
def test_validation_split_has_about_the_size_requested(share: float, tmp_path: Path, shakespeare: str) -> None:
    (tmp_path / "a.txt").write_text(shakespeare[:60_000])
    total = len(GPT2.encode(shakespeare[:60_000]))
    manifest = prepare([str(tmp_path / "a.txt")], tmp_path / "out", GPT2, name="a", val_tokens=int(share * total))
    assert share <= manifest.tokens("val") / total < 1.3 * share
    assert manifest.tokens("train") > 0.1 * total


@pytest.mark.parametrize("val_tokens", [17_500, 99_999_999])
@pytest.mark.parametrize("shard_size", [1000, 10**8])
def test_validation_split_that_leaves_nothing_to_train_on_is_rejected(
    val_tokens: int, shard_size: int, tmp_path: Path, shakespeare: str
) -> None:
    (tmp_path / "a.txt").write_text(shakespeare[:60_000])
    options = {"val_tokens": val_tokens, "shard_size": shard_size}
    with pytest.raises(DataError, match=rf"--val-tokens {val_tokens} holds out .* of .* tokens.*--val"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", GPT2, name="a", **options)
    assert not (tmp_path / "out").exists()


def test_short_validation_split_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The size of the text is overestimated, because the lines are mostly other keys."""
    lines = [json.dumps({"text": f"document {number}", "other": "x" * 1000}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", GPT2, name="a", val_tokens=50)
    assert re.search("held out only .* of the 50 validation tokens", caplog.text)
    assert "prepare --val" in caplog.text


def test_large_vocabulary_is_stored_as_uint32(
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
import whimbrel.data.shards as shards
from whimbrel.data.prepare import encode_on_threads
from whimbrel.data.prepare import prepare
from whimbrel.tokenization import load_tokenizer

write_shard = shards.write_shard
def slow(path, tokens):
    write_shard(path, tokens)
    print(path.name, flush=True)
    time.sleep(0.05)
shards.write_shard = slow
source, out, workers = sys.argv[1:]
prepare([source], out, load_tokenizer(), name="a", shard_size=20_000, val_tokens=9_000,
        backend=encode_on_threads(int(workers)))
"""


@pytest.mark.parametrize(("form", "lines"), [("a.parquet", 1), ("a.jsonl.gz", 8), ("a.parquet", 14)])
def test_killed_and_resumed_shards_are_byte_identical(corpus, form: str, lines: int, tmp_path: Path) -> None:
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
    with pytest.raises(DataError, match="not fully prepared"):
        TokenDataLoader(broken, 1, 8)
    resumed = subprocess.run([*command, "1"], capture_output=True, text=True, check=True)
    assert corpus.bytes_of(broken) == corpus.bytes_of(whole)
    if lines > 8:
        assert "a_train_000000.bin" not in resumed.stdout, "whole shards are not made again"


def test_preparing_twice_changes_nothing(corpus, texts: list[str], tmp_path: Path) -> None:
    source = str(corpus.write(tmp_path / "a.jsonl", texts))
    first = prepare([source], tmp_path / "out", GPT2, name="a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare([source], tmp_path / "out", GPT2, name="a") == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_directory_with_other_shards_is_rejected(corpus, texts: list[str], tmp_path: Path) -> None:
    source = str(corpus.write(tmp_path / "a.jsonl", texts))
    other = str(corpus.write(tmp_path / "b.jsonl", texts[1:]))
    out = tmp_path / "out"
    prepare([source], out, GPT2, name="a")
    before = corpus.bytes_of(out)
    for match, sources, tokenizer, options in (
        ("different sources", [other], GPT2, {}),
        ("different tokenizer", [source], train_tokenizer(texts, 300), {}),
        (r"different settings \(shard_size was 100000000, now 500\)", [source], GPT2, {"shard_size": 500}),
        (r"different settings \(total_tokens was none, now 500\)", [source], GPT2, {"total_tokens": 500}),
    ):
        with pytest.raises(DataError, match=match):
            prepare(sources, out, tokenizer, name="a", **options)
    assert corpus.bytes_of(out) == before
    text = str(corpus.write(tmp_path / "a.txt", texts))
    prepare([text], tmp_path / "text", GPT2, name="a", separator="\n\n")
    with pytest.raises(DataError, match=r"\(separator was '\\n\\n', now none\)"):
        prepare([text], tmp_path / "text", GPT2, name="a")
    (out / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"shards without a manifest\.json"):
        prepare([source], out, GPT2, name="a")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shard_size": 0}, "shard-size .*got 0"),
        ({"total_tokens": 0}, "total-tokens .*got 0"),
        ({"val_tokens": -1}, "val-tokens .*got -1"),
        ({"val_tokens": 5, "val": ["a.jsonl"]}, "only one of them"),
        ({"name": "x_val"}, "expected --name"),
        ({"name": "a/b"}, "expected --name with only letters, digits, '_'"),
        ({"separator": "|"}, "no source is one"),
        ({"separator": ""}, "--separator is empty"),
        ({"val": [""]}, "got an empty string"),
    ],
)
def test_invalid_arguments_are_rejected(corpus, options: dict, match: str, workdir: Path) -> None:
    corpus.write(workdir / "a.jsonl", ["text"])
    with pytest.raises(ConfigError, match=match):
        prepare(["a.jsonl"], "out", GPT2, **{"name": "a", **options})
    assert not (workdir / "out").exists()


def test_default_names_come_from_the_source(tmp_path: Path) -> None:
    assert source_name("HuggingFaceFW/fineweb:sample-10BT") == "fineweb"
    assert source_name("texts/my_val_set.jsonl.gz") == "my-val-set"
    assert source_name(str(tmp_path / "x" / "*.parquet")) == "x"
    assert source_name("licenses/Apache-2.0.txt") == "Apache-2-0"
    assert default_directory("Apache-2-0", ["Apache-2.0.txt"], 10_000) == Path("data/Apache-2-0-10K")
    assert default_directory("fineweb", [FINEWEB], 20_000_000) == Path("data/fineweb20M")
    assert default_directory("fineweb", [FINEWEB], None) == Path("data/fineweb10B")
    assert default_directory("fineweb", ["fineweb/*.parquet"], None) == Path("data/fineweb")
    assert default_directory("wiki", ["wiki"], 1_500_000_000) == Path("data/wiki1.5B")
    assert default_directory("wiki", ["wiki"], None) == Path("data/wiki")


def test_map_in_order_limits_prefetching() -> None:
    read = 0

    def items():
        nonlocal read
        for number in range(100):
            read += 1
            yield number

    def slow_when_even(number: int) -> int:
        time.sleep(0.002 * (number % 2 == 0))
        return number * number

    for done, result in enumerate(map_in_order(slow_when_even, items(), workers=3), 1):
        assert result == (done - 1) ** 2
        assert read <= done + 2 * 3


@pytest.mark.parametrize(
    ("file", "digest"),
    [("val-000000.parquet", "25e220a97a3d491b3612c31c51ff960d84971ce9f86977d7610cb9b971f38d94")],
)
def test_reference_corpus_gives_the_known_shard(file: str, digest: str, shared_data: Path, tmp_path: Path) -> None:
    manifest = prepare([str(shared_data / "webmix" / file)], tmp_path, GPT2, name="webmix")
    assert (manifest.shards[0].sha256, manifest.tokens("train")) == (digest, 1_500_147)
    assert sha256_file(tmp_path / "webmix_train_000000.bin") == digest


@pytest.mark.ray
def test_ray_writes_the_same_bytes_as_threads(corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from whimbrel.data.prepare import encode_on_ray

    sources = [
        str(corpus.write(tmp_path / f"{i}.{form}", corpus.documents(120, i)))
        for i, form in enumerate(("parquet", "jsonl", "jsonl.zst"))
    ]
    options = {"name": "a", "shard_size": 20_000, "val_tokens": 3000}
    prepare(sources, tmp_path / "threads", GPT2, **options)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        prepare(sources, tmp_path / "ray", GPT2, backend=encode_on_ray, **options)
        assert corpus.bytes_of(tmp_path / "ray") == corpus.bytes_of(tmp_path / "threads")
        (tmp_path / "2.jsonl.zst").write_bytes(b"junk")
        with pytest.raises(DataError, match=r"2\.jsonl\.zst is not a readable zstd file"):
            prepare(sources, tmp_path / "bad", GPT2, backend=encode_on_ray, name="a")
    finally:
        ray.shutdown()


def test_validation_documents_are_unique(corpus, texts: list[str], tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "a.jsonl", [text for text in texts for _ in range(4)])
    prepare([str(source)], tmp_path / "out", GPT2, name="a", val_tokens=5000)
    tokens = np.array(tokens_of(tmp_path / "out", "val"))
    pieces = [tuple(piece.tolist()) for piece in np.split(tokens, np.flatnonzero(tokens == GPT2.eot_id))[1:]]
    assert len(pieces) == len(set(pieces)) > 0


def test_file_used_for_both_splits_is_rejected(corpus, texts: list[str], tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "a.jsonl", texts)
    copy = shutil.copy(source, tmp_path / "b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl.*a\.jsonl have the same content"):
        prepare([str(source)], tmp_path / "out", GPT2, name="a", val=[str(copy)])
    assert not (tmp_path / "out").exists()


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
def test_malformed_manifest_is_an_error(corpus, tmp_path: Path, change: Callable[[dict], object]) -> None:
    source = corpus.write(tmp_path / "a.jsonl", corpus.documents(5))
    prepare([str(source)], tmp_path / "out", GPT2, name="a")
    file = tmp_path / "out" / "manifest.json"
    table = json.loads(file.read_text())
    change(table)
    file.write_text(json.dumps(table))
    with pytest.raises(DataError, match=r"manifest\.json is not a valid shard manifest"):
        read_manifest(tmp_path / "out")
    file.write_text("[" * 100_000)
    with pytest.raises(DataError, match="nested too deeply"):
        read_manifest(tmp_path / "out")


class RecordedProgress:
    """A progress display that records its calls."""

    def __init__(self) -> None:
        self.began: tuple[object, ...] = ()
        self.done = 0
        self.expected: list[int] = []
        self.ends: list[str] = []

    def start(self, total: int | None, unit: str, done: int = 0) -> None:
        self.began, self.done = (total, unit, done), done

    def expect(self, total: int) -> None:
        self.expected.append(total)

    def advance(self, count: int) -> None:
        self.done += count

    def finish(self) -> None:
        self.ends.append("finish")

    def close(self) -> None:
        self.ends.append("close")


def test_progress_estimates_the_total_from_the_bytes_read(corpus, tmp_path: Path) -> None:
    sources = [
        str(corpus.write(tmp_path / name, corpus.documents(400, i))) for i, name in enumerate(("a.parquet", "b.jsonl"))
    ]
    val = [str(corpus.write(tmp_path / "v.jsonl", corpus.documents(50, 9)))]
    recorded = RecordedProgress()
    manifest = prepare(sources, tmp_path / "out", GPT2, name="a", val=val, progress=recorded)
    total = manifest.tokens("train")
    assert recorded.began == (None, "tokens", 0)
    assert recorded.done == recorded.expected[-1] == total
    assert len(recorded.expected) > 5, "the validation source says nothing of the training tokens"
    assert all(0.5 * total < expected < 2 * total for expected in recorded.expected)
    assert recorded.ends == ["finish", "close"]
    budget = RecordedProgress()
    prepare(sources, tmp_path / "budget", GPT2, name="a", total_tokens=900, progress=budget)
    assert (budget.began, budget.done, budget.expected) == ((900, "tokens", 0), 900, [])


def test_progress_of_a_resumed_run_starts_at_the_earlier_tokens(
    corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(corpus.write(tmp_path / "a.parquet", corpus.documents(400)))
    options = {"name": "a", "shard_size": 10_000, "backend": encode_on_threads(1)}
    first, write, saves = RecordedProgress(), manifest_module.write_manifest, iter(range(100))

    def failing(directory: Path, manifest: manifest_module.Manifest) -> None:
        if next(saves) == 2:
            raise DataError("stop")
        write(directory, manifest)

    with monkeypatch.context() as patch, pytest.raises(DataError, match="stop"):
        patch.setattr("whimbrel.data.prepare.write_manifest", failing)
        prepare([source], tmp_path / "out", GPT2, progress=first, **options)
    assert first.ends == ["close"], "only a job that is done is finished"
    num_tokens, second = read_manifest(tmp_path / "out").tokens("train"), RecordedProgress()
    assert num_tokens > 0
    manifest = prepare([source], tmp_path / "out", GPT2, progress=second, **options)
    assert second.began == (None, "tokens", num_tokens)
    assert second.done == second.expected[-1] == manifest.tokens("train")
