"""Speed, quality and memory of low-precision training and quantized weights.

    python bench/precision.py fp8 --device cuda --out bench/results/precision-fp8.json
    python bench/precision.py fp8-loss --device cuda --data data/webmix20M --out bench/results/precision-fp8-loss.json
    python bench/precision.py qat --device cuda --data data/webmix20M --out bench/results/precision-qat.json
    python bench/precision.py state --device cuda --out bench/results/precision-state.json
    python bench/precision.py decode --device cuda --shape llama2-7b --out bench/results/precision-decode.json
    python bench/precision.py load --device cpu --out bench/results/precision-load.json

fp8: forward and backward of a few Llama 8B blocks, compiled; bf16 and the fp8 recipes are interleaved.
fp8-loss: held-out loss of a small model trained in bf16 with several seeds and once with each fp8 recipe.
qat: a small model is trained, fine-tuned with and without each QAT recipe, and quantized; reports the fraction of the
quantization loss that QAT recovers.
state: bytes of 8-bit Adam state per parameter.
decode: time per token at batch 1 with each weight format, and the lower bound from memory bandwidth.
load: memory and time of quantizing while loading and after loading.

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
from timing import TINY, compile_blocks, init_model, interleave, llama, now
from whimbrel.models import GPT, GPTConfig, preset
from whimbrel.ops.attention import KVView
from whimbrel.optim import OptimConfig, build_optimizer
from whimbrel.precision import quantize_, torch_flags
from whimbrel.precision.recipes import prepare, recipe_names
from whimbrel.train.build import classified_parameters

# fp8: speed of training


def measure_fp8(args: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of blocks in bf16 and in each recipe."""
    device, count = args.device, 64 if args.tiny else args.tokens
    length = min(2048, count)
    config = llama(**TINY) if args.tiny else llama(4096, args.layers, 32, 8, 14336)
    ids = torch.randint(config.vocab_size, (count // length, length), device=device)
    contenders: dict[str, Callable[[], Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in ("bf16", *recipe_names("fp8")):
        model = init_model(config, device, torch.bfloat16)
        if name != "bf16":
            prepare(model, name)
        contenders[name] = block_pass(compile_blocks(model, args.compile), ids)
        found[name] = {
            "first_seconds": first_pass(contenders[name], device),
            "activation_bytes": peak_activation_bytes(contenders[name], device),
        }
    times = interleave(contenders, device, *((1, 1) if args.tiny else (7, 5)))
    for name, seconds in times.items():
        found[name] |= {"seconds": seconds, "speedup": times["bf16"] / seconds}
        print(f"{name:20} {seconds * 1e3:8.2f} ms, {times['bf16'] / seconds:.3f} x bf16", flush=True)
    return {"layers": config.num_layers, "tokens": ids.numel(), "sequence_length": length, **found}


def block_pass(model: GPT, ids: Tensor) -> Callable[[], None]:
    """One forward and backward through the blocks, without the head; no recipe changes the head or the embedding."""
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


def peak_activation_bytes(work: Callable[[], Any], device: torch.device) -> int | None:
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
        optimizer = build_optimizer(OptimConfig(name=name), classified_parameters(model))
        ids = torch.randint(config.vocab_size, (1, 17), device=args.device)
        model(ids[:, :-1], targets=ids[:, 1:]).loss.backward()
        optimizer.step()
        state_bytes = sum(
            t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        )
        found[name] = state_bytes / sum(parameter.numel() for parameter in model.parameters())
        print(f"{name:10} {found[name]:.4f} bytes per parameter", flush=True)
    return found


# decode: one token at a time


class FullCache:
    """A full KV cache: each step overwrites the last token, so that all steps cost the same."""

    def __init__(self, config: GPTConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_layers, 2, 1, config.kv_heads, tokens, config.head_dim)
        self.keys_values, self.tokens = torch.randn(shape, device=device, dtype=dtype), tokens

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """The last position."""
        return torch.arange(self.tokens - tokens, self.tokens, device=device)

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> KVView:
        """Write the token to the last slot and return all keys and values."""
        keys, values = self.keys_values[layer_idx]
        keys[:, :, -1:], values[:, :, -1:] = key_states, value_states
        return KVView(keys, values)

    def get_seq_length(self) -> int:
        """Number of cached tokens: all slots but the last."""
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
        cache = FullCache(config, 16 if args.tiny else 128, device, torch.bfloat16)
        contenders[name] = capture_step(
            compile_blocks(model, args.compile), cache, torch.zeros(1, 1, dtype=torch.long, device=device)
        )
        read = sum(parameter.nbytes for parameter in model.parameters()) - model.token_embedding.weight.nbytes
        found[name] = {"bytes": read + (model.token_embedding.weight.nbytes if config.tied_head else 0)}
    times = interleave(contenders, device, *((1, 1) if args.tiny else (7, 20)))
    for name, seconds in times.items():
        found[name] |= {"seconds": seconds, "tokens_per_second": 1 / seconds, "speedup": times["bf16"] / seconds}
        if rate is not None:
            found[name]["share_of_limit"] = found[name]["bytes"] / rate / seconds
        print(f"{name:6} {json.dumps(found[name])}", flush=True)
    return {"shape": "tiny" if args.tiny else args.shape, "bytes_per_second": rate, **found}


def capture_step(model: GPT, cache: FullCache, token: Tensor) -> Callable[[], Any]:
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

    def replay(_keep_alive: object = step) -> None:  # the graph reads tensors that `step` refers to
        graph.replay()

    return replay


def bandwidth(device: torch.device) -> float:
    """Read bandwidth for a large tensor, in bytes per second."""
    large = torch.ones(2**31 if device.type == "cuda" else 2**26, dtype=torch.bfloat16, device=device)
    seconds = interleave({"sum": large.amax}, device, 5, 5)["sum"]
    return large.nbytes / seconds


BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "fp8": measure_fp8, "fp8-loss": measure_fp8_loss, "qat": measure_qat, "state": measure_state,
    "decode": measure_decode, "load": measure_load,
}  # fmt: skip


def main() -> None:
    """Run one benchmark and record the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tiny", action="store_true", help="smoke test with the smallest sizes")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None, help="default: yes, unless --tiny"
    )
    parser.add_argument("--data", type=Path, help="GPT-2 token shards, for fp8-loss and qat")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks, for fp8")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens per pass, for fp8")
    parser.add_argument("--steps", type=int, default=300, help="training steps, for fp8-loss and qat")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate, for fp8-loss and qat")
    parser.add_argument("--seeds", type=int, default=3, help="number of bf16 seeds, for fp8-loss")
    parser.add_argument("--shape", default="llama3.2-1b", help="model preset, for decode and load")
    parser.add_argument(
        "--weights", choices=recipe_names("ptq"), action="append",
        help="weight format, for decode; can be repeated (default: all)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.compile = not args.tiny if args.compile is None else args.compile
    flags = torch_flags(matmul_precision="high", recompile_limit=64 if args.compile else None)
    # lets inductor fuse dequantization into the matrix-vector product
    tuning = torch._inductor.config.patch(coordinate_descent_tuning=args.benchmark == "decode")
    with flags, tuning:
        results = BENCHMARKS[args.benchmark](args)
    record(f"precision {args.benchmark}", {"device": str(args.device), **results}, args.out)


if __name__ == "__main__":
    main()
