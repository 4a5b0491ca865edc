"""`whimbrel finalize SOURCE OUT [--quantize RECIPE]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from whimbrel.base.errors import ConfigError

if TYPE_CHECKING:
    from whimbrel.model_io.measure import Finalized, Measured
    from whimbrel.models import GPT

__all__ = ["finalize"]

LENGTH = 1024
"""Tokens of a sequence that a model is measured on where no run says how long its own were."""


def finalize(
    source: Annotated[Path, typer.Argument(help="A run, a checkpoint, or a model directory.")],
    out: Annotated[Path, typer.Argument(help="The new model directory.")],
    quantize: Annotated[
        str | None,
        typer.Option(
            help="int8, int8-dynamic, int4, fp8 or int8-dynamic-act-int4-weight; not given: what a QAT run was trained "
            "for, else nothing; none: nothing."
        ),
    ] = None,
    quantize_embeddings: Annotated[
        bool, typer.Option("--quantize-embeddings", help="Quantize the token embedding and the head too.")
    ] = False,
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: latest, best or a step. (default: latest)")] = None,
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Of what is not quantised, and of scales.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Held-out token shards or text to measure the loss on; not given: those of the run."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many held-out tokens at most.")] = 2**20,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file that lays out a conversation.")] = None,
    generation_config: Annotated[Path | None, typer.Option(help="A JSON file of generation settings.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Generation: how many tokens at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Generation: 0 takes the likeliest token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Generation: draw from this many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Generation: draw from this total probability.")] = None,
    despite_qat: Annotated[
        bool, typer.Option("--despite-qat", help="Quantise a QAT run in another way than it was trained for.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu; the fastest there is when not given.")] = None,
) -> None:
    """Make a model ready to publish: quantised, with tokenizer, chat template, generation settings and a model card.

    The loss before and after is measured on held-out text, printed, and recorded in README.md and finalize.json.
    """
    import torch

    from whimbrel.config import load_toml
    from whimbrel.model_io import model_directory
    from whimbrel.model_io.finalize import finalize_model
    from whimbrel.model_io.sources import choose_checkpoint, run_of
    from whimbrel.train.device import choose_device

    run = run_of(source)
    file = None if run is None else run / "config.toml"
    settings = load_toml(file) if file is not None and file.is_file() else {}
    recipe = _recipe(quantize, settings.get("train", {}).get("qat_recipe"), despite_qat=despite_qat)
    generation = _generation(generation_config, temperature, top_k, top_p, max_new_tokens)
    if checkpoint is not None:
        source = choose_checkpoint(source, checkpoint, greater_is_better=_greater(settings.get("checkpoint", {})))
    directory = model_directory(source)
    result = finalize_model(
        directory,
        out,
        recipe=recipe,
        embeddings=quantize_embeddings,
        dtype={None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype],
        device=choose_device(device),
        chat_template=None if chat_template is None else _template(chat_template),
        generation=generation,
        settings=_told(settings),
        measure=_measure(directory, settings, data, tokens),
    )
    _tell(out, result)


def _recipe(asked: str | None, trained: str | None, *, despite_qat: bool) -> str | None:
    """What to quantise as: what was asked for, or what the run was trained for."""
    from whimbrel.model_io.quantized import weight_recipe

    if asked is None:
        return trained
    if asked == "none":
        return None
    form = weight_recipe("--quantize", asked).finalize
    if trained is not None and weight_recipe("qat_recipe", trained).finalize != form and not despite_qat:
        raise ConfigError(
            f"the run was trained for {trained} (train.qat_recipe), not --quantize {asked}: leave --quantize out, or "
            "pass --despite-qat too"
        )
    return asked


def _template(file: Path) -> str:
    from whimbrel.tokenization.chat_template import read_template

    if not file.is_file():
        raise ConfigError(f"no chat template at {file}: give a Jinja file, as chat_template.jinja is")
    return read_template(file)


def _generation(
    file: Path | None, temperature: float | None, top_k: int | None, top_p: float | None, max_new_tokens: int | None
) -> dict[str, Any]:
    """Settings as `generation_config.json` spells them; there null is not set."""
    from whimbrel.inference import SamplingParams
    from whimbrel.model_io.tables import read_table

    if file is not None and not file.is_file():
        raise ConfigError(f"no generation settings at {file}: give a JSON file, as generation_config.json is")
    settings = {} if file is None else read_table(file)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    own = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**own)  # type: ignore[arg-type]
    if temperature == 0:
        settings |= {"do_sample": False, **dict.fromkeys(given)}
    elif own:
        settings |= {"do_sample": True, **own}
    return settings | ({} if max_new_tokens is None else {"max_new_tokens": max_new_tokens})


def _greater(settings: Mapping[str, Any]) -> bool:
    from whimbrel.train.evaluation import greater_is_better

    return greater_is_better(settings.get("metric", "loss"), settings.get("greater_is_better"))


def _measure(
    directory: Path, settings: dict[str, Any], data: str | None, most: int
) -> Callable[[GPT], Measured] | None:
    """What measures the loss: on the data that was given, or on what the run validated on; None without either."""
    from whimbrel.cli.held_out import held_out_loss, read_shards, read_text
    from whimbrel.data.shards import has_split
    from whimbrel.model_io import load_tokenizer
    from whimbrel.model_io.directory import describe
    from whimbrel.train.config import run_config

    shape = describe(directory).config
    tokenizer = load_tokenizer(directory) if (directory / "tokenizer.json").is_file() else None
    if data is not None:
        if Path(data).is_dir() and any(Path(data).glob("*.bin")):
            held = read_shards(Path(data), tokenizer, shape.vocab_size, most)
        else:
            held = read_text(data, tokenizer, most)
        return held_out_loss(held, min(LENGTH, shape.context_length))
    run = run_config(settings) if "data" in settings else None
    path = None if run is None else run.validation.path or run.data.path
    if run is None or path is None or not has_split(path, "val"):
        where = "" if path is None else f", as {path} of the run holds no held-out shards"
        print(f"no loss is measured{where}: --data takes held-out text or token shards")
        return None
    held = read_shards(path, tokenizer, shape.vocab_size, min(run.validation.tokens or most, most))
    return held_out_loss(held, run.sequence_length, join=run.data.documents == "join")


def _told(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that its model card tells of: what the model is, and how it was trained."""
    from whimbrel.config import to_table
    from whimbrel.train.config import TrainConfig

    usual = to_table(TrainConfig(steps=1)) | {"device": settings.get("train", {}).get("device")}
    told = {name: settings[name] for name in ("model", "train", "optim", "schedule") if name in settings}
    if "train" in told:
        told["train"] = {name: value for name, value in told["train"].items() if usual.get(name) != value}
    return told


def _tell(out: Path, result: Finalized) -> None:
    from whimbrel.base.progress import format_bytes

    was, is_now = result.before, result.after
    sizes = f"{format_bytes(was.bytes)} -> {format_bytes(is_now.bytes)}"
    print(f"{out}: {result.parameters:,} parameters, {was.format} -> {is_now.format}, {sizes}")
    if was.measured is not None and is_now.measured is not None:
        before, after = was.measured, is_now.measured
        change = after.perplexity / before.perplexity - 1
        print(f"loss {before.loss:.4f} -> {after.loss:.4f}, on {before.tokens:,} tokens of {before.text}")
        print(f"perplexity {before.perplexity:.3f} -> {after.perplexity:.3f} ({change:+.2%})")
