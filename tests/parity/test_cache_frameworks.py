"""A whole cache driven by NumPy and JAX: the kind that was given comes back, in place where it can."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from whimbrel.base.errors import CacheError
from whimbrel.cache import Cache, DynamicCache, DynamicLayer, SinkLayer, SlidingLayer, StaticLayer, register_foreign
from whimbrel.models import GPTConfig

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is loaded, which would take a GPU for itself

PIECES = [5, 1, 1, 9, 1, 30, 1, 1]
LAYERS: dict[str, Callable[[], Any]] = {
    "growing": DynamicLayer,
    "static": lambda: StaticLayer(64),
    "sliding": lambda: SlidingLayer(8),
    "sink": lambda: SinkLayer(2, 6),
    "int8": lambda: DynamicLayer(codec="int8"),
}


def cache_of(layer: str, **options: Any) -> Cache:
    """An empty cache for two rows; sinks are the first tokens of a row, so they must know of its padding."""
    padding = [0, 0] if layer == "sink" else None
    return Cache(layer_class_to_replicate=LAYERS[layer], padding=padding, **options)


@dataclass(frozen=True)
class Framework:
    """How a framework's tensors are made and looked into."""

    name: str
    make: Callable[[np.ndarray], Any]
    kind: type
    pointer: Callable[[Any], int]

    def numbers(self, tensor: Any) -> np.ndarray:
        assert isinstance(tensor, self.kind), f"{type(tensor)} is not of {self.name}"
        return np.asarray(tensor).astype(np.float32)


@pytest.fixture(params=["numpy", "numpy-bf16", "jax", "jax-bf16", "torch"])
def framework(request: pytest.FixtureRequest) -> Framework:
    if request.param.startswith("jax"):
        jax = pytest.importorskip("jax", reason="needs the package 'jax'")
        dtype = "bfloat16" if "bf16" in request.param else "float32"
        return Framework(
            request.param,
            lambda array: jax.numpy.asarray(array).astype(dtype),
            jax.Array,
            lambda tensor: tensor.unsafe_buffer_pointer(),
        )
    if request.param.startswith("numpy"):
        dtype = np.float32
        if "bf16" in request.param:
            dtype = pytest.importorskip("ml_dtypes", reason="needs the package 'ml_dtypes'").bfloat16
        return Framework(
            request.param, lambda array: array.astype(dtype), np.ndarray, lambda tensor: tensor.ctypes.data
        )
    return Framework("torch", torch.from_numpy, torch.Tensor, lambda tensor: tensor.data_ptr())


def states(tokens: int, batch: int = 2, heads: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values, bhsd, of numbers that bf16 has too."""
    random = np.random.default_rng(seed)
    keys, values = random.integers(-8, 8, (2, batch, heads, tokens, 4)).astype(np.float32) / 4
    return keys, values


def pieces() -> list[tuple[np.ndarray, np.ndarray]]:
    return [states(tokens, seed=seed) for seed, tokens in enumerate(PIECES)]


@pytest.mark.parametrize("layer", LAYERS)
def test_values_are_those_that_torch_tensors_give(framework: Framework, layer: str):
    cache, plain = (cache_of(layer) for _ in range(2))
    for keys, values in pieces():
        for index in (0, 1):
            got = cache.update(framework.make(keys), framework.make(values), index)
            expected = plain.update(torch.from_numpy(keys), torch.from_numpy(values), index)
            for ours, theirs in zip(got, expected, strict=True):
                assert np.allclose(framework.numbers(ours), theirs.numpy(), atol=0.05 if layer == "int8" else 0)
                assert ours.dtype == framework.make(keys).dtype


@pytest.mark.parametrize("layer", ["growing", "static", "sliding"])
def test_what_comes_back_lies_in_the_memory_of_the_cache(framework: Framework, layer: str):
    """One token after another: nothing is copied out, however long the text."""
    cache = cache_of(layer)
    held = cache.layers
    for seed in range(30):
        if seed == 10:
            cache.reorder([1, 0])
        keys, values = cache.update(*map(framework.make, states(1, seed=seed)), 0)
        for ours, theirs in ((keys, held[0].keys), (values, held[0].values)):
            if theirs.data_ptr() % 64 == 0 or "jax" not in framework.name:  # JAX copies what is not aligned
                assert framework.pointer(ours) == theirs.data_ptr()


def test_memory_goes_token_by_token_only_where_torch_does_not_read_it():
    keys, values = states(3)
    for make, token_major in ((torch.from_numpy, False), (np.asarray, True)):
        cache = DynamicCache()
        cache.update(make(keys), make(values), 0)
        for held in (cache.layers[0].keys, cache.layers[0].values):
            assert (held.stride(2) > held.stride(0)) == token_major
        cache.reset()
        cache.update(torch.from_numpy(keys), torch.from_numpy(values), 0)
        assert cache.layers[0].keys.stride(2) == 4


@dataclass
class Counted:
    """A tensor of a framework of our own that counts what crosses the border."""

    inside: torch.Tensor
    read = 0

    def to_torch(self) -> torch.Tensor:
        Counted.read += self.inside.numel()
        return self.inside

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Counted:
        return cls(tensor)


def test_only_new_tokens_are_read_and_what_is_handed_back_is_no_copy():
    Counted.read = 0
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    given = 0
    for keys, values in pieces():
        handed = cache.update(Counted(torch.from_numpy(keys)), Counted(torch.from_numpy(values)), 0)
        given += keys.size + values.size
        assert Counted.read == given
        for ours, held in zip(handed, (cache.layers[0].keys, cache.layers[0].values), strict=True):
            assert type(ours) is Counted
            assert ours.inside.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()


@pytest.mark.parametrize("layer", LAYERS)
def test_what_was_given_is_neither_written_to_nor_held(layer: str):
    cache, plain = (cache_of(layer) for _ in range(2))
    for keys, values in pieces():
        given = keys.copy(), values.copy()
        for array in given:
            array.flags.writeable = False
        cache.update(*given, 0)
        assert np.array_equal(given[0], keys)
        assert np.array_equal(given[1], values)
        for array in given:  # the caller uses the memory for something else
            array.flags.writeable = True
            array.fill(99)
        plain.update(torch.from_numpy(keys), torch.from_numpy(values), 0)
        assert torch.equal(cache.layers[0].keys, plain.layers[0].keys)
        assert torch.equal(cache.layers[0].values, plain.layers[0].values)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_copy_is_the_callers_own(framework: Framework, layer: str):
    cache = cache_of(layer, copy=True)
    first = cache.update(*map(framework.make, states(5)), 0)
    before = [framework.numbers(tensor).copy() for tensor in first]
    cache.reset()
    cache.update(*map(framework.make, states(5, seed=9)), 0)
    for tensor, numbers in zip(first, before, strict=True):
        assert np.array_equal(framework.numbers(tensor), numbers)
    held = cache.layers[0].keys
    handed, _ = cache.update(*map(framework.make, states(1)), 0)
    start = held.untyped_storage().data_ptr()
    assert not start <= framework.pointer(handed) < start + held.untyped_storage().nbytes()


@pytest.mark.parametrize("by_default", [False, True])
def test_an_update_may_choose_otherwise(by_default: bool):
    cache = Cache(layer_class_to_replicate=DynamicLayer, copy=by_default)
    keys, values = states(5)
    for choice in (None, True, False):
        handed, _ = cache.update(keys, values, 0, copy=choice)
        assert np.shares_memory(handed, cache.layers[0].keys.numpy()) != (by_default if choice is None else choice)


@pytest.mark.parametrize("out", [None, "bhsd", "bshd"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_are_turned_on_the_way(framework: Framework, layout: str, out: str | None):
    """bshd in and bhsd out is the reference contract; without `out_layout` both are the same."""

    def turned(array: np.ndarray, name: str) -> np.ndarray:
        return array.swapaxes(1, 2) if name == "bshd" else array

    cache = Cache(layer_class_to_replicate=DynamicLayer, layout=layout, out_layout=out)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    for keys, values in pieces():
        seen.append((keys, values))
        got = cache.update(framework.make(turned(keys, layout)), framework.make(turned(values, layout)), 0)
        for ours, parts in zip(got, zip(*seen, strict=True), strict=True):
            expected = turned(np.concatenate(parts, axis=2), out or layout)
            assert np.array_equal(framework.numbers(ours), expected)
    assert cache.layers[0].keys.shape == (2, 3, sum(PIECES), 4)


def test_keys_and_values_of_two_kinds_come_back_each_as_its_own():
    keys, values = states(3)
    cache = DynamicCache(GPTConfig(num_layers=2))
    ours, theirs = cache.update(keys, torch.from_numpy(values), 0)
    assert isinstance(ours, np.ndarray)
    assert isinstance(theirs, torch.Tensor)
    again, _ = cache.update(torch.from_numpy(keys), values, 0)
    assert torch.equal(again, torch.from_numpy(np.concatenate((keys, keys), axis=2)))


def test_a_refused_tensor_leaves_the_cache_as_it_was(framework: Framework):
    keys, values = states(3)
    given = framework.make(keys), framework.make(values)
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    with pytest.raises(CacheError):
        cache.update(given[0], values.tolist(), 0)
    assert cache.layers == []
    cache.update(*given, 0)
    before = cache.layers[0].keys.clone()
    for wrong in ((given[0], None), (keys.astype(">f4"), values.astype(">f4")), states(3)[:1] + (np.array("text"),)):
        with pytest.raises(CacheError):
            cache.update(*wrong, 0)
    for other in (np.float64, np.float16):  # NumPy's float64 comes of most sums: never promoted in silence
        with pytest.raises(CacheError, match="float"):
            cache.update(keys.astype(other), values.astype(other), 0)
    assert cache.get_seq_length() == 3
    assert torch.equal(cache.layers[0].keys, before)


def test_operations_in_between_keep_the_kind(framework: Framework):
    cache, plain = DynamicCache(), DynamicCache()
    for step, (keys, values) in enumerate(pieces()):
        got = cache.update(framework.make(keys), framework.make(values), 0)
        expected = plain.update(torch.from_numpy(keys), torch.from_numpy(values), 0)
        for ours, theirs in zip(got, expected, strict=True):
            assert np.array_equal(framework.numbers(ours), theirs.numpy())
        for held in (cache, plain):
            held.crop(-2 if step % 2 else 0)
            held.reorder([1, 0])
    other = cache.fork()
    other.update(*map(framework.make, states(1)), 0)
    assert cache.get_seq_length() == plain.get_seq_length() == other.get_seq_length() - 1


def test_a_registered_type_goes_through_the_whole_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("whimbrel.cache.foreign._REGISTERED", {})
    register_foreign(tuple, lambda rows: torch.tensor(rows), lambda tensor: tuple(tensor.tolist()))
    rows = ([[[1.0, 2.0]]],)
    cache = DynamicCache()
    cache.update(rows, rows, 0)
    keys, _ = cache.update(rows, rows, 0)
    assert keys == ([[[1.0, 2.0], [1.0, 2.0]]],)


@pytest.mark.gpu
def test_cupy_goes_through_the_whole_cache():
    cupy = pytest.importorskip("cupy", reason="needs the package 'cupy'")
    cache, plain = DynamicCache(), DynamicCache()
    for keys, values in pieces():
        got = cache.update(cupy.asarray(keys), cupy.asarray(values), 0)
        expected = plain.update(torch.from_numpy(keys), torch.from_numpy(values), 0)
        for ours, theirs, held in zip(got, expected, (cache.layers[0].keys, cache.layers[0].values), strict=True):
            assert isinstance(ours, cupy.ndarray)
            assert ours.data.ptr == held.data_ptr()
            assert np.array_equal(cupy.asnumpy(ours), theirs.numpy())
