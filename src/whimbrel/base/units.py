"""Numbers for people."""

from __future__ import annotations

__all__ = ["readable_bytes"]


def readable_bytes(size: int) -> str:
    """In the unit that fits: KiB, MiB or GiB."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
