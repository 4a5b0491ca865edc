"""What `prepare` tells a progress display."""

from __future__ import annotations

from pathlib import Path

import pytest

from whimbrel.base.errors import DataError
from whimbrel.data import manifest as manifests
from whimbrel.data import read_manifest
from whimbrel.data.pipeline import encode_on_threads
from whimbrel.data.prepare import prepare
from whimbrel.tokenization import load_tokenizer

GPT2 = load_tokenizer("gpt2")


class Told:
    """A progress display that keeps what it is told."""

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


def test_the_total_is_estimated_from_the_bytes_read(corpus, tmp_path: Path) -> None:
    sources = [
        str(corpus.write(tmp_path / name, corpus.documents(400, i))) for i, name in enumerate(("a.parquet", "b.jsonl"))
    ]
    val = [str(corpus.write(tmp_path / "v.jsonl", corpus.documents(50, 9)))]
    told = Told()
    manifest = prepare(sources, tmp_path / "out", GPT2, name="a", val=val, progress=told)
    total = manifest.tokens("train")
    assert told.began == (None, "tokens", 0)
    assert told.done == told.expected[-1] == total
    assert len(told.expected) > 5, "the validation source says nothing of the training tokens"
    assert all(0.5 * total < expected < 2 * total for expected in told.expected)
    assert told.ends == ["finish", "close"]
    budget = Told()
    prepare(sources, tmp_path / "budget", GPT2, name="a", total_tokens=900, progress=budget)
    assert (budget.began, budget.done, budget.expected) == ((900, "tokens", 0), 900, [])


def test_a_resumed_run_tells_what_was_done_before(corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(corpus.write(tmp_path / "a.parquet", corpus.documents(400)))
    options = {"name": "a", "shard_size": 10_000, "engine": encode_on_threads(1)}
    first, plain, saves = Told(), manifests.write_manifest, iter(range(100))

    def failing(directory: Path, manifest: manifests.Manifest) -> None:
        if next(saves) == 2:
            raise DataError("stop")
        plain(directory, manifest)

    with monkeypatch.context() as patch, pytest.raises(DataError, match="stop"):
        patch.setattr("whimbrel.data.prepare.write_manifest", failing)
        prepare([source], tmp_path / "out", GPT2, progress=first, **options)
    assert first.ends == ["close"], "only a job that is done is finished"
    held, second = read_manifest(tmp_path / "out").tokens("train"), Told()
    assert held > 0
    manifest = prepare([source], tmp_path / "out", GPT2, progress=second, **options)
    assert second.began == (None, "tokens", held)
    assert second.done == second.expected[-1] == manifest.tokens("train")
