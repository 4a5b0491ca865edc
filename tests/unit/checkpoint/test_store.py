"""Checkpoints: whole or absent, verified before use, exact."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from whimbrel.base.errors import CheckpointError, WriteError
from whimbrel.checkpoint import (
    checkpoint_path,
    latest_checkpoint,
    list_checkpoints,
    pack,
    prune_checkpoints,
    read_component,
    unpack,
    verify_checkpoint,
    write_checkpoint,
)


def write_model(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def save(run: Path, step: int, **states: Any) -> Path:
    return write_checkpoint(run, step, states, write_model, {"tool": "test"})


def test_state_comes_back_exactly(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    numbers = {"a": [1, 2.5, None, True, "x"], "t": (1, (2,)), "inf": math.inf, "third": 1 / 3}
    path = save(tmp_path, 5, optimizer=state, numbers=numbers)
    verify_checkpoint(path)
    assert read_component(path, "numbers") == numbers
    loaded = read_component(path, "optimizer")
    assert list(loaded["state"]) == [0, 1]
    assert loaded["param_groups"] == state["param_groups"]
    for index, values in state["state"].items():
        for name, tensor in values.items():
            assert torch.equal(loaded["state"][index][name], tensor)


def test_tensors_that_share_memory_are_saved() -> None:
    shared = torch.arange(6.0)
    tensors, tree = pack({"a": shared, "b": shared[2:]})
    assert torch.equal(unpack(tensors, tree)["b"], shared[2:])


@pytest.mark.parametrize("state", [{"x": object()}, {(1, 2): 3}])
def test_what_is_not_plain_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError):
        pack(state)


def test_latest_is_the_highest_whole_step(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    for step in (100, 9, 30):
        save(tmp_path, step, x=1)
    (tmp_path / "checkpoints" / "step-00000500").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert list(list_checkpoints(tmp_path)) == [9, 30, 100]
    assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 100)


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    save(tmp_path, 1, x=1)
    with pytest.raises(CheckpointError, match="never written over"):
        save(tmp_path, 1, x=2)
    assert read_component(checkpoint_path(tmp_path, 1), "x") == 1


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    def broken(path: Path) -> None:
        write_model(path)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, 1, {"x": 1}, broken, {})
    assert os.listdir(tmp_path / "checkpoints") == []


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(WriteError, match="cannot write"):
            save(tmp_path, 1, w={"t": torch.ones(4096)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path / "checkpoints") == []


def test_what_an_interrupted_removal_left_does_not_block(tmp_path: Path) -> None:
    left = checkpoint_path(tmp_path, 1)
    left.mkdir(parents=True)
    (left / "w.safetensors").write_bytes(b"x")
    verify_checkpoint(save(tmp_path, 1, x=1))


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, x=step)
    prune_checkpoints(tmp_path, 2)
    assert list(list_checkpoints(tmp_path)) == [4, 5]


def damage(path: Path, how: str) -> None:
    tensors, manifest = path / "w.safetensors", path / "manifest.json"
    if how == "truncate":
        tensors.write_bytes(tensors.read_bytes()[:-4])
    elif how == "flip":
        data = bytearray(tensors.read_bytes())
        data[-1] ^= 1
        tensors.write_bytes(data)
    elif how == "remove":
        (path / "model" / "config.json").unlink()
    elif how == "manifest":
        manifest.write_text(manifest.read_text()[:-20])
    elif how == "format":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncate", "w.safetensors has changed"),
        ("flip", "w.safetensors has changed"),
        ("remove", "model/config.json is missing"),
        ("manifest", "manifest.json cannot be read"),
        ("format", "format 99"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, how: str, message: str) -> None:
    path = save(tmp_path, 1, w={"t": torch.ones(4)})
    verify_checkpoint(path)
    damage(path, how)
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(path)
