"""Seeds and states of random number generators. Data ranks draw different numbers, for dropout for example."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from whimbrel.checkpoint import RNGState
from whimbrel.data.loader import derive_seed
from whimbrel.distributed import World
from whimbrel.train.callback import TrainerState

__all__ = ["RankRNGState", "rank_seed", "seed_everything", "seed_host", "seeded"]

logger = logging.getLogger(__name__)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python, NumPy and torch, but not the GPUs."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch (CPU) inside the block, and restore them afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_host(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def rank_seed(seed: int, world: World, step: int = 0) -> int:
    """The seed of a data rank, shared by the ranks that compute its model together (tensor and pipeline parallel)."""
    return seed if world.dp_rank == 0 and step == 0 else derive_seed(seed, "rank", world.dp_rank, "step", step)


class RankRNGState(RNGState):
    """The generators of this rank, as a checkpoint component; for another layout of ranks they are reseeded."""

    def __init__(self, seed: int, world: World, progress: TrainerState) -> None:
        self._seed, self._world, self._progress = seed, world, progress
        self._layout = [world.layout.pp, world.layout.dp, world.layout.tp]

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators, and the layout of several ranks."""
        state = super().state_dict()
        return state if self._world.size == 1 else state | {"layout": self._layout}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all generators; reseed them if the layout differs."""
        if state.get("layout", [1, 1, 1]) != self._layout:
            self.load_resharded(self._world.size, self._progress.global_step)
        else:
            super().load_state_dict(state)

    def load_resharded(self, saved_ranks: int, step: int) -> None:
        """Seed the generators from the seed, the step and the data rank."""
        seed_everything(rank_seed(self._seed, self._world, step))
        if self._world.is_main:
            logger.info(
                "the checkpoint was saved by %d ranks, this run has %d (%s): reseeding RNGs from seed, step and "
                "rank", saved_ranks, self._world.size, self._world.layout,
            )  # fmt: skip
