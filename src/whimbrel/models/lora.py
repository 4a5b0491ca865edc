"""LoRA adapters on the linear layers of a GPT, as in PEFT: `apply_lora`, then train, then `merge_lora`.

    y = W x + s B A x      s = alpha / rank (rsLoRA: alpha / sqrt(rank))
    y = m (W + s B A) x / |W + s B A|      DoRA; the norm is that of each row, and a constant in the backward pass

A linear layer of a GPT fuses several modules of a Hugging Face model (q_proj, k_proj and v_proj; gate_proj and
up_proj). Each of those has its own A and B, so an adapter has the tensors that PEFT expects. The base weight W is
frozen; it may be quantized, since only products with it are computed.

The embeddings of new tokens can be trained, too (`trainable_tokens`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.config import did_you_mean
from whimbrel.distributed.state import copy_full_, full_tensor
from whimbrel.models.config import GPTConfig
from whimbrel.models.families import config_to_hf, tensor_mappings
from whimbrel.models.gpt import GPT
from whimbrel.models.trainable_tokens import TrainableTokensEmbedding, TrainableTokensLinear

__all__ = [
    "LoraAdapter",
    "LoraConfig",
    "LoraLinear",
    "LoraTarget",
    "apply_lora",
    "cache_gains",
    "find_lora_config",
    "initialize_lora",
    "lora_adapters",
    "lora_disabled",
    "lora_linears",
    "lora_parameters",
    "lora_targets",
    "merge_lora",
    "remove_lora",
    "token_modules",
    "trainable_tokens",
]

NOT_SUPPORTED = ("lm_head", "embed_tokens", "wte", "wpe")
"""Modules that PEFT supports and this module does not: their weights are also used outside their forward pass."""
NORM_CHUNK = 2**24
"""Elements of a weight that DoRA dequantizes at a time to compute norms."""
EMBEDDING, HEAD = "transformer.wte", "lm_head"
TokenModule = TrainableTokensEmbedding | TrainableTokensLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters: rank, scaling and target modules."""

    rank: int = 16
    """Rank of the adapter matrices A and B."""
    alpha: float = 32.0
    """Adapter outputs are scaled by `alpha / rank`."""
    dropout: float = 0.0
    """Dropout on the adapter inputs during training."""
    use_rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (rank-stabilized LoRA)."""
    use_dora: bool = False
    """Train the magnitude of each weight row separately from its direction (weight-decomposed LoRA, DoRA)."""
    modules: tuple[str, ...] | None = None
    """Target modules, by their Hugging Face names (q_proj) or their names in a GPT (c_attn); a suffix of the full
    name is enough. Default: all linear layers except the head."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"expected lora.rank >= 1, got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"expected a positive lora.alpha, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"expected lora.dropout from 0 to below 1, got {self.dropout}")
        if self.modules is not None and not self.modules:
            raise ConfigError(
                "expected at least one name in lora.modules, got none: omit it to train adapters for all modules"
            )

    def scaling(self, rank: int, alpha: float) -> float:
        """The factor of an update of this rank and alpha."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


# Targets: the Hugging Face modules that the linear layers of a GPT consist of


class LoraTarget(NamedTuple):
    """A Hugging Face module: rows `start` to `stop` of a linear layer of a GPT."""

    module: str
    """Its name in the Hugging Face model: model.layers.0.self_attn.q_proj."""
    linear: str
    """The name of the linear layer: transformer.h.0.attn.c_attn."""
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The last part of the name: q_proj."""
        return self.module.rpartition(".")[2]


def lora_targets(config: GPTConfig) -> list[LoraTarget]:
    """All modules that can have an adapter: the linear layers except the head."""
    with torch.device("meta"):
        linears = {name: m for name, m in GPT(config).named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    targets = []
    for mapping in tensor_mappings(config_to_hf(config)["model_type"], config):
        linear, _, kind = mapping.name.rpartition(".")
        if kind == "weight" and linear in linears:
            start, stop, _ = mapping.rows.indices(linears[linear].out_features)
            targets.append(LoraTarget(mapping.hf_name.rpartition(".")[0], linear, start, stop))
    return targets


def select_targets(config: GPTConfig, modules: tuple[str, ...] | None) -> list[LoraTarget]:
    """The targets whose name is, or ends with, one of `modules`; raises ConfigError for a name without any."""
    targets = lora_targets(config)
    if modules is None:
        return targets
    for module in modules:
        if not any(_matches(target, module) for target in targets):
            names = sorted({target.name for target in targets})
            if module.rpartition(".")[2] in NOT_SUPPORTED:
                raise ConfigError(
                    f"lora.modules: expected linear layers of the blocks ({', '.join(names)}), got '{module}': "
                    "adapters of embeddings and the head are not supported"
                )
            raise ConfigError(f"lora.modules: this model has no module '{module}'{did_you_mean(module, names)}")
    return [target for target in targets if any(_matches(target, module) for module in modules)]


def _matches(target: LoraTarget, module: str) -> bool:
    return any(name == module or name.endswith(f".{module}") for name in (target.module, target.linear))


# Layers


class LoraAdapter(nn.Module):
    """The parameters of the adapter of one Hugging Face module, for rows `start` to `stop` of a linear layer."""

    def __init__(self, target: LoraTarget, weight: Tensor, config: LoraConfig, rank: int, alpha: float, dtype: Any):
        super().__init__()
        self.start, self.stop, self.rank, self.alpha = target.start, target.stop, rank, alpha
        self.scaling = config.scaling(rank, alpha)
        options: Any = {"dtype": dtype, "device": weight.device}
        rows, columns = target.stop - target.start, weight.shape[1]
        self.lora_A = nn.Parameter(torch.empty(rank, columns, **options))
        self.lora_B = nn.Parameter(torch.empty(rows, rank, **options))
        self.lora_magnitude_vector = nn.Parameter(torch.empty(rows, **options)) if config.use_dora else None

    def update(self) -> Tensor:
        """The update of the weight, s B A, in fp32."""
        return self.scaling * (self.lora_B.float() @ self.lora_A.float())


class LoraLinear(nn.Linear):
    """A linear layer with frozen weight and bias, and adapters; parameters of the layer keep their names.

    The attributes that the forward pass reads are equal in all layers of a model, so that blocks share compiled code.
    """

    def __init__(self, linear: nn.Linear, config: LoraConfig) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias: nn.Parameter | None = linear.bias  # type: ignore[assignment]
        self.fused_rows: Any = getattr(linear, "fused_rows", (linear.out_features,))
        self.config, self.dropout, self.use_dora = config, config.dropout, config.use_dora
        self.adapters = nn.ModuleDict()
        self.enabled = True
        self.gain: Tensor | None
        self.register_buffer("gain", None, persistent=False)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the layer with the updates of all adapters."""
        adapters = self._adapters()
        if not self.enabled:
            return F.linear(x, self.weight, self.bias)
        drops = self.training and self.dropout > 0
        if self.use_dora and drops:
            return self._forward_dora_with_dropout(x, adapters)
        if not self.use_dora:
            return _add_product(F.linear(x, self.weight, self.bias), self._down(x, adapters, drops), self._up(adapters))
        y = _add_product(F.linear(x, self.weight), self._down(x, adapters, drops), self._up(adapters))
        gain = self.gain
        if gain is None or torch.is_grad_enabled():
            gain = self.gains()
        y = (y * gain).to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _adapters(self) -> list[LoraAdapter]:
        return [cast(LoraAdapter, adapter) for adapter in self.adapters.values()]

    def _down(self, x: Tensor, adapters: list[LoraAdapter], drops: bool) -> Tensor:
        """`A x` of all adapters, concatenated: one matmul, except with dropout, which each module draws separately."""
        x = _cast(x, adapters[0].lora_A)
        if drops:
            return torch.cat([F.linear(F.dropout(x, self.dropout), adapter.lora_A) for adapter in adapters], dim=-1)
        matrices: list[Tensor] = [adapter.lora_A for adapter in adapters]
        return F.linear(x, matrices[0] if len(matrices) == 1 else torch.cat(matrices))

    def _up(self, adapters: list[LoraAdapter]) -> Tensor:
        """`s B` of all adapters as one block-diagonal matrix, with zero rows for modules that have none.

        The products with its zeros cost less than one more kernel per module: the ranks are small.
        """
        blocks, end = [], 0
        for adapter in adapters:
            if adapter.start > end:
                blocks.append(adapter.lora_B.new_zeros(adapter.start - end, 0))
            blocks.append(adapter.lora_B * adapter.scaling)
            end = adapter.stop
        if end < self.out_features:
            blocks.append(adapters[0].lora_B.new_zeros(self.out_features - end, 0))
        return blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)

    def _gain(self, adapter: LoraAdapter) -> Tensor:
        """DoRA: magnitude divided by the norm of each row, whose gradient is not computed."""
        return cast(Tensor, adapter.lora_magnitude_vector) / row_norms(self.weight, adapter)

    def gains(self) -> Tensor:
        """DoRA: the factor of each row, 1 for modules without adapter."""
        adapters = self._adapters()
        return self._fill_rows(adapters, [self._gain(adapter) for adapter in adapters], 1.0)

    def _fill_rows(self, adapters: list[LoraAdapter], parts: list[Tensor], fill: float) -> Tensor:
        """Parts (..., rows of an adapter) concatenated along rows, with `fill` for modules without adapter."""
        pieces, end = [], 0
        for adapter, part in zip(adapters, parts, strict=True):
            if adapter.start > end:
                pieces.append(part.new_full((*part.shape[:-1], adapter.start - end), fill))
            pieces.append(part)
            end = adapter.stop
        if end < self.out_features:
            pieces.append(parts[0].new_full((*parts[0].shape[:-1], self.out_features - end), fill))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def _forward_dora_with_dropout(self, x: Tensor, adapters: list[LoraAdapter]) -> Tensor:
        """As in PEFT, the part of the base weight that DoRA adds sees the inputs after dropout, too."""
        y, parts = F.linear(x, self.weight, self.bias), []
        x = _cast(x, adapters[0].lora_A)
        for adapter in adapters:
            gain, dropped = self._gain(adapter), F.dropout(x, self.dropout)
            base = F.linear(dropped.to(y.dtype), self.weight[adapter.start : adapter.stop])
            update = F.linear(F.linear(dropped, adapter.lora_A), adapter.lora_B * adapter.scaling)
            parts.append((gain - 1) * base + gain * update)
        return (y + self._fill_rows(adapters, parts, 0.0)).to(y.dtype)

    def extra_repr(self) -> str:
        """Sizes, and the ranks of the adapters."""
        ranks = ", ".join(f"{name}: {adapter.rank}" for name, adapter in self.adapters.items())
        return f"{super().extra_repr()}, ranks=({ranks})"

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The dense weight with the updates of all adapters, computed in fp32, in the dtype of the weight."""
        merged = _dense(self.weight).clone()
        for adapter in self._adapters():
            rows = merged[adapter.start : adapter.stop]
            update = rows.float() + adapter.update()
            if adapter.lora_magnitude_vector is not None:
                update *= self._gain(adapter).float()[:, None]
            rows.copy_(update)
        return merged


def row_norms(weight: Tensor, adapter: LoraAdapter, *, initial: bool = False) -> Tensor:
    """The norms of the rows of `W + s B A` or, if `initial`, of W, in fp32.

    A quantized weight is dequantized some rows at a time.
    """
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        step = max(1, NORM_CHUNK // weight.shape[1])
        norms = []
        for start in range(adapter.start, adapter.stop, step):
            stop = min(start + step, adapter.stop)
            rows = _dense(weight[start:stop]).float()
            if not initial:
                up = adapter.lora_B[start - adapter.start : stop - adapter.start]
                rows = rows + adapter.scaling * (up.float() @ adapter.lora_A.float())
            norms.append(torch.linalg.vector_norm(rows, dim=1))
        return torch.cat(norms)


def _dense(weight: Any) -> Tensor:
    """A weight or some of its rows, dequantized."""
    dense: Tensor = weight.dequantize() if hasattr(weight, "codes") else weight
    return dense


def _cast(x: Tensor, parameter: Tensor) -> Tensor:
    """The input in the dtype of the adapter; autocast decides on the dtype of its products itself."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(parameter.dtype)


def _add_product(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`y + x @ weight.T` in the dtype of `y`, without another tensor of its size where dtypes permit that."""
    if y.dtype == x.dtype:
        return torch.addmm(y.flatten(0, -2), x.flatten(0, -2), weight.t()).view(y.shape)
    return (y + F.linear(x, weight)).to(y.dtype)


# Models


def apply_lora(
    model: GPT,
    config: LoraConfig,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    ranks: Mapping[str, tuple[int, float]] | None = None,
    tokens: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Add adapters in place and freeze all other parameters. The model computes the same function as before.

    Adapters are created on the device of the weights, in `dtype` regardless of the weights' dtype. If that is the meta
    device, call `initialize_lora` after the weights are allocated and loaded. `ranks` contains the rank and alpha of
    modules (by full Hugging Face name) for which they differ from `config`. `tokens` contains, by module
    (`token_modules`), the ids of tokens whose rows in the embedding or the head are trained; a tied head shares the
    rows of the embedding.
    """
    if any(True for _ in lora_linears(model)):
        raise ConfigError("expected a model without adapters, got one with adapters: merge_lora or remove_lora first")
    selected = select_targets(model.config, config.modules)
    for name in {target.linear: None for target in selected}:
        linear = model.get_submodule(name)
        if type(linear) is not nn.Linear:
            kind = type(linear).__name__
            raise ConfigError(f"LoRA: expected {name} to be nn.Linear, got {kind}: train without fp8 and QAT recipes")
    for parameter in model.parameters():
        parameter.requires_grad = False
    for target in selected:
        linear = cast(nn.Linear, model.get_submodule(target.linear))
        if not isinstance(linear, LoraLinear):
            linear = LoraLinear(linear, config)
            model.set_submodule(target.linear, linear)
        rank, alpha = (ranks or {}).get(target.module, (config.rank, config.alpha))
        linear.adapters[target.name] = LoraAdapter(target, linear.weight, config, rank, alpha, dtype)
    _add_trainable_tokens(model, tokens or {}, dtype)
    if not next(lora_parameters(model))[1].is_meta:
        initialize_lora(model, seed)


def token_modules(config: GPTConfig) -> tuple[str, ...]:
    """The modules of a GPT whose weights have a row for each token: the embedding, and the head unless it is tied."""
    return (EMBEDDING,) if config.tied_head else (EMBEDDING, HEAD)


def _add_trainable_tokens(model: GPT, tokens: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
    for name, ids in tokens.items():
        if name not in token_modules(model.config):
            raise ConfigError(f"trainable tokens: expected one of {token_modules(model.config)}, got '{name}'")
        module = TrainableTokensEmbedding if name == EMBEDDING else TrainableTokensLinear
        model.set_submodule(name, module(cast(Any, model.get_submodule(name)), ids, dtype))
    embedding = model.token_embedding
    if model.config.tied_head and isinstance(embedding, TrainableTokensEmbedding):
        model.lm_head = TrainableTokensLinear(model.lm_head, tied=embedding)


def trainable_tokens(model: nn.Module) -> dict[str, TokenModule]:
    """The modules with trained rows, by name; without a tied head."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TrainableTokensEmbedding)
        or (isinstance(module, TrainableTokensLinear) and not module.is_tied)
    }


@torch.no_grad()
def initialize_lora(model: GPT, seed: int = 0) -> None:
    """Initialize adapters as PEFT does: A uniform, B zero, DoRA magnitudes the norms of the rows of the weights.

    Trainable tokens start with the rows of the weights. Values depend only on `seed`, not on the device, nor on how
    parameters are sharded. Collective if they are.
    """
    generator = torch.Generator().manual_seed(seed)
    for linear, adapter in lora_adapters(model):
        values = torch.empty(adapter.lora_A.shape)
        nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        copy_full_(adapter.lora_A.detach(), values)
        adapter.lora_B.zero_()
        if adapter.lora_magnitude_vector is not None and not linear.weight.is_meta:
            norms = row_norms(full_tensor(linear.weight.detach()), adapter, initial=True)
            copy_full_(adapter.lora_magnitude_vector.detach(), norms)
    for module in trainable_tokens(model).values():
        module.reset_rows()


def lora_linears(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The linear layers with adapters, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))


def lora_adapters(model: nn.Module) -> Iterator[tuple[LoraLinear, LoraAdapter]]:
    """All adapters with their layers, in the order of the model."""
    for _, linear in lora_linears(model):
        for adapter in linear.adapters.values():
            yield linear, cast(LoraAdapter, adapter)


def lora_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the adapters and of trainable tokens, by name. No other parameters are trained."""
    for name, linear in lora_linears(model):
        yield from linear.adapters.named_parameters(f"{name}.adapters")
    for name, module in trainable_tokens(model).items():
        yield f"{name}.trainable_tokens", module.trainable_tokens


def find_lora_config(model: nn.Module) -> LoraConfig | None:
    """The config that the adapters were created with; None for a model without adapters."""
    return next((linear.config for _, linear in lora_linears(model)), None)


@contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """Context in which the model runs without its adapters, as the reference model of DPO."""
    modules = [*(linear for _, linear in lora_linears(model)), *trainable_tokens(model).values()]
    enabled = [module for module in modules if module.enabled]
    try:
        for module in enabled:
            module.enabled = False
        yield
    finally:
        for module in enabled:
            module.enabled = True


@torch.no_grad()
def cache_gains(model: nn.Module) -> None:
    """DoRA: compute the row norms once for inference, for which quantized weights are dequantized.

    The forward pass uses the result only without gradients. Call it again when the adapters change.
    """
    for _, linear in lora_linears(model):
        linear.gain = linear.gains() if linear.use_dora else None


@torch.no_grad()
def merge_lora(model: GPT, *, requantize: bool = False) -> None:
    """Add the updates to the weights in place, and remove the adapters.

    A quantized weight becomes dense, or with `requantize` is rounded to its format again, which changes the outputs.
    All parameters that are not quantized require gradients again.
    """
    for module in (*(linear for _, linear in lora_linears(model)), *trainable_tokens(model).values()):
        merged = module.merged_weight()
        if hasattr(module.weight, "codes") and not requantize:
            module.weight = nn.Parameter(merged)
        else:
            module.weight.copy_(merged)
    model.tie_head()
    remove_lora(model)


def remove_lora(model: GPT) -> None:
    """Remove the adapters, which leaves the base model. Parameters that are not quantized require gradients again."""
    for name, lora in list(lora_linears(model)):
        linear = nn.Linear(lora.in_features, lora.out_features, bias=False, device="meta")
        linear.weight = lora.weight
        linear.bias = lora.bias  # type: ignore[assignment]
        linear.fused_rows = lora.fused_rows
        linear.train(lora.training)
        model.set_submodule(name, linear)
    if isinstance(model.token_embedding, TrainableTokensEmbedding):
        trained = model.token_embedding
        embedding = nn.Embedding(trained.num_embeddings, trained.embedding_dim, device="meta")
        embedding.weight = trained.weight
        model.set_submodule(EMBEDDING, embedding.train(model.training))
    if isinstance(model.lm_head, TrainableTokensLinear):
        head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False, device="meta")
        head.weight = model.lm_head.weight
        model.lm_head = head.train(model.training)
    for parameter in model.parameters():
        parameter.requires_grad_(not hasattr(parameter, "codes"))
