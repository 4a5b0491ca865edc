"""Number formats of a run: recipes, autocast and gradient scaling, quantised weights, torch's switches."""

from whimbrel.precision.amp import PrecisionPlan
from whimbrel.precision.attention import backend_names, sdpa_backends
from whimbrel.precision.formats import FORMATS, WeightFormat, weight_format
from whimbrel.precision.linears import Choice
from whimbrel.precision.recipes import RECIPES, Recipe, finalize, load_into, prepare, recipe_names, with_embeddings
from whimbrel.precision.swap import dequantize_, load_state, materialise_, quantize_, swap_on_conversion
from whimbrel.precision.switches import torch_switches
from whimbrel.precision.weight import QuantizedWeight

__all__ = [
    "Choice",
    "FORMATS",
    "PrecisionPlan",
    "QuantizedWeight",
    "RECIPES",
    "Recipe",
    "WeightFormat",
    "backend_names",
    "dequantize_",
    "finalize",
    "load_into",
    "load_state",
    "materialise_",
    "prepare",
    "quantize_",
    "recipe_names",
    "sdpa_backends",
    "swap_on_conversion",
    "torch_switches",
    "weight_format",
    "with_embeddings",
]
