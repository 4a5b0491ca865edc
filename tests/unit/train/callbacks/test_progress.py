"""Progress output on terminals and in files."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from whimbrel.train.callback import TrainerCallback
from whimbrel.train.callbacks import EarlyStoppingCallback, ProgressCallback
from whimbrel.train.callbacks.progress import REDRAW_SECONDS, MemoryEstimate


def without_terminal() -> tuple[ProgressCallback, io.StringIO]:
    out = io.StringIO()
    return ProgressCallback(Console(file=out, width=40)), out


def test_lines_without_a_terminal(make_run: Any, tmp_path: Path) -> None:
    callback, out = without_terminal()
    run = make_run(callback, steps=2).begin(features=("bf16", "compiled blocks"))
    run.step(loss=2.25)
    run.evaluate(loss=1.5, accuracy=0.25)
    run.dispatch("on_sample", text="O [bold]Romeo[/]\n:smile:", step=1)
    run.save()
    run.step(loss=2.0)
    run.end()
    assert out.getvalue().splitlines() == [
        "Using device: cpu",
        "Total batch size: 256",
        "Tokens per micro-batch: 128",
        "Gradient accumulation steps: 2",
        "Model: 49 parameters on cpu",
        "Steps: 2 (512 tokens)",
        "Memory: 0.2 KiB weights + 0.2 KiB gradients + 0.4 KiB optimizer state (without activations)",
        "Features: bf16, compiled blocks",
        "step:1/2 train_loss:2.2500 train_time:500ms token/s:512.00 lr:1.00e-03 norm:0.50 eta:0:00:00",
        "validation after step 1: loss 1.5000  accuracy 0.2500",
        "sample after step 1:",
        "O [bold]Romeo[/]",
        ":smile:",
        "",
        f"checkpoint after step 1: {tmp_path}/run/checkpoints/step-00000001",
        "step:2/2 train_loss:2.0000 train_time:500ms token/s:512.00 lr:1.00e-03 norm:0.50 eta:0:00:00",
        "Total time: 1.00s (0.02 minutes)",
        "Total tokens processed: 512",
        "Average tokens/sec: 512.00",
        "Peak memory: 1.00 GiB",
    ]


def test_evaluations_may_have_any_metrics(make_run: Any) -> None:
    callback, out = without_terminal()
    run = make_run(callback).begin()
    run.evaluate(loss=torch.tensor(1.5), judgement="good", counts=[1, 2])
    assert out.getvalue().endswith("validation after step 0: loss 1.5000  judgement good  counts [1, 2]\n")


@pytest.mark.parametrize(("operations", "peak"), [(1.25e9, 1e12), (3.5e8, 9.89e11)])
def test_mfu_is_the_achieved_fraction_of_peak_flops(make_run: Any, operations: float, peak: float) -> None:
    callback, out = terminal()
    run = make_run(callback, steps=1).begin(flops_per_token=operations, peak_flops=peak)
    run.step(loss=2.0, tokens=3000, seconds=8.0)
    run.end()
    text = without_colors(out.getvalue())
    assert f"MFU: {operations:,.0f} FLOPs per token" in text
    assert f" {peak / 1e12:,.0f} TFLOP/s" in text
    assert f"  375 tok/s  MFU {100 * operations * 375 / peak:.1f}%" in text


@pytest.mark.parametrize("plain", [True, False])
def test_supervised_tokens_and_rewards_are_printed(make_run: Any, plain: bool) -> None:
    callback, out = without_terminal() if plain else terminal()
    run = make_run(callback, steps=2).begin()
    run.step(loss=2.0, seconds=0.5, supervised_tokens=64.0)
    run.step(loss=0.6, seconds=0.5, **{"rewards/margins": 0.25, "rewards/accuracies": 0.875, "rewards/chosen": 9.0})
    run.end()
    text = without_colors(out.getvalue())
    if plain:
        assert "step:1/2 train_loss:2.0000 train_time:500ms token/s:512.00 supervised_token/s:128.00 lr:" in text
        assert "eta:0:00:00 rewards/margins:0.2500 rewards/accuracies:0.8750\n" in text
    else:
        assert "512 tok/s  rewards/margins 0.250  rewards/accuracies 0.875" in text


def test_no_mfu_if_the_peak_is_unknown(make_run: Any) -> None:
    callback, out = terminal()
    run = make_run(callback, steps=1).begin(flops_per_token=1e9, peak_flops=None)
    run.step(loss=2.0)
    run.end()
    assert "512 tok/s" in out.getvalue()
    assert "MFU" not in out.getvalue()


def test_batches_without_tokens_are_counted_in_samples(make_run: Any) -> None:
    callback, out = without_terminal()
    memory = MemoryEstimate(weights=2**30, gradients=2**29, optimizer=None)
    run = make_run(callback, steps=1).begin(tokens_per_step=None, frozen_parameters=40, memory=memory)
    run.step(loss=2.0, tokens=0)
    run.state.num_input_tokens_seen = 0
    run.end()
    text = out.getvalue()
    assert "Total batch size: 32 samples\n" in text
    assert "Steps: 1\n" in text
    assert "49 parameters (40 frozen) on cpu" in text
    assert "1.00 GiB weights + 512.0 MiB gradients + optimizer state (unknown before the first step)" in text
    assert "step:1/1 train_loss:2.0000 train_time:500ms lr:1.00e-03 norm:0.50 eta:0:00:00\n" in text
    assert "token" not in text.partition("Total batch size")[2]


def test_a_resumed_run_is_reported(make_run: Any) -> None:
    callback, out = without_terminal()
    make_run(callback, steps=3).begin(2, resumed_from=Path("run/checkpoints/step-00000002")).end()
    assert "Resumed from: run/checkpoints/step-00000002 (step 2)" in out.getvalue()


def test_a_completed_run_is_one_line(make_run: Any) -> None:
    callback, out = without_terminal()
    make_run(callback, steps=3).begin(3, resumed_from=Path("run/checkpoints/step-00000003")).end()
    [line] = out.getvalue().splitlines()
    assert "Already at step 3 of 3: nothing to do" in line
    assert "another output_dir" in line


def test_the_reason_for_a_stop_is_printed(make_run: Any, tmp_path: Path) -> None:
    callback, out = without_terminal()
    run = make_run(EarlyStoppingCallback(patience=1), callback).begin()
    run.step(loss=1.0)
    run.evaluate(loss=1.0)
    run.evaluate(loss=1.25)
    run.save()
    run.end()
    assert out.getvalue().splitlines()[-2:] == [
        "Stopping: loss has not improved on 1.0 for 1 evaluations",
        f"Stopped at step 1, saved to {tmp_path}/run/checkpoints/step-00000001: rerun the same command to resume",
    ]


def test_a_stop_at_the_last_step_is_not_reported(make_run: Any) -> None:
    callback, out = without_terminal()
    run = make_run(EarlyStoppingCallback(patience=1), callback, steps=1).begin()
    run.step(loss=1.0)
    run.evaluate(loss=1.0)
    run.evaluate(loss=1.25)
    assert run.callbacks.stopped_by is not None
    run.end()
    assert out.getvalue().splitlines()[-1] == "Peak memory: 1.00 GiB"


def test_an_abort_reports_the_latest_checkpoint(make_run: Any) -> None:
    class AbortEarly(TrainerCallback):
        name = "me"

        def on_step_end(self, **event: Any) -> None:
            event["control"].should_abort_without_save = True

    callback, out = without_terminal()
    run = make_run(AbortEarly(), callback).begin()
    run.step(loss=1.0)
    run.end()
    assert out.getvalue().splitlines()[-2:] == [
        "Aborting: requested by me (on_step_end)",
        "Aborted at step 1 without saving; there is no checkpoint",
    ]


def terminal() -> tuple[ProgressCallback, io.StringIO]:
    out = io.StringIO()
    return ProgressCallback(Console(file=out, force_terminal=True, width=160, legacy_windows=False)), out


def without_colors(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_the_progress_bar_shows_metrics(make_run: Any) -> None:
    callback, out = terminal()
    run = make_run(callback, steps=2).begin(flops_per_token=1e9, peak_flops=1e12)
    run.step(loss=2.0)
    run.evaluate(loss=1.0)
    run.step(loss=1.5)
    run.end()
    text = without_colors(out.getvalue())
    assert re.search(r"step 2/2  loss 1\.5000  lr 1\.00e-03  norm 0\.50  512 tok/s  MFU 51\.2%  \d+\.\d GiB", text)
    assert "validation after step 1: loss 1.0000" in text
    assert "step:1/2" not in text
    assert text.count("Total tokens processed: 512") == 1


def test_the_progress_bar_is_at_the_step_of_a_message_and_of_the_end(make_run: Any) -> None:
    callback, out = terminal()
    run = make_run(callback, steps=9).begin()
    for _ in range(3):
        run.step(loss=2.0)
    run.save()
    assert re.search(r"checkpoint after step 3: .*step 3/9", without_colors(out.getvalue()), re.DOTALL)
    run.step(loss=2.0)
    run.end()
    assert "step 4/9" in without_colors(out.getvalue())


def test_eta_is_the_time_of_the_steps_left(make_run: Any) -> None:
    callback, out = without_terminal()
    run = make_run(callback, steps=100).begin()
    run.step(loss=2.0, seconds=90.0)
    assert "eta:2:28:30\n" in out.getvalue()


@pytest.mark.parametrize("width", [30, 40, 50, 60, 80, 120])
def test_the_progress_bar_fits_the_terminal(make_run: Any, width: int) -> None:
    out = io.StringIO()
    callback = ProgressCallback(Console(file=out, force_terminal=True, width=width, legacy_windows=False))
    run = make_run(callback, steps=60).begin()
    run.step(loss=2.0)
    run.fail()
    (line,) = [part for part in re.split(r"[\r\n]", without_colors(out.getvalue())) if "step 1/60" in part][-1:]
    assert len(line.rstrip()) <= width
    assert "loss 2.0000" in line
    assert ("eta 0:00:30" in line) == (width >= 40)
    assert ("512 tok/s" in line) == (width >= 50)
    assert ("norm" in line) == (width >= 80)
    assert ("\u2501" in line) == (width >= 120)


def test_a_wrapped_progress_bar_is_erased_after_a_resize(make_run: Any) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, legacy_windows=False)
    run = make_run(ProgressCallback(console), steps=60).begin()
    run.step(loss=2.0)
    out.truncate(0)
    console.width = 60  # the line of 61 to 120 columns takes two rows now
    time.sleep(REDRAW_SECONDS)
    run.step(loss=1.5)
    assert out.getvalue().count("\x1b[2K\x1b[1A") == 1
    out.truncate(0)
    time.sleep(REDRAW_SECONDS)
    run.step(loss=1.25)
    assert "\x1b[1A" not in out.getvalue()
    run.fail()


def test_the_progress_bar_is_removed_if_a_run_fails(make_run: Any) -> None:
    callback, out = terminal()
    run = make_run(callback, steps=2).begin()
    run.step(loss=2.0)
    run.fail()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1
    assert "Total time" not in out.getvalue()


def test_plain_output_on_a_terminal(make_run: Any) -> None:
    out = io.StringIO()
    callback = ProgressCallback(Console(file=out, force_terminal=True), plain=True)
    run = make_run(callback, steps=1).begin()
    run.step(loss=2.0)
    run.end()
    assert "\x1b" not in out.getvalue()
    assert "step:1/1 train_loss:2.0000" in out.getvalue()


def test_only_the_first_rank_prints(make_run: Any) -> None:
    callback, out = without_terminal()
    run = make_run(callback)
    run.state.is_world_process_zero = False
    run.dispatch("on_init_end")
    run.begin().step(loss=1.0)
    run.end()
    assert out.getvalue() == ""


class Full(io.StringIO):
    """A file on a disk that is full for a while."""

    name = "<stdout>"
    full = True

    def flush(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_console_that_cannot_be_written_logs_one_warning(make_run: Any, caplog: Any, terminal: bool) -> None:
    file = Full()
    run = make_run(ProgressCallback(Console(file=file, force_terminal=terminal))).begin()
    for _ in range(3):
        run.step(loss=1.0)
        run.evaluate(loss=1.0)
    (warning,) = caplog.records
    assert "cannot write to <stdout>" in warning.message
    assert "No space left" in warning.message
    file.full = False
    run.step(loss=1.0)
    file.truncate(0)
    run.evaluate(loss=0.5)
    assert "validation after step 4: loss 0.5000" in file.getvalue()
    file.close()
    run.step(loss=1.0)
    run.end()
