"""The decoder: one model for GPT-2, Llama, Mistral, Qwen, SmolLM and our own recipes, told apart by `GPTConfig`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.models.config import GPTConfig
from whimbrel.models.layers import MLP, Attention, InOrder, KVStore, Norm, Past, PlainStore, RopeTable
from whimbrel.models.masks import attention_mask
from whimbrel.models.rope import rope_table
from whimbrel.ops import attend, linear_cross_entropy

__all__ = ["Block", "GPT", "GPTOutput", "IGNORE_INDEX"]

IGNORE_INDEX = -100
"""A target with this value does not count."""


class GPTOutput(NamedTuple):
    """What a forward pass gives; both a pair and a thing with names."""

    loss: Tensor | None
    logits: Tensor | None


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the stream and added back to it.

    Every block of a model has the same attributes but for its weights, so compiled blocks share one graph; what differs
    from layer to layer (mask, cache) comes in as an argument.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_scale = (2 * config.num_layers) ** -0.5 if config.residual_scale == "attention" else 1.0
        self.ln_1 = Norm.of(config)
        self.attn = Attention(config)
        self.ln_2 = Norm.of(config)
        self.mlp = MLP(config)
        self.skip = nn.Parameter(torch.tensor([1.0, 0.0])) if config.embedding_skip else None

    def forward(
        self, x: Tensor, x0: Tensor | None, rope: RopeTable | None, mask: Tensor | None, past: Past | None
    ) -> Tensor:
        """Pass the stream `x` through; `x0` is the stream as it left the embedding, for models that mix it back in."""
        if self.skip is not None and x0 is not None:
            x = self.skip[0] * x + self.skip[1] * x0
        x = torch.add(x, self.attn(self.ln_1(x), rope, mask, past), alpha=self.attention_scale)
        return torch.add(x, self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """Embedding, blocks, final norm, head. `model(idx, targets)` gives the loss, `model(idx)` the logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        parts: dict[str, nn.Module] = {"wte": nn.Embedding(config.padded_vocab_size, config.embd_size)}
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.context_length, config.embd_size)
        if config.embedding_skip:
            parts["ln_e"] = Norm.of(config)
        parts["h"] = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        parts["ln_f"] = Norm.of(config)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.embd_size, config.padded_vocab_size, bias=False)
        self.tie_head()
        self.register_load_state_dict_post_hook(_tie_again)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    @property
    def blocks(self) -> Iterator[Block]:
        """The blocks, first to last."""
        return iter(cast("list[Block]", self.transformer["h"]))

    @property
    def token_embedding(self) -> nn.Embedding:
        """The token embedding."""
        return cast(nn.Embedding, self.transformer["wte"])

    def tie_head(self) -> None:
        """Point a tied head at the embedding; again after anything that gave modules new parameters (`to_empty`)."""
        if self.config.tied_head:
            self.lm_head.weight = self.token_embedding.weight

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh weights: linears and embeddings from a normal distribution, biases and padding rows zero."""
        config = self.config
        zeroed = {"c_proj": config.zero_init_projections, "lm_head": config.zero_init_head}
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                module.weight.normal_(std=config.embd_init_std)
            elif isinstance(module, nn.Linear) and not (name == "lm_head" and config.tied_head):
                module.weight.normal_(std=0.0 if zeroed.get(name.rpartition(".")[2]) else config.init_std)
                if module.bias is not None:
                    module.bias.zero_()
        self.zero_padding()

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Clear the rows of embedding and head that stand for no token."""
        self.token_embedding.weight[self.config.vocab_size :].zero_()
        self.lm_head.weight[self.config.vocab_size :].zero_()

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        return_logits: bool | None = None,
        *,
        cache: KVStore | PlainStore | None = None,
        documents: Tensor | None = None,
        loss_divisor: float | Tensor | None = None,
        logits_to_keep: int | None = None,
    ) -> GPTOutput:
        """Loss of `targets`, or logits of `idx`, both of shape (batch, tokens).

        The loss is the fp32 sum over targets that are not -100, divided by their count or by `loss_divisor` (the
        global count, where this batch is a part of one). Logits come without targets, or with `return_logits`;
        `logits_to_keep` restricts them to the last positions. `documents` numbers the document of each token, and
        tokens then see only their own. `cache` holds the tokens before `idx` and takes these in.
        """
        hidden = self.hidden_states(idx, cache=cache, documents=documents)
        if return_logits is None:
            return_logits = targets is None
        kept = hidden if logits_to_keep is None else hidden[:, -logits_to_keep:]
        logits = self.logits(kept) if return_logits else None
        if targets is None:
            return GPTOutput(None, logits)
        total = linear_cross_entropy(
            hidden.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(),
            vocab_size=self.config.vocab_size,
            softcap=self.config.logit_softcap,
            ignore_index=IGNORE_INDEX,
        )
        if loss_divisor is None:
            loss_divisor = (targets != IGNORE_INDEX).sum().clamp(min=1)
        return GPTOutput(total / loss_divisor, logits)

    def hidden_states(
        self, idx: Tensor, *, cache: KVStore | PlainStore | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """The stream (batch, tokens, width) after the final norm."""
        config = self.config
        store = cache if cache is None or isinstance(cache, KVStore) else InOrder(cache)
        num_keys = idx.size(1) + (0 if store is None else store.get_seq_length())
        if num_keys > config.context_length:
            raise ConfigError(
                f"a sequence of {num_keys} tokens is longer than context_length = {config.context_length}: shorten it"
            )
        if store is not None and documents is not None:
            raise ConfigError("documents cannot be told apart in a cache: give either cache or documents")
        positions = (
            torch.arange(num_keys, device=idx.device) if store is None else store.positions(idx.size(1), idx.device)
        )
        if positions.dim() == 2 and positions.size(0) != idx.size(0):
            raise ConfigError(
                f"the cache was built for {positions.size(0)} rows (its padding) and the batch has {idx.size(0)}: "
                "give one count of padding for each row"
            )
        x = self._embed(idx, positions)
        # A copy, not `x` itself: the first block would be compiled apart, as one whose inputs are the same tensor.
        x0 = x.clone() if config.embedding_skip else None
        rope = rope_table(config, positions) if config.position == "rope" else None
        masks = {
            window: attention_mask(positions, window=window, documents_BT=documents)
            for window in set(config.windows if store is None else ())
        }
        for layer, (block, window) in enumerate(zip(self.blocks, config.windows, strict=True)):
            past = None if store is None else partial(_attend_past, store, positions, layer, window)
            x = block(x, x0, rope, masks.get(window), past)
        normed: Tensor = self.transformer["ln_f"](x)
        return normed

    def _check_ids(self, idx: Tensor) -> None:
        """Refuse ids of the padding rows, which the embedding would look up; on a GPU, looking would make it wait."""
        if type(idx) is not Tensor or idx.device.type != "cpu" or torch.compiler.is_compiling() or not idx.numel():
            return
        largest, vocab_size = int(idx.max()), self.config.vocab_size
        if largest >= vocab_size:
            raise DataError(f"token id {largest} is outside the vocabulary: ids run from 0 to {vocab_size - 1}")

    def _embed(self, idx: Tensor, positions: Tensor) -> Tensor:
        self._check_ids(idx)
        x: Tensor = self.token_embedding(idx)
        if self.config.position == "learned":
            x = x + self.transformer["wpe"](positions.clamp(min=0))
        if self.config.embedding_skip:
            x = self.transformer["ln_e"](x)
        # Under autocast the stream too is low precision: every branch reads and writes it, so its bytes are time.
        device = idx.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head makes of the stream after the final norm, for each token of the vocabulary."""
        logits: Tensor = self.lm_head(hidden)[..., : self.config.vocab_size]
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def num_parameters(self) -> int:
        """Learned numbers, padding rows left out and a tied head counted once."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.embd_size
        return sum(p.numel() for p in self.parameters()) - padding * (1 if self.config.tied_head else 2)

    def flops_per_token(self, num_tokens: int) -> int:
        """Operations of one forward and backward pass per token, in sequences of `num_tokens`.

        The usual convention: 6 per parameter that takes part in a product (embeddings that are only looked up do not),
        and 12 * heads * head size * keys per layer for attention, where causality is not discounted and a window is.
        """
        config = self.config
        looked_up = config.context_length if config.position == "learned" else 0
        looked_up += 0 if config.tied_head else config.vocab_size
        keys = sum(num_tokens if window is None else min(window, num_tokens) for window in config.windows)
        multiplied = self.num_parameters() - looked_up * config.embd_size
        return 6 * multiplied + 12 * config.num_heads * config.head_width * keys


def _tie_again(model: GPT, _incompatible: object) -> None:
    """After `load_state_dict(..., assign=True)`, which gives embedding and head a parameter each."""
    model.tie_head()


def _attend_past(
    store: KVStore, positions: Tensor, layer: int, window: int | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Store the new keys and values of a layer, and let its queries look at all that the store shows."""
    return attend(q, store.append(k, v, layer), positions, window=window)
