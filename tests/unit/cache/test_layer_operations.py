"""Any sequence of operations on any layer has the same effect as on Python lists of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from whimbrel.base.errors import CacheError
from whimbrel.cache import Cache, CacheLayerMixin, DynamicLayer, SinkLayer, SlidingLayer, StaticLayer, find_codec
from whimbrel.ops.lowbit import GroupCodec

HEADS, SIZE, CAPACITY, WINDOW, SINKS = 2, 4, 24, 5, 2


@dataclass
class ReferenceLayer:
    """The expected content of a layer: every token of every sequence, and how many are still stored."""

    sequences: list[list[Tensor]]
    padding: list[int]
    """Left padding of each sequence."""
    span: int | None = None
    """Maximum number of stored tokens; None for no limit."""
    sinks: int = 0
    stored: int = 0
    recording: bool = False

    @property
    def seen(self) -> int:
        return len(self.sequences[0])

    def append(self, tokens: list[Tensor]) -> Tensor:
        """Add tokens to every sequence; returns what they may attend to."""
        before = self.seen if self.span is None else min(self.seen, self.span - 1)
        seen = self.seen
        for row, new in zip(self.sequences, torch.stack(tokens, dim=1), strict=True):
            row.extend(new)
        self.stored += len(tokens)
        if self.span is not None and not self.recording:
            self.stored = min(self.stored, self.span)
        return self.visible(before, seen)

    def visible(self, before: int, seen: int) -> Tensor:
        sinks, contiguous = min(self.sinks, before), seen - before
        fronts = [min(padding, contiguous) for padding in self.padding]
        sequences = zip(self.sequences, fronts, strict=True)
        kept = [row[front : front + sinks] + row[contiguous + sinks :] for row, front in sequences]
        return torch.stack([torch.stack(row, dim=1) if row else torch.empty(HEADS, 0, SIZE) for row in kept])

    def can_crop(self, kept: int) -> bool:
        left = self.stored - (self.seen - kept)
        return self.span is None or kept == 0 or left >= min(kept, self.span - 1)

    def crop(self, kept: int) -> None:
        self.stored = 0 if kept == 0 else self.stored - (self.seen - kept)
        if self.span is not None:
            self.stored = min(self.stored, self.span)
        self.sequences = [row[:kept] for row in self.sequences]

    def gather(self, index: list[int]) -> None:
        self.sequences = [list(self.sequences[i]) for i in index]
        self.padding = [self.padding[i] for i in index]

    def copy(self) -> ReferenceLayer:
        return replace(self, sequences=[list(row) for row in self.sequences])


@dataclass
class Pair:
    """A cache and its expected content."""

    cache: Cache
    lists: list[ReferenceLayer]


KINDS: dict[str, tuple[Callable[[str], CacheLayerMixin], dict[str, int | None]]] = {
    "dynamic": (lambda codec: DynamicLayer(codec=codec), {}),
    "static": (lambda codec: StaticLayer(CAPACITY, codec=codec), {}),
    "sliding": (lambda codec: SlidingLayer(WINDOW, codec=codec), {"span": WINDOW}),
    "sliding-1": (lambda codec: SlidingLayer(1, codec=codec), {"span": 1}),
    "sinks": (lambda codec: SinkLayer(SINKS, WINDOW, codec=codec), {"span": SINKS + WINDOW, "sinks": SINKS}),
}


def round_trip(codec: GroupCodec | None, states: Tensor) -> Tensor:
    return states if codec is None else codec.decode(*codec.encode(states), states.dtype)


class Operations(RuleBasedStateMachine):
    """Two layers, one of the kind under test and a DynamicLayer: what the first rejects must not change the second."""

    kind = "dynamic"
    codec = "none"

    @initialize(padding=st.lists(st.integers(0, 9), min_size=1, max_size=3), seed=st.integers(0, 99))
    def begin(self, padding: list[int], seed: int) -> None:
        make, shape = KINDS[self.kind]
        self.generator = torch.Generator().manual_seed(seed)
        lists = [ReferenceLayer([[] for _ in padding], padding, **extra) for extra in (shape, {})]
        self.now = Pair(Cache([make(self.codec), DynamicLayer(codec=self.codec)], padding=padding), lists)
        self.forks: list[Pair] = []

    @property
    def batch(self) -> int:
        return len(self.now.lists[0].sequences)

    @rule(tokens=st.integers(1, 12))
    def append(self, tokens: int) -> None:
        full = self.kind == "static" and self.now.lists[0].seen + tokens > CAPACITY
        for layer, lists in enumerate(self.now.lists):
            states = torch.randn(self.batch, HEADS, tokens, SIZE, generator=self.generator)
            if full:
                with pytest.raises(CacheError, match=f"of {CAPACITY} used"):
                    self.now.cache.update(states, 2 * states, 0)
                continue
            sizes = self.now.cache.get_mask_sizes(tokens, layer)
            keys, values = self.now.cache.update(states, 2 * states, layer)
            expected = lists.append(list(round_trip(find_codec(self.codec), states).unbind(2)))
            static, filled = self.kind == "static" and layer == 0, expected.size(2)
            assert torch.equal(keys[:, :, :filled], expected)
            assert torch.equal(values[:, :, :filled], 2 * expected)
            assert not keys[:, :, filled:].any()
            assert sizes == ((CAPACITY, 0) if static else (filled, lists.seen - filled))
            assert keys.size(2) == values.size(2) == sizes[0]

    @rule(length=st.integers(-14, 40))
    def crop(self, length: int) -> None:
        first, _ = self.now.lists
        kept = min(first.seen, length) if length > 0 else max(0, first.seen + length)
        if first.can_crop(kept):
            self.now.cache.crop(length)
            for lists in self.now.lists:
                lists.crop(kept)
        else:
            with pytest.raises(CacheError, match="has evicted tokens"):
                self.now.cache.crop(length)

    @precondition(lambda self: self.now.lists[0].seen)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        sequences = st.integers(0, self.batch - 1)
        index = data.draw(st.lists(sequences, min_size=1, max_size=4))
        if self.kind == "static" and len(index) != self.batch:
            with pytest.raises(CacheError, match="fixed batch size"):
                self.now.cache.reorder(index)
            return
        self.now.cache.reorder(torch.tensor(index))
        for lists in self.now.lists:
            lists.gather(index)

    @precondition(lambda self: self.batch < 3 and self.kind != "static" and self.now.lists[0].seen)
    @rule()
    def repeat(self) -> None:
        self.now.cache.repeat(2)
        index = [row // 2 for row in range(2 * self.batch)]
        for lists in self.now.lists:
            lists.gather(index)

    @precondition(lambda self: self.kind != "sinks")
    @rule()
    def record(self) -> None:
        self.now.cache.activate_past_recording()
        self.now.lists[0].recording = True

    @rule()
    def reset(self) -> None:
        self.now.cache.reset()
        for lists in self.now.lists:
            lists.crop(0)

    @precondition(lambda self: len(self.forks) < 3)
    @rule()
    def fork(self) -> None:
        self.forks.append(self.now)
        self.now = Pair(self.now.cache.fork(), [lists.copy() for lists in self.now.lists])

    @precondition(lambda self: self.forks)
    @rule()
    def switch_to_a_fork(self) -> None:
        self.forks[0], self.now = self.now, self.forks[0]

    @invariant()
    def every_cache_has_the_expected_content(self) -> None:
        for pair in [*self.forks, self.now]:
            for layer, lists in zip(pair.cache.layers, pair.lists, strict=True):
                assert layer.get_seq_length() == lists.seen
                if lists.seen:
                    expected = lists.visible(lists.stored, lists.seen)
                    keys, values = layer.view().dense(torch.float32)
                    assert torch.equal(keys, expected)
                    assert torch.equal(values, 2 * expected)
                    assert layer.keys is not None
                    slots = CAPACITY if isinstance(layer, StaticLayer) else expected.size(2)
                    assert layer.keys.shape[:3] == (*expected.shape[:2], slots)


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_operations_in_any_order(kind: str, codec: str) -> None:
    machine = type("Machine", (Operations,), {"kind": kind, "codec": codec})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
