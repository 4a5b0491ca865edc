"""`whimbrel tokenizer train|show`: learn a tokenizer from text, or look at one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whimbrel.cli.terminal import parse_escapes

__all__ = ["app"]

app = typer.Typer(help="Learn a tokenizer from text, or look at one.", no_args_is_help=True)


@app.command()
def train(
    source: Annotated[list[str], typer.Argument(help="Files, folders, globs, or owner/dataset[:config].")],
    out_dir: Annotated[Path, typer.Option(help="Folder that tokenizer.json and tokenizer_config.json go to.")],
    vocab_size: Annotated[int, typer.Option(help="Number of ids, the 256 bytes and end-of-text included.")] = 32_768,
    min_frequency: Annotated[int, typer.Option(help="Merge no pair that occurs less often.")] = 2,
    text_key: Annotated[str, typer.Option(help="Column (parquet) or key (jsonl) that holds a document.")] = "text",
    separator: Annotated[
        str | None,
        typer.Option(
            parser=parse_escapes, metavar="TEXT", help="What parts the documents of a text file; \\n is a line end."
        ),
    ] = None,
) -> None:
    """Learn a byte-level BPE from text and save it in the Hugging Face form, which `transformers` opens too."""
    from whimbrel.data.sources import documents
    from whimbrel.tokenization import train_tokenizer

    tokenizer = train_tokenizer(documents(source, text_key, separator), vocab_size, min_frequency=min_frequency)
    tokenizer.save(out_dir)
    print(f"wrote {out_dir / 'tokenizer.json'}: {tokenizer.vocab_size:,} ids")


@app.command()
def show(
    tokenizer: Annotated[str, typer.Argument(help="gpt2, a tokenizer.json, or a folder that holds one.")] = "gpt2",
    text: Annotated[str | None, typer.Option(help="Show how this text is cut.")] = None,
) -> None:
    """Say what a tokenizer is, and how it cuts a text."""
    from whimbrel.tokenization import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    print(f"vocabulary: {loaded.vocab_size:,} ids, stored as {loaded.dtype}")
    print(f"end-of-text: {loaded.eot_token} ({loaded.eot_id})")
    print(f"encoder: {loaded.backend}")
    print(f"fingerprint: {loaded.fingerprint}")
    if text is not None:
        for index in loaded.encode(text):
            print(f"{index:>8} {loaded.decode([index])!r}")
