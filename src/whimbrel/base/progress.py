"""How a long job tells how far it is without knowing who looks."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """A progress display. `total` is None where the end is not known."""

    def start(self, total: int | None, unit: str, done: int = 0) -> None:
        """Begin a job of `total` units, of which earlier runs did `done`."""

    def expect(self, total: int) -> None:
        """Say about how many units it will be, where `total` was not known."""

    def advance(self, count: int) -> None:
        """Say that `count` more units are done."""

    def finish(self) -> None:
        """Say that the job is done."""

    def close(self) -> None:
        """Take the display down, whether or not the job is done."""


class Silent:
    """A `Progress` that shows nothing."""

    def start(self, total: int | None, unit: str, done: int = 0) -> None:
        """Show nothing."""

    def expect(self, total: int) -> None:
        """Show nothing."""

    def advance(self, count: int) -> None:
        """Show nothing."""

    def finish(self) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""
