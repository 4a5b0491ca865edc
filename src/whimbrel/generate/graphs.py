"""A decoding step that starts as one piece: a CUDA graph, compiled code or both, for each of a few sizes of batch.

What a small model computes for one token takes less time than Python needs to ask for it. So the step is recorded once
for each size of batch, with fixed places for what changes (tokens, page tables, lengths), and then only replayed;
batches in between are padded with rows of nothing. A step leaves its likeliest tokens in the places of the next, so
that several can be replayed before anyone looks at what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from whimbrel.cache.paged import PagedBatch, PagePool
from whimbrel.models import GPT

__all__ = ["DecodeGraphs"]

WARM_UPS = 3
"""Runs before a graph is captured, in which kernels are chosen, compiled and loaded."""

UNLIMITED = 2**31 - 1
"""Compilations of one function that torch bears."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The step at one size of batch. What `replay` gives stays valid until it is called again."""

    tokens: Tensor
    tables: Tensor
    starts: Tensor
    counts: Tensor
    replay: Callable[[], tuple[Tensor, Tensor]]
    """Runs the step on what the places hold: the logits, and each row's likeliest token, -1 for lack of numbers."""

    def fill(self, tokens_B1: Tensor, batch: PagedBatch) -> None:
        """Fill the places. Pages past those of the batch are never looked at: lengths say so."""
        self.tokens.copy_(tokens_B1)
        self.tables[:, : batch.tables.size(1)] = batch.tables
        self.starts.copy_(batch.starts)
        self.counts.copy_(batch.counts)


class DecodeGraphs:
    """Reads one token of each row: `graphs(tokens, batch)`, where the batch has `padded(rows)` rows."""

    def __init__(self, model: GPT, pool: PagePool, *, max_batch: int, compile_step: bool) -> None:
        self._model, self._pool = model, pool
        self._pages = -(-model.config.context_length // pool.page_size)
        self._sizes = [1 << power for power in range((max_batch - 1).bit_length())] + [max_batch]
        self._compiled = compile_step
        self._step: Callable[..., tuple[Tensor, Tensor]] = self._read
        if compile_step:
            # Calls between kernels in C++, too: on a GPU a graph leaves none.
            options: dict[str, Any] = {"size_asserts": False, "cpp_wrapper": pool.device.type == "cpu"}
            self._step = torch.compile(self._read, fullgraph=True, dynamic=False, options=options)
        self._recorded: dict[int, Recorded] = {}
        self._memory: Any = None

    def padded(self, rows: int) -> int:
        """The smallest size of batch that has room for this many rows."""
        return next(size for size in self._sizes if size >= rows)

    def __call__(self, tokens_B1: Tensor, batch: PagedBatch) -> Tensor:
        """The logits (rows, vocabulary) of what comes next in each row."""
        recorded = self._at(len(tokens_B1))
        recorded.fill(tokens_B1, batch)
        with self._unasked():
            return recorded.replay()[0]

    def ahead(self, tokens_B1: Tensor, batch: PagedBatch, steps: int) -> Tensor:
        """The likeliest tokens (rows, steps) of several steps, each reading what the one before drew."""
        recorded = self._at(len(tokens_B1))
        recorded.fill(tokens_B1, batch)
        drawn_BS = tokens_B1.new_empty((len(tokens_B1), steps))
        with self._unasked():
            for step in range(steps):
                drawn_BS[:, step] = recorded.replay()[1]
        return drawn_BS

    def _unasked(self) -> AbstractContextManager[object]:
        """Places never change: what compiled code asks of its inputs need not be asked again. A graph asks nothing."""
        if self._pool.device.type == "cuda" or not self._compiled:
            return nullcontext()
        return cast(AbstractContextManager[object], torch.compiler.set_stance(skip_guard_eval_unsafe=True))

    def _at(self, rows: int) -> Recorded:
        if rows not in self._recorded:
            import torch._dynamo  # which takes seconds: only where it is needed

            # One compilation for each engine and size of batch is meant, not a mistake to be limited.
            with torch._dynamo.config.patch(recompile_limit=UNLIMITED, accumulated_recompile_limit=UNLIMITED):
                self._recorded[rows] = self._record(rows)
        return self._recorded[rows]

    def _read(self, tokens: Tensor, tables: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        batch = PagedBatch(self._pool, tables, starts, counts)
        logits: Tensor = self._model(tokens, cache=batch).logits[:, -1]
        highest, likeliest = logits.max(-1)
        tokens.copy_(likeliest[:, None])
        starts.add_(counts)
        return logits, torch.where(highest.isfinite(), likeliest, -1)

    def _record(self, rows: int) -> Recorded:
        device = self._pool.device
        tokens, tables = (torch.zeros(rows, width, dtype=torch.int32, device=device) for width in (1, self._pages))
        starts, counts = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        places = tokens, tables, starts, counts  # rows of nothing: they write to the scratch page
        if device.type != "cuda":
            self._step(*places)
            return Recorded(*places, replay=lambda: self._step(*places))
        apart = torch.cuda.Stream(device)
        apart.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(apart):
            for _ in range(WARM_UPS):
                self._step(*places)
        torch.cuda.current_stream(device).wait_stream(apart)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            found = self._step(*places)
        self._memory = self._memory or graph.pool()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return found

        return Recorded(*places, replay=replay)
