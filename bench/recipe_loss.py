"""Loss of a recipe on a test split that no choice was based on, and variants of it, for several seeds.

    python bench/recipe_loss.py gpt2-fast-20m --data data/webmix20M --seeds 0 1 2 --out recipe-loss.json
    python bench/recipe_loss.py gpt2-fast-20m --data data/webmix20M --variant "wd: optim.weight_decay=0.1" --no-test

The last tokens of the validation shards become the test split, and the others remain for validation. `--variant` is a
name with overrides of the recipe, and can be repeated; without any, the recipe itself is measured. Choose by the
validation loss with `--no-test`, and report the test loss of the choice. With `ema.decay`, the losses of the averaged
weights are measured as well. Runs validate only at the end and leave no checkpoints; a variant that fails is reported,
and the next one starts.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from record import record
from whimbrel.base.errors import WhimbrelError
from whimbrel.data.shards import read_shard, split_files, write_shard
from whimbrel.evaluate import held_out_evaluation
from whimbrel.models import GPT
from whimbrel.train import RunConfig, Trainer, load_run_config
from whimbrel.train.callbacks import EmaCallback

TEST_TOKENS = 500_000
LOSSES = ("validation_loss", "ema_validation_loss", "test_loss", "ema_test_loss")
ONCE = (
    "--validation.every=none",
    "--validation.each_epoch=false",
    "--validation.at_end=false",
    "--checkpoint.every_minutes=none",
)
"""The losses are measured after the run, and the test loss needs a checkpoint at its end."""


def split_validation(data: Path, folder: Path, test_tokens: int) -> tuple[Path, Path]:
    """Directories with the validation and the test part of the validation shards."""
    tokens = np.concatenate([read_shard(path) for path in split_files(data, "val")])
    parts = {"validation": tokens[:-test_tokens], "test": tokens[-test_tokens:]}
    for name, part in parts.items():
        (folder / name).mkdir()
        write_shard(folder / name / "tokens_val_000000.bin", part)
    return folder / "validation", folder / "test"


def run(config: RunConfig, test: Path | None, test_tokens: int) -> dict[str, Any]:
    """Train once; seconds, memory, and the losses after the last step."""
    start = time.perf_counter()
    trainer = Trainer.from_config(config)
    metrics = trainer.train().metrics
    result = {
        "train_seconds": metrics["train_seconds"],
        "compile_seconds": metrics["compile_seconds"],
        "peak_memory_gib": metrics["peak_memory"] / 2**30,
        "tokens": metrics["num_input_tokens_seen"],
    }

    def evaluate(prefix: str) -> None:
        result[f"{prefix}validation_loss"] = trainer.evaluate()["eval_loss"]
        if test is not None:
            held_out = held_out_evaluation(
                config.output_dir, str(test), max_tokens=test_tokens, sequence_length=config.sequence_length
            )
            result[f"{prefix}test_loss"] = held_out(cast(GPT, trainer.model)).loss

    evaluate("")
    for ema in (callback for callback in trainer.callbacks if isinstance(callback, EmaCallback)):
        with ema.average_parameters(trainer.unwrapped_model()):
            evaluate("ema_")
    return result | {"seconds": time.perf_counter() - start}


def run_seed(config: RunConfig, test: Path | None, test_tokens: int) -> dict[str, Any]:
    """`run`, or its error; frees the memory and the disk space of the run."""
    try:
        return run(config, test, test_tokens)
    except (WhimbrelError, torch.OutOfMemoryError) as error:
        return {"error": str(error)}
    finally:
        torch.compiler.reset()  # blocks of other shapes would count as recompilations, whose number is limited
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        shutil.rmtree(config.output_dir, ignore_errors=True)


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
        common = [
            f"--data.path={args.data}",
            f"--validation.path={validation}",
            *ONCE,
            f"--checkpoint.at_end={str(args.test).lower()}",
        ]
        configs: dict[str, list[RunConfig]] = {}  # all before the first run, so that typing errors cost no time
        for variant in args.variant or [f"{args.recipe}:"]:
            name, _, settings = variant.partition(":")
            overrides = [*common, *(f"--{setting}" for setting in settings.split())]
            configs[name] = [
                load_run_config(
                    args.recipe, [*overrides, f"--train.seed={seed}", f"--output_dir={temporary}/{name}-{seed}"]
                )
                for seed in args.seeds
            ]
            results["variants"][name] = {"overrides": settings.split()}
        for name, variants in configs.items():
            rows = []
            for seed, config in zip(args.seeds, variants, strict=True):
                rows.append({"seed": seed} | run_seed(config, test if args.test else None, args.test_tokens))
                results["variants"][name]["runs"] = rows
                record("recipe_loss", results, args.out)  # an interrupted benchmark keeps what it has
                print(name, rows[-1], flush=True)
            means = {
                f"mean_{loss}": statistics.mean(row[loss] for row in rows)
                for loss in LOSSES
                if all(loss in row for row in rows)
            }
            results["variants"][name] |= means
            print(name, means, flush=True)
            record("recipe_loss", results, args.out)


if __name__ == "__main__":
    main()
