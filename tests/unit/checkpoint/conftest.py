"""Small stateful components for tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whimbrel.checkpoint import SharingPattern, StateComponent
from whimbrel.checkpoint import manager as manager_module


class Values:
    """A stateful object with any state; records what it loads."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loaded: list[Any] = []

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)
        self.state = state


class DirectoryValues(Values):
    """A stateful object with its own file format."""

    def save_directory(self, state: Any, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"rows": len(state["w"])}))
        (folder / "weights.bin").write_bytes(state["w"].numpy().tobytes())

    def load_directory(self, folder: Path) -> None:
        content = bytearray((folder / "weights.bin").read_bytes())
        self.load_state_dict({"w": torch.frombuffer(content, dtype=torch.float32)})


Parts = Callable[..., list[StateComponent]]


@pytest.fixture
def parts() -> Parts:
    """A model in a directory, an optional optimizer and a required trainer state, all with `value`."""

    def make(value: float) -> list[StateComponent]:
        return [
            StateComponent("model", DirectoryValues({"w": torch.full((64,), value)}), SharingPattern.GLOBAL),
            StateComponent("optimizer", Values({"m": torch.full((32,), value)}), SharingPattern.GLOBAL, required=False),
            StateComponent("trainer", Values({"value": value}), SharingPattern.GLOBAL),
        ]

    return make


@pytest.fixture
def no_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry failed saves without a delay."""
    monkeypatch.setattr(manager_module, "RETRY_DELAYS", (0.0, 0.0))
