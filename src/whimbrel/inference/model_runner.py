"""The model's part of a step: rows in, logits out."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whimbrel.cache.paged import BlockPool, PagedBatch
from whimbrel.inference.graphs import DecodeGraphs
from whimbrel.inference.scheduler import Plan
from whimbrel.inference.sequence import Sequence
from whimbrel.models import GPT

__all__ = ["Result", "ModelRunner", "decode"]

Decode = Callable[[Tensor, PagedBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    """What a step found out."""

    rows: list[Sequence]
    """Rows that have read all they know."""
    logits: Tensor
    """(rows, vocabulary): what comes next in each."""
    prompts: list[tuple[Sequence, Tensor]]
    """Rows with positions of their prompt to score, and the logits of those (positions, vocabulary)."""


def decode(model: GPT, tokens_B1: Tensor, batch: PagedBatch) -> Tensor:
    """Read one token of each row; the logits (rows, vocabulary) of what comes next."""
    logits: Tensor = model(tokens_B1, cache=batch).logits[:, -1]
    return logits


class ModelRunner:
    """Runs plans on a model: one pass for rows that read one token, one for rows that read more."""

    def __init__(self, model: GPT, pool: BlockPool) -> None:
        self._model, self._pool = model, pool
        self.decode: Decode = lambda tokens, batch: decode(model, tokens, batch)
        """How one token of each row is read."""
        self.padded: Callable[[int], int] = lambda rows: rows
        """How many rows, padding included, that is done with."""

    @torch.inference_mode()
    def run_ahead(self, plan: Plan, graphs: DecodeGraphs) -> list[list[int]]:
        """The next tokens of each row that decodes, as many as the plan says; -1 where numbers are not finite."""
        rows = plan.decoding
        tokens, batch = self._batch(rows, [1] * len(rows), self.padded(len(rows)))
        drawn: list[list[int]] = graphs.ahead(tokens, batch, plan.ahead)[: len(rows)].tolist()
        return drawn

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        """Read what the plan says."""
        rows = list(plan.decoding)
        logits: list[Tensor] = []
        prompts: list[tuple[Sequence, Tensor]] = []
        if plan.decoding:
            ones = [1] * len(rows)
            tokens, batch = self._batch(rows, ones, self.padded(len(rows)))
            logits.append(self.decode(tokens, batch)[: len(rows)])
        if plan.reading:
            ready, reading, prompts = self._read(plan)
            rows += ready
            logits.append(reading)
        return Result(rows, logits[0] if len(logits) == 1 else torch.cat(logits), prompts)

    def _read(self, plan: Plan) -> tuple[list[Sequence], Tensor, list[tuple[Sequence, Tensor]]]:
        """One pass over several tokens of each row; logits only where they are asked for."""
        rows = plan.reading
        counts = [min(row.pending, plan.width) for row in rows]
        tokens, batch = self._batch(rows, counts, len(rows))
        hidden = self._model.hidden_states(tokens, cache=batch)
        ready = [(index, row) for index, row in enumerate(rows) if counts[index] == row.pending]
        picks = [index * plan.width + counts[index] - 1 for index, _ in ready]
        scored = []
        for index, row in enumerate(rows):
            start = row.block_table.stored
            asked = range(max(start, row.unscored.start), min(start + counts[index], row.unscored.stop))
            if asked:
                scored.append((row, len(asked)))
                picks += [index * plan.width + position - start for position in asked]
        picked = torch.tensor(picks, dtype=torch.long, device=hidden.device)
        logits = self._model.logits(hidden.flatten(0, 1)[picked])
        last, *prompts = logits.split([len(ready), *(number for _, number in scored)])
        return [row for _, row in ready], last, [(row, part) for (row, _), part in zip(scored, prompts, strict=True)]

    def _batch(self, rows: abc.Sequence[Sequence], counts: abc.Sequence[int], height: int) -> tuple[Tensor, PagedBatch]:
        """The next tokens of each row, (height, most tokens), and their cache; sent to the device in one piece."""
        width = max(counts)
        pages = max(len(row.block_table.pages) for row in rows)
        ints = np.zeros(height * (width + pages + 2), dtype=np.int32)
        sizes = [height * width, height * pages, height, height]
        tokens, tables, starts, taken = np.split(ints, np.cumsum(sizes)[:-1])
        tokens, tables = tokens.reshape(height, width), tables.reshape(height, pages)
        starts[: len(rows)], taken[: len(rows)] = [row.block_table.stored for row in rows], counts
        for index, row in enumerate(rows):
            start, held = row.block_table.stored, row.block_table.pages
            tokens[index, : counts[index]] = row.tokens[start : start + counts[index]]
            tables[index, : len(held)] = held
            tables[index, len(held) :] = held[-1]  # never seen, but read: then better its own page than another's
        stored = int((starts + taken).max()) - width
        sent = torch.from_numpy(ints).to(self._pool.device, non_blocking=True).split(sizes)
        batch = PagedBatch(self._pool, sent[1].view(height, pages), sent[2], sent[3], stored=stored)
        return sent[0].view(height, width), batch
