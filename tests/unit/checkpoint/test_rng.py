"""RNG state is saved and restored exactly."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from whimbrel.checkpoint import CheckpointManager, RNGState, SharingPattern, StateComponent


def sample() -> list:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        *torch.rand(3).tolist(),
        *torch.randn(1).tolist(),
        *torch.randperm(5).tolist(),
    ]


@pytest.fixture
def components() -> list[StateComponent]:
    return [StateComponent("rng", RNGState(), SharingPattern.PER_RANK)]


@pytest.mark.parametrize("used_before", range(3))
def test_resume_restores_the_rng_state(tmp_path: Path, components, used_before: int) -> None:
    for _ in range(used_before):  # gauss() generates pairs and caches the second value
        sample()
    manager = CheckpointManager(tmp_path)
    manager.save(1, components)
    expected = [sample() for _ in range(3)]
    manager.load(components)
    assert [sample() for _ in range(3)] == expected


def test_different_number_of_cuda_devices_logs_a_warning(caplog) -> None:
    state = RNGState().state_dict()
    extra = torch.zeros(16, dtype=torch.uint8)
    RNGState().load_state_dict(state | {"cuda": [*state["cuda"], extra]})
    assert "RNG state" in caplog.text


@pytest.mark.gpu
def test_resume_restores_the_rng_state_of_cuda_devices(tmp_path: Path, components) -> None:
    devices = range(torch.cuda.device_count())
    torch.cuda.init()
    for device in devices:
        torch.rand(3, device=f"cuda:{device}")
    manager = CheckpointManager(tmp_path)
    manager.save(1, components)
    expected = [torch.rand(5, device=f"cuda:{device}").tolist() for device in devices]
    manager.load(components)
    assert [torch.rand(5, device=f"cuda:{device}").tolist() for device in devices] == expected
