"""Low-rank optimizers on two ranks: replicas stay bit-identical, and sharded steps match a single process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import optim_ranks as job
from tests.distributed.pool import Pool
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from whimbrel.optim import project_in_backward

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch")
HALF = job.STEPS // 2
MAKES = {"warm": job.warm, "low bit": job.low_bit, "galore": job.galore}
Results = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints written by one process and by two, and the results of the two ranks."""
    folder = tmp_path_factory.mktemp("run")
    for name, make in MAKES.items():
        net = job.model()
        optimizer = make(net.parameters())
        job.train(net, optimizer, range(HALF))
        job.save(folder / f"one {name}", net, optimizer)
    pool.run(job.RANKS, job.run_rank, folder)
    return folder


@pytest.fixture(scope="module")
def results(run: Path) -> Results:
    return [torch.load(run / f"{rank}.pt", weights_only=True) for rank in range(job.RANKS)]


def single_process(make: job.Make, steps: int = job.STEPS) -> dict[str, Tensor]:
    net = job.model()
    optimizer = make(net.parameters())
    job.train(net, optimizer, range(steps))
    return job.full_state(net, optimizer)


def max_difference(one: dict[str, Tensor], other: dict[str, Tensor], kind: str = "weight") -> float:
    """Maximum absolute difference of the weights, or of another kind of tensor."""
    assert one.keys() == other.keys()
    names = [name for name in one if name.endswith(kind)]
    assert names
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in names)


def differing_names(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("name", job.REPLICATED)
def test_replicas_stay_bit_identical(results: Results, name: str) -> None:
    one, other = (result["replicas"][name] for result in results)
    assert differing_names(one, other) == []
    start = {f"{n} weight": p.detach() for n, p in job.model().to(job.REPLICATED[name][1]).named_parameters()}
    assert not any(torch.equal(one[n], p) for n, p in start.items() if p.numel() > 1)


def test_quantized_weight_that_differs_between_ranks_is_reported(results: Results) -> None:
    for result in results:
        assert result["replicas"]["quantized"] == "no error"
        assert "the weight of weight on rank 1" in result["replicas"]["quantized, changed"]


def test_basis_that_differs_between_ranks_is_reported(results: Results) -> None:
    for result in results:
        assert "the basis of 2.weight on rank 1" in result["replicas"]["nudged"]


@pytest.mark.parametrize("kind", ["hooks", "linears", "ddp"])
def test_averaged_projections_match_a_single_process(results: Results, kind: str) -> None:
    net = job.model()
    optimizer = project_in_backward(job.warm(net.parameters()), accumulation=4)
    norms = job.train_projecting(net, optimizer, range(job.STEPS), job.micro_batches(4), 0.05, norm=1.0)
    expected = job.full_state(net, optimizer)
    for result in results:
        found = dict(result["projections"][kind])
        found_norms = found.pop("norms").tolist()
        assert found_norms[:2] == pytest.approx(norms[:2], rel=1e-4)
        assert found_norms == pytest.approx(norms, rel=0.05)  # in a refresh a single process has the full gradient
        assert max_difference(found, expected) < 1e-5
        assert differing_names(found, {k: v for k, v in results[0]["projections"][kind].items() if k != "norms"}) == []


def test_only_projected_gradients_are_communicated(results: Results) -> None:
    net = job.model()
    optimizer = job.warm(net.parameters())
    params = [*net.parameters()]
    # a mask of existing gradients, then full gradients, since every basis is due
    first = [len(params), *(p.numel() for p in params)]
    second = [len(params), *(optimizer.layout_of(p).low_rank_shape.numel() for p in params)]
    for result in results:
        assert result["projections"]["communicated"] == [first, second]
        assert max_difference(result["projections"]["full batch"], single_process(job.warm)) < 1e-5
    assert sum(second) < sum(first) / 5


def test_parameter_without_gradient_on_one_rank_is_updated(results: Results) -> None:
    one, other = (result["projections"]["routes"] for result in results)
    assert differing_names(one, other) == []
    assert [int(one[f"{i}.weight step"]) for i in range(3)] == [3, 3, 0]


def test_stack_without_gradient_on_one_rank_is_updated(results: Results) -> None:
    one, other = (result["projections"]["stacks"] for result in results)
    assert differing_names(one, other) == []
    assert [int(one[f"{i} step"]) for i in range(2)] == [3, 3]


def test_settings_that_would_diverge_between_ranks_are_rejected(results: Results) -> None:
    for result in results:
        found = result["projections"]
        assert "a gradient after" in found["late"]
        assert "process_group=torch.distributed.group.WORLD" in found["no group"]
        assert "before gradients are averaged over ranks" in found["steps"]


@pytest.mark.parametrize("name", job.ON_SHARDS)
def test_sharded_optimizer_matches_a_single_process(results: Results, name: str) -> None:
    expected = single_process(job.ON_SHARDS[name])
    for result in results:
        assert max_difference(result["shards"][name], expected) < 1e-5
        for number in ("step",) if "galore" in name else ("step", "seed"):
            assert max_difference(result["shards"][name], expected, number) == 0
    assert differing_names(results[0]["shards"][name], results[1]["shards"][name]) == []


def test_hybrid_sharding_matches_a_single_process(results: Results) -> None:
    expected = single_process(job.warm)
    for result in results:
        assert max_difference(result["shards"]["replicas"], expected) < 1e-5


def test_sharded_gradients_are_projected_in_backward(results: Results) -> None:
    net = job.model()
    optimizer = project_in_backward(job.warm(net.parameters()))
    norms = job.train_projecting(net, optimizer, range(job.STEPS), job.micro_batches(1), 0.05)
    for result in results:
        found = dict(result["shards"]["in backward"])
        assert found.pop("norms").tolist() == pytest.approx(norms, rel=1e-5)
        assert max_difference(found, job.full_state(net, optimizer)) < 1e-5


def test_state_is_sharded_like_its_parameter_and_the_basis_replicated(results: Results) -> None:
    for result in results:
        split = {name for name, placements in result["shards"]["placements"].items() if "Shard(dim=0)" in placements}
        assert split == {"exp_avg", "exp_avg_sq"}


def test_galore_state_with_parameter_rows_is_sharded(results: Results) -> None:
    rows = {"right": {"exp_avg", "exp_avg_sq"}, "left": {"ortho_matrix"}, "full": {"ortho_matrix_left"}}
    for result in results:
        for projection_type, found in result["shards"]["galore placements"].items():
            split = {name for name, placements in found.items() if "Shard(dim=0)" in placements}
            assert split == rows[projection_type]


def test_nonfinite_gradient_on_one_rank_skips_the_step_on_all(results: Results) -> None:
    for result in results:
        assert result["shards"]["skipped"] == result["shards"]["galore skipped"] == 1
        assert result["shards"]["changed"] == []


def test_unsupported_sharding_is_rejected(results: Results) -> None:
    patterns = {
        "side": "OptimizerError: side = 'std' .* use side = 'right'",
        "rule": "OptimizerError: rule = 'muon' .* use rule = 'adamw'",
        "columns": r"sharded by its first dimension.* got placements \(Shard\(dim=1\),\)",
        "columns of galore": r"sharded by its first dimension.* got placements \(Shard\(dim=1\),\)",
        "vector": "OptimizerError: store = 'int8' .* got 2050 of 4100 per rank",
        "model": "OptimizerError: fully_shard .* omit model",
        "group": "OptimizerError: fully_shard .* omit process_group",
    }
    for result in results:
        errors = result["shards"]["unsupported"]
        assert errors.keys() == patterns.keys()
        for name, error in errors.items():
            assert re.search(patterns[name], error)


@pytest.mark.parametrize("name", MAKES)
def test_checkpoints_are_resharded(run: Path, results: Results, name: str) -> None:
    saved_by_one = single_process(MAKES[name], HALF)
    for result in results:
        found = result["checkpoints"]
        assert differing_names(found[f"{name} loaded from two"], found[f"{name} saved"]) == []
        assert differing_names(found[f"{name} loaded from one"], saved_by_one) == []
        assert differing_names(found[f"{name} resumed from two"], found[f"{name} uninterrupted"]) == []
        for route in ("round trip", "via full tensors"):
            state = {k: v for k, v in found[f"{name} {route}"].items() if not k.endswith("weight")}
            assert (
                differing_names(state, {k: v for k, v in found[f"{name} resumed from two"].items() if k in state}) == []
            )
    net = job.model()
    optimizer = MAKES[name](net.parameters())
    job.load(run / f"two {name}", net, optimizer)
    assert differing_names(job.full_state(net, optimizer), results[0]["checkpoints"][f"{name} saved"]) == []
    job.train(net, optimizer, range(HALF, job.STEPS))
    tolerance = 2e-3 if name == "low bit" else 1e-5  # stochastic rounding differs between layouts
    assert (
        max_difference(job.full_state(net, optimizer), results[0]["checkpoints"][f"{name} uninterrupted"]) < tolerance
    )
    assert (
        max_difference(results[0]["checkpoints"][f"{name} resumed from one"], single_process(MAKES[name])) < tolerance
    )


@pytest.mark.parametrize("flat", [False, True])
def test_named_state_dict_leaves_frozen_parameters_unchanged(flat: bool) -> None:
    net = job.model()
    net[0].weight.requires_grad_(False)
    optimizer, fresh = job.warm(net.parameters()), job.warm(net.parameters())
    job.train(net, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(net, fresh, get_optimizer_state_dict(net, optimizer, options=options), options=options)
    assert differing_names(job.full_state(net, fresh), job.full_state(net, optimizer)) == []
    assert int(fresh.state[net[2].weight]["step"]) == 3


def test_projected_gradients_take_their_share_of_the_traffic_of_ddp(pool: Pool) -> None:
    """r/n of each matrix, and at most 5% for the sketch of the norm and for warm refreshes."""
    width, rank = 512, 64
    projected = sum(m * rank for m in (3 * width, width, 4 * width, width))
    share = projected / sum(p.numel() for p in job.Block(width).parameters())
    for full, sent in pool.run(job.RANKS, job.traffic, width, rank, 10):
        assert share < sent / full <= share + 0.05


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("ranks", "settings"), [(2, {}), (3, {}), (3, {"neuron_beta": 0.9, "cautious_decay": True})])
def test_ranks_share_the_matrices_of_muon(pool: Pool, strategy: str, ranks: int, settings: dict[str, Any]) -> None:
    """Six square matrices, of which one is fused of two: balanced by cost, and equal to one process."""
    alone = job.orthogonalized("none", settings)
    results = pool.run(ranks, job.orthogonalized, strategy, settings)
    assert sum(result["counts"] for result in results) == alone["counts"] == 3 * 7
    assert max(result["counts"] for result in results) <= 3 * -(-7 // ranks)
    for result in results:
        for found, expected in zip(result["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
