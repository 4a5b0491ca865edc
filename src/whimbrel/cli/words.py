"""Escape sequences: parsed in what the user types, escaped in what a model writes to a terminal."""

from __future__ import annotations

import re
import sys

__all__ = ["escaped", "show", "unescaped"]

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All control characters except tab and newline, and bidirectional formatting characters."""


def escaped(text: str) -> str:
    """`text` with control characters escaped (`\\x1b`), so that a terminal does not interpret them."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def show(text: str, end: str = "") -> None:
    """Print generated text: unchanged to a file or pipe, with control characters escaped on a terminal."""
    print(escaped(text) if sys.stdout.isatty() else text, end=end, flush=True)


def unescaped(text: str) -> str:
    """`text` with `\\n`, `\\r`, `\\t` and `\\\\` as those characters: few shells let one type a newline."""
    return re.sub(r"\\([nrt\\])", lambda found: ESCAPES[found.group(1)], text)
