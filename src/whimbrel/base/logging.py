"""One logger tree, `whimbrel.*`. Rooms log; only the command line decides what is shown."""

from __future__ import annotations

import logging

__all__ = ["get_logger"]


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name)
