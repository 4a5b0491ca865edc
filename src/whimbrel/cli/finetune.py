"""`whimbrel finetune MODEL DATA... --out-dir RUN`: a fine-tuning run from a few options instead of a TOML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whimbrel.cli.terminal import configure_logging, escape_controls
from whimbrel.cli.train import NumProcesses, Plain, Watch, processes_to_start, run_training

if TYPE_CHECKING:
    from whimbrel.train import RunConfig
    from whimbrel.train.samples import PreparedSamples

__all__ = ["finetune"]

LEARNING_RATES = {
    "lm": (2e-4, 2e-5),
    "sft": (2e-4, 2e-5),
    "distill": (2e-4, 2e-5),
    "dpo": (2e-5, 1e-6),
    "orpo": (5e-5, 8e-6),
}
"""Peak learning rates by objective: with LoRA, and with --full."""
MIN_STEPS_PER_EPOCH = 20
"""Small datasets get a smaller batch size, so that an epoch has at least this many steps if possible."""
SHOWN_CHARACTERS = 1000
SESSION_OPTIONS = ("--resume.", "--overwrite")


def finetune(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help="Model to fine-tune: a model directory, a run, or owner/name on the Hugging Face Hub."),
    ],
    data: Annotated[
        list[str], typer.Argument(help="Chats, preference pairs or text: jsonl, parquet, directories, Hub datasets.")
    ],
    out_dir: Annotated[Path, typer.Option(help="Output directory; an existing run in it is resumed.")],
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of LoRA adapters.")] = False,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of the adapters. (default: 16)")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Quantize the frozen weights while loading (QLoRA): int8, int4 or fp8.")
    ] = None,
    objective: Annotated[str, typer.Option(help="sft, lm (text), dpo or orpo (preference pairs), or distill.")] = "sft",
    epochs: Annotated[float | None, typer.Option(help="Passes over the data. (default: 2)")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate. (default for sft: 2e-4, or 2e-5 with --full)")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens per sequence. (default: the model's context, at most 2048)")
    ] = None,
    val: Annotated[float | None, typer.Option(help="Fraction of the samples to hold out for validation.")] = None,
    data_format: Annotated[str | None, typer.Option("--format", help="Format of the data. (default: detected)")] = None,
    template: Annotated[
        str | None, typer.Option(help="Chat template for a model without one: chatml, llama3, mistral, ...")
    ] = None,
    train_on: Annotated[str, typer.Option(help="Turns to train on: assistant, last or all.")] = "assistant",
    too_long: Annotated[
        str, typer.Option(help="What to do with samples longer than the sequence length: truncate or drop.")
    ] = "truncate",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip and count invalid samples.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print a summary of the data and write the config, but do not train.")
    ] = False,
    plain: Plain = False,
    watch: Watch = None,
    nproc: NumProcesses = None,
) -> None:
    """Fine-tune a model on chats, preference pairs or text.

    Trains LoRA adapters by default. Prints a summary of the data, writes the equivalent configuration to
    OUT_DIR/config.toml (for `whimbrel train`), and trains. Override any setting with --section.name=value.
    """
    from whimbrel.config import apply_overrides
    from whimbrel.model_io.hub import resolve_path
    from whimbrel.train.run_config import build_run_config

    configure_logging()
    adapters = _adapters(full, lora_rank, weights, context.args)
    train = {"clip": 1.0, **_device_defaults(context.args, full=full), **_run_length(context.args, epochs)}
    table = {
        "output_dir": str(out_dir),
        "model": {"path": str(resolve_path(model).resolve()), **_given(weights=weights)},
        "data": {
            "path": data, "train_on": train_on, "too_long": too_long, "skip_bad": skip_bad,
            **_given(format=data_format, template=template, val=val, sequence_length=sequence_length),
        },
        "train": train,
        "optim": {"lr": _learning_rate(objective, full=full) if lr is None else lr},
        "schedule": {"name": "cosine", "warmup_steps": 0.03},
        "validation": {"each_epoch": val is not None},
        "objective": {"name": objective},
        **adapters,
    }  # fmt: skip
    _run(
        build_run_config(apply_overrides(table, context.args)),
        context.args,
        dry_run=dry_run,
        plain=plain,
        watch=watch,
        nproc=nproc,
    )


def _run(
    config: RunConfig, overrides: Sequence[str], *, dry_run: bool, plain: bool, watch: bool | None, nproc: int | None
) -> None:
    """Tokenize the data, print a summary, write the config, and train."""
    from whimbrel.train.initial_model import has_checkpoint
    from whimbrel.train.run_directory import record_settings
    from whimbrel.train.samples import prepare_samples

    samples = prepare_samples(config)
    ranks = processes_to_start(nproc, 0, config) or 1
    config = _with_batch_size(config, samples, ranks)
    for line in _describe(config, samples, ranks):
        print(line)
    file = config.output_dir / "config.toml"
    if not has_checkpoint(config):
        record_settings(config, resumed=False)
        print(_line("Config", str(file)), flush=True)
    if not dry_run:
        session = [override for override in overrides if override.startswith(SESSION_OPTIONS)]
        run_training(config, file, session, plain=plain, watch=watch, exit_143=False, nproc=nproc, max_restarts=0)


def _adapters(full: bool, rank: int | None, weights: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The `[lora]` section; empty if all weights are trained."""
    from whimbrel.base.errors import ConfigError

    for option, value in (("--lora-rank", rank), ("--weights", weights)):
        if full and value is not None:
            raise ConfigError(f"{option} {value} applies to LoRA, but --full trains all weights: omit one of them")
    for override in (override for override in overrides if full and override.startswith("--lora.")):
        raise ConfigError(f"{override} applies to LoRA, but --full trains all weights: omit one of them")
    rank = 16 if rank is None else rank
    return {} if full else {"lora": {"rank": rank, "alpha": 2.0 * rank}}


def _learning_rate(objective: str, *, full: bool) -> float:
    from whimbrel.base.errors import ConfigError
    from whimbrel.config import not_one_of

    if objective not in LEARNING_RATES:
        raise ConfigError(not_one_of("--objective", objective, list(LEARNING_RATES)))
    return LEARNING_RATES[objective][full]


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _run_length(overrides: Sequence[str], epochs: float | None) -> dict[str, float]:
    """The run length, unless an override sets it in steps or tokens."""
    is_set = any(override.startswith(("--train.steps", "--train.tokens=", "--train.epochs")) for override in overrides)
    return {} if is_set and epochs is None else {"epochs": 2.0 if epochs is None else epochs}


def _device_defaults(overrides: Sequence[str], *, full: bool) -> dict[str, Any]:
    """On a GPU: torch.compile and bf16; frozen weights are also stored in bf16."""
    from whimbrel.train.device import choose_device

    chosen = [override.partition("=")[2] for override in overrides if override.startswith("--train.device=")]
    if choose_device(chosen[-1] if chosen else None).type != "cuda":
        return {}
    defaults = {"precision": "bf16", "compile": True}
    return defaults if full else defaults | {"default_dtype": "bfloat16"}


def _with_batch_size(config: RunConfig, samples: PreparedSamples, ranks: int) -> RunConfig:
    """Choose `tokens_per_step` by the size of the data, unless the batch size is set."""
    from dataclasses import replace

    from whimbrel.train.finetune import build_dataset

    train = config.train
    if train.tokens_per_step is not None or train.accumulation is not None:
        return config
    rows, _ = build_dataset(samples.train, config, samples.tokenizer.eot_id)
    default = config.tokens_per_step // config.sequence_length
    micro_batch = (train.micro_batch or 1) * ranks
    count = max(1, min(default, len(rows) // MIN_STEPS_PER_EPOCH) // micro_batch)
    power_of_two = 1 << (count.bit_length() - 1)  # divisible by many micro-batch sizes
    tokens = power_of_two * micro_batch * config.sequence_length
    return replace(config, train=replace(train, tokens_per_step=tokens))


# Summary before training


def _describe(config: RunConfig, samples: PreparedSamples, ranks: int) -> Iterator[str]:
    from whimbrel.train.finetune import build_dataset

    stats, report, pairs = samples.stats, samples.report, samples.train.pair
    formats = ", ".join(f"{name} ({kind})" for name, kind in report.formats.items())
    kind = "pair" if pairs else "sample"
    yield _line("Data", formats)
    yield _line(
        "",
        f"{_count(stats.samples, kind)}, {stats.tokens:,} tokens ({stats.supervised_share:.0%} supervised), "
        f"longest {'answer' if pairs else 'sample'}: {stats.longest:,} tokens",
    )
    added = f", {len(samples.added_tokens)} special tokens added" if samples.added_tokens else ""
    yield _line("Template", f"{samples.template_name}{added}")
    rows, _ = build_dataset(samples.train, config, samples.tokenizer.eot_id)
    if config.data.packing:
        packed = f"{_count(len(rows), 'sequence')} of {config.sequence_length:,} tokens, {rows.fill_rate:.0%} full"
        yield _line("Packed", packed)
    if samples.val is not None:
        yield _line("Held out", _count(samples.val.stats.samples, kind))
    yield from _warnings(config, samples)
    yield from _example(samples)
    yield _line("Training", _training(config, len(rows)))
    yield _line("Memory", _memory(config, ranks))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _line(label: str, text: str) -> str:
    return f"{label:<10} {escape_controls(text)}"


def _warnings(config: RunConfig, samples: PreparedSamples) -> Iterator[str]:
    stats, report = samples.stats, samples.report
    limit = f"{config.sequence_length:,} tokens (--sequence-length)"
    counts = {
        f"truncated to {limit}": stats.truncated,
        f"dropped: longer than {limit}": stats.dropped,
        "without a special token at the end: they do not teach the model to stop": stats.unterminated,
        "with answers that start in the middle of a token: inference will tokenize the prompts "
        "differently": stats.misaligned,
        **{f"skipped: {reason}": count for reason, count in report.skipped.items()},
    }
    yield from (_line("Warning", f"{_count(count, 'sample')} {text}") for text, count in counts.items() if count)
    yield from (_line("", error) for error in report.errors[:3])


def _example(samples: PreparedSamples) -> Iterator[str]:
    from whimbrel.data.packing import mark_supervised

    names = ("Chosen", "Rejected") if samples.train.pair else ("Example",)
    for number, name in enumerate(names):
        text = mark_supervised(samples.tokenizer, *samples.train[number])
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
        yield f"{name} (supervised text in [[ ]]):"
        yield from (f"  {escape_controls(line)}" for line in shown.splitlines())


def _training(config: RunConfig, rows: int) -> str:
    objective, lora, weights = config.objective.name, config.lora, config.model.weights
    on = "all linear layers" if lora is None or lora.modules is None else ", ".join(lora.modules)
    kind = "DoRA" if lora is not None and lora.use_dora else "LoRA"
    what = "all weights" if lora is None else f"{kind} rank {lora.rank} on {on}"
    quantized = "" if weights is None else f", {weights} weights"
    per_step = config.tokens_per_step // config.sequence_length
    epoch = -(-rows // per_step)
    steps = config.train.steps or (config.train.tokens or 0) // config.tokens_per_step
    length = (
        _count(steps, "step")
        if config.train.epochs is None
        else f"{config.train.epochs:g} epochs of {_count(epoch, 'step')}"
    )
    batch = f"{_count(per_step, 'sequence')} per step"
    return f"{objective}, {what}{quantized}; {length}, {batch}; learning rate {config.optim.lr:g}"


def _memory(config: RunConfig, ranks: int) -> str:
    from whimbrel.base.errors import WhimbrelError
    from whimbrel.base.files import format_bytes
    from whimbrel.distributed.layout import resolve_layout
    from whimbrel.train.device import choose_device
    from whimbrel.train.memory import predict_memory
    from whimbrel.train.memory_mesh import predict_mesh_memory

    try:
        if ranks == 1:
            [prediction] = predict_memory(config)
        else:
            layout, device = resolve_layout(config.parallel, ranks, ranks), choose_device(config.train.device)
            [prediction] = predict_mesh_memory(config, layout, device.type)
    except WhimbrelError as error:
        return f"not predicted: {error}"
    parts = ", ".join(f"{format_bytes(size)} {name}" for name, size in prediction.at_peak.items())
    rank = "" if ranks == 1 else " per rank"
    return f"{format_bytes(prediction.peak)} peak{rank} ({parts})"
