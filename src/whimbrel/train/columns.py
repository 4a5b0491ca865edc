"""Columns of a `datasets.Dataset` that the model has no use for."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from whimbrel.base.logging import get_logger

__all__ = ["drop_unused_columns"]

LABELS = ("label", "label_ids", "labels")


def drop_unused_columns(dataset: Any, model: nn.Module) -> Any:
    """The dataset without the columns that `forward` does not name, as people know it; other datasets as they are."""
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, list) or not hasattr(dataset, "remove_columns"):
        return dataset
    wanted = {*inspect.signature(model.forward).parameters, *LABELS}
    unused = [name for name in names if name not in wanted]
    if unused:
        get_logger(__name__).info("columns that %s does not take are left out: %s", type(model).__name__, unused)
    return dataset.remove_columns(unused) if unused else dataset
