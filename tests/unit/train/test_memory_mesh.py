"""Memory predictions for a mesh, against models that are assembled on a fake one; the choice of a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.finetuning import run_config, save_base_model
from torch.testing._internal.distributed.fake_pg import FakeStore

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import World, apply_tensor_parallel, join_world, shard_or_replicate
from whimbrel.distributed.layout import Layout, ParallelConfig, resolve_layout
from whimbrel.distributed.pipeline import split_layers, stage_indices
from whimbrel.distributed.traffic import Network, Workload, step_seconds, traffic
from whimbrel.models import GPT
from whimbrel.models.gpt import GPTStage
from whimbrel.train.memory import predict_memory, resolve
from whimbrel.train.memory_mesh import choose_strategy, predict_mesh_memory, predict_pipeline_ranks
from whimbrel.train.memory_tracker import allocated_bytes
from whimbrel.train.run_config import RunConfig, build_run_config

RANKS = 64
GIB = 2**30


def make_config(preset: str, parallel: dict[str, Any], **model: Any) -> RunConfig:
    train = {"steps": 1, "micro_batch": 1, "tokens_per_step": RANKS * 1024 * 4, "recompute": "full", "device": "cpu"}
    table = {
        "output_dir": "run", "data": {"path": "data", "sequence_length": 1024}, "train": train,
        "model": {"preset": preset, **model}, "parallel": parallel,
    }  # fmt: skip
    return build_run_config(table)


@pytest.fixture
def fake_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rank `request.param` of 64, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    yield
    dist.destroy_process_group()


def assemble(config: RunConfig, world: World) -> list[Any]:
    """The modules of this rank, on the meta device, wrapped as in training."""
    parallel, layout = config.parallel, world.layout
    with torch.device("meta"):
        model = GPT(config.model.architecture)
    modules: list[Any] = [model]
    assert world.mesh is not None
    if layout.pp > 1:
        indices = stage_indices(parallel.pipeline_schedule, world.mesh.get_local_rank("pp"), layout.pp)
        costs = [float(sum(p.numel() for p in block.parameters())) for block in model.blocks]
        ranges = split_layers(costs, layout.pp * len(indices), last=float(model.lm_head.weight.numel()))
        modules = [GPTStage(model, ranges[index]) for index in indices]
    for module in modules:
        if layout.tp > 1:
            apply_tensor_parallel(module, world.mesh["tp"])
        shard_or_replicate(module, world, parallel, torch.device("cpu"))
    return modules


def local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.itemsize)


def allocated(tensor: Any) -> int:
    return allocated_bytes(local_bytes(tensor), "cuda")


MESHES = [
    (0, "llama2-7b", {"strategy": "fsdp"}),
    (0, "llama2-7b", {"strategy": "hsdp", "dp_shard": 8}),
    (0, "llama2-7b", {"strategy": "fsdp", "tp": 8}),
    (0, "llama3.1-70b", {"strategy": "fsdp", "param_dtype": "bf16"}),
    (0, "llama3.1-70b", {"strategy": "fsdp", "tp": 8, "pp": 4}),
    (48, "llama3.1-70b", {"strategy": "fsdp", "tp": 8, "pp": 4}),  # the last stage
]


@pytest.mark.parametrize(("fake_ranks", "preset", "settings"), MESHES, ids=str, indirect=["fake_ranks"])
def test_parameters_and_adamw_states_of_64_ranks_are_predicted_exactly(
    fake_ranks: None, preset: str, settings: dict[str, Any]
) -> None:
    config = make_config(preset, settings)
    world = join_world(config.parallel, "cpu")
    assert world.mesh is not None
    resolved = resolve(config, "cuda", world.layout.dp)
    predicted = predict_pipeline_ranks(resolved, world.layout, "cuda")[world.mesh.get_local_rank("pp")]
    # The first rank of every shard has the most rows.
    parameters = {p: None for module in assemble(config, world) for p in module.parameters()}
    assert predicted.weights == predicted.gradients == sum(map(allocated, parameters))
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert predicted.states == pytest.approx(sum(map(local_bytes, moments)), abs=8 * len(parameters))  # step counts


@pytest.mark.parametrize(
    ("preset", "train", "optim"),
    [
        ("smollm2-135m", {}, {}),
        ("smollm2-135m", {"default_dtype": "bfloat16"}, {"name": "muon"}),
        ("smollm2-135m", {"recompute": "selective"}, {"name": "adamw8bit"}),
        ("smollm2-135m", {"recompute": "none", "precision": "bf16"}, {"name": "galore_warm", "rank": 16}),
        ("gpt2", {"accumulation": 3, "tokens_per_step": None}, {}),
        ("llama2-7b", {"precision": "bf16"}, {"name": "galore", "rank": 16}),
    ],
    ids=str,
)
def test_a_layout_of_one_process_is_predicted_like_one_process(
    preset: str, train: dict[str, Any], optim: dict[str, Any]
) -> None:
    config = make_config(preset, {}, num_layers=3)
    config = replace(
        config, train=replace(config.train, **{"tokens_per_step": 1024} | train), optim=replace(config.optim, **optim)
    )
    assert predict_mesh_memory(config, Layout(), "cuda") == predict_memory(config, "cuda")


@pytest.mark.parametrize("weights", [None, "int4"], ids=["lora", "qlora"])
def test_fine_tuning_is_predicted_for_ranks(tmp_path: Path, weights: str | None) -> None:
    base = save_base_model(tmp_path / "base", embd_size=128, num_layers=3)
    model = {"path": str(base)} | ({} if weights is None else {"weights": weights})
    sections = {"model": model, "objective": {"name": "dpo"}, "lora": {"rank": 8}}
    config = run_config(base, tmp_path / "pairs.jsonl", tmp_path / "run", **sections)
    [one] = predict_memory(config, "cuda")
    assert predict_mesh_memory(config, Layout(), "cuda") == [one]
    [ddp] = predict_mesh_memory(config, Layout(dp_replicate=2), "cuda")
    assert (ddp.weights, ddp.gradients, ddp.states) == (one.weights, one.gradients, one.states)
    fsdp = replace(config, parallel=ParallelConfig(strategy="fsdp"))
    [shards] = predict_mesh_memory(fsdp, Layout(dp_shard=2), "cuda")
    assert shards.gradients == pytest.approx(one.gradients / 2, rel=0.1)
    assert shards.states == pytest.approx(one.states / 2, rel=0.1)
    assert shards.weights < 0.9 * one.weights
    parallel, _ = choose_strategy(replace(config, parallel=ParallelConfig(strategy="auto")), 2, 2, 80 * GIB, "cuda")
    assert parallel.strategy == "ddp"


def test_replicas_add_the_gradient_buckets_of_ddp_to_every_phase() -> None:
    config = make_config("smollm2-135m", {"strategy": "ddp"}, num_layers=6)
    single = replace(config, parallel=ParallelConfig(), train=replace(config.train, tokens_per_step=1024))
    both = replace(config, train=replace(config.train, tokens_per_step=2048))
    (ddp,), (one,) = predict_mesh_memory(both, Layout(dp_replicate=2), "cuda"), predict_memory(single, "cuda")
    assert "gradients" not in one.at_peak  # the peak is in the forward pass
    assert ddp.at_peak == one.at_peak | {"gradients": one.gradients}


def test_more_shards_need_less() -> None:
    config = make_config("smollm2-135m", {"strategy": "fsdp"}, num_layers=4)
    peaks = [predict_mesh_memory(config, Layout(dp_shard=n), "cuda")[0].peak for n in (2, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)


def test_a_pipeline_holds_the_micro_batches_in_flight() -> None:
    activations = {}
    for schedule in ("gpipe", "1f1b"):
        config = make_config("smollm2-135m", {"pp": 4, "dp_shard": 4, "pipeline_schedule": schedule})
        activations[schedule] = predict_mesh_memory(config, Layout(pp=4, dp_shard=4), "cuda")[0].activations
    assert activations["gpipe"] > 3 * activations["1f1b"]  # 16 micro-batches, not 4


@pytest.mark.parametrize(("gib", "expected"), [(80, "ddp"), (1.5, "fsdp")], ids=["everything fits", "only shards fit"])
def test_auto_chooses_the_simplest_strategy_that_fits(gib: float, expected: str) -> None:
    config = make_config("smollm2-135m", {"strategy": "auto"})
    parallel, reason = choose_strategy(config, 8, 8, int(gib * GIB), "cuda")
    assert parallel.strategy == expected
    assert reason.startswith(expected)
    assert "\n" not in reason
    assert ("ddp needs" in reason.partition(";")[2]) == (expected != "ddp")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_does_not_split_the_layers_of_a_model_that_fits(device: str) -> None:
    """All-reduces of tensor parallelism take longer than the computation of a small model."""
    config = make_config("smollm2-135m", {"strategy": "auto"}, num_layers=2, embd_size=64, num_heads=2, num_kv_heads=2)
    assert choose_strategy(config, 2, 2, 80 * GIB, device)[0].strategy == "ddp"


def test_auto_says_if_nothing_fits() -> None:
    with pytest.raises(ConfigError, match=r"no layout of 2 ranks fits .* more devices"):
        choose_strategy(make_config("smollm2-135m", {"strategy": "auto"}), 2, 2, GIB // 8, "cuda")


def test_auto_says_what_cannot_be_predicted() -> None:
    config = make_config("smollm2-135m", {"strategy": "auto"})
    with pytest.raises(ConfigError, match="got tensorwise: remove it"):
        choose_strategy(replace(config, train=replace(config.train, fp8_recipe="tensorwise")), 2, 2, 80 * GIB, "cuda")


def test_tensor_parallelism_that_does_not_divide_the_model_raises() -> None:
    with pytest.raises(ConfigError, match="divides model.num_heads = 9"):
        predict_mesh_memory(make_config("smollm2-135m", {"tp": 2}), Layout(tp=2), "cuda")


WORK = Workload(parameters=1000, layers=4, width=10, tokens=100, micro_batches=2)


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ({"strategy": "ddp"}, 4, 2 * 3 / 4 * 4000),
        ({"strategy": "fsdp"}, 4, 2 * 3 * 3 / 4 * 4000),  # two gathers and a reduction, for each of two micro-batches
        ({"strategy": "fsdp", "reshard_after_forward": False}, 4, 2 * 2 * 3 / 4 * 4000),
        ({"strategy": "hsdp", "dp_shard": 2}, 4, 2 * 3 * 1 / 2 * 4000 + 2 * 1 / 2 * 2000),
        ({"strategy": "diloco", "sync_every": 50}, 4, 2 * 3 / 4 * 4000 / 50),
        ({"tp": 2}, 2, 2 * 1 / 2 * (4 * 4) * (2 * 100 * 10 * 2)),  # four all-reduces per layer
        ({"pp": 2}, 2, 2 * (2 * 100 * 10 * 2)),
    ],
)
def test_traffic_of_a_ring(settings: dict[str, Any], ranks: int, expected: float) -> None:
    config = ParallelConfig(**settings)
    assert sum(traffic(WORK, resolve_layout(config, ranks, ranks), config).values()) == pytest.approx(expected)


def test_a_step_that_crosses_machines_takes_longer() -> None:
    config, network = ParallelConfig(strategy="fsdp"), Network(ranks_per_node=8, within_node=100, between_nodes=10)
    near, far = (step_seconds(WORK, Layout(dp_shard=n), config, network) for n in (8, 16))
    assert far > 9 * near
