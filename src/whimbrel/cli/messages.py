"""Log messages on the command line."""

from __future__ import annotations

import contextlib
import logging

import typer

__all__ = ["show_log"]


class _StandardError(logging.Handler):
    """Writes each message as one line to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone, so the failure cannot be reported
            typer.echo(self.format(record), err=True)


def show_log() -> None:
    """Show Whimbrel's log messages of level INFO and above, unless logging is already configured."""
    logger = logging.getLogger("whimbrel")
    if not logger.handlers:
        logger.addHandler(_StandardError())
        logger.setLevel(logging.INFO)
