"""`whimbrel generate RUN_OR_MODEL "text"`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whimbrel.base.errors import ConfigError

__all__ = ["generate"]


def generate(
    model: Annotated[
        Path, typer.Argument(help="A run (its newest checkpoint), a model directory, or a llama2.c .bin.")
    ],
    text: Annotated[str, typer.Argument(help="What to go on from; nothing starts a new text.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens to write at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="Above 1 is wilder, below 1 tamer, 0 takes the likeliest.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens of this total probability.")
    ] = None,
    past_end: Annotated[
        bool, typer.Option("--past-end", help="Do not stop at the end of a text: begin another.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu; the fastest there is when not given.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer other than the model's own; a llama2.c .bin has none.")
    ] = None,
) -> None:
    """Write on from a text, as it is drawn."""
    from whimbrel.artifacts import load_model, load_tokenizer, model_directory, special_tokens
    from whimbrel.generate import Sampling, encode_prompt, stream, stream_text
    from whimbrel.train.device import choose_device

    source = model_directory(model)
    if tokenizer is None and source.is_file():
        raise ConfigError(f"the file {source} holds no tokenizer: pass --tokenizer with the one it was trained with")
    words = load_tokenizer(tokenizer or source)
    prompt = encode_prompt(words, text)
    ends = special_tokens(source).eos_ids if source.is_dir() else ()
    tokens = stream(
        load_model(source, device=choose_device(device)),
        prompt,
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        max_new_tokens=max_new_tokens,
        seed=seed,
        eos_id=None if past_end else ends or words.eot_id,
    )
    print(text, end="", flush=True)
    for piece in stream_text(words, prompt, tokens):
        print(piece, end="", flush=True)
    print()
