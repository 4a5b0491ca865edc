"""`whimbrel verify PATH`: read what was written through and say what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["verify"]


def verify(
    path: Annotated[Path, typer.Argument(help="A folder of token shards.", metavar="SHARDS")],
) -> None:
    """Check every token shard of a folder: header, size, token ids, and the sha256 that the manifest keeps.

    Where there is a manifest, tokenizer.json must be the one that made the shards.

    Prints a line for each file; faults go to standard error and make the exit code 2.
    """
    from whimbrel.base.errors import DataError
    from whimbrel.data.verify import verify_shards

    if not path.is_dir():
        raise DataError(f"no directory {path}: give a folder of token shards, which `whimbrel prepare` makes")
    findings = []
    for finding in verify_shards(path):
        findings.append(finding)
        if finding.fault is None:
            print(f"ok {finding.file}: {finding.tokens:,} tokens")
        else:
            print(f"fault {finding.file}: {finding.fault}", file=sys.stderr)
    faults = sum(finding.fault is not None for finding in findings)
    print(f"{len(findings) - faults} sound, {faults} faulty, {sum(finding.tokens for finding in findings):,} tokens")
    if faults:
        raise typer.Exit(2)
