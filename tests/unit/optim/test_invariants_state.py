"""The table of optimizers x invariants: state is plain tensors of known size, and resumes bit for bit."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import (
    ENTRIES,
    LOW_RANK,
    SHAPES,
    differences,
    everything,
    move,
    parameters,
    params_of,
    random,
)
from torch import Tensor, nn

from whimbrel.base.errors import OptimizerError
from whimbrel.checkpoint import pack, unpack
from whimbrel.optim import LowRankOptimizer, restore_optimizer

every = pytest.mark.parametrize("name", ENTRIES)
every_low_rank = pytest.mark.parametrize("name", LOW_RANK)


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_checkpoint(state: Any) -> Any:
    tensors, tree = pack(state)
    return unpack({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(tree)))


def restart(name: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A new optimizer over copies of the parameters."""
    return ENTRIES[name]([nn.Parameter(p.detach().clone()) for p in params_of(optimizer)])


@every
@pytest.mark.parametrize(("through", "dtype"), [(through_torch, torch.float32), (through_checkpoint, torch.bfloat16)])
def test_a_run_resumes_bit_for_bit(name: str, through: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """Bases are sought before and after, by the unbroken run and by the resumed one."""
    unbroken = ENTRIES[name](parameters(dtype))
    move(unbroken, range(4))
    resumed = restart(name, unbroken)
    resumed.load_state_dict(through(unbroken.state_dict()))
    assert differences(everything(unbroken), everything(resumed)) == []
    move(unbroken, range(4, 13))
    move(resumed, range(4, 13))
    assert differences(everything(unbroken), everything(resumed)) == []


@every
def test_the_trainer_restores_by_name(name: str) -> None:
    """Into groups in another order, whose own learning rate stays."""

    def build(order: list[int], params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        optimizer = ENTRIES[name]([params[i] for i in order], lr=lr)
        places = {id(p): i for i, p in enumerate(params)}
        for group in optimizer.param_groups:
            group["names"] = [str(places[id(p)]) for p in group["params"]]
        return optimizer

    params = parameters()
    first = build([0, 1, 2, 3, 4, 5, 6], params, 0.01)
    move(first, range(3))
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    second = build([2, 1, 0, 6, 5, 4, 3], copies, 0.005)
    restore_optimizer(second, through_torch(first.state_dict()))
    assert second.param_groups[0]["lr"] == 0.005
    for p, q in zip(params, copies, strict=True):
        assert differences(first.state[p], second.state[q]) == []


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_loaded_keeps_its_dtype(name: str, dtype: torch.dtype) -> None:
    optimizer = ENTRIES[name](parameters(dtype))
    move(optimizer, range(2))
    before = [{key: t.dtype for key, t in optimizer.state[p].items()} for p in params_of(optimizer)]
    optimizer.load_state_dict(through_torch(optimizer.state_dict()))
    after = [{key: t.dtype for key, t in optimizer.state[p].items()} for p in params_of(optimizer)]
    assert before == after


@every
def test_the_state_is_flat_plain_tensors(name: str) -> None:
    optimizer = ENTRIES[name](parameters())
    move(optimizer, range(2))
    for p in params_of(optimizer):
        for key, value in optimizer.state[p].items():
            assert type(key) is str
            assert type(value) is Tensor
            assert not value.requires_grad
            assert value.untyped_storage().nbytes() == value.nbytes, "a view keeps more alive than itself"
    settings = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    assert all(type(value) in (int, float, bool, str, tuple, type(None)) for value in settings)


@every
@pytest.mark.parametrize("shape", SHAPES)
def test_its_bytes_are_those_of_the_formula(name: str, shape: str) -> None:
    p = nn.Parameter(random(SHAPES[shape]))
    optimizer = ENTRIES[name]([p])
    move(optimizer, range(2))
    assert sum(tensor.nbytes for tensor in optimizer.state[p].values()) == ENTRIES[name].bytes_of(SHAPES[shape])


@every_low_rank
@pytest.mark.parametrize("shape", [*SHAPES.values(), (300, 700), (4096,), (2, 90, 70), (64, 16, 3, 3)], ids=str)
def test_its_bytes_are_known_beforehand(name: str, shape: tuple[int, ...]) -> None:
    """By arithmetic, and as tensors on a device that has no memory."""
    p = nn.Parameter(torch.empty(shape, device="meta"))
    optimizer = LOW_RANK[name]([p])
    state = optimizer.state[p]
    assert sum(tensor.nbytes for tensor in state.values()) == optimizer.state_bytes(p) == LOW_RANK[name].bytes_of(shape)
    assert all(tensor.is_meta or tensor.numel() == 1 for tensor in state.values())


@every_low_rank
def test_a_vast_model_costs_nothing_to_describe(name: str) -> None:
    """A matrix of 2^50 numbers."""
    p = nn.Parameter(torch.empty(1 << 25, 1 << 25, device="meta"))
    optimizer = LOW_RANK[name]([p])
    assert optimizer.state_bytes(p) == LOW_RANK[name].bytes_of((1 << 25, 1 << 25))


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "muon"])
def test_all_of_the_state_is_there_at_construction(name: str) -> None:
    optimizer = ENTRIES[name](parameters())
    before = {key: (t.shape, t.dtype) for key, t in everything(optimizer).items()}
    move(optimizer, range(8))
    assert {key: (t.shape, t.dtype) for key, t in everything(optimizer).items()} == before


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "muon"])
def test_reset_forgets_everything(name: str) -> None:
    optimizer = ENTRIES[name](parameters())
    fresh = everything(restart(name, optimizer))
    move(optimizer, range(8))
    optimizer.reset()
    kept = {key: value for key, value in everything(optimizer).items() if " " in key}
    assert differences(kept, {key: value for key, value in fresh.items() if " " in key}) == []
    again = restart(name, optimizer)
    move(optimizer, range(8))
    move(again, range(8))
    assert differences(everything(optimizer), everything(again)) == []


@every
def test_a_copy_goes_its_own_way(name: str) -> None:
    """`copy.deepcopy` of parameters and optimizer together, as of a model and its optimizer."""
    optimizer = ENTRIES[name](parameters())
    move(optimizer, range(3))
    _, copied = copy.deepcopy((params_of(optimizer), optimizer))
    before = everything(optimizer)
    move(copied, range(3, 9))
    assert differences(before, everything(optimizer)) == []
    move(optimizer, range(3, 9))
    assert differences(everything(copied), everything(optimizer)) == []


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "muon"])
def test_a_group_may_come_later(name: str) -> None:
    """Its parameters move as they would have from the start, with what the group says of itself."""
    params = parameters()
    optimizer = ENTRIES[name](params[:2])
    move(optimizer, range(2))
    optimizer.add_param_group({"params": params[2:], "lr": 0.0, "weight_decay": 0.0})
    before = everything(optimizer)
    move(optimizer, range(2, 5))
    after = everything(optimizer)
    assert not torch.equal(before["0"], after["0"])
    assert all(torch.equal(before[str(place)], after[str(place)]) for place in range(2, len(params)))
    assert all(int(optimizer.state[p]["step"]) == 3 for p in params[2:]) or optimizer.defaults.get("start") == "random"


OTHERS = {
    "another rank": ({"rank": 4}, {"rank": 2}),
    "no subspace": ({"rank": 4}, {}),
    "another store": ({"store": "int8"}, {"store": "fp32"}),
    "another rule of the same moments": ({"rule": "sgd"}, {"rule": "lion"}),
    "another side of a square": ({"rank": 4, "side": "right"}, {"rank": 4, "side": "left"}),
    "another back projection": ({"rank": 4, "back_projection": "fira"}, {"rank": 4}),
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(which: str) -> None:
    given, own = OTHERS[which]
    saved, optimizer = (LowRankOptimizer([nn.Parameter(random((64, 64)))], **settings) for settings in (given, own))
    move(saved, range(2))
    move(optimizer, range(1))
    before = everything(optimizer)
    with pytest.raises(OptimizerError, match="expected a saved state"):
        optimizer.load_state_dict(saved.state_dict())
    assert differences(before, everything(optimizer)) == []
    assert all(optimizer.param_groups[0][key] == value for key, value in own.items())


def test_a_state_of_other_parameters_is_refused() -> None:
    optimizer = LowRankOptimizer([nn.Parameter(random((8, 8)))])
    with pytest.raises(OptimizerError, match=r"expected a saved state with groups of \[1\]"):
        optimizer.load_state_dict(LowRankOptimizer([nn.Parameter(random((8, 8))) for _ in range(2)]).state_dict())


def test_equal_parts_of_a_state_are_cut_alike() -> None:
    """Codes and scales share their first dimension, so that rows can be shared out over machines."""
    p = nn.Parameter(random((96, 600)))
    optimizer = LOW_RANK["adamw8bit"]([p])
    state = optimizer.state[p]
    for key in ("exp_avg", "exp_avg_sq"):
        assert state[key].shape == (96, 600)
        assert state[key + "_scale"].shape == (96, math.ceil(600 / 256))
