"""`whimbrel bench`: list and run the benchmarks in `bench/` whose results the documentation publishes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from whimbrel.cli.terminal import print_table

__all__ = ["bench"]

DIRECTORY = Path(__file__).resolve().parents[3] / "bench"
"""Benchmarks are part of the repository, not of the package, since they need other projects to compare with."""


def bench(
    name: Annotated[str | None, typer.Argument(help="Name of a benchmark. (default: list all)")] = None,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            help="Options for the benchmark script, after --, such as -- --data DIR. They override the published ones."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the results. (default: NAME.json)")] = None,
) -> None:
    """Run one of the published benchmarks, and write its results, hardware, versions and commit to a JSON file.

    Without a name, lists the benchmarks and what they need. They are part of the repository: run this in a clone.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.config import load_toml, not_one_of

    if not (DIRECTORY / "benchmarks.toml").is_file():
        raise ConfigError(
            "benchmarks are part of the repository, not of the installed package: install Whimbrel from a clone with "
            "pip install --editable"
        )
    benchmarks = load_toml(DIRECTORY / "benchmarks.toml")
    if name is None:
        rows = ((key, entry.get("needs", "-"), entry["about"]) for key, entry in benchmarks.items())
        print_table(("benchmark", "needs", "measures"), rows)
        return
    if name not in benchmarks:
        raise ConfigError(not_one_of("benchmark", name, benchmarks))
    entry, results = benchmarks[name], out or Path(f"{name}.json")
    script, *published = shlex.split(entry["run"])
    launcher = [sys.executable]
    if "processes" in entry:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={entry['processes']}"]
    command = [*launcher, str(DIRECTORY / script), *published, *(options or ()), "--out", str(results)]
    completed = subprocess.run(command, check=False)
    if completed.returncode:
        raise typer.Exit(completed.returncode)
    print(f"Results: {results}")
