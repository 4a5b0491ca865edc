"""Start, control and end of distributed runs; trainers with a fixed strategy."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import launch_jobs as jobs
from tests.distributed.pool import Pool
from tests.support.commands import whimbrel
from tests.support.processes import PATIENCE, RECIPE, TORCHRUN, DistributedRun, free_endpoint
from tests.support.runs import prepare_text

from whimbrel.checkpoint import list_checkpoints
from whimbrel.train import load_run_config, read_log, train

WORKER = Path(__file__).parents[1] / "faults" / "worker.py"
WHIMBREL = (sys.executable, "-m", "whimbrel")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare_text(folder, shakespeare[:20_000], val_tokens=800)
    return folder / "shards"


@pytest.fixture
def run(workdir: Path, shards: Path) -> Iterator[DistributedRun]:
    (workdir / "shards").symlink_to(shards)
    run = DistributedRun(workdir)
    yield run
    run.kill()


def write_recipe(run: DistributedRun, steps: int) -> None:
    (run.folder / "recipe.toml").write_text(RECIPE.format(steps=steps, every=10, timeout=60))


@pytest.fixture(scope="module")
def losses_of_one_process(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "recipe.toml").write_text(RECIPE.format(steps=12, every=10, timeout=60))
    train(load_run_config(folder / "recipe.toml", [f"--output_dir={folder}/run", f"--data.path={shards}"]))
    return {line["after"]: line["loss"] for line in read_log(folder / "run/log.jsonl") if line["kind"] == "step"}


def test_auto_run_of_two_processes_says_its_strategy_and_obeys_control(
    run: DistributedRun, losses_of_one_process: dict[int, float], capfd: pytest.CaptureFixture[str]
) -> None:
    write_recipe(run, 100_000)
    options = ("--nproc", 2, "--parallel.strategy=auto", "--checkpoint.every=none")
    run.start(*WHIMBREL, "train", "recipe.toml", "--plain", *options)
    run.wait(lambda: len(run.losses()) > len(losses_of_one_process))
    first = {step: loss for step, loss in run.losses().items() if step in losses_of_one_process}
    assert first == pytest.approx(losses_of_one_process, rel=1e-5)
    assert len(re.findall("^Strategy .auto.: ddp needs .* per device and sends .* per step$", run.text(), re.M)) == 1
    assert run.text().count("Distributed: ddp over 2 processes (dp_replicate=2), gloo, cpu") == 1
    assert whimbrel("control", "run", "status") == 0
    assert whimbrel("control", "run", "save") == 0
    run.wait(lambda: bool(list_checkpoints(run.folder / "run")))
    assert whimbrel("runs", ".") == 0
    assert re.search(r"run .*running", capfd.readouterr().out)
    assert whimbrel("control", "run", "stop") == 0
    assert run.wait_for_exit() == 0
    assert "Stopping: requested by whimbrel control stop" in run.text()
    assert max(list_checkpoints(run.folder / "run")) == len(run.losses())


def test_two_agents_train_like_one_process(run: DistributedRun, losses_of_one_process: dict[int, float]) -> None:
    write_recipe(run, 12)
    options = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", free_endpoint())
    for _ in range(2):
        run.start(*TORCHRUN, *options, "-m", "whimbrel", "train", "recipe.toml", "--plain", "--parallel.strategy=fsdp")
    assert [launcher.wait(PATIENCE) for launcher in run.launchers] == [0, 0], run.text()
    run.wait_for_exit()
    assert run.starts() == 1
    assert run.losses() == pytest.approx(losses_of_one_process, rel=1e-5)


def test_error_on_one_rank_stops_all_with_its_message_and_exit_code(run: DistributedRun) -> None:
    write_recipe(run, 100_000)
    run.start(sys.executable, WORKER, "train", "recipe.toml", "--plain", "--nproc", 2)
    run.wait(run.is_stepping)
    (run.folder / "fault-1").write_text("raise")
    assert run.wait_for_exit() == 2
    errors = [line for line in run.text().splitlines() if re.search("rror|Traceback|peer|rank", line)]
    assert errors == ["[rank 1] whimbrel: an injected error"]


def test_error_of_all_ranks_is_printed_once(run: DistributedRun) -> None:
    write_recipe(run, 10)
    run.start(*WHIMBREL, "train", "recipe.toml", "--nproc", 2, "--parallel.tp=3")
    assert run.wait_for_exit() == 2
    (line,) = run.text().splitlines()
    assert "whimbrel: expected parallel sizes whose product is the number of processes, 2, got tp = 3" in line


SCRIPT = """
import os
import torch
from whimbrel.models import GPT, GPTConfig
from whimbrel.train import Trainer, TrainerCallback, TrainingArguments

class Fault(TrainerCallback):
    all_ranks = True

    def on_step_end(self, **event):
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and os.environ["RANK"] == "1" and event["state"].global_step == 5:
            raise ValueError("injected")

torch.manual_seed(0)
model = GPT(GPTConfig(num_layers=1, num_heads=2, embd_size=16, vocab_size=32, context_length=8))
rows = torch.arange(256).view(32, 8) % 32
args = TrainingArguments(
    output_dir="run", overwrite_output_dir=True, max_steps=7, per_device_train_batch_size=2, save_steps=2,
    logging_steps=1, use_cpu=True, disable_tqdm=True,
)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(args, model, train_dataset=data, callbacks=[Fault()])
trainer.train()
print("RESUMED" if trainer.resumed_from is not None else "NEW", flush=True)
"""


def test_restarted_script_resumes_and_prints_the_error(run: DistributedRun) -> None:
    (run.folder / "script.py").write_text(SCRIPT)
    run.start(*TORCHRUN, "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "script.py")
    assert run.wait_for_exit() == 0, run.text()
    assert run.text().count("ValueError: injected") == 1
    assert (run.text().count("RESUMED"), run.text().count("NEW")) == (2, 0)
    assert {4, 6} <= list_checkpoints(run.folder / "run").keys()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return jobs.train("Trainer", str(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize(
    ("name", "wrapper", "sharded"),
    [
        ("Trainer", "DistributedDataParallel", False),
        ("DDPTrainer", "DistributedDataParallel", False),
        ("FSDPTrainer", "FSDPGPT", True),
        ("AccelTrainer", "DistributedDataParallel", False),
        ("PipelineTrainer", "PipelineModel", False),
    ],
)
def test_trainers_train_like_one_process_and_stop_together(
    pool: Pool, tmp_path: Path, expected: dict[str, Any], name: str, wrapper: str, sharded: bool
) -> None:
    folder = str(tmp_path / "run")
    accelerate = name == "AccelTrainer"
    results = pool.run(2, jobs.train_with_accelerate, folder) if accelerate else pool.run(2, jobs.train, name, folder)
    for rank, found in enumerate(results):
        assert "error" not in found, found
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0)
        assert (found["wrapper"], found["sharded"]) == (wrapper, sharded)
        assert found["steps"] == (5, 5, 5 if rank == 0 else 0)  # only rank 0 calls a callback without all_ranks
        assert found["process"] == (2, rank, rank == 0)
        assert found["gathered"] == [0, 1]


def test_accel_trainer_refuses_other_layouts_than_data_parallelism(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, jobs.train_with_accelerate, str(tmp_path), {"tp": 2}):
        assert "AccelTrainer does not work with parallel sizes tp=2" in found["error"]


def test_flags_that_callbacks_of_rank_0_set_reach_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for evaluated in pool.run(2, jobs.train_with_flags, str(tmp_path)):
        assert evaluated == [2, 5]
    assert 3 in list_checkpoints(tmp_path)


def test_all_groups_of_a_mesh_have_the_configured_timeout(pool: Pool) -> None:
    for timeouts in pool.run(4, jobs.group_timeouts, {"tp": 2, "dp_replicate": 2}):
        assert set(timeouts.values()) == {20.0}


def test_trainer_of_another_strategy_is_refused(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, jobs.train, "FSDPTrainer", str(tmp_path), {"strategy": "ddp"}):
        assert found["error"] == (
            "FSDPTrainer trains with strategy = fsdp or hsdp, got ddp: omit strategy, or use Trainer"
        )


def test_restarted_ranks_ignore_what_earlier_ones_left_in_the_store(pool: Pool, tmp_path: Path) -> None:
    names = pool.run(2, jobs.meet_twice, str(tmp_path / "store"))
    assert names[0] == names[1]
    assert names[0][0] != names[0][1]


def test_main_process_runs_a_block_first(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, jobs.order_of_main_process_first, str(tmp_path)) == [False, True]
