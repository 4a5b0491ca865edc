"""How the keys and values of a cache are stored: unchanged, or as 8-bit or 4-bit codes.

With 8 bits, 64 neighboring values of one head of one token share a bf16 scale. With 4 bits that is not enough for keys:
a few channels are many times larger than the rest and would use up the range of their group. There a group is 8 values,
each with a minimum and a scale (`AffineCodec`).

Heads and tokens are encoded independently: a token is encoded once, its codes never change, and a later outlier cannot
clip it.
"""

from __future__ import annotations

import torch

from whimbrel.base.errors import ConfigError
from whimbrel.ops.lowbit import AffineCodec, CodeType, GroupCodec, SymmetricCodec

__all__ = ["KV_CODECS", "find_codec"]

KV_CODECS: dict[str, GroupCodec | None] = {
    "none": None,
    "fp8": SymmetricCodec(CodeType("fp8", -448, 448, torch.uint8), 64, torch.bfloat16),
    "int8": SymmetricCodec(CodeType("int8", -127, 127, torch.int8), 64, torch.bfloat16),
    "int4": AffineCodec(CodeType("int4", 0, 15, torch.uint8, packed=True), 8, torch.uint8),
}


def find_codec(name: str) -> GroupCodec | None:
    """The codec of this name; None for "none"."""
    if name not in KV_CODECS:
        raise ConfigError(f"codec: expected one of {', '.join(KV_CODECS)}, got {name!r}")
    return KV_CODECS[name]
