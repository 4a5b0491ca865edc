"""`whimbrel verify PATH`: check token shards or checkpoints against their manifests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["verify"]


def verify(
    path: Annotated[Path, typer.Argument(help="Directory of token shards, a run, or a checkpoint.", metavar="PATH")],
) -> None:
    """Check the token shards in a directory, or the checkpoints of a run, against the sha256 in their manifest.

    For shards, also checks the header, the size, the token ids and that tokenizer.json is the one they were prepared
    with.

    Prints one line per shard or checkpoint. Errors go to standard error and make the exit code 2. A directory left by
    an interrupted removal of a checkpoint is not an error.
    """
    from whimbrel.base.errors import DataError

    if not path.is_dir():
        raise DataError(f"no such directory: {path}; expected a directory of token shards, a run or a checkpoint")
    if _verify_checkpoints(path) if _has_checkpoints(path) else _verify_shards(path):
        raise typer.Exit(2)


def _has_checkpoints(path: Path) -> bool:
    manifest = path / "manifest.json"
    return (
        _is_run(path)
        or path.name.startswith("step-")
        or (manifest.is_file() and b'"components"' in manifest.read_bytes())
    )


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() or any((path / name).is_file() for name in ("config.toml", "log.jsonl"))


def _verify_shards(path: Path) -> int:
    """Print a line per shard. Returns the number of errors."""
    from whimbrel.data.verify import verify_shards

    findings = []
    for finding in verify_shards(path):
        findings.append(finding)
        if finding.error is None:
            print(f"ok {finding.file}: {finding.tokens:,} tokens")
        else:
            print(f"error {finding.file}: {finding.error}", file=sys.stderr)
    errors = sum(finding.error is not None for finding in findings)
    print(f"{len(findings) - errors} ok, {errors} failed, {sum(finding.tokens for finding in findings):,} tokens")
    return errors


def _verify_checkpoints(path: Path) -> int:
    """Print a line per checkpoint. Returns the number of errors."""
    from whimbrel.base.errors import CheckpointError
    from whimbrel.checkpoint import list_checkpoints, missing_components, step_directories, verify_checkpoint

    found = list(step_directories(path).values()) if _is_run(path) else [path]
    if not found:
        print(f"{path} is a run with no checkpoints yet")
        return 0
    complete = list(list_checkpoints(path).values())
    # Removing a checkpoint deletes its manifest first. If no checkpoint has a manifest, this is not what happened.
    removed = [checkpoint for checkpoint in found if complete and checkpoint not in complete]
    errors = 0
    for checkpoint in found:
        if checkpoint in removed:
            print(f"partly removed {checkpoint.name}: no manifest, left by an interrupted removal; it can be deleted")
            continue
        try:
            manifest = verify_checkpoint(checkpoint)
        except CheckpointError as error:
            errors += 1
            print(f"error {checkpoint.name}: {error}", file=sys.stderr)
            continue
        size = sum(entry.size for entry in manifest.files.values())
        missing = "".join(f", without its {key}" for key in missing_components(checkpoint, manifest))
        print(f"ok {checkpoint.name}: step {manifest.step}, {size:,} bytes in {len(manifest.files)} files{missing}")
    print(f"{len(found) - len(removed) - errors} ok, {errors} failed")
    return errors
