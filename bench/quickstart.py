"""Held-out losses of quickstart's models by depth, training tokens and amount of text, next to the predictions.

    python bench/quickstart.py TEXT --vocab-size 4096 --depths 2,3,4 --tokens 250000,500000,1000000 \
        --text-bytes 50000,1000000 --out bench/results/quickstart.json

Calibrates the scaling law in `whimbrel.train.sizing`: the constants are good if the depth with the lowest predicted
loss in a given time is the one with the lowest measured loss. Every run is a complete run with the settings that
quickstart writes. Every 16th part of about 4 kB is held out, and is the same for all amounts of text. `cpu_seconds` is
the CPU time of a run, which does not depend on other load.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import record
from whimbrel.data import read_manifest
from whimbrel.data.prepare import prepare, split_text
from whimbrel.data.sources import iter_documents
from whimbrel.tokenization import train_tokenizer
from whimbrel.train import Trainer, read_log
from whimbrel.train.run_config import build_run_config
from whimbrel.train.sizing import (
    Plan,
    block_parameters,
    config_text,
    dropout,
    model_of_depth,
    predict_loss,
    tokens_per_step,
)

PART_CHARACTERS = 4000
VAL_EVERY = 16


def prepare_text(sources: Sequence[str], folder: Path, vocab_size: int, text_bytes: int) -> tuple[int, float]:
    """Write shards of the first `text_bytes`; returns the training tokens and the held-out tokens per byte."""
    parts = split_text("\n\n".join(iter_documents(sources)), PART_CHARACTERS)
    held_out = "".join(parts[VAL_EVERY // 2 :: VAL_EVERY])
    train = "".join(part for index, part in enumerate(parts) if index % VAL_EVERY != VAL_EVERY // 2)[:text_bytes]
    folder.mkdir()
    for name, text in (("train", train), ("val", held_out)):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer([train], vocab_size)
    shards = folder / "shards"
    prepare([str(folder / "train.txt")], shards, tokenizer, name="text", val=[str(folder / "val.txt")])
    manifest = read_manifest(shards)
    assert manifest is not None
    return manifest.tokens("train"), manifest.tokens("val") / len(held_out.encode())


def train(folder: Path, depth: int, vocab_size: int, tokens: int, unique: int) -> dict[str, Any]:
    """Train one run; returns its size and its loss in nats per token."""
    model, batch = replace(model_of_depth(depth, vocab_size), dropout=dropout(tokens / unique)), tokens_per_step(tokens)
    plan = Plan(
        model=model, tokens_per_step=batch, steps=max(tokens // batch, 1), validations=1, seconds=0.0,
        epochs=tokens / unique, loss=predict_loss(block_parameters(model), tokens, unique), is_data_limited=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as run:
        output = Path(run) / "run"
        text = config_text(plan, output_dir=output, data=folder / "shards", device_settings={}, header="")
        table = tomllib.loads(text) | {"checkpoint": {"at_end": False}, "log": {"progress": False}}
        del table["sample"]
        start = time.process_time()
        Trainer.from_config(build_run_config(table)).train()
        seconds = time.process_time() - start
        losses = [line["loss"] for line in read_log(output / "log.jsonl") if line["kind"] == "validation"]
    return {
        "depth": depth, "block_parameters": block_parameters(model), "tokens": plan.steps * batch,
        "unique_tokens": unique, "loss": losses[-1], "predicted": plan.loss, "cpu_seconds": seconds,
    }  # fmt: skip


def integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="files, directories or globs, as for whimbrel prepare")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--depths", type=integers, default=[2, 3, 4])
    parser.add_argument("--tokens", type=integers, default=[250_000, 500_000, 1_000_000])
    parser.add_argument("--text-bytes", type=integers, default=[1_000_000])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for text_bytes in arguments.text_bytes:
            folder = Path(root) / str(text_bytes)
            unique, tokens_per_byte = prepare_text(arguments.text, folder, arguments.vocab_size, text_bytes)
            for depth, tokens in itertools.product(arguments.depths, arguments.tokens):
                row = train(folder, depth, arguments.vocab_size, tokens, unique)
                row["bits_per_byte"] = row["loss"] * tokens_per_byte / math.log(2)
                print({name: round(value, 4) for name, value in row.items()}, flush=True)
                rows.append(row)
    record("quickstart", {"text": arguments.text, "vocab_size": arguments.vocab_size, "runs": rows}, arguments.out)


if __name__ == "__main__":
    main()
