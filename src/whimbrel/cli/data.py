"""`whimbrel prepare`, `tokenizer` and `verify`: tokenize text, train tokenizers, check shards and checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whimbrel.cli.terminal import ProgressBar, parse_escapes

if TYPE_CHECKING:
    from whimbrel.tokenization import Tokenizer

__all__ = ["load_named_tokenizer", "prepare", "tokenizer_app", "verify"]

SHARD_SIZE = 100_000_000  # copy of whimbrel.data.manifest.SHARD_SIZE: importing it would slow down --help

Separator = Annotated[
    str | None,
    typer.Option(
        parser=parse_escapes, metavar="TEXT", help="Separator between documents in text files; \\n is a newline."
    ),
]
TextKey = Annotated[str, typer.Option(help="Column (parquet) or key (jsonl) that contains the text.")]
Encoding = Annotated[str, typer.Option(help="Encoding of text and jsonl files, such as latin-1 or utf-16.")]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help="Skip and count documents that cannot be read (invalid UTF-8 or JSON, no text)."),
]

tokenizer_app = typer.Typer(help="Train a tokenizer, or inspect one.", no_args_is_help=True)


class _PrepareProgress(ProgressBar):
    """Prints what will be done when it starts, after all arguments have been checked."""

    def __init__(self, directory: Path, total_tokens: int | None, shard_size: int) -> None:
        super().__init__()
        tokens = "all" if total_tokens is None else f"{total_tokens:,}"
        self._header = f"Output directory: {directory}\nTokens: {tokens}\nTokens per shard: {shard_size:,}"

    def print_header(self) -> None:
        """Print the header once."""
        if self._header:
            print(self._header, flush=True)
            self._header = ""

    def start(self, total: int | None, unit: str, done: int = 0) -> None:
        self.print_header()
        super().start(total, unit, done)


def prepare(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text or jsonl files (also as .gz or .zst), parquet files, directories, globs, owner/dataset[:config] "
            "on the Hub, or shakespeare. With --total-tokens, it defaults to FineWeb sample-10BT.",
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(help="Output directory. (default: data/NAME plus the token count, as in data/fineweb20M)"),
    ] = None,
    shard_size: Annotated[int, typer.Option(help="Number of tokens per shard.")] = SHARD_SIZE,
    total_tokens: Annotated[int | None, typer.Option(help="Number of training tokens to write. (default: all)")] = None,
    val: Annotated[list[str] | None, typer.Option(help="Source of the validation split; can be repeated.")] = None,
    val_tokens: Annotated[
        int,
        typer.Option(
            help="Number of tokens of SOURCE to hold out for validation, as whole documents or parts of long ones."
        ),
    ] = 0,
    tokenizer: Annotated[
        str, typer.Option(help="gpt2, a tokenizer.json, a directory with one, or owner/name on the Hub.")
    ] = "gpt2",
    text_key: TextKey = "text",
    separator: Separator = None,
    encoding: Encoding = "utf-8",
    skip_bad: SkipBad = False,
    name: Annotated[str | None, typer.Option(help="Prefix of shard file names. (default: from SOURCE)")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of tokenizer threads. (default: all cores)")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Tokenize on a Ray cluster instead (`ray` extra).")] = False,
) -> None:
    """Tokenize text into shards for `whimbrel train`.

    Each document starts with the end-of-text token. The shards are byte-identical for any number of workers. If the
    command is interrupted, rerun it to resume after the last complete shard.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.data.manifest import SPLITS
    from whimbrel.data.prepare import available_cores, default_directory, encode_on_ray, encode_on_threads
    from whimbrel.data.prepare import prepare as write_shards
    from whimbrel.data.sources import FINEWEB, source_name

    if ray and workers is not None:
        raise ConfigError(f"--workers {workers} applies to threads on this machine: omit it with --ray")
    if not source and total_tokens is None:
        raise ConfigError(
            "expected a SOURCE, such as a directory of text files (whimbrel prepare my-texts); for FineWeb, pass "
            f"--total-tokens N, or {FINEWEB} for all of it (10 billion tokens)"
        )
    sources = source or [FINEWEB]
    name = source_name(sources[0]) if name is None else name
    directory = out_dir or default_directory(name, sources, total_tokens)
    progress = _PrepareProgress(directory, total_tokens, shard_size)
    manifest = write_shards(
        sources,
        directory,
        load_named_tokenizer(tokenizer),
        name=name,
        shard_size=shard_size,
        total_tokens=total_tokens,
        val=val or (),
        val_tokens=val_tokens,
        text_key=text_key,
        separator=separator,
        encoding=encoding,
        skip_bad=skip_bad,
        backend=encode_on_ray if ray else encode_on_threads(workers or available_cores()),
        progress=progress,
    )
    progress.print_header()  # unless the shards existed already
    for split in SPLITS:
        if shards := manifest.shards_of(split):
            count = "1 shard" if len(shards) == 1 else f"{len(shards)} shards"
            print(f"{split}: {manifest.tokens(split):,} tokens in {count}")


@tokenizer_app.command("train")
def train_tokenizer_command(
    source: Annotated[
        list[str], typer.Argument(help="Files, directories, globs, owner/dataset[:config], or shakespeare.")
    ],
    out_dir: Annotated[Path, typer.Option(help="Output directory for tokenizer.json and tokenizer_config.json.")],
    vocab_size: Annotated[
        int, typer.Option(help="Vocabulary size, including the 256 byte tokens and end-of-text.")
    ] = 32_768,
    min_frequency: Annotated[int, typer.Option(help="Minimum frequency for a pair to be merged.")] = 2,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bytes of text to use, taken from each source in proportion to its size. (default: all)"
        ),
    ] = None,
    text_key: TextKey = "text",
    separator: Separator = None,
    encoding: Encoding = "utf-8",
    skip_bad: SkipBad = False,
) -> None:
    """Train a byte-level BPE tokenizer and save it in Hugging Face format, which `transformers` loads too."""
    from whimbrel.base.errors import DataError
    from whimbrel.data.manifest import read_manifest
    from whimbrel.data.prepare import check_output_directory
    from whimbrel.data.sources import iter_documents, with_skip_hint
    from whimbrel.tokenization import train_tokenizer

    errors: list[DataError] = []

    def skip(error: DataError) -> None:
        if not skip_bad:
            raise with_skip_hint(error) from error
        errors.append(error)

    check_output_directory(out_dir)
    manifest = read_manifest(out_dir)
    documents = iter_documents(source, text_key, separator, encoding, skip, max_bytes)
    tokenizer = train_tokenizer(documents, vocab_size, min_frequency=min_frequency)
    if errors:
        count = f"{len(errors):,} document{'s' * (len(errors) != 1)}"
        print(f"skipped {count} that could not be read; the first: {errors[0]}", file=sys.stderr)
    if manifest is not None and manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(f"{out_dir} contains shards that need its current tokenizer.json: choose another --out-dir")
    tokenizer.save(out_dir)
    print(f"wrote {out_dir / 'tokenizer.json'}: {tokenizer.vocab_size:,} ids")


def load_named_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name or path, or of a model on the Hub, which is downloaded."""
    from whimbrel.tokenization import load_tokenizer

    if name == "gpt2" or Path(name).exists():
        return load_tokenizer(name)
    from whimbrel.model_io.hub import is_hub_id, resolve_path  # imports torch

    return load_tokenizer(resolve_path(name) if is_hub_id(name) else name)


@tokenizer_app.command("show")
def show_tokenizer(
    tokenizer: Annotated[
        str, typer.Argument(help="gpt2, a tokenizer.json, a directory with one, or owner/name on the Hub.")
    ] = "gpt2",
    text: Annotated[str | None, typer.Option(help="Show the tokens of this text.")] = None,
) -> None:
    """Show a tokenizer's vocabulary size and special tokens, and how it splits text."""
    loaded = load_named_tokenizer(tokenizer)
    print(f"vocabulary: {loaded.vocab_size:,} ids, stored as {loaded.dtype}")
    print(f"end-of-text: {loaded.eot_token} ({loaded.eot_id})")
    print(f"encoder: {loaded.backend}")
    print(f"fingerprint: {loaded.fingerprint}")
    if text is not None:
        for index in loaded.encode(text):
            print(f"{index:>8} {loaded.decode([index])!r}")


def verify(
    path: Annotated[Path, typer.Argument(help="Directory of token shards, a run, or a checkpoint.", metavar="PATH")],
) -> None:
    """Check the token shards in a directory, or the checkpoints of a run, against the checksums in their manifest.

    For shards, also checks the header, the size, the token ids and that tokenizer.json is the one they were prepared
    with.

    Prints one line per shard or checkpoint. Errors are printed to standard error, and the exit code is 2. A directory
    left behind by an interrupted checkpoint removal is not an error.
    """
    from whimbrel.base.errors import DataError

    if not path.is_dir():
        raise DataError(f"no such directory: {path}; expected a directory of token shards, a run or a checkpoint")
    manifest = path / "manifest.json"
    is_checkpoint = path.name.startswith("step-") or (
        manifest.is_file() and b'"components"' in manifest.read_bytes()  # not parsed: it may be damaged
    )
    if _verify_checkpoints(path) if is_checkpoint or _is_run(path) else _verify_shards(path):
        raise typer.Exit(2)


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() or any((path / name).is_file() for name in ("config.toml", "log.jsonl"))


def _verify_shards(path: Path) -> int:
    """Print a line per shard. Returns the number of errors."""
    from whimbrel.data.shards import verify_shards

    findings = []
    for finding in verify_shards(path):
        findings.append(finding)
        if finding.error is None:
            print(f"ok {finding.file}: {finding.tokens:,} tokens")
        else:
            print(f"error {finding.file}: {finding.error}", file=sys.stderr)
    errors = sum(finding.error is not None for finding in findings)
    print(f"{len(findings) - errors} ok, {errors} failed, {sum(finding.tokens for finding in findings):,} tokens")
    return errors


def _verify_checkpoints(path: Path) -> int:
    """Print a line per checkpoint. Returns the number of errors."""
    from whimbrel.base.errors import CheckpointError
    from whimbrel.checkpoint import list_checkpoints, missing_components, step_directories, verify_checkpoint

    checkpoints = list(step_directories(path).values()) if _is_run(path) else [path]
    if not checkpoints:
        print(f"{path} is a run with no checkpoints yet")
        return 0
    complete = list(list_checkpoints(path).values())
    # Removing a checkpoint deletes its manifest first. If no checkpoint has a manifest, this is not what happened.
    removed = [checkpoint for checkpoint in checkpoints if complete and checkpoint not in complete]
    errors = 0
    for checkpoint in checkpoints:
        if checkpoint in removed:
            print(f"partly removed {checkpoint.name}: no manifest, left by an interrupted removal; it can be deleted")
            continue
        try:
            manifest = verify_checkpoint(checkpoint)
        except CheckpointError as error:
            errors += 1
            print(f"error {checkpoint.name}: {error}", file=sys.stderr)
            continue
        size = sum(entry.size for entry in manifest.files.values())
        missing = "".join(f", without its {key}" for key in missing_components(checkpoint, manifest))
        print(f"ok {checkpoint.name}: step {manifest.step}, {size:,} bytes in {len(manifest.files)} files{missing}")
    print(f"{len(checkpoints) - len(removed) - errors} ok, {errors} failed")
    return errors
