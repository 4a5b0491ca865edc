"""Damage of every kind is found and named before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import CheckpointManager, read_manifest, verify_checkpoint


@pytest.fixture
def path(tmp_path: Path, parts) -> Path:
    manager = CheckpointManager(tmp_path)
    manager.save(2, parts(2.0))
    return manager.save(1, parts(1.0), metric=0.1, about={"config_hash": "x"})


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))

    return act


def take_over(name: str) -> Callable[[Path], None]:
    return lambda path: shutil.copy(path.with_name("step-00000002") / name, path / name)


def downgrade(content: bytes) -> bytes:
    table = json.loads(content)
    del table["digest"]
    return json.dumps(table | {"format": 1}).encode()


DAMAGE = {
    "truncate": (edit("optimizer.safetensors", lambda old: old[:-4]), "optimizer.safetensors has changed"),
    "append": (edit("optimizer.safetensors", lambda old: old + b" "), "optimizer.safetensors has changed"),
    "flip": (edit("optimizer.safetensors", lambda old: old[:-1] + b"\x01"), "optimizer.safetensors has changed"),
    "remove": (lambda path: (path / "model" / "config.json").unlink(), "model/config.json is missing"),
    "folder": (lambda path: shutil.rmtree(path / "model"), "model/config.json is missing"),
    "stranger": (lambda path: (path / "model" / "x").write_bytes(b""), "model/x was not written with it"),
    "swap": (take_over("trainer.json"), "trainer.json has changed"),
    "short manifest": (edit("manifest.json", lambda old: old[:-20]), "manifest.json is not what was written"),
    "long manifest": (edit("manifest.json", lambda old: old + b"\n"), "manifest.json has changed"),
    "value": (edit("manifest.json", lambda old: old.replace(b"0.1", b"0.2")), "manifest.json has changed"),
    "other manifest": (take_over("manifest.json"), "holds step 2, not the 1 of its name"),
    "list": (edit("manifest.json", lambda old: b"[]"), "manifest.json is not what was written"),
    "format": (edit("manifest.json", downgrade), "format 1; this version reads 2"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_found_and_named(path: Path, how: str) -> None:
    act, message = DAMAGE[how]
    verify_checkpoint(path)
    act(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        verify_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_under_another_name_is_found_out(path: Path) -> None:
    renamed = path.rename(path.with_name("step-00000009"))
    with pytest.raises(CheckpointError, match="holds step 1, not the 9 of its name"):
        verify_checkpoint(renamed)
    verify_checkpoint(renamed.rename(path.with_name("mine")))


def test_every_bit_of_a_manifest_counts(path: Path) -> None:
    file = path / "manifest.json"
    content = file.read_bytes()
    for at in range(len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        with pytest.raises(CheckpointError):
            read_manifest(path)
    file.write_bytes(content)
    read_manifest(path)
