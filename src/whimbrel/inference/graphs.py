"""A decoding step that starts as one piece: a CUDA graph, compiled code or both, for each of a few sizes of batch.

What a small model computes for one token takes less time than Python needs to ask for it. So the step is recorded once
for each size of batch, with fixed places for what changes (tokens, page tables, lengths), and then only replayed;
batches in between are padded with rows of nothing. Attention reads as many pages as the block table is wide, so the
table is only as wide as the longest row needs, not as the whole context would. A step leaves its likeliest tokens in
the places of the next, so that several can be replayed before anyone looks at what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whimbrel.cache.paged import BlockPool, PagedBatch
from whimbrel.models import GPT

__all__ = ["DecodeGraphs"]

WARM_UPS = 3
"""Runs before a graph is captured, in which kernels are chosen, compiled and loaded."""

MIN_TOKENS = 256
"""Tokens in the narrowest block table: attention over fewer costs too little to be worth another width."""

UNLIMITED = 2**31 - 1
"""Compilations of one function that torch bears."""


@dataclass(slots=True)
class Recorded:
    """The step at one batch size and block-table width. What `replay` gives stays valid until it is called again."""

    tokens: Tensor
    tables: Tensor
    starts: Tensor
    counts: Tensor
    replay: Callable[[], tuple[Tensor, Tensor]]
    """Runs the step on what the places hold: the logits, and each row's likeliest token, -1 for lack of numbers."""
    guarded: bool = False
    """Whether compiled code has checked its guards on these tensors, so that the next calls need not."""

    def fill(self, tokens_B1: Tensor, batch: PagedBatch) -> None:
        """Copy a batch to the places. A table that is too wide repeats the last page of each row, which is masked."""
        self.tokens.copy_(tokens_B1)
        pages = batch.tables.size(1)
        self.tables[:, :pages] = batch.tables
        if pages < self.tables.size(1):
            self.tables[:, pages:] = batch.tables[:, -1:]
        self.starts.copy_(batch.starts)
        self.counts.copy_(batch.counts)


class DecodeGraphs:
    """Reads one token of each row: `graphs(tokens, batch)`, where the batch has `padded(rows)` rows."""

    def __init__(self, model: GPT, pool: BlockPool, *, max_batch: int, compile_step: bool) -> None:
        self._model, self._pool = model, pool
        self._pages = -(-model.config.context_length // pool.block_size)
        self._sizes = [1 << power for power in range((max_batch - 1).bit_length())] + [max_batch]
        self._compiled = compile_step
        self._step: Callable[..., tuple[Tensor, Tensor]] = self._read
        if compile_step:
            # Calls between kernels in C++, too: on a GPU a graph leaves none.
            options: dict[str, Any] = {"size_asserts": False, "cpp_wrapper": pool.device.type == "cpu"}
            self._step = torch.compile(self._read, fullgraph=True, dynamic=False, options=options)
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._memory: Any = None

    def padded(self, rows: int) -> int:
        """The smallest size of batch that has room for this many rows."""
        return next(size for size in self._sizes if size >= rows)

    def width(self, pages: int) -> int:
        """The width of the block table for a batch whose longest row has `pages`: attention reads no more than that.

        On a GPU each width is a graph of its own, so they are powers of two; but the kernel for plain caches stops at
        the length of each row, and one width serves all. Compiled code on a CPU takes any width.
        """
        least = -(-MIN_TOKENS // self._pool.block_size)
        cuda = self._pool.device.type == "cuda"
        if self._pages <= max(least, 1) or (cuda and self._pool.codec is None):
            return self._pages
        # From 2: torch.compile treats a size of 1 as a constant.
        return min(self._pages, max(2, least, 1 << (pages - 1).bit_length() if cuda else pages))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the step and capture the graphs that are sure to be needed, before the first request waits for them.

        Compiled code on a CPU serves one row, or any number of rows from two; on a GPU there is a graph for each size.
        """
        sizes = self._sizes if self._pool.device.type == "cuda" else self._sizes[:2]
        for rows in sizes:
            for _ in self._replays(self._at(rows, 1), 1):
                pass

    def __call__(self, tokens_B1: Tensor, batch: PagedBatch) -> Tensor:
        """The logits (rows, vocabulary) of what comes next in each row."""
        recorded = self._at(len(tokens_B1), batch.tables.size(1))
        recorded.fill(tokens_B1, batch)
        [(logits_BV, _)] = self._replays(recorded, 1)
        return logits_BV

    def ahead(self, tokens_B1: Tensor, batch: PagedBatch, steps: int) -> Tensor:
        """The likeliest tokens (rows, steps) of several steps, each reading what the one before drew."""
        recorded = self._at(len(tokens_B1), batch.tables.size(1))
        recorded.fill(tokens_B1, batch)
        drawn_BS = tokens_B1.new_empty((len(tokens_B1), steps))
        for step, (_, likeliest_B) in enumerate(self._replays(recorded, steps)):
            drawn_BS[:, step] = likeliest_B
        return drawn_BS

    def _replays(self, recorded: Recorded, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What each of `count` steps gives. Compiled code is compiled, and its guards evaluated, in the first of all.

        The tensors of a recorded step never change, so guards that passed once need not be evaluated again; a CUDA
        graph has none.
        """
        if self._compiled and self._pool.device.type != "cuda":
            if not recorded.guarded:
                with _unlimited_compilations():
                    first = recorded.replay()
                recorded.guarded, count = True, count - 1
                yield first
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                for _ in range(count):
                    yield recorded.replay()
        else:
            for _ in range(count):
                yield recorded.replay()

    def _at(self, rows: int, pages: int) -> Recorded:
        key = rows, self.width(pages)
        if key not in self._recorded:
            with _unlimited_compilations() if self._compiled else nullcontext():
                self._recorded[key] = self._record(*key)
        return self._recorded[key]

    def _read(self, tokens: Tensor, tables: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        batch = PagedBatch(self._pool, tables, starts, counts)
        logits: Tensor = self._model(tokens, cache=batch).logits[:, -1]
        highest, likeliest = logits.max(-1)
        tokens.copy_(likeliest[:, None])
        starts.add_(counts)
        return logits, torch.where(highest.isfinite(), likeliest, -1)

    def _record(self, rows: int, width: int) -> Recorded:
        device = self._pool.device
        tokens, tables = (torch.zeros(rows, columns, dtype=torch.int32, device=device) for columns in (1, width))
        starts, counts = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        places = tokens, tables, starts, counts  # rows of nothing: they write to the scratch page
        if self._compiled:
            self._mark_dynamic(*places)
        if device.type != "cuda":
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

    def _mark_dynamic(self, tokens: Tensor, tables: Tensor, starts: Tensor, counts: Tensor) -> None:
        """Compile once for all widths of the block table, and on a CPU for all batches of two rows or more."""
        if self._pool.device.type == "cpu" and len(tokens) > 1:
            for tensor in (tokens, tables, starts, counts):
                torch._dynamo.mark_dynamic(tensor, 0)
        if self.width(1) < self._pages:
            torch._dynamo.mark_dynamic(tables, 1)


@contextmanager
def _unlimited_compilations() -> Iterator[None]:
    """Several compilations of the step, one set for each engine, are intended: torch limits them by default."""
    import torch._dynamo  # which takes seconds: only where it is needed

    with torch._dynamo.config.patch(recompile_limit=UNLIMITED, accumulated_recompile_limit=UNLIMITED):
        yield
