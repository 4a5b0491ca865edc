"""Each preset against the equation of its paper, computed in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import random, transferred_moments
from torch import Tensor, nn

from whimbrel.optim import (
    AdamW8bit,
    Apollo,
    ApolloMini,
    Fira,
    GaLore,
    GaLoreWarm,
    LDAdam,
    LowRankOptimizer,
    QGaLore,
)

LR, B1, B2, EPS, DECAY, SCALE = 0.05, 0.8, 0.95, 1e-4, 0.2, 0.7
SETTINGS: dict[str, Any] = {"betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, "scale": SCALE}
SHAPES = [(24, 16), (16, 24), (3, 10, 8)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


class Adam:
    """m^ / (sqrt(v^) + eps)."""

    def __init__(self) -> None:
        self.m = self.v = torch.zeros((), dtype=torch.float64)
        self.t = 0

    def __call__(self, r: Tensor) -> Tensor:
        self.t += 1
        self.m, self.v = B1 * self.m + (1 - B1) * r, B2 * self.v + (1 - B2) * r * r
        return (self.m / (1 - B1**self.t)) / ((self.v / (1 - B2**self.t)).sqrt() + EPS)


class Limiter:
    """Limits the growth of the norm of each matrix to 1.01 per step."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.matrix_norm(x, keepdim=True)
        if self.last is not None:
            x = x * (1.01 * self.last / length).clamp(max=1)
        self.last = torch.linalg.matrix_norm(x, keepdim=True)
        return x


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    """The norm varies between steps."""
    return random(shape, step + 1) * (1.0, 3.0, 0.5)[step % 3]


def projects_rows(shape: tuple[int, ...]) -> bool:
    """Whether side = "std" projects rows."""
    return shape[-2] < shape[-1]


def compare(optimizer: LowRankOptimizer, p: nn.Parameter, steps: int, direction: Any, tolerance: float = 2e-5) -> None:
    """Check W <- (1 - lr wd) W - lr scale D in each step; D is computed from the matrix view of the gradient."""
    expected = p.detach().double()
    for step in range(steps):
        p.grad = gradient(tuple(p.shape), step)
        old = optimizer.basis(p).double()
        optimizer.step()
        g = p.grad.double()
        std = optimizer.defaults["side"] == "std" and projects_rows(tuple(p.shape))
        d = direction(g.mT if std else g, old)
        expected = (1 - LR * DECAY) * expected - LR * SCALE * (d.mT if std else d)
        torch.testing.assert_close(p.detach().double(), expected, atol=tolerance, rtol=1e-4)


@shapes
def test_apollo_matches_its_equation(shape: tuple[int, ...]) -> None:
    """s_i = |adam(R)_i| / |R_i|, rows of R being channels; the basis changes at the fourth step."""
    p = nn.Parameter(random(shape))
    optimizer = Apollo([p], LR, rank=4, gap=3, **SETTINGS)
    adam, limit, bases = Adam(), Limiter(), []

    def direction(g: Tensor, q: Tensor) -> Tensor:
        bases.append(q)
        r = g @ q
        return limit(adam(r).norm(dim=-1, keepdim=True) / r.norm(dim=-1, keepdim=True) * g)

    compare(optimizer, p, 7, direction)
    assert torch.equal(bases[0], bases[2])
    assert not torch.equal(bases[2], bases[3])
    assert abs(float(bases[0].var()) * 4 - 1) < 0.5
    assert "basis" not in optimizer.state[p]


@shapes
def test_apollo_mini_matches_its_equation(shape: tuple[int, ...]) -> None:
    """s = |adam(R)| / |R| of the complete matrix, at rank 1."""
    p = nn.Parameter(random(shape))
    optimizer = ApolloMini([p], LR, gap=3, **SETTINGS)
    adam, limit = Adam(), Limiter()

    def direction(g: Tensor, q: Tensor) -> Tensor:
        r = g @ q
        assert r.shape[-1] == 1
        return limit(torch.linalg.matrix_norm(adam(r), keepdim=True) / torch.linalg.matrix_norm(r, keepdim=True) * g)

    compare(optimizer, p, 7, direction)
    assert ApolloMini([p]).defaults["scale"] == 128**0.5


@shapes
def test_fira_matches_its_equation(shape: tuple[int, ...]) -> None:
    """D = adam(R) Q^T + phi (G - R Q^T), phi_i = |adam(R)_i| / |R_i|, with a limited second term; Q by SVD, once."""
    p = nn.Parameter(random(shape))
    optimizer = Fira([p], LR, rank=4, gap=1000, **SETTINGS)
    adam, limit = Adam(), Limiter()
    q: Tensor | None = None

    def direction(g: Tensor, _: Tensor) -> Tensor:
        nonlocal q
        q = torch.linalg.svd(g, full_matrices=False)[2][..., :4, :].mT if q is None else q
        r = g @ q
        n = adam(r)
        return n @ q.mT + limit(n.norm(dim=-1, keepdim=True) / r.norm(dim=-1, keepdim=True) * (g - r @ q.mT))

    compare(optimizer, p, 7, direction)


def power_step(g: Tensor, old: Tensor) -> Tensor:
    """Y = orth(G^T G Q), by QR with a positive diagonal."""
    y, triangle = torch.linalg.qr(g.mT @ (g @ old))
    return y * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


@shapes
@pytest.mark.parametrize("moment_transfer", ["first", "align", "both"])
def test_galore_warm_matches_its_equation(shape: tuple[int, ...], moment_transfer: str) -> None:
    """D = adam(R) Q^T, with a power iteration for Q every gap; the first Q is taken from the optimizer."""
    p = nn.Parameter(random(shape))
    optimizer = GaLoreWarm([p], LR, rank=4, gap=4, lazy=False, moment_transfer=moment_transfer, **SETTINGS)
    adam, changes = Adam(), []

    def direction(g: Tensor, old: Tensor) -> Tensor:
        new = optimizer.basis(p).double()
        if not torch.equal(old, new):
            changes.append(int(optimizer.state[p]["step"]))
        if not torch.equal(old, new) and len(changes) > 1:
            expected = power_step(g, old)
            if moment_transfer == "align":
                u, _, vh = torch.linalg.svd(expected.mT @ old)
                expected = expected @ u @ vh
            torch.testing.assert_close(new, expected, atol=1e-3, rtol=1e-3)
            if moment_transfer == "first":
                adam.m = adam.m @ old.mT @ new
            if moment_transfer == "both":
                adam.m, adam.v = transferred_moments(adam.m, adam.v, old.mT @ new, (B1, B2), adam.t)
        return adam(g @ new) @ new.mT

    compare(optimizer, p, 9, direction)
    assert changes == [1, 3, 7]


@shapes
def test_ldadam_matches_its_equation(shape: tuple[int, ...]) -> None:
    """A = G + E; Q by a power iteration of A; E <- A - R Q^T + b1 / (1 - b1) (M Q_old^T - M' Q^T)."""
    p = nn.Parameter(random(shape))
    optimizer = LDAdam([p], LR, rank=4, **SETTINGS)
    adam = Adam()
    error = torch.zeros((), dtype=torch.float64)

    def direction(g: Tensor, old: Tensor) -> Tensor:
        nonlocal error
        a, q = g + error, optimizer.basis(p).double()
        error = torch.zeros((), dtype=torch.float64)
        if adam.t:
            torch.testing.assert_close(q, power_step(a, old), atol=1e-3, rtol=1e-3)
            moved, adam.v = transferred_moments(adam.m, adam.v, old.mT @ q, (B1, B2), adam.t)
            error = B1 / (1 - B1) * (adam.m @ old.mT - moved @ q.mT)
            adam.m = moved
        r = a @ q
        error = error + a - r @ q.mT
        torch.testing.assert_close(optimizer.state[p]["error"].double(), error, atol=1e-4, rtol=1e-3)
        return adam(r) @ q.mT

    compare(optimizer, p, 8, direction, tolerance=1e-4)


@shapes
def test_random_subspace_matches_its_equation(shape: tuple[int, ...]) -> None:
    """D = adam(R) Q^T with the Q of the step, which is sampled again before the fourth."""
    p = nn.Parameter(random(shape))
    optimizer = LowRankOptimizer([p], LR, rank=4, subspace="random", gap=3, **SETTINGS)
    adam = Adam()
    compare(optimizer, p, 7, lambda g, q: adam(g @ q) @ q.mT)


def test_ldadam_error_feedback_loses_no_gradient() -> None:
    """With b1 = 0, moments and error add up to the sum of all gradients."""
    p = nn.Parameter(random((24, 16)))
    optimizer = LDAdam([p], LR, rank=2, betas=(0.0, 0.9))
    total, spent = torch.zeros(24, 16), torch.zeros(24, 16)
    for step in range(10):
        p.grad = random((24, 16), step)
        total += p.grad
        optimizer.step()
        spent += optimizer.state[p]["exp_avg"] @ optimizer.basis(p).mT
    torch.testing.assert_close(spent + optimizer.state[p]["error"], total, atol=1e-4, rtol=1e-4)


@shapes
def test_qgalore_in_fp32_equals_galore(shape: tuple[int, ...]) -> None:
    """With the first basis; eps is small, since it is added at another place."""
    ours, theirs = (nn.Parameter(random(shape)) for _ in range(2))
    qgalore = QGaLore([ours], LR, rank=4, gap=100, eps=1e-12, weight_decay=DECAY)
    plain = qgalore.defaults | {"store": "fp32", "basis_store": "fp32"}
    mine = LowRankOptimizer([ours], **{name: plain[name] for name in plain if name != "differentiable"})
    peer = GaLore([theirs], LR, rank=4, update_proj_gap=100, eps=1e-12, weight_decay=DECAY)
    for step in range(8):
        ours.grad, theirs.grad = gradient(shape, step), gradient(shape, step)
        mine.step()
        peer.step()
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_qgalore_stays_near_galore() -> None:
    """With 8-bit moments and a 4-bit basis."""
    ours, theirs = (nn.Parameter(random((72, 60))) for _ in range(2))
    start = ours.detach().clone()
    mine = QGaLore([ours], 0.01, rank=8, gap=100)
    peer = GaLore([theirs], 0.01, rank=8, update_proj_gap=100)
    grad = random((72, 60), 50)
    for step in range(20):
        ours.grad = theirs.grad = grad + 0.3 * random((72, 60), step)
        mine.step()
        peer.step()
    assert mine.state[ours]["exp_avg"].dtype == torch.int8
    assert (ours - theirs).norm() < 0.25 * (theirs.detach() - start).norm()


def test_adamw8bit_stays_near_adamw() -> None:
    """Rounding errors of moments are small and unbiased."""
    ours, theirs = (nn.Parameter(random((72, 60))) for _ in range(2))
    start = ours.detach().clone()
    mine = AdamW8bit([ours], 0.01, weight_decay=0.1)
    peer = torch.optim.AdamW([theirs], 0.01, weight_decay=0.1)
    grad = random((72, 60), 50)
    for step in range(40):
        ours.grad = theirs.grad = grad + random((72, 60), step)
        mine.step()
        peer.step()
    assert {mine.state[ours][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.int8, torch.uint8}
    assert (ours - theirs).norm() < 0.05 * (theirs.detach() - start).norm()
    assert (ours - theirs).mean().abs() < 1e-3


@pytest.mark.parametrize("kind", [AdamW8bit, GaLoreWarm, QGaLore, Apollo, ApolloMini, Fira, LDAdam])
def test_docstring_states_the_equation(kind: type) -> None:
    assert "W <- (1 - lr wd) W - lr " in (kind.__doc__ or "")
