from __future__ import annotations

import sys
from pathlib import Path

import pytest

from whimbrel.base.errors import DataError, MissingExtraError
from whimbrel.data import read_shard
from whimbrel.data.hub import HubDataset
from whimbrel.data.prepare import prepare
from whimbrel.data.sources import open_source
from whimbrel.tokenization import load_tokenizer


@pytest.fixture
def hub(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A hub that has one dataset; what it was asked for."""
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> object:
        asked.append((name, config, split, streaming))
        return datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_hub_dataset_is_streamed_by_name(hub, texts: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    prepare(["owner/birds:small"], tmp_path, tokenizer, name="birds")
    assert hub == [("owner/birds", "small", "train", True)]
    wanted = [t for text in texts for t in (tokenizer.eot_id, *tokenizer.encode(text))]
    assert read_shard(tmp_path / "birds_train_000000.bin").tolist() == wanted


def test_a_resume_asks_the_hub_to_skip(hub, texts: list[str]) -> None:
    (origin,) = open_source("owner/birds")
    batches = list(origin.batches("text", None, 2))
    assert [number for number, _ in batches[0].documents()][:2] == [128, 129]
    assert [text for batch in batches for _, text in batch.documents()] == texts[128:]


def test_a_row_without_text_is_named(hub) -> None:
    batch = next(HubDataset("owner/birds", None).batches("body", None, 0))
    with pytest.raises(DataError, match=r"owner/birds, row 0: no text under 'body'; its keys are text"):
        batch.documents()


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        MissingExtraError, match=r"^no local file or folder owner/birds; as a hub dataset it needs .* 'whimbrel\[hub\]'"
    ):
        next(HubDataset("owner/birds", None).batches("text", None, 0))
