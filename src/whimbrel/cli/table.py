"""Tables on the screen, and in a file or a pipe: there they are as wide as they are, and never cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["show_table"]

WIDE = 1000


def show_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under heads; without heads they are just aligned."""
    table = Table(box=None, pad_edge=False, show_header=any(heads))
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row)
    screen = Console(highlight=False, markup=False, emoji=False)
    (screen if screen.is_terminal else Console(width=WIDE, highlight=False, markup=False, emoji=False)).print(table)
