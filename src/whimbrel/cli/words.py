"""How words of the command line are read where the shell leaves them raw."""

from __future__ import annotations

__all__ = ["unescaped"]


def unescaped(text: str) -> str:
    """`\\n` and `\\t` as the characters they stand for: few shells let one type a line end."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
