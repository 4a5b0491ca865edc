"""`whimbrel eval MODEL --tasks NAMES --text SOURCE`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from whimbrel.base.errors import ConfigError
from whimbrel.cli.model_options import Device, Model, ParseSpecial, TokenizerPath, Weights
from whimbrel.cli.terminal import ProgressBar, print_table

if TYPE_CHECKING:
    from whimbrel.evaluate import Subject, TaskResult, TextResult

__all__ = ["evaluate"]


def evaluate(
    model: Model,
    tasks: Annotated[
        str | None,
        typer.Option(help="arc_challenge, arc_easy, hellaswag, lambada, piqa, winogrande; commas between, or all."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The folder of the tasks' files. (default: what WHIMBREL_EVAL_DATA names, or data/eval)"),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Measure bits per byte on this: what `prepare` reads, or a folder of token shards."),
    ] = None,
    text_key: Annotated[str, typer.Option(help="The field of a parquet or jsonl text that holds a document.")] = "text",
    limit: Annotated[
        int | None, typer.Option(min=1, help="The first items of each task, or documents of each text, only.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of one forward pass. (default: as many as make it worth while)")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Of the weights. (default: as they are stored)")
    ] = None,
    weights: Weights = None,
    parse_special: ParseSpecial = True,
    device: Device = None,
    tokenizer: TokenizerPath = None,
    out: Annotated[Path | None, typer.Option(help="Write the results there too, as JSON.")] = None,
) -> None:
    """Measure a model: accuracy on multiple-choice tasks, bits per byte on any text, each with what it was measured on.

    Questions are worded and scored as lm-eval does, without examples before them, from files on this machine.
    """
    import torch

    from whimbrel.evaluate import TASKS, Subject, evaluate_tasks
    from whimbrel.evaluate.files import find_file, find_task
    from whimbrel.evaluate.report import results_table, write_results
    from whimbrel.train.device import choose_device

    if tasks is None and not text:
        raise ConfigError(f"nothing to measure: give --tasks ({', '.join(TASKS)}) or --text")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out} is a directory: name a file to write")
    names = list(TASKS) if tasks == "all" else [] if tasks is None else [name.strip() for name in tasks.split(",")]
    for name in names:
        find_file(find_task(name), data)  # before a model is read for nothing
    subject = Subject.load(
        model,
        tokenizer=tokenizer,
        dtype={None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype],
        device=choose_device(device),
        quantize=weights,
        parse_special=parse_special,
    )
    shown = ProgressBar()
    answered = {}
    if names:
        answered = evaluate_tasks(subject, names, data, limit=limit, batch_size=batch_size, progress=shown)
    read = {source: _measure(subject, source, text_key, limit, batch_size, shown) for source in text or ()}
    _tell(answered, read)  # before a disk has its say: hours of work may be in it
    if out is not None:
        settings = {"limit": limit, "batch_size": batch_size, "weights": weights, "parse_special": parse_special}
        write_results(out, results_table(subject, str(model), tasks=answered, texts=read, settings=settings))


def _measure(
    subject: Subject, source: str, text_key: str, limit: int | None, batch_size: int | None, shown: ProgressBar
) -> TextResult:
    from whimbrel.data.sources import documents
    from whimbrel.evaluate import perplexity, shard_perplexity

    if Path(source).is_dir() and any(Path(source).glob("*.bin")):
        return shard_perplexity(subject, Path(source), limit=limit, batch_size=batch_size, progress=shown)
    texts = documents([source], text_key)
    return perplexity(subject, texts, limit=limit, batch_size=batch_size, progress=shown)


def _tell(tasks: Mapping[str, TaskResult], texts: Mapping[str, TextResult]) -> None:
    if tasks:
        print_table(("task", "items", "metric", "value", "stderr"), _task_rows(tasks))
    for name, result in tasks.items():
        if result.cut:
            print(f"{name}: {result.cut:,} contexts were longer than the model's own and lost their beginning")
    if texts:
        heads = ("text", "documents", "tokens", "bytes", "bits per byte", "bits per token", "perplexity")
        print_table(heads, _text_rows(texts))


def _task_rows(tasks: Mapping[str, TaskResult]) -> Iterator[tuple[str, ...]]:
    for name, result in tasks.items():
        for metric, (value, stderr) in result.metrics.items():
            yield name, f"{result.items:,}", metric, f"{value:.4f}", "" if stderr is None else f"± {stderr:.4f}"


def _text_rows(texts: Mapping[str, TextResult]) -> Iterator[tuple[str, ...]]:
    for name, result in texts.items():
        counts = (f"{result.documents:,}", f"{result.tokens:,}", f"{result.bytes:,}")
        yield name, *counts, f"{result.bits_per_byte:.4f}", f"{result.bits_per_token:.4f}", f"{result.perplexity:.4f}"
