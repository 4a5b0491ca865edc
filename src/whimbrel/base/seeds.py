"""Seeds derived by name, so that no two uses of one seed share a stream by accident."""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed"]


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends on `seed` and on every name, the same on every machine."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
