"""The decoder: one `GPT` class for GPT-2, Llama, Mistral, Qwen, SmolLM and our own models, selected by `GPTConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError, DataError, PrecisionError
from whimbrel.models.config import GPTConfig
from whimbrel.models.fused_blocks import can_fuse, delayed_scaling, fused_blocks, head_cast, why_not_fused
from whimbrel.models.layers import (
    Block,
    HFCache,
    HFCacheAdapter,
    KVCache,
    Norm,
    attention_masks,
    drop,
    packed_documents,
    padded_positions,
    rope_table,
)
from whimbrel.models.trainable_tokens import head_rows, head_weight
from whimbrel.ops import attend, linear_cross_entropy
from whimbrel.ops.cross_entropy_fp8 import linear_cross_entropy_fp8
from whimbrel.ops.fp8 import DelayedScaling

__all__ = ["GPT", "IGNORE_INDEX", "GPTOutput", "GPTStage", "resize_vocabulary"]

IGNORE_INDEX = -100
"""Labels with this value are excluded from the loss."""
HeadLoss = Callable[[Tensor, Tensor], Tensor]
"""From hidden states (batch * tokens, width) and the weight of the head (padded vocabulary, width) to a loss of any
shape. Rows of the weight beyond `vocab_size` are padding."""


class GPTOutput(NamedTuple):
    """The output of a forward pass.

    Unpacks as `loss, logits = output`. Indexing works as for transformers outputs: by name (`output["loss"]`), or by
    position among the fields that are not None (`output[0]` is the logits if there is no loss).
    """

    loss: Tensor | None
    logits: Tensor | None

    def to_tuple(self) -> tuple[Tensor, ...]:
        """The fields that are not None."""
        return tuple(value for value in (self.loss, self.logits) if value is not None)

    def keys(self) -> list[str]:
        """Names of the fields that are not None."""
        return [name for name in self._fields if getattr(self, name) is not None]

    def get(self, name: str, default: Any = None) -> Any:
        """The field of that name, or `default` if it is None or unknown."""
        return self[name] if name in self.keys() else default

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self.keys():
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()


class GPT(nn.Module):
    """Embedding, blocks, final norm, head.

    `model(input_ids)` returns logits; `model(input_ids, labels=input_ids)` also returns the next-token loss, as causal
    language models in transformers do.
    """

    loss_type = "ForCausalLM"  # declares, as in transformers, that `labels` are shifted inside the model
    accepts_loss_kwargs = True  # transformers.Trainer then passes `num_items_in_batch`
    name_or_path: str | None = None
    """What the model was loaded from, as in transformers; adapters record it."""
    fuses_blocks = True
    """Whether blocks run with `fused_blocks` where that applies."""
    fp8: DelayedScaling | None = None
    """The scales of MLPs and head, if they are trained in fp8 (`fp8_recipe = delayed`)."""

    tp_plan: ClassVar = {
        "transformer.h.*.attn": "heads",
        "transformer.h.*.attn.c_attn": "colwise",
        "transformer.h.*.attn.q_norm": "replicated_with_grad_allreduce",
        "transformer.h.*.attn.k_norm": "replicated_with_grad_allreduce",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        parts: dict[str, nn.Module] = {"wte": nn.Embedding(config.padded_vocab_size, config.embd_size)}
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.context_length, config.embd_size)
        if config.embedding_skip:
            parts["ln_e"] = Norm.from_config(config)
        if config.value_embeddings:
            width = config.kv_heads * config.head_dim
            tables = (nn.Embedding(config.padded_vocab_size, width) for _ in range(config.value_embeddings))
            parts["value_embeddings"] = nn.ModuleList(tables)
        parts["h"] = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        parts["ln_f"] = Norm.from_config(config)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.embd_size, config.padded_vocab_size, bias=False)
        self.tie_head()
        self.register_load_state_dict_post_hook(_retie_head)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    @property
    def blocks(self) -> Iterator[Block]:
        """The blocks, first to last."""
        return iter(cast("list[Block]", self.transformer["h"]))

    @property
    def token_embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.transformer["wte"])

    @property
    def value_embeddings(self) -> list[nn.Embedding]:
        """The tables that are mixed into the values of attention."""
        if not self.config.value_embeddings:
            return []
        return list(cast("Iterable[nn.Embedding]", self.transformer["value_embeddings"]))

    def tie_head(self) -> None:
        """Share the embedding weight with a tied head; call it again after parameters are replaced (`to_empty`)."""
        if self.config.tied_head:
            self.lm_head.weight = self.token_embedding.weight

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the weights: normal for linear layers and embeddings, zero for biases and padding rows."""
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

    def set_delayed_fp8(self, *, enabled: bool) -> None:
        """Train MLPs and head in fp8 with delayed scaling, or no longer; raises for an unsupported architecture."""
        self.fp8 = delayed_scaling(self.config) if enabled else None

    @property
    def _training_fp8(self) -> DelayedScaling | None:
        """`fp8` in a training pass; evaluation uses the precision of autocast."""
        return self.fp8 if self.training and torch.is_grad_enabled() else None

    def set_dropout(self, probability: float) -> None:
        """Change `config.dropout`."""
        self.config = replace(self.config, dropout=probability)
        for block in self.blocks:
            block.dropout = probability

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Zero the rows of embeddings and head beyond `vocab_size`."""
        modules: list[nn.Embedding | nn.Linear] = [self.token_embedding, *self.value_embeddings, self.lm_head]
        for module in modules:
            module.weight[self.config.vocab_size :].zero_()

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        targets: Tensor | None = None,
        return_logits: bool | None = None,
        cache: KVCache | HFCache | None = None,
        documents: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | None = None,
        loss_fn: HeadLoss | None = None,
    ) -> GPTOutput:
        """Logits of `input_ids` (batch, tokens), and the loss of `labels` or `targets`.

        Args:
            attention_mask: (batch, tokens), 0 for padding, on either side. Positions are counted over the other tokens.
                With a transformers cache it also covers the cached tokens; Whimbrel caches track padding themselves.
            labels: (batch, tokens), usually `input_ids`; shifted here, so that position i predicts label i + 1.
            targets: (batch, tokens), already shifted: position i predicts target i. Logits are then returned only with
                `return_logits`, because the fused loss does not materialize them.
            num_items_in_batch: Divisor of the loss, which is summed in fp32 over labels that are not -100. Default:
                their number (a mean). With gradient accumulation, pass their number in the complete batch.
            return_logits: Whether to compute logits. Default: True unless `targets` are passed.
            cache: Keys and values of earlier tokens; the keys and values of `input_ids` are appended.
            documents: (batch, tokens), a document number for each token; tokens attend only within their document,
                which ends where the number changes.
            position_ids: (batch, tokens), the position of each token in its packed sample. Without `documents`, a new
                sample starts where positions do not increase by 1, as in transformers. Not with a cache.
            logits_to_keep: Compute logits for this many last positions only.
            loss_fn: Computes `loss` instead, from hidden states and the weight of the head, without logits: a loss per
                token, for example. The functions `linear_*` in `whimbrel.ops` do not materialize all logits.
        """
        if loss_fn is not None:
            if labels is not None or targets is not None:
                raise ConfigError("expected loss_fn, or labels or targets for the next-token loss, got both")
            return_logits = False if return_logits is None else return_logits
        if labels is not None:
            if targets is not None:
                raise ConfigError("expected labels (shifted in the model) or targets (already shifted), got both")
            return_logits = True if return_logits is None else return_logits
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        hidden = self.hidden_states(
            input_ids, attention_mask=attention_mask, cache=cache, documents=documents, position_ids=position_ids
        )
        if return_logits is None:
            return_logits = targets is None
        kept = hidden if logits_to_keep is None else hidden[:, -logits_to_keep:]
        logits = self.logits(kept) if return_logits else None
        if loss_fn is not None:
            return GPTOutput(loss_fn(hidden.flatten(0, 1), head_weight(self.lm_head)), logits)
        if targets is None:
            return GPTOutput(None, logits)
        loss_sum = next_token_loss(self.config, hidden, self.lm_head, targets, fp8=self._training_fp8)
        if num_items_in_batch is None:
            num_items_in_batch = (targets != IGNORE_INDEX).sum().clamp(min=1)
        return GPTOutput(loss_sum / num_items_in_batch, logits)

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cache: KVCache | HFCache | None = None,
        documents: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """The residual stream (batch, tokens, width) after the final norm."""
        config = self.config
        num_keys = input_ids.size(1) + (0 if cache is None else cache.get_seq_length())
        if num_keys > config.context_length:
            raise ConfigError(
                f"expected at most context_length = {config.context_length} tokens, got {num_keys}: shorten the input"
            )
        for name, value in (("documents", documents), ("position_ids", position_ids)):
            if cache is not None and value is not None:
                raise ConfigError(f"{name} cannot be combined with a cache: pass one of them")
        padded = self._padded_positions(attention_mask, input_ids.size(0), num_keys)
        kv_cache: KVCache | None
        if cache is None or isinstance(cache, KVCache):
            kv_cache = cache
            if kv_cache is not None and padded is not None:
                raise ConfigError("attention_mask has padding: pass the padding to the cache constructor instead")
        else:
            kv_cache = HFCacheAdapter(cache, padded)
        if kv_cache is not None:
            positions = kv_cache.positions(input_ids.size(1), input_ids.device)
        else:
            positions = torch.arange(num_keys, device=input_ids.device) if padded is None else padded
        if positions.dim() == 2 and positions.size(0) != input_ids.size(0):
            raise ConfigError(
                f"the cache was created for the padding of {positions.size(0)} sequences, got a batch of "
                f"{input_ids.size(0)}: pass one padding length per sequence"
            )
        self._check_ids(input_ids)
        order = positions
        if position_ids is not None:
            self._check_position_ids(position_ids, input_ids)
            positions, order, documents = packed_positions(position_ids, documents, attention_mask)
        x = embed(self.transformer, config, input_ids, positions)
        # A copy, because torch.compile would compile the first block separately if two of its inputs were one tensor.
        x0 = x.clone() if config.embedding_skip else None
        rope = rope_table(config, positions) if config.position == "rope" else None
        masks = attention_masks(config, x, order, documents) if kv_cache is None else {}
        blocks, norm = list(self.blocks), cast(Norm, self.transformer["ln_f"])
        if self.fuses_blocks and kv_cache is None and can_fuse(config, [*blocks, norm], x):
            return fused_blocks(blocks, norm, x, [masks[window] for window in config.windows], self._training_fp8)
        if self._training_fp8 is not None:
            reason = why_not_fused(config, [*blocks, norm], x) or "expected no cache and the default compile settings"
            raise PrecisionError(f"fp8_recipe = delayed: {reason}: change that, or omit fp8_recipe")
        values = [table(input_ids).to(x.dtype) for table in self.value_embeddings]
        for layer, (block, window) in enumerate(zip(blocks, config.windows, strict=True)):
            cached = None if kv_cache is None else partial(_attend_cached, kv_cache, positions, layer, window)
            index = config.value_embedding_of(layer)
            x = block(x, x0, rope, masks.get(window), cached, None if index is None else values[index])
        normed: Tensor = norm(x)
        return normed

    def _padded_positions(self, attention_mask: Tensor | None, batch_size: int, num_keys: int) -> Tensor | None:
        """Positions of all keys, or None if nothing is padded, so that attention can use its faster causal path."""
        if attention_mask is None:
            return None
        if attention_mask.shape != (batch_size, num_keys):
            raise DataError(
                f"expected attention_mask of shape {[batch_size, num_keys]}, got {list(attention_mask.shape)}"
            )
        # Reading the mask synchronizes with a GPU once; a traced or fake mask has no values to read.
        readable = type(attention_mask) is Tensor and not torch.compiler.is_compiling()
        if readable and attention_mask.device.type != "meta" and bool(attention_mask.all()):
            return None
        return padded_positions(attention_mask)

    def _check_ids(self, input_ids: Tensor) -> None:
        """Reject ids of padding rows, which the embedding would accept; CPU only, since a GPU would have to sync."""
        if not _is_readable(input_ids) or not input_ids.numel():
            return
        largest, vocab_size = int(input_ids.max()), self.config.vocab_size
        if largest >= vocab_size:
            raise DataError(f"expected token ids from 0 to {vocab_size - 1}, got {largest}: use the model's tokenizer")

    def _check_position_ids(self, position_ids: Tensor, input_ids: Tensor) -> None:
        if position_ids.shape != input_ids.shape:
            raise DataError(
                f"expected position_ids of the shape of input_ids, {list(input_ids.shape)}, got "
                f"{list(position_ids.shape)}"
            )
        if not _is_readable(position_ids) or not position_ids.numel():
            return
        smallest, largest, limit = int(position_ids.min()), int(position_ids.max()), self.config.context_length
        if smallest < 0 or largest >= limit:
            raise DataError(f"expected position_ids from 0 to {limit - 1}, got {smallest if smallest < 0 else largest}")

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocab_size) of hidden states (..., width)."""
        logits: Tensor = self.lm_head(hidden)[..., : self.config.vocab_size]
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def num_parameters(self, *, trainable: bool | None = None) -> int:
        """Number of parameters, without padding rows; a tied head counts once.

        `trainable` counts only trainable ones (True), or only frozen ones (False).
        """
        padding = self.config.padded_vocab_size - self.config.vocab_size
        padded = {id(module.weight) for module in (self.token_embedding, *self.value_embeddings, self.lm_head)}
        parameters = (p for p in self.parameters() if trainable is None or p.requires_grad == trainable)
        return sum(p.numel() - padding * p.shape[-1] * (id(p) in padded) for p in parameters)

    def flops_per_token(self, num_tokens: int) -> int:
        """FLOPs of a forward and backward pass per token, in sequences of `num_tokens`.

        The usual convention (PaLM, appendix B): 6 per parameter of a matrix product, which excludes embedding lookups,
        and 12 * heads * head size * keys per layer for attention. The causal mask is ignored, a sliding window is not.
        Frozen parameters take 4, since the gradients of their products are computed, but not their own.
        """
        config = self.config
        lookup_rows = config.context_length if config.position == "learned" else 0
        lookup_rows += 0 if config.tied_head else config.vocab_size
        keys = sum(num_tokens if window is None else min(window, num_tokens) for window in config.windows)
        per_parameter = 6 * self.num_parameters(trainable=True) + 4 * self.num_parameters(trainable=False)
        lookup_parameters = lookup_rows * config.embd_size
        lookup_parameters += config.value_embeddings * config.vocab_size * config.kv_heads * config.head_dim
        lookups = (6 if self.token_embedding.weight.requires_grad else 4) * lookup_parameters
        return per_parameter - lookups + 12 * config.num_heads * config.head_dim * keys


def _is_readable(ids: Tensor) -> bool:
    """Whether values can be checked without waiting for a GPU."""
    return type(ids) is Tensor and ids.device.type == "cpu" and not torch.compiler.is_compiling()


def packed_positions(
    position_ids: Tensor, documents: Tensor | None, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions for embeddings, positions for the mask, and documents, of rows with packed samples.

    Positions of different samples cannot be compared, so the mask uses the order of tokens in the row; within a sample
    the distance between two tokens is the same. Padding is a document of its own.
    """
    documents = packed_documents(position_ids) if documents is None else documents
    if attention_mask is not None:
        documents = documents.masked_fill(attention_mask == 0, -1)
    return position_ids, torch.arange(position_ids.size(1), device=position_ids.device), documents


def embed(parts: nn.ModuleDict, config: GPTConfig, input_ids: Tensor, positions: Tensor) -> Tensor:
    """The input of the first block, (batch, tokens, width)."""
    x: Tensor = parts["wte"](input_ids)
    if config.position == "learned":
        x = x + parts["wpe"](positions.clamp(min=0))
    if config.embedding_skip:
        x = parts["ln_e"](x)
    # Autocast leaves embeddings in fp32. The residual stream is cast too: every block reads and writes it, so its
    # bytes cost time.
    device = input_ids.device.type
    x = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
    return drop(x, config.dropout, parts.training)


def next_token_loss(
    config: GPTConfig,
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    *,
    inplace_backward: bool = True,
    fp8: DelayedScaling | None = None,
) -> Tensor:
    """Cross-entropy of shifted targets (batch, tokens), summed in fp32; logits are not materialized."""
    if fp8 is not None:
        return linear_cross_entropy_fp8(
            hidden.flatten(0, 1),
            head.weight,
            targets.flatten(),
            fp8,
            head_cast(config),
            vocab_size=config.vocab_size,
            softcap=config.logit_softcap,
            ignore_index=IGNORE_INDEX,
        )
    return linear_cross_entropy(
        hidden.flatten(0, 1),
        head.weight,
        targets.flatten(),
        vocab_size=config.vocab_size,
        softcap=config.logit_softcap,
        ignore_index=IGNORE_INDEX,
        inplace_backward=inplace_backward,
        replaced_rows=head_rows(head),
    )


class GPTStage(nn.Module):
    """Consecutive blocks of a GPT for pipeline parallelism; parameters keep their names.

    The first stage has the embedding and takes token ids; the last has the head and returns the loss, summed over
    targets, with shape (1,). Others take and return the residual stream, and with `embedding_skip` also the embedding.
    """

    tp_plan = GPT.tp_plan

    def __init__(self, model: GPT, layers: range) -> None:
        super().__init__()
        if model.config.value_embeddings:
            raise ConfigError(
                "a pipeline does not pass token ids to the stages that need value embeddings: set parallel.pp = 1 "
                "and use fsdp"
            )
        self.config, self.layers = model.config, layers
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.config.num_layers
        parts = {name: part for name, part in model.transformer.items() if self.is_first and name not in ("h", "ln_f")}
        parts["h"] = nn.ModuleDict({str(layer): model.transformer["h"][layer] for layer in layers})  # type: ignore[index]
        if self.is_last:
            parts["ln_f"] = model.transformer["ln_f"]
            self.lm_head = model.lm_head
        self.transformer = nn.ModuleDict(parts)

    @property
    def blocks(self) -> Iterator[Block]:
        """The blocks of this stage, first to last."""
        return iter(cast("Iterable[Block]", self.transformer["h"].values()))  # type: ignore[operator]

    def forward(
        self,
        x: Tensor,
        x0: Tensor | None = None,
        *,
        targets: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the stage on token ids (batch, tokens) or on the output of the stage before."""
        with self.autocast():
            return self._forward(x, x0, targets, attention_mask, documents, position_ids)

    def _forward(
        self,
        x: Tensor,
        x0: Tensor | None,
        targets: Tensor,
        attention_mask: Tensor | None,
        documents: Tensor | None,
        position_ids: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        config, positions = self.config, torch.arange(targets.size(1), device=targets.device)
        if attention_mask is not None:
            positions = padded_positions(attention_mask)
        order = positions
        if position_ids is not None:
            positions, order, documents = packed_positions(position_ids, documents, attention_mask)
        if self.is_first:
            x = embed(self.transformer, config, x, positions)
            x0 = x.clone() if config.embedding_skip else None
        rope = rope_table(config, positions) if config.position == "rope" else None
        masks = attention_masks(config, x, order, documents)
        for layer, block in zip(self.layers, self.blocks, strict=True):
            x = block(x, x0, rope, masks[config.windows[layer]], None)
        if not self.is_last:
            return x if x0 is None else (x, x0)
        hidden = self.transformer["ln_f"](x)
        # Zero-bubble schedules run backward twice, for inputs and for weights.
        return next_token_loss(config, hidden, self.lm_head, targets, inplace_backward=False)[None]


@torch.no_grad()
def resize_vocabulary(model: GPT, vocab_size: int) -> GPT:
    """Add rows to embedding and head for new token ids, in place; returns the model.

    New rows are initialized to the mean of the existing ones (computed in fp32), so that new tokens start out as likely
    as an average token. Weights of existing tokens do not change; a tied head stays tied, and the rows are padded to
    `config.vocab_multiple` again. Parameters that need more rows are replaced: call it before building an optimizer.
    """
    config = model.config
    if vocab_size < config.vocab_size:
        raise ConfigError(f"expected a vocabulary of at least {config.vocab_size} tokens, got {vocab_size}")
    if vocab_size == config.vocab_size:
        return model
    resized = replace(config, vocab_size=vocab_size)
    modules: dict[str, nn.Embedding | nn.Linear] = {"embedding": model.token_embedding}
    modules |= {f"value embedding {i}": table for i, table in enumerate(model.value_embeddings)}
    if not config.tied_head:
        modules["head"] = model.lm_head
    for name, module in modules.items():
        if type(module.weight.data) is not Tensor or not module.weight.is_floating_point():
            raise ConfigError(f"the {name} is quantized: resize the vocabulary of the dense model, then quantize it")
    for module in modules.values():
        module.weight = _resized(module.weight, config.vocab_size, vocab_size, resized.padded_vocab_size)
    for table in (model.token_embedding, *model.value_embeddings):
        table.num_embeddings = resized.padded_vocab_size
    model.lm_head.out_features = resized.padded_vocab_size
    model.config = resized
    model.tie_head()
    return model


def _resized(weight: Tensor, old_size: int, new_size: int, num_rows: int) -> nn.Parameter:
    """The weight with `num_rows` rows: the old ones, their mean for new tokens, zeros for padding."""
    mean = weight[:old_size].float().mean(dim=0).to(weight.dtype)
    if num_rows == weight.size(0):  # the new tokens fit into the padding
        weight[old_size:new_size] = mean
        return nn.Parameter(weight, requires_grad=weight.requires_grad)
    rows = weight.new_zeros(num_rows, weight.size(1))
    rows[:old_size] = weight[:old_size]
    rows[old_size:new_size] = mean
    return nn.Parameter(rows, requires_grad=weight.requires_grad)


def _retie_head(model: GPT, _incompatible: object) -> None:
    """`load_state_dict(..., assign=True)` replaces the tied parameter with two separate ones."""
    model.tie_head()


def _attend_cached(
    kv_cache: KVCache, positions: Tensor, layer: int, window: int | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    return attend(q, kv_cache.append(k, v, layer), positions, window=window)
