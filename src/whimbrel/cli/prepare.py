"""`whimbrel prepare [SOURCE...]`: text to token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whimbrel.cli.terminal import parse_escapes
from whimbrel.data.manifest import SHARD_SIZE, SPLITS

__all__ = ["prepare"]


def prepare(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            help="Parquet, jsonl or text files (also .gz, .zst), folders, globs, or hub datasets as "
            "owner/dataset[:config]; FineWeb sample-10BT if none is named.",
        ),
    ] = None,
    out_dir: Annotated[Path | None, typer.Option(help="Folder of the shards. (default: data/NAME and budget)")] = None,
    shard_size: Annotated[int, typer.Option(help="Tokens in a full shard.")] = SHARD_SIZE,
    total_tokens: Annotated[int | None, typer.Option(help="Training tokens to write. (default: all)")] = None,
    val: Annotated[list[str] | None, typer.Option(help="Source of the validation split; may be repeated.")] = None,
    val_tokens: Annotated[int, typer.Option(help="Tokens to hold out of SOURCE, whole documents by hash.")] = 0,
    tokenizer: Annotated[str, typer.Option(help="gpt2, a tokenizer.json, or a folder that holds one.")] = "gpt2",
    text_key: Annotated[str, typer.Option(help="Column (parquet) or key (jsonl) that holds a document.")] = "text",
    separator: Annotated[
        str | None,
        typer.Option(
            parser=parse_escapes, metavar="TEXT", help="What parts the documents of a text file; \\n is a line end."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="First part of the shards' names. (default: from SOURCE)")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads that tokenise. (default: all cores)")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Tokenise on a ray cluster instead (extra `ray`).")] = False,
) -> None:
    """Tokenise text into shards that `whimbrel train` reads.

    Each document is opened by the end-of-text token. The shards are the same bytes for any number of workers; an
    interrupted run goes on at its last whole shard when the same command is given again.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.cli.terminal import ProgressBar
    from whimbrel.data.cluster import encode_on_ray
    from whimbrel.data.pipeline import available_cores, encode_on_threads
    from whimbrel.data.prepare import default_directory
    from whimbrel.data.prepare import prepare as write_shards
    from whimbrel.data.sources import FINEWEB, source_name
    from whimbrel.tokenization import load_tokenizer

    if ray and workers is not None:
        raise ConfigError(f"workers={workers} counts threads of this machine: leave it out with --ray")
    sources = source or [FINEWEB]
    name = name or source_name(sources[0])
    directory = out_dir or default_directory(name, sources, total_tokens)
    print(f"Output directory: {directory}")
    print(f"Total tokens: {'ENTIRE DATASET' if total_tokens is None else f'{total_tokens:,}'}")
    print(f"Tokens per shard: {shard_size:,}", flush=True)
    manifest = write_shards(
        sources,
        directory,
        load_tokenizer(tokenizer),
        name=name,
        shard_size=shard_size,
        total_tokens=total_tokens,
        val=val or (),
        val_tokens=val_tokens,
        text_key=text_key,
        separator=separator,
        engine=encode_on_ray if ray else encode_on_threads(workers or available_cores()),
        progress=ProgressBar(),
    )
    for split in SPLITS:
        if shards := manifest.of_split(split):
            print(f"{split}: {manifest.tokens(split):,} tokens in {len(shards)} shards")
