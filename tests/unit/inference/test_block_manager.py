"""Block tables and the prefix cache against a simple model of them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from zlib import crc32

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.inference.block_manager import BlockTable
from whimbrel.inference.paged_cache import BlockPool as AnyBlockPool
from whimbrel.inference.paged_cache import PagedBatch
from whimbrel.models import GPTConfig

SHAPE = GPTConfig(num_layers=1, embd_size=2, num_heads=1)
BlockPool = partial(AnyBlockPool, dtype=torch.float64)
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def prefix_marks(tokens: list[int]) -> torch.Tensor:
    """The values the blocks must store: for each position, a hash of its complete prefix."""
    return torch.tensor([crc32(str(tokens[: end + 1]).encode()) for end in range(len(tokens))], dtype=torch.float64)


def write(block_table: BlockTable, pool: AnyBlockPool, tokens: list[int]) -> None:
    """Write the prefix marks of the `tokens` that are not stored, as a forward pass would."""
    start, states = block_table.num_tokens, prefix_marks(tokens)[block_table.num_tokens :]
    batch = PagedBatch(
        pool,
        torch.tensor([block_table.blocks.tolist()], dtype=torch.int32),
        torch.tensor([start], dtype=torch.int32),
        torch.tensor([len(states)], dtype=torch.int32),
    )
    batch.positions(len(states), torch.device("cpu"))
    keys = states[None, None, :, None].expand(1, 1, -1, 2)
    batch.append(keys, -keys, 0)
    block_table.advance(tokens, len(tokens))


def stored_values(block_table: BlockTable, pool: AnyBlockPool) -> tuple[torch.Tensor, torch.Tensor]:
    tables = torch.tensor([block_table.blocks.tolist()], dtype=torch.int32)
    keys, values = pool.view(0, tables, torch.tensor([block_table.num_tokens])).dense(torch.float64)
    return keys[0, 0, : block_table.num_tokens, 0], values[0, 0, : block_table.num_tokens, 0]


class PoolMachine(RuleBasedStateMachine):
    """Sequences that start, grow, fork and end in any order, in a pool that is often full."""

    tables: Bundle[BlockTable] = Bundle("tables")

    @initialize(blocks=st.integers(2, 12), size=st.integers(1, 4))
    def begin(self, blocks: int, size: int) -> None:
        self.pool = BlockPool(SHAPE, blocks, size)
        self.texts: dict[BlockTable, list[int]] = {}

    def grow(self, block_table: BlockTable, tokens: list[int]) -> None:
        lacking, available = block_table.blocks_needed(len(tokens) - block_table.num_tokens), self.pool.available
        if lacking > available:
            before = block_table.blocks[:]
            with pytest.raises(RequestError, match=f"expected {lacking} free KV-cache blocks, got {available}"):
                block_table.reserve(len(tokens) - block_table.num_tokens)
            assert block_table.blocks == before
            return
        block_table.reserve(len(tokens) - block_table.num_tokens)
        assert self.pool.available == available - lacking
        write(block_table, self.pool, tokens)
        self.texts[block_table] = tokens

    @rule(target=tables, tokens=TEXT)
    def open(self, tokens: list[int]) -> BlockTable:
        block_table = BlockTable(self.pool)
        self.texts[block_table] = []
        block_table.match_prefix(tokens, len(tokens) - 1)
        assert block_table.num_tokens < len(tokens)
        self.texts[block_table] = tokens[: block_table.num_tokens]
        self.grow(block_table, tokens)
        return block_table

    @rule(block_table=tables, more=TEXT)
    def extend(self, block_table: BlockTable, more: list[int]) -> None:
        self.grow(block_table, self.texts[block_table] + more)

    @rule(target=tables, block_table=tables)
    def fork(self, block_table: BlockTable) -> BlockTable:
        available, twin = self.pool.available, block_table.fork()
        assert self.pool.available == available
        self.texts[twin] = self.texts[block_table]
        return twin

    @rule(block_table=consumes(tables), discard=st.booleans())
    def release(self, block_table: BlockTable, discard: bool) -> None:
        last = {block for block in block_table.blocks if self.pool.ref_count(block) == 1}
        block_table.release(discard=discard)
        del self.texts[block_table]
        assert (len(block_table.blocks), block_table.num_tokens) == (0, 0)
        if discard:
            assert all(not tensor[list(last)].any() for tensor in self.pool.tensors)

    @invariant()
    def reference_counts_match_the_block_tables(self) -> None:
        owners = Counter(block for block_table in self.texts for block in block_table.blocks)
        assert owners[0] == 0
        assert {block: self.pool.ref_count(block) for block in owners} == owners
        assert self.pool.available == self.pool.num_blocks - 1 - len(owners)
        free = {*self.pool._free, *self.pool._evictable}
        assert len(free) == self.pool.available
        assert not free & owners.keys()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for block_table, tokens in self.texts.items():
            assert block_table.num_tokens == len(tokens)
            if tokens:
                keys, values = stored_values(block_table, self.pool)
                assert torch.equal(keys, prefix_marks(tokens))
                assert torch.equal(values, -keys)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


def open_table(pool: AnyBlockPool, tokens: list[int], *, max_match: int | None = None) -> BlockTable:
    block_table = BlockTable(pool)
    block_table.match_prefix(tokens, len(tokens) - 1 if max_match is None else max_match)
    block_table.reserve(len(tokens) - block_table.num_tokens)
    write(block_table, pool, tokens)
    return block_table


def num_matched(pool: AnyBlockPool, tokens: list[int], max_match: int | None = None) -> int:
    block_table = BlockTable(pool)
    block_table.match_prefix(tokens, len(tokens) - 1 if max_match is None else max_match)
    stored = block_table.num_tokens
    block_table.release()
    return stored


def test_a_prefix_matches_by_full_blocks():
    pool = BlockPool(SHAPE, 20, 4)
    text = list(range(12))
    open_table(pool, text)
    assert num_matched(pool, text) == 8
    assert num_matched(pool, [*text, 99]) == 12
    assert num_matched(pool, text, max_match=7) == 4
    assert num_matched(pool, text[:7]) == 4
    assert num_matched(pool, [*text[:4], 99, *text[5:]]) == 4
    assert num_matched(pool, [99, *text[1:]]) == 0
    assert num_matched(pool, text[4:8] * 3) == 0, "the same tokens after another prefix are another block"


def test_hash_collisions_do_not_match():
    """hash(-1) == hash(-2) in Python, so tuples of them collide."""
    assert hash((0, (-1, -1))) == hash((0, (-2, -2)))
    pool = BlockPool(SHAPE, 20, 2)
    open_table(pool, [0, 0]).advance([-1, -1], 2)
    assert pool.match([-2, -2, 5], 2)[0] == []


def test_unreferenced_blocks_are_evicted_least_recently_used_first():
    pool = BlockPool(SHAPE, 9, 2)
    for first in (10, 20, 30):
        open_table(pool, [first, 1, 2, 3, 4]).release()
    assert pool.available == 8
    assert [num_matched(pool, [first, 1, 2, 3, 4]) for first in (10, 20, 30)] == [4, 4, 4]
    assert num_matched(pool, [10, 1, 2, 3, 4]) == 4  # sequence 10 is now the most recently used
    # takes two free blocks, then evicts the two of sequence 20, last block first
    other = open_table(pool, [50, 1, 2, 3, 4, 5, 6, 7])
    assert [num_matched(pool, [first, 1, 2, 3, 4]) for first in (10, 20, 30)] == [4, 0, 4]
    other.reserve(2)  # one more: evicts the last block of the least recently used sequence
    assert sorted(num_matched(pool, [first, 1, 2, 3, 4]) for first in (10, 30)) == [2, 4]


def test_duplicate_blocks_are_cached_once():
    pool = BlockPool(SHAPE, 9, 2)
    first, second = (open_table(pool, [1, 2, 3], max_match=0) for _ in range(2))
    assert first.blocks[0] != second.blocks[0]
    second.release()
    assert pool.match([1, 2, 3], 2)[0] == [first.blocks[0]]


def test_shared_blocks_are_copied_on_write():
    pool = BlockPool(SHAPE, 20, 4)
    table = open_table(pool, [1, 2, 3, 4, 5, 6])
    forks = [table.fork() for _ in range(3)]
    assert pool.available == 19 - 2
    for end, each in enumerate((table, *forks)):
        assert each.blocks_needed(1) == (end < 3), "the last one has the block for itself"
        each.reserve(1)
        write(each, pool, [1, 2, 3, 4, 5, 6, end])
    assert pool.available == 19 - 1 - 4
    assert len({each.blocks[0] for each in (table, *forks)}) == 1
    for end, each in enumerate((table, *forks)):
        assert torch.equal(stored_values(each, pool)[0], prefix_marks([1, 2, 3, 4, 5, 6, end]))


def test_a_fork_of_full_blocks_copies_nothing():
    pool = BlockPool(SHAPE, 20, 4)
    table = open_table(pool, [1, 2, 3, 4])
    table.reserve(3)  # a block that the fork does not share
    fork = table.fork()
    assert list(fork.blocks) == list(table.blocks[:1])
    assert (table.blocks_needed(1), fork.blocks_needed(1), fork.blocks_needed(0)) == (0, 1, 0)


@pytest.mark.parametrize(
    ("blocks", "size", "message"), [(1, 4, "num_blocks: expected at least 2"), (4, 0, "block_size: .* got 0")]
)
def test_invalid_pools_are_rejected(blocks, size, message):
    with pytest.raises(ConfigError, match=message):
        BlockPool(SHAPE, blocks, size)
