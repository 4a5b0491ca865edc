"""Text between the command line and a terminal: escapes that a user types, and those that a model writes."""

from __future__ import annotations

import re
import sys

__all__ = ["escaped", "show", "unescaped"]

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All control characters but tab and newline, and those that reorder a line."""


def escaped(text: str) -> str:
    """`text` with control characters spelled out, as `\\x1b`: a terminal would obey them."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def show(text: str, end: str = "") -> None:
    """Print what a model wrote: as it is into a file or a pipe, with control characters escaped on a terminal."""
    print(escaped(text) if sys.stdout.isatty() else text, end=end, flush=True)


def unescaped(text: str) -> str:
    """`text` with `\\n`, `\\r`, `\\t` and `\\\\` as those characters: few shells let one type a newline."""
    return re.sub(r"\\([nrt\\])", lambda found: ESCAPES[found.group(1)], text)
