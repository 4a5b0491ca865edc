"""Values for the targets of a dataset that a frozen model computes once, before training, and that are kept on disk.

A directory with one array per value. Its rows are the targets of the dataset (those that are not -100) in order, so
prompts take no space, and arrays are memory-mapped, so a dataset of any size takes no memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whimbrel.base.errors import DataError
from whimbrel.base.files import atomic_directory, parse_json
from whimbrel.distributed import World
from whimbrel.models import IGNORE_INDEX
from whimbrel.models.layers import eval_mode
from whimbrel.train.batches import collate, to_device
from whimbrel.train.preference import REFERENCE_COLUMN, token_log_probs

__all__ = ["TargetValuesDataset", "compute_target_values", "precompute_reference"]

SETTINGS_FILE, OFFSETS_FILE = "settings.json", "offsets.npy"
Compute = Callable[[nn.Module, Mapping[str, Any]], Mapping[str, Tensor]]
"""From a model and a batch to values of shape (*targets, ...), by name."""
Context = Callable[[], AbstractContextManager[Any]]


class TargetValuesDataset:
    """A map-style dataset whose rows get the values in `path`, in the shape of their targets; 0 at other tokens."""

    def __init__(self, dataset: Any, path: str | Path) -> None:
        self.dataset, self.path = dataset, Path(path)
        self.settings: dict[str, Any] = parse_json((self.path / SETTINGS_FILE).read_bytes())
        """What the values were computed with, such as the temperature of a teacher."""
        self._offsets = np.load(self.path / OFFSETS_FILE, allow_pickle=False)
        self._values = {
            name: np.load(self.path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in self.settings["values"]
        }
        if len(dataset) != len(self):
            raise DataError(f"expected {len(self)} rows, for which {path} has values, got {len(dataset)}: {_REMEDY}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.dataset[index])
        is_target = np.asarray(row["targets"]) != IGNORE_INDEX
        start, end = self._offsets[index % len(self)], self._offsets[index % len(self) + 1]
        if is_target.sum() != end - start:
            raise DataError(
                f"expected {end - start} targets in row {index}, for which {self.path} has values, got "
                f"{is_target.sum()}: {_REMEDY}"
            )
        for name, values in self._values.items():
            dense = np.zeros((*is_target.shape, *values.shape[1:]), dtype=values.dtype)
            dense[is_target] = values[start:end]
            row[name] = torch.from_numpy(dense)
        return row


_REMEDY = "the data has changed; delete the directory to compute them again"


def precompute_reference(
    model: nn.Module,
    dataset: Any,
    path: str | Path,
    *,
    batch_size: int = 8,
    reference: Context = nullcontext,
    autocast: Context = nullcontext,
    data_collator: Callable[[list[Any]], Any] = collate,
    world: World | None = None,
) -> TargetValuesDataset:
    """`dataset` with the log-probabilities of `model`, or of `model` in the context `reference()`, for DPO.

    Call it before training: values that already exist in `path` are reused, so that a resumed run has the same
    reference. `autocast` should be the same as in training (`MixedPrecision.autocast`): otherwise, the model differs
    from its reference by rounding errors before the first step. Other arguments are those of `compute_target_values`.
    """

    def compute(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        with reference():
            return {REFERENCE_COLUMN: token_log_probs(model, batch)}

    return compute_target_values(
        model, dataset, path, compute, {"kind": "reference"},
        batch_size=batch_size, autocast=autocast, data_collator=data_collator, world=world,
    )  # fmt: skip


def compute_target_values(
    model: nn.Module,
    dataset: Any,
    path: str | Path,
    compute: Compute,
    settings: Mapping[str, Any],
    *,
    batch_size: int = 8,
    autocast: Context = nullcontext,
    data_collator: Callable[[list[Any]], Any] = collate,
    world: World | None = None,
) -> TargetValuesDataset:
    """`dataset` with values for each target, computed in evaluation mode and written to the directory `path`.

    Runs on the device of the model; of several processes (`world`), on rank 0, so the model must not be sharded. If
    `path` exists, its values are used; raises DataError if they are for other data or `settings`.
    """
    write = partial(_write_values, model, dataset, Path(path), compute, settings, batch_size, autocast, data_collator)
    (World() if world is None else world).run_on_main(write)
    return TargetValuesDataset(dataset, path)


def _write_values(
    model: nn.Module,
    dataset: Any,
    path: Path,
    compute: Compute,
    settings: Mapping[str, Any],
    batch_size: int,
    autocast: Context,
    data_collator: Callable[[list[Any]], Any],
) -> None:
    """Write the directory, unless it exists."""
    offsets, digest = _scan(dataset)
    settings = {**settings, "targets": int(offsets[-1]), "sha256": digest}
    if (path / SETTINGS_FILE).exists():
        found = parse_json((path / SETTINGS_FILE).read_bytes())
        for name, value in settings.items():
            if found.get(name) != value:
                raise DataError(
                    f"expected {name} = {value} in {path}, got {found.get(name)}: delete the directory to compute the "
                    "values again"
                )
        return
    device = next(model.parameters()).device
    with atomic_directory(path) as folder, eval_mode(model):
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for start in range(0, len(dataset), batch_size):
            rows = range(start, min(start + batch_size, len(dataset)))
            batch = to_device(data_collator([dataset[row] for row in rows]), device)
            is_target = batch["targets"] != IGNORE_INDEX
            with autocast():
                computed = compute(model, batch)
            for name, dense in computed.items():
                values = dense[is_target].cpu().numpy()
                if name not in arrays:
                    shape = (int(offsets[-1]), *values.shape[1:])
                    arrays[name] = np.lib.format.open_memmap(
                        folder / f"{name}.npy", mode="w+", dtype=values.dtype, shape=shape
                    )
                arrays[name][offsets[rows.start] : offsets[rows.stop]] = values
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        np.save(folder / OFFSETS_FILE, offsets, allow_pickle=False)
        (folder / SETTINGS_FILE).write_text(json.dumps({**settings, "values": sorted(arrays)}, indent=2))


def _scan(dataset: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray[Any, Any], str]:
    """Offsets of the targets of each row among all targets, and a hash of inputs and targets."""
    counts, digest = [0], hashlib.sha256()
    for index in range(len(dataset)):
        row = dataset[index]
        for name in ("input_ids", "targets"):
            if name not in row:
                raise DataError(f"expected rows with input_ids and targets, got {', '.join(row)}")
            digest.update(np.asarray(row[name], dtype=np.int64).tobytes())
        counts.append(int((np.asarray(row["targets"]) != IGNORE_INDEX).sum()))
    offsets = np.cumsum(counts, dtype=np.int64)
    if not offsets[-1]:
        raise DataError("expected at least one target in the dataset, got none: all targets are -100")
    return offsets, digest.hexdigest()
