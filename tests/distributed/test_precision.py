"""FSDP2 over two gloo ranks with fp8 and fake-quantized linears matches a single process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import precision_ranks as job
from tests.distributed.pool import Pool

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch"),
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package 'torchao'"),
]


@pytest.fixture(scope="module")
def results(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("run")
    pool.run(job.RANKS, job.run_rank, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(job.RANKS)]


@pytest.mark.parametrize("recipe", job.RECIPES)
def test_sharded_training_matches_a_single_process(results: list[dict[str, Any]], recipe: str) -> None:
    one, (first, second) = job.single_process(recipe), (result[recipe] for result in results)
    assert one.keys() == first.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["losses"], one["losses"])
    assert all(torch.equal(first[name], one[name]) for name in one)


def test_all_ranks_skip_a_step_that_overflows_on_one(pool: Pool) -> None:
    first, second = pool.run(job.RANKS, job.scaled_steps)
    assert first == second == [(True, 65536.0), (False, 32768.0), (True, 32768.0)]
