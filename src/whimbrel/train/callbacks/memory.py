"""The most memory that a run has held."""

from __future__ import annotations

from typing import Any

from whimbrel.train.callback import TrainerCallback
from whimbrel.train.device import peak_memory

__all__ = ["MemoryCallback"]


class MemoryCallback(TrainerCallback):
    """Adds `peak_memory`, in bytes, to what is logged: allocated on a GPU, resident elsewhere."""

    def on_log_step(self, **event: Any) -> None:
        """Add it."""
        event["logs"]["peak_memory"] = peak_memory(event["trainer"].device)
