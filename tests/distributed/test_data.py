"""Data over ranks: splitting, equal losses and metrics, positions, and random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import data_jobs as jobs
from tests.distributed.pool import Pool
from torch.utils.data import DataLoader

from whimbrel.train.batches import DatasetBatches, collate, make_batches
from whimbrel.train.config import LoaderConfig
from whimbrel.train.objectives import Filler

CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""fp32 sums in another order; a dozen steps of AdamW amplify them little."""
EVAL_TOLERANCE = 1e-6
"""Sums of fp32 batch losses in fp64: each batch loss has a rounding error of about 1e-7."""


def listed(size: int) -> list[dict[str, int]]:
    return [{"x": i} for i in range(size)]


def stream(size: int) -> Any:
    return jobs.Stream([{"x": torch.tensor(i)} for i in range(size)])


def loader(size: int) -> Any:
    return DataLoader([{"x": i} for i in range(size)], batch_size=2, shuffle=True)


SOURCES = {"list": listed, "stream": stream, "DataLoader": loader}


def rank_batches(source: Any, batch_size: int, world_size: int, **settings: Any) -> list[DatasetBatches]:
    """The batches of every rank."""
    return [
        make_batches(
            source, batch_size, CPU, collate=collate, seed=7, shuffle=True, loader=LoaderConfig(**settings),
            rank=rank, world_size=world_size,
        )
        for rank in range(world_size)
    ]  # type: ignore[misc] # fmt: skip


def read(ranks: list[DatasetBatches], epoch: int, steps: int | None = None) -> list[list[list[int] | None]]:
    """The values of each global batch by rank, None for a filler; an epoch, or `steps` of it."""
    for batches in ranks:
        batches.start_epoch(epoch)
    found: list[list[list[int] | None]] = []
    while steps is None or len(found) < steps:
        step = [batches.next_batch() for batches in ranks]
        if step[0] is None:
            assert step == [None] * len(ranks)  # all ranks end together
            break
        found.append([None if isinstance(batch, Filler) else batch["x"].tolist() for batch in step])
    return found


def flat(found: list[list[list[int] | None]]) -> list[int]:
    return [value for step in found for values in step if values is not None for value in values]


@pytest.mark.parametrize("name", SOURCES)
def test_ranks_share_the_order_of_one_process(name: str) -> None:
    """Every sample once per epoch, in the same global order for every number of ranks."""
    alone = [flat(read(rank_batches(SOURCES[name](25), 2, 1), epoch)) for epoch in (0, 1)]
    assert sorted(alone[0]) == list(range(25))
    assert (alone[0] == alone[1]) == (name == "stream")
    for world_size in (2, 3, 4):
        ranks = rank_batches(SOURCES[name](25), 2, world_size)
        for epoch in (0, 1):
            found = read(ranks, epoch)
            assert flat(found) == alone[epoch]
            assert len(found) == -(-25 // (2 * world_size))
            assert name == "stream" or len(ranks[0]) == len(found)
            assert all(len(values or []) == 2 for step in found[:-1] for values in step)


def test_workers_do_not_change_the_batches_of_ranks() -> None:
    expected = read(rank_batches(listed(9), 2, 2), 0)
    assert None in expected[-1]
    assert read(rank_batches(listed(9), 2, 2, workers=1), 0) == expected
    assert read(rank_batches(stream(9), 2, 2, workers=1), 0) == read(rank_batches(stream(9), 2, 2), 0)


def test_a_short_last_batch_is_split_evenly() -> None:
    assert [len(values or []) for values in read(rank_batches(listed(22), 2, 4), 0)[-1]] == [1, 2, 1, 2]
    assert [len(values or []) for values in read(rank_batches(listed(18), 2, 4), 0)[-1]] == [0, 1, 0, 1]
    dropped = read(rank_batches(listed(22), 2, 4, drop_last=True), 0)
    assert [[len(values or []) for values in step] for step in dropped] == [[2] * 4] * 2


@pytest.mark.parametrize("name", SOURCES)
def test_another_number_of_ranks_continues_at_the_same_sample(name: str) -> None:
    alone = [flat(read(rank_batches(SOURCES[name](50), 2, 1), epoch)) for epoch in (0, 1)]
    for before, after in ((1, 2), (2, 1), (4, 3), (3, 4), (2, 8)):
        ranks = rank_batches(SOURCES[name](50), 2, before)
        first = read(ranks, 0, steps=2)
        states = [batches.state_dict() for batches in ranks]
        assert all(state == states[0] for state in states)
        other = rank_batches(SOURCES[name](50), 2, after)
        for batches in other:
            batches.load_state_dict(states[0])
        second = read(other, 0, steps=3)
        assert flat(first) + flat(second) == alone[0][: len(flat(first)) + len(flat(second))]
        # A save of the resumed run is exact too.
        third = rank_batches(SOURCES[name](50), 2, after)
        for batches in third:
            batches.load_state_dict(other[0].state_dict())
        rest = read(third, 0)
        assert rest == read(other, 0)
        assert flat(first) + flat(second) + flat(rest) == alone[0]
        assert third[0].epoch == other[0].epoch == (0.0 if name == "stream" else 1.0)
        assert flat(read(third, 1)) == alone[1]


CELLS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"parallel": {"strategy": "fsdp"}}),
    (3, {"source": "iterable"}),
    (2, {"source": "DataLoader", "count": 26}),
    (2, {"kind": "regressor", "metrics": False}),
    (2, {"kind": "preferences"}),
    (2, {"kind": "preferences", "parallel": {"strategy": "fsdp"}}),
    (4, {"parallel": {"tp": 2}}),
]


@pytest.mark.parametrize(("world_size", "settings"), CELLS, ids=str)
def test_ranks_train_like_one_process_with_larger_batches(
    pool: Pool, tmp_path: Path, world_size: int, settings: dict[str, Any]
) -> None:
    """Masked targets, accumulation, and a last batch that leaves a rank without samples."""
    settings = {"metrics": settings.get("kind", "gpt") == "gpt", **settings}
    arguments = {"num_train_epochs": 2, "max_grad_norm": 0.5, "output_dir": str(tmp_path / "alone")}
    if settings.get("source") == "iterable":
        arguments["max_steps"] = 6  # two epochs
    data_ranks = world_size // settings.get("parallel", {}).get("tp", 1)
    alone = jobs.fit(
        settings,
        {**arguments, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2 * data_ranks},
        True,
    )
    ranks = pool.run(
        world_size, jobs.fit, settings,
        {**arguments, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
         "output_dir": str(tmp_path / "ranks")},
    )  # fmt: skip
    for found in ranks:
        torch.testing.assert_close(
            torch.tensor(found["curve"]), torch.tensor(alone["curve"]), rtol=TOLERANCE, atol=TOLERANCE
        )
        assert found["weights"] == pytest.approx(alone["weights"], rel=TOLERANCE)
        assert (found["steps"], found["tokens"]) == (alone["steps"], alone["tokens"])
        assert found["epochs"][-1] == alone["epochs"][-1] == 2.0
        assert found.get("eval") == ranks[0].get("eval")
        for name, value in alone.get("eval", {}).items():
            assert found["eval"][name] == pytest.approx(value, rel=100 * EVAL_TOLERANCE), name


@pytest.mark.parametrize("count", [13, 16])
def test_evaluation_on_ranks_equals_that_of_one_process(pool: Pool, tmp_path: Path, count: int) -> None:
    """Of untrained weights, so that only the evaluation differs."""
    arguments = {"per_device_train_batch_size": 2, "max_steps": 1, "output_dir": str(tmp_path)}
    logits, labels, metrics = jobs.predict({"metrics": True}, arguments, count, True)
    for world_size, settings in ((2, {}), (3, {"parallel": {"strategy": "fsdp"}})):
        for found in pool.run(world_size, jobs.predict, {"metrics": True, **settings}, arguments, count):
            assert torch.equal(found[1], labels)
            torch.testing.assert_close(found[0], logits)
            assert found[2]["test_loss"] == pytest.approx(metrics["test_loss"], rel=EVAL_TOLERANCE)
            assert found[2]["test_count"] == count
