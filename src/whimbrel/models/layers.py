"""The pieces of a block: norm, attention, MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.models.config import GPTConfig
from whimbrel.models.rope import rotate
from whimbrel.ops import View

__all__ = ["Attention", "InOrder", "KVStore", "MLP", "Norm", "Past", "PlainStore", "RopeTable"]

RopeTable = tuple[Tensor, Tensor]
Past = Callable[[Tensor, Tensor, Tensor], Tensor]
"""One layer of a cache: takes the new queries, keys and values, hands back what the queries find in all it holds."""


@runtime_checkable
class KVStore(Protocol):
    """What a model asks of a key-value cache; tensors are (batch, kv heads, tokens, head size)."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Where the next tokens stand: (tokens,), or (batch, tokens) where rows differ; padding is negative."""

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> View:
        """Store the new tokens of a layer and say what may be read of it now."""

    def get_seq_length(self) -> int:
        """How many tokens are stored, in the longest row."""


class PlainStore(Protocol):
    """What `transformers`' own caches offer: all keys and values, in order, after each update."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Store the new tokens of a layer and hand back all it holds."""

    def get_seq_length(self) -> int:
        """How many tokens are stored."""


@dataclass(frozen=True, slots=True)
class InOrder:
    """A plain store as a `KVStore`."""

    store: PlainStore

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """One after the other, from the number of tokens stored."""
        seen = self.get_seq_length()
        return torch.arange(seen, seen + tokens, device=device)

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> View:
        """Everything the layer holds."""
        keys, values = self.store.update(key_states, value_states, layer_idx)
        if keys.size(2) > int(self.get_seq_length()):
            raise ConfigError(
                f"expected a cache that hands back the tokens it holds, got {keys.size(2)} slots for "
                f"{int(self.get_seq_length())} tokens: use whimbrel.cache.StaticCache"
            )
        return View(keys, values)

    def get_seq_length(self) -> int:
        """How many tokens are stored."""
        return self.store.get_seq_length()


class Norm(nn.Module):
    """LayerNorm or RMSNorm, with or without weights; computed in fp32 whatever the dtype of the stream."""

    def __init__(self, size: int, *, kind: str, eps: float, affine: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.shape, self.kind, self.eps = (size,), kind, eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if affine and bias and kind == "layer" else None

    @classmethod
    def of(cls, config: GPTConfig) -> Norm:
        """The norm of the residual stream."""
        bias = config.bias == "all"
        return cls(config.embd_size, kind=config.norm, eps=config.norm_eps, affine=config.norm_affine, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight = None if self.weight is None else self.weight.float()
        if self.kind == "rms":
            return F.rms_norm(x.float(), self.shape, weight, self.eps).type_as(x)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.shape, weight, bias, self.eps).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come from one product."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_width
        rows = (self.num_heads + 2 * self.kv_heads) * self.head_size
        self.c_attn = nn.Linear(config.embd_size, rows, bias=config.bias != "none")
        self.c_proj = nn.Linear(
            self.num_heads * self.head_size, config.embd_size, bias=config.bias in ("all", "attention")
        )
        self.q_norm, self.k_norm = (_head_norm(config) for _ in range(2))

    def forward(self, x_BTC: Tensor, rope: RopeTable | None, mask: Tensor | None, past: Past | None) -> Tensor:
        """Attend over `x`, or over all that `past` holds; without a mask attention is plainly causal."""
        B, T, _ = x_BTC.shape
        heads_BHTD = self.c_attn(x_BTC).view(B, T, -1, self.head_size).transpose(1, 2)
        q, k, v = heads_BHTD.split((self.num_heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if past is not None:
            y_BHTD = past(q, k, v)
        else:
            y_BHTD = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, enable_gqa=self.kv_heads != self.num_heads
            )
        y_BTC: Tensor = self.c_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))
        return y_BTC


class MLP(nn.Module):
    """Two linears around a non-linearity; a gated one keeps [gate; up] in its first."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        bias = config.bias == "all"
        self.activation, self.gated = config.activation, config.gated_mlp
        self.c_fc = nn.Linear(config.embd_size, config.mlp_width * (2 if self.gated else 1), bias=bias)
        self.c_proj = nn.Linear(config.mlp_width, config.embd_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token on its own."""
        if self.gated:
            gate, up = self.c_fc(x).chunk(2, dim=-1)
            hidden = _activate(self.activation, gate) * up
        else:
            hidden = _activate(self.activation, self.c_fc(x))
        y: Tensor = self.c_proj(hidden)
        return y


def _head_norm(config: GPTConfig) -> Norm | None:
    if config.qk_norm == "none":
        return None
    return Norm(config.head_width, kind="rms", eps=config.norm_eps, affine=config.qk_norm == "weighted")


def _activate(name: str, x: Tensor) -> Tensor:
    if name == "gelu":
        return F.gelu(x)
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if name == "silu":
        return F.silu(x)
    return F.relu(x).square()
