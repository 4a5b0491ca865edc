"""`log.jsonl` stays right whatever happens to a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from whimbrel.train.callbacks import JsonLogCallback
from whimbrel.train.log import read_log


def go(make_run: Any, first: int, last: int) -> None:
    run = make_run(JsonLogCallback(), steps=6).begin(first)
    for step in range(first, last):
        run.step(loss=3 - step / 10)
        if run.state.global_step % 2 == 0:
            run.evaluate(loss=2.5, accuracy=0.25)
            run.tell("on_sample", text="O Romeo", step=run.state.global_step)
    run.end()


def test_a_line_for_every_step_evaluation_sample_and_log(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonLogCallback(), steps=6).begin()
    run.step(loss=2.0)
    run.evaluate(loss=1.5, accuracy=0.0)
    run.tell("on_sample", text="Ay, me!\n", step=1)
    run.log({"norm/a": 0.25, "epoch": 0.5})
    run.end()
    assert read_log(tmp_path / "run" / "log.jsonl") == [
        {"kind": "step", "after": 1, "step": 0, "total": 6, "loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "seconds": 0.5,
         "tokens": 256},
        {"kind": "validation", "after": 1, "loss": 1.5, "eval_accuracy": 0.0},
        {"kind": "sample", "after": 1, "text": "Ay, me!\n"},
        {"kind": "log", "after": 1, "norm/a": 0.25, "epoch": 0.5},
    ]  # fmt: skip


def test_a_step_that_was_skipped_says_so(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonLogCallback()).begin()
    run.step(loss=math.inf, skipped=True)
    run.end()
    assert read_log(tmp_path / "run" / "log.jsonl")[0]["skipped"] is True


def test_a_run_that_goes_on_has_the_log_of_one_that_never_stopped(make_run: Any, tmp_path: Path) -> None:
    log = tmp_path / "run" / "log.jsonl"
    go(make_run, 0, 6)
    whole = log.read_bytes()
    log.unlink()
    go(make_run, 0, 5)
    with log.open("a") as file:
        file.write('{"kind": "step", "aft')  # the line that was being written when it was killed
    go(make_run, 2, 5)
    go(make_run, 4, 6)
    assert log.read_bytes() == whole


def test_going_back_drops_what_no_longer_holds(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonLogCallback()).begin()
    for loss in (3.0, 2.0, 9.0):
        run.step(loss=loss)
    run.state.global_step = 2
    run.tell("on_rewind", step=2)
    run.step(loss=1.5)
    run.end()
    assert [line["loss"] for line in read_log(tmp_path / "run" / "log.jsonl")] == [3.0, 2.0, 1.5]


def test_every_line_is_json_also_where_a_loss_is_not_finite(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonLogCallback()).begin()
    run.step(loss=math.nan, grad_norm=math.inf)
    run.end()

    def refuse(word: str) -> None:
        raise ValueError(word)

    (line,) = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert record["loss"] is record["grad_norm"] is None


def test_a_line_is_there_as_soon_as_it_is_written(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonLogCallback()).begin()
    run.step(loss=1.0)
    assert len(read_log(tmp_path / "run" / "log.jsonl")) == 1  # the run has not ended: a kill now loses nothing
    run.fail()


def test_one_process_writes_for_all(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonLogCallback())
    run.state.is_world_process_zero = False
    run.begin().step(loss=1.0)
    run.end()
    assert not (tmp_path / "run").exists()
