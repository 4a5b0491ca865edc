"""`whimbrel serve` under load: many clients at once, some of whom leave in the middle of their text.

    python bench/serve.py --clients 64 --leave 0.3 --rounds 20 --out bench/results/serve.json
    python bench/serve.py --model runs/mine --device cuda --tokens 128

Every client streams one completion. A share of them drop the connection after a few events, though they asked for a
text of the whole context; texts of those who stay are compared with what a lone request gets. After each round as many
as left come again and all leave at once: how long it takes until every page is free is the figure. Without --model it
serves a small one with random weights.
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

EVENTS_BEFORE_LEAVING = 4
PROMPTS = [f"Chapter {number}: it was" for number in range(16)]


@dataclass
class Tally:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    texts: dict[str, set[str]] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    freed: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    tokens: int = 0
    left: int = 0


def random_model(folder: Path) -> Path:
    """A model directory of 2 layers."""
    import torch

    import whimbrel
    from whimbrel.models import GPT, GPTConfig

    torch.manual_seed(0)
    config = GPTConfig(context_length=2048, num_layers=2, embd_size=64, num_heads=4, tied_head=False, init_std=0.2)
    whimbrel.save_model(GPT(config), folder / "random", whimbrel.load_tokenizer("gpt2"))
    return folder / "random"


@contextmanager
def serving(model: Path, device: str) -> Iterator[tuple[str, int]]:
    """The address and the process id of a server on a free port."""
    words = [sys.executable, "-m", "whimbrel", "serve", str(model), "--port=0", f"--device={device}", "--name=bench"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            said = process.stdout.readline() if process.stdout else ""
            found = re.search(r"http://\S+", said)
            if found is None:
                raise SystemExit(f"the server did not start: {said}")
            yield found.group(), process.pid
        finally:
            process.terminate()


def gauges(url: str) -> dict[str, float]:
    """The engine's numbers."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        name: float(value) for name, value in re.findall(r"^whimbrel_engine_(\w+) (\S+)$", text, flags=re.MULTILINE)
    }


def seconds_until_rest(url: str) -> float:
    """How long it takes until every page is free."""
    begun = time.perf_counter()
    while True:
        seen = gauges(url)
        if seen["free_pages"] == seen["pages"] and seen["running"] == seen["waiting"] == 0:
            return time.perf_counter() - begun
        time.sleep(0.005)


def resident_mb(pid: int) -> float:
    """Memory of a process, where the system tells."""
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmRSS:\s+(\d+)", status.read_text(encoding="utf-8")) if status.exists() else None
    return int(found[1]) / 1024 if found else float("nan")


async def client(http: httpx.AsyncClient, prompt: str, tokens: int, leaves: bool, tally: Tally) -> None:
    """Stream one text, or leave in the middle of it."""
    body = {
        "model": "bench",
        "prompt": prompt,
        "temperature": 0,
        "stream": True,
        "max_tokens": 100_000 if leaves else tokens,
    }
    body["logit_bias"] = {"50256": -100}
    begun, text, events = time.perf_counter(), "", 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        tally.statuses[answer.status_code] += 1
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            events += 1
            if events == 1:
                tally.first.append(time.perf_counter() - begun)
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if leaves and events == EVENTS_BEFORE_LEAVING:
                tally.left += 1
                return
    tally.tokens += tokens
    tally.texts.setdefault(prompt, set()).add(text)


async def one_round(url: str, clients: int, share: float, tokens: int, order: random.Random, tally: Tally) -> None:
    """All clients at once."""
    leaving = set(order.sample(range(clients), round(clients * share)))
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:
        work = [
            client(http, PROMPTS[number % len(PROMPTS)], tokens, number in leaving, tally) for number in range(clients)
        ]
        await asyncio.gather(*work)


def lone_texts(url: str, tokens: int) -> dict[str, str]:
    """What each prompt gets when nobody else is there."""
    body = {"model": "bench", "temperature": 0, "max_tokens": tokens, "logit_bias": {"50256": -100}}
    return {
        prompt: httpx.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=300).json()["choices"][0][
            "text"
        ]
        for prompt in PROMPTS
    }


def refusal_seconds(url: str) -> dict[str, float]:
    """How long bodies that are too large or broken wait for their answer."""
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
    found = {}
    for name, body in bodies.items():
        begun = time.perf_counter()
        status = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=60).status_code
        found[name] = time.perf_counter() - begun
        if not 400 <= status < 500:
            raise SystemExit(f"{name} was answered with {status}")
    return found


def measure(url: str, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    """The rounds, and what came of them."""
    order, tally = random.Random(0), Tally()
    alone = lone_texts(url, given.tokens)
    asyncio.run(one_round(url, given.clients, given.leave, given.tokens, order, Tally()))
    seconds_until_rest(url)
    busy = 0.0
    for _ in range(given.rounds):
        begun = time.perf_counter()
        asyncio.run(one_round(url, given.clients, given.leave, given.tokens, order, tally))
        busy += time.perf_counter() - begun
        seconds_until_rest(url)
        asyncio.run(one_round(url, max(1, round(given.clients * given.leave)), 1.0, given.tokens, order, tally))
        tally.freed.append(seconds_until_rest(url))
        tally.memory.append(resident_mb(pid))
    different = sum(texts != {alone[prompt]} for prompt, texts in tally.texts.items())
    return {
        "clients": given.clients,
        "rounds": given.rounds,
        "left": tally.left,
        "statuses": dict(tally.statuses),
        "server_errors": sum(number for status, number in tally.statuses.items() if status >= 500),
        "prompts_with_a_different_text": different,
        "seconds_until_freed": {"median": statistics.median(tally.freed), "most": max(tally.freed)},
        "first_token_seconds": {"median": statistics.median(tally.first), "most": max(tally.first)},
        "tokens_per_second_of_those_who_stay": tally.tokens / busy,
        "resident_mb": {"first": tally.memory[0], "last": tally.memory[-1], "most": max(tally.memory)},
        "refusal_seconds": refusal_seconds(url),
        "preemptions": gauges(url)["preemptions_total"],
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description="Measure whimbrel serve with clients that come and go.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--leave", type=float, default=0.3, help="the share of clients that leave mid-stream")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or random_model(Path(folder))
        with serving(model, given.device) as (url, pid):
            results = {"device": given.device, "model": given.model and str(given.model), **measure(url, pid, given)}
    print(json.dumps(results, indent=1))
    record("serve", results, given.out)


if __name__ == "__main__":
    main()
