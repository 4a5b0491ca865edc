"""Datasets of the Hugging Face hub, streamed: nothing is stored but what the shards keep. Needs the extra `hub`."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from whimbrel.base.errors import DataError, MissingExtraError
from whimbrel.data.batches import BATCH_DOCUMENTS, Batch, Documents
from whimbrel.data.manifest import SourceRecord

__all__ = ["HubDataset"]


@dataclass(frozen=True, slots=True)
class HubDataset:
    """The training split of a hub dataset, `owner/dataset` or `owner/dataset:config`."""

    dataset: str
    config: str | None

    @classmethod
    def named(cls, source: str) -> HubDataset:
        """The dataset that `owner/dataset[:config]` names."""
        dataset, _, config = source.partition(":")
        return cls(dataset, config or None)

    @property
    def name(self) -> str:
        """As it was given."""
        return f"{self.dataset}:{self.config}" if self.config else self.dataset

    def record(self, role: str) -> SourceRecord:
        """The hub keeps no size that could be checked before reading."""
        return SourceRecord(role=role, name=self.name, size=0, sha256="")

    def text_bytes(self) -> None:
        """Not known before reading."""

    def batches(self, text_key: str, _separator: str | None, skip: int) -> Iterator[Batch]:
        """Rows as the hub sends them; only text files have a separator."""
        place, row = f"{self.name}, row", skip * BATCH_DOCUMENTS
        rows = self._rows(row)
        while some := list(itertools.islice(rows, BATCH_DOCUMENTS)):
            yield Batch(place, functools.partial(_texts, some, place, row, text_key), read=None)
            row += len(some)

    def _rows(self, skip: int) -> Iterator[dict[str, Any]]:
        try:
            import datasets
        except ImportError as error:
            raise MissingExtraError(
                f"no local file or folder {self.name}; as a hub dataset it", "datasets", "hub"
            ) from error
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the last failure is told below
        try:
            yield from datasets.load_dataset(self.dataset, self.config, split="train", streaming=True).skip(skip)
        except Exception as error:  # each transport of the hub client has an error tree of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(
                f"{self.name} is no local path, and the Hugging Face hub did not give it ({reason}): "
                "go online, or give local files, as in `whimbrel prepare 'fineweb/*.parquet'`"
            ) from error


def _texts(rows: list[dict[str, Any]], place: str, first: int, text_key: str) -> Documents:
    documents: Documents = []
    for number, row in enumerate(rows, first):
        if not isinstance(row.get(text_key), str):
            raise DataError(f"{place} {number}: no text under '{text_key}'; its keys are {', '.join(row)}")
        if row[text_key]:
            documents.append((number, row[text_key]))
    return documents
