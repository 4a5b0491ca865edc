"""Shared by tests of inference."""

from __future__ import annotations

import pytest

from whimbrel.models import GPT


@pytest.fixture
def forward_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each forward pass of a `GPT`, all of which then run in PyTorch."""
    monkeypatch.setattr("whimbrel.inference.model_runner.create_decoder", lambda *_: None)
    sizes: list[int] = []
    hidden_states = GPT.hidden_states
    monkeypatch.setattr(
        GPT, "hidden_states", lambda self, ids, **kw: sizes.append(ids.size(1)) or hidden_states(self, ids, **kw)
    )
    return sizes
