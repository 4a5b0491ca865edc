"""Low-rank optimizers on two ranks: replicas stay the same bits, and shards make the steps of one process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from tests.distributed import optim_work as job
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from whimbrel.optim import project_in_backward

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch")
HALF = job.STEPS // 2
MAKES = {"warm": job.warm, "in bytes": job.in_bytes, "galore": job.galore}
Answers = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has saved what two take up, and two what one does."""
    folder = tmp_path_factory.mktemp("run")
    for name, make in MAKES.items():
        net = job.model()
        optimizer = make(net.parameters())
        job.train(net, optimizer, range(HALF))
        job.save(folder / f"one {name}", net, optimizer)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(job.work, (folder, port), nprocs=job.RANKS)
    return folder


@pytest.fixture(scope="module")
def answers(run: Path) -> Answers:
    return [torch.load(run / f"{rank}.pt", weights_only=True) for rank in range(job.RANKS)]


def alone(make: job.Make, steps: int = job.STEPS) -> dict[str, Tensor]:
    net = job.model()
    optimizer = make(net.parameters())
    job.train(net, optimizer, range(steps))
    return job.everything(net, optimizer)


def farthest(one: dict[str, Tensor], other: dict[str, Tensor], kind: str = "weight") -> float:
    """The largest difference of weights, or of another kind of tensor."""
    assert one.keys() == other.keys()
    names = [name for name in one if name.endswith(kind)]
    assert names
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in names)


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("name", job.REPLICATED)
def test_replicas_stay_bit_identical(answers: Answers, name: str) -> None:
    one, other = (answer["replicas"][name] for answer in answers)
    assert different(one, other) == []
    start = {f"{n} weight": p.detach() for n, p in job.model().to(job.REPLICATED[name][1]).named_parameters()}
    assert not any(torch.equal(one[n], p) for n, p in start.items() if p.numel() > 1)


def test_basis_that_differs_between_ranks_is_reported(answers: Answers) -> None:
    for answer in answers:
        assert "ParallelError: the basis of 2.weight on rank 1 differs" in answer["replicas"]["nudged"]


@pytest.mark.parametrize("kind", ["hooks", "linears", "ddp"])
def test_averaged_projections_match_a_single_process(answers: Answers, kind: str) -> None:
    net = job.model()
    optimizer = project_in_backward(job.warm(net.parameters()), accumulation=4)
    norms = job.train_projecting(net, optimizer, range(job.STEPS), job.cut(4), 0.05)
    assert min(norms) > 0.05  # every step is clipped
    expected = job.everything(net, optimizer)
    for answer in answers:
        found = dict(answer["projections"][kind])
        assert found.pop("norms").tolist() == pytest.approx(norms, rel=1e-4)
        assert farthest(found, expected) < 1e-5
        assert different(found, {k: v for k, v in answers[0]["projections"][kind].items() if k != "norms"}) == []


def test_only_projected_gradients_are_communicated(answers: Answers) -> None:
    net = job.model()
    optimizer = job.warm(net.parameters())
    params = [*net.parameters()]
    first = [len(params), *(p.numel() for p in params)]  # who has a gradient, and the gradients: every basis is due
    second = [len(params), *(optimizer.param_state(p).low_shape.numel() for p in params)]
    for answer in answers:
        assert answer["projections"]["sent"] == [first, second]
        assert farthest(answer["projections"]["whole batch"], alone(job.warm)) < 1e-5
    assert sum(second) < sum(first) / 5


def test_parameter_without_gradient_on_one_rank_is_updated(answers: Answers) -> None:
    one, other = (answer["projections"]["routes"] for answer in answers)
    assert different(one, other) == []
    assert [int(one[f"{i}.weight step"]) for i in range(3)] == [3, 3, 0]


def test_settings_that_would_diverge_between_ranks_are_refused(answers: Answers) -> None:
    for answer in answers:
        found = answer["projections"]
        assert "a gradient after those of the step were averaged" in found["late"]
        assert "process_group=torch.distributed.group.WORLD" in found["no group"]
        assert "before gradients are averaged over ranks" in found["steps"]


@pytest.mark.parametrize("name", job.ON_SHARDS)
def test_sharded_optimizer_matches_a_single_process(answers: Answers, name: str) -> None:
    expected = alone(job.ON_SHARDS[name])
    for answer in answers:
        assert farthest(answer["shards"][name], expected) < 1e-5
        for number in ("step",) if "galore" in name else ("step", "seed"):
            assert farthest(answer["shards"][name], expected, number) == 0
    assert different(answers[0]["shards"][name], answers[1]["shards"][name]) == []


def test_hybrid_sharding_matches_a_single_process(answers: Answers) -> None:
    expected = alone(job.warm)
    for answer in answers:
        assert farthest(answer["shards"]["replicas"], expected) < 1e-5


def test_sharded_gradients_are_projected_in_backward(answers: Answers) -> None:
    net = job.model()
    optimizer = project_in_backward(job.warm(net.parameters()))
    norms = job.train_projecting(net, optimizer, range(job.STEPS), job.cut(1), 0.05)
    for answer in answers:
        found = dict(answer["shards"]["in backward"])
        assert found.pop("norms").tolist() == pytest.approx(norms, rel=1e-5)
        assert farthest(found, job.everything(net, optimizer)) < 1e-5


def test_state_is_sharded_like_its_parameter_and_the_basis_replicated(answers: Answers) -> None:
    for answer in answers:
        split = {name for name, placements in answer["shards"]["placements"].items() if "Shard(dim=0)" in placements}
        assert split == {"exp_avg", "exp_avg_sq"}


def test_galore_state_with_parameter_rows_is_sharded(answers: Answers) -> None:
    rows = {"right": {"exp_avg", "exp_avg_sq"}, "left": {"ortho_matrix"}, "full": {"ortho_matrix_left"}}
    for answer in answers:
        for projection_type, found in answer["shards"]["galore placements"].items():
            split = {name for name, placements in found.items() if "Shard(dim=0)" in placements}
            assert split == rows[projection_type]


def test_nonfinite_gradient_on_one_rank_skips_the_step_on_all(answers: Answers) -> None:
    for answer in answers:
        assert answer["shards"]["skipped"] == answer["shards"]["galore skipped"] == 1
        assert answer["shards"]["moved"] == []


def test_unsupported_sharding_is_refused(answers: Answers) -> None:
    words = {
        "side": "OptimizerError: side = 'std' projects the rows .* use side = 'right'",
        "rule": "OptimizerError: rule = 'muon' needs all rows .* use rule = 'adamw', 'sgd' or 'lion'",
        "columns": r"sharded by its first dimension.* got placements \(Shard\(dim=1\),\)",
        "columns of galore": r"sharded by its first dimension.* got placements \(Shard\(dim=1\),\)",
        "vector": "OptimizerError: store = 'int8' .* got 2050 of 4100 per rank",
        "model": "OptimizerError: fully_shard .* leave out model",
        "group": "OptimizerError: fully_shard .* leave out process_group",
    }
    for answer in answers:
        refused = answer["shards"]["refused"]
        assert refused.keys() == words.keys()
        for name, text in refused.items():
            with pytest.raises(ValueError, match=words[name]):
                raise ValueError(text)


@pytest.mark.parametrize("name", MAKES)
def test_checkpoints_are_resharded(run: Path, answers: Answers, name: str) -> None:
    saved_by_one = alone(MAKES[name], HALF)
    for answer in answers:
        found = answer["checkpoints"]
        assert different(found[f"{name} loaded from two"], found[f"{name} saved"]) == []
        assert different(found[f"{name} loaded from one"], saved_by_one) == []
        assert different(found[f"{name} resumed from two"], found[f"{name} unbroken"]) == []
        for way in ("there and back", "by way of whole tensors"):
            state = {k: v for k, v in found[f"{name} {way}"].items() if not k.endswith("weight")}
            assert different(state, {k: v for k, v in found[f"{name} resumed from two"].items() if k in state}) == []
    net = job.model()
    optimizer = MAKES[name](net.parameters())
    job.load(run / f"two {name}", net, optimizer)
    assert different(job.everything(net, optimizer), answers[0]["checkpoints"][f"{name} saved"]) == []
    job.train(net, optimizer, range(HALF, job.STEPS))
    tolerance = 2e-3 if name == "in bytes" else 1e-5  # stochastic rounding differs between layouts
    assert farthest(job.everything(net, optimizer), answers[0]["checkpoints"][f"{name} unbroken"]) < tolerance
    assert farthest(answers[0]["checkpoints"][f"{name} resumed from one"], alone(MAKES[name])) < tolerance


@pytest.mark.parametrize("flat", [False, True])
def test_named_state_dict_leaves_frozen_parameters_unchanged(flat: bool) -> None:
    net = job.model()
    net[0].weight.requires_grad_(False)
    optimizer, fresh = job.warm(net.parameters()), job.warm(net.parameters())
    job.train(net, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(net, fresh, get_optimizer_state_dict(net, optimizer, options=options), options=options)
    assert different(job.everything(net, fresh), job.everything(net, optimizer)) == []
    assert int(fresh.state[net[2].weight]["step"]) == 3
