"""`whimbrel VERB`: the verbs, and what becomes of an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from whimbrel import __version__
from whimbrel.base.errors import WhimbrelError
from whimbrel.cli import (
    chat,
    compare,
    control,
    doctor,
    export,
    finalize,
    generate,
    memory,
    plot,
    prepare,
    runs,
    serve,
    tokenizer,
    train,
    verify,
)
from whimbrel.cli import eval as evaluation
from whimbrel.cli.terminal import escape_controls

__all__ = ["app", "main"]

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"whimbrel {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Say it and stop.")
    ] = False,
) -> None:
    """From raw text to a trained language model, on the hardware you have."""
    del version  # its callback has done all


app.command()(prepare.prepare)
app.add_typer(tokenizer.app, name="tokenizer")
app.command()(verify.verify)
app.command(context_settings=OVERRIDES)(train.train)
app.command(context_settings=OVERRIDES)(memory.memory)
app.command()(runs.runs)
app.command()(control.control)
app.command()(plot.plot)
app.command()(compare.compare)
app.command("eval")(evaluation.evaluate)
app.command()(finalize.finalize)
app.command()(export.export)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(doctor.doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a fault is one line on standard error and exit code 2 (`--trace` shows where it arose)."""
    _wait_passively()
    given = list(sys.argv[1:] if arguments is None else arguments)
    trace = "--trace" in given
    given = [word for word in given if word != "--trace"]
    if unreadable := next((word for word in given if not _is_utf8(word)), None):
        typer.echo(f"whimbrel: expected UTF-8 arguments, got {unreadable!a}", err=True)
        sys.exit(2)
    try:
        code = app(given, prog_name="whimbrel", standalone_mode=False)
    except (WhimbrelError, OSError, typer.TyperException) as error:
        if trace:
            raise
        sys.exit(_complain(error))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        if trace:
            raise
        words = escape_controls(" ".join(str(error).split()))
        typer.echo(f"whimbrel: unexpected {type(error).__name__}: {words} (--trace shows where)", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _wait_passively() -> None:
    """Let OpenMP threads sleep at barriers instead of spinning, unless the user chose otherwise.

    If another process occupies a core, spinning threads take CPU time from the very thread they wait for, and training
    slows down several times over. libgomp reads the setting when torch loads it, so it must be set before that.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _is_utf8(word: str) -> bool:
    """False for bytes that the shell passed and Python could not decode; they arrive as lone surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _complain(error: Exception) -> int:
    """Print the one line and give the exit code."""
    text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help page
        typer.echo(text)
        return 2
    verb = getattr(getattr(error, "ctx", None), "command_path", "whimbrel")
    typer.echo(f"{verb}: {escape_controls(' '.join(text.split()))}", err=True)
    return 2
