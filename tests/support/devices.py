"""Where tests of Triton kernels run: on a GPU, or in Triton's interpreter.

The interpreter needs TRITON_INTERPRET=1, the package triton and a NumPy that it supports (2.3 for triton 3.6).
"""

from __future__ import annotations

import os

import pytest
import torch

__all__ = ["TRITON_DEVICES"]

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1 and triton"
)
TRITON_DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=INTERPRETED)]
