"""`Trainer` under every layout: the curve of one process, with masked targets, a short last batch and clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import trainer_jobs as jobs
from tests.distributed.pool import Pool

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.pipeline import check_micro_batches
from whimbrel.train.config import ValidationConfig

STEPS = 8
"""An epoch has six steps, of which the last is short."""
TOLERANCE = 1e-5
"""fp32 sums in another order; a few steps of AdamW amplify them little."""
EVALUATE = {"validation": ValidationConfig(every=4)}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    *((2, {"pp": 2, "pipeline_schedule": schedule}) for schedule in SCHEDULES),
    (4, {"pp": 2, "tp": 2}),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, jobs.Curve]:
    """The curve of one process for each kind of model."""
    folder = tmp_path_factory.mktemp("references")
    kinds = [*jobs.MODELS, "hf-gpt2", "hf-llama"]
    return {kind: jobs.run(jobs.make_config(folder / kind, {}, STEPS, {}, **EVALUATE), kind) for kind in kinds}


def assert_equal_curves(curve: jobs.Curve, expected: jobs.Curve, tolerance: float = TOLERANCE) -> None:
    assert [list(entry) for entry in curve] == [list(entry) for entry in expected]
    values, known = ([list(entry.values()) for entry in entries] for entries in (curve, expected))
    for entry, other in zip(values, known, strict=True):
        torch.testing.assert_close(torch.tensor(entry), torch.tensor(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", list(jobs.MODELS))
@pytest.mark.parametrize(("world_size", "settings"), LAYOUTS, ids=str)
def test_a_layout_has_the_curve_of_one_process(
    pool: Pool, references: dict[str, jobs.Curve], tmp_path: Path, kind: str, world_size: int, settings: dict[str, Any]
) -> None:
    config = jobs.make_config(tmp_path, settings, STEPS, {}, **EVALUATE)
    for curve in pool.run(world_size, jobs.run, config, kind):
        assert_equal_curves(curve, references[kind])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("hf-gpt2", {"pp": 2}), ("hf-llama", {"pp": 2, "pipeline_schedule": "zero-bubble"}), ("hf-llama", {"tp": 2})],
    ids=str,
)
def test_models_of_transformers_have_the_curve_of_one_process(
    pool: Pool, references: dict[str, jobs.Curve], tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    config = jobs.make_config(tmp_path, settings, STEPS, {}, **EVALUATE)
    for curve in pool.run(2, jobs.run, config, kind):
        assert_equal_curves(curve, references[kind])


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "message"),
    [
        ("1f1b", 3, "needs at least 4 micro-batches a step, got 3"),
        ("interleaved", 6, "at least 4 micro-batches a step, a multiple of it, got 6"),
        ("zero-bubble", 7, "at least 8 micro-batches"),
    ],
)
def test_too_few_micro_batches_for_a_schedule_are_rejected(schedule: Any, micro_batches: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_micro_batches(schedule, 4, micro_batches)
    check_micro_batches("gpipe", 4, 1)
