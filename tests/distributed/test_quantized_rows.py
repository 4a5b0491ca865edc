"""A quantized weight sharded by rows over two ranks: matmul and all-gather match an unquantized shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed.pool import Pool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from whimbrel.precision import FORMATS, QuantizedWeight

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch")


RANKS = 2


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_rank(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    results = {}
    for name in FORMATS:
        weight = QuantizedWeight.quantize(random_tensor(64, 256), name)
        shared = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        local = shared.to_local()
        assert isinstance(local, QuantizedWeight)
        results[f"{name} local"] = local.dequantize()
        x = DTensor.from_local(random_tensor(8, 256, seed=1), mesh, [Replicate()])
        with torch.no_grad():
            results[f"{name} product"] = torch.nn.functional.linear(x, shared).full_tensor()
        gathered = shared.redistribute(mesh, [Replicate()]).to_local()
        assert isinstance(gathered, QuantizedWeight)
        results[f"{name} gathered"] = gathered.dequantize()
    torch.save(results, folder / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def results(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("rows")
    pool.run(RANKS, run_rank, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_rows_are_sharded_and_gathered(results: list[dict[str, Tensor]], name: str) -> None:
    weight = QuantizedWeight.quantize(random_tensor(64, 256), name)
    product = torch.nn.functional.linear(random_tensor(8, 256, seed=1), weight)
    for rank, result in enumerate(results):
        assert torch.equal(result[f"{name} local"], weight.dequantize()[32 * rank : 32 * (rank + 1)])
        assert torch.equal(result[f"{name} gathered"], weight.dequantize())
        assert torch.allclose(result[f"{name} product"], product, atol=1e-5)
