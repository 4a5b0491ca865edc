"""Building blocks of the decoder: norm, rotary embedding, attention mask, attention, MLP, and their combination."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.models.config import GPTConfig, RopeScaling
from whimbrel.ops import KVView, can_attend_packed, cumulative_lengths, packed_attention

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "CachedAttention",
    "HFCache",
    "HFCacheAdapter",
    "KVCache",
    "Mask",
    "Norm",
    "PackedMask",
    "RopeTable",
    "apply_rotary_emb",
    "attention_masks",
    "causal_mask",
    "drop",
    "eval_mode",
    "packed_documents",
    "padded_positions",
    "rope_frequencies",
    "rope_table",
]

RopeTable = tuple[Tensor, Tensor]
"""Cosine and sine of every rotation angle."""
CachedAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer through a cache: `(q, k, v)` of the new tokens -> their attention output."""


@runtime_checkable
class KVCache(Protocol):
    """The interface of a KV cache; tensors are (batch, kv heads, tokens, head size)."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Positions of the next tokens: (tokens,), or (batch, tokens) if sequences differ; negative for padding."""

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> KVView:
        """Store the new keys and values of a layer and return all keys and values that its queries can attend to."""

    def get_seq_length(self) -> int:
        """Number of tokens stored, padding included."""


class HFCache(Protocol):
    """The interface of a `transformers` cache."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of a layer and return all of them, in order."""

    def get_seq_length(self) -> int:
        """Number of tokens stored."""


@dataclass(frozen=True, slots=True)
class HFCacheAdapter:
    """A `transformers` cache as a `KVCache`."""

    cache: HFCache
    key_positions: Tensor | None = None
    """(batch, stored + new tokens), from `padded_positions`, if the batch is padded."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Consecutive positions after the stored tokens, unless the batch is padded."""
        if self.key_positions is not None:
            return self.key_positions[:, -tokens:]
        start = self.get_seq_length()
        return torch.arange(start, start + tokens, device=device)

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> KVView:
        """Store the new keys and values of a layer and return all of them."""
        keys, values = self.cache.update(key_states, value_states, layer_idx)
        if keys.size(2) > int(self.get_seq_length()):
            raise ConfigError(
                f"expected a cache that returns only stored tokens, got {keys.size(2)} slots for "
                f"{int(self.get_seq_length())} tokens: use whimbrel.cache.StaticCache"
            )
        return KVView(keys, values, None if self.key_positions is None else self.key_positions[:, -keys.size(2) :])

    def get_seq_length(self) -> int:
        """Number of tokens stored."""
        return self.cache.get_seq_length()


def padded_positions(attention_mask: Tensor) -> Tensor:
    """Positions (batch, tokens) of a padded batch, counted over tokens whose mask is not 0; -1 for padding."""
    real = attention_mask != 0
    return (real.long().cumsum(-1) - 1).masked_fill(~real, -1)


def packed_documents(position_ids: Tensor) -> Tensor:
    """Document numbers (batch, tokens) of packed samples: a document starts where positions do not increase by 1."""
    return (position_ids.diff(dim=-1, prepend=position_ids[:, :1]) != 1).cumsum(-1)


class PackedMask(NamedTuple):
    """The document boundaries of packed rows, for `packed_attention`, which needs no boolean mask."""

    cu_seqlens: Tensor
    window: int | None


Mask = Tensor | PackedMask | None
"""A boolean mask, document boundaries, or None for causal attention."""


def attention_masks(
    config: GPTConfig, x_BTC: Tensor, positions: Tensor, documents_BT: Tensor | None
) -> dict[int | None, Mask]:
    """The mask of each window size of a model. `positions` and `documents` are as in `causal_mask`."""
    if documents_BT is not None and positions.dim() == 1 and can_attend_packed(x_BTC, config.head_dim):
        cu_seqlens = cumulative_lengths(documents_BT)
        return {window: PackedMask(cu_seqlens, window) for window in set(config.windows)}
    return {window: causal_mask(positions, window=window, documents_BT=documents_BT) for window in set(config.windows)}


def causal_mask(positions: Tensor, *, window: int | None = None, documents_BT: Tensor | None = None) -> Tensor | None:
    """True where a query may attend, shape (T, T) or (B, 1, T, T); None if `is_causal=True` is equivalent.

    `positions` is (T,), or (B, T) with negative values for padding. A query attends to itself and earlier tokens, to at
    most `window` tokens, and only within its own document, which starts where the number in `documents` changes.
    """
    padded = positions.dim() == 2
    if window is not None and window >= positions.size(-1):
        window = None
    if documents_BT is None and window is None and not padded:
        return None
    distance = positions[..., :, None] - positions[..., None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if padded:
        mask &= (positions >= 0)[:, None, :]
        # The softmax of a query without any key would be NaN, so padding queries attend to everything.
        mask |= (positions < 0)[:, :, None]
        mask = mask[:, None]
    if documents_BT is not None:
        runs_BT = (documents_BT.diff(dim=-1, prepend=documents_BT[:, :1]) != 0).cumsum(-1)
        mask = mask & (runs_BT[:, None, :, None] == runs_BT[:, None, None, :])
    return mask


# Rotary position embedding. Pairs are the two halves of a head (dimension i with i + head_size / 2), the layout of
# Hugging Face checkpoints; llama2.c and llama.cpp pair neighbors (2i with 2i + 1) and need their rows reordered.


def rope_table(config: GPTConfig, positions: Tensor) -> RopeTable:
    """Cosine and sine in fp32: (T, head_size), or (batch, 1, T, head_size) for positions of shape (batch, T).

    Computed in every forward pass instead of stored in buffers, which could be cast to bf16 by mistake and would have
    to be materialized after meta-device construction. The cost is a few tiny kernels.
    """
    angles = positions.float()[..., None] * rope_frequencies(config, positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    if positions.dim() == 2:
        angles = angles[:, None]
    return angles.cos(), angles.sin()


def rope_frequencies(config: GPTConfig, device: torch.device) -> Tensor:
    """Rotation angle per position of each pair, in radians, fp32: (head_size / 2,)."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / (config.rope_theta ** (exponents / config.head_dim))
    return frequencies if config.rope_scaling is None else _scale_frequencies(frequencies, config.rope_scaling)


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: pairs that complete few rotations within the original context encode long-range position and are slowed
    # down; fast pairs encode local order and stay; in between the two are interpolated.
    rotations = scaling.original_context_length * frequencies / (2 * math.pi)
    interpolation = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    interpolation = interpolation.clamp(0, 1)
    return (1 - interpolation) * frequencies / scaling.factor + interpolation * frequencies


def apply_rotary_emb(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate each pair of `x` by its angle; computed in fp32, returned in the dtype of `x`."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return (x_BHTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD).type_as(x_BHTD)


class Norm(nn.Module):
    """LayerNorm or RMSNorm, computed in fp32 for any input dtype."""

    def __init__(self, size: int, *, kind: str, eps: float, affine: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.shape, self.kind, self.eps = (size,), kind, eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if affine and bias and kind == "layer" else None

    @classmethod
    def from_config(cls, config: GPTConfig) -> Norm:
        """A norm over the residual stream, as configured."""
        bias = config.bias == "all"
        return cls(config.embd_size, kind=config.norm, eps=config.norm_eps, affine=config.norm_affine, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        weight = None if self.weight is None else self.weight.float()
        if self.kind == "rms":
            return F.rms_norm(x.float(), self.shape, weight, self.eps).type_as(x)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.shape, weight, bias, self.eps).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; one linear layer (`c_attn`) computes queries, keys and values, in that order.

    With `mixes_values`, values are a learned mix with an embedding of the token (ResFormer, modded-nanogpt).
    """

    def __init__(self, config: GPTConfig, *, mixes_values: bool = False) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_dim
        out_features = (self.num_heads + 2 * self.kv_heads) * self.head_size
        self.c_attn = nn.Linear(config.embd_size, out_features, bias=config.bias != "none")
        self.c_proj = nn.Linear(
            self.num_heads * self.head_size, config.embd_size, bias=config.bias in ("all", "attention")
        )
        rows = tuple(heads * self.head_size for heads in (self.num_heads, self.kv_heads, self.kv_heads))
        self.c_attn.fused_rows = rows  # type: ignore[assignment] # tensor parallelism splits each of the three
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5])) if mixes_values else None
        self.q_norm, self.k_norm = None, None
        if config.qk_norm != "none":
            affine = config.qk_norm == "weighted"
            self.q_norm, self.k_norm = (
                Norm(self.head_size, kind="rms", eps=config.norm_eps, affine=affine) for _ in range(2)
            )

    def split_heads(self, ranks: int) -> None:
        """Compute the heads of one rank only, under tensor parallelism."""
        self.num_heads, self.kv_heads = self.num_heads // ranks, self.kv_heads // ranks

    def forward(
        self,
        x_BTC: Tensor,
        rope: RopeTable | None,
        mask: Mask,
        cached: CachedAttention | None,
        values_BTC: Tensor | None = None,
    ) -> Tensor:
        """Attend within `x`, or through `cached` over a KV cache; without a mask, attention is causal.

        `values` is the value embedding of the tokens, (batch, tokens, kv heads * head size).
        """
        B, T, _ = x_BTC.shape
        heads_BHTD = self.c_attn(x_BTC).view(B, T, -1, self.head_size).transpose(1, 2)
        q, k, v = heads_BHTD.split((self.num_heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rotary_emb(q, *rope), apply_rotary_emb(k, *rope)
        if self.value_mix is not None and values_BTC is not None:
            embedded_BHTD = values_BTC.view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
            v = (self.value_mix[0] * v + self.value_mix[1] * embedded_BHTD).type_as(v)
        y_BHTD = self.attend(q, k, v, mask) if cached is None else cached(q, k, v)
        y_BTC: Tensor = self.c_proj(y_BHTD.transpose(1, 2).reshape(B, T, -1))
        return y_BTC

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Mask) -> Tensor:
        """Attention without a cache, (batch, heads, tokens, head size); causal without a mask."""
        if isinstance(mask, PackedMask):
            return packed_attention(q_BHTD, k_BHTD, v_BHTD, mask.cu_seqlens, mask.window)
        return F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, mask, is_causal=mask is None, enable_gqa=self.kv_heads != self.num_heads
        )


class MLP(nn.Module):
    """Two linear layers around an activation; in a gated MLP `c_fc` is [gate; up]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        bias = config.bias == "all"
        self.activation, self.gated = config.activation, config.gated_mlp
        self.c_fc = nn.Linear(config.embd_size, config.intermediate_size * (2 if self.gated else 1), bias=bias)
        self.c_fc.fused_rows = (config.intermediate_size,) * (2 if self.gated else 1)  # type: ignore[assignment]
        self.c_proj = nn.Linear(config.intermediate_size, config.embd_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to the last dimension."""
        if self.gated:
            gate, up = self.c_fc(x).chunk(2, dim=-1)
            hidden = _activate(self.activation, gate) * up
        else:
            hidden = _activate(self.activation, self.c_fc(x))
        y: Tensor = self.c_proj(hidden)
        return y


class Block(nn.Module):
    """Pre-norm attention and MLP with residual connections.

    All blocks of a model have equal attributes except for their weights, so `torch.compile` compiles one graph for all
    (two if only some have value embeddings); per-layer inputs (mask, cache, values) are passed as arguments.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_scale = (2 * config.num_layers) ** -0.5 if config.residual_scale == "attention" else 1.0
        self.dropout = config.dropout
        self.ln_1 = Norm.from_config(config)
        self.attn = Attention(config, mixes_values=config.value_embedding_of(layer) is not None)
        self.ln_2 = Norm.from_config(config)
        self.mlp = MLP(config)
        self.skip = nn.Parameter(torch.tensor([1.0, 0.0])) if config.embedding_skip else None

    def forward(
        self,
        x: Tensor,
        x0: Tensor | None,
        rope: RopeTable | None,
        mask: Mask,
        cached: CachedAttention | None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Transform the residual stream `x` (batch, tokens, width).

        `x0` is the embedding, for `embedding_skip`; `values` are the value embeddings of the layer, if it has any.
        """
        if self.skip is not None and x0 is not None:
            x = self.skip[0] * x + self.skip[1] * x0
        y = self.attn(self.ln_1(x), rope, mask, cached, values)
        x = torch.add(x, drop(y, self.dropout, self.training), alpha=self.attention_scale)
        return torch.add(x, drop(self.mlp(self.ln_2(x)), self.dropout, self.training))


def drop(x: Tensor, probability: float, training: bool) -> Tensor:
    """Dropout; without any, nothing is computed and no random numbers are drawn."""
    return F.dropout(x, probability) if probability and training else x


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Without gradients and dropout; a model in training mode returns to it."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            model.train()


def _activate(name: str, x: Tensor) -> Tensor:
    if name == "gelu":
        return F.gelu(x)
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if name == "silu":
        return F.silu(x)
    return F.relu(x).square()
