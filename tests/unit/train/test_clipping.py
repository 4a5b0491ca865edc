"""Gradient clipping: by the norm of all gradients together, once a step, after accumulation and unscaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whimbrel.train import TrainerCallback

Make = Callable[..., Any]
EPS = torch.finfo(torch.float32).eps


class Gradients(TrainerCallback):
    """Records the gradients of each optimizer step and the reported norms."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, **event: Any) -> None:
        self.steps.append([parameter.grad.clone() for parameter in event["model"].parameters()])

    def on_train_metrics(self, **event: Any) -> None:
        self.norms.append(event["metrics"]["grad_norm"])


def together(gradients: list[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.fixture
def first_step(args: Make, fit: Make) -> Callable[..., tuple[Tensor, float]]:
    """All gradients of the first step as one vector, and their reported norm."""

    def run(**settings: Any) -> tuple[Tensor, float]:
        seen = Gradients()
        fit(args(max_steps=1, **settings), callbacks=[seen])
        return together(seen.steps[0]), seen.norms[0]

    return run


def test_gradients_above_the_limit_are_scaled_together(first_step: Make) -> None:
    plain, norm = first_step(max_grad_norm=0)
    clipped, reported = first_step(max_grad_norm=norm / 4)
    assert reported == norm == pytest.approx(float(plain.norm()), rel=8 * EPS)  # as it was before
    assert float(clipped.norm()) == pytest.approx(norm / 4, rel=1e-5)  # torch divides by the norm + 1e-6
    scale = clipped.norm() / plain.norm()
    torch.testing.assert_close(clipped, plain * scale, rtol=8 * EPS, atol=0)


def test_gradients_below_the_limit_are_unchanged(first_step: Make) -> None:
    plain, norm = first_step(max_grad_norm=0)
    clipped, _ = first_step(max_grad_norm=2 * norm)
    assert torch.equal(clipped, plain)


def test_default_limit_is_one(first_step: Make, args: Make) -> None:
    assert args().max_grad_norm == 1.0
    _, norm = first_step(max_grad_norm=0)
    clipped, _ = first_step()
    assert float(clipped.norm()) == pytest.approx(min(norm, 1.0), rel=1e-5)


def test_the_accumulated_gradient_is_clipped(first_step: Make) -> None:
    _, norm = first_step(max_grad_norm=0, per_device_train_batch_size=8)
    whole, _ = first_step(max_grad_norm=norm / 2, per_device_train_batch_size=8)
    parts, reported = first_step(max_grad_norm=norm / 2, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert reported == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6 * norm)


def test_gradients_are_clipped_after_unscaling(first_step: Make) -> None:
    _, norm = first_step(max_grad_norm=0)
    clipped, reported = first_step(max_grad_norm=norm / 4, mixed_precision="fp16")
    assert reported == pytest.approx(norm, rel=0.01)  # 10 bits of mantissa, and not times the scale of 65536
    assert float(clipped.norm()) == pytest.approx(norm / 4, rel=1e-4)


def test_clipped_steps_match_a_hand_written_loop(args: Make, fit: Make, net: Make, data: Make) -> None:
    rows, limit, model = data(4), 0.05, net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)
    x, labels = torch.stack([row["x"] for row in rows]), torch.tensor([row["labels"] for row in rows])
    for _ in range(3):
        nn.functional.cross_entropy(model(x), labels).backward()
        assert float(nn.utils.clip_grad_norm_(model.parameters(), limit)) > limit
        optimizer.step()
        optimizer.zero_grad()
    trainer, _ = fit(args(max_steps=3, max_grad_norm=limit), train_dataset=rows)
    for ours, theirs in zip(trainer.unwrapped_model().parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
