"""Whether what should be the same on every rank is the same."""

from __future__ import annotations

import hashlib
import json

from whimbrel.base.errors import ParallelError
from whimbrel.checkpoint.component import StateComponent
from whimbrel.checkpoint.ranks import Ranks
from whimbrel.checkpoint.snapshot import Snapshot
from whimbrel.checkpoint.tensors import bytes_of

__all__ = ["check_replication"]


def check_replication(component: StateComponent, snapshot: Snapshot, ranks: Ranks) -> None:
    """Refuse to save a component that differs between ranks, as closely as it asks to be looked at."""
    if component.validation_level == "none":
        return
    found = ranks.gather(_fingerprint(snapshot, component.validation_level))
    for rank, other in enumerate(found):
        odd = sorted(name for name in found[0].keys() | other.keys() if found[0].get(name) != other.get(name))
        if odd:
            raise ParallelError(
                f"component '{component.key}' should be the same on every rank, and '{odd[0]}' of rank {rank} is not "
                "that of rank 0: the ranks have drifted apart; go on from the last checkpoint"
            )


def _fingerprint(snapshot: Snapshot, level: str) -> dict[str, str]:
    """A few words on every tensor, and on all the rest."""
    found = {}
    for name, tensor in snapshot.tensors.items():
        found[name] = f"{tensor.dtype} {list(tensor.shape)}"
        if level in ("tensor", "full"):
            found[name] += f" {hashlib.sha256(bytes_of(tensor)).hexdigest()}"
    if level == "full":
        found["values"] = hashlib.sha256(json.dumps(snapshot.tree).encode()).hexdigest()
    return found
