"""Batches through a pool of threads, results in order, never more than a few in memory.

Threads, not processes: both tokenizer libraries work outside the interpreter lock, so no text is copied between
processes, none has to start up, and none is left behind when this one is killed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from whimbrel.data.batches import Batch
from whimbrel.data.encoding import BatchEncoder, Encoded
from whimbrel.data.manifest import ResumePoint, ShardSettings
from whimbrel.data.sources import Origin

__all__ = ["Engine", "available_cores", "encode_on_threads", "in_order"]

Item = TypeVar("Item")
Result = TypeVar("Result")

Engine = Callable[[Sequence[Origin], ResumePoint, BatchEncoder, ShardSettings], Iterator[tuple[ResumePoint, Encoded]]]
"""Encodes all batches from a point on, in order; each comes with the point after it."""


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_on_threads(workers: int) -> Engine:
    """An engine that uses `workers` threads of this machine."""

    def engine(
        origins: Sequence[Origin], start: ResumePoint, encoder: BatchEncoder, settings: ShardSettings
    ) -> Iterator[tuple[ResumePoint, Encoded]]:
        def encode(item: tuple[ResumePoint, Batch]) -> tuple[ResumePoint, Encoded]:
            return item[0], encoder(item[1])

        return in_order(encode, _from_point(origins, start, settings), workers)

    return engine


def _from_point(
    origins: Sequence[Origin], start: ResumePoint, settings: ShardSettings
) -> Iterator[tuple[ResumePoint, Batch]]:
    """The batches of all origins from `start` on, each with the point after it."""
    for source in range(start.source, len(origins)):
        skip = start.batch if source == start.source else 0
        batches = origins[source].batches(settings.text_key, settings.separator, skip)
        for number, batch in enumerate(batches, skip + 1):
            yield ResumePoint(source=source, batch=number), batch


def in_order(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Like `map` on `workers` threads; reads at most a few items ahead."""
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
