"""How words of the command line are read where the shell leaves them raw."""

from __future__ import annotations

import re

__all__ = ["unescaped"]


ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


def unescaped(text: str) -> str:
    """`text` with `\\n`, `\\r`, `\\t` and `\\\\` as those characters: few shells let one type a newline."""
    return re.sub(r"\\([nrt\\])", lambda found: ESCAPES[found.group(1)], text)
