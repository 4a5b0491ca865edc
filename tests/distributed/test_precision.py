"""FSDP2 over two gloo ranks with fp8 and fake-quantized linears matches a single process."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from tests.distributed import precision_work as job

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch"),
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the package 'torchao'"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("run")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(job.run_rank, (folder, port), nprocs=job.RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(job.RANKS)]


@pytest.mark.parametrize("recipe", job.RECIPES)
def test_sharded_training_matches_a_single_process(results: list[dict[str, Any]], recipe: str) -> None:
    one, (first, second) = job.single_process(recipe), (result[recipe] for result in results)
    assert one.keys() == first.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["losses"], one["losses"])
    assert all(torch.equal(first[name], one[name]) for name in one)
