"""`whimbrel memory CONFIG.toml [--a.b=c]`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whimbrel.optim import ParameterRow
    from whimbrel.train import RunConfig
    from whimbrel.train.memory import MemoryPrediction

__all__ = ["memory"]

KINDS = ("cuda", "cpu")


def memory(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="The run as a TOML file, as whimbrel train takes it.")],
    device: Annotated[
        str | None, typer.Option(help="Predict for this kind of device, cuda or cpu, which need not be here.")
    ] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="Only this optimizer beside the run's own; may be given again.")
    ] = None,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="List what each parameter gets of the run's optimizer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict the memory of a training step, with the run's optimizer and with every other that moves such weights.

    A step is walked through on tensors that have shapes alone: neither the device nor its memory is needed, and any
    setting of the file can be tried as --section.name=value.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.config import did_you_mean
    from whimbrel.optim.config import PLAIN_ALONE
    from whimbrel.train import load_run_config
    from whimbrel.train.memory import optimizer_names, predict_memory

    if device not in (None, *KINDS):
        raise ConfigError(f"--device {device} is not one of {', '.join(KINDS)}")
    for name in optimizer or ():
        if name not in optimizer_names():
            raise ConfigError(f"unknown --optimizer {name}{did_you_mean(name, optimizer_names())}")
    loaded = load_run_config(config, context.args)
    able = [name for name in optimizer_names() if loaded.train.weights is None or name not in PLAIN_ALONE]
    others = [name for name in optimizer or able if name != loaded.optim.name]
    found = predict_memory(loaded, device, [loaded.optim.name, *others])
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(prediction) for prediction in found], indent=1))
    else:
        _show(loaded, found, parameters=parameters)


def _show(config: RunConfig, found: Sequence[MemoryPrediction], *, parameters: bool) -> None:
    from whimbrel.base.progress import format_bytes
    from whimbrel.cli.table import show_table
    from whimbrel.train.summary import features

    own = found[0]
    step = f"{own.accumulation} x {own.micro_batch} sequences of {config.sequence_length} tokens a step"
    print(f"On {own.device}, {step}{''.join(f', {word}' for word in features(config))}")
    print()
    heads = ("optimizer", "weights", "gradients", "state", "activations", "in step", "peak", "reached in")
    show_table(
        heads,
        [
            (
                row.optimizer + ", in backward" * row.in_backward,
                *(
                    format_bytes(size)
                    for size in (row.weights, row.gradients, row.states, row.activations, row.temporaries, row.peak)
                ),
                row.phase,
            )
            for row in found
        ],
    )
    print()
    for line in _notes(config, own):
        print(line)
    if parameters:
        print()
        show_table(
            ("parameter", "tensors", "shape", "dtype", "moved by", "weights", "state"),
            (_parameter(row) for row in own.moved),
        )


def _notes(config: RunConfig, own: MemoryPrediction) -> Iterator[str]:
    """What to know of the figures."""
    from whimbrel.base.progress import format_bytes

    parts = ", ".join(f"{format_bytes(size)} {name}" for name, size in own.at_peak.items())
    yield f"The peak of {own.optimizer}: {parts}."
    yield "Each column is the most of its kind; they need not be there at once, and the peak is what is."
    if own.device == "cuda":
        yield "The allocator may hold some per cent more in pieces, and the CUDA context about half a GiB."
    if config.train.compile:
        yield "Compiled blocks keep less for backward than is predicted here."


def _parameter(row: ParameterRow) -> tuple[str, ...]:
    from whimbrel.base.progress import format_bytes

    shape = " x ".join(map(str, row.shape))
    state = "not known" if row.state is None else format_bytes(row.state)
    return row.name, str(row.count), shape, row.dtype, row.rule, format_bytes(row.weights), state
