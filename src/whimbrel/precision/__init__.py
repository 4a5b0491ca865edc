"""Low precision: autocast and gradient scaling, fp8 and QAT recipes, quantized weights, global torch flags."""

from whimbrel.precision.formats import FORMATS, WeightFormat, find_format
from whimbrel.precision.numerics import MixedPrecision, sdpa_backend_names, sdpa_backends, torch_flags
from whimbrel.precision.quantize import (
    LayerSelection,
    dequantize_,
    keep_quantized,
    load_state,
    materialize_,
    quantize_,
    swap_on_conversion,
)
from whimbrel.precision.recipes import RECIPES, Recipe, finalize, load_into, prepare, recipe_names, with_embeddings
from whimbrel.precision.weight import QuantizedWeight

__all__ = [
    "FORMATS",
    "RECIPES",
    "LayerSelection",
    "MixedPrecision",
    "QuantizedWeight",
    "Recipe",
    "WeightFormat",
    "dequantize_",
    "finalize",
    "find_format",
    "keep_quantized",
    "load_into",
    "load_state",
    "materialize_",
    "prepare",
    "quantize_",
    "recipe_names",
    "sdpa_backend_names",
    "sdpa_backends",
    "swap_on_conversion",
    "torch_flags",
    "with_embeddings",
]
