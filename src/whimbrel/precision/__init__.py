"""Number formats of a run: autocast and gradient scaling, torch's switches, attention kernels, quantised weights."""

from whimbrel.precision.amp import PrecisionPlan
from whimbrel.precision.attention import backend_names, sdpa_backends
from whimbrel.precision.formats import FORMATS, WeightFormat, weight_format
from whimbrel.precision.swap import dequantize_, quantize_, swap_on_conversion
from whimbrel.precision.switches import torch_switches
from whimbrel.precision.weight import QuantizedWeight

__all__ = [
    "FORMATS",
    "PrecisionPlan",
    "QuantizedWeight",
    "WeightFormat",
    "backend_names",
    "dequantize_",
    "quantize_",
    "sdpa_backends",
    "swap_on_conversion",
    "torch_switches",
    "weight_format",
]
