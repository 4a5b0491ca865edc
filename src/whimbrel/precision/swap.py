"""Exchanging weights in place: a parameter stays the object that it is, and what is behind it becomes another."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from whimbrel.base.errors import PrecisionError
from whimbrel.precision.formats import WeightFormat, weight_format
from whimbrel.precision.linears import HEAD, Choice, choose_linears, token_embedding
from whimbrel.precision.weight import QuantizedWeight

__all__ = ["dequantize_", "keep_kind", "load_state", "materialise_", "quantize_", "swap_on_conversion"]


@contextlib.contextmanager
def swap_on_conversion() -> Iterator[None]:
    """Inside, torch swaps parameters when a module is converted or loaded; afterwards as before, also on error.

    Quantised weights keep their kind without it. Inside it a plain module that is given a quantised checkpoint with
    `assign=True` stays plain too.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    except RuntimeError as error:
        if (reason := _hindrance(error)) is None:
            raise
        named = re.search(r"""parameter named "(.+?)"|swap (\S+)""", str(error))
        name = "a weight" if named is None else f"the weight {named[1] or named[2]}"
        raise PrecisionError(f"{name} cannot be exchanged: {reason}") from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def load_state(model: nn.Module, state: Mapping[str, Any], *, assign: bool = False, strict: bool = True) -> None:
    """`model.load_state_dict`, by swapping: parameters stay the objects they are, also with `assign`.

    A plain weight that arrives at a quantised one is quantised, a quantised one that arrives at a plain one becomes
    plain, and `state` is left alone: torch's own would leave a mark in its metadata.
    """
    own = OrderedDict(state)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        own._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    with swap_on_conversion():
        model.load_state_dict(own, strict=strict, assign=assign)


@torch.no_grad()
def quantize_(
    model: nn.Module,
    form: str | WeightFormat,
    *,
    skip: Iterable[str] = HEAD,
    only: Collection[str] | None = None,
    trainable: bool = False,
    embeddings: bool = False,
) -> Choice:
    """Store the weights of linear layers in a format, in place; says which were taken and why others were not.

    Whoever holds one of the parameters (optimizer, mean of weights, tied module) holds the quantised one afterwards.
    `trainable` is for formats whose weights an optimizer is to move, by rounding up or down by chance;
    what was frozen stays frozen. `only` names, in full, the layers that may be taken. `embeddings` also takes the token
    embedding, and with it a head that is tied to it; an untied head is taken where `skip` does not name it.
    """
    form = weight_format(form)
    if trainable and form.codes != "int8":
        raise PrecisionError(f"weights of {form.name} cannot be trained: use int8, or a QAT recipe")
    if any(isinstance(parameter, QuantizedWeight) for parameter in model.parameters()):
        raise PrecisionError(
            f"this {type(model).__name__} is quantised already: load it plain, or dequantize_ it first"
        )
    choice = choose_linears(
        model, f"weights = {form.name}", lambda linear: form.unfit(linear.weight.shape), skip=skip, only=only,
        tied=embeddings,
    )  # fmt: skip
    layers: dict[str, nn.Linear | nn.Embedding] = dict(choice.taken)
    if embeddings:
        layers["the token embedding"] = table = token_embedding(model)
        if (reason := form.unfit(table.weight.shape)) is not None:
            raise PrecisionError(f"the token embedding cannot be {form.name}: {reason}")
    for name, layer in layers.items():
        _check_free(layer.weight, name)
    for name, layer in layers.items():
        if not isinstance(layer.weight, QuantizedWeight):  # else it is that of another layer too
            free = layer.weight.requires_grad
            made: Any = _parameter(QuantizedWeight.quantize(layer.weight, form), trainable and free)
            made.frozen = not free
            _swap(layer.weight, name, made)
    for module in model.modules():
        if any(isinstance(weight, QuantizedWeight) for weight in module.parameters(recurse=False)):
            keep_kind(module)
    return choice


@torch.no_grad()
def dequantize_(model: nn.Module) -> None:
    """Plain weights in place of quantised ones, with the numbers that these stand for.

    They can be trained again, but for those that were frozen before they were quantised.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            _swap(parameter, name, _parameter(parameter.dequantize(), not parameter.frozen))


@torch.no_grad()
def materialise_(model: nn.Module, device: torch.device | str) -> None:
    """Give a model that is on the meta device memory, its numbers unset; what modules share gets it once, and stays
    shared, which is not so with torch's `to_empty`.
    """
    for name, parameter in model.named_parameters():
        _swap(parameter, name, _parameter(torch.empty_like(parameter, device=device), parameter.requires_grad))
    for name, buffer in model.named_buffers():
        _swap(buffer, name, torch.empty_like(buffer, device=device))


def _check_free(parameter: Tensor, name: str) -> None:
    """Refuse a weight that cannot be exchanged before any is: there and back again, nothing has changed."""
    stand_in = _parameter(torch.empty(0), requires_grad=False)
    for _ in range(2):
        _swap(parameter, name, stand_in)


def _parameter(weight: Tensor, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=requires_grad)


def _swap(tensor: Tensor, name: str, other: Tensor) -> None:
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        reason = _hindrance(error) or str(error)
        raise PrecisionError(f"the weight of {name} cannot be exchanged: {reason}") from error


def _hindrance(error: BaseException | None) -> str | None:
    """Why torch would not swap a tensor, in our words; None where that was not it."""
    while error is not None:
        text = str(error)
        if "weakref" in text:
            return "something holds a weak reference to it; let go of that first"
        if "use_count" in text:
            return "a graph or another tensor still refers to it; let go of outputs and losses first"
        error = error.__cause__ or error.__context__
    return None


def keep_kind(module: nn.Module) -> None:
    """Keep the weights of a layer quantized through `load_state_dict(..., assign=True)`.

    Called automatically when a quantized weight is set on a layer.
    """
    hooks = module._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _keep_kind for hook in hooks):
        module.register_load_state_dict_pre_hook(_keep_kind)


def _keep_kind_of_registered(module: nn.Module, _name: str, parameter: Tensor | None) -> None:
    """Called by torch for each parameter that any module registers."""
    if isinstance(parameter, QuantizedWeight):
        keep_kind(module)


register_module_parameter_registration_hook(_keep_kind_of_registered)


@torch.no_grad()
def _keep_kind(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Quantise what arrives plain, before torch looks at it: with `assign=True` it would take the place of ours.

    It is put behind our own parameter, which torch then assigns to the place where it is already: whoever holds it,
    a tied layer or an optimizer, still does. The dict is torch's own copy, so whoever called keeps theirs. Without
    `assign` the numbers are copied into ours, which quantises them.
    """
    held: Mapping[str, Any] = module._parameters  # of any kind of tensor
    for name, own in held.items():
        key = prefix + name
        arriving = state_dict.get(key)
        if not isinstance(own, QuantizedWeight) or not isinstance(arriving, Tensor) or arriving.shape != own.shape:
            continue
        if not arriving.is_floating_point():
            raise PrecisionError(
                f"'{key}' arrives as {arriving.dtype}: give a checkpoint with weights of a float dtype"
            )
        if metadata.get("assign_to_params_buffers"):
            made = own.module_load(arriving, assign=True)  # type: ignore[no-untyped-call]
            if made is not own:
                _swap(own, key, _parameter(made, own.requires_grad))
            state_dict[key] = own
