"""Benchmark of `whimbrel serve` under load: many clients at once, some of which disconnect mid-stream.

    python bench/serve.py --clients 64 --disconnect 0.3 --rounds 20 --out bench/results/serve.json
    python bench/serve.py --model runs/mine --device cuda --tokens 128

Every client streams one completion. Some of them request as many tokens as the context allows and disconnect after a
few events; the texts of the others are compared with those of single requests. After each round, the same number of
clients connect and all disconnect at once, to measure the time until all KV-cache blocks are free. Without --model, a
small model with random weights is served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from record import record
from timing import process_memory

EVENTS_BEFORE_DISCONNECT = 4
PROMPTS = [f"Chapter {number}: it was" for number in range(16)]


@dataclass
class Results:
    """Results of all clients."""

    statuses: Counter[int] = field(default_factory=Counter)
    texts: dict[str, set[str]] = field(default_factory=dict)
    first_token_seconds: list[float] = field(default_factory=list)
    free_seconds: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    tokens: int = 0
    disconnected: int = 0


def random_model(folder: Path) -> Path:
    """Save a 2-layer model with random weights."""
    import torch

    import whimbrel
    from whimbrel.models import GPT, GPTConfig

    torch.manual_seed(0)
    config = GPTConfig(context_length=2048, num_layers=2, embd_size=64, num_heads=4, tied_head=False, init_std=0.2)
    whimbrel.save_model(GPT(config), folder / "random", whimbrel.load_tokenizer("gpt2"))
    return folder / "random"


@contextmanager
def running_server(model: Path, device: str) -> Iterator[tuple[str, int]]:
    """Run a server on a free port; yields its URL and process id."""
    command = [sys.executable, "-m", "whimbrel", "serve", str(model), "--port=0", f"--device={device}", "--name=bench"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            first_line = process.stdout.readline() if process.stdout else ""
            match = re.search(r"http://\S+", first_line)
            if match is None:
                raise SystemExit(f"the server did not start: {first_line}")
            yield match.group(), process.pid
        finally:
            process.terminate()


def engine_metrics(url: str) -> dict[str, float]:
    """The engine's metrics, without the prefix of their names."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {name: float(value) for name, value in re.findall(r"^whimbrel_(\w+) (\S+)$", text, flags=re.MULTILINE)}


def seconds_until_idle(url: str) -> float:
    """Wait until all KV-cache blocks are free. Returns the time it took."""
    start = time.perf_counter()
    while True:
        metrics = engine_metrics(url)
        free = metrics["kv_cache_free_blocks"] == metrics["kv_cache_blocks"]
        if free and metrics["engine_running"] == metrics["engine_waiting"] == 0:
            return time.perf_counter() - start
        time.sleep(0.005)


async def client(http: httpx.AsyncClient, prompt: str, tokens: int, disconnects: bool, results: Results) -> None:
    """Stream one completion, or disconnect in the middle of it."""
    body = {
        "model": "bench",
        "prompt": prompt,
        "temperature": 0,
        "stream": True,
        "max_tokens": 100_000 if disconnects else tokens,
    }
    body["logit_bias"] = {"50256": -100}
    start, text, events = time.perf_counter(), "", 0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        results.statuses[response.status_code] += 1
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            events += 1
            if events == 1:
                results.first_token_seconds.append(time.perf_counter() - start)
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if disconnects and events == EVENTS_BEFORE_DISCONNECT:
                results.disconnected += 1
                return
    results.tokens += tokens
    results.texts.setdefault(prompt, set()).add(text)


async def run_round(url: str, clients: int, share: float, tokens: int, rng: random.Random, results: Results) -> None:
    """Run all clients at once."""
    disconnecting = set(rng.sample(range(clients), round(clients * share)))
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:
        work = [
            client(http, PROMPTS[number % len(PROMPTS)], tokens, number in disconnecting, results)
            for number in range(clients)
        ]
        await asyncio.gather(*work)


def single_texts(url: str, tokens: int) -> dict[str, str]:
    """The text of each prompt without other clients."""
    body = {"model": "bench", "temperature": 0, "max_tokens": tokens, "logit_bias": {"50256": -100}}
    return {
        prompt: httpx.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=300).json()["choices"][0][
            "text"
        ]
        for prompt in PROMPTS
    }


def rejection_seconds(url: str) -> dict[str, float]:
    """Response times for bodies that are too large or invalid."""
    head, headers = b'{"model": "bench", "prompt": ', {"Content-Type": "application/json"}
    large = head + b'"' + b"a" * 50_000_000 + b'"}'
    bodies: dict[str, bytes | Iterator[bytes]] = {
        "50 MB": large,
        "50 MB in pieces": (large[start : start + 65536] for start in range(0, len(large), 65536)),
        "not JSON": b"[" * 4_000_000,
        "a million nulls": head + b"[" + b"null," * 800_000 + b"null]}",
        "a long text": head + b'"' + b"the cat " * 500_000 + b'"}',
        "a million tokens": head + b"[" + b"1," * 1_000_000 + b"1]}",
    }
    seconds = {}
    for name, body in bodies.items():
        start = time.perf_counter()
        status = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=60).status_code
        seconds[name] = time.perf_counter() - start
        if not 400 <= status < 500:
            raise SystemExit(f"{name} got status {status}, expected 4xx")
    return seconds


def measure(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return the measurements."""
    rng, results = random.Random(0), Results()
    single = single_texts(url, args.tokens)
    asyncio.run(run_round(url, args.clients, args.disconnect, args.tokens, rng, Results()))
    seconds_until_idle(url)
    seconds = 0.0
    for _ in range(args.rounds):
        start = time.perf_counter()
        asyncio.run(run_round(url, args.clients, args.disconnect, args.tokens, rng, results))
        seconds += time.perf_counter() - start
        seconds_until_idle(url)
        asyncio.run(run_round(url, max(1, round(args.clients * args.disconnect)), 1.0, args.tokens, rng, results))
        results.free_seconds.append(seconds_until_idle(url))
        results.resident_mb.append(process_memory("VmRSS", pid) / 2**20)
    mismatched = sum(texts != {single[prompt]} for prompt, texts in results.texts.items())
    return {
        "clients": args.clients,
        "rounds": args.rounds,
        "disconnected": results.disconnected,
        "statuses": dict(results.statuses),
        "server_errors": sum(number for status, number in results.statuses.items() if status >= 500),
        "mismatched_prompts": mismatched,
        "seconds_until_free": {"median": statistics.median(results.free_seconds), "max": max(results.free_seconds)},
        "first_token_seconds": {
            "median": statistics.median(results.first_token_seconds),
            "max": max(results.first_token_seconds),
        },
        "completed_tokens_per_second": results.tokens / seconds,
        "resident_mb": {
            "first": results.resident_mb[0],
            "last": results.resident_mb[-1],
            "max": max(results.resident_mb),
        },
        "rejection_seconds": rejection_seconds(url),
        "preemptions": engine_metrics(url)["engine_preemptions_total"],
    }


def main() -> None:
    """Measure, print and record the results."""
    parser = argparse.ArgumentParser(description="Measure whimbrel serve with clients that disconnect.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--disconnect", type=float, default=0.3, help="share of clients that disconnect mid-stream")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder))
        with running_server(model, args.device) as (url, pid):
            results = {"device": args.device, "model": args.model and str(args.model), **measure(url, pid, args)}
    print(json.dumps(results, indent=1))
    record("serve", results, args.out)


if __name__ == "__main__":
    main()
