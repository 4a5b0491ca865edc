"""Convert between stored tensors and parameters, one at a time; each is rows of a parameter, dense or quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError
from whimbrel.model_io.files import TensorFiles
from whimbrel.model_io.quantized import CODES, SCALES
from whimbrel.models.families import TensorMapping
from whimbrel.precision import QuantizedWeight, WeightFormat

__all__ = ["StoredTensor", "dense_linears", "load_tensors", "match_tensors", "stored_dtype", "stored_tensors"]

PREFIXES = ("transformer.", "model.")
"""Prefixes that checkpoints of the bare model (without a head) omit."""
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Suffixes of buffers that older checkpoints contain."""
CHUNK_SIZE, MAX_CHUNKS = 2**18, 16
"""Weights are quantized in chunks of at least this many elements, in at most this many chunks, to limit peak memory."""


class StoredTensor(NamedTuple):
    """A mapping matched to a stored tensor; if `quantized`, `name` is the prefix of its codes and scales."""

    mapping: TensorMapping
    name: str
    quantized: bool


def match_tensors(
    files: TensorFiles, mappings: Iterable[TensorMapping], weight_format: WeightFormat | None
) -> list[StoredTensor]:
    """Find the stored tensor of each mapping; raises CheckpointError for missing or unexpected tensors."""
    names, found, used = files.names, [], set()
    for mapping in mappings:
        candidates = [mapping.hf_name, *(mapping.hf_name.removeprefix(prefix) for prefix in PREFIXES)]
        dense = next((name for name in candidates if name in names), None)
        quantized = next((name for name in candidates if {name + CODES, name + SCALES} & names), None)
        if weight_format is not None and quantized is not None:
            found.append(StoredTensor(mapping, quantized, quantized=True))
            parts = {quantized + CODES, quantized + SCALES}
        else:
            found.append(StoredTensor(mapping, dense or mapping.hf_name, quantized=False))
            parts = {dense or mapping.hf_name}
        for missing in sorted(parts - names):
            raise CheckpointError(f"{files.directory} has no tensor '{missing}', which its config.json requires")
        used |= parts
    extra = sorted(name for name in names - used if not name.endswith((*CONSTANTS, "lm_head.weight")))
    if extra:
        raise CheckpointError(
            f"{files.directory} has {len(extra)} tensors that do not match its config.json, first '{extra[0]}'"
        )
    return found


def stored_dtype(files: TensorFiles, found: list[StoredTensor]) -> torch.dtype:
    """The dtype of the first dense tensor, usually the embedding."""
    return _read_float(files, next(stored.name for stored in found if not stored.quantized)).dtype


def dense_linears(model: nn.Module, files: TensorFiles, found: list[StoredTensor]) -> tuple[str, ...]:
    """Linear layers that are stored unquantized in a quantized directory."""
    quantized = {stored.mapping.name for stored in found if stored.quantized}
    if not quantized:
        raise CheckpointError(f"{files.directory} has no quantized tensors, but a quantization_config in config.json")
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return tuple(name for name in linears if f"{name}.weight" not in quantized)


@torch.no_grad()
def load_tensors(
    model: nn.Module, files: TensorFiles, found: list[StoredTensor], weight_format: WeightFormat | None
) -> None:
    """Copy stored tensors into parameters, quantizing or dequantizing where the two differ."""
    parameters = dict(model.named_parameters())
    for mapping, name, quantized in found:
        rows = parameters[mapping.name][mapping.rows]
        if quantized and weight_format is not None:
            stored: Tensor = _read_quantized(files, name, weight_format, rows)
        else:
            stored = _read_float(files, name)
            _check_shape(files, name, stored, _transposed(rows, mapping).shape)
            stored = _transposed(stored, mapping)
        if isinstance(rows, QuantizedWeight) and not quantized:
            _quantize_into(rows, stored)
        else:
            rows.copy_(stored)


def stored_tensors(mappings: Iterable[TensorMapping], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a `weight_state_dict` by their names in a file: views, transposed where the family requires it."""
    tensors: dict[str, Tensor] = {}
    for mapping in mappings:
        if mapping.name in state:
            tensors[mapping.hf_name] = _transposed(state[mapping.name][mapping.rows], mapping)
        else:
            tensors |= {mapping.hf_name + part: state[mapping.name + part][mapping.rows] for part in (CODES, SCALES)}
    return tensors


def _quantize_into(rows: QuantizedWeight, dense: Tensor) -> None:
    # Rows are quantized independently, so quantizing in chunks yields the same codes with less memory.
    step = max(1, max(CHUNK_SIZE, rows.numel() // MAX_CHUNKS) // rows.shape[1])
    for target, chunk in zip(torch.split(rows, step), torch.split(dense, step), strict=True):
        target.copy_(chunk.to(device=target.device, dtype=target.dtype))


def _read_float(files: TensorFiles, name: str) -> Tensor:
    tensor = files.read(name)
    if not tensor.is_floating_point():
        raise CheckpointError(f"{files.directory}: expected floating-point weights, got {tensor.dtype} in '{name}'")
    return tensor


def _read_quantized(files: TensorFiles, name: str, weight_format: WeightFormat, rows: Tensor) -> QuantizedWeight:
    weight_format = weight_format.fit_to(rows.shape)
    if isinstance(rows, QuantizedWeight) and rows.format != weight_format:
        raise CheckpointError(
            f"{files.directory}: expected '{name}' as {rows.format.name}, got {weight_format.name}: quantize the "
            "unquantized model instead"
        )
    codes, scales = files.read(name + CODES), files.read(name + SCALES)
    for part, tensor, shape in zip(
        (CODES, SCALES), (codes, scales), weight_format.part_shapes(rows.shape), strict=True
    ):
        _check_shape(files, name + part, tensor, shape)
    if codes.dtype != weight_format.dtype or not scales.is_floating_point():
        raise CheckpointError(
            f"{files.directory}: expected '{name}' in {weight_format.name} with {weight_format.dtype} codes and "
            f"floating-point scales, got {codes.dtype} and {scales.dtype}"
        )
    return QuantizedWeight(codes, scales, weight_format)


def _check_shape(files: TensorFiles, name: str, stored: Tensor, expected: Iterable[int]) -> None:
    if list(stored.shape) != list(expected):
        raise CheckpointError(
            f"{files.directory}: expected '{name}' of shape {list(expected)} (from config.json), got "
            f"{list(stored.shape)}"
        )


def _transposed(tensor: Tensor, mapping: TensorMapping) -> Tensor:
    return tensor.t() if mapping.transposed else tensor
