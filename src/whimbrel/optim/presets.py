"""Published optimizers as combinations of subspace, rule, back projection and storage; one class each.

A preset is `LowRankOptimizer` with other defaults, and takes the same keywords (see `lowrank.Options`). In a group
with a rank, tensors of two or more dimensions are updated in the subspace and vectors by AdamW; a group with
`rank=None` (embeddings, head) is updated by AdamW. Notation as in `lowrank`: G (m x n), Q (n x r), R = G Q; adam(R) is
m^ / (sqrt(v^) + eps) with moments of R.
"""

from __future__ import annotations

from typing import ClassVar

from whimbrel.optim.lowrank import LowRankOptimizer, Options

__all__ = ["AdamW8bit", "Apollo", "ApolloMini", "Fira", "GaLoreWarm", "LDAdam", "QGaLore"]

ADAM: Options = {"betas": (0.9, 0.999), "eps": 1e-8}


class AdamW8bit(LowRankOptimizer):
    """AdamW with moments in 8 bits and one scale per block of 256 (Dettmers et al., 2021).

    m <- b1 m + (1 - b1) G;  v <- b2 v + (1 - b2) G^2;  W <- (1 - lr wd) W - lr m^ / (sqrt(v^) + eps)
    with m and v dequantized before and quantized after. Levels follow a power law instead of a table; v is rounded
    stochastically, so that changes smaller than one quantization step accumulate.
    """

    preset: ClassVar[Options] = {**ADAM, "store": "int8", "weight_decay": 0.01}


class GaLoreWarm(LowRankOptimizer):
    """GaLore on the input side, with a basis updated by one power iteration at a time. Our default.

    R = G Q;  W <- (1 - lr wd) W - lr scale adam(R) Q^T
    Every `gap` steps, staggered over matrices:  Q' = orth(G^T R), which needs no SVD. Then the moments are transferred:
    moment_transfer = "first"  M' = M Q^T Q', V unchanged (as in SOAP, Vyas et al., 2024): Q converges to the singular
                               vectors, and V to the variances along them
    moment_transfer = "align"  Q' polar(Q'^T Q) instead of Q': same span, rotated as little as possible; M, V unchanged
    moment_transfer = "both"   M' and V' as in LDAdam
    """

    preset: ClassVar[Options] = {**ADAM, "rank": 128, "subspace": "warm", "gap": 10, "moment_transfer": "first"}


class QGaLore(LowRankOptimizer):
    """Q-GaLore (Zhang et al., 2024): GaLore with 8-bit moments, a 4-bit basis, and fewer refreshes of stable bases.

    Q = first r singular vectors of G, in 4 bits, recomputed after a gap that doubles while they hardly change;
    R = G Q;  W <- (1 - lr wd) W - lr scale adam8bit(R) Q^T, with stochastic rounding of 16-bit weights.
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 128, "subspace": "svd", "gap": 200, "lazy": True, "scale": 0.25, "side": "std",
        "store": "int8", "basis_store": "int4",
    }  # fmt: skip


class Apollo(LowRankOptimizer):
    """APOLLO (Zhu et al., 2024): the gradient itself, each channel scaled as Adam would scale it in a random subspace.

    Q_ij ~ N(0, 1/r), sampled from a seed every `gap` steps and not stored;  R = G Q;
    s_i = |adam(R)_i| / |R_i|;  W <- (1 - lr wd) W - lr scale diag(s) G, whose norm grows by at most 1.01 per step.
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 128, "subspace": "random", "back_projection": "apollo", "gap": 200, "side": "std",
    }  # fmt: skip


class ApolloMini(LowRankOptimizer):
    """APOLLO-Mini (Zhu et al., 2024): rank 1, and one scale for the whole matrix.

    R = G q, q ~ N(0, 1);  s = |adam(R)| / |R|;  W <- (1 - lr wd) W - lr scale s G, with scale = sqrt(128).
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 1, "subspace": "random", "back_projection": "apollo_mini", "gap": 200, "scale": 128**0.5,
        "side": "std",
    }  # fmt: skip


class Fira(LowRankOptimizer):
    """Fira (Chen et al., 2024): GaLore plus the residual of the gradient, scaled as Adam scales the rest.

    Q = first r singular vectors of G;  R = G Q;  phi_i = |adam(R)_i| / |R_i|;
    W <- (1 - lr wd) W - lr scale (adam(R) Q^T + diag(phi) (G - R Q^T)); the last term grows by at most 1.01 per step.
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 128, "subspace": "svd", "back_projection": "fira", "gap": 200, "scale": 0.25, "side": "std",
    }  # fmt: skip


class LDAdam(LowRankOptimizer):
    """LDAdam (Robert et al., 2024): a new basis at every step, both moments projected onto it, and error feedback.

    A = G + E;  Q <- one power iteration of A from the last Q;  R = A Q;  C = Q_old^T Q;
    M' = M C;  V' = (1 - b2^t) [max(v^ - m^2, 0) (C o C) + (m^ C)^2];  adam with these moments on R;
    E <- A - R Q^T + b1 / (1 - b1) (M Q_old^T - M' Q^T);  W <- (1 - lr wd) W - lr scale adam(R) Q^T
    The error has the size of the weight: this saves no memory, but no part of the gradient is lost.
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 128, "subspace": "warm", "gap": 1, "moment_transfer": "both", "error_feedback": True,
        "side": "std",
    }  # fmt: skip
