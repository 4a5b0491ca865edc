"""Effects of the FSDP options; gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import strategy_jobs as jobs
from tests.distributed.pool import Pool

from whimbrel.distributed.strategy import gradient_norm
from whimbrel.distributed.world import World
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora


def observe(pool: Pool, world_size: int = 2, **settings: Any) -> dict[str, Any]:
    first, *others = pool.run(world_size, jobs.observe_fsdp, settings)
    assert all(other == first for other in others)
    return dict(first)


def test_fsdp_frees_blocks_after_their_forward_pass(pool: Pool) -> None:
    assert not observe(pool)["gathered_after_forward"]
    assert observe(pool, reshard_after_forward=False)["gathered_after_forward"]


def test_param_dtype_is_the_dtype_of_the_computation_but_not_of_weights_and_gradients(pool: Pool) -> None:
    assert observe(pool)["compute_dtype"] == "torch.float32"
    lower = observe(pool, param_dtype="bf16")
    assert lower["compute_dtype"] == "torch.bfloat16"
    assert lower["dtypes"] == ["torch.float32", "torch.float32"]


def test_hsdp_replicates_shards(pool: Pool) -> None:
    assert observe(pool)["placements"] == ["Shard"]
    assert observe(pool, 4, strategy="hsdp", dp_shard=2)["placements"] == ["Replicate", "Shard"]


def test_cpu_offload_moves_shards_to_host_memory(pool: Pool) -> None:
    assert observe(pool)["offload"] == "OffloadPolicy"
    assert observe(pool, cpu_offload=True)["offload"] == "CPUOffloadPolicy"


@pytest.mark.parametrize(
    ("settings", "share"),
    [({"strategy": "ddp"}, 1), ({"strategy": "fsdp"}, 2), ({"strategy": "hsdp", "dp_shard": 1}, 1)],
)
def test_a_rank_holds_its_share_of_the_parameters(pool: Pool, settings: dict[str, Any], share: int) -> None:
    held = pool.run(2, jobs.parameter_bytes, settings)
    complete = held[0][1]
    assert sum(own for own, _ in held) == 2 * complete // share


def test_gradient_norm_without_gradients_is_zero() -> None:
    assert gradient_norm([torch.ones(2, requires_grad=True)], World()) == 0


def test_adapters_of_a_model_that_is_loaded_in_shards_start_as_in_one_process(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=2, num_heads=2, embd_size=16, vocab_size=32, context_length=8))
    save_model(model, tmp_path / "model")
    apply_lora(model, LoraConfig(rank=3, use_dora=True), seed=5)
    found, _ = pool.run(2, jobs.deferred_adapters, tmp_path / "model", {"strategy": "fsdp"})
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert torch.equal(torch.tensor(values), expected[name].detach().flatten()), name
