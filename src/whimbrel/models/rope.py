"""Rotary positions: queries and keys are turned by an angle that grows with their position.

The two halves of a head form the rotated pairs (dimension i with i + head_size / 2), as Hugging Face stores weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whimbrel.models.config import GPTConfig, RopeScaling

__all__ = ["rope_frequencies", "rope_table", "rotate"]


def rope_table(config: GPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, in fp32: (T, head_size), or (batch, 1, T, head_size) for positions of each row.

    Computed where they are needed rather than kept in buffers: nothing to cast by mistake, to materialise after a meta
    device or to save, for a few tiny kernels per forward.
    """
    angles = positions.float()[..., None] * rope_frequencies(config, positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    if positions.dim() == 2:
        angles = angles[:, None]
    return angles.cos(), angles.sin()


def rope_frequencies(config: GPTConfig, device: torch.device) -> Tensor:
    """By how much each pair of a head turns from one position to the next, in fp32."""
    exponents = torch.arange(0, config.head_width, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / (config.rope_theta ** (exponents / config.head_width))
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair of `x` by its angle; computed in fp32, returned in the dtype of `x`."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return (x_BHTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD).type_as(x_BHTD)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    fast = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    fast = fast.clamp(0, 1)
    return (1 - fast) * frequencies / scaling.factor + fast * frequencies
