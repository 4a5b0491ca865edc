"""`whimbrel memory CONFIG.toml [--section.name=value]`."""

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

DEVICES = ("cuda", "cpu")


def memory(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="TOML file of the run.")],
    device: Annotated[str | None, typer.Option(help="Predict for cuda or cpu; the device need not be present.")] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="Compare only with this optimizer; can be repeated.")
    ] = None,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="List the optimizer and state of each parameter.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict the peak memory of a training step for the run's optimizer and for all others.

    The step runs on fake tensors, so it needs neither the device nor its memory. Override any setting with
    --section.name=value.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.config import did_you_mean
    from whimbrel.optim.config import DENSE_ONLY
    from whimbrel.train import load_run_config
    from whimbrel.train.memory import optimizer_names, predict_memory

    if device not in (None, *DEVICES):
        raise ConfigError(f"expected --device cuda or cpu, got {device}")
    for name in optimizer or ():
        if name not in optimizer_names():
            raise ConfigError(f"unknown --optimizer {name}{did_you_mean(name, optimizer_names())}")
    loaded = load_run_config(config, context.args)
    supported = [name for name in optimizer_names() if loaded.train.weights is None or name not in DENSE_ONLY]
    others = [name for name in optimizer or supported if name != loaded.optim.name]
    predictions = predict_memory(loaded, device, [loaded.optim.name, *others])
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(prediction) for prediction in predictions], indent=1))
    else:
        _print_predictions(loaded, predictions, parameters=parameters)


def _print_predictions(config: RunConfig, predictions: Sequence[MemoryPrediction], *, parameters: bool) -> None:
    from whimbrel.base.progress import format_bytes
    from whimbrel.cli.terminal import print_table
    from whimbrel.train.summary import features

    own = predictions[0]
    step = f"{own.accumulation} x {own.micro_batch} sequences of {config.sequence_length} tokens per step"
    print(f"Device: {own.device}, {step}{''.join(f', {feature}' for feature in features(config))}")
    print()
    columns = ("optimizer", "weights", "gradients", "state", "activations", "temporary", "peak", "peak during")
    print_table(
        columns,
        [
            (
                row.optimizer + ", in backward" * row.in_backward,
                *(
                    format_bytes(size)
                    for size in (row.weights, row.gradients, row.states, row.activations, row.temporaries, row.peak)
                ),
                row.phase,
            )
            for row in predictions
        ],
    )
    print()
    for line in _notes(config, own):
        print(line)
    if parameters:
        print()
        print_table(
            ("parameter", "tensors", "shape", "dtype", "optimizer", "weights", "state"),
            (_parameter_row(row) for row in own.parameters),
        )


def _notes(config: RunConfig, own: MemoryPrediction) -> Iterator[str]:
    from whimbrel.base.progress import format_bytes

    parts = ", ".join(f"{format_bytes(size)} {name}" for name, size in own.at_peak.items())
    yield f"Peak with {own.optimizer}: {parts}."
    yield "Columns peak at different times, so they may add up to more than the peak."
    if own.device == "cuda":
        yield "Fragmentation may add a few percent, and the CUDA context takes about half a GiB."
    if config.train.compile:
        yield "Compiled blocks save less for backward than predicted here."


def _parameter_row(row: ParameterRow) -> tuple[str, ...]:
    from whimbrel.base.progress import format_bytes

    shape = " x ".join(map(str, row.shape))
    state = "unknown" if row.state is None else format_bytes(row.state)
    return row.name, str(row.count), shape, row.dtype, row.rule, format_bytes(row.weights), state
