"""Columns of a `datasets.Dataset` that the model has no use for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from whimbrel.base.errors import DataError
from whimbrel.base.logging import get_logger

__all__ = ["drop_unused_columns"]

LABELS = ("label", "label_ids", "labels")


def drop_unused_columns(dataset: Any, model: nn.Module, labels: Sequence[str] = ()) -> Any:
    """The dataset without the columns that `forward` does not name, before any collator sees them, as people know it.

    `labels` are kept too. A `forward` with only `**kwargs` may use every column, and other kinds of datasets are
    returned unchanged.
    """
    names = getattr(dataset, "column_names", None)
    parameters = inspect.signature(model.forward).parameters.values()
    wanted = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if not isinstance(names, list) or not hasattr(dataset, "remove_columns") or not wanted:
        return dataset
    unused = [name for name in names if name not in wanted and name not in (*LABELS, *labels)]
    if unused and len(unused) == len(names):
        raise DataError(
            f"none of the columns ({', '.join(names)}) is an argument of {type(model).__name__} "
            f"({', '.join(sorted(wanted))}): tokenize the text first"
        )
    if unused:
        get_logger(__name__).info("columns that %s does not take are left out: %s", type(model).__name__, unused)
    return dataset.remove_columns(unused) if unused else dataset
