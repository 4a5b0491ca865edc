"""CPU training while 0, 1 or 2 other processes are busy, for different wait policies of OpenMP threads.

    python bench/contention.py --out bench/results/contention.json

By default, libgomp's threads spin at a barrier. If another process occupies a core, one thread is descheduled and the
others spin until it returns. With passive waiting, which the command line enables, they sleep. Prints the median step
time for each policy and its ratio to the time on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import record
from whimbrel.data.prepare import prepare
from whimbrel.data.sources import iter_documents
from whimbrel.tokenization import train_tokenizer
from whimbrel.train import read_log

ROOT = Path(__file__).resolve().parents[1]
POLICIES = {
    "spinning (libgomp's default)": {"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": ""},
    "passive (ours)": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": ""},
    "one thread fewer": {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) - 1)), "OMP_WAIT_POLICY": "PASSIVE"},
}
WARMUP_STEPS = 3


def environment(changes: dict[str, str]) -> dict[str, str]:
    """The process environment with `changes`; an empty value removes a name."""
    merged = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))} | changes
    return {name: value for name, value in merged.items() if value}


def step_seconds(data: Path, steps: int, changes: dict[str, str]) -> float:
    """Median step time of the demo recipe. The library does not change the environment, so `changes` take effect."""
    with tempfile.TemporaryDirectory() as folder:
        code = "import sys; from whimbrel.train import *; train(load_run_config(sys.argv[1], sys.argv[2:]))"
        settings = [
            f"--data.path={data}", f"--output_dir={folder}/run", f"--train.steps={steps}", "--validation.every=none",
            "--sample.every=none", "--sample.prompt=none", "--sample.max_new_tokens=none",
        ]  # fmt: skip
        subprocess.run(
            [sys.executable, "-c", code, "shakespeare-cpu", *settings],
            env=environment(changes), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        times = [line["seconds"] for line in read_log(Path(folder) / "run/log.jsonl") if line["kind"] == "step"]
    return float(statistics.median(times[WARMUP_STEPS:]))


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {policy: {} for policy in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        corpus, data = "shakespeare", Path(folder) / "data"
        tokenizer = train_tokenizer(list(iter_documents([corpus], separator="\n\n")), 4096)
        prepare([corpus], data, tokenizer, name="demo", separator="\n\n", val_tokens=20_000)
        for num_busy in (0, 1, 2):
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
            try:
                for policy, changes in POLICIES.items():
                    times = [step_seconds(data, args.steps, changes) for _ in range(args.rounds)]
                    results[policy][str(num_busy)] = min(times)
                    slowdown = min(times) / results[policy]["0"]
                    print(
                        f"{num_busy} busy processes, {policy}: {1000 * min(times):.1f} ms per step, {slowdown:.2f} x",
                        flush=True,
                    )
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
    record("contention", {"seconds_per_step": results, "steps": args.steps}, args.out)


if __name__ == "__main__":
    main()
