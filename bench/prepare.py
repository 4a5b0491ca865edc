"""`whimbrel prepare` compared with the tokenizer library and with a simple loop, interleaved in one run.

    python bench/prepare.py FILES --out bench/results/prepare.json

Each round measures, on the same documents: the library's batch call on one thread (texts in memory, ids discarded); a
simple loop (one process, one document after another into a uint16 buffer, written as a shard); `whimbrel prepare` with
one worker and with one per core, from files to synced and hashed shards. Figures are medians over the rounds; ratios
are medians of the ratios within a round, so that other load on the machine affects both sides.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import tiktoken

from record import record
from whimbrel.data import write_shard
from whimbrel.data.prepare import available_cores, encode_on_threads, prepare
from whimbrel.tokenization import Tokenizer, load_tokenizer


def library_batch(encoder: tiktoken.Encoding, texts: list[str]) -> int:
    """The library's batch call on one thread, in calls of a thousand documents."""
    calls = range(0, len(texts), 1000)
    return sum(len(ids) for i in calls for ids in encoder.encode_ordinary_batch(texts[i : i + 1000], num_threads=1))


def simple_loop(encoder: tiktoken.Encoding, files: list[Path], folder: Path, eot_id: int) -> int:
    """Encode one document after another into a buffer, each after an end-of-text token, and write a shard."""
    buffer, filled = np.empty(100_000_000, dtype=np.uint16), 0
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(1000, columns=["text"]):
            for text in batch.column(0).to_pylist():
                tokens = [eot_id]
                tokens.extend(encoder.encode_ordinary(text))
                array = np.array(tokens)
                buffer[filled : filled + len(array)] = array.astype(np.uint16)
                filled += len(array)
    write_shard(folder / "simple_train_000000.bin", buffer[:filled])
    return filled


def ours(tokenizer: Tokenizer, files: list[Path], folder: Path, workers: int) -> int:
    """Run `whimbrel prepare`."""
    sources = [str(file) for file in files]
    manifest = prepare(sources, folder / "ours", tokenizer, name="bench", backend=encode_on_threads(workers))
    return manifest.tokens("train")


def rate(measured: Callable[[], int]) -> float:
    """Tokens per second of one call."""
    start = time.perf_counter()
    tokens = measured()
    return tokens / (time.perf_counter() - start)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description="Measure `whimbrel prepare`.")
    parser.add_argument("files", nargs="+", type=Path, help="parquet files with a column `text`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokenizer, cores = load_tokenizer("gpt2"), available_cores()
    encoder = tokenizer._tiktoken
    if encoder is None:
        raise SystemExit("the GPT-2 tokenizer has no fast encoder here")
    texts = [text for file in args.files for text in pq.read_table(file, columns=["text"])["text"].to_pylist()]
    rounds: list[dict[str, float]] = []
    for number in range(args.rounds):
        rates = {"library_batch_1_thread": rate(lambda: library_batch(encoder, texts))}
        with tempfile.TemporaryDirectory() as folder:
            rates["simple_loop"] = rate(lambda: simple_loop(encoder, args.files, Path(folder), tokenizer.eot_id))
        for workers in sorted({1, cores}):
            with tempfile.TemporaryDirectory() as folder:
                measured = functools.partial(ours, tokenizer, args.files, Path(folder), workers)
                rates[f"prepare_{workers}_workers"] = rate(measured)
        rounds.append(rates)
        print(f"round {number}: " + ", ".join(f"{name} {value / 1e6:.2f}M" for name, value in rates.items()))
    fastest = f"prepare_{cores}_workers"
    results = {
        "tokens_per_second": {name: statistics.median(rates[name] for rates in rounds) for name in rounds[0]},
        "ratio_to_cores_times_library": statistics.median(
            rates[fastest] / cores / rates["library_batch_1_thread"] for rates in rounds
        ),
        "ratio_to_simple_loop": statistics.median(rates[fastest] / rates["simple_loop"] for rates in rounds),
        "rounds": rounds,
    }
    record("prepare", results, args.out)
    print(f"{cores} workers: {results['ratio_to_cores_times_library']:.2f} of cores x library rate (target 0.90)")
    print(f"{cores} workers: {results['ratio_to_simple_loop']:.2f} x the simple loop (target 1.80 on two cores)")


if __name__ == "__main__":
    main()
