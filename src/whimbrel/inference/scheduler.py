"""Choosing the sequences of the next step: first come, first served, limited by free blocks and the token budget."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from whimbrel.inference.block_manager import BlockManager
from whimbrel.inference.sequence import Sequence

__all__ = ["Plan", "Scheduler"]


@dataclass(slots=True)
class Plan:
    """The sequences of one step. Blocks for their tokens are already reserved."""

    decodes: list[Sequence] = field(default_factory=list)
    """Sequences with one pending token, whose prompt is scored if that was requested."""
    prefills: list[Sequence] = field(default_factory=list)
    """All others: with more pending tokens, draft tokens to verify, or a prompt to score."""
    prefill_width: int = 0
    """Maximum number of tokens of each of `prefills`."""
    num_steps: int = 1
    """Number of tokens that `decodes` generate before the host reads them."""

    def prefill_counts(self) -> list[int]:
        """Number of tokens of each of `prefills`, draft tokens included."""
        return [min(seq.num_pending + seq.num_proposed, self.prefill_width) for seq in self.prefills]


class Scheduler:
    """Waiting and running sequences, both in order of arrival.

    Decoding sequences run in every step, one token each. In addition, sequences with more pending tokens share
    `prefill_chunk` tokens (padding included) in order of arrival; so a long prompt never stalls decoding, and no
    sequence overtakes an earlier one. When blocks run out, the latest sequence is preempted: it releases its blocks
    and waits, to be prefilled again (its tokens and RNG are kept). The earliest can always run, so every one finishes.
    """

    def __init__(
        self, manager: BlockManager, *, max_batch: int, prefill_chunk: int, prefix_cache: bool, max_steps: int = 1
    ) -> None:
        self._manager, self._max_batch, self._chunk = manager, max_batch, prefill_chunk
        self._prefix_cache, self._max_steps = prefix_cache, max_steps
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_hits = 0
        """Tokens that were found in the prefix cache."""

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)

    def add_fork(self, seq: Sequence) -> None:
        """Add a sequence that was forked from a running one."""
        insort(self.running, seq, key=lambda seq: seq.priority)

    def remove(self, seq: Sequence, *, discard: bool = False) -> None:
        """Remove a waiting or running sequence and release its blocks."""
        queue = self.running if seq in self.running else self.waiting
        queue.remove(seq)
        seq.block_table.release(discard=discard)

    def schedule(self) -> Plan:
        """Reserve blocks for running sequences, admit waiting ones, and plan the next step."""
        self._reserve_running()
        plan = Plan()
        for seq in self.running:
            self._add_to_plan(seq, plan)
        while self.waiting and self._has_budget(plan) and self._admit(self.waiting[0]):
            seq = self.waiting.popleft()
            self.running.append(seq)
            self._add_to_plan(seq, plan)
        if (
            self._max_steps > 1
            and plan.decodes
            and not plan.prefills
            and all(seq.supports_multi_step for seq in plan.decodes)
        ):
            self._plan_multi_step(plan)
        return plan

    def schedule_ahead(self, plan: Plan) -> Plan | None:
        """The steps after those of `plan`, whose tokens are not known yet; None if the batch is going to change."""
        if self.waiting or plan.decodes != self.running:
            return None
        following = Plan(decodes=plan.decodes)
        self._plan_multi_step(following, after=plan.num_steps)
        return following if following.num_steps > 1 else None

    def _plan_multi_step(self, plan: Plan, after: int = 0) -> None:
        """Decode several tokens per host synchronization if no sequence ends before that and enough blocks are free.

        `after`: the number of tokens that are being decoded already.
        """
        steps = min(self._max_steps, *(seq.steps_left - after for seq in plan.decodes))
        total = after + steps
        if steps > 1 and sum(seq.block_table.blocks_needed(total) for seq in plan.decodes) <= self._manager.available:
            for seq in plan.decodes:
                seq.block_table.reserve(total)
            plan.num_steps = steps

    def _reserve_running(self) -> None:
        """Reserve blocks for all pending tokens, in order of arrival; preempt the latest sequences if needed."""
        num_reserved = 0
        while num_reserved < len(self.running):
            seq = self.running[num_reserved]
            tokens = seq.num_pending + seq.num_proposed
            needed = seq.block_table.blocks_needed(tokens)
            if needed > self._manager.available:
                latest = self.running.pop()
                latest.block_table.release()
                self.waiting.appendleft(latest)
                self.preemptions += 1
                continue  # with the same sequence, unless it was the one preempted
            if needed:
                seq.block_table.reserve(tokens)
            num_reserved += 1

    def _admit(self, seq: Sequence) -> bool:
        """Reserve blocks for a waiting sequence, plus one per running sequence (else it would soon be preempted)."""
        if sum(len(each.samples) for each in (seq, *self.running)) > self._max_batch:
            return False
        table = seq.block_table
        if self._prefix_cache:
            # At least the last token is processed, for its logits; so are positions that are still to be scored.
            limit = min([len(seq.tokens) - seq.start - 1, *seq.unscored[:1]])
            table.match_prefix(seq.tokens[seq.start :] if seq.start else seq.tokens, limit)
        tokens = seq.num_pending + seq.num_proposed
        if table.blocks_needed(tokens) + len(self.running) > self._manager.available:
            table.release()
            return False
        self.prefix_hits += table.num_tokens
        table.reserve(tokens)
        return True

    def _has_budget(self, plan: Plan) -> bool:
        """Whether one more sequence can prefill: sequences are padded to the widest, and padding counts as tokens."""
        return max(plan.prefill_width, 1) * (len(plan.prefills) + 1) <= self._chunk

    def _add_to_plan(self, seq: Sequence, plan: Plan) -> None:
        tokens = seq.num_pending + seq.num_proposed
        if seq.num_proposed and not (
            self._has_budget(plan) and max(tokens, plan.prefill_width) * (len(plan.prefills) + 1) <= self._chunk
        ):
            seq.proposal = None  # draft tokens are verified in one pass or not at all
            tokens = seq.num_pending
        if tokens == 1 and not seq.unscored:
            plan.decodes.append(seq)
        elif self._has_budget(plan):
            plan.prefills.append(seq)
            plan.prefill_width = max(plan.prefill_width, min(tokens, self._chunk // len(plan.prefills)))
