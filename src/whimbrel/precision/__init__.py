"""Number formats of a run: autocast and gradient scaling, torch's switches, attention kernels."""

from whimbrel.precision.amp import PrecisionPlan
from whimbrel.precision.attention import backend_names, sdpa_backends
from whimbrel.precision.switches import torch_switches

__all__ = ["PrecisionPlan", "backend_names", "sdpa_backends", "torch_switches"]
