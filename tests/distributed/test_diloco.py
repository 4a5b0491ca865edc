"""DiLoCo: outer steps, compressed deltas, and runs of the trainer that resume exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.pool import Pool
from tests.support.runs import prepare_text
from torch import Tensor

from whimbrel.base.errors import ConfigError
from whimbrel.data import TokenDataLoader
from whimbrel.distributed import DiLoCo, Layout, ParallelConfig, World, join_world
from whimbrel.distributed.traffic import Workload, traffic
from whimbrel.train import Trainer, TrainerCallback
from whimbrel.train.build import create_outer_optimizer
from whimbrel.train.config import EmaConfig, TrainConfig, TrainerConfig
from whimbrel.train.run_config import build_run_config

SYNC_EVERY, STEPS = 4, 10


def outer_steps(settings: dict[str, Any], steps: int) -> tuple[list[Tensor], int]:
    """An inner optimizer that moves every weight by 0.01 * (rank + 1); the weights after each step, and bytes sent."""
    weights = {"a": torch.linspace(-1, 1, 512).view(16, 32), "b": torch.ones(512)}
    config = ParallelConfig(strategy="diloco", **settings)
    world = join_world(config, "cpu")
    outer = DiLoCo(weights, config, world, total_steps=100)
    outer.start()
    found = []
    for step in range(1, steps + 1):
        for weight in weights.values():
            weight -= 0.01 * (world.rank + 1)
        outer.step(step)
        found.append(torch.cat([weight.flatten() for weight in weights.values()]))
    return found, outer.bytes_sent


INITIAL = torch.cat([torch.linspace(-1, 1, 512), torch.ones(512)])


def test_nesterov_momentum_is_applied_to_the_mean_delta(pool: Pool) -> None:
    """Every two steps both ranks move by the mean of their deltas, 2 * 0.015, through the outer optimizer."""
    settings = {"sync_every": 2, "outer_lr": 0.5, "outer_momentum": 0.5}
    (first, sent), (second, _) = pool.run(2, outer_steps, settings, 4)
    anchor, momentum = INITIAL, 0.0
    for step in (1, 3):
        momentum = 0.5 * momentum + 0.03
        anchor = anchor - 0.5 * (0.03 + 0.5 * momentum)
        assert torch.equal(first[step], second[step])
        torch.testing.assert_close(first[step], anchor)
    assert not torch.equal(first[0], second[0])
    assert sent == 2 * 1024 * 4


def test_int8_deltas_are_sent_with_a_byte_per_value(pool: Pool) -> None:
    settings = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "delta_dtype": "int8"}
    (first, sent), (second, _) = pool.run(2, outer_steps, settings, 4)
    assert torch.equal(first[3], second[3])
    # A block of equal deltas is exact in int8 up to the rounding of its scale.
    torch.testing.assert_close(first[3], INITIAL - 0.06, rtol=0, atol=1e-6)
    half = 512 + 2 * 4  # codes and scales of half of the values
    assert sent == 2 * 2 * half  # to the rank that averages them, and back


def test_low_rank_deltas_send_factors(pool: Pool) -> None:
    settings = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "delta_rank": 1}
    (first, sent), (second, _) = pool.run(2, outer_steps, settings, 4)
    assert torch.equal(first[3], second[3])
    torch.testing.assert_close(first[3], INITIAL - 0.06, rtol=0, atol=1e-6)  # the delta has rank 1
    assert sent == 2 * (16 + 32 + 512) * 4


@pytest.mark.parametrize("settings", [{}, {"delta_dtype": "int8"}, {"delta_rank": 1}, {"delta_rank": 8}], ids=str)
def test_predicted_traffic_equals_the_bytes_sent(pool: Pool, settings: dict[str, Any]) -> None:
    config = ParallelConfig(strategy="diloco", sync_every=2, **settings)
    (_, sent), _ = pool.run(2, outer_steps, {"sync_every": 2, **settings}, 4)
    work = Workload(parameters=1024, layers=1, width=1, tokens=1, micro_batches=1, shapes=((16, 32), (512,)))
    assert 4 * sum(traffic(work, Layout(dp_replicate=2), config).values()) == sent


def test_fragments_are_synchronized_at_different_steps(pool: Pool) -> None:
    settings = {"sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0, "fragments": 2}
    (first, sent), (second, _) = pool.run(2, outer_steps, settings, 4)
    agree = [(torch.equal(a[:512], b[:512]), torch.equal(a[512:], b[512:])) for a, b in zip(first, second, strict=True)]
    assert agree == [(False, False), (False, True), (False, False), (True, False)]
    assert sent == 1024 * 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    prepare_text(folder, shakespeare[:40_000])
    return folder / "shards"


class StopAfter(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step, self.losses, self.eval_losses = step, dict[int, str](), dict[int, float]()

    def on_train_metrics(self, **event: Any) -> None:
        self.losses[event["metrics"]["step"]] = event["metrics"]["loss"].hex()

    def on_evaluate(self, state: Any, metrics: dict[str, float], **_: Any) -> None:
        self.eval_losses[state.global_step] = metrics["eval_loss"]

    def on_step_end(self, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def run_table(folder: Path, shards: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "model": {"context_length": 32, "vocab_size": 300, "num_layers": 2, "embd_size": 32, "num_heads": 2},
        "data": {"path": str(shards), "shuffle_seed": 1},
        "train": {"steps": STEPS, "tokens_per_step": 256, "micro_batch": 4, "device": "cpu", "clip": 1.0},
        "validation": {"every": 2, "tokens": 512},
        "checkpoint": {"every": 2},
        "optim": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "schedule": {"name": "constant"},
        "log": {"tensorboard": False},
    }


def train(folder: Path, shards: Path, settings: dict[str, Any], stop_after: int | None = None) -> Any:
    """Train on the ranks of the process group; losses, evaluation losses and final weights."""
    parallel = {"strategy": "diloco", "sync_every": SYNC_EVERY, **settings}
    table = {**run_table(folder, shards), "parallel": parallel}
    callback = StopAfter(stop_after)
    trainer = Trainer.from_config(build_run_config(table), callbacks=[callback])
    trainer.train()
    return callback.losses, callback.eval_losses, {name: p.detach() for name, p in trainer.model.named_parameters()}


def reference(folder: Path, shards: Path, settings: dict[str, float]) -> tuple[list[float], dict[str, Tensor]]:
    """DiLoCo in one process, from PyTorch's optimizers: mean losses of two workers, and the final weights."""
    table = {**run_table(folder, shards), "parallel": {}}
    outer = Trainer.from_config(build_run_config(table)).model
    workers = [copy.deepcopy(outer) for _ in range(2)]
    loaders = [TokenDataLoader(shards, 4, 32, rank=rank, world_size=2, seed=1) for rank in range(2)]
    inner = [torch.optim.AdamW(worker.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0) for worker in workers]
    momentum, losses = settings["outer_momentum"], []
    optimizer = torch.optim.SGD(outer.parameters(), settings["outer_lr"], momentum, nesterov=momentum > 0)
    for step in range(1, STEPS + 1):
        total = 0.0
        for worker, loader, adamw in zip(workers, loaders, inner, strict=True):
            x, y = loader.next_batch()
            loss = torch.nn.functional.cross_entropy(worker(x).logits.flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(worker.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()
            total += loss.item()
        losses.append(total / 2)
        if step == STEPS:
            optimizer = torch.optim.SGD(outer.parameters(), lr=1.0)
        if step % SYNC_EVERY == 0 or step == STEPS:
            for parameter, *own in zip(outer.parameters(), *(worker.parameters() for worker in workers), strict=True):
                parameter.grad = parameter.detach() - (own[0] + own[1]).detach() / 2
            optimizer.step()
            for worker in workers:
                worker.load_state_dict(outer.state_dict())
    return losses, dict(outer.named_parameters())


@pytest.mark.parametrize(("outer_lr", "outer_momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_a_run_equals_diloco_in_one_process(
    pool: Pool, shards: Path, tmp_path: Path, outer_lr: float, outer_momentum: float
) -> None:
    settings = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
    (losses, _, weights), _ = pool.run(2, train, tmp_path / "run", shards, settings)
    expected_losses, expected_weights = reference(tmp_path / "reference", shards, settings)
    torch.testing.assert_close([float.fromhex(loss) for loss in losses.values()], expected_losses, rtol=1e-5, atol=0)
    assert losses.keys() == set(range(1, STEPS + 1))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name].detach(), rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "settings",
    [{"outer_lr": 0.7, "outer_momentum": 0.9}, {"fragments": 2, "delta_dtype": "int8"}, {"delta_rank": 2}],
    ids=["fp32", "fragments-int8", "rank"],
)
def test_a_resumed_run_equals_the_unbroken_one(
    pool: Pool, shards: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    unbroken = pool.run(2, train, tmp_path / "a", shards, settings)
    first = pool.run(2, train, tmp_path / "b", shards, settings, 6)  # between two synchronizations
    second = pool.run(2, train, tmp_path / "b", shards, settings)
    losses, _, weights = unbroken[0]
    assert first[0][0] | second[0][0] == losses
    for _, _, others in (unbroken[1], *second):
        assert all(torch.equal(others[name], weight) for name, weight in weights.items())


def optimizer_steps(folder: Path, shards: Path, parallel: dict[str, Any], stop_after: int | None) -> float:
    """Train; returns the number of steps in the optimizer's state."""
    table = {**run_table(folder, shards), "parallel": parallel}
    trainer = Trainer.from_config(build_run_config(table), callbacks=[StopAfter(stop_after)])
    trainer.train()
    return float(next(iter(trainer.optimizer.state.values()))["step"])


@pytest.mark.parametrize(("before", "after"), [("diloco", "ddp"), ("ddp", "diloco")])
def test_optimizer_states_survive_a_change_of_strategy(
    pool: Pool, shards: Path, tmp_path: Path, before: str, after: str
) -> None:
    assert pool.run(2, optimizer_steps, tmp_path, shards, {"strategy": before}, 6) == [6, 6]
    assert pool.run(2, optimizer_steps, tmp_path, shards, {"strategy": after}, None) == [STEPS, STEPS]


def test_outer_parameters_are_evaluated_and_saved(pool: Pool, shards: Path, tmp_path: Path) -> None:
    (_, eval_losses, weights), _ = pool.run(2, train, tmp_path / "run", shards, {})
    assert eval_losses[4] == eval_losses[6]  # nothing was synchronized in between
    assert len({eval_losses[step] for step in (2, 4, 8, 10)}) == 4  # step 2 has the initial parameters
    saved = {
        step: load_file(tmp_path / f"run/checkpoints/step-{step:08d}/model/model.safetensors") for step in (4, 6, 10)
    }
    assert all(torch.equal(saved[4][name], saved[6][name]) for name in saved[4])
    matrices = [weight for weight in weights.values() if weight.ndim == 2]
    assert any(torch.equal(tensor, weight) for tensor in saved[10].values() for weight in matrices)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"train": TrainConfig(steps=1, precision="fp16")}, "fp16"), ({"ema": EmaConfig(decay=0.9)}, "ema.decay")],
)
def test_settings_that_do_not_work_with_diloco_raise(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    world = World(independent=True)
    settings = {"train": TrainConfig(steps=1), "parallel": ParallelConfig(strategy="diloco"), **changes}
    config = TrainerConfig(output_dir=tmp_path, **settings)
    with pytest.raises(ConfigError, match=name):
        create_outer_optimizer(torch.nn.Linear(2, 2), config, world, total_steps=1)
