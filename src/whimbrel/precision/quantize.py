"""Quantize the weights of a model in place by swapping tensors, so that parameters keep their identity.

References to a parameter (optimizer, EMA, tied layers) stay valid, because `torch.utils.swap_tensors` exchanges the
contents of two tensor objects instead of replacing one.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from whimbrel.base.errors import PrecisionError
from whimbrel.precision.formats import WeightFormat, find_format
from whimbrel.precision.weight import QuantizedWeight

__all__ = [
    "DEFAULT_SKIP",
    "LayerSelection",
    "dequantize_",
    "keep_quantized",
    "load_state",
    "materialize_",
    "quantize_",
    "select_linears",
    "swap_on_conversion",
]

DEFAULT_SKIP = ("lm_head",)
"""The output layer is not quantized unless requested: no later layer can compensate for its error."""
EXCLUDED = "excluded by name"
COMPUTED_WEIGHT = (
    "its weight is computed from other parameters (a parametrization, weight norm, spectral norm or pruning): remove "
    "that first"
)
"""Why a layer without a `weight` parameter is skipped: the computed weight would overwrite a replacement."""

logger = logging.getLogger(__name__)


# Selecting layers


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """The linear layers that a recipe applies to, by name, and the reason for each that is skipped."""

    selected: dict[str, nn.Linear]
    skipped: dict[str, str]


def select_linears(
    model: nn.Module,
    label: str,
    unsupported_reason: Callable[[nn.Linear], str | None],
    *,
    skip: Iterable[str] = DEFAULT_SKIP,
    only: Collection[str] | None = None,
    embeddings: bool = False,
) -> LayerSelection:
    """Select linear layers; logs each skipped layer, and warns about unsupported ones.

    `label` names the recipe in logs. `skip` matches the end of layer names; "lm_head" also matches the output
    embeddings of a Hugging Face model. `only` lists full names. A layer whose weight is tied to an embedding is never
    selected, and not listed as skipped either if the caller quantizes the `embeddings`. Raises if no layer is left.
    """
    output_embeddings = getattr(model, "get_output_embeddings", None)
    head = None if output_embeddings is None else output_embeddings()
    embedding_ids = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    suffixes = tuple(skip)
    selected, skipped, unsupported = {}, {}, []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if "weight" not in module._parameters:
            skipped[name] = COMPUTED_WEIGHT
            unsupported.append(name)
        elif embeddings and id(module.weight) in embedding_ids:
            continue  # quantized with the embedding
        elif id(module.weight) in embedding_ids:
            skipped[name] = "its weight is tied to an embedding"
        elif any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes) or (
            module is head and DEFAULT_SKIP[0] in suffixes
        ):
            skipped[name] = EXCLUDED
        elif only is not None and name not in only:
            skipped[name] = "not trained with quantization"
        elif (reason := unsupported_reason(module)) is not None:
            skipped[name] = reason
            unsupported.append(name)
        else:
            selected[name] = module
    for name, reason in skipped.items():
        logger.log(logging.DEBUG if reason == EXCLUDED else logging.INFO, "%s skips %s: %s", label, name, reason)
    if not selected:
        reasons = (
            "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3]) or "it has no linear layer"
        )
        raise PrecisionError(f"{label}: no supported linear layer in {type(model).__name__} ({reasons})")
    if unsupported:
        first, count, total = unsupported[0], len(unsupported), len(unsupported) + len(selected)
        logger.warning("%s skips %d of %d linear layers, first %s: %s", label, count, total, first, skipped[first])
    return LayerSelection(selected, skipped)


def _token_embedding(model: nn.Module) -> nn.Embedding:
    input_embeddings = getattr(model, "get_input_embeddings", None)
    table = getattr(model, "token_embedding", None) if input_embeddings is None else input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise PrecisionError(
            f"cannot find the token embedding of {type(model).__name__}: implement get_input_embeddings()"
        )
    return table


# Quantizing, dequantizing, allocating


@torch.no_grad()
def quantize_(
    model: nn.Module,
    weight_format: str | WeightFormat,
    *,
    skip: Iterable[str] = DEFAULT_SKIP,
    only: Collection[str] | None = None,
    trainable: bool = False,
    embeddings: bool = False,
) -> LayerSelection:
    """Quantize the weights of linear layers in place; returns the selected layers, and why others were skipped.

    `trainable` (int8 only) is for weights that an optimizer updates with stochastic rounding; frozen weights stay
    frozen. `only` lists the full names of layers to consider. `embeddings` also quantizes the token embedding and an
    output layer tied to it; an untied output layer is quantized unless it is in `skip`.
    """
    weight_format = find_format(weight_format)
    if trainable and weight_format.codes != "int8":
        raise PrecisionError(f"{weight_format.name} weights cannot be trained: use int8, or a QAT recipe")
    if any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters()):
        raise PrecisionError(
            f"{type(model).__name__} is already quantized: load it unquantized, or dequantize_ it first"
        )
    selection = select_linears(
        model,
        f"{'weight_dtype' if trainable else 'quantize'} = {weight_format.name}",
        lambda linear: weight_format.unsupported_reason(linear.weight.shape),
        skip=skip,
        only=only,
        embeddings=embeddings,
    )
    layers: dict[str, nn.Linear | nn.Embedding] = dict(selection.selected)
    if embeddings:
        layers["the token embedding"] = table = _token_embedding(model)
        if (reason := weight_format.unsupported_reason(table.weight.shape)) is not None:
            raise PrecisionError(f"the token embedding cannot be quantized: {reason}")
    for name, layer in layers.items():  # swap each weight with a dummy and back, to raise before any is modified
        dummy = _parameter(torch.empty(0), requires_grad=False)
        for _ in range(2):
            _swap(layer.weight, name, dummy)
    for name, layer in layers.items():
        if not isinstance(layer.weight, QuantizedWeight):  # else tied to a layer that is already quantized
            requires_grad = layer.weight.requires_grad
            weight: Any = _parameter(QuantizedWeight.quantize(layer.weight, weight_format), trainable and requires_grad)
            weight.frozen = not requires_grad
            _swap(layer.weight, name, weight)
    for module in model.modules():
        if any(isinstance(weight, QuantizedWeight) for weight in module.parameters(recurse=False)):
            keep_quantized(module)
    return selection


@torch.no_grad()
def dequantize_(model: nn.Module) -> None:
    """Replace quantized weights with dense ones, in place.

    They require gradients again, except for those that were frozen before they were quantized.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            _swap(parameter, name, _parameter(parameter.dequantize(), not parameter.frozen))


@torch.no_grad()
def materialize_(model: nn.Module, device: torch.device | str) -> None:
    """Allocate uninitialized memory for a model on the meta device; unlike `to_empty`, shared tensors stay shared."""
    for name, parameter in model.named_parameters():
        _swap(parameter, name, _parameter(torch.empty_like(parameter, device=device), parameter.requires_grad))
    for name, buffer in model.named_buffers():
        _swap(buffer, name, torch.empty_like(buffer, device=device))


def _parameter(weight: Tensor, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=requires_grad)


def _swap(tensor: Tensor, name: str, other: Tensor) -> None:
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        reason = _swap_failure(error) or str(error)
        raise PrecisionError(f"cannot swap the weight of {name}: {reason}") from error


def _swap_failure(error: BaseException | None) -> str | None:
    """Why torch could not swap a tensor; None for other errors."""
    while error is not None:
        text = str(error)
        if "weakref" in text:
            return "there is a weak reference to it; delete that first"
        if "use_count" in text:
            return "an autograd graph or another tensor refers to it; delete outputs and losses first"
        error = error.__cause__ or error.__context__
    return None


# Converting and loading modules with quantized weights


@contextlib.contextmanager
def swap_on_conversion() -> Iterator[None]:
    """Context in which torch swaps parameters when a module is converted or loaded.

    Quantized weights stay quantized without it. With it, a dense module that loads a quantized checkpoint with
    `assign=True` stays dense, too.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    except RuntimeError as error:
        if (reason := _swap_failure(error)) is None:
            raise
        match = re.search(r"""parameter named "(.+?)"|swap (\S+)""", str(error))
        name = "a weight" if match is None else f"the weight {match[1] or match[2]}"
        raise PrecisionError(f"cannot swap {name}: {reason}") from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def load_state(model: nn.Module, state: Mapping[str, Any], *, assign: bool = False, strict: bool = True) -> None:
    """`model.load_state_dict` by swapping: parameters keep their identity, even with `assign`.

    Dense weights are quantized when loaded into quantized ones, and vice versa. Unlike torch's method, it does not
    modify the metadata of `state`.
    """
    state_copy = OrderedDict(state)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        state_copy._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    with swap_on_conversion():
        model.load_state_dict(state_copy, strict=strict, assign=assign)


def keep_quantized(module: nn.Module) -> None:
    """Keep the weights of a layer quantized through `load_state_dict(..., assign=True)`.

    Called automatically when a quantized weight is set on a layer.
    """
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _quantize_loaded for hook in hooks):
        module.register_load_state_dict_pre_hook(_quantize_loaded)


def _on_parameter_registration(module: nn.Module, _name: str, parameter: Tensor | None) -> None:
    if isinstance(parameter, QuantizedWeight):
        keep_quantized(module)


register_module_parameter_registration_hook(_on_parameter_registration)


@torch.no_grad()
def _quantize_loaded(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Quantize dense tensors before torch sees them: with `assign=True` they would replace the quantized weight.

    The result is swapped into the module's own parameter, which torch then assigns to itself, so references from tied
    layers and optimizers stay valid. `state_dict` is torch's copy, not the caller's. Without `assign`, values are
    copied into the parameter, which quantizes them.
    """
    parameters: Mapping[str, Any] = module._parameters
    for name, parameter in parameters.items():
        key = prefix + name
        loaded = state_dict.get(key)
        if (
            not isinstance(parameter, QuantizedWeight)
            or not isinstance(loaded, Tensor)
            or loaded.shape != parameter.shape
        ):
            continue
        if not loaded.is_floating_point():
            raise PrecisionError(f"'{key}': expected a checkpoint with a floating-point dtype, got {loaded.dtype}")
        if metadata.get("assign_to_params_buffers"):
            quantized = parameter.module_load(loaded, assign=True)  # type: ignore[no-untyped-call]
            if quantized is not parameter:
                _swap(parameter, key, _parameter(quantized, parameter.requires_grad))
            state_dict[key] = parameter
