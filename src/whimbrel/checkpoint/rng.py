"""`RNGState`: the state of the random number generators of a process."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from whimbrel.base.errors import CheckpointError

__all__ = ["RNGState"]

logger = logging.getLogger(__name__)

GENERATOR = "MT19937"


class RNGState:
    """The global RNGs of Python, NumPy and torch (CPU and all CUDA devices in use), as a checkpoint component."""

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators, as tensors and numbers."""
        return {
            "python": _python_state(),
            "numpy": _numpy_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all generators. Warns if the number of CUDA devices differs."""
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        key = numpy["key"].numpy().astype(np.uint32)
        np.random.set_state((GENERATOR, key, numpy["pos"], numpy["has_gauss"], numpy["gauss"]))
        torch.set_rng_state(state["torch"])
        devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        if devices != len(state["cuda"]):
            logger.warning(
                "the checkpoint has the RNG state of %d CUDA devices, but %d are in use: random numbers on the others "
                "will differ",
                len(state["cuda"]),
                devices,
            )
        for device, saved in enumerate(state["cuda"][:devices]):
            torch.cuda.set_rng_state(saved, device)


def _python_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {"version": version, "words": torch.tensor(words), "gauss": gauss}


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != GENERATOR:
        raise CheckpointError(f"expected NumPy's global generator to be {GENERATOR}, got {state['bit_generator']}")
    inner = state["state"]
    return {
        "key": torch.from_numpy(inner["key"].astype(np.int64)),
        "pos": int(inner["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }
