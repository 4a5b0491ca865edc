"""`CheckpointManager`: saving, loading, asynchronous writes, and disk errors."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whimbrel.base.errors import CheckpointError, ConfigError, WriteError
from whimbrel.base.files import BACKUP, _host
from whimbrel.checkpoint import (
    CheckpointManager,
    SharingPattern,
    StateComponent,
    checkpoint_path,
    latest_checkpoint,
    list_checkpoints,
    read_component,
    verify_checkpoint,
)
from whimbrel.checkpoint import manager as manager_module


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return request.param


def values(components: list[StateComponent]) -> list[float]:
    model, optimizer, trainer = (component.stateful.state_dict() for component in components)
    return [float(model["w"][0]), float(optimizer["m"][0]), trainer["value"]]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_saved_state_is_loaded(tmp_path: Path, parts, asynchronous: bool) -> None:
    manager = CheckpointManager(tmp_path, asynchronous=asynchronous)
    assert manager.newest() is None
    manager.reserve(parts(0.0))
    assert manager.save(3, parts(1.5), metadata={"config_hash": "abc", "micro_batch": 4}) == checkpoint_path(
        tmp_path, 3
    )
    manager.wait()
    assert manager.finished() == [(3, checkpoint_path(tmp_path, 3))]
    assert manager.finished() == []
    fresh = parts(0.0)
    manifest = CheckpointManager(tmp_path).load(fresh)
    assert values(fresh) == [1.5, 1.5, 1.5]
    assert (manifest.step, manifest.config_hash, manifest.metadata["micro_batch"]) == (3, "abc", 4)
    assert set(manifest.versions) == {"whimbrel", "torch", "python"}
    assert {key: (part.pattern, part.ranks) for key, part in manifest.components.items()} == {
        "model": ("global", [0]),
        "optimizer": ("global", [0]),
        "trainer": ("global", [0]),
    }
    assert set(manifest.files) == {
        "model/config.json", "model/weights.bin", "optimizer.json", "optimizer.safetensors", "trainer.json",
    }  # fmt: skip
    manager.close()


def test_async_save_is_a_snapshot(tmp_path: Path, parts, monkeypatch) -> None:
    begin = threading.Event()
    write = manager_module.write_checkpoint
    monkeypatch.setattr(manager_module, "write_checkpoint", lambda *args: (begin.wait(), write(*args)))
    manager = CheckpointManager(tmp_path, asynchronous=True)
    components = parts(1.0)
    manager.save(1, components)
    assert manager.finished() == []
    for component in components[:2]:
        for tensor in component.stateful.state_dict().values():
            tensor.fill_(9.0)
    components[2].stateful.state_dict()["value"] = 9.0
    begin.set()
    manager.wait()
    fresh = parts(0.0)
    manager.load(fresh)
    assert values(fresh) == [1.0, 1.0, 1.0]
    manager.close()


def test_at_most_one_save_is_written_at_a_time(tmp_path: Path, parts, monkeypatch) -> None:
    running: list[int] = []
    concurrent: list[int] = []
    write = manager_module.write_checkpoint

    def watched(target: Path, step: int, *args: Any) -> None:
        running.append(step)
        concurrent.append(len(running))
        write(target, step, *args)
        running.remove(step)

    monkeypatch.setattr(manager_module, "write_checkpoint", watched)
    manager = CheckpointManager(tmp_path, asynchronous=True)
    for step in range(1, 8):
        manager.save(step, parts(float(step)))
    manager.close()
    assert [step for step, _ in manager.finished()] == list(range(1, 8))
    assert set(concurrent) == {1}
    for step, path in list_checkpoints(tmp_path).items():
        assert read_component(path, "trainer") == {"value": float(step)}


def test_host_buffers_are_reused(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path)
    manager.reserve(parts(0.0))
    blocks = {key: block.data_ptr() for key, block in manager._buffers._buffers.items()}
    for step in (1, 2):
        manager.save(step, parts(float(step)))
    assert {key: block.data_ptr() for key, block in manager._buffers._buffers.items()} == blocks
    optimizer = parts(1.0)[1]
    optimizer.stateful.state = {"m": torch.ones(500)}
    manager.save(3, [optimizer])
    assert torch.equal(read_component(checkpoint_path(tmp_path, 3), "optimizer")["m"], torch.ones(500))


def test_explicit_path_of_the_step_keeps_the_directory_locked(tmp_path: Path, parts, asynchronous: bool) -> None:
    manager, other = (CheckpointManager(tmp_path, asynchronous=asynchronous) for _ in range(2))
    with manager.lock:
        manager.save(1, parts(1.0), path=checkpoint_path(tmp_path, 1))
        manager.drain()
        with pytest.raises(ConfigError, match="in use"):
            other.lock.acquire()
    other.lock.acquire()
    other.lock.release()


def test_same_step_is_written_once(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, parts(1.0))
    manager.save(1, parts(2.0))
    assert read_component(checkpoint_path(tmp_path, 1), "trainer") == {"value": 1.0}
    assert len(manager.finished()) == 1
    (checkpoint_path(tmp_path, 1) / "trainer.json").unlink()
    manager.save(1, parts(3.0))
    assert read_component(checkpoint_path(tmp_path, 1), "trainer") == {"value": 3.0}


def test_steps_after_a_rollback_are_rewritten(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, parts(float(step)))
    manager.load(parts(0.0), checkpoint_path(tmp_path, 1))
    manager.save(1, parts(10.0))
    manager.save(2, parts(20.0))
    found = [read_component(path, "trainer")["value"] for path in list_checkpoints(tmp_path).values()]
    assert found == [1.0, 20.0, 3.0]


def test_save_to_another_path(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path / "run", keep=1)
    manager.save(1, parts(1.0))
    elsewhere = tmp_path / "mine" / "copy"
    assert manager.save(2, parts(2.0), path=elsewhere) == elsewhere
    assert list(list_checkpoints(tmp_path / "run")) == [1]
    fresh = parts(0.0)
    assert manager.load(fresh, elsewhere).step == 2
    assert values(fresh) == [2.0, 2.0, 2.0]
    with pytest.raises(WriteError, match="exists and is not empty"):
        manager.save(3, parts(3.0), path=elsewhere)


def test_latest_checkpoint_is_the_highest_complete_step(tmp_path: Path, parts) -> None:
    assert latest_checkpoint(tmp_path) is None
    manager = CheckpointManager(tmp_path)
    for step in (100, 9, 30):
        manager.save(step, parts(1.0))
    (tmp_path / "checkpoints" / "step-00000500").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert list(list_checkpoints(tmp_path)) == [9, 30, 100]
    assert latest_checkpoint(tmp_path) == manager.newest() == checkpoint_path(tmp_path, 100)


def test_damaged_checkpoint_is_skipped_with_a_warning_and_later_replaced(tmp_path: Path, parts, caplog) -> None:
    first = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        first.save(step, parts(float(step)))
    flip(checkpoint_path(tmp_path, 3) / "model" / "weights.bin")
    (checkpoint_path(tmp_path, 2) / "manifest.json").unlink()
    manager, fresh = CheckpointManager(tmp_path, keep=1), parts(0.0)
    with caplog.at_level(logging.WARNING):
        assert manager.load(fresh).step == 1
    assert [len(component.stateful.loaded) for component in fresh] == [1, 1, 1]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert "step-00000003 is damaged: model/weights.bin has changed" in warned[0]
    assert "step-00000002 is not a complete checkpoint" in warned[1]
    assert manager.newest() == checkpoint_path(tmp_path, 1)
    manager.save(2, parts(20.0))
    assert list(list_checkpoints(tmp_path)) == [2, 3]
    manager.save(3, parts(30.0))
    assert read_component(manager.newest(), "trainer") == {"value": 30.0}
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000003"]


def test_checkpoint_being_replaced_by_a_killed_process_is_restored(tmp_path: Path, parts) -> None:
    saved = CheckpointManager(tmp_path).save(1, parts(1.0))
    saved.rename(saved.with_name(f"{BACKUP}999999999-{_host()}-{saved.name}"))
    assert CheckpointManager(tmp_path).load(parts(0.0)).step == 1
    saved.rename(saved.with_name(f"{BACKUP}1-0123abcd-{saved.name}"))  # by another host
    assert latest_checkpoint(tmp_path) is None
    CheckpointManager(tmp_path).clean_up(1)
    assert latest_checkpoint(tmp_path) == saved


def test_failed_pruning_is_not_the_error_of_the_save(tmp_path: Path, parts, monkeypatch, caplog, asynchronous) -> None:
    manager = CheckpointManager(tmp_path, keep=1, asynchronous=asynchronous)
    monkeypatch.setattr(manager_module, "step_directories", lambda _: 1 / 0)
    manager.save(1, parts(1.0))
    manager.wait()
    assert "could not remove old checkpoints" in caplog.text
    assert [step for step, _ in manager.finished()] == [1]
    with manager.lock:
        pass
    manager.close()


def test_damaged_checkpoint_changes_no_state(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, parts(1.0))
    flip(path / "trainer.json")
    fresh = parts(0.0)
    for given in (path, None):
        with pytest.raises(CheckpointError, match="trainer.json has changed"):
            manager.load(fresh, given)
    assert [component.stateful.loaded for component in fresh] == [[], [], []]
    with pytest.raises(CheckpointError, match="has no valid checkpoint"):
        CheckpointManager(tmp_path / "empty").load(fresh)
    with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
        manager.load(fresh, tmp_path / "nowhere")


def test_optional_component_may_be_absent_but_not_damaged(tmp_path: Path, parts, caplog) -> None:
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, parts(1.0))
    (path / "optimizer.safetensors").unlink()
    fresh = parts(0.0)
    manager.load(fresh)
    assert values(fresh) == [1.0, 0.0, 1.0]
    assert "has no 'optimizer': continuing without" in caplog.text
    (path / "optimizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="optimizer.json has changed"):
        manager.load(fresh, path)
    (path / "optimizer.json").unlink()
    verify_checkpoint(path)
    required = [*fresh[:1], StateComponent("optimizer", fresh[1].stateful, SharingPattern.GLOBAL), fresh[2]]
    with pytest.raises(CheckpointError, match="optimizer.json is missing"):
        manager.load(required, path)


def test_components_added_since_the_save(tmp_path: Path, parts, caplog) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, parts(1.0)[::2])
    fresh = parts(0.0)
    manager.load(fresh)
    assert values(fresh) == [1.0, 0.0, 1.0]
    assert "has no 'optimizer'" in caplog.text
    extra = StateComponent("scheduler", fresh[2].stateful, SharingPattern.GLOBAL)
    with pytest.raises(CheckpointError, match="written without the component 'scheduler'"):
        manager.load([*fresh, extra], checkpoint_path(tmp_path, 1))


def test_optional_component_can_be_skipped(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, parts(1.0))
    fresh = parts(0.0)
    manager.load(fresh, skip=["optimizer"])
    assert values(fresh) == [1.0, 0.0, 1.0]
    with pytest.raises(ConfigError, match="'optimiser'.* did you mean 'optimizer'"):
        manager.load(fresh, skip=["optimiser"])
    with pytest.raises(ConfigError, match="'model' is required .*optimizer"):
        manager.load(fresh, skip=["model"])


def test_incompatible_state_is_a_one_line_error(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, [StateComponent("model", torch.nn.Linear(2, 2), SharingPattern.GLOBAL)])
    with pytest.raises(CheckpointError, match="cannot load the state of 'model': ") as caught:
        manager.load([StateComponent("model", torch.nn.Linear(3, 3), SharingPattern.GLOBAL)])
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_retry_delay")
def test_failed_save_is_retried(tmp_path: Path, parts, monkeypatch, caplog, asynchronous: bool) -> None:
    write, left = manager_module.write_checkpoint, [1, 2]

    def flaky(*args: Any) -> None:
        if left:
            left.pop()
            raise WriteError("cannot write: No space left on device")
        write(*args)

    monkeypatch.setattr(manager_module, "write_checkpoint", flaky)
    manager = CheckpointManager(tmp_path, asynchronous=asynchronous)
    manager.save(1, parts(1.0))
    manager.wait()
    assert len(manager.finished()) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "saving step 1 failed" in caplog.text


@pytest.mark.usefixtures("no_retry_delay")
def test_permanently_failed_save_leaves_existing_checkpoints(
    tmp_path: Path, parts, monkeypatch, caplog, asynchronous: bool
) -> None:
    manager = CheckpointManager(tmp_path, keep=1, asynchronous=asynchronous)
    manager.save(1, parts(1.0))
    manager.wait()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("whimbrel.base.files.os.fsync", full)
        if asynchronous:
            manager.save(2, parts(2.0))
        else:
            with pytest.raises(WriteError, match="step-00000002: No space left on device"):
                manager.save(2, parts(2.0))
        with pytest.raises(WriteError, match="step-00000002: No space left on device"):
            manager.wait()
    assert "could not save a checkpoint" in caplog.text
    assert [step for step, _ in manager.finished()] == [1]
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    verify_checkpoint(checkpoint_path(tmp_path, 1))
    manager.save(3, parts(3.0))
    manager.wait()
    assert list(list_checkpoints(tmp_path)) == [3]
    manager.close()


@pytest.mark.usefixtures("no_retry_delay")
def test_save_larger_than_the_free_disk_space_is_not_started(tmp_path: Path, parts, monkeypatch, caplog) -> None:
    manager = CheckpointManager(tmp_path, asynchronous=True)
    manager.save(1, parts(1.0))
    manager.wait()
    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "write_checkpoint", lambda *args: pytest.fail("began to write"))
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=383))
        manager.save(2, parts(2.0))  # 64 + 32 numbers of fp32
        with pytest.raises(WriteError, match=r"384 bytes.* 383"):
            manager.wait()
    path = checkpoint_path(tmp_path, 2)
    assert f"saving step 2 failed: cannot write {path}: it needs 384 bytes" in caplog.text
    manager.save(3, parts(3.0))
    manager.wait()
    assert list(list_checkpoints(tmp_path)) == [1, 3]


def test_unsupported_state_raises_immediately(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path, asynchronous=True)
    components = parts(1.0)
    components[2].stateful.state = {"bad": object()}
    with pytest.raises(CheckpointError, match="got object at 'bad'"):
        manager.save(1, components)
    with pytest.raises(ConfigError, match="to be JSON"):
        manager.save(1, parts(1.0), metadata={"x": object()})
    manager.close()


@pytest.mark.parametrize("settings", [{"keep": 0}, {"best": -1}])
def test_keep_and_best_must_be_positive(tmp_path: Path, settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=">= 1 or None"):
        CheckpointManager(tmp_path, **settings)


@pytest.mark.gpu
def test_async_save_from_cuda_is_a_snapshot(tmp_path: Path) -> None:
    """Copies wait for work queued before them, and work queued after waits for the copies."""
    module = torch.nn.Linear(2048, 2048, bias=False, device="cuda")
    components = [StateComponent("model", module, SharingPattern.GLOBAL)]
    manager = CheckpointManager(tmp_path, asynchronous=True)
    manager.reserve(components)
    assert manager._buffers._buffers["model"].is_pinned()
    with torch.no_grad():
        for step in range(1, 6):
            for _ in range(50):
                module.weight @ module.weight
            module.weight.fill_(float(step))
            manager.save(step, components)
            module.weight.fill_(-1.0)
    manager.wait()
    for step in range(1, 6):
        manager.load(components, tmp_path / "checkpoints" / f"step-{step:08d}")
        assert bool((module.weight == step).all())
    manager.close()
