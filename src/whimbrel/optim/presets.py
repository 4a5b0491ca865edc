"""Published optimizers as choices of subspace, rule, lift and store; one class each.

In a group with a rank, tensors of two and more dimensions move in the subspace and vectors by plain AdamW; a group with
`rank=None` (embeddings, head) moves by AdamW as a whole. Notation as in `composed`: G (m x n), Q (n x r), R = G Q;
adam(R) is m^ / (sqrt(v^) + eps) with moments of R.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whimbrel.optim.composed import Composed

__all__ = ["AdamW8bit", "Apollo", "ApolloMini", "Fira", "GaLoreWarm", "LDAdam", "QGaLore"]

Betas = tuple[float, float]


class AdamW8bit(Composed):
    """AdamW whose moments are kept in 8 bits, with a scale for each block of 256 (Dettmers et al., 2021).

    m <- b1 m + (1 - b1) G;  v <- b2 v + (1 - b2) G^2;  W <- (1 - lr wd) W - lr m^ / (sqrt(v^) + eps)
    with m and v decoded before and encoded after. Codes are spaced by powers, not by a table, and v is rounded by
    chance, so that it follows gradients whose squares change it by less than a level.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        maximize: bool = False,
        foreach: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas=betas, eps=eps, weight_decay=weight_decay, store="int8", maximize=maximize,
            foreach=foreach, seed=seed,
        )  # fmt: skip


class GaLoreWarm(Composed):
    """GaLore on the input side, with a basis that follows the gradient by one power step at a time. Our default.

    R = G Q;  W <- (1 - lr wd) W - lr scale adam(R) Q^T
    Every `gap` steps, at another step for each matrix:  Q' = orth(G^T R), which costs products alone. What follows:
    carry = "turn"       M' = M Q^T Q' and V as it is (as in SOAP, Vyas et al., 2024): Q goes on to the singular
                         vectors, and V to the directions along which the gradient varies
    carry = "align"      Q' polar(Q'^T Q) in place of Q': the same span, turned as little as it allows; M and V stay
    carry = "transport"  M' and V' as in LDAdam
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None = 128,
        gap: int = 10,
        lazy: bool = False,
        scale: float = 1.0,
        side: str = "right",
        store: str = "fp32",
        basis_store: str = "fp32",
        start: str = "gradient",
        carry: str = "turn",
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, rank=rank, subspace="warm", gap=gap, lazy=lazy, scale=scale, side=side, store=store,
            basis_store=basis_store, start=start, carry=carry, betas=betas, eps=eps, weight_decay=weight_decay,
            maximize=maximize, foreach=foreach, seed=seed,
        )  # fmt: skip


class QGaLore(Composed):
    """Q-GaLore (Zhang et al., 2024): GaLore with moments in 8 bits, a basis in 4, and fewer bases where they agree.

    Q = first r singular vectors of G, in 4 bits, sought again after a gap that doubles while they stay alike;
    R = G Q;  W <- (1 - lr wd) W - lr scale adam8bit(R) Q^T, weights of 16 bits rounded by chance.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None = 128,
        gap: int = 200,
        scale: float = 0.25,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, rank=rank, subspace="svd", gap=gap, lazy=True, scale=scale, side="std", store="int8",
            basis_store="int4", betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=foreach,
            seed=seed,
        )  # fmt: skip


class Apollo(Composed):
    """APOLLO (Zhu et al., 2024): the gradient itself, each channel scaled as Adam would scale it in a random subspace.

    Q_ij ~ N(0, 1/r), drawn anew every `gap` steps from a seed and kept nowhere;  R = G Q;
    s_i = |adam(R)_i| / |R_i|;  W <- (1 - lr wd) W - lr scale diag(s) G, whose length grows by 1.01 a step at most.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None = 128,
        gap: int = 200,
        scale: float = 1.0,
        store: str = "fp32",
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, rank=rank, subspace="random", lift="apollo", gap=gap, scale=scale, side="std", store=store,
            betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=foreach, seed=seed,
        )  # fmt: skip


class ApolloMini(Composed):
    """APOLLO-Mini (Zhu et al., 2024): rank 1, and one scale for the whole matrix.

    R = G q, q ~ N(0, 1);  s = |adam(R)| / |R|;  W <- (1 - lr wd) W - lr scale s G, with scale = sqrt(128).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None = 1,
        gap: int = 200,
        scale: float = 128**0.5,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, rank=rank, subspace="random", lift="apollo_mini", gap=gap, scale=scale, side="std",
            betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=foreach, seed=seed,
        )  # fmt: skip


class Fira(Composed):
    """Fira (Chen et al., 2024): GaLore, and what the basis leaves out of the gradient, scaled as Adam scales the rest.

    Q = first r singular vectors of G;  R = G Q;  phi_i = |adam(R)_i| / |R_i|;
    W <- (1 - lr wd) W - lr scale (adam(R) Q^T + diag(phi) (G - R Q^T)), the last term growing by 1.01 a step at most.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None = 128,
        gap: int = 200,
        scale: float = 0.25,
        store: str = "fp32",
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, rank=rank, subspace="svd", lift="fira", gap=gap, scale=scale, side="std", store=store,
            betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=foreach, seed=seed,
        )  # fmt: skip


class LDAdam(Composed):
    """LDAdam (Robert et al., 2024): a new basis in every step, moments transported into it, and error feedback.

    A = G + E;  Q <- one power step of A from the last Q;  R = A Q;  C = Q_old^T Q;
    M' = M C;  V' = (1 - b2^t) [max(v^ - m^2, 0) (C o C) + (m^ C)^2];  adam with these moments on R;
    E <- A - R Q^T + b1 / (1 - b1) (M Q_old^T - M' Q^T);  W <- (1 - lr wd) W - lr scale adam(R) Q^T
    The error has the size of the weight: it saves no memory, but loses nothing of the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None = 128,
        scale: float = 1.0,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, rank=rank, subspace="warm", gap=1, carry="transport", error_feedback=True, scale=scale,
            side="std", betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=foreach, seed=seed,
        )  # fmt: skip
