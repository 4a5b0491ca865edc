"""Loss of a recipe on a test split that no choice was based on, and variants of it, for several seeds.

    python bench/recipe_loss.py gpt2-fast-20m --data data/webmix20M --seeds 0 1 2 --out recipe-loss.json
    python bench/recipe_loss.py gpt2-fast-20m --data data/webmix20M --variant "wd: optim.weight_decay=0.1" --no-test

The last tokens of the validation shards become the test split, and the others remain for validation. `--variant` is a
name with overrides of the recipe, and can be repeated; without any, the recipe itself is measured. Choose by the
validation loss with `--no-test`, and report the test loss of the choice.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from record import record
from whimbrel.data.shards import read_shard, split_files, write_shard
from whimbrel.evaluate import held_out_evaluation
from whimbrel.models import GPT
from whimbrel.train import Trainer, load_run_config
from whimbrel.train.run_log import RunLog

TEST_TOKENS = 500_000


def split_validation(data: Path, folder: Path, test_tokens: int) -> tuple[Path, Path]:
    """Directories with the validation and the test part of the validation shards."""
    tokens = np.concatenate([read_shard(path) for path in split_files(data, "val")])
    parts = {"validation": tokens[:-test_tokens], "test": tokens[-test_tokens:]}
    for name, part in parts.items():
        (folder / name).mkdir()
        write_shard(folder / name / "tokens_val_000000.bin", part)
    return folder / "validation", folder / "test"


def run(recipe: str, overrides: list[str], folder: Path, test: Path | None) -> dict[str, Any]:
    """Train once; seconds, memory, and the losses after the last step."""
    config = load_run_config(recipe, [*overrides, f"--output_dir={folder}", "--checkpoint.every_minutes=none"])
    start = time.perf_counter()
    trainer = Trainer.from_config(config)
    metrics = trainer.train().metrics
    log = RunLog(folder)
    result = {
        "validation_loss": log.validations[-1]["loss"],
        "train_seconds": metrics["train_seconds"],
        "compile_seconds": metrics["compile_seconds"],
        "seconds": time.perf_counter() - start,
        "peak_memory_gib": metrics["peak_memory"] / 2**30,
        "tokens": metrics["num_input_tokens_seen"],
    }
    if test is not None:
        evaluate = held_out_evaluation(
            folder, str(test), max_tokens=TEST_TOKENS, sequence_length=config.sequence_length
        )
        result["test_loss"] = evaluate(cast(GPT, trainer.model)).loss
    return result


def main() -> None:
    """Run all variants with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path, required=True, help="directory with training and validation shards")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variant", action="append", default=[], help='"NAME: section.name=value ..."')
    parser.add_argument("--test", action=argparse.BooleanOptionalAction, default=True, help="measure the test loss")
    parser.add_argument("--test-tokens", type=int, default=TEST_TOKENS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"recipe": args.recipe, "test_tokens": args.test_tokens, "variants": {}}
    with tempfile.TemporaryDirectory() as temporary:
        validation, test = split_validation(args.data, Path(temporary), args.test_tokens)
        common = [f"--data.path={args.data}", f"--validation.path={validation}"]
        for index, variant in enumerate(args.variant or [f"{args.recipe}:"]):
            name, _, settings = variant.partition(":")
            overrides = [f"--{setting}" for setting in settings.split()]
            rows = []
            for seed in args.seeds:
                folder = Path(temporary) / f"run-{index}-{seed}"
                seeded = [*common, f"--train.seed={seed}", *overrides]
                rows.append({"seed": seed} | run(args.recipe, seeded, folder, test if args.test else None))
                print(name, rows[-1], flush=True)
            means = {
                f"mean_{loss}": statistics.mean(row[loss] for row in rows)
                for loss in ("validation_loss", "test_loss")
                if loss in rows[0]
            }
            results["variants"][name] = {"overrides": overrides, "runs": rows, **means}
            print(name, means, flush=True)
            record("recipe_loss", results, args.out)


if __name__ == "__main__":
    main()
