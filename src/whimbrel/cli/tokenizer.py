"""`whimbrel tokenizer train|show`: train a tokenizer, or inspect one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whimbrel.cli.terminal import parse_escapes

__all__ = ["app"]

app = typer.Typer(help="Train a tokenizer, or inspect one.", no_args_is_help=True)


@app.command()
def train(
    source: Annotated[list[str], typer.Argument(help="Files, directories, globs, or owner/dataset[:config].")],
    out_dir: Annotated[Path, typer.Option(help="Output directory for tokenizer.json and tokenizer_config.json.")],
    vocab_size: Annotated[int, typer.Option(help="Number of ids, including the 256 bytes and end-of-text.")] = 32_768,
    min_frequency: Annotated[int, typer.Option(help="Minimum count of a pair to be merged.")] = 2,
    text_key: Annotated[str, typer.Option(help="Column (parquet) or key (jsonl) of the text.")] = "text",
    separator: Annotated[
        str | None,
        typer.Option(
            parser=parse_escapes, metavar="TEXT", help="Separator between documents in text files; \\n is a newline."
        ),
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer and save it in Hugging Face format, which `transformers` loads too."""
    from whimbrel.data.sources import documents
    from whimbrel.tokenization import train_tokenizer

    tokenizer = train_tokenizer(documents(source, text_key, separator), vocab_size, min_frequency=min_frequency)
    tokenizer.save(out_dir)
    print(f"wrote {out_dir / 'tokenizer.json'}: {tokenizer.vocab_size:,} ids")


@app.command()
def show(
    tokenizer: Annotated[str, typer.Argument(help="gpt2, a tokenizer.json, or a directory with one.")] = "gpt2",
    text: Annotated[str | None, typer.Option(help="Show the tokens of this text.")] = None,
) -> None:
    """Show a tokenizer's vocabulary size and special tokens, and how it splits a text."""
    from whimbrel.tokenization import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    print(f"vocabulary: {loaded.vocab_size:,} ids, stored as {loaded.dtype}")
    print(f"end-of-text: {loaded.eot_token} ({loaded.eot_id})")
    print(f"encoder: {loaded.backend}")
    print(f"fingerprint: {loaded.fingerprint}")
    if text is not None:
        for index in loaded.encode(text):
            print(f"{index:>8} {loaded.decode([index])!r}")
