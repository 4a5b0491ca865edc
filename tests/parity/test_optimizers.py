"""Optimizers against those of other packages, on the same gradients or the same text."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from whimbrel.optim import AdamW8bit, Fira, LowRankOptimizer


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pytorch_optimizer() -> ModuleType:
    return pytest.importorskip("pytorch_optimizer", reason="needs the package 'pytorch_optimizer'")


class CharModel:
    """A character-level model that predicts the next character from eight."""

    def __init__(self, text: str) -> None:
        letters = sorted(set(text))
        self.codes = torch.tensor([letters.index(letter) for letter in text])
        sizes = ((len(letters), 32), (128, 8 * 32), (128,), (len(letters), 128))
        self.params = [nn.Parameter(random(size, seed) / size[-1] ** 0.5) for seed, size in enumerate(sizes)]

    def loss(self, step: int) -> Tensor:
        starts = torch.randint(len(self.codes) - 9, (64,), generator=torch.Generator().manual_seed(step))
        windows = self.codes[starts[:, None] + torch.arange(9)]
        embedding, first, bias, second = self.params
        hidden = functional.gelu(embedding[windows[:, :8]].flatten(1) @ first.mT + bias)
        return functional.cross_entropy(hidden @ second.mT, windows[:, 8])

    def train(self, build: Callable[[list[nn.Parameter]], Any], steps: int) -> tuple[Tensor, float]:
        """The change of the weights, and the mean loss on held-out text."""
        start = [p.detach().clone() for p in self.params]
        optimizer = build(self.params)
        for step in range(steps):
            optimizer.zero_grad()
            self.loss(step).backward()
            optimizer.step()
        with torch.no_grad():
            unseen = torch.stack([self.loss(10_000 + step) for step in range(20)]).mean()
        updates = [(p.detach() - s).flatten() for p, s in zip(self.params, start, strict=True)]
        return torch.cat(updates), float(unseen)


def test_adamw8bit_is_as_close_to_adamw_as_torchao(torchao: ModuleType, shakespeare: str) -> None:
    """Both stay close to AdamW in fp32, ours at least as close; torchao runs in eager mode."""
    text, steps = shakespeare[:40_000], 100
    settings: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01}
    exact, loss = CharModel(text).train(lambda params: torch.optim.AdamW(params, **settings), steps)
    ours, our_loss = CharModel(text).train(lambda params: AdamW8bit(params, **settings), steps)
    with torch.compiler.set_stance("force_eager"):
        theirs, their_loss = CharModel(text).train(lambda params: torchao.optim.AdamW8bit(params, **settings), steps)
    our_distance, their_distance = (float((updates - exact).norm() / exact.norm()) for updates in (ours, theirs))
    assert loss < 2.7
    assert abs(our_loss - loss) < 0.02
    assert abs(their_loss - loss) < 0.02
    assert our_distance < 0.05
    assert our_distance < their_distance


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (20, 20)])
def test_fira_equals_pytorch_optimizer(pytorch_optimizer: ModuleType, shape: tuple[int, ...]) -> None:
    """At scale 1 (theirs scales the residual too), while the limiter is inactive.

    Its limiter compares norms before the bias correction of Adam, ours after it, so the residual shrinks here.
    """
    ours, theirs = (nn.Parameter(random(shape, 0)) for _ in range(2))
    settings: dict[str, Any] = {"rank": 4, "scale": 1.0}
    optimizer = Fira([ours], 0.01, eps=1e-12, gap=1000, **settings)
    group = {"params": [theirs], "update_proj_gap": 1000, "projection_type": "std", **settings}
    reference = pytorch_optimizer.Fira([group], 0.01, eps=1e-12)
    start = random(shape, 1)
    u, s, vh = torch.linalg.svd(start, full_matrices=False)
    for step in range(8):
        singular_values = s * (1 + 0.1 * random(tuple(s.shape), step))
        singular_values[4:] *= 0.4**step
        grad = start if step == 0 else u @ torch.diag(singular_values) @ vh
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_lion_equals_pytorch_optimizer(pytorch_optimizer: ModuleType) -> None:
    ours, theirs = (nn.Parameter(random((24, 16), 0)) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.97), "weight_decay": 0.1}
    optimizer, reference = (
        LowRankOptimizer([ours], rule="lion", **settings),
        pytorch_optimizer.Lion([theirs], **settings),
    )
    for step in range(8):
        ours.grad, theirs.grad = random((24, 16), step), random((24, 16), step)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
