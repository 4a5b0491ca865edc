"""Checkpoints of two gloo ranks: every sharing pattern, the replication check, and errors raised on all ranks."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.pool import Pool

from whimbrel.base.errors import CheckpointError, WhimbrelError
from whimbrel.checkpoint import (
    CheckpointManager,
    SharingPattern,
    StateComponent,
    checkpoint_path,
    list_checkpoints,
    read_component,
    verify_checkpoint,
)
from whimbrel.checkpoint import manager as manager_module
from whimbrel.distributed import ParallelConfig, World, join_world

RANKS = 2


class Values:
    def __init__(self, value: Any, note: str = "") -> None:
        self.state: Any = {"w": value if isinstance(value, torch.Tensor) else torch.full((10,), value), "note": note}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class DirectoryValues(Values):
    def save_directory(self, state: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "value").write_text(str(float(state["w"][0])))

    def load_directory(self, folder: Path) -> None:
        self.state = {"w": torch.full((10,), float((folder / "value").read_text()))}


def make_components(rank: int, value: float) -> list[StateComponent]:
    own = value + rank
    return [
        StateComponent("model", DirectoryValues(value), SharingPattern.REPLICATED),
        StateComponent("optimizer", Values(value), SharingPattern.REPLICATED, validate_replication=True),
        StateComponent("trainer", Values(value), SharingPattern.GLOBAL),
        StateComponent("stage", DirectoryValues(own), SharingPattern.PER_RANK),
        StateComponent("rng", Values(own), SharingPattern.PER_RANK),
        StateComponent("all", Values(value), SharingPattern.PER_GROUP, process_group_name="dp"),
        StateComponent("one", Values(own), SharingPattern.PER_GROUP, process_group_name="one"),
        StateComponent("cache", Values(own), SharingPattern.PER_NODE),
    ]


def save_and_load(run: Path) -> dict[str, Any]:
    """Runs on each rank; for PER_NODE, every rank is its own node."""
    rank = dist.get_rank()
    world = join_world(ParallelConfig(), "cpu")
    world.local_rank, world.node = 0, rank
    groups = world.groups() | {"one": [dist.new_group([other]) for other in range(RANKS)][rank]}
    manager = CheckpointManager(run, keep=2, world=world, process_groups=groups, asynchronous=True)
    manager_module.RETRY_DELAYS = (0.0,)
    for step in (1, 2, 3):
        manager.save(step, make_components(rank, 10.0 * step), metric=1.0)
    manager.wait()
    result: dict[str, Any] = {"finished": [step for step, _ in manager.finished()]}
    fresh = make_components(rank, 0.0)
    result["step"] = manager.load(fresh).step
    result["values"] = {part.key: float(part.stateful.state["w"][0]) for part in fresh}

    def error_of_save(*args: Any, **kwargs: Any) -> str:
        try:
            manager.save(*args, **kwargs)
            manager.wait()
        except WhimbrelError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def error_of_part(kind: str, level: str, value: Any, note: str = "") -> str:
        part = StateComponent(
            "x", Values(value, note), SharingPattern.REPLICATED, validate_replication=True, validation_level=level
        )
        return error_of_save(4, [part], path=run / f"{level}-{kind}")

    result["same"] = error_of_part("same", "full", 1.0)
    result["drifted"] = {
        level: error_of_part("drifted", level, 1.0 + rank) for level in ("none", "quick", "tensor", "full")
    }
    # The least bit of one bf16 number.
    drifted = torch.ones(10, dtype=torch.bfloat16)
    drifted.view(torch.int16)[7] += rank
    result["drifted bf16"] = error_of_part("bf16", "tensor", drifted)
    result["note"] = {
        level: error_of_part("note", level, 1.0, f"of {rank}" if rank else "x") for level in ("tensor", "full")
    }

    existing = [run / "full-same", run / "new"][rank]
    result["existing"] = error_of_save(4, make_components(rank, 1.0), path=existing)
    unsupported = make_components(rank, 1.0)
    unsupported[4].stateful.state = {"w": object() if rank == 1 else 1}
    result["unsupported type"] = error_of_save(4, unsupported)
    broken = make_components(rank, 50.0)
    if rank == 1:
        broken[3].stateful.save_directory = _full
    result["full disk"] = error_of_save(5, broken)
    dist.barrier()
    result["left"] = sorted(os.listdir(run / "checkpoints"))
    failures = [OSError(28, "No space left on device")]
    if rank == 1:
        broken[3].stateful.save_directory = lambda state, folder: _fail_then_save(failures, state, folder)
    result["retried"] = error_of_save(6, broken)
    dist.barrier()
    if rank == 0:
        (checkpoint_path(run, 6) / "rng.rank-00001.json").write_text("{}")
    dist.barrier()
    result["fallback"] = manager.load(make_components(rank, 0.0)).step
    try:
        manager.load(make_components(rank, 0.0), checkpoint_path(run, 6))
    except CheckpointError as error:
        result["named"] = str(error)
    manager.close()
    return result


def _full(state: Any, folder: Path) -> None:
    raise OSError(28, "No space left on device")


def _fail_then_save(failures: list[OSError], state: Any, folder: Path) -> None:
    if failures:
        raise failures.pop()
    DirectoryValues(0.0).save_directory(state, folder)


def collectives_while_saving(run: Path) -> list[float]:
    """Sums over ranks on the training group, while another one waits for a slow write in the background."""
    rank = dist.get_rank()
    manager = CheckpointManager(run, world=join_world(ParallelConfig(), "cpu"), asynchronous=True)
    released = threading.Event()
    slow = DirectoryValues(1.0)
    if rank == 1:
        slow.save_directory = lambda state, folder: (  # type: ignore[method-assign]
            released.wait(), DirectoryValues(0.0).save_directory(state, folder)
        )[1]  # fmt: skip
    manager.save(1, [StateComponent("part", slow, SharingPattern.PER_RANK)])
    sums = []
    for step in range(20):
        value = torch.tensor(float(step + rank))
        dist.all_reduce(value)
        sums.append(float(value))
    assert manager.finished() == []
    released.set()
    manager.wait()
    assert [saved.step for saved in manager.finished()] == [1]
    manager.close()
    return sums


@pytest.fixture(scope="module")
def results(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    run = tmp_path_factory.mktemp("run")
    return run, pool.run(RANKS, save_and_load, run)


def test_training_communicates_while_a_save_is_written(pool: Pool, tmp_path: Path) -> None:
    for sums in pool.run(RANKS, collectives_while_saving, tmp_path):
        assert sums == [2 * step + 1 for step in range(20)]


def test_each_rank_loads_its_own_state(results) -> None:
    for rank, result in enumerate(results[1]):
        own = 30.0 + rank
        assert result["finished"] == [1, 2, 3]
        assert result["step"] == 3
        assert result["values"] == {
            "model": 30.0, "optimizer": 30.0, "trainer": 30.0, "stage": own, "rng": own, "all": 30.0, "one": own,
            "cache": own,
        }  # fmt: skip


def test_manifest_lists_the_ranks_and_files(results) -> None:
    manifest = verify_checkpoint(checkpoint_path(results[0], 3))
    found = {key: (part.pattern, part.ranks, part.files) for key, part in manifest.components.items()}
    assert found["model"] == ("replicated", [0], ["model/value"])
    assert found["trainer"] == ("global", [0], ["trainer.json", "trainer.safetensors"])
    assert found["stage"] == ("per_rank", [0, 1], ["stage.rank-00000/value", "stage.rank-00001/value"])
    assert found["all"] == ("per_group", [0], ["all.group-00000.json", "all.group-00000.safetensors"])
    assert found["one"][1:] == (
        [0, 1],
        [f"one.group-0000{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")],
    )
    assert found["cache"][1] == [0, 1]
    assert found["cache"][2][0] == "cache.node-00000.json"
    assert set(manifest.files) == {name for _, _, files in found.values() for name in files}


def test_replicas_that_differ_are_not_saved(results) -> None:
    for result in results[1]:
        assert result["same"] == "no error"
        assert result["drifted"]["none"] == result["drifted"]["quick"] == "no error"
        for level in ("tensor", "full"):
            assert result["drifted"][level].startswith("ParallelError: component 'x' must be equal on all ranks")
            assert "'w' differs between rank 0 and rank 1" in result["drifted"][level]
        assert "'w' differs between rank 0 and rank 1" in result["drifted bf16"]
        assert result["note"]["tensor"] == "no error"
        assert "'values' differs" in result["note"]["full"]


def test_error_on_one_rank_is_raised_on_all_and_leaves_no_files(results) -> None:
    run, ranks = results
    for result in ranks:
        assert result["existing"].startswith("WriteError: rank 0: ")
        assert result["unsupported type"].startswith("CheckpointError: rank 1: ")
        assert "got object at 'w'" in result["unsupported type"]
        assert result["full disk"].startswith("WriteError: rank 1: ")
        assert "No space left on device" in result["full disk"]
        assert result["left"] == ["step-00000002", "step-00000003"]
        assert result["retried"] == "no error"
    assert list(list_checkpoints(run)) == [3, 6]


def test_damage_to_one_rank_makes_all_load_the_previous_checkpoint(results) -> None:
    for result in results[1]:
        assert result["fallback"] == 3
        assert "rng.rank-00001.json has changed" in result["named"]


def test_single_process_loads_global_components_but_not_those_of_other_nodes(results, tmp_path) -> None:
    run, _ = results
    path = checkpoint_path(run, 3)
    assert read_component(path, "rng.rank-00001")["w"][0] == 31.0
    fresh = [part for part in make_components(0, 0.0) if part.process_group_name is None]
    assert CheckpointManager(run).load(fresh, path).step == 3
    assert [float(part.stateful.state["w"][0]) for part in fresh] == [30.0] * 6
    world = World()
    world.node = 2
    with pytest.raises(CheckpointError, match="no 'cache' for this rank"):
        CheckpointManager(run, world=world).load(fresh, path)


def test_state_of_each_rank_is_derived_again_on_another_number_of_ranks(results) -> None:
    class Resharded(Values):
        def load_resharded(self, saved_ranks: int, step: int) -> None:
            self.state = (saved_ranks, step)

    run, _ = results
    part = StateComponent("rng", Resharded(0.0), SharingPattern.PER_RANK)
    CheckpointManager(run).load([part], checkpoint_path(run, 3))
    assert part.stateful.state == (2, 3)
