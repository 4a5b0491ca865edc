"""Whose turn it is: nobody is passed, nobody waits for a long prompt, nobody waits forever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.inference.reference import small_model

from whimbrel.cache.paged import BlockPool
from whimbrel.inference.scheduler import Plan, Scheduler
from whimbrel.inference.sequence import Request, Sequence

MODEL = small_model()


def scheduler(*, pages: int = 100, batch: int = 8, chunk: int = 16, prefix_cache: bool = False) -> Scheduler:
    pool = BlockPool(MODEL.config, pages, 4)
    return Scheduler(pool, max_batch=batch, prefill_chunk=chunk, prefix_cache=prefix_cache)


def add(to: Scheduler, *lengths: int, n: int = 1) -> list[Sequence]:
    first = 1 + max((row.number for row in (*to.running, *to.waiting)), default=-1)
    rows = [
        Sequence.from_request(Request(prompt_ids=(number,) * length, max_new_tokens=9, n=n), number, to._manager, 48)
        for number, length in enumerate(lengths, first)
    ]
    for row in rows:
        to.add(row)
    return rows


def read(plan: Plan, draw: int = 1) -> list[tuple[int, int]]:
    """Do what a plan says, without a model: each row's number and how many tokens it read."""
    done = [*((row, 1) for row in plan.decodes), *zip(plan.prefills, plan.prefill_counts(), strict=True)]
    for row, count in done:
        row.advance(count, cache=True)
        if row.pending == 0:
            row.tokens += [row.number] * draw
    return [(row.number, count) for row, count in done]


def test_rows_that_read_share_the_tokens_of_a_step_the_oldest_first():
    schedule = scheduler(chunk=16)
    add(schedule, 20, 3, 5, 30, 2)
    assert read(schedule.schedule()) == [(0, 16)]
    assert read(schedule.schedule()) == [(0, 4), (1, 3), (2, 5)], "a fourth of 5 would be 20"
    assert read(schedule.schedule()) == [(0, 1), (1, 1), (2, 1), (3, 16)]


def test_texts_under_way_go_on_while_a_long_prompt_is_read():
    schedule = scheduler(chunk=4)
    add(schedule, 2, 2)
    read(schedule.schedule())
    add(schedule, 40)
    for _ in range(10):
        assert read(schedule.schedule()) == [(0, 1), (1, 1), (2, 4)]


def test_one_token_that_is_left_to_read_costs_no_chunk():
    schedule = scheduler(chunk=1)
    add(schedule, 1, 1, 1)
    assert read(schedule.schedule()) == [(0, 1), (1, 1), (2, 1)]


def test_a_full_batch_lets_others_wait_and_samples_count_from_the_beginning():
    schedule = scheduler(batch=4, chunk=100)
    add(schedule, 2, n=3)
    add(schedule, 2, 2)
    assert read(schedule.schedule()) == [(0, 2), (1, 2)]
    assert [row.number for row in schedule.waiting] == [2]
    schedule.remove(schedule.running[1])
    assert read(schedule.schedule()) == [(0, 1), (2, 2)]


def test_a_row_that_needs_much_is_not_passed_by_one_that_needs_little():
    schedule = scheduler(pages=8, chunk=100)
    add(schedule, 12, 20, 1)
    assert read(schedule.schedule()) == [(0, 12)]
    assert [row.number for row in schedule.waiting] == [1, 2]
    schedule.remove(schedule.running[0])
    assert sorted(read(schedule.schedule())) == [(1, 20), (2, 1)]


def test_the_youngest_gives_up_its_pages_and_is_the_first_to_come_back():
    schedule = scheduler(pages=9, chunk=100)
    rows = add(schedule, 8, 7, 3)
    add(schedule, 1)
    read(schedule.schedule())
    while not schedule.preemptions:
        read(schedule.schedule())
    assert [row.number for row in schedule.waiting] == [2, 3]
    assert (len(rows[2].block_table.blocks), rows[2].block_table.num_tokens) == (0, 0)
    assert rows[2].num_sampled > 1, "what was drawn stays known"
    schedule.remove(rows[0])
    assert (2, len(rows[2].tokens)) in read(schedule.schedule())


def test_samples_are_as_old_as_their_request():
    schedule = scheduler(chunk=100)
    first, _ = *add(schedule, 3, n=3), *add(schedule, 3)
    read(schedule.schedule())
    for row in first.split()[1:]:
        schedule.add_fork(row)
    assert [row.priority for row in schedule.running] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_row_is_taken_on_when_those_that_run_have_room_to_go_on():
    """Without a spare page for each, the one taken on would soon be put back."""
    schedule = scheduler(pages=7, chunk=100)
    add(schedule, 8, 8)
    add(schedule, 8)
    read(schedule.schedule())
    assert [row.number for row in schedule.running] == [0, 1]
    schedule.remove(schedule.running[0])
    assert read(schedule.schedule()) == [(1, 1), (2, 8)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    pages=st.integers(13, 40),
    chunk=st.sampled_from([1, 5, 16, 64]),
    batch=st.integers(1, 8),
    prefix_cache=st.booleans(),
)
def test_every_row_comes_to_its_end_and_the_first_one_never_waits(lengths, pages, chunk, batch, prefix_cache):
    schedule = scheduler(pages=pages, chunk=chunk, batch=batch, prefix_cache=prefix_cache)
    rows = add(schedule, *lengths)
    steps = 0
    while rows:
        plan = schedule.schedule()
        oldest, before = rows[0], rows[0].pending
        widths = [min(row.pending, plan.prefill_width) for row in plan.prefills]
        assert max(widths, default=0) * len(widths) <= chunk
        assert len(plan.decodes) + len(plan.prefills) <= len(schedule.running) <= batch
        assert [row.number for row in (*schedule.running, *schedule.waiting)] == [row.number for row in rows]
        done = dict(read(plan))
        assert done[oldest.number] == (1 if before == 1 else min(before, chunk))
        for row in [row for row in rows if row.num_sampled == 8]:
            rows.remove(row)
            schedule.remove(row)
        steps += 1
        assert steps < 2000
    assert schedule._manager.available == pages - 1


@pytest.mark.parametrize("running", [True, False])
def test_a_row_is_removed_wherever_it_is(running):
    schedule = scheduler(batch=1)
    first, second = add(schedule, 5, 5)
    read(schedule.schedule())
    schedule.remove(first if running else second)
    assert read(schedule.schedule()) == ([(1, 5)] if running else [(0, 1)])
