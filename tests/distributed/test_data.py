"""Data over ranks: splitting, equal losses and metrics, positions, and random numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import data_jobs as jobs
from tests.distributed.pool import Pool
from tests.support.runs import prepare_text
from torch.utils.data import DataLoader

from whimbrel.train import device
from whimbrel.train.batches import DatasetBatches, collate, make_batches
from whimbrel.train.config import LoaderConfig
from whimbrel.train.objectives import DummyBatch

CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""fp32 sums in another order; a dozen steps of AdamW amplify them little."""
EVAL_TOLERANCE = 1e-6
"""Sums of fp32 batch losses in fp64: each batch loss has a rounding error of about 1e-7."""


def listed(size: int) -> list[dict[str, int]]:
    return [{"x": i} for i in range(size)]


def stream(size: int) -> Any:
    return jobs.Stream([{"x": torch.tensor(i)} for i in range(size)])


def loader(size: int) -> Any:
    return DataLoader([{"x": i} for i in range(size)], batch_size=2, shuffle=True)


SOURCES = {"list": listed, "stream": stream, "DataLoader": loader}


def rank_batches(source: Any, batch_size: int, world_size: int, **settings: Any) -> list[DatasetBatches]:
    """The batches of every rank."""
    return [
        make_batches(
            source, batch_size, CPU, collate=collate, seed=7, shuffle=True, loader=LoaderConfig(**settings),
            rank=rank, world_size=world_size,
        )
        for rank in range(world_size)
    ]  # type: ignore[misc] # fmt: skip


def read(ranks: list[DatasetBatches], epoch: int, steps: int | None = None) -> list[list[list[int] | None]]:
    """The values of each global batch by rank, None for a filler; an epoch, or `steps` of it."""
    for batches in ranks:
        batches.start_epoch(epoch)
    found: list[list[list[int] | None]] = []
    while steps is None or len(found) < steps:
        step = [batches.next_batch() for batches in ranks]
        if step[0] is None:
            assert step == [None] * len(ranks)  # all ranks end together
            break
        found.append([None if isinstance(batch, DummyBatch) else batch["x"].tolist() for batch in step])
    return found


def flat(found: list[list[list[int] | None]]) -> list[int]:
    return [value for step in found for values in step if values is not None for value in values]


@pytest.mark.parametrize("name", SOURCES)
def test_ranks_share_the_order_of_one_process(name: str) -> None:
    """Every sample once per epoch, in the same global order for every number of ranks."""
    alone = [flat(read(rank_batches(SOURCES[name](25), 2, 1), epoch)) for epoch in (0, 1)]
    assert sorted(alone[0]) == list(range(25))
    assert (alone[0] == alone[1]) == (name == "stream")
    for world_size in (2, 3, 4):
        ranks = rank_batches(SOURCES[name](25), 2, world_size)
        for epoch in (0, 1):
            found = read(ranks, epoch)
            assert flat(found) == alone[epoch]
            assert len(found) == -(-25 // (2 * world_size))
            assert name == "stream" or len(ranks[0]) == len(found)
            assert all(len(values or []) == 2 for step in found[:-1] for values in step)


def test_workers_do_not_change_the_batches_of_ranks() -> None:
    expected = read(rank_batches(listed(9), 2, 2), 0)
    assert None in expected[-1]
    assert read(rank_batches(listed(9), 2, 2, workers=1), 0) == expected
    assert read(rank_batches(stream(9), 2, 2, workers=1), 0) == read(rank_batches(stream(9), 2, 2), 0)


def test_a_short_last_batch_is_split_evenly() -> None:
    assert [len(values or []) for values in read(rank_batches(listed(22), 2, 4), 0)[-1]] == [1, 2, 1, 2]
    assert [len(values or []) for values in read(rank_batches(listed(18), 2, 4), 0)[-1]] == [0, 1, 0, 1]
    dropped = read(rank_batches(listed(22), 2, 4, drop_last=True), 0)
    assert [[len(values or []) for values in step] for step in dropped] == [[2] * 4] * 2


@pytest.mark.parametrize("name", SOURCES)
def test_another_number_of_ranks_continues_at_the_same_sample(name: str) -> None:
    alone = [flat(read(rank_batches(SOURCES[name](50), 2, 1), epoch)) for epoch in (0, 1)]
    for before, after in ((1, 2), (2, 1), (4, 3), (3, 4), (2, 8)):
        ranks = rank_batches(SOURCES[name](50), 2, before)
        first = read(ranks, 0, steps=2)
        states = [batches.state_dict() for batches in ranks]
        assert all(state == states[0] for state in states)
        other = rank_batches(SOURCES[name](50), 2, after)
        for batches in other:
            batches.load_state_dict(states[0])
        second = read(other, 0, steps=3)
        assert flat(first) + flat(second) == alone[0][: len(flat(first)) + len(flat(second))]
        # A save of the resumed run is exact too.
        third = rank_batches(SOURCES[name](50), 2, after)
        for batches in third:
            batches.load_state_dict(other[0].state_dict())
        rest = read(third, 0)
        assert rest == read(other, 0)
        assert flat(first) + flat(second) + flat(rest) == alone[0]
        assert third[0].epoch == other[0].epoch == (0.0 if name == "stream" else 1.0)
        assert flat(read(third, 1)) == alone[1]


CELLS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"parallel": {"strategy": "fsdp"}}),
    (3, {"source": "iterable"}),
    (2, {"source": "DataLoader", "count": 26}),
    (2, {"kind": "regressor", "metrics": False}),
    (2, {"kind": "classifier"}),
    (2, {"kind": "preferences"}),
    (2, {"kind": "preferences", "parallel": {"strategy": "fsdp"}}),
    (2, {"kind": "self-preferences"}),
    (2, {"kind": "self-preferences", "parallel": {"strategy": "fsdp"}}),
    (2, {"kind": "function"}),
    (2, {"kind": "function", "parallel": {"strategy": "fsdp"}}),
    (4, {"parallel": {"tp": 2}}),
    (4, {"parallel": {"pp": 2}, "metrics": False}),
]


@pytest.mark.parametrize(("world_size", "settings"), CELLS, ids=str)
def test_ranks_train_like_one_process_with_larger_batches(
    pool: Pool, tmp_path: Path, world_size: int, settings: dict[str, Any]
) -> None:
    """Masked targets, accumulation, and a last batch that leaves a rank without samples."""
    settings = {"metrics": settings.get("kind", "gpt") == "gpt", **settings}
    arguments = {"num_train_epochs": 2, "max_grad_norm": 0.5, "output_dir": str(tmp_path / "alone")}
    if settings.get("source") == "iterable":
        arguments["max_steps"] = 6  # two epochs
    parallel = settings.get("parallel", {})
    data_ranks = world_size // parallel.get("tp", 1) // parallel.get("pp", 1)
    alone = jobs.fit(
        settings,
        {**arguments, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2 * data_ranks},
        True,
    )
    ranks = pool.run(
        world_size, jobs.fit, settings,
        {**arguments, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
         "output_dir": str(tmp_path / "ranks")},
    )  # fmt: skip
    for found in ranks:
        torch.testing.assert_close(
            torch.tensor(found["curve"]), torch.tensor(alone["curve"]), rtol=TOLERANCE, atol=TOLERANCE
        )
        if "pp" not in parallel:  # whose ranks have some of the weights
            assert found["weights"] == pytest.approx(alone["weights"], rel=TOLERANCE, abs=TOLERANCE)
        assert (found["steps"], found["tokens"]) == (alone["steps"], alone["tokens"])
        assert found["epochs"][-1] == alone["epochs"][-1] == 2.0
        assert found.get("eval") == ranks[0].get("eval")
        for name, value in alone.get("eval", {}).items():
            assert found["eval"][name] == pytest.approx(value, rel=100 * EVAL_TOLERANCE), name


@pytest.mark.parametrize("parallel", [{}, {"strategy": "fsdp"}], ids=str)
@pytest.mark.parametrize("method", ["compute_loss_func", "compute_loss", "training_step"])
def test_a_rank_without_samples_has_no_weight_in_plain_means(
    pool: Pool, tmp_path: Path, method: str, parallel: dict[str, Any]
) -> None:
    """Of three equal examples, two ranks have one each, then one rank has the third.

    The mean over ranks is half of it then, except with `compute_loss`, whose means are weighted by targets.
    """
    for first, second in pool.run(2, jobs.fit_plain_means, method, parallel, {"output_dir": str(tmp_path)}):
        share = 1 if method == "compute_loss" else 0.5
        assert second == pytest.approx([share * value for value in first], rel=TOLERANCE)


@pytest.mark.parametrize("count", [13, 16])
def test_evaluation_on_ranks_equals_that_of_one_process(pool: Pool, tmp_path: Path, count: int) -> None:
    """Of untrained weights, so that only the evaluation differs."""
    arguments = {"per_device_train_batch_size": 2, "max_steps": 1, "output_dir": str(tmp_path)}
    logits, labels, metrics = jobs.predict({"metrics": True}, arguments, count, True)
    for world_size, settings in ((2, {}), (3, {"parallel": {"strategy": "fsdp"}})):
        for found in pool.run(world_size, jobs.predict, {"metrics": True, **settings}, arguments, count):
            assert torch.equal(found[1], labels)
            torch.testing.assert_close(found[0], logits)
            assert found[2]["test_loss"] == pytest.approx(metrics["test_loss"], rel=EVAL_TOLERANCE)
            assert found[2]["test_count"] == count


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sampler", "DistributedSampler for 2 ranks: remove the sampler"),
        ("shard", "different examples read on rank 1"),
        ("stream", "different examples read on rank 1"),
        ("generator", "different generators on rank 1"),
    ],
)
def test_data_that_was_already_split_is_refused(pool: Pool, tmp_path: Path, kind: str, message: str) -> None:
    for error in pool.run(2, jobs.refused, kind, str(tmp_path)):
        assert message in error


def test_dropout_differs_over_data_ranks_only(pool: Pool) -> None:
    found = pool.run(4, jobs.first_numbers, {"tp": 2})
    assert [rank for rank, _, _ in found] == [0, 0, 1, 1]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0][1] != found[2][1]
    assert found[0][2] == found[2][2]


RUN = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8, "resume_from_checkpoint": None}


@pytest.mark.parametrize("source", ["list", "iterable"])
def test_the_same_ranks_resume_exactly(pool: Pool, tmp_path: Path, source: str) -> None:
    settings = {"kind": "regressor", "dropout": 0.3, "source": source}
    arguments = {**RUN, "per_device_train_batch_size": 2, "output_dir": str(tmp_path)}
    whole = pool.run(2, jobs.resume, settings, arguments)
    assert whole[0][2] == ""
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
    resumed = pool.run(2, jobs.resume, {**settings, "resume": True}, arguments)
    assert [found[2] for found in resumed] == ["step-00000003"] * 2
    assert [found[:2] for found in resumed] == [found[:2] for found in whole]


@pytest.mark.parametrize("source", ["list", "iterable"])
def test_other_ranks_continue_the_curve(pool: Pool, tmp_path: Path, source: str) -> None:
    """With the same global batch of 6 samples, over the end of an epoch of 25."""
    settings = {"source": source}
    alone = jobs.fit(
        settings, {"per_device_train_batch_size": 6, "max_steps": 8, "output_dir": str(tmp_path / "one")}, True
    )
    arguments = {**RUN, "output_dir": str(tmp_path / "ranks")}
    pool.run(2, jobs.resume, settings, {**arguments, "per_device_train_batch_size": 3, "max_steps": 3})
    resumed = pool.run(3, jobs.resume, {**settings, "resume": True}, {**arguments, "per_device_train_batch_size": 2})
    for losses, epochs, name in resumed:
        assert name == "step-00000003"
        assert losses == pytest.approx([loss for loss, _ in alone["curve"]], rel=TOLERANCE)
        assert epochs == alone["epochs"]


def test_rngs_are_reseeded_on_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    """Differently on every data rank, the same each time, and rank 0 says so."""
    settings = {"kind": "regressor", "dropout": 0.3}
    arguments = {**RUN, "max_steps": 3, "output_dir": str(tmp_path)}
    pool.run(2, jobs.resume, settings, {**arguments, "per_device_train_batch_size": 3})
    arguments |= {"per_device_train_batch_size": 2}
    first, again = (pool.run(3, jobs.resume_with_messages, {**settings, "resume": True}, arguments) for _ in range(2))
    assert first == again
    assert [name for name, _, _ in first] == ["step-00000003"] * 3
    assert [len(messages) for _, messages, _ in first] == [1, 0, 0]
    assert "saved by 2 ranks, this run has 3 (dp_replicate=3): reseeding RNGs from seed" in first[0][1][0]
    assert len({tuple(numbers) for _, _, numbers in first}) == 3


def test_epochs_are_not_continued_with_other_samples_per_step(pool: Pool, tmp_path: Path) -> None:
    arguments = {**RUN, "per_device_train_batch_size": 2, "output_dir": str(tmp_path)}
    pool.run(2, jobs.resume, {}, {**arguments, "max_steps": 3})
    arguments |= {"max_steps": -1, "num_train_epochs": 3}
    (_, _, error), *_ = pool.run(3, jobs.resume, {"resume": True}, arguments)
    assert error.startswith("expected 4 samples per step, as in the checkpoint, got 2 x 3 ranks x 1 = 6")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    prepare_text(folder, shakespeare[:20_000])
    return folder / "shards"


def test_token_runs_keep_their_tokens_per_step(pool: Pool, shards: Path, tmp_path: Path) -> None:
    """A run of one process continues on 4, 3 and 2 ranks; 5 do not divide a step."""

    def table(name: str, **train: Any) -> dict[str, Any]:
        return {
            "output_dir": str(tmp_path / name),
            "model": {"context_length": 16, "vocab_size": 300, "num_layers": 1, "embd_size": 16, "num_heads": 2},
            "data": {"path": str(shards), "shuffle_seed": 1},
            "train": {"steps": 8, "tokens_per_step": 24 * 16, "device": "cpu", **train},
            "optim": {"lr": 1e-3}, "log": {"every": 1}, "checkpoint": {"every": 2},
        }  # fmt: skip

    expected = jobs.train_tokens(table("one"), 8)
    jobs.train_tokens(table("ranks", micro_batch=6), 2)
    for ranks, steps in ((4, 4), (3, 6), (2, 8)):
        results = pool.run(ranks, jobs.train_tokens, table("ranks"), steps)
        for losses, _, tokens, error in results:
            assert error == ""
            assert losses == pytest.approx(expected[0][:steps], rel=TOLERANCE)
            assert tokens == steps * 24 * 16
    assert results[0][1] == pytest.approx(expected[1], rel=TOLERANCE)
    (_, _, _, error), *_ = pool.run(5, jobs.train_tokens, table("ranks", micro_batch=2), 8)
    assert error.startswith("train.tokens_per_step = 384 is not a multiple of train.micro_batch x sequence length x")


def test_ranks_stop_early_together_and_load_the_best_weights(pool: Pool, tmp_path: Path) -> None:
    """Evaluations get worse with a learning rate that is far too high."""
    first, second = pool.run(2, jobs.stop_early, {
        "per_device_train_batch_size": 2, "max_steps": 20, "output_dir": str(tmp_path), "learning_rate": 0.1,
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    })  # fmt: skip
    assert first == second
    steps, best_step, best_metric, _, loss = first
    assert best_step is not None
    assert steps == best_step + 2 < 20
    assert loss == best_metric


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_rank_interrupts_an_evaluation(pool: Pool, tmp_path: Path, rank: int) -> None:
    """The resumed run repeats the evaluation; its curve is that of an uninterrupted run."""
    arguments = {
        "per_device_train_batch_size": 2, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "steps", "save_steps": 4,
    }  # fmt: skip
    whole = pool.run(2, jobs.evaluate_and_stop, {**arguments, "output_dir": str(tmp_path / "whole")}, -1)
    arguments["output_dir"] = str(tmp_path / "run")
    assert [found[:2] for found in pool.run(2, jobs.evaluate_and_stop, arguments, rank)] == [(2, {"evaluate"})] * 2
    resumed = pool.run(2, jobs.evaluate_and_stop, {**arguments, "resume_from_checkpoint": "latest"}, -1)
    assert resumed == whole
    assert [len(found[3]) for found in resumed] == [2, 2]


def test_different_weights_are_refused(pool: Pool, tmp_path: Path) -> None:
    for error in pool.run(2, jobs.different_weights, str(tmp_path)):
        assert "different values of transformer.h.1.mlp.c_fc.weight on rank 1 and rank 0" in error


def test_throughput_is_that_of_all_ranks(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, length = 2 * 2 * 3, jobs.LENGTH
    assert pool.run(2, jobs.summarize, str(tmp_path)) == [(samples, samples * length, 3 * length)] * 2
    monkeypatch.setattr(device, "device_name", lambda _: "NVIDIA H100")
    assert device.peak_flops(CPU, 8) == 8 * 989e12
