"""Several LoRA adapters of one base model in one batch: each sequence has its own adapter, or none.

Each linear layer stacks the A matrices of all adapters vertically and their B matrices horizontally. The batch is
multiplied by all of them, and in between, the columns that belong to other adapters are masked:

    y = W x + B (mask * A x)      mask: 1 for the ranks of the sequence's adapter, else 0

So a layer runs two extra matmuls for any mix of adapters, without gathering weights per sequence. Shapes never change,
as CUDA graphs and compiled code require. The cost grows with the sum of the ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.model_io import Adapter, ModelSource, check_tokenizer, open_model, read_adapter
from whimbrel.model_io.adapter import AdapterModule, adapter_vocab_size, check_base
from whimbrel.model_io.locate import ModelLocation, model_path
from whimbrel.models import GPT
from whimbrel.models.lora import LoraAdapter, LoraConfig, find_lora_config, row_norms
from whimbrel.tokenization import Tokenizer

__all__ = ["AdapterSelection", "MultiLoraLinear", "open_adapter", "with_adapters"]


LayerModules = Sequence[Sequence[tuple[LoraConfig, AdapterModule]]]
"""The modules of each adapter in one linear layer, with the config of the adapter."""


class AdapterSelection:
    """The adapter of each sequence in the current batch: 0 for none, or 1, 2, ... in the order of `names`."""

    def __init__(self, names: Sequence[str], max_batch: int, device: torch.device) -> None:
        self.names = tuple(names)
        self.indices = torch.zeros(max_batch, dtype=torch.long, device=device)
        """Read by the layers. Updated in place, because CUDA graphs read it."""
        self._current: list[int] = [0] * max_batch

    def index(self, name: str | None) -> int | None:
        """The index of an adapter: 0 for the base model, None if the name is unknown."""
        if name is None:
            return 0
        return self.names.index(name) + 1 if name in self.names else None

    def set(self, indices: Sequence[int]) -> None:
        """Set the adapters of the first `len(indices)` sequences."""
        count = len(indices)
        if self._current[:count] != list(indices):
            self._current[:count] = indices
            self.indices[:count].copy_(torch.tensor(indices))


class MultiLoraLinear(nn.Linear):
    """A linear layer with the updates of several adapters, for inputs of shape (sequences, tokens, features)."""

    down: Tensor
    """The A matrices: (sum of ranks, input features)."""
    up: Tensor
    """The B matrices, scaled: (output features, sum of ranks)."""
    mask: Tensor
    """(adapters + 1, sum of ranks): 1 for the ranks of each adapter."""
    gain: Tensor | None
    """(adapters + 1, output features): DoRA's magnitude / norm, if any adapter of the layer uses DoRA."""

    def __init__(
        self, linear: nn.Linear, modules: LayerModules, selection: AdapterSelection, dtype: torch.dtype
    ) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias: nn.Parameter | None = linear.bias  # type: ignore[assignment]
        self.selection = selection
        down, up, mask, gain = _stack(linear, modules)
        for name, tensor in (("down", down), ("up", up), ("mask", mask), ("gain", gain)):
            buffer = None if tensor is None else tensor.to(linear.weight.device, dtype)
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Apply the layer with the adapter of each sequence."""
        indices_B = self.selection.indices[: x_BTC.size(0)]
        y = F.linear(x_BTC, self.weight, self.bias if self.gain is None else None)
        hidden_BTR = F.linear(x_BTC, self.down) * self.mask[indices_B][:, None]
        y = y + F.linear(hidden_BTR, self.up)
        if self.gain is not None:
            y = y * self.gain[indices_B][:, None]
            y = y if self.bias is None else y + self.bias
        return y


@torch.no_grad()
def _stack(linear: nn.Linear, modules: LayerModules) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The tensors of `MultiLoraLinear`, in fp32."""
    device = linear.weight.device
    ranks = [sum(len(module.down) for _, module in each) for each in modules]
    down, up = torch.empty(sum(ranks), linear.in_features), torch.zeros(linear.out_features, sum(ranks))
    mask, gain = torch.zeros(len(modules) + 1, sum(ranks)), torch.ones(len(modules) + 1, linear.out_features)
    start, has_gain = 0, False
    for index, each in enumerate(modules, 1):
        mask[index, start : start + ranks[index - 1]] = 1
        for config, (target, a, b, magnitude, alpha, scaling) in each:
            rank, rows = len(a), slice(target.start, target.stop)
            down[start : start + rank] = a
            up[rows, start : start + rank] = scaling * b.float()
            start += rank
            if magnitude is not None:
                adapter = LoraAdapter(target, linear.weight, config, rank, alpha, torch.float32)
                adapter.lora_A.copy_(a)
                adapter.lora_B.copy_(b)
                norms = row_norms(linear.weight, adapter)
                gain[index, rows], has_gain = (magnitude.to(device) / norms).cpu(), True
    return down, up, mask, gain if has_gain else None


def with_adapters(model: GPT, adapters: Mapping[str, Adapter], max_batch: int) -> tuple[GPT, AdapterSelection]:
    """A copy of `model` that shares its weights and has several adapters, and the selection among them."""
    if find_lora_config(model) is not None:
        raise ConfigError("adapters: expected a base model without adapters, got one with adapters: merge them first")
    weight = model.token_embedding.weight
    selection = AdapterSelection(list(adapters), max_batch, weight.device)
    by_linear: dict[str, list[list[tuple[LoraConfig, AdapterModule]]]] = {}
    for index, (name, adapter) in enumerate(adapters.items()):
        if adapter.tokens or adapter.embeddings:
            raise _own_embeddings(name)
        for module in adapter.modules:
            each = by_linear.setdefault(module.target.linear, [[] for _ in adapters])
            each[index].append((adapter.config, module))
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    adapted = copy.deepcopy(model, cast("dict[int, Any]", shared))
    for name, modules in by_linear.items():
        linear = model.get_submodule(name)
        if type(linear) is not nn.Linear:
            kind = type(linear).__name__
            raise ConfigError(f"adapters: expected {name} to be nn.Linear, got {kind}: use a dense or quantized model")
        adapted.set_submodule(name, MultiLoraLinear(linear, modules, selection, weight.dtype))
    return adapted, selection


def open_adapter(
    name: str, path: str | os.PathLike[str], model: GPT, base: ModelLocation | None, tokenizer: Tokenizer | None
) -> tuple[Adapter, ModelSource | None]:
    """Read an adapter of `model`, which was loaded from `base`, and open its tokenizer and chat template.

    Adapters without a tokenizer use `tokenizer`, the model's. Without `base`, only the adapter itself is read.
    """
    directory = model_path(path)
    if adapter_vocab_size(directory):
        raise _own_embeddings(name)
    adapter = read_adapter(directory, model.config)
    check_base(model, directory, "the model" if base is None else base.directory)
    if base is None:
        return adapter, None
    has_tokenizer = (directory / "tokenizer.json").is_file()
    source = open_model(path, None if has_tokenizer else tokenizer, base=base)
    try:
        check_tokenizer(source.tokenizer, model.config)
    except ConfigError as error:
        raise ConfigError(f"adapter {name}: {error}, or serve it alone") from error
    return adapter, source


def _own_embeddings(name: str) -> ConfigError:
    return ConfigError(
        f"adapter {name} has trained token embeddings, which cannot be combined with other adapters: load it as the "
        "model (whimbrel serve PATH), or merge it (whimbrel finalize PATH OUT --merge)"
    )
