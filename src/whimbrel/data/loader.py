"""`TokenDataLoader`: batches out of shards, in an order that knows nothing of batch size, ranks or accumulation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.logging import get_logger
from whimbrel.data.documents import document_ids
from whimbrel.data.rows import JoinedRows, PackedRows, Rows
from whimbrel.data.staging import Batch, DirectStage, PrefetchStage
from whimbrel.data.stream import TokenStream, open_stream

__all__ = ["TokenDataLoader"]

SEARCHED = 1 << 24
"""Number of tokens at the start that should contain a document boundary."""


class TokenDataLoader:
    """Reads the shards of one split as a cyclic stream of tokens.

    A global batch is the next `world_size * B` rows of `T` tokens; rank r takes rows r*B to (r+1)*B. The cursor counts
    tokens of the global stream, so it survives a change of batch size and of ranks.

    `seed` shuffles each epoch in blocks of `block` tokens (default T), every block once; None reads in order.
    `documents`: "join" lets text run on; "mask" is the same rows with `documents_of` telling attention where documents
    part; "pack" starts rows at documents and cuts none that fits, the rest of a row being ignored by the loss.

    `eot_id` is the token that starts a document: by default the manifest's, or GPT-2's (uint16) and Llama 3's (uint32)
    in a folder without one. `verify` compares each shard with the manifest's sha256 when it is first read.
    """

    def __init__(
        self,
        data_root: str | os.PathLike[str],
        B: int,
        T: int,
        *,
        split: str = "train",
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        seed: int | None = None,
        block: int | None = None,
        documents: Literal["join", "mask", "pack"] = "join",
        eot_id: int | None = None,
        vocab_size: int | None = None,
        verify: bool = False,
    ) -> None:
        for name, value in (("B", B), ("T", T), ("block", 1 if block is None else block)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} must be in 0..{world_size - 1} for world_size={world_size}")
        if documents not in ("join", "mask", "pack"):
            raise ConfigError(f"documents='{documents}' is not one of join, mask, pack")
        if documents == "pack" and block is not None:
            raise ConfigError(f"block={block} does not go with documents='pack', which shuffles rows: leave block out")
        self.B, self.T, self.rank, self.world_size, self.documents = B, T, rank, world_size, documents
        stream, self.eot_id = open_stream(data_root, split, vocab_size, eot_id, verify=verify)
        self.root, self.stream, self.total_tokens = Path(data_root), stream, len(stream)
        if documents == "mask":
            _warn_without_documents(stream, self.eot_id)
        self.position = 0
        self._rows: Rows = (
            PackedRows(stream, T, self.eot_id, seed) if documents == "pack" else JoinedRows(stream, T, block or T, seed)
        )
        self._identity = {
            "split": split,
            "stream_tokens": self.total_tokens,
            "seed": seed,
            "block": None if seed is None or documents == "pack" else block or T,
            "packed_rows": T if documents == "pack" else None,
        }
        device = torch.device(device)
        stage = PrefetchStage if device.type == "cuda" else DirectStage
        self._stage = stage(self._fill, (B, T), stream.dtype, device)

    @property
    def epoch(self) -> int:
        """How many times the whole stream has been read."""
        return self.position // self.total_tokens

    def next_batch(self) -> Batch:
        """The next (x, y) of this rank: int64, shape (B, T), y being the token after each x."""
        following = self._rows.after(self.position, self.world_size * self.B)
        batch = self._stage.take(self.position, following)
        before, self.position = self.epoch, following
        if self.epoch > before and self._identity["split"] == "train":  # held-out tokens are meant to be read again
            get_logger(__name__).warning(
                "starting epoch %d over the %d training tokens", self.epoch + 1, self.total_tokens
            )
        return batch

    def documents_of(self, x_BT: Tensor) -> Tensor | None:
        """The document number of each token where documents must not see each other; None where they may ("join")."""
        return None if self.documents == "join" else document_ids(x_BT, self.eot_id)

    def reset(self) -> None:
        """Begin again at the first token."""
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """The cursor, in tokens of the global stream, and what it counts in."""
        return {"position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the cursor of `state`, which must come from the same stream in the same order."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise DataError(
                    f"the saved cursor has {name}={state.get(name)}, this loader {value}: give the same data and order"
                )
        self.position = int(state["position"])

    def _fill(self, position: int, buffer_2BT: NDArray[Any]) -> NDArray[np.int64] | None:
        return self._rows.fill(self._rows.after(position, self.rank * self.B), buffer_2BT[0], buffer_2BT[1])


def _warn_without_documents(stream: TokenStream, eot_id: int) -> None:
    """Warn if the first tokens contain no end-of-text token: document masking would then do nothing."""
    first = stream.shard(0)[:SEARCHED]
    if not (first == eot_id).any():
        get_logger(__name__).warning(
            "%s has no end-of-text token (%d) in its first %d tokens: attention is not masked there; set "
            "data.eot_id if another token separates documents", stream.paths[0], eot_id, len(first),
        )  # fmt: skip
