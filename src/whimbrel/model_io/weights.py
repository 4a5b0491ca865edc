"""Stored tensors to parameters and back, one at a time: each is rows of a parameter, plain or as codes and scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError
from whimbrel.model_io.quantized import CODES, SCALES
from whimbrel.model_io.tensors import TensorFiles
from whimbrel.models.families import TensorMapping
from whimbrel.precision import QuantizedWeight, WeightFormat

__all__ = ["Stored", "fill", "match", "stored_dtype", "stored_plain", "tensors_at"]

PREFIXES = ("transformer.", "model.")
"""What older files leave off the names of everything but the head."""
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""How the names of tensors end that older files hold but that are no weights."""
CHUNK, CHUNKS = 2**18, 16
"""Numbers of a weight that are quantised at a time, or the sixteenth part of it: rows do not depend on each other, so
this bounds the memory that it takes.
"""


class Stored(NamedTuple):
    """A place, and the name of what a directory holds for it; `quantized`: as codes and scales."""

    place: TensorMapping
    name: str
    quantized: bool


def match(files: TensorFiles, wanted: Iterable[TensorMapping], form: WeightFormat | None) -> list[Stored]:
    """Which stored tensor goes where; a directory that lacks one or holds others is refused."""
    held, found, used = files.names, [], set()
    for place in wanted:
        spellings = [place.hf_name, *(place.hf_name.removeprefix(prefix) for prefix in PREFIXES)]
        name = next((name for name in spellings if name in held), None)
        coded = next((name for name in spellings if {name + CODES, name + SCALES} & held), None)
        if form is not None and coded is not None:
            found.append(Stored(place, coded, quantized=True))
            parts = {coded + CODES, coded + SCALES}
        else:
            found.append(Stored(place, name or place.hf_name, quantized=False))
            parts = {name or place.hf_name}
        for missing in sorted(parts - held):
            raise CheckpointError(f"{files.directory} lacks the tensor '{missing}' that its config.json calls for")
        used |= parts
    extra = sorted(name for name in held - used if not name.endswith((*CONSTANTS, "lm_head.weight")))
    if extra:
        raise CheckpointError(
            f"{files.directory} holds {len(extra)} tensors that its config.json has no place for, first '{extra[0]}'"
        )
    return found


def stored_dtype(files: TensorFiles, found: list[Stored]) -> torch.dtype:
    """What the first plain tensor, the embedding, is stored as."""
    return _read_floats(files, next(stored.name for stored in found if not stored.quantized)).dtype


def stored_plain(model: nn.Module, files: TensorFiles, found: list[Stored]) -> tuple[str, ...]:
    """The linear layers whose weights a quantised directory holds plain; that it holds all so is refused."""
    coded = {place.name for place, _, quantized in found if quantized}
    if not coded:
        raise CheckpointError(f"{files.directory} holds no codes and scales, which its config.json calls for")
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return tuple(name for name in linears if f"{name}.weight" not in coded)


@torch.no_grad()
def fill(model: nn.Module, files: TensorFiles, found: list[Stored], form: WeightFormat | None) -> None:
    """Give parameters what is stored: plain into quantised is quantised, quantised into plain is decoded."""
    parameters = dict(model.named_parameters())
    for place, name, quantized in found:
        rows = parameters[place.name][place.rows]
        if quantized and form is not None:
            stored: Tensor = _read_codes(files, name, form, rows)
        else:
            stored = _read_floats(files, name)
            _check_shape(files, name, stored, _turned(rows, place).shape)
            stored = _turned(stored, place)
        if isinstance(rows, QuantizedWeight) and not quantized:
            _quantize_into(rows, stored)
        else:
            rows.copy_(stored)


def tensors_at(places: Iterable[TensorMapping], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a file holds of a `weight_state`, by their names: views, in their orientation where they are plain."""
    tensors: dict[str, Tensor] = {}
    for place in places:
        if place.name in state:
            tensors[place.hf_name] = _turned(state[place.name][place.rows], place)
        else:
            tensors |= {place.hf_name + part: state[place.name + part][place.rows] for part in (CODES, SCALES)}
    return tensors


def _quantize_into(rows: QuantizedWeight, stored: Tensor) -> None:
    """A few rows at a time, each quantised where it is to be."""
    step = max(1, max(CHUNK, rows.numel() // CHUNKS) // rows.shape[1])
    for part, plain in zip(torch.split(rows, step), torch.split(stored, step), strict=True):
        part.copy_(plain.to(device=part.device, dtype=part.dtype))


def _read_floats(files: TensorFiles, name: str) -> Tensor:
    tensor = files.read(name)
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{files.directory} stores '{name}' as {tensor.dtype}: only floating-point weights can be loaded"
        )
    return tensor


def _read_codes(files: TensorFiles, name: str, form: WeightFormat, rows: Tensor) -> QuantizedWeight:
    """What is stored for rows of a parameter that is itself of this format, or plain."""
    form = form.fitted(rows.shape)
    if isinstance(rows, QuantizedWeight) and rows.format != form:
        raise CheckpointError(
            f"{files.directory} holds '{name}' as {form.name} and the model has it as {rows.format.name}: "
            "give the plain model, from which both can be made"
        )
    codes, scales = files.read(name + CODES), files.read(name + SCALES)
    for part, tensor, shape in zip((CODES, SCALES), (codes, scales), form.parts(rows.shape), strict=True):
        _check_shape(files, name + part, tensor, shape)
    if codes.dtype != form.dtype or not scales.is_floating_point():
        raise CheckpointError(
            f"{files.directory} stores '{name}' in codes of {codes.dtype} and scales of {scales.dtype}; {form.name} "
            f"has codes of {form.dtype} and floating-point scales"
        )
    return QuantizedWeight(codes, scales, form)


def _check_shape(files: TensorFiles, name: str, stored: Tensor, wanted: Iterable[int]) -> None:
    if list(stored.shape) != list(wanted):
        raise CheckpointError(
            f"{files.directory} holds '{name}' of shape {list(stored.shape)}; its config.json says {list(wanted)}"
        )


def _turned(tensor: Tensor, place: TensorMapping) -> Tensor:
    """Between their orientation and ours, which differ for GPT-2's linears."""
    return tensor.t() if place.transposed else tensor
