"""TensorBoard's reader sees one continuous curve across resumes, rollbacks and failures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whimbrel.base.errors import MissingExtraError
from whimbrel.train.callbacks import TensorBoardCallback


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    event_accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def run_session(make_run: Any, first: int, last: int, session: int = 0, **settings: Any) -> None:
    run = make_run(TensorBoardCallback(), steps=9, **settings).begin(first)
    for step in range(first, last):
        run.step(loss=float(step + 100 * session))
        if run.state.global_step % 3 == 0:
            run.evaluate(loss=0.25, accuracy=0.5)
            run.log({"grad_norm/a": 2.0, "epoch": 0.5})
            run.dispatch("on_sample", text="O Romeo", step=run.state.global_step)
    run.end()


def test_steps_evaluations_and_logs_are_written(make_run: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_session(make_run, 0, 3)
    seen = curves(tmp_path / "run" / "runs" / "1_host")
    assert seen["train/loss"] == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert seen["train/tokens_per_second"] == [(1, 512.0), (2, 512.0), (3, 512.0)]
    assert [step for step, _ in seen["train/lr"]] == [step for step, _ in seen["train/grad_norm"]] == [1, 2, 3]
    assert seen["eval/loss"] == [(3, 0.25)]
    assert seen["eval/accuracy"] == [(3, 0.5)]
    assert seen["log/grad_norm/a"] == [(3, 2.0)]
    assert not any("eval_" in tag for tag in seen)


def test_only_numbers_of_a_log_are_written(make_run: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = make_run(TensorBoardCallback()).begin()
    run.step(loss=1.0)
    run.log({"eval_accuracy": torch.tensor(0.5), "scalar": np.float32(0.25), "text": "good", "list": [1.0, 2.0]})
    run.evaluate(loss=np.float64(0.75), judgement="good")
    run.end()
    seen = curves(tmp_path / "run" / "runs" / "1_host")
    assert {tag: points for tag, points in seen.items() if not tag.startswith("train/")} == {
        "log/eval_accuracy": [(1, 0.5)],
        "log/scalar": [(1, 0.25)],
        "eval/loss": [(1, 0.75)],
    }


def test_resumes_discard_events_after_the_checkpoint(make_run: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_session(make_run, 0, 7, session=0)
    run_session(make_run, 3, 8, session=1)  # resumed from step 3: steps 4 to 7 of the first session are discarded
    run_session(make_run, 6, 9, session=2)
    assert len(list((tmp_path / "run" / "runs").iterdir())) == 1
    seen = curves(tmp_path / "run" / "runs" / "1_host")
    expected = [(1, 0.0), (2, 1.0), (3, 2.0), (4, 103.0), (5, 104.0), (6, 105.0), (7, 206.0), (8, 207.0), (9, 208.0)]
    assert seen["train/loss"] == expected
    assert seen["eval/loss"] == [(3, 0.25), (6, 0.25), (9, 0.25)]


def test_a_restarted_run_discards_earlier_events(make_run: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_session(make_run, 0, 7)
    run_session(make_run, 0, 2, session=1)
    assert curves(tmp_path / "run" / "runs" / "1_host")["train/loss"] == [(1, 100.0), (2, 101.0)]


def test_a_rollback_discards_later_events(make_run: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = make_run(TensorBoardCallback()).begin()
    for loss in (3.0, 2.0, 9.0):
        run.step(loss=loss)
    run.state.global_step = 2
    run.dispatch("on_rollback", step=2)
    run.step(loss=1.5)
    run.end()
    assert curves(tmp_path / "run" / "runs" / "1_host")["train/loss"] == [(1, 3.0), (2, 2.0), (3, 1.5)]


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"TensorBoard events needs the package 'tensorboard': pip install"):
        TensorBoardCallback()


def test_sessions_started_within_a_second_are_read_in_order(make_run: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = make_run(TensorBoardCallback(), steps=9).begin()
    for session in range(3):
        run.state.global_step = 1
        run.dispatch("on_rollback", step=1)
        run.step(loss=float(session))
    run.end()
    folder = tmp_path / "run" / "runs" / "1_host"
    assert curves(folder)["train/loss"] == [(2, 2.0)]
    seconds = [path.name.split(".")[3] for path in folder.iterdir()]
    assert len(set(seconds)) == len(seconds) == 4


# Raised in TensorBoard's writer thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_write_failures_log_one_warning_and_are_retried(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self: RecordWriter, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whimbrel.train.callbacks.loggers.RETRY_SECONDS", 0.0)
    run = make_run(TensorBoardCallback()).begin()
    run.step(loss=3.0)
    run.save()
    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", full)
        for _ in range(3):
            run.step(loss=2.0)
            run.save()
    (warning,) = caplog.records
    assert f"cannot write to TensorBoard events in {run.args.logging_dir}" in warning.message
    assert "No space left on device; training continues" in warning.message
    run.step(loss=1.0)
    run.end()
    assert curves(Path(run.args.logging_dir))["train/loss"] == [(1, 3.0), (5, 1.0)]
