"""`whimbrel eval MODEL --tasks NAMES --generate FILE --text SOURCE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from whimbrel.base.errors import ConfigError
from whimbrel.cli.model_options import Base, Device, Model, ParseSpecial, Quantize, TokenizerPath
from whimbrel.cli.terminal import ProgressBar, print_table

if TYPE_CHECKING:
    from whimbrel.evaluate import Scorer, TaskResult, TextResult

__all__ = ["evaluate"]


Tasks = Annotated[
    str | None,
    typer.Option(
        help="arc_challenge, arc_easy, hellaswag, lambada, piqa, winogrande, gsm8k (comma-separated), or all for every "
        "task except gsm8k."
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="Directory of the task files. (default: WHIMBREL_EVAL_DATA, or data/eval)")
]
Generate = Annotated[
    list[Path] | None,
    typer.Option(help="Generate answers to the questions in a jsonl file and report exact match; can be repeated."),
]
Text = Annotated[
    list[str] | None,
    typer.Option(help="Compute bits per byte of text (a source as in `prepare`) or token shards; can be repeated."),
]
Shots = Annotated[
    int | None, typer.Option(min=0, help="Few-shot examples per question. (default: 5 for gsm8k, otherwise 0)")
]
ShotsData = Annotated[
    Path | None,
    typer.Option(
        help="File of few-shot examples, or directory with TASK_train.jsonl. (default: TASK_train.jsonl next to the "
        "task's file, else the task's file itself)"
    ),
]
Multiturn = Annotated[
    bool | None,
    typer.Option(
        "--multiturn/--no-multiturn",
        help="With --chat: make few-shot examples turns of the conversation (default), or part of one user message.",
    ),
]
DEFAULT_NEW_TOKENS = 256
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Maximum number of tokens in a generated answer. (default: 256, but at most half of the context)"
    ),
]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop string for generated answers, instead of the task's; can be repeated.")
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Evaluate only the first N items of each task and the first N documents of each text."),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of sequences per forward pass. (default: as many as fit)")
]
Dtype = Annotated[
    Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Dtype of the weights. (default: as stored)")
]


def evaluate(
    model: Model,
    tasks: Tasks = None,
    data: Data = None,
    generate: Generate = None,
    text: Text = None,
    text_key: Annotated[str, typer.Option(help="Column (parquet) or key (jsonl) that contains the text.")] = "text",
    shots: Shots = None,
    shots_data: ShotsData = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render prompts with the model's chat template.")] = False,
    multiturn: Multiturn = None,
    max_new_tokens: MaxNewTokens = None,
    stop: Stop = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    parse_special: ParseSpecial = True,
    device: Device = None,
    tokenizer: TokenizerPath = None,
    base: Base = None,
    out: Annotated[Path | None, typer.Option(help="Also write the results to this JSON file.")] = None,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Also write every prompt, with its scores or answer, to --out.")
    ] = False,
) -> None:
    """Evaluate a model: accuracy on multiple-choice tasks, exact match of generated answers, bits per byte of text.

    Tasks use the prompts and scoring of lm-eval, and are read from local files.
    """
    import torch

    from whimbrel.evaluate import TASKS, GenerationOptions, PromptOptions, Scorer
    from whimbrel.evaluate.evaluation import evaluate_questions, read_tasks, results_to_dict, write_results
    from whimbrel.train.device import choose_device

    names = list(TASKS) if tasks == "all" else [] if tasks is None else [name.strip() for name in tasks.split(",")]
    if out is not None and out.is_dir():
        raise ConfigError(f"expected a file for --out, got the directory {out}")
    if log_samples and out is None:
        raise ConfigError("--log-samples writes the samples to --out, got no --out: add --out FILE")
    prompt_options = {"--shots": shots, "--shots-data": shots_data, "--chat": chat or None, "--multiturn": multiturn}
    _check_sources(names, generate, text, prompt_options, {"--max-new-tokens": max_new_tokens, "--stop": stop})
    _check_chat(chat, multiturn, parse_special)
    prompts = PromptOptions(shots=shots, shots_data=shots_data, chat=chat, multiturn=multiturn is not False)
    # Before loading the model, which may take minutes.
    questions = read_tasks(names, data, files=generate or (), prompts=prompts, limit=limit) if names or generate else {}
    scorer = Scorer.load(
        model,
        base=base,
        tokenizer=tokenizer,
        dtype={None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype],
        device=choose_device(device),
        quantize=quantize,
        parse_special=parse_special,
    )
    default = min(DEFAULT_NEW_TOKENS, scorer.model.config.context_length // 2)
    generation = GenerationOptions(max_new_tokens=max_new_tokens or max(default, 1), stop=stop)
    progress = ProgressBar()
    task_results = evaluate_questions(
        scorer, questions, prompts=prompts, generation=generation, batch_size=batch_size, progress=progress
    )
    text_results = {source: _score_text(scorer, source, text_key, limit, batch_size, progress) for source in text or ()}
    _print_results(task_results, text_results)  # before writing, which may fail
    if out is not None:
        settings = {
            "limit": limit,
            "batch_size": batch_size,
            "quantize": quantize,
            "parse_special": parse_special,
            "chat": chat,
            "multiturn": prompts.multiturn,
            "max_new_tokens": generation.max_new_tokens,
            "stop": stop,
        }
        results = results_to_dict(
            scorer, str(model), tasks=task_results, texts=text_results, settings=settings, log_samples=log_samples
        )
        write_results(out, results)


def _check_sources(
    names: Sequence[str],
    generate: Sequence[Path] | None,
    text: Sequence[str] | None,
    prompt_options: Mapping[str, object],
    generation_options: Mapping[str, object],
) -> None:
    """Raise if there is nothing to evaluate, or for options that would have no effect on it."""
    from whimbrel.evaluate import GENERATIVE_TASKS, TASKS

    if not names and not generate and not text:
        raise ConfigError(f"expected --tasks ({', '.join([*TASKS, *GENERATIVE_TASKS])}), --generate or --text")
    unused = {}
    if not names and not generate:
        unused = {**prompt_options, **generation_options}
    elif not generate and not GENERATIVE_TASKS.keys() & set(names):
        unused = {**generation_options}
    given = [option for option, value in unused.items() if value is not None]
    if given:
        needed = "--tasks or --generate" if given[0] in prompt_options else "--generate or --tasks gsm8k"
        raise ConfigError(f"{given[0]} needs {needed}: add one or omit it")


def _check_chat(chat: bool, multiturn: bool | None, parse_special: bool) -> None:
    if multiturn is not None and not chat:
        raise ConfigError(f"--{'' if multiturn else 'no-'}multiturn needs --chat: add it or omit this option")
    if chat and not parse_special:
        raise ConfigError("--chat cannot be combined with --no-parse-special: chat templates write special tokens")


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
        if result.shots:
            print(f"{name}: few-shot examples per question: {result.shots}, from {result.shots_file}")
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
