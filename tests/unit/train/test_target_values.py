"""Values of targets on disk: computed once, used again, and refused for other data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from whimbrel.base.errors import DataError
from whimbrel.models import GPT, GPTConfig
from whimbrel.train import DPO, precompute_reference, precompute_teacher
from whimbrel.train.batches import collate
from whimbrel.train.preference import token_log_probs
from whimbrel.train.target_values import TargetValuesDataset


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=31, context_length=8, num_layers=1, embd_size=16, num_heads=2))


def make_rows(count: int = 5) -> list[dict[str, Tensor]]:
    """Pairs of 6 tokens, with 2 to 6 targets."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": ids, "targets": ids.roll(-1, 1)}
        for ids in torch.randint(0, 31, (count, 2, 6), generator=generator)
    ]
    for index, row in enumerate(rows):
        row["targets"][:, -1] = -100
        row["targets"][0, : index % 3 + 1] = -100
    return rows


def test_values_of_rows_are_those_of_the_model(tmp_path: Path) -> None:
    model, rows = make_model().train(), make_rows()
    data = precompute_reference(model, rows, tmp_path / "values", batch_size=2)
    assert model.training
    assert len(data) == len(rows)
    expected = token_log_probs(model, collate(rows)).detach()
    for index, row in enumerate(rows):
        found = data[index]
        assert torch.equal(found["input_ids"], row["input_ids"])
        torch.testing.assert_close(found["reference_log_probs"], expected[index])
    torch.testing.assert_close(data[-1]["reference_log_probs"], expected[-1])
    stored = np.load(tmp_path / "values" / "reference_log_probs.npy", allow_pickle=False)
    assert stored.shape == (sum(int((row["targets"] != -100).sum()) for row in rows),)
    assert "reference_log_probs" not in rows[0]


def test_lists_are_accepted_as_rows(tmp_path: Path) -> None:
    rows = [{name: value.tolist() for name, value in row.items()} for row in make_rows()]
    found = precompute_reference(make_model(), rows, tmp_path / "values")[1]
    assert found["reference_log_probs"].shape == (2, 6)


def test_the_reference_is_computed_in_its_context(tmp_path: Path) -> None:
    model, rows = make_model(), make_rows()

    @contextlib.contextmanager
    def reference() -> Iterator[None]:
        weight = model.lm_head.weight.data
        model.lm_head.weight.data = 2 * weight
        yield
        model.lm_head.weight.data = weight

    found = precompute_reference(model, rows, tmp_path / "values", reference=reference)[0]["reference_log_probs"]
    with reference():
        expected = token_log_probs(model, collate(rows[:1]))[0].detach()
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, token_log_probs(model, collate(rows[:1]))[0])


def test_values_are_computed_under_autocast(tmp_path: Path) -> None:
    """As in training: a policy that is its own reference then has a margin of exactly 0."""
    model, rows = make_model(), make_rows()
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    data = precompute_reference(model, rows, tmp_path / "values", autocast=autocast)
    with autocast():
        metrics = DPO()(model, collate([data[index] for index in range(len(rows))]), torch.tensor(5)).metrics
    assert metrics["rewards/margins"] == 0
    exact = token_log_probs(model, collate(rows[:1]))[0]
    assert not torch.equal(data[0]["reference_log_probs"], exact)


def test_a_resumed_run_uses_the_values_of_the_first(tmp_path: Path) -> None:
    model, rows = make_model(), make_rows()
    before = precompute_reference(model, rows, tmp_path / "values")[0]["reference_log_probs"]
    with torch.no_grad():
        model.lm_head.weight.normal_()
    again = precompute_reference(model, rows, tmp_path / "values")[0]["reference_log_probs"]
    assert torch.equal(before, again)


def test_a_failed_computation_leaves_nothing(tmp_path: Path) -> None:
    def collate_twice(rows: list[Any], calls: list[int] = []) -> Any:  # noqa: B006
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("disk on fire")
        return collate(rows)

    with pytest.raises(RuntimeError, match="on fire"):
        precompute_reference(make_model(), make_rows(), tmp_path / "values", batch_size=2, data_collator=collate_twice)
    assert not list(tmp_path.iterdir())


def test_values_of_other_data_or_settings_are_refused(tmp_path: Path) -> None:
    model, rows = make_model(), make_rows()
    path = tmp_path / "values"
    precompute_teacher(model, rows, path, k=3)
    with pytest.raises(DataError, match="expected k = 4 in .*values, got 3: delete the directory"):
        precompute_teacher(model, rows, path, k=4)
    with pytest.raises(DataError, match="expected kind = reference"):
        precompute_reference(model, rows, path)
    other = make_rows()
    other[2]["input_ids"][0, 0] += 1
    with pytest.raises(DataError, match="expected sha256"):
        precompute_teacher(model, other, path, k=3)
    with pytest.raises(DataError, match="expected 5 rows, .* got 4"):
        TargetValuesDataset(rows[:4], path)
    shuffled = TargetValuesDataset(rows[1:] + rows[:1], path)
    with pytest.raises(DataError, match="targets in row 0, .* the data has changed"):
        shuffled[0]
    with pytest.raises(DataError, match="at least one target"):
        precompute_reference(model, [{**row, "targets": row["targets"] * 0 - 100} for row in rows], tmp_path / "none")
    with pytest.raises(DataError, match="rows with input_ids and targets, got input_ids"):
        precompute_reference(model, [{"input_ids": rows[0]["input_ids"]}], tmp_path / "none")
