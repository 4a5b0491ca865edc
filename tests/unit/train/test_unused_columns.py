"""Dropping the columns of a `datasets.Dataset` that the model does not accept."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn

from whimbrel.base.errors import DataError
from whimbrel.train.batches import drop_unused_columns


class Named(nn.Module):
    """forward has a named argument and **kwargs."""

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        return x


class Keywords(nn.Module):
    """forward has only **kwargs."""

    def forward(self, **batch: Tensor) -> Tensor:
        return batch["x"]


class Positional(nn.Module):
    """forward has only *args."""

    def forward(self, *batch: Tensor) -> Tensor:
        return batch[0]


def rows() -> Dataset:
    return Dataset.from_dict({"x": [1.0, 2.0], "text": ["a", "b"], "label": [0, 1], "more": [0, 0]})


def test_columns_that_forward_does_not_accept_are_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="whimbrel"):
        assert drop_unused_columns(rows(), Named()).column_names == ["x", "label"]
    assert [record.getMessage() for record in caplog.records] == [
        "dropping columns that Named does not accept: ['text', 'more']"
    ]
    assert drop_unused_columns(rows().to_iterable_dataset(), Named()).column_names == ["x", "label"]


@pytest.mark.parametrize("model", [Keywords(), Positional()])
def test_a_forward_with_only_kwargs_keeps_every_column(model: nn.Module) -> None:
    assert drop_unused_columns(rows(), model).column_names == ["x", "text", "label", "more"]


def test_other_kinds_of_datasets_are_unchanged() -> None:
    listed = [{"x": torch.zeros(1), "text": "a"}]
    assert drop_unused_columns(listed, Named()) is listed


def test_an_untokenized_dataset_raises_an_error() -> None:
    class Reader(nn.Module):
        def forward(self, input_ids: Any) -> Any:
            return input_ids

    with pytest.raises(DataError, match=r"none of the columns \(text\)"):
        drop_unused_columns(Dataset.from_dict({"text": ["a"]}), Reader())
