"""How a long job tells how far it is without knowing who looks."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """A progress display. `total` is None where the end is not known."""

    def start(self, total: int | None, unit: str) -> None:
        """Begin a job of `total` units."""

    def advance(self, count: int) -> None:
        """Say that `count` more units are done."""

    def finish(self) -> None:
        """End the job."""


class Silent:
    """A `Progress` that shows nothing."""

    def start(self, total: int | None, unit: str) -> None:
        """Show nothing."""

    def advance(self, count: int) -> None:
        """Show nothing."""

    def finish(self) -> None:
        """Show nothing."""
