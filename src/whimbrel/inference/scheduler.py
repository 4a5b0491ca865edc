"""Who reads what in the next step: first come, first served, within the pages and the tokens there are."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from whimbrel.cache.blocks import BlockManager
from whimbrel.inference.sequence import Sequence

__all__ = ["Plan", "Scheduler"]


@dataclass(slots=True)
class Plan:
    """What one step reads. Every row has pages for it."""

    decoding: list[Sequence] = field(default_factory=list)
    """Rows that read one token, their last."""
    reading: list[Sequence] = field(default_factory=list)
    """Rows with more to read."""
    width: int = 0
    """How many tokens each of those reads at most."""
    ahead: int = 1
    """How many tokens the rows that read one draw, each after the other, before anyone looks at them."""

    @property
    def work(self) -> Iterator[tuple[Sequence, int]]:
        """Each row and how many tokens it reads."""
        yield from ((row, 1) for row in self.decoding)
        yield from ((row, min(row.pending, self.width)) for row in self.reading)


class Scheduler:
    """Rows that wait, rows that run, both oldest first.

    Rows that go on from text they have read always do, one token each. Besides, rows that have more to read share
    `prefill_chunk` tokens, padding included, the oldest first; so a long prompt delays no text under way, and no row is
    ever passed by a younger one. When pages run out the youngest row gives up its own and waits again, to be read anew
    (its tokens stay known). The oldest row can always go on, so all of them come to their end.
    """

    def __init__(
        self, pool: BlockManager, *, max_batch: int, prefill_chunk: int, prefix_cache: bool, ahead: int = 1
    ) -> None:
        self._pool, self._max_batch, self._chunk, self._prefix_cache = pool, max_batch, prefill_chunk, prefix_cache
        self._ahead = ahead
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_hits = 0
        """Tokens that did not have to be read because a known page held them."""

    def add(self, row: Sequence) -> None:
        """Let a new row wait."""
        self.waiting.append(row)

    def join(self, row: Sequence) -> None:
        """Let a row run that was split from a running one."""
        insort(self.running, row, key=lambda row: row.age)

    def remove(self, row: Sequence, *, broken: bool = False) -> None:
        """Drop a row, wherever it is; its pages are free at once."""
        rows = self.running if row in self.running else self.waiting
        rows.remove(row)
        row.block_table.release(broken=broken)

    def schedule(self) -> Plan:
        """Find pages for the rows that run, let others begin where there is room, and say who reads what."""
        self._make_room()
        plan = Plan()
        for row in self.running:
            self._place(row, plan)
        while self.waiting and self._fits_in(plan) and self._admit(self.waiting[0]):
            row = self.waiting.popleft()
            self.running.append(row)
            self._place(row, plan)
        if self._ahead > 1 and plan.decoding and not plan.reading and all(row.predictable for row in plan.decoding):
            self._look_ahead(plan)
        return plan

    def _look_ahead(self, plan: Plan) -> None:
        """Draw several tokens at once, where none of the rows is to end before, and pages are left for all."""
        steps = min(self._ahead, *(row.longest - len(row.tokens) for row in plan.decoding))
        if steps > 1 and sum(row.block_table.blocks_needed(steps) for row in plan.decoding) <= self._pool.available:
            for row in plan.decoding:
                row.block_table.reserve(steps)
            plan.ahead = steps

    def _make_room(self) -> None:
        """BlockManager for what each running row has to read, the oldest first, at the cost of the youngest."""
        done = 0
        while done < len(self.running):
            row = self.running[done]
            lacking = row.block_table.blocks_needed(row.pending)
            if lacking > self._pool.available:
                self._preempt()
                continue  # with the same row, unless it was the youngest itself
            if lacking:
                row.block_table.reserve(row.pending)
            done += 1

    def _preempt(self) -> None:
        row = self.running.pop()
        row.block_table.release()
        self.waiting.appendleft(row)
        self.preemptions += 1

    def _admit(self, row: Sequence) -> bool:
        """Give a waiting row all pages that its known tokens need, unless others would soon have to take them back."""
        if sum(len(each.samples) for each in (row, *self.running)) > self._max_batch:
            return False
        if self._prefix_cache:
            row.block_table.match(row.tokens, min([len(row.tokens) - 1, *row.unscored[:1]]))
        if row.block_table.blocks_needed(row.pending) + len(self.running) > self._pool.available:
            row.block_table.release()
            return False
        self.prefix_hits += row.block_table.stored
        row.block_table.reserve(row.pending)
        return True

    def _fits_in(self, plan: Plan) -> bool:
        """Whether one more row can read: rows are padded to the widest, and padding costs what tokens do."""
        return max(plan.width, 1) * (len(plan.reading) + 1) <= self._chunk

    def _place(self, row: Sequence, plan: Plan) -> None:
        if row.pending == 1:
            plan.decoding.append(row)
        elif self._fits_in(plan):
            plan.reading.append(row)
            plan.width = max(plan.width, min(row.pending, self._chunk // len(plan.reading)))
