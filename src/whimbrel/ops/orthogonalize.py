"""Orthogonalization of matrices for Muon: the polar factor by a Newton-Schulz-like iteration."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["orthogonalize", "orthogonalize_reference"]

POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
"""Polar Express (Amsel et al., 2025): x (a + b x^2 + c x^4), optimal coefficients for each step on [1e-3, 1]."""


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of (..., m, n): the result has singular values between 0.87 and 1.13.

    An odd polynomial of a matrix applies it to the singular values and keeps the singular vectors, so five quintic
    steps that drive every singular value towards 1 need only matrix products; bf16 is precise enough.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) * 1.01 + 1e-7).to(x.dtype)
    flat = x.reshape(-1, *x.shape[-2:])
    for a, b, c in POLYNOMIALS:
        gram = flat @ flat.mT
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        flat = torch.baddbmm(flat, inner, flat, beta=a)
    factors: Tensor = flat.reshape(x.shape)
    return factors.mT if tall else factors


def orthogonalize_reference(matrices: Tensor) -> Tensor:
    """Exact, by SVD in fp64."""
    u, _, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    factors: Tensor = (u @ vh).to(matrices.dtype)
    return factors
