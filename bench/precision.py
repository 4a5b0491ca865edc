"""Speed, quality and memory of low-precision training and quantized weights.

    python bench/precision.py fp8 --device cuda --out bench/results/precision-fp8.json
    python bench/precision.py fp8-loss --device cuda --data data/webmix20M --out bench/results/precision-fp8-loss.json
    python bench/precision.py qat --device cuda --data data/webmix20M --out bench/results/precision-qat.json
    python bench/precision.py state --device cuda --out bench/results/precision-state.json
    python bench/precision.py decode --device cuda --shape llama2-7b --out bench/results/precision-decode.json
    python bench/precision.py load --device cpu --out bench/results/precision-load.json

fp8: a few blocks of Llama's 8B, forward and backward, compiled; bf16 and the fp8 recipes take turns. fp8-loss: a small
model trained in bf16 with several seeds and once in each fp8 recipe, held-out loss. qat: a small model trained, tuned
further plain and with each QAT recipe, and quantised: which share of the loss that rounding costs does QAT save? state:
bytes of 8-bit Adam for a parameter. decode: the time of one token at batch 1, weights in each format, beside the time
that reading them takes. load: memory and time of quantising while loading, and of loading first.

`--tiny` is a smoke test: any of them runs in seconds on a CPU; the numbers are meaningless.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

from precision_load import measure_load
from precision_training import measure_fp8_loss, measure_qat
from record import record
from timing import TINY, compiled, init_model, interleave, llama, now
from whimbrel.models import GPT, GPTConfig, preset
from whimbrel.optim import OptimConfig, build_optimizer
from whimbrel.precision import quantize_, torch_flags
from whimbrel.precision.recipes import prepare, recipe_names
from whimbrel.train.build import routed_parameters

# fp8: speed of training


def measure_fp8(args: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of blocks in bf16 and in each recipe."""
    device, count = args.device, 64 if args.tiny else args.tokens
    length = min(2048, count)
    config = llama(**TINY) if args.tiny else llama(4096, args.layers, 32, 8, 14336)
    ids = torch.randint(config.vocab_size, (count // length, length), device=device)
    contenders: dict[str, Callable[[], Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in ("bf16", *recipe_names("compute")):
        model = init_model(config, device, torch.bfloat16)
        if name != "bf16":
            prepare(model, name)
        contenders[name] = block_pass(compiled(model, args.compile), ids)
        found[name] = {
            "first_seconds": first_pass(contenders[name], device),
            "activation_bytes": peak_over(contenders[name], device),
        }
    times = interleave(contenders, device, *((1, 1) if args.tiny else (7, 5)))
    for name, seconds in times.items():
        found[name] |= {"seconds": seconds, "times_bf16": times["bf16"] / seconds}
        print(f"{name:20} {seconds * 1e3:8.2f} ms, {times['bf16'] / seconds:.3f} x bf16", flush=True)
    return {"layers": config.num_layers, "tokens": ids.numel(), "sequence_length": length, **found}


def block_pass(model: GPT, ids: Tensor) -> Callable[[], None]:
    """One forward and backward through the blocks; embedding and head, which no recipe touches, hardly count."""
    gradient = torch.randn(*ids.shape, model.config.embd_size, device=ids.device, dtype=torch.bfloat16) / ids.numel()

    def work() -> None:
        model.hidden_states(ids).backward(gradient)
        model.zero_grad(set_to_none=True)

    return work


def first_pass(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the first three passes, including compilation."""
    start = now(device)
    for _ in range(3):
        work()
    return now(device) - start


def peak_over(work: Callable[[], Any], device: torch.device) -> int | None:
    """Peak GPU memory of one pass above what was allocated before it, in bytes; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


# state: 8-bit Adam


def measure_state(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of optimizer state per parameter after one step, for fp32 and 8-bit AdamW."""
    config = llama(**TINY) if args.tiny else preset("gpt2")
    found: dict[str, Any] = {}
    for name in ("adamw", "adamw8bit"):
        model = init_model(config, args.device, torch.float32)
        optimizer = build_optimizer(OptimConfig(name=name), routed_parameters(model))
        ids = torch.randint(config.vocab_size, (1, 17), device=args.device)
        model(ids[:, :-1], targets=ids[:, 1:]).loss.backward()
        optimizer.step()
        held = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        found[name] = held / sum(parameter.numel() for parameter in model.parameters())
        print(f"{name:10} {found[name]:.4f} bytes a parameter", flush=True)
    return found


# decode: one token at a time


class Filled:
    """A full KV cache: each step overwrites the last token, so that all steps cost the same."""

    def __init__(self, config: GPTConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_layers, 2, 1, config.kv_heads, tokens, config.head_dim)
        self.held, self.tokens = torch.randn(shape, device=device, dtype=dtype), tokens

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write the token to the last slot and return all keys and values."""
        keys, values = self.held[layer_idx]
        keys[:, :, -1:], values[:, :, -1:] = key_states, value_states
        return keys, values

    def get_seq_length(self) -> int:
        """All slots but the last."""
        return self.tokens - 1


@torch.no_grad()
def measure_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per token at batch 1 with a context of 128 tokens, in bf16 and with each weight format."""
    device = args.device
    config = llama(**TINY) if args.tiny else preset(args.shape)
    rate = None if args.tiny else bandwidth(device)
    contenders: dict[str, Callable[[], Any]] = {}
    found: dict[str, Any] = {}
    for name in ("bf16", *(args.weights or recipe_names("ptq"))):
        model = init_model(config, device, torch.bfloat16).requires_grad_(False)  # noqa: FBT003
        if name != "bf16":
            quantize_(model, name)
        cache = Filled(config, 16 if args.tiny else 128, device, torch.bfloat16)
        contenders[name] = captured(
            compiled(model, args.compile), cache, torch.zeros(1, 1, dtype=torch.long, device=device)
        )
        read = sum(parameter.nbytes for parameter in model.parameters()) - model.token_embedding.weight.nbytes
        found[name] = {"bytes": read + (model.token_embedding.weight.nbytes if config.tied_head else 0)}
    times = interleave(contenders, device, *((1, 1) if args.tiny else (7, 20)))
    for name, seconds in times.items():
        found[name] |= {"seconds": seconds, "tokens_per_second": 1 / seconds, "times_bf16": times["bf16"] / seconds}
        if rate is not None:
            found[name]["share_of_limit"] = found[name]["bytes"] / rate / seconds
        print(f"{name:6} {json.dumps(found[name])}", flush=True)
    return {"shape": "tiny" if args.tiny else args.shape, "bytes_per_second": rate, **found}


def captured(model: GPT, cache: Filled, token: Tensor) -> Callable[[], Any]:
    """One decode step; on a GPU as a CUDA graph, because kernel launches would dominate."""

    def step() -> None:
        model(token, cache=cache)

    for _ in range(3):
        step()
    if token.device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_read: object = step) -> None:  # `step` keeps the tensors that the graph reads alive
        graph.replay()

    return replay


def bandwidth(device: torch.device) -> float:
    """Read bandwidth for a large tensor, in bytes per second."""
    large = torch.ones(2**31 if device.type == "cuda" else 2**26, dtype=torch.bfloat16, device=device)
    seconds = interleave({"sum": large.amax}, device, 5, 5)["sum"]
    return large.nbytes / seconds


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "fp8": measure_fp8, "fp8-loss": measure_fp8_loss, "qat": measure_qat, "state": measure_state,
    "decode": measure_decode, "load": measure_load,
}  # fmt: skip


def main() -> None:
    """Run one benchmark and record the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: does it run?")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="but for --tiny, yes")
    parser.add_argument("--data", type=Path, help="shards of GPT-2's tokens, for fp8-loss and qat")
    parser.add_argument("--layers", type=int, default=4, help="of fp8")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a pass of fp8")
    parser.add_argument("--steps", type=int, default=300, help="of fp8-loss and qat")
    parser.add_argument("--lr", type=float, default=1e-3, help="of fp8-loss and qat")
    parser.add_argument("--seeds", type=int, default=3, help="of bf16 in fp8-loss")
    parser.add_argument("--shape", default="llama3.2-1b", help="preset of decode and load")
    parser.add_argument("--weights", choices=recipe_names("ptq"), action="append", help="of decode; else all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.compile = not args.tiny if args.compile is None else args.compile
    switches = torch_flags(matmul_precision="high", recompile_limit=64 if args.compile else None)
    # With this, inductor fuses dequantization into the matrix-vector product.
    tuned = torch._inductor.config.patch(coordinate_descent_tuning=args.part == "decode")
    with switches, tuned:
        results = PARTS[args.part](args)
    record(f"precision {args.part}", {"device": str(args.device), **results}, args.out)


if __name__ == "__main__":
    main()
