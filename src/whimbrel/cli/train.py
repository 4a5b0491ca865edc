"""`whimbrel train CONFIG` and `whimbrel memory CONFIG`: train a model, or predict the memory of a training step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whimbrel.cli.recipes import complete_config, prepare_data
from whimbrel.cli.terminal import configure_logging, print_table, warn_once

if TYPE_CHECKING:
    from whimbrel.cli.watch import LivePage
    from whimbrel.config import Setting
    from whimbrel.distributed import Layout
    from whimbrel.optim import ParameterRow
    from whimbrel.train import RunConfig, Trainer
    from whimbrel.train.memory import MemoryPrediction

__all__ = ["is_finished", "memory", "processes_to_start", "run_settings", "run_training", "train"]

RANKS_PER_NODE = 8
"""GPUs of a machine, for a prediction."""


Plain = Annotated[bool, typer.Option("--plain", help="Print one line per step instead of a progress bar.")]
Watch = Annotated[
    bool | None, typer.Option("--watch/--no-watch", help="Serve a live page of the run. (default: in a terminal)")
]
NumProcesses = Annotated[
    int | None,
    typer.Option(help="Number of processes on this machine. (default: one per visible GPU, or 1 on a CPU)"),
]


def run_settings() -> Iterator[Setting]:
    """All settings of a run, in the order of the documentation."""
    from whimbrel.config import Setting, list_settings
    from whimbrel.models import preset_names
    from whimbrel.train import RunConfig

    doc = f"Start from a preset; other model settings override its fields. One of {', '.join(preset_names())}."
    preset: Setting | None = Setting("model.preset", "string", None, doc)
    for setting in list_settings(RunConfig):
        if preset is not None and setting.name.startswith("model."):
            yield preset
            preset = None
        yield setting


def _list_settings(requested: bool) -> None:
    """Print every setting with its type, default and description."""
    if requested:
        for setting in run_settings():
            default = f"; default {text}" if (text := setting.default_text()) else ""
            print(f"--{setting.name} ({setting.type}{default})\n    {setting.doc}")
        raise typer.Exit


def train(
    context: typer.Context,
    config: Annotated[
        Path,
        typer.Argument(
            help="TOML file of the run, or a recipe such as shakespeare-cpu.", autocompletion=complete_config
        ),
    ],
    plain: Plain = False,
    watch: Watch = None,
    exit_143: Annotated[
        bool, typer.Option("--exit-143", help="Exit with code 143 instead of 0 when stopped by a signal.")
    ] = False,
    nproc: NumProcesses = None,
    max_restarts: Annotated[
        int, typer.Option(help="Restart all processes up to N times if one fails; they resume from a checkpoint.")
    ] = 0,
    settings: Annotated[
        bool, typer.Option("--settings", is_eager=True, callback=_list_settings, help="List all settings and exit.")
    ] = False,
) -> None:
    """Train a model.

    `whimbrel recipes` lists the recipes. Override any setting with --section.name=value; the value none turns off an
    optional setting. If the output directory contains a run, training resumes from its newest checkpoint. Ctrl-C
    finishes the current step, saves a checkpoint and stops.

    Uses all visible GPUs (see docs/distributed.md). To train on multiple nodes, run torchrun ... -m whimbrel train
    CONFIG on each of them.
    """
    if sys.stderr.isatty():
        typer.echo("Loading PyTorch", err=True)  # takes seconds, on a busy machine many
    from whimbrel.train import load_run_config

    del settings  # handled by its callback
    configure_logging()
    loaded = load_run_config(config, context.args)
    prepare_data(loaded.data.path)
    run_training(
        loaded,
        config,
        context.args,
        plain=plain,
        watch=watch,
        exit_143=exit_143,
        nproc=nproc,
        max_restarts=max_restarts,
    )


def run_training(
    config: RunConfig,
    file: Path,
    overrides: Sequence[str],
    *,
    plain: bool,
    exit_143: bool,
    nproc: int | None,
    max_restarts: int,
    watch: bool | None = None,
    print_next: bool = True,
    to_continue: str | None = None,
) -> Trainer:
    """Train in this process and return the trainer, or start several that read `file` with `overrides` and exit.

    `watch` serves a live page of the run; None does so on a terminal. `print_next` prints what to run next.
    `to_continue` says how to continue a run that is already finished (see `ProgressCallback`).
    """
    from whimbrel.train import Trainer
    from whimbrel.train.callbacks import ProgressCallback

    processes = processes_to_start(nproc, max_restarts, config)
    if processes is not None:
        option = [] if watch is None else ["--watch" if watch else "--no-watch"]
        arguments = ["train", str(file), *overrides, *["--plain"] * plain, *option]
        raise typer.Exit(_launch(processes, arguments, max_restarts, exit_143=exit_143))
    progress = ProgressCallback(plain=plain, to_continue=to_continue)
    trainer = Trainer.from_config(config, callbacks=[*_live_page(watch), progress])
    trainer.train()
    if print_next:
        _print_next_commands(trainer)
    _drop_unwritten_output()
    if trainer.received_signal is not None and exit_143:
        raise typer.Exit(143)
    return trainer


def _print_next_commands(trainer: Trainer) -> None:
    """After the last step of a language model: what to run next."""
    from whimbrel.checkpoint import latest_checkpoint
    from whimbrel.tokenization.chat_template import TEMPLATE_FILE

    run = trainer.config.output_dir
    is_main = trainer.state.is_world_process_zero
    if is_finished(trainer) and is_main and (checkpoint := latest_checkpoint(run)) is not None:
        with contextlib.suppress(OSError, ValueError):  # standard output is gone
            is_chat_model = (checkpoint / "model" / TEMPLATE_FILE).is_file()
            first, second = ("chat", "generate") if is_chat_model else ("generate", "chat")
            command = shlex.join(["whimbrel", first, str(run)])
            print(f"Next: {command} (or {second}, serve, eval, export, plot)", flush=True)


def is_finished(trainer: Trainer) -> bool:
    """Whether the run reached its last step, rather than a stop before it."""
    return trainer.state.global_step >= trainer.state.max_steps and trainer.received_signal is None


def _live_page(watch: bool | None) -> list[LivePage]:
    from whimbrel.base.errors import MissingExtraError
    from whimbrel.cli.watch import LivePage

    if watch and not LivePage.is_available():
        raise MissingExtraError("--watch", "fastapi", "serve")
    if watch is None:
        return [LivePage(serve=sys.stdout.isatty() and LivePage.is_available())]
    return [LivePage()] if watch else []


def processes_to_start(nproc: int | None, max_restarts: int, config: RunConfig) -> int | None:
    """Number of processes to start; None to train in this one."""
    from whimbrel.base.errors import ConfigError
    from whimbrel.distributed.launch import default_processes

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if nproc is not None or max_restarts:
            option = "--max-restarts" if nproc is None else "--nproc"
            raise ConfigError(f"torchrun has already started this process: pass {option} to torchrun instead")
        return None
    processes = default_processes(config.train.device) if nproc is None else nproc
    return processes if processes != 1 or max_restarts else None


def _launch(processes: int, arguments: list[str], max_restarts: int, *, exit_143: bool) -> int:
    from whimbrel.distributed.launch import launch

    trace = ["--trace"] if "--trace" in sys.argv else []
    code, stopped_by = launch(processes, [*arguments, *trace], max_restarts=max_restarts)
    return 143 if stopped_by is not None and exit_143 and code == 0 else code


def _drop_unwritten_output() -> None:
    """Keep a run whose standard output failed (full disk, `| head`) from exiting with an error."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def memory(
    context: typer.Context,
    config: Annotated[
        Path,
        typer.Argument(
            help="TOML file of the run, a recipe, or a model preset such as llama2-7b.", autocompletion=complete_config
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(help="Predict for cuda or cpu; the device need not be present. (default: that of the run)"),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(help="Number of processes to predict for. (default: the product of the sizes in [parallel])"),
    ] = None,
    device_memory: Annotated[
        float, typer.Option(help="Memory per device in GiB, for --parallel.strategy=auto.")
    ] = 80.0,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="Compare with this optimizer only, instead of all; can be repeated.")
    ] = None,
    parameters: Annotated[
        bool,
        typer.Option(
            "--parameters", help="Also list the optimizer and the size of its state for each kind of parameter."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict the peak memory of a training step, for the run's own optimizer and for all others.

    The step runs on fake tensors (shapes without data), so it needs neither the device nor its memory. Override any
    setting with --section.name=value. With several processes (--nproc 64 --parallel.strategy=fsdp), the prediction is
    for one rank.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.config import did_you_mean
    from whimbrel.distributed import ParallelConfig
    from whimbrel.optim.build import DENSE_ONLY
    from whimbrel.train.memory import optimizer_names, predict_memory
    from whimbrel.train.memory_mesh import predict_mesh_memory

    if device not in (None, "cuda", "cpu"):
        raise ConfigError(f"expected --device cuda or cpu, got {device}")
    if nproc is not None and nproc < 1:
        raise ConfigError(f"expected --nproc of at least 1, got {nproc}")
    if not 0 < device_memory < math.inf:
        raise ConfigError(f"expected --device-memory > 0, got {device_memory:g}")
    for name in optimizer or ():
        if name not in optimizer_names():
            raise ConfigError(f"unknown --optimizer {name}{did_you_mean(name, optimizer_names())}")
    loaded = _load_config_or_preset(config, context.args)
    supported = [name for name in optimizer_names() if loaded.train.weight_dtype is None or name not in DENSE_ONLY]
    others = [name for name in optimizer or supported if name != loaded.optim.name]
    names = [loaded.optim.name, *others]
    layout = None
    if nproc is not None or loaded.parallel != ParallelConfig():
        loaded, layout = _resolve_mesh(loaded, nproc, device or _device_type(loaded), device_memory)
    with warn_once("whimbrel.optim.build"):  # the warnings of one optimizer apply to most others too
        if layout is None or layout.world_size == 1:
            predictions = predict_memory(loaded, device, names)
        else:
            predictions = predict_mesh_memory(loaded, layout, device or _device_type(loaded), names)
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(prediction) for prediction in predictions], indent=1))
    else:
        _print_predictions(loaded, predictions, parameters=parameters)


def _device_type(config: RunConfig) -> str:
    from whimbrel.train.device import choose_device

    return choose_device(config.train.device).type


def _load_config_or_preset(path: Path, overrides: Sequence[str]) -> RunConfig:
    """A run's configuration; for the name of a preset, one with that model and defaults."""
    from whimbrel.config import apply_overrides, config_file
    from whimbrel.models import preset_names
    from whimbrel.train import load_run_config
    from whimbrel.train.run_config import build_run_config

    if path.exists() or str(path) not in preset_names():
        return load_run_config(config_file(path, preset_names()), overrides)
    table = {"output_dir": "run", "model": {"preset": str(path)}, "data": {"path": "data"}, "train": {"steps": 1}}
    return build_run_config(apply_overrides(table, overrides))


def _resolve_mesh(config: RunConfig, nproc: int | None, device: str, gib: float) -> tuple[RunConfig, Layout]:
    """The layout of `nproc` processes; "auto" is replaced with the strategy it chooses."""
    from dataclasses import replace

    from whimbrel.distributed.layout import resolve_layout
    from whimbrel.train.memory_mesh import choose_strategy

    parallel = config.parallel
    sizes = (parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.tp)
    processes = math.prod(size or 1 for size in sizes) if nproc is None else nproc
    per_node = min(processes, RANKS_PER_NODE)
    if parallel.strategy == "auto":
        parallel, reason = choose_strategy(config, processes, per_node, int(gib * 2**30), device)
        print(f"Strategy (auto): {reason}")
    return replace(config, parallel=parallel), resolve_layout(parallel, processes, per_node)


def _print_predictions(config: RunConfig, predictions: Sequence[MemoryPrediction], *, parameters: bool) -> None:
    from whimbrel.base.files import format_bytes
    from whimbrel.train.callbacks.progress import features

    current = predictions[0]
    step = f"{current.accumulation} x {current.micro_batch} sequences of {config.sequence_length} tokens per step"
    mesh = "" if current.layout == "one process" else f"one rank of {current.layout}, "
    print(f"Device: {current.device}, {mesh}{step}{''.join(f', {feature}' for feature in features(config))}")
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
    for line in _notes(config, current):
        print(line)
    if parameters:
        print()
        print_table(
            ("parameter", "tensors", "shape", "dtype", "optimizer", "weights", "state"),
            (_parameter_row(row) for row in current.parameters),
        )


def _notes(config: RunConfig, current: MemoryPrediction) -> Iterator[str]:
    from whimbrel.base.files import format_bytes

    parts = ", ".join(f"{format_bytes(size)} {name}" for name, size in current.at_peak.items())
    yield f"Peak with {current.optimizer}: {parts}."
    yield "The columns peak at different times, so they may add up to more than the peak."
    if current.device == "cpu":
        yield "Tensors only: the process itself takes a few hundred MiB more."
    if current.device == "cuda":
        yield "Fragmentation may add a few percent, and the CUDA context takes about half a GiB."
    if config.train.compile:
        yield "Compiled blocks save less for backward than predicted here."


def _parameter_row(row: ParameterRow) -> tuple[str, ...]:
    from whimbrel.base.files import format_bytes

    shape = " x ".join(map(str, row.shape))
    state = "unknown" if row.state_bytes is None else format_bytes(row.state_bytes)
    return row.name, str(row.count), shape, row.dtype, row.rule, format_bytes(row.weight_bytes), state
