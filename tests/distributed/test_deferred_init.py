"""Models of which every rank allocates only its part, with the initial values of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import deferred_init_jobs as jobs
from tests.distributed.pool import Pool
from tests.support.runs import prepare_text
from torch import nn

from whimbrel.distributed.deferred_init import deferred_init, materialize_
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig

FSDP: dict[str, Any] = {"strategy": "fsdp"}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt2", 2, FSDP),
    ("llama", 2, {"tp": 2}),
    ("hf-llama", 2, {"pp": 2}),
    ("gpt2", 4, {"pp": 2, "dp_shard": 2}),
    ("llama", 4, {"tp": 2, "dp_shard": 2}),
]


def check_built(results: list[jobs.Built], model: nn.Module) -> None:
    """The values are those of `model`, and every rank allocated its part, with a few complete parameters at a time."""
    sizes = [parameter.nbytes for parameter in model.parameters()]
    for built in results:
        assert built.peak < built.own + 4 * max(sizes) < sum(sizes)
    state = model.state_dict()
    assert state.keys() == results[0].state.keys()
    for name, expected in state.items():
        assert torch.equal(results[0].state[name], expected), name


@pytest.mark.parametrize(("kind", "world_size", "settings"), LAYOUTS, ids=str)
def test_a_rank_allocates_its_part_of_the_model_only(
    pool: Pool, tmp_path: Path, kind: str, world_size: int, settings: dict[str, Any]
) -> None:
    results = pool.run(world_size, jobs.build, tmp_path, settings, kind)
    torch.manual_seed(jobs.trainer_jobs.make_config(tmp_path, {}, 1, {}).train.seed)
    check_built(results, jobs.make_model(kind))


def test_a_run_creates_or_loads_only_the_parts_of_a_rank(pool: Pool, tmp_path: Path, shakespeare: str) -> None:
    """From a directory, each rank reads its rows of fused and transposed weights."""
    prepare_text(tmp_path, shakespeare[:20_000])
    sizes = jobs.SIZES | {"vocab_size": 300}  # padded to 320 rows
    table: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "model": sizes,
        "data": {"path": str(tmp_path / "shards")},
        "train": {"steps": 1, "tokens_per_step": 64, "micro_batch": 1, "device": "cpu", "seed": 3},
    }
    torch.manual_seed(3)
    model = GPT(GPTConfig(**sizes))
    check_built(pool.run(2, jobs.build_run, table, FSDP), model)
    save_model(model, tmp_path / "saved")
    table["model"] = {"path": str(tmp_path / "saved")}
    check_built(pool.run(2, jobs.build_run, table, FSDP), model)
    check_built(pool.run(2, jobs.build_run, table, {"tp": 2}), model)
    check_built(pool.run(2, jobs.build_run, table, {"pp": 2}), model)


def test_ranks_that_initialize_with_different_seeds_raise(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run(2, jobs.error_of_different_seeds, tmp_path, FSDP):
        assert "expected the same weights on all ranks, got different values of transformer.wte.weight" in message


class Initialized(nn.Module):
    """Most ways in which parameters get their initial values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 6), nn.LayerNorm(6)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.scale = nn.Parameter(torch.randn(5) * 0.1)
        nn.init.trunc_normal_(self.linear.weight, std=0.1)
        nn.init.orthogonal_(self.encoder.layers[0].linear1.weight)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            self.scale.to("cpu").add_(self.linear.bias[:5].to(device=self.linear.weight.device))
            self.linear.weight.to("cpu").mul_(3)
            self.linear.weight[2:4] = self.linear.weight[:2] * 2
            self.linear.bias.normal_(generator=generator)
            self.norm.weight.mul_(self.linear.weight.abs().sum())
            self.norm.bias.copy_(self.linear.bias)
            self.linear.bias.zero_()
        self.register_buffer("table", torch.empty(3).uniform_())
        if float(self.norm.weight.sum().detach()) > 0:
            nn.init.ones_(self.encoder.layers[1].linear1.bias)
        self.bfloat16()


def test_deferred_parameters_have_the_values_of_the_code_that_initializes_them() -> None:
    torch.manual_seed(5)
    expected, after = Initialized(), torch.rand(3)
    torch.manual_seed(5)
    model = deferred_init(Initialized)
    assert torch.equal(torch.rand(3), after)
    assert model.linear.weight.is_meta
    assert not model.table.is_meta
    materialize_(model, [model], torch.device("cpu"))
    for (name, value), other in zip(expected.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_an_initialization_that_cannot_be_recorded_creates_the_complete_model(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(nn.Linear):
        @torch.no_grad()
        def reset_parameters(self) -> None:
            super().reset_parameters()
            torch._foreach_mul_([self.weight, self.bias], 0.5)

    def create() -> nn.Module:
        torch.manual_seed(1)
        return Scaled(4, 4)

    model = deferred_init(create)
    assert torch.equal(model.weight, create().weight)
    assert "creating the complete model on every rank" in caplog.text
