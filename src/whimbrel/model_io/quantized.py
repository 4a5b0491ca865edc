"""What a `config.json` says of quantised weights, and the names that their codes and scales have in files."""

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
    "quantization_entries",
    "quantization_table",
    "stored_format",
    "weight_recipe",
    "weight_state",
]

QUANTIZATION = "quantization_config"
METHOD, VERSION = "whimbrel", 1
CODES, SCALES = ".codes", ".scales"
"""How the two parts of a quantised weight are called, after the name that the plain weight would have."""


WEIGHTS_FILE = "transformers_weights"
REFUSAL = "import whimbrel.hf first: these weights are quantized by whimbrel"
"""`transformers` skips an unknown `quant_method` and initializes the weights randomly. It expects a file name in this
entry, so it raises an error that quotes this text. `whimbrel.hf` removes the entry when it loads the config.
"""


def quantization_entries(form: WeightFormat | None) -> dict[str, Any]:
    """The `config.json` entries for weights of this format; empty for unquantized weights."""
    return {} if form is None else {QUANTIZATION: quantization_table(form), WEIGHTS_FILE: REFUSAL}


def quantization_table(form: WeightFormat) -> dict[str, Any]:
    """The `quantization_config` of weights of this format; its name alone would do, the rest is for other readers."""
    details = {"codes": form.codes, "group": form.group, "activations": form.activations}
    return {"quant_method": METHOD, "version": VERSION, "recipe": form.name, "format": details}


def stored_format(table: Mapping[str, Any]) -> WeightFormat | None:
    """The format that a `config.json` gives its linears; None where it is plain, or quantised by somebody else."""
    given = table.get(QUANTIZATION)
    if not isinstance(given, Mapping) or given.get("quant_method") != METHOD:
        return None
    if given.get("version") != VERSION:
        raise ConfigError(
            f"{QUANTIZATION} has version {given.get('version')!r}; this version reads {VERSION}: get a newer whimbrel"
        )
    form = FORMATS.get(str(given.get("recipe")))
    if form is None:
        raise ConfigError(f"{QUANTIZATION} names the recipe {given.get('recipe')!r}: known are {', '.join(FORMATS)}")
    if dict(given) != quantization_table(form):
        raise ConfigError(
            f"{QUANTIZATION} says {given.get('format')!r} of the recipe {form.name}, which is "
            f"{quantization_table(form)['format']}: restore it"
        )
    return form


def weight_recipe(argument: str, name: str, *, embeddings: bool = False) -> Recipe:
    """The weight-quantization recipe called `name`; `argument` is the option that named it, for error messages.

    With `embeddings` it also quantizes the token embedding and the head.
    """
    known = {recipe.name: recipe for recipe in RECIPES.values() if recipe.finalize is not None}
    if name not in known:
        raise PrecisionError(not_one_of(argument, name, known))
    return with_embeddings(known[name]) if embeddings else known[name]


def format_of(model: nn.Module) -> WeightFormat | None:
    """The one format of a model's quantised weights; None where all are plain. A directory can say no more than one."""
    weights = [weight for weight in model.parameters() if isinstance(weight, QuantizedWeight)]
    strange = sorted(weight.format.name for weight in weights if not _is_known(weight))
    forms = {FORMATS[weight.format.name] for weight in weights if not strange}
    if strange:
        raise CheckpointError(f"weights of the format {strange[0]} cannot be written: use one of {', '.join(FORMATS)}")
    if len(forms) > 1:
        names = " and ".join(sorted(form.name for form in forms))
        raise CheckpointError(f"the model has weights of the formats {names}: quantise all to one before it is written")
    return next(iter(forms), None)


def _is_known(weight: QuantizedWeight) -> bool:
    """Whether its format, with the group size that fits its shape, is a named format."""
    form = FORMATS.get(weight.format.name)
    return form is not None and weight.format == form.fitted(weight.format.shape_of(weight.codes))


def weight_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name as plain tensors, a tied one once; a quantised one is its codes and its scales."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            state |= {name + CODES: parameter.codes, name + SCALES: parameter.scales}
        else:
            state[name] = parameter.detach()
    return state
