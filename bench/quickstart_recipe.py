"""`whimbrel quickstart` compared with a fixed recipe in the same time: seconds, and bits per byte of held-out text.

    python bench/quickstart_recipe.py --minutes 3 --out bench/results/quickstart-recipe.json

Both are complete command lines, from text to trained model, on the text of the package without its last 5%, on which
the models are evaluated; both read it as one document. The recipe is the demo of earlier versions: 4 layers, width 128,
vocabulary 4,096. It is trained twice: for its own number of steps, and for as many as take as long as quickstart took,
by the speed of a short run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record
from whimbrel.data.sources import iter_documents
from whimbrel.evaluate import Scorer, perplexity
from whimbrel.train import read_log

HELD_OUT = 0.05
PROBE_STEPS = 20
RECIPE_STEPS = 250
RECIPE = """
output_dir = "runs/recipe"
data = { path = "data/recipe", shuffle_seed = 0 }
schedule = { name = "wsd", warmup_steps = 10, cooldown = 0.6 }
validation = { every = 50 }
sample = { every = 125, max_new_tokens = 40 }

[model]
preset = "gpt2-fast"
context_length = 128
vocab_size = 4096
num_layers = 4
embd_size = 128
num_heads = 2

[train]
steps = 250  # RECIPE_STEPS
tokens_per_step = 2048

[optim]
name = "muon"
lr = 0.04
momentum = 0.95
weight_decay = 0.05
decay_params = "hidden"
betas = [0.8, 0.95]
eps = 1e-10
embedding_lr = 0.3
head_lr = 0.01
scalar_lr = 0.01
"""


def timed(*arguments: object) -> float:
    """The duration of a command."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "whimbrel", *map(str, arguments)], check=True, stdout=sys.stderr)
    return time.perf_counter() - start


def bits_per_byte(run: str, text: str) -> float:
    return perplexity(Scorer.load(run), [text]).bits_per_byte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = None if arguments.out is None else arguments.out.resolve()
    [text] = iter_documents(["shakespeare"])
    split = round(len(text) * (1 - HELD_OUT))
    results: dict[str, Any] = {"minutes": arguments.minutes}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("train.txt").write_text(text[:split], encoding="utf-8")
        Path("recipe.toml").write_text(RECIPE, encoding="utf-8")
        seconds = timed("quickstart", "train.txt", "--minutes", arguments.minutes, "--plain")
        results["quickstart"] = {"seconds": seconds, "bits_per_byte": bits_per_byte("runs/train", text[split:])}

        vocabulary = ["tokenizer", "train", "train.txt", "--vocab-size", 4096, "--out-dir", "data/recipe"]
        shards = ["prepare", "train.txt", "--tokenizer", "data/recipe", "--val-tokens", 20_000]
        preparing = timed(*vocabulary) + timed(*shards, "--out-dir", "data/recipe")
        train = ["train", "recipe.toml", "--plain"]
        probing = timed(*train, f"--train.steps={PROBE_STEPS}", "--output_dir=runs/probe")
        lines = [line for line in read_log(Path("runs/probe/log.jsonl")) if line["kind"] == "step"]
        step = statistics.median(line["seconds"] for line in lines)
        steps = round((seconds - preparing - (probing - PROBE_STEPS * step)) / step)
        for name, count in (("recipe", RECIPE_STEPS), ("recipe_same_time", steps)):
            training = timed(*train, f"--train.steps={count}", f"--output_dir=runs/{name}")
            results[name] = {
                "seconds": preparing + training,
                "steps": count,
                "bits_per_byte": bits_per_byte(f"runs/{name}", text[split:]),
            }
        print(record("quickstart-recipe", results, out)["results"])


if __name__ == "__main__":
    main()
