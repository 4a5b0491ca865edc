"""Predicted memory, traffic and speed of 8 to 4,096 GPUs: the table of docs/distributed.md. Nothing is measured.

python bench/scaling.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whimbrel.base.files import format_bytes
from whimbrel.distributed.layout import resolve_layout
from whimbrel.distributed.traffic import Network, Workload, step_seconds, traffic
from whimbrel.train.memory_mesh import predict_mesh_memory
from whimbrel.train.run_config import RunConfig, build_run_config

NETWORK = Network()
SEQUENCE = 4096
TOKENS_PER_STEP = 4 * 2**20
LAYOUTS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("llama2-7b", 8, 1, {"strategy": "fsdp"}),
    ("llama2-7b", 64, 1, {"strategy": "fsdp"}),
    ("llama2-7b", 64, 1, {"strategy": "hsdp", "dp_shard": 8}),
    ("llama2-7b", 512, 1, {"strategy": "hsdp", "dp_shard": 8}),
    ("llama2-7b", 4096, 1, {"strategy": "hsdp", "dp_shard": 8}),
    ("llama3.1-70b", 8, 1, {"strategy": "fsdp"}),
    ("llama3.1-70b", 64, 1, {"strategy": "fsdp"}),
    ("llama3.1-70b", 64, 4, {"strategy": "fsdp"}),
    ("llama3.1-70b", 512, 4, {"strategy": "fsdp", "tp": 8}),
    ("llama3.1-70b", 512, 2, {"strategy": "hsdp", "dp_shard": 64}),
    ("llama3.1-70b", 4096, 4, {"strategy": "hsdp", "dp_shard": 16, "tp": 8}),
    ("llama3.1-70b", 4096, 2, {"strategy": "hsdp", "dp_shard": 64}),
]
"""Preset, ranks, sequences per forward pass, `[parallel]`."""


def make_config(preset: str, ranks: int, micro_batch: int, parallel: dict[str, Any]) -> RunConfig:
    """bf16, complete recomputation, and at least one micro-batch per data rank and step."""
    train = {
        "steps": 1, "micro_batch": micro_batch, "precision": "bf16", "recompute": "full",
        "tokens_per_step": TOKENS_PER_STEP,
    }  # fmt: skip
    table = {
        "output_dir": "run", "model": {"preset": preset}, "data": {"path": "data", "sequence_length": SEQUENCE},
        "train": train, "parallel": {**parallel, "param_dtype": "bf16"},
    }  # fmt: skip
    config = build_run_config(table)
    data_ranks = resolve_layout(config.parallel, ranks, NETWORK.ranks_per_node).dp
    tokens = max(TOKENS_PER_STEP, data_ranks * micro_batch * SEQUENCE)
    return replace(config, train=replace(config.train, tokens_per_step=tokens))


def main() -> None:
    """Print the rows of the table."""
    for preset, ranks, micro_batch, settings in LAYOUTS:
        config = make_config(preset, ranks, micro_batch, settings)
        layout = resolve_layout(config.parallel, ranks, NETWORK.ranks_per_node)
        (memory,) = predict_mesh_memory(config, layout, "cuda")
        work = Workload(
            parameters=config.model.matrix_parameters, layers=config.model.num_layers, width=config.model.embd_size,
            tokens=micro_batch * SEQUENCE, micro_batches=memory.accumulation, param_bytes=2, recompute=True,
        )  # fmt: skip
        seconds = step_seconds(work, layout, config.parallel, NETWORK)
        flops = 8 * work.parameters * work.tokens * work.micro_batches / (layout.tp * layout.pp)
        sent = {name: size for name, size in traffic(work, layout, config.parallel).items() if size}
        print(
            f"| {preset} | {ranks:,} | {layout} | {memory.accumulation} x {micro_batch} | "
            f"{format_bytes(memory.peak)} | "
            f"{', '.join(f'{name} {size / 1e9:.0f}' for name, size in sent.items())} | {seconds:.2f} | "
            f"{config.tokens_per_step / seconds / 1e6:.2f} | {flops / NETWORK.flops / seconds:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
