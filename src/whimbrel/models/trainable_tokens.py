"""Frozen embedding and head in which only the rows of a few tokens are trained, like PEFT's trainable tokens.

LoRA uses them for the special tokens that a chat template adds. The trained rows are separate parameters that replace
rows of the weight in the forward pass, so gradients and optimizer state exist only for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.state import copy_full_, full_tensor

__all__ = ["TrainableTokensEmbedding", "TrainableTokensLinear", "head_rows", "head_weight"]


class _TrainableTokens(nn.Module):
    """Trained rows of `weight` for the token ids `tokens`."""

    weight: Tensor
    trainable_tokens: nn.Parameter
    """(tokens, width)."""
    token_indices: Tensor

    def _add_rows(self, tokens: Sequence[int], dtype: torch.dtype) -> None:
        rows, width = self.weight.shape
        if len(set(tokens)) != len(tokens) or not all(0 <= token < rows for token in tokens):
            raise ConfigError(f"trainable tokens: expected unique ids from 0 to {rows - 1}, got {list(tokens)}")
        device = self.weight.device
        self.tokens, self.enabled = tuple(tokens), True
        self.trainable_tokens = nn.Parameter(torch.empty(len(tokens), width, dtype=dtype, device=device))
        self.register_buffer("token_indices", torch.tensor(self.tokens, device=device), persistent=False)

    @torch.no_grad()
    def reset_rows(self) -> None:
        """Copy the rows from the weight. Collective if parameters are sharded."""
        self.token_indices = torch.tensor(self.tokens, device=self.weight.device)  # a meta model has no values
        rows = F.embedding(self.token_indices, full_tensor(self.weight.detach()))  # works for a quantized weight too
        copy_full_(self.trainable_tokens.detach(), rows)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """A dense copy of the weight that includes the trained rows."""
        return _replace_rows(self.weight, self.token_indices, self.trainable_tokens)


class TrainableTokensEmbedding(_TrainableTokens, nn.Embedding):
    """An embedding with frozen weight, and trained rows for some tokens; the weight keeps its name."""

    def __init__(self, embedding: nn.Embedding, tokens: Sequence[int], dtype: torch.dtype) -> None:
        nn.Embedding.__init__(self, embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight = embedding.weight
        self._add_rows(tokens, dtype)
        self.train(embedding.training)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeddings of token ids."""
        x = nn.Embedding.forward(self, input_ids)
        if not self.enabled:
            return x
        matches = input_ids[..., None] == self.token_indices.to(input_ids.device)
        rows = F.embedding(matches.int().argmax(-1), self.trainable_tokens.to(x.dtype))
        return torch.where(matches.any(-1, keepdim=True), rows, x)


class TrainableTokensLinear(_TrainableTokens, nn.Linear):
    """A head with frozen weight, and trained rows for some tokens, or those of the embedding that it is tied to."""

    def __init__(
        self,
        linear: nn.Linear,
        tokens: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        tied: TrainableTokensEmbedding | None = None,
    ) -> None:
        nn.Linear.__init__(self, linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self._tied = () if tied is None else (tied,)  # in a tuple: not a submodule, whose parameters would count twice
        if tied is None:
            self._add_rows(tokens, dtype)
        self.train(linear.training)

    @property
    def is_tied(self) -> bool:
        """Whether the rows belong to the embedding."""
        return bool(self._tied)

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """Token ids and their trained rows; None while they are disabled."""
        owner: _TrainableTokens = self._tied[0] if self._tied else self
        rows = owner.trainable_tokens
        return (owner.token_indices.to(rows.device), rows) if owner.enabled else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        logits, rows = F.linear(hidden, self.weight), self.rows()
        if rows is None:
            return logits
        indices, weight = rows
        replaced = F.linear(hidden, weight.to(hidden.dtype))
        return logits.index_copy_(-1, indices, replaced.to(logits.dtype))


def head_rows(head: nn.Linear) -> tuple[Tensor, Tensor] | None:
    """Ids and rows that replace rows of the head's weight, if it has trained tokens."""
    return head.rows() if isinstance(head, TrainableTokensLinear) else None


def head_weight(head: nn.Linear) -> Tensor:
    """The weight of the head; if rows are replaced, a copy through which their gradients flow."""
    rows = head_rows(head)
    return head.weight if rows is None else _replace_rows(head.weight, *rows)


def _replace_rows(weight: Any, indices: Tensor, rows: Tensor) -> Tensor:
    dense: Tensor = weight.dequantize() if hasattr(weight, "codes") else weight
    return dense.index_copy(0, indices, rows.to(dense.dtype))
