"""Damage of every kind is detected before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import CheckpointManager, read_component, read_manifest, verify_checkpoint, verify_component


@pytest.fixture
def path(tmp_path: Path, parts) -> Path:
    manager = CheckpointManager(tmp_path)
    manager.save(2, parts(2.0))
    return manager.save(1, parts(1.0), metric=0.1, metadata={"config_hash": "x"})


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))

    return act


def copy_from_next_checkpoint(name: str) -> Callable[[Path], None]:
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
    "unlisted file": (lambda path: (path / "model" / "x").write_bytes(b""), "model/x is not in its manifest"),
    "swap": (copy_from_next_checkpoint("trainer.json"), "trainer.json has changed"),
    "short manifest": (edit("manifest.json", lambda old: old[:-20]), "manifest.json is not valid"),
    "long manifest": (edit("manifest.json", lambda old: old + b"\n"), "manifest.json has changed"),
    "value": (edit("manifest.json", lambda old: old.replace(b"0.1", b"0.2")), "manifest.json has changed"),
    "other manifest": (copy_from_next_checkpoint("manifest.json"), "expected step 1 .* got 2"),
    "list": (edit("manifest.json", lambda old: b"[]"), "manifest.json is not valid"),
    "format": (edit("manifest.json", downgrade), "format 1, expected 2"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_detected(path: Path, how: str) -> None:
    act, message = DAMAGE[how]
    verify_checkpoint(path)
    act(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        verify_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_renamed_directory_is_detected(path: Path) -> None:
    renamed = path.rename(path.with_name("step-00000009"))
    with pytest.raises(CheckpointError, match="expected step 9 .* got 1"):
        verify_checkpoint(renamed)
    verify_checkpoint(renamed.rename(path.with_name("mine")))


def test_any_flipped_bit_of_a_manifest_is_detected(path: Path) -> None:
    file = path / "manifest.json"
    content = file.read_bytes()
    for at in range(len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        with pytest.raises(CheckpointError):
            read_manifest(path)
    file.write_bytes(content)
    read_manifest(path)


FIELDS = {
    "missing": lambda table: table.pop("components"),
    "unknown": lambda table: table.update(extra=1),
    "step": lambda table: table.update(step="1"),
    "metric": lambda table: table.update(metric="low"),
    "about": lambda table: table.update(about=[]),
    "components": lambda table: table.update(components=[]),
    "part": lambda table: table["components"].update(trainer=None),
    "part field": lambda table: table["components"]["trainer"].pop("pattern"),
    "part files": lambda table: table["components"]["trainer"].update(files=["nowhere.json"]),
    "ranks": lambda table: table["components"]["trainer"].update(ranks="0"),
    "file size": lambda table: table["files"]["trainer.json"].update(size=None),
    "file name": lambda table: table["files"].update({"../x": {"size": 1, "sha256": ""}}),
}


@pytest.mark.parametrize("how", FIELDS)
def test_wrong_manifest_fields_are_detected_despite_a_valid_digest(path: Path, how: str) -> None:
    file = path / "manifest.json"
    table = json.loads(file.read_text())
    del table["digest"]
    FIELDS[how](table)
    digest = hashlib.sha256(json.dumps(table).encode()).hexdigest()
    file.write_text(json.dumps({**table, "digest": digest}, indent=1) + "\n")
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
        read_manifest(path)
    assert CheckpointManager(path.parent.parent).newest() is not None


def test_deeply_nested_manifest_is_rejected(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_manifest(path)


@pytest.mark.parametrize("tree", ['{"tensor": "absent"}', '{"dict": 1}', '{"a": 1, "b": 2}', '{"bytes": "xyz"}'])
def test_malformed_component_is_rejected(path: Path, tree: str) -> None:
    (path / "trainer.json").write_text(tree)
    with pytest.raises(CheckpointError, match="component 'trainer' is malformed"):
        read_component(path, "trainer")


def test_verifying_a_missing_component_is_an_error(path: Path) -> None:
    verify_component(path, "model")
    with pytest.raises(CheckpointError, match="without the component 'ema'"):
        verify_component(path, "ema")
