"""Cost and quality of low-rank optimizers.

    python bench/optim.py refresh --out bench/results/optim-refresh.json
    python bench/optim.py step --out bench/results/optim-step.json
    OMP_NUM_THREADS=1 python bench/optim.py step --device cpu --out bench/results/optim-step-cpu.json
    python bench/optim.py quality --data data/webmix20M --out bench/results/optim-quality.json
    python bench/optim.py curves --out docs/pictures/optimizers.svg

refresh: time to compute a new basis for one matrix, ours and galore-torch's SVD, and the fraction of the gradient's
energy that each captures.
step: the time of every step of a training run, the slowest step over the median, and the optimizer's share of a step.
On a CPU: steps over twelve 512 x 512 matrices with our optimizers and those of other packages, interleaved in one
process, minimum CPU time of each.
quality: validation loss of the same model on the same tokens for each optimizer and learning rate; the best rate is
repeated with a second seed. Parameters other than hidden matrices always use AdamW with one learning rate. --settings
(repeatable) tries other settings.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from record import record
from timing import llama
from whimbrel.data import TokenDataLoader
from whimbrel.models import GPT
from whimbrel.optim import (
    AdamW8bit,
    GaLore,
    GaLoreWarm,
    LowRankOptimizer,
    OptimConfig,
    ScheduleConfig,
    build_optimizer,
    lr_factor,
)
from whimbrel.optim.subspace import cold_basis, svd_basis, warm_basis
from whimbrel.train.build import classified_parameters

SHAPES = ((4096, 4096, 1024), (11008, 4096, 1024), (2752, 1024, 256))


def seconds(work: Any, rounds: int) -> float:
    """Median time of `work` in seconds, synchronizing the device."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def reference_projector() -> Any:
    """galore-torch's GaLoreProjector, loaded from its file because importing the package requires bitsandbytes."""
    package = importlib.util.find_spec("galore_torch")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit("this benchmark compares with galore-torch: pip install galore-torch")
    file = Path(package.submodule_search_locations[0]) / "galore_projector.py"
    spec = importlib.util.spec_from_file_location("galore_projector", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GaLoreProjector


def drifting_gradients(rows: int, columns: int, count: int) -> list[Tensor]:
    """Gradients with a spectrum that falls as 1/k^0.6 and right singular vectors that rotate slightly at each step."""
    generator = torch.Generator("cuda").manual_seed(0)
    rank = min(rows, columns)
    values = torch.arange(1, rank + 1, device="cuda").float() ** -0.6
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, generator=generator, device="cuda")).Q for size in (rows, columns)
    )
    gradients = []
    for _ in range(count):
        gradients.append((left * values) @ right.mT)
        right = torch.linalg.qr(right + 0.003 * torch.randn(right.shape, generator=generator, device="cuda")).Q
    return gradients


def energy(grad: Tensor, basis: Tensor) -> float:
    """Fraction of the squared Frobenius norm of `grad` that lies in the span of `basis`."""
    return float((grad.float() @ basis).square().sum() / grad.float().square().sum())


def measure_refresh(rounds: int) -> dict[str, Any]:
    """Time a basis refresh for several shapes, with fp32 and bf16 gradients; fp32 matmuls use TF32, as in training."""
    torch.set_float32_matmul_precision("high")
    return {f"{m}x{n} rank {r}": measure_shape(m, n, r, rounds) for m, n, r in SHAPES}


def measure_shape(rows: int, columns: int, rank: int, rounds: int) -> dict[str, Any]:
    """Time and captured energy of SVD, cold and warm bases for one shape."""
    *earlier, last = drifting_gradients(rows, columns, 4)
    generator = torch.Generator("cuda").manual_seed(1)
    basis = cold_basis(earlier[0], rank, generator).basis
    for grad in earlier[1:]:
        basis = warm_basis(grad, grad @ basis, basis).basis
    reference = reference_projector()(rank, update_proj_gap=1, proj_type="right")
    svd = seconds(lambda: reference.project(last, 0), 2)
    row: dict[str, Any] = {"svd_seconds": svd, "svd_energy": energy(last, svd_basis(last, rank))}
    row["cold_seconds"] = seconds(lambda: cold_basis(last, rank, generator), rounds)
    row["cold_energy_over_svd"] = energy(last, cold_basis(last, rank, generator).basis) / row["svd_energy"]
    row["stale_energy_over_svd"] = energy(last, basis) / row["svd_energy"]
    for name, grad, align in (
        ("fp32", last, False), ("fp32 aligned", last, True),
        ("bf16", last.bfloat16(), False), ("bf16 aligned", last.bfloat16(), True),
    ):  # fmt: skip
        work = partial(warm_basis, grad, grad @ basis.to(grad.dtype), basis, align=align)
        fresh, elapsed = work(), seconds(work, rounds)
        assert bool(fresh.valid)
        row[name] = {
            "seconds": elapsed,
            "speedup": svd / elapsed,
            "energy_over_svd": energy(grad, fresh.basis) / row["svd_energy"],
            "overlap": float(fresh.overlap),
        }
    print(f"{rows}x{columns} rank {rank}", json.dumps(row), flush=True)
    return row


def step_times(model: GPT, ids: Tensor, optimizer: torch.optim.Optimizer | None, count: int) -> list[float]:
    """Seconds of each step of four micro-batches, measured with CUDA events and without synchronizing between steps."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(4):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(ids[:, :-1], targets=ids[:, 1:]).loss
            (loss / 4).backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]


def measure_steps(names: list[str], count: int) -> dict[str, Any]:
    """Time steps of 65,536 tokens with each optimizer and with none: slowest step, and the optimizer's share."""
    torch.set_float32_matmul_precision("high")
    config = llama(1024, 24, 16, 16, 2752, vocab=32_000, context=1024)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(config)
    for block in model.blocks:
        block.compile()
    ids = torch.randint(0, config.vocab_size, (16, 1025), device="cuda")
    step_times(model, ids, None, 5)
    bare = statistics.mean(step_times(model, ids, None, count // 2))
    results: dict[str, Any] = {"parameters": model.num_parameters(), "tokens": 4 * ids[:, 1:].numel()}
    results["seconds_without_optimizer"] = bare
    for name in names:
        settings: dict[str, Any] = {"name": name, "lr": 1e-4} | ({} if name == "adamw" else {"rank": 256})
        optimizer = build_optimizer(OptimConfig(**settings), classified_parameters(model))
        if isinstance(optimizer, LowRankOptimizer):
            optimizer.skip_nonfinite = False  # as in the trainer, which checks the gradient norm itself
        first, *_ = step_times(model, ids, optimizer, 3)
        times = step_times(model, ids, optimizer, count)
        results[name] = {
            "first_seconds": first,
            "median_seconds": statistics.median(times),
            "slowest_over_median": max(times) / statistics.median(times),
            "optimizer_share": 1 - bare / statistics.mean(times),
        }
        print(name, json.dumps(results[name]), flush=True)
    return results


def cpu_optimizers() -> dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]]:
    """Factories of our optimizers and those of installed packages; no basis is refreshed after the first step."""
    low: dict[str, Any] = {"rank": 32, "update_proj_gap": 10**6, "scale": 0.25}
    contenders: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "galore": lambda params: GaLore(params, lr=1e-3, **low),
        "galore_warm": lambda params: GaLoreWarm(params, lr=1e-3, rank=32, gap=10**6),
        "adamw8bit": lambda params: AdamW8bit(params, lr=1e-3),
        "torch.optim.AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    }
    if importlib.util.find_spec("galore_torch"):
        from galore_torch import GaLoreAdamW

        contenders["galore-torch"] = lambda params: GaLoreAdamW(
            [{"params": params, "proj_type": "std", **low}], lr=1e-3, no_deprecation_warning=True
        )
    if importlib.util.find_spec("pytorch_optimizer"):
        import pytorch_optimizer

        contenders["pytorch_optimizer.GaLore"] = lambda params: pytorch_optimizer.GaLore(
            [{"params": params, "projection_type": "std", **low}], lr=1e-3
        )
    return contenders


def measure_cpu_steps(rounds: int) -> dict[str, Any]:
    """Minimum CPU time of a step of each optimizer; interleaved, so that other load affects all of them."""
    optimizers = {}
    for name, make in cpu_optimizers().items():
        params = [torch.nn.Parameter(torch.randn(512, 512)) for _ in range(12)]
        for parameter in params:
            parameter.grad = torch.randn_like(parameter)
        optimizers[name] = make(list(params))
        optimizers[name].step()
    best = dict.fromkeys(optimizers, float("inf"))
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.step()
            best[name] = min(best[name], time.process_time() - start)
    for name, elapsed in best.items():
        print(f"{name:24} {1000 * elapsed:.2f} ms", flush=True)
    return {"matrices": 12, "size": 512, "rank": 32, "cpu_seconds": best}


class Quality:
    """One model, retrained from scratch for each optimizer on the same tokens in the same order."""

    def __init__(self, data: Path, tokens: int, batch: int, context: int) -> None:
        torch.set_float32_matmul_precision("high")
        self.steps, self.batch, self.context = tokens // (batch * context), batch, context
        self.data = data
        self.loader = TokenDataLoader(data, batch, context, split="train", device="cuda")
        self.config = llama(512, 10, 8, 8, 1376, vocab=50_257, context=context)
        with torch.device("cuda"):
            self.model = GPT(self.config)
        for block in self.model.blocks:
            block.compile()

    def run(self, settings: dict[str, Any], seed: int) -> dict[str, Any]:
        """Train once. Returns the training loss curve, the validation loss and the time."""
        torch.manual_seed(seed)
        self.model.reset_parameters()
        self.loader.reset()
        optimizer = build_optimizer(OptimConfig(**settings), classified_parameters(self.model))
        schedule = ScheduleConfig(name="cosine", warmup_steps=60, min_lr_ratio=0.1)
        curve, start = [], time.perf_counter()
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_factor(schedule, step, self.steps)
            x, y = self.loader.next_batch()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.model(x, targets=y).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 0 or step == self.steps - 1:
                curve.append((step, round(loss.item(), 4)))
        seconds = time.perf_counter() - start
        return {"settings": settings, "seed": seed, "loss": self.validate(), "seconds": seconds, "curve": curve}

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the held-out tokens."""
        loader = TokenDataLoader(self.data, self.batch, self.context, split="val", device="cuda")
        count = min(30, loader.total_tokens // (self.batch * self.context) - 1)
        total = 0.0
        for _ in range(count):
            x, y = loader.next_batch()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                total += self.model(x, targets=y).loss.item()
        return total / count


def sweep(data: Path, tokens: int, trials: list[dict[str, Any]], seeds: int) -> dict[str, Any]:
    """Train with each of the settings, then repeat the best with more seeds."""
    quality = Quality(data, tokens, 64, 512)
    runs = [print_run(quality.run(settings, 0)) for settings in trials]
    best = min(runs, key=lambda run: float(run["loss"]))
    repeats = [best, *(print_run(quality.run(best["settings"], seed)) for seed in range(1, seeds))]
    return {"mean_loss": statistics.mean(run["loss"] for run in repeats), "runs": runs, "best_runs": repeats}


def compare(data: Path, tokens: int, trials: dict[str, list[dict[str, Any]]], seeds: int) -> dict[str, Any]:
    """Run the sweep of each optimizer in a separate process, concurrently: only losses are compared, not times."""
    with ProcessPoolExecutor(len(trials), mp_context=get_context("spawn")) as pool:
        futures = {name: pool.submit(sweep, data, tokens, each, seeds) for name, each in trials.items()}
        return {name: future.result() for name, future in futures.items()}


def print_run(run: dict[str, Any]) -> dict[str, Any]:
    """Print a run as one line and return it."""
    print(json.dumps(run["settings"]), run["seed"], round(run["loss"], 4), f"{run['seconds']:.1f} s", flush=True)
    return run


def candidates() -> dict[str, list[dict[str, Any]]]:
    """Settings to try for each optimizer: learning rates below and above the best one that we know of."""
    shared = {
        "embedding_lr": 2e-3,
        "scalar_lr": 2e-3,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        "decay_params": "hidden",
    }
    low = shared | {"rank": 128}
    return {
        "adamw": [shared | {"name": "adamw", "lr": lr} for lr in (1.25e-4, 2.5e-4, 5e-4, 1e-3)],
        "galore": [low | {"name": "galore", "lr": lr} for lr in (4e-3, 8e-3, 16e-3)],
        "galore_warm": [low | {"name": "galore_warm", "lr": lr} for lr in (1e-3, 2e-3, 4e-3, 8e-3)],
    }


def plot_curves(results: Path, out: Path) -> None:
    """Plot the training loss of the best run of each optimizer, from the results of `quality`."""
    from matplotlib import pyplot as plt  # optional dependency, used only here

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, row in json.loads(results.read_text(encoding="utf-8"))["results"].items():
        steps, losses = zip(*row["best_runs"][0]["curve"], strict=True)
        axes.plot(steps, losses, label=f"{name}, validation {row['mean_loss']:.3f}")
    axes.set(xlabel="step of 32,768 tokens", ylabel="training loss", ylim=(4.2, 8))
    axes.legend()
    figure.savefig(out)


def main() -> None:
    """Run one benchmark and record the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=("refresh", "step", "quality", "curves"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path, help="GPT-2 token shards, for `quality`")
    parser.add_argument("--tokens", type=int, default=19_900_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--settings", action="append", type=json.loads,
        help="optimizer settings as JSON, tried instead of the default sweep; can be repeated",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device for `step`")
    args = parser.parse_args()
    if args.benchmark == "curves":
        plot_curves(Path("bench/results/optim-quality.json"), args.out)
        return
    if args.benchmark == "refresh":
        results = measure_refresh(10)
    elif args.benchmark == "step" and args.device == "cpu":
        results = measure_cpu_steps(args.steps)
    elif args.benchmark == "step":
        results = measure_steps(["adamw", "galore_warm"], args.steps)
    else:
        if args.data is None:
            parser.error("quality needs --data")
        trials = candidates()
        if args.settings is not None:
            trials = {json.dumps(settings): [settings] for settings in args.settings}
        results = compare(args.data, args.tokens, trials, args.seeds)
    record(f"optim {args.benchmark}", results, args.out)


if __name__ == "__main__":
    main()
