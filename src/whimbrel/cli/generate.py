"""`whimbrel generate RUN_OR_MODEL "text"`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from whimbrel.base.errors import ConfigError

__all__ = ["generate"]

DEFAULTS: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 256}
"""What holds where neither the command line nor the model says otherwise."""


def generate(
    model: Annotated[
        Path, typer.Argument(help="A run (its newest checkpoint), a model directory, or a llama2.c .bin.")
    ],
    text: Annotated[str, typer.Argument(help="What to go on from; nothing starts a new text.")] = "",
    max_new_tokens: Annotated[
        int | None, typer.Option(help="How many tokens to write at most. (default: the model's own, or 256)")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Above 1 is wilder, below 1 tamer, 0 takes the likeliest. (default: the model's own, or 0.8)"
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens of this total probability.")
    ] = None,
    past_end: Annotated[
        bool, typer.Option("--past-end", help="Do not stop at the end of a text: begin another.")
    ] = False,
    weights: Annotated[
        str | None, typer.Option(help="Quantise a plain model as it is read: int8, int8-dynamic, int4 or fp8.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu; the fastest there is when not given.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer other than the model's own; a llama2.c .bin has none.")
    ] = None,
) -> None:
    """Write on from a text, as it is drawn.

    What is not given is as the model's generation_config.json says, where that draws at all.
    """
    from whimbrel.artifacts import (
        generation_settings,
        load_model,
        load_tokenizer,
        model_directory,
        special_tokens,
    )
    from whimbrel.generate import Sampling, encode_prompt, stream, stream_text
    from whimbrel.train.device import choose_device

    source = model_directory(model)
    if tokenizer is None and source.is_file():
        raise ConfigError(f"the file {source} holds no tokenizer: pass --tokenizer with the one it was trained with")
    words = load_tokenizer(tokenizer or source)
    prompt = encode_prompt(words, text)
    ends = special_tokens(source).eos_ids if source.is_dir() else ()
    own = generation_settings(source) if source.is_dir() else {}
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": max_new_tokens}
    asked = DEFAULTS | own | {name: value for name, value in given.items() if value is not None}
    tokens = stream(
        load_model(source, device=choose_device(device), weights=weights),
        prompt,
        Sampling(temperature=asked["temperature"], top_k=asked.get("top_k"), top_p=asked.get("top_p")),
        max_new_tokens=asked["max_new_tokens"],
        seed=seed,
        eos_id=None if past_end else ends or words.eot_id,
    )
    print(text, end="", flush=True)
    for piece in stream_text(words, prompt, tokens):
        print(piece, end="", flush=True)
    print()
