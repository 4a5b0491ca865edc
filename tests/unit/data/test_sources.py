"""Sources: files, directories, globs and Hub datasets are read as documents, in order."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whimbrel.base.errors import DataError, MissingExtraError
from whimbrel.data import read_shard
from whimbrel.data.prepare import prepare
from whimbrel.data.sources import HubDataset, iter_documents, resolve_source
from whimbrel.tokenization import load_tokenizer

FORMS = ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.txt.gz", "a.txt.zst")


def test_directories_and_globs_are_read_in_name_order(corpus, texts: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    (folder / "b").mkdir(parents=True)
    corpus.write(folder / "b" / "2.jsonl", texts[20:30])
    corpus.write(folder / "a.parquet", texts[:20])
    (folder / "ignored.png").write_bytes(b"\x89PNG")
    assert list(iter_documents([str(folder)])) == texts[:30]
    assert list(iter_documents([str(folder / "**" / "*.jsonl")])) == texts[20:30]
    assert list(iter_documents([str(folder / "**.parquet")])) == texts[:20]
    assert [source.name for source in resolve_source(str(folder))] == ["a.parquet", "b/2.jsonl"]


def test_hidden_files_of_a_directory_are_skipped(corpus, texts: list[str], tmp_path: Path) -> None:
    for name in ("seen.txt", ".hidden.txt", ".git/in.txt", "deep/.cache/in.txt"):
        (tmp_path / ".data" / name).parent.mkdir(parents=True, exist_ok=True)
        corpus.write(tmp_path / ".data" / name, [name])
    assert list(iter_documents([str(tmp_path / ".data")])) == ["seen.txt"]


def test_ignored_files_of_a_directory_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "b.py", "B.PY", "c.csv.gz", "LICENSE", "Apache-2.0", "GPL", ".git/config", ".DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for _ in range(2):
        assert list(iter_documents([str(tmp_path)])) == ["a.txt"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    counts = r"ignoring 6 of 7 files in .* \(3 without extension, 2 \.py, 1 \.csv\.gz\)"
    assert re.match(rf"{counts}: only .*\.md files are read; pass a file", record.getMessage())


def test_only_the_most_frequent_ignored_suffixes_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "a.png", *(f"{number}.{suffix}" for suffix in "cdefgh" for number in range(2))):
        (tmp_path / name).touch()
    resolve_source(str(tmp_path))
    assert "(2 .c, 2 .d, 2 .e, 2 .f, 2 .g, 3 others)" in caplog.text


@pytest.mark.parametrize("name", ["a.py", "LICENSE", "Apache-2.0"])
def test_a_named_file_with_an_unknown_suffix_is_text(tmp_path: Path, name: str) -> None:
    text = "é" * 70_000  # the first block that is read ends in the middle of a character
    (tmp_path / name).write_text(f"a{text}", encoding="utf-8")
    for source in (tmp_path / name, tmp_path / "*"):
        assert list(iter_documents([str(source)])) == [f"a{text}"]


def test_sources_without_text_are_an_error(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"a\.txt, .*b\.jsonl contain no text"):
        list(iter_documents([str(tmp_path / name) for name in ("a.txt", "b.jsonl")]))


def test_size_of_gzip_files_is_exact(tmp_path: Path, shakespeare: str) -> None:
    (bundled,) = resolve_source("shakespeare")
    assert bundled.text_bytes() == len(shakespeare.encode()) == 1_115_394
    halves = [gzip.compress(half.encode()) for half in (shakespeare[:-1000], shakespeare[-1000:])]
    (tmp_path / "two.txt.gz").write_bytes(b"".join(halves))  # gzip stores the size of the second only
    (joined,) = resolve_source(str(tmp_path / "two.txt.gz"))
    assert len(shakespeare) / 2 < joined.text_bytes() < 2 * len(shakespeare)
    (tmp_path / "empty.txt.gz").touch()
    (empty,) = resolve_source(str(tmp_path / "empty.txt.gz"))
    assert empty.text_bytes() == 0


@pytest.mark.parametrize("form", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_documents_over_the_size_limit_are_rejected(
    corpus, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(corpus.write(tmp_path / form, ["word " * 800_000, "more " * 800_000]))
    monkeypatch.setattr("whimbrel.data.sources.MAX_DOCUMENT_BYTES", 1 << 21)
    with pytest.raises(DataError, match=rf"{form} has a document of more than 2 MiB.*--separator"):
        list(iter_documents([source]))
    monkeypatch.setattr("whimbrel.data.sources.MAX_DOCUMENT_BYTES", 5_000_000)
    separator = "<|doc|>" if ".txt" in form else None
    assert len(list(iter_documents([source], separator=separator))) == 2


@pytest.mark.parametrize("form", FORMS)
def test_batches_report_the_share_of_the_file_read(corpus, form: str, tmp_path: Path) -> None:
    source = str(corpus.write(tmp_path / form, corpus.documents(4000)))
    (source,) = resolve_source(source)
    shares = [batch.progress for batch in source.batches("text", "<|doc|>", 0)]
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.5 < shares[-2] <= shares[-1] == 1.0
    assert [batch.progress for batch in source.batches("text", "<|doc|>", 2)] == shares[2:]


def test_long_lines_and_a_missing_final_newline_are_read(corpus, tmp_path: Path) -> None:
    texts = ["x" * 3_000_000, "short", "y" * 1_500_000]
    source = corpus.write(tmp_path / "a.jsonl", texts)
    source.write_bytes(source.read_bytes().rstrip() + b"")
    assert list(iter_documents([str(source)])) == texts
    (tmp_path / "a.txt").write_text("<|doc|>".join(texts))
    assert list(iter_documents([str(tmp_path / "a.txt")], separator="<|doc|>")) == texts


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"])
def test_newlines_in_a_separator_match_lf_and_crlf(tmp_path: Path, newline: str, separator: str) -> None:
    texts = ["one\ntwo", "three", "x" * 1_500_000, "four"]
    raw = "\n\n".join(texts).replace("\n", newline).encode()
    (tmp_path / "a.txt").write_bytes(raw)
    expected = [text.replace("\n", newline) for text in texts]
    assert list(iter_documents([str(tmp_path / "a.txt")], separator=separator)) == expected


def test_text_of_the_package_is_a_source(tmp_path: Path, shakespeare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(iter_documents(["shakespeare"])) == [shakespeare]
    Path("shakespeare").mkdir()
    Path("shakespeare/own.txt").write_text("Own text comes first.")
    assert list(iter_documents(["shakespeare"])) == ["Own text comes first."]


def test_lone_surrogates_are_reported_or_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "\\ud83d"}\n{"text": "three"}\n')
    source = [str(tmp_path / "a.jsonl")]
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .* lone surrogate at character 0"):
        list(iter_documents(source))
    errors: list[DataError] = []
    assert list(iter_documents(source, on_error=errors.append)) == ["one", "three"]
    assert len(errors) == 1


def test_limit_takes_the_beginning_of_every_source_by_its_size(tmp_path: Path) -> None:
    for name, size in {"a": 6000, "b": 3000, "c": 1000}.items():
        (tmp_path / f"{name}.txt").write_text(name * size)
    sources = [str(tmp_path)]
    assert list(iter_documents(sources, max_bytes=1000)) == ["a" * 600, "b" * 300, "c" * 100]
    assert list(iter_documents(sources, max_bytes=10_000)) == list(iter_documents(sources))


def test_limit_does_not_split_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("äöü")
    assert list(iter_documents([str(tmp_path)], max_bytes=3)) == ["ä"]


def test_rest_of_a_short_document_goes_to_the_next(tmp_path: Path) -> None:
    rows = [{"text": "a" * 30}, {"text": "b" * 100}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert list(iter_documents([str(tmp_path)], max_bytes=40)) == ["a" * 30, "b" * 10]


def test_unused_separator_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert len(list(iter_documents([str(tmp_path / "a.txt")], separator="\n\n"))) == 1
    assert "does not contain the separator" in caplog.text


@pytest.fixture
def hub(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A fake Hub with one dataset; returns the recorded `load_dataset` calls."""
    datasets = pytest.importorskip("datasets")
    calls: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> object:
        calls.append((name, config, split, streaming))
        return datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_hub_dataset_is_streamed(hub, texts: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    prepare(["owner/birds:small"], tmp_path, tokenizer, name="birds")
    assert hub == [("owner/birds", "small", "train", True)]
    wanted = [t for text in texts for t in (tokenizer.eot_id, *tokenizer.encode(text))]
    assert read_shard(tmp_path / "birds_train_000000.bin").tolist() == wanted


def test_hub_dataset_skips_rows_on_resume(hub, texts: list[str]) -> None:
    (source,) = resolve_source("owner/birds")
    batches = list(source.batches("text", None, 2))
    assert [number for number, _ in batches[0].parse()][:2] == [128, 129]
    assert [text for batch in batches for _, text in batch.parse()] == texts[128:]


def test_hub_row_without_text_is_an_error(hub) -> None:
    batch = next(HubDataset("owner/birds", None).batches("body", None, 0))
    with pytest.raises(DataError, match=r"owner/birds, row 0: no text in 'body'.* text$"):
        raise batch.parse()[0][1]


class Failing:
    """A dataset that fails after `rows`."""

    def __init__(self, rows: list[dict[str, str]], error: Exception) -> None:
        self.rows, self.error = rows, error

    def skip(self, count: int) -> Iterator[dict[str, str]]:
        yield from self.rows[count:]
        raise self.error


@pytest.mark.parametrize("skip", [0, 1])
def test_failure_while_streaming_names_the_row_and_the_cause(monkeypatch: pytest.MonkeyPatch, skip: int) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = Failing([{"text": "a bird"}] * 100, ConnectionError("connection\nreset by peer"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: dataset)
    with pytest.raises(DataError, match=r"owner/birds, row 100: .*\(connection reset by peer\)") as caught:
        list(HubDataset("owner/birds", None).batches("text", None, skip))
    assert "not found" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError("Dataset 'owner/birds' doesn't exist"), r"owner/birds was not found .*doesn't exist"),
        (ConnectionError("timed out"), r"cannot open owner/birds .*\(timed out\).* network"),
        (ValueError("BuilderConfig 'x' not found"), r"cannot open owner/birds .*BuilderConfig 'x'"),
    ],
)
def test_dataset_that_cannot_be_opened_reports_the_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=message) as caught:
        next(HubDataset("owner/birds", None).batches("text", None, 0))
    assert "whimbrel" not in str(caught.value)  # several commands read datasets


def test_missing_datasets_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"owner/birds.*Hub dataset needs .* 'whimbrel\[hub\]'"):
        next(HubDataset("owner/birds", None).batches("text", None, 0))
