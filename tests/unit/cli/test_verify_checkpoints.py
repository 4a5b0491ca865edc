"""`whimbrel verify` of a run and of one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

from whimbrel.base.errors import DataError
from whimbrel.checkpoint import CheckpointManager, SharingPattern, StateComponent
from whimbrel.cli.data import verify


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, and a checkpoint outside of its checkpoints directory."""
    module = torch.nn.Linear(3, 2)
    components = [
        StateComponent("model", module, SharingPattern.GLOBAL),
        StateComponent("optimizer", torch.optim.SGD(module.parameters()), SharingPattern.GLOBAL, required=False),
    ]
    manager = CheckpointManager(tmp_path)
    for step in (5, 10):
        manager.save(step, components)
    manager.save(10, components, path=tmp_path / "kept")
    return tmp_path


def test_valid_run_prints_a_line_per_checkpoint(run: Path, capsys) -> None:
    verify(run)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", ")[0] for line in lines] == [
        "ok step-00000005: step 5",
        "ok step-00000010: step 10",
        "2 ok",
    ]
    assert lines[-1] == "2 ok, 0 failed"
    size = sum(file.stat().st_size for file in (run / "kept").iterdir() if file.name != "manifest.json")
    assert f"{size:,} bytes in 3 files" in lines[1]


def test_single_checkpoint_can_be_verified(run: Path, capsys) -> None:
    for path in (run / "checkpoints" / "step-00000005", run / "kept"):
        verify(path)
        assert capsys.readouterr().out.endswith("1 ok, 0 failed\n")


def test_errors_go_to_stderr_and_exit_with_2(run: Path, capsys) -> None:
    newest = run / "checkpoints" / "step-00000010"
    (newest / "model.safetensors").write_bytes(b"x")
    (run / "checkpoints" / "step-00000005" / "manifest.json").write_bytes(b"{")
    with pytest.raises(typer.Exit) as caught:
        verify(run)
    assert caught.value.exit_code == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "0 ok, 2 failed"
    first, second = printed.err.splitlines()
    assert first.startswith("error step-00000005: ")
    assert "its manifest.json is not valid" in first
    assert "model.safetensors has changed" in second


def test_partly_removed_checkpoint_is_not_an_error(run: Path, capsys) -> None:
    left = run / "checkpoints" / "step-00000005"
    (left / "manifest.json").unlink()
    verify(run)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].startswith("partly removed step-00000005: no manifest")
    assert printed.out.splitlines()[-1] == "1 ok, 0 failed"
    assert printed.err == ""
    with pytest.raises(typer.Exit):  # an explicit path to it is an error
        verify(left)
    (run / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    with pytest.raises(typer.Exit):  # without any complete checkpoint, an interrupted removal cannot explain it
        verify(run)
    assert capsys.readouterr().out.splitlines()[-1] == "0 ok, 2 failed"


def test_missing_optional_component_is_mentioned(run: Path, capsys) -> None:
    (run / "kept" / "optimizer.json").unlink()
    verify(run / "kept")
    assert "without its optimizer" in capsys.readouterr().out
    (run / "kept" / "model.json").unlink()
    with pytest.raises(typer.Exit):
        verify(run / "kept")


@pytest.mark.parametrize("name", ["checkpoints/", "log.jsonl", "config.toml"])
def test_run_without_checkpoints_is_valid(tmp_path: Path, capsys, name: str) -> None:
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    verify(tmp_path)
    assert capsys.readouterr().out == f"{tmp_path} is a run with no checkpoints yet\n"
    with pytest.raises(DataError, match="a run or a checkpoint"):
        verify(tmp_path / "nowhere")
