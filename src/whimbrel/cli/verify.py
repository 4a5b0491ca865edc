"""`whimbrel verify PATH`: read what was written through and say what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["verify"]


def verify(
    path: Annotated[
        Path, typer.Argument(help="A folder of token shards, a run, or one checkpoint of a run.", metavar="PATH")
    ],
) -> None:
    """Check every token shard of a folder, or every checkpoint of a run: all bytes against the sha256 in the manifest.

    Of shards also header, size and token ids; where there is a manifest, tokenizer.json must be the one that made them.

    Prints a line for each; faults go to standard error and make the exit code 2. A folder that an interrupted removal
    of a checkpoint has left is no fault.
    """
    from whimbrel.base.errors import DataError

    if not path.is_dir():
        raise DataError(
            f"no directory {path}: give a folder of token shards, which `whimbrel prepare` makes, a run or a checkpoint"
        )
    faults = _verify_checkpoints(path) if _holds_checkpoints(path) else _verify_shards(path)
    if faults:
        raise typer.Exit(2)


def _holds_checkpoints(path: Path) -> bool:
    manifest = path / "manifest.json"
    return (
        _is_run(path)
        or path.name.startswith("step-")
        or (manifest.is_file() and b'"components"' in manifest.read_bytes())
    )


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() or any((path / name).is_file() for name in ("config.toml", "log.jsonl"))


def _verify_shards(path: Path) -> int:
    from whimbrel.data.verify import verify_shards

    findings = []
    for finding in verify_shards(path):
        findings.append(finding)
        if finding.fault is None:
            print(f"ok {finding.file}: {finding.tokens:,} tokens")
        else:
            print(f"fault {finding.file}: {finding.fault}", file=sys.stderr)
    faults = sum(finding.fault is not None for finding in findings)
    print(f"{len(findings) - faults} sound, {faults} faulty, {sum(finding.tokens for finding in findings):,} tokens")
    return faults


def _verify_checkpoints(path: Path) -> int:
    from whimbrel.base.errors import CheckpointError
    from whimbrel.checkpoint import list_checkpoints, missing_components, step_folders, verify_checkpoint

    found = list(step_folders(path).values()) if _is_run(path) else [path]
    if not found:
        print(f"{path} is a run with no checkpoints yet")
        return 0
    whole = list(list_checkpoints(path).values())
    left = [checkpoint for checkpoint in found if whole and checkpoint not in whole]
    faults = 0
    for checkpoint in found:
        if checkpoint in left:
            print(f"left {checkpoint.name}: no manifest, as an interrupted removal leaves a folder; it can be removed")
            continue
        try:
            manifest = verify_checkpoint(checkpoint)
        except CheckpointError as error:
            faults += 1
            print(f"fault {checkpoint.name}: {error}", file=sys.stderr)
            continue
        size = sum(entry.size for entry in manifest.files.values())
        without = "".join(f", without its {key}" for key in missing_components(checkpoint, manifest))
        print(f"ok {checkpoint.name}: step {manifest.step}, {size:,} bytes in {len(manifest.files)} files{without}")
    print(f"{len(found) - len(left) - faults} sound, {faults} faulty")
    return faults
