"""Progress reporting for long jobs, independent of how it is displayed."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NoProgress", "Progress"]


class Progress(Protocol):
    """A progress display."""

    def start(self, total: int | None, unit: str, done: int = 0) -> None:
        """Start a job of `total` units (None: unknown), of which earlier runs completed `done`."""

    def expect(self, total: int) -> None:
        """Update the estimated total, if `start` got None."""

    def advance(self, count: int) -> None:
        """Report `count` more completed units."""

    def finish(self) -> None:
        """Report that the job is complete."""

    def close(self) -> None:
        """Remove the display, whether or not the job is complete."""


class NoProgress:
    """A `Progress` that displays nothing."""

    def start(self, total: int | None, unit: str, done: int = 0) -> None:
        """Do nothing."""

    def expect(self, total: int) -> None:
        """Do nothing."""

    def advance(self, count: int) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
