"""`whimbrel eval MODEL --tasks NAMES --text SOURCE`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from whimbrel.base.errors import ConfigError
from whimbrel.cli.model_options import Device, Model, ParseSpecial, Quantize, TokenizerPath
from whimbrel.cli.terminal import ProgressBar, print_table

if TYPE_CHECKING:
    from whimbrel.evaluate import Scorer, TaskResult, TextResult

__all__ = ["evaluate"]


def evaluate(
    model: Model,
    tasks: Annotated[
        str | None,
        typer.Option(help="arc_challenge, arc_easy, hellaswag, lambada, piqa, winogrande (comma-separated), or all."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Directory of the task files. (default: WHIMBREL_EVAL_DATA, or data/eval)"),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Compute bits per byte of text (a source as in `prepare`) or token shards; can be repeated."),
    ] = None,
    text_key: Annotated[str, typer.Option(help="The text field of parquet and jsonl sources.")] = "text",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N items of each task, or documents of each text.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of sequences per forward pass. (default: as many as fit)")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Dtype of the weights. (default: as stored)")
    ] = None,
    quantize: Quantize = None,
    parse_special: ParseSpecial = True,
    device: Device = None,
    tokenizer: TokenizerPath = None,
    out: Annotated[Path | None, typer.Option(help="Also write the results to this JSON file.")] = None,
) -> None:
    """Evaluate a model: accuracy on multiple-choice tasks, and bits per byte of text.

    Tasks are zero-shot, with the prompts and scoring of lm-eval, from local files.
    """
    import torch

    from whimbrel.evaluate import TASKS, Scorer, evaluate_tasks
    from whimbrel.evaluate.evaluation import results_to_dict, write_results
    from whimbrel.evaluate.tasks import find_file, find_task
    from whimbrel.train.device import choose_device

    if tasks is None and not text:
        raise ConfigError(f"expected --tasks ({', '.join(TASKS)}) or --text")
    if out is not None and out.is_dir():
        raise ConfigError(f"expected a file for --out, got the directory {out}")
    names = list(TASKS) if tasks == "all" else [] if tasks is None else [name.strip() for name in tasks.split(",")]
    for name in names:
        find_file(find_task(name), data)  # before loading the model
    scorer = Scorer.load(
        model,
        tokenizer=tokenizer,
        dtype={None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype],
        device=choose_device(device),
        quantize=quantize,
        parse_special=parse_special,
    )
    progress = ProgressBar()
    task_results = {}
    if names:
        task_results = evaluate_tasks(scorer, names, data, limit=limit, batch_size=batch_size, progress=progress)
    text_results = {source: _score_text(scorer, source, text_key, limit, batch_size, progress) for source in text or ()}
    _print_results(task_results, text_results)  # before writing, which may fail
    if out is not None:
        settings = {"limit": limit, "batch_size": batch_size, "quantize": quantize, "parse_special": parse_special}
        write_results(
            out, results_to_dict(scorer, str(model), tasks=task_results, texts=text_results, settings=settings)
        )


def _score_text(
    scorer: Scorer, source: str, text_key: str, limit: int | None, batch_size: int | None, progress: ProgressBar
) -> TextResult:
    from whimbrel.data.sources import iter_documents
    from whimbrel.evaluate import is_shard_directory, perplexity, shard_perplexity

    if is_shard_directory(source):
        return shard_perplexity(scorer, Path(source), limit=limit, batch_size=batch_size, progress=progress)
    texts = iter_documents([source], text_key)
    return perplexity(scorer, texts, limit=limit, batch_size=batch_size, progress=progress)


def _print_results(tasks: Mapping[str, TaskResult], texts: Mapping[str, TextResult]) -> None:
    if tasks:
        print_table(
            ("task", "items", "metric", "value", "stderr"),
            (
                (name, f"{result.items:,}", metric, f"{value:.4f}", "" if stderr is None else f"± {stderr:.4f}")
                for name, result in tasks.items()
                for metric, (value, stderr) in result.metrics.items()
            ),
        )
    for name, result in tasks.items():
        if result.truncated:
            print(f"{name}: {result.truncated:,} contexts were truncated to fit into the model's context")
    if texts:
        print_table(
            ("text", "documents", "tokens", "bytes", "bits per byte", "bits per token", "perplexity"),
            (
                (
                    name,
                    *(f"{count:,}" for count in (text.documents, text.tokens, text.bytes)),
                    *(f"{metric:.4f}" for metric in (text.bits_per_byte, text.bits_per_token, text.perplexity)),
                )
                for name, text in texts.items()
            ),
        )
