"""Quantized weights on disk: `quantization_config` in `config.json`, and the tensor names of codes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError, ConfigError, PrecisionError
from whimbrel.config import not_one_of
from whimbrel.precision import FORMATS, RECIPES, QuantizedWeight, Recipe, WeightFormat, with_embeddings

__all__ = [
    "CODES",
    "METHOD",
    "QUANTIZATION",
    "SCALES",
    "WEIGHTS_FILE",
    "format_of",
    "quantization_config",
    "quantization_entries",
    "stored_format",
    "weight_recipe",
    "weight_state_dict",
]

QUANTIZATION = "quantization_config"
METHOD, VERSION = "whimbrel", 1
CODES, SCALES = ".codes", ".scales"
"""Suffixes, appended to the name of the weight, of the two tensors that store a quantized weight."""

WEIGHTS_FILE = "transformers_weights"
REFUSAL = "import whimbrel.hf first: these weights are quantized by whimbrel"
"""`transformers` skips an unknown `quant_method` and initializes the weights randomly. It expects a file name in this
entry, so it raises an error that quotes this text. `whimbrel.hf` removes the entry when it loads the config.
"""


def quantization_entries(weight_format: WeightFormat | None) -> dict[str, Any]:
    """The `config.json` entries for weights of this format; empty for unquantized weights."""
    if weight_format is None:
        return {}
    return {QUANTIZATION: quantization_config(weight_format), WEIGHTS_FILE: REFUSAL}


def quantization_config(weight_format: WeightFormat) -> dict[str, Any]:
    """The `quantization_config` for this format; `format` contains the details that the name in `recipe` implies."""
    details = {
        "codes": weight_format.codes,
        "group": weight_format.group_size,
        "activations": weight_format.activations,
    }
    return {"quant_method": METHOD, "version": VERSION, "recipe": weight_format.name, "format": details}


def stored_format(table: Mapping[str, Any]) -> WeightFormat | None:
    """The weight format in a `config.json`; None if it is unquantized or was quantized by another tool."""
    given = table.get(QUANTIZATION)
    if not isinstance(given, Mapping) or given.get("quant_method") != METHOD:
        return None
    if given.get("version") != VERSION:
        raise ConfigError(
            f"expected {QUANTIZATION} version {VERSION}, got {given.get('version')!r}: install a newer whimbrel"
        )
    weight_format = FORMATS.get(str(given.get("recipe")))
    if weight_format is None:
        raise ConfigError(f"expected a {QUANTIZATION} recipe from {', '.join(FORMATS)}, got {given.get('recipe')!r}")
    expected = quantization_config(weight_format)
    if dict(given) != expected:
        raise ConfigError(
            f"expected {QUANTIZATION} format {expected['format']} for recipe {weight_format.name}, got "
            f"{given.get('format')!r}"
        )
    return weight_format


def weight_recipe(argument: str, name: str, *, embeddings: bool = False) -> Recipe:
    """The weight-quantization recipe called `name`; `argument` is the option to name in error messages.

    With `embeddings` it also quantizes the token embedding and the head.
    """
    known = {recipe.name: recipe for recipe in RECIPES.values() if recipe.finalize is not None}
    if name not in known:
        raise PrecisionError(not_one_of(argument, name, known))
    return with_embeddings(known[name]) if embeddings else known[name]


def format_of(model: nn.Module) -> WeightFormat | None:
    """The format of a model's quantized weights, None if there are none; a directory can store only one format."""
    weights = [weight for weight in model.parameters() if isinstance(weight, QuantizedWeight)]
    unknown = sorted(weight.format.name for weight in weights if not _is_named(weight))
    if unknown:
        raise CheckpointError(
            f"expected weights in one of {', '.join(FORMATS)}, got {unknown[0]}: they cannot be saved"
        )
    formats = {FORMATS[weight.format.name] for weight in weights}
    if len(formats) > 1:
        names = " and ".join(sorted(each.name for each in formats))
        raise CheckpointError(f"expected weights in one format, got {names}: quantize all to the same format")
    return next(iter(formats), None)


def _is_named(weight: QuantizedWeight) -> bool:
    """Whether its format, with the group size fitted to its shape, is one of FORMATS."""
    named = FORMATS.get(weight.format.name)
    return named is not None and weight.format == named.fit_to(weight.format.weight_shape(weight.codes))


def weight_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name as detached tensors, tied ones once; a quantized weight is two tensors, codes and scales."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            state |= {name + CODES: parameter.codes, name + SCALES: parameter.scales}
        else:
            state[name] = parameter.detach()
    return state
