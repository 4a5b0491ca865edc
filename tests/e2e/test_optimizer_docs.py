"""The examples of docs/optimizers.md run as shown."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tests.support.documentation import code_blocks, run_python
from torch import nn

from whimbrel.config import build
from whimbrel.optim import OptimConfig, build_optimizer, classify_parameters

PAGE = "docs/optimizers.md"


def test_loop_with_low_rank_groups_learns(tmp_path: Path) -> None:
    loss, description = run_python(code_blocks(PAGE, "python")[0], tmp_path).split(" ", 1)
    assert float(loss) < 2.0  # log(64) = 4.2 before the first step
    assert description == "warm rank 8, adamw 9252\n"


def test_routing_assigns_rules_by_role_and_pattern(tmp_path: Path) -> None:
    assert run_python(code_blocks(PAGE, "python")[1], tmp_path).splitlines() == [
        "1 x *.weight (64, 32): adamw, 16400 bytes",
        "1 x *.weight (128, 32): random rank 8, adamw, apollo, 8212 bytes",
        "1 x *.bias (128,): adamw, 1040 bytes",
        "1 x *.weight (64, 128): adamw, 65552 bytes",
        "1 x *.bias (64,): adamw, 528 bytes",
    ]


def test_transformers_trainer_accepts_galore(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_python(code_blocks(PAGE, "python")[2], tmp_path)


def test_project_in_backward_example_skips_no_step(tmp_path: Path) -> None:
    programs = code_blocks(PAGE, "python")
    assert len(programs) == 4
    assert run_python(programs[3] + "print(optimizer.optimizer.skipped)", tmp_path) == "0\n"


def test_toml_groups_set_ranks() -> None:
    (table,) = code_blocks(PAGE, "toml")
    config = build(OptimConfig, tomllib.loads(table)["optim"], "optim")
    layers = [nn.ModuleDict({"attn": nn.Linear(520, 520), "mlp": nn.Linear(520, 520)}) for _ in range(2)]
    model = nn.ModuleDict({"wte": nn.Embedding(600, 520), "h": nn.ModuleList(layers)})
    optimizer = build_optimizer(config, classify_parameters(model))
    ranks = {name: group["rank"] for group in optimizer.param_groups for name in group["names"]}
    assert {name: rank for name, rank in ranks.items() if name.endswith("weight")} == {
        "wte.weight": 512, "h.0.attn.weight": None, "h.0.mlp.weight": None, "h.1.attn.weight": 128,
        "h.1.mlp.weight": 256,
    }  # fmt: skip
