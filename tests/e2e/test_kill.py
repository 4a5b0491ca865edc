"""A run that is killed or stopped at any time resumes with the same command and ends with the same bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import wait_until, whimbrel
from tests.support.finetuning import reversal_task, save_base_model, write_chats
from tests.support.runs import prepare_text

from whimbrel.base.files import PARTIAL
from whimbrel.checkpoint import list_checkpoints, read_component, read_manifest, verify_checkpoint
from whimbrel.config import dump_toml
from whimbrel.train import read_log

SOAK = os.environ.get("WHIMBREL_SOAK") == "1"
KILLS = 50 if SOAK else 4
"""Kills of each recipe: 450 in all with WHIMBREL_SOAK=1, else 20."""
OUTPUT = Path("output.txt")
TIMED = {"seconds", "peak_memory", "resumed"}
"""Values that differ between equal runs."""

Table = dict[str, dict[str, Any]]

EVERYTHING: Table = {
    "model": {"context_length": 32, "vocab_size": 300, "num_layers": 2, "embd_size": 32, "num_heads": 2,
              "position": "rope"},
    "data": {"shuffle_seed": 3, "documents": "mask"},
    "train": {"steps": 60, "micro_batch": 4, "accumulation": 2, "clip": 1.0, "device": "cpu", "seed": 11},
    "optim": {"name": "adamw", "lr": 1e-2},
    "schedule": {"name": "cosine", "warmup_steps": 10},
    "validation": {"every": 7, "tokens": 320},
    "checkpoint": {"every": 4, "keep": 2, "best": 1},
    "sample": {"every": 9, "max_new_tokens": 4},
    "ema": {"decay": 0.9},
    "log": {"every": 6},
}  # fmt: skip
"""A run with every feature that has state to resume."""

RECIPES: dict[str, Table] = {
    "adamw": {"schedule": {"name": "constant"}, "optim": {"lr": 3e-2}},  # its best checkpoint is not its last
    "muon": {"optim": {"name": "muon"}, "train": {"precision": "bf16"}, "data": {"documents": "join"}},
    "galore": {
        "optim": {"name": "galore_warm", "rank": 4, "gap": 7},
        "train": {"accumulation": 3, "micro_batch": 2},
    },
    "low-bit": {"optim": {"name": "adamw8bit"}, "train": {"weight_dtype": "int8"}},
    "dropout": {},  # the script dropout_run.py
    "lora": {},  # fine-tuning: write_finetuning_recipe
}
SOAK_RECIPES: dict[str, Table] = {
    "pack": {"data": {"documents": "pack"}, "train": {"accumulation": 3, "micro_batch": 2}},
    "recompute": {"train": {"recompute": "full"}},
    "selective": {"train": {"recompute": "selective", "precision": "bf16", "accumulation": 1}},
    "synchronous": {"checkpoint": {"asynchronous": False}, "optim": {"name": "muon"}},
}
if importlib.util.find_spec("tensorboard"):
    SOAK_RECIPES["pack"]["log"] = {"tensorboard": True}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """Shards for two epochs; the vocabulary has 300 tokens, and every speech is a document."""
    folder = tmp_path_factory.mktemp("shards")
    prepare_text(folder, shakespeare[:16_000], val_tokens=600)
    return folder / "shards"


@pytest.fixture
def folder(workdir: Path, shards: Path) -> Path:
    """The current directory, with a recipe that writes to `run`."""
    write_recipe(shards, {})
    return workdir


def write_recipe(shards: Path, changes: Table) -> None:
    table = {section: values | changes.get(section, {}) for section, values in EVERYTHING.items()}
    table["data"]["path"] = str(shards)
    Path("recipe.toml").write_text(dump_toml({"output_dir": "run"} | table))


def write_finetuning_recipe() -> None:
    """Adapters with dropout on int8 weights, and new special tokens; data and base are in the current directory."""
    save_base_model(Path("base"))
    write_chats(Path("chats.jsonl"), reversal_task()[0])
    table: Table = {
        "model": {"path": "base", "weights": "int8"},
        "data": {"path": "chats.jsonl", "val": 0.1, "template": "gemma"},
        "train": {"steps": 48, "micro_batch": 4, "accumulation": 3, "clip": 1.0, "device": "cpu", "seed": 11},
        "lora": {"rank": 4, "dropout": 0.1},
        "optim": {"lr": 1e-2},
        "schedule": {"name": "cosine", "warmup_steps": 0.1},
        "validation": {"every": 7},
        "checkpoint": {"every": 4, "keep": 2, "best": 1},
        "sample": {"every": 9, "prompt": "012", "max_new_tokens": 4},
        "log": {"every": 6},
    }
    Path("recipe.toml").write_text(dump_toml({"output_dir": "run"} | table))


def contents(run: Path) -> dict[str, Any]:
    """The contents of every file of a run; files that contain timestamps are parsed and the timestamps removed."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and "tfevents" not in path.name]
    found = {path.relative_to(run).as_posix(): content(path) for path in files}
    return found | {folder.parent.name: curves(folder) for folder in run.glob("runs/*")}


def content(path: Path) -> Any:
    if path.name == "log.jsonl":
        return without_timings(read_log(path))
    if path.name == "trainer.json":
        state = read_component(path.parent, "trainer")
        return without_timings(
            state | {"log_history": [json.loads(line) for line in state["log_history"].splitlines()]}
        )
    if path.name == "manifest.json":
        manifest = read_manifest(path.parent)
        files = {name: entry for name, entry in manifest.files.items() if name != "trainer.json"}
        return manifest.step, manifest.components, manifest.metadata, without_timings(manifest.metric), files
    return path.read_bytes()


def curves(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """The scalars that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith(("tokens_per_second", *TIMED))]
    return {tag: [(event.step, event.value.hex()) for event in events.Scalars(tag)] for tag in tags}


def without_timings(value: Any) -> Any:
    """Remove timings and memory; floats become hexadecimal so that every bit is compared."""
    if isinstance(value, dict):
        return {key: without_timings(item) for key, item in value.items() if key not in TIMED}
    if isinstance(value, list | tuple):
        return [without_timings(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def assert_same(uninterrupted: Path, killed: Path) -> None:
    expected, found = contents(uninterrupted), contents(killed)
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to check that it can fork")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*RECIPES, *(SOAK_RECIPES if SOAK else ())])
def test_run_killed_at_random_times_ends_with_the_same_files(
    workdir: Path, shards: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    if name == "lora":
        write_finetuning_recipe()
    else:
        write_recipe(shards, (RECIPES | SOAK_RECIPES)[name])
    script = [Path(__file__).with_name("dropout_run.py")] if name == "dropout" else []
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("random_kills.py"), str(KILLS), name, *script],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["faults"] == []
    assert seen["kills"] == KILLS
    assert seen["inside"] >= (0.3 if SOAK else 0.2) * KILLS
    assert seen["resumed"] >= (0.3 * KILLS if SOAK else 1), "too few attempts were seen to resume from a checkpoint"
    for number in range(seen["runs"]):
        assert_same(workdir / "uninterrupted", workdir / f"killed-{number}")
        assert whimbrel("verify", f"killed-{number}") == 0
    output = (workdir / "output.txt").read_text()
    assert "skipped" not in output, "a kill left a damaged checkpoint"
    record_property(
        "faults", f"killed while training ({name}): {seen['kills']} kills, {seen['inside']} inside a save, "
        f"{seen['fresh']} of new processes, {seen['runs']} runs, all equal to the uninterrupted one",
    )  # fmt: skip


def start(*arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "whimbrel", "train", "recipe.toml", *arguments]
    with OUTPUT.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def steps_logged(run: Path = Path("run")) -> int:
    log = run / "log.jsonl"
    return sum(line["kind"] == "step" for line in read_log(log)) if log.exists() else 0


def test_run_stopped_by_signals_resumes_to_the_same_files(folder: Path) -> None:
    rarely = ("--checkpoint.every=23", "--validation.every=29", "--log.every=31", "--sample.every=37")
    assert start(*rarely).wait(120) == 0
    Path("run").rename("uninterrupted")
    for number, options, code in ((signal.SIGTERM, (), 0), (signal.SIGINT, ("--exit-143",), 143)):
        before = steps_logged()
        process = start(*rarely, *options)
        wait_until(process, lambda before=before: steps_logged() >= before + 10, OUTPUT)
        process.send_signal(number)
        assert process.wait(120) == code
        newest = max(list_checkpoints(Path("run")))
        assert newest == steps_logged() < 46
    assert start(*rarely).wait(120) == 0
    expected, found = contents(Path("uninterrupted")), contents(Path("run"))
    for name in expected:
        assert found[name] == expected[name], name
    extra = {Path(name).parent for name in found.keys() - expected.keys()}
    assert {path.parent.name for path in extra} == {"ema"}  # EMA weights of the two checkpoints that the signals caused


def test_second_signal_kills_at_once_and_the_run_is_listed_as_dead(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start("--train.accumulation=1300")  # a step takes seconds
    wait_until(process, lambda: steps_logged() >= 1, OUTPUT)
    time.sleep(0.2)  # the next step has started
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    assert list_checkpoints(Path("run")) == {}
    assert whimbrel("runs", ".") == 0
    assert "dead" in capsys.readouterr().out
    assert whimbrel("control", "run", "status") == 2
    assert "run is not running" in capsys.readouterr().err


def test_running_job_saves_stops_and_aborts_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endless = ("--train.steps=1000000", "--checkpoint.every=none", "--validation.every=none", "--sample=none")
    run = Path("run")
    process = start(*endless)
    wait_until(process, lambda: steps_logged() >= 5, OUTPUT)
    assert whimbrel("control", "run", "status") == 0
    assert "1000000" in capsys.readouterr().out.replace(",", "")
    assert whimbrel("runs", ".") == 0
    assert "running" in capsys.readouterr().out
    assert start(*endless).wait(120) == 2  # the run directory is locked
    assert whimbrel("control", "run", "save") == 0
    wait_until(process, lambda: bool(list_checkpoints(run)), OUTPUT)
    [saved] = list_checkpoints(run)
    wait_until(process, lambda: steps_logged() > saved, OUTPUT)
    assert whimbrel("control", "run", "save-stop") == 0
    assert process.wait(120) == 0
    last = max(list_checkpoints(run))
    assert last == steps_logged() > saved
    assert not any(line["kind"] == "validation" and line["after"] > saved for line in read_log(run / "log.jsonl"))
    process = start(*endless)
    wait_until(process, lambda: steps_logged() > last + 5, OUTPUT)
    assert whimbrel("control", "run", "abort") == 0
    assert process.wait(120) == 0
    assert max(list_checkpoints(run)) == last
    for path in list_checkpoints(run).values():
        verify_checkpoint(path)
    assert not list(run.rglob(f"{PARTIAL}*"))
    capsys.readouterr()
    assert whimbrel("runs", ".") == 0
    assert "stopped" in capsys.readouterr().out


def test_only_one_of_several_jobs_gets_the_run_directory(folder: Path) -> None:
    endless = ("--train.steps=1000000", "--validation.every=none", "--sample=none")
    processes = [start(*endless, f"--optim.lr={rate}") for rate in (0.01, 0.02, 0.03)]
    deadline = time.monotonic() + 300
    while sum(process.poll() is None for process in processes) > 1:
        assert time.monotonic() < deadline, OUTPUT.read_text()
        time.sleep(0.05)
    (winner,) = [process for process in processes if process.poll() is None]
    wait_until(winner, lambda: bool(list_checkpoints(Path("run"))), OUTPUT)
    winner.send_signal(signal.SIGTERM)
    assert winner.wait(120) == 0
    output = OUTPUT.read_text()
    assert sorted(process.returncode for process in processes) == [0, 2, 2]
    assert output.count(f"run is in use by process {winner.pid} on ") == 2
    losses = [line for line in read_log(Path("run/log.jsonl")) if line["kind"] == "step"]
    assert [line["after"] for line in losses] == list(range(1, len(losses) + 1))
