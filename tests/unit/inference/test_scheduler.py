"""Scheduling: order of arrival, chunked prefill, preemption."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.inference.reference import small_model

from whimbrel.inference.paged_cache import BlockPool
from whimbrel.inference.scheduler import Plan, Scheduler
from whimbrel.inference.sequence import Request, Sequence

MODEL = small_model()


def scheduler(*, blocks: int = 100, batch: int = 8, chunk: int = 16, prefix_cache: bool = False) -> Scheduler:
    pool = BlockPool(MODEL.config, blocks, 4)
    return Scheduler(pool, max_batch=batch, prefill_chunk=chunk, prefix_cache=prefix_cache)


def add(scheduler: Scheduler, *lengths: int, n: int = 1) -> list[Sequence]:
    first = 1 + max((seq.request_id for seq in (*scheduler.running, *scheduler.waiting)), default=-1)
    sequences = [
        Sequence.from_request(
            Request(prompt_ids=(number,) * length, max_new_tokens=9, n=n), number, scheduler._manager, 48
        )
        for number, length in enumerate(lengths, first)
    ]
    for seq in sequences:
        scheduler.add(seq)
    return sequences


def execute(plan: Plan, num_new_tokens: int = 1) -> list[tuple[int, int]]:
    """Process a plan without a model: each sequence's number and its number of tokens."""
    done = [*((seq, 1) for seq in plan.decodes), *zip(plan.prefills, plan.prefill_counts(), strict=True)]
    for seq, count in done:
        seq.advance(count, cache=True)
        if seq.num_pending == 0:
            seq.tokens += [seq.request_id] * num_new_tokens
    return [(seq.request_id, count) for seq, count in done]


def test_prefills_share_the_chunk_in_order_of_arrival():
    schedule = scheduler(chunk=16)
    add(schedule, 20, 3, 5, 30, 2)
    assert execute(schedule.schedule()) == [(0, 16)]
    assert execute(schedule.schedule()) == [(0, 4), (1, 3), (2, 5)], "chunk budget exhausted"
    assert execute(schedule.schedule()) == [(0, 1), (1, 1), (2, 1), (3, 16)]


def test_decoding_continues_while_a_long_prompt_is_prefilled():
    schedule = scheduler(chunk=4)
    add(schedule, 2, 2)
    execute(schedule.schedule())
    add(schedule, 40)
    for _ in range(10):
        assert execute(schedule.schedule()) == [(0, 1), (1, 1), (2, 4)]


def test_a_single_pending_token_needs_no_chunk():
    schedule = scheduler(chunk=1)
    add(schedule, 1, 1, 1)
    assert execute(schedule.schedule()) == [(0, 1), (1, 1), (2, 1)]


def test_samples_count_towards_the_batch_before_they_are_forked():
    schedule = scheduler(batch=4, chunk=100)
    add(schedule, 2, n=3)
    add(schedule, 2, 2)
    assert execute(schedule.schedule()) == [(0, 2), (1, 2)]
    assert [seq.request_id for seq in schedule.waiting] == [2]
    schedule.remove(schedule.running[1])
    assert execute(schedule.schedule()) == [(0, 1), (2, 2)]


def test_a_long_prompt_is_not_overtaken_by_a_short_one():
    schedule = scheduler(blocks=8, chunk=100)
    add(schedule, 12, 20, 1)
    assert execute(schedule.schedule()) == [(0, 12)]
    assert [seq.request_id for seq in schedule.waiting] == [1, 2]
    schedule.remove(schedule.running[0])
    assert sorted(execute(schedule.schedule())) == [(1, 20), (2, 1)]


def test_the_latest_sequence_is_preempted_and_readmitted_first():
    schedule = scheduler(blocks=9, chunk=100)
    sequences = add(schedule, 8, 7, 3)
    add(schedule, 1)
    execute(schedule.schedule())
    while not schedule.preemptions:
        execute(schedule.schedule())
    assert [seq.request_id for seq in schedule.waiting] == [2, 3]
    assert (len(sequences[2].block_table.blocks), sequences[2].block_table.num_tokens) == (0, 0)
    assert sequences[2].num_sampled > 1, "what was drawn stays known"
    schedule.remove(sequences[0])
    assert (2, len(sequences[2].tokens)) in execute(schedule.schedule())


def test_forks_have_the_priority_of_their_request():
    schedule = scheduler(chunk=100)
    first, _ = *add(schedule, 3, n=3), *add(schedule, 3)
    execute(schedule.schedule())
    for seq in first.split()[1:]:
        schedule.add_fork(seq)
    assert [seq.priority for seq in schedule.running] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_sequence_is_admitted_if_running_ones_can_continue():
    """Without a spare block for each, the admitted sequence would soon be preempted."""
    schedule = scheduler(blocks=7, chunk=100)
    add(schedule, 8, 8)
    add(schedule, 8)
    execute(schedule.schedule())
    assert [seq.request_id for seq in schedule.running] == [0, 1]
    schedule.remove(schedule.running[0])
    assert execute(schedule.schedule()) == [(1, 1), (2, 8)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    blocks=st.integers(13, 40),
    chunk=st.sampled_from([1, 5, 16, 64]),
    batch=st.integers(1, 8),
    prefix_cache=st.booleans(),
)
def test_every_sequence_finishes_and_the_first_never_waits(lengths, blocks, chunk, batch, prefix_cache):
    schedule = scheduler(blocks=blocks, chunk=chunk, batch=batch, prefix_cache=prefix_cache)
    sequences = add(schedule, *lengths)
    steps = 0
    while sequences:
        plan = schedule.schedule()
        oldest, before = sequences[0], sequences[0].num_pending
        widths = [min(seq.num_pending, plan.prefill_width) for seq in plan.prefills]
        assert max(widths, default=0) * len(widths) <= chunk
        assert len(plan.decodes) + len(plan.prefills) <= len(schedule.running) <= batch
        assert [seq.request_id for seq in (*schedule.running, *schedule.waiting)] == [
            seq.request_id for seq in sequences
        ]
        done = dict(execute(plan))
        assert done[oldest.request_id] == (1 if before == 1 else min(before, chunk))
        for seq in [seq for seq in sequences if seq.num_sampled == 8]:
            sequences.remove(seq)
            schedule.remove(seq)
        steps += 1
        assert steps < 2000
    assert schedule._manager.available == blocks - 1


@pytest.mark.parametrize("running", [True, False])
def test_waiting_and_running_sequences_can_be_removed(running):
    schedule = scheduler(batch=1)
    first, second = add(schedule, 5, 5)
    execute(schedule.schedule())
    schedule.remove(first if running else second)
    assert execute(schedule.schedule()) == ([(1, 5)] if running else [(0, 1)])
