"""GaLore against galore-torch, torch's AdamW, and in `transformers.Trainer`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from whimbrel.optim import GaLore

SHAPES = [(24, 10), (10, 24), (16, 16), (9,)]


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def pairs(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same parameters twice."""
    ours, theirs = ([nn.Parameter(random(shape, seed, dtype)) for seed, shape in enumerate(SHAPES)] for _ in range(2))
    return ours, theirs


def set_gradients(ours: list[nn.Parameter], theirs: list[nn.Parameter], step: int) -> None:
    """Give both the same gradients."""
    for index, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        p.grad, q.grad = (random(tuple(p.shape), 1000 + 10 * step + index, p.dtype) for _ in range(2))


@pytest.fixture
def galore_torch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package, computing its singular vectors in fp64: it casts everything that is not `torch.float` to fp32."""
    package = pytest.importorskip("galore_torch", reason="needs the package 'galore-torch'")
    in_fp64 = SimpleNamespace(float=torch.float64, linalg=torch.linalg, matmul=torch.matmul, diag=torch.diag)
    monkeypatch.setattr(package.galore_projector, "torch", in_fp64)
    return package


@pytest.mark.parametrize("projection_type", ["std", "reverse_std", "right", "left", "full"])
@pytest.mark.parametrize("rank", [1, 4])
def test_steps_equal_galore_torch(galore_torch: ModuleType, rank: int, projection_type: str) -> None:
    """In fp64, and without weight decay, which galore-torch applies after the update.

    Directly after a refresh, U^T G V is diagonal but for rounding errors, and Adam divides each element by its own
    magnitude: an error d moves a weight by up to lr * scale * d / (d + eps). In fp32 d is about eps, so the update
    depends on the order in which a BLAS sums. In fp64 d < 1e-13, singular vectors included (1e-16 |G| / gap), which
    moves a weight by less than 1e-9 in ten steps. A wrong update differs by lr * scale = 2.5e-3.
    """
    ours, theirs = pairs(torch.float64)
    settings = {"rank": rank, "update_proj_gap": 3, "scale": 0.25}
    groups = [{"params": theirs[:3], "proj_type": projection_type, **settings}, {"params": theirs[3:]}]
    reference = galore_torch.GaLoreAdamW(groups, lr=1e-2, no_deprecation_warning=True)
    optimizer = GaLore(ours, lr=1e-2, projection_type=projection_type, **settings)
    for step in range(10):
        set_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, atol=1e-8, rtol=0)


@pytest.mark.parametrize(("eps", "tolerance"), [(1e-6, 1e-3), (1e-12, 1e-6)])
@pytest.mark.parametrize("maximize", [False, True])
def test_galore_without_a_rank_equals_adamw(eps: float, tolerance: float, maximize: bool) -> None:
    ours, theirs = pairs()
    optimizer = GaLore(ours, lr=1e-2, betas=(0.9, 0.99), eps=eps, weight_decay=0.1, maximize=maximize)
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.99), eps=eps, weight_decay=0.1, maximize=maximize)
    for step in range(20):
        set_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
        for p, q in zip(ours, theirs, strict=True):
            assert (p - q).norm() <= tolerance * q.norm()


def test_full_rank_is_not_adamw() -> None:
    """Adam is not rotation-invariant, so its updates depend on the basis."""
    ours, theirs = pairs()
    optimizer, reference = (
        GaLore(ours[:1], lr=1e-2, rank=24, scale=1.0),
        torch.optim.AdamW(theirs[:1], lr=1e-2, weight_decay=0.0),
    )
    for step in range(5):
        set_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
    assert (ours[0] - theirs[0]).norm() > 1e-2 * (theirs[0] - random(SHAPES[0], 0)).norm()


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return GPT2LMHeadModel(config)


def trainer(folder: Path, trained: GPT2LMHeadModel, steps: int) -> Trainer:
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0)).tolist()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=4, logging_steps=1, per_device_train_batch_size=4, seed=1,
        use_cpu=True, report_to=[], disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    blocks = {name: p for name, p in trained.named_parameters() if "transformer.h." in name}
    rest = [p for name, p in trained.named_parameters() if name not in blocks]
    groups = [{"params": list(blocks.values()), "rank": 4, "update_proj_gap": 3}, {"params": rest}]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return Trainer(trained, arguments, train_dataset=rows, optimizers=(GaLore(groups, lr=1e-2), None))


def test_transformers_trainer_saves_and_resumes_galore(tmp_path: Path) -> None:
    model_one, model_two = model(), model()
    uninterrupted = trainer(tmp_path / "uninterrupted", model_one, 8)
    uninterrupted.train()
    losses = [entry["loss"] for entry in uninterrupted.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1

    resumed = trainer(tmp_path / "resumed", model_two, 8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "uninterrupted" / "checkpoint-4"))
    assert resumed.state.global_step == 8
    for (name, p), q in zip(model_one.named_parameters(), model_two.parameters(), strict=True):
        assert torch.equal(p, q), name
    states = (optimizer.state_dict()["state"] for optimizer in (uninterrupted.optimizer, resumed.optimizer))
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one | other)
        assert int(one["step"]) == 8
