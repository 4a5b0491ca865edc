"""Log messages on the command line."""

from __future__ import annotations

import contextlib
import logging

import typer

__all__ = ["show_log"]


class _StandardError(logging.Handler):
    """Writes each message as a line of its own to standard error, whatever that is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that has gone: there is nowhere to say so
            typer.echo(self.format(record), err=True)


def show_log() -> None:
    """Show what Whimbrel logs, from level INFO on, unless the caller has set up logging already."""
    logger = logging.getLogger("whimbrel")
    if not logger.handlers:
        logger.addHandler(_StandardError())
        logger.setLevel(logging.INFO)
