"""A complete cache fed with NumPy, JAX, CuPy or torch arrays returns the same type, without a copy where possible."""

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

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported, since it would preallocate GPU memory

CHUNKS = [5, 1, 1, 9, 1, 30, 1, 1]
LAYERS: dict[str, Callable[[], Any]] = {
    "growing": DynamicLayer,
    "static": lambda: StaticLayer(64),
    "sliding": lambda: SlidingLayer(8),
    "sink": lambda: SinkLayer(2, 6),
    "int8": lambda: DynamicLayer(codec="int8"),
}


def cache_of(layer: str, **options: Any) -> Cache:
    """An empty cache for two sequences. Sink layers need the padding, since sinks are the first real tokens."""
    padding = [0, 0] if layer == "sink" else None
    return Cache(layer_class_to_replicate=LAYERS[layer], padding=padding, **options)


@dataclass(frozen=True)
class Framework:
    """How to create and inspect the arrays of a framework."""

    name: str
    make: Callable[[np.ndarray], Any]
    kind: type
    pointer: Callable[[Any], int]

    def to_numpy(self, tensor: Any) -> np.ndarray:
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
    """Keys and values (batch, heads, tokens, head size) with values that are exact in bf16."""
    random = np.random.default_rng(seed)
    keys, values = random.integers(-8, 8, (2, batch, heads, tokens, 4)).astype(np.float32) / 4
    return keys, values


def chunks() -> list[tuple[np.ndarray, np.ndarray]]:
    return [states(tokens, seed=seed) for seed, tokens in enumerate(CHUNKS)]


@pytest.mark.parametrize("layer", LAYERS)
def test_values_match_torch_tensors(framework: Framework, layer: str):
    cache, reference = (cache_of(layer) for _ in range(2))
    for keys, values in chunks():
        for index in (0, 1):
            got = cache.update(framework.make(keys), framework.make(values), index)
            expected = reference.update(torch.from_numpy(keys), torch.from_numpy(values), index)
            for ours, theirs in zip(got, expected, strict=True):
                assert np.allclose(framework.to_numpy(ours), theirs.numpy(), atol=0.05 if layer == "int8" else 0)
                assert ours.dtype == framework.make(keys).dtype


@pytest.mark.parametrize("layer", ["growing", "static", "sliding"])
def test_returned_arrays_are_views_of_the_cache(framework: Framework, layer: str):
    """Decoding one token at a time copies nothing, regardless of the length."""
    cache = cache_of(layer)
    layers = cache.layers
    for seed in range(30):
        if seed == 10:
            cache.reorder([1, 0])
        keys, values = cache.update(*map(framework.make, states(1, seed=seed)), 0)
        for ours, theirs in ((keys, layers[0].keys), (values, layers[0].values)):
            if theirs.data_ptr() % 64 == 0 or "jax" not in framework.name:  # JAX copies unaligned buffers
                assert framework.pointer(ours) == theirs.data_ptr()


def test_token_major_layout_is_used_only_for_foreign_arrays():
    keys, values = states(3)
    for make, token_major in ((torch.from_numpy, False), (np.asarray, True)):
        cache = DynamicCache()
        cache.update(make(keys), make(values), 0)
        for stored in (cache.layers[0].keys, cache.layers[0].values):
            assert (stored.stride(2) > stored.stride(0)) == token_major
        cache.reset()
        cache.update(torch.from_numpy(keys), torch.from_numpy(values), 0)
        assert cache.layers[0].keys.stride(2) == 4


@dataclass
class CountingTensor:
    """A custom tensor type that counts the elements converted by `to_torch`."""

    tensor: torch.Tensor
    elements_read = 0

    def to_torch(self) -> torch.Tensor:
        CountingTensor.elements_read += self.tensor.numel()
        return self.tensor

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> CountingTensor:
        return cls(tensor)


def test_only_new_tokens_are_converted_and_views_are_returned():
    CountingTensor.elements_read = 0
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    count = 0
    for keys, values in chunks():
        returned = cache.update(CountingTensor(torch.from_numpy(keys)), CountingTensor(torch.from_numpy(values)), 0)
        count += keys.size + values.size
        assert CountingTensor.elements_read == count
        for ours, stored in zip(returned, (cache.layers[0].keys, cache.layers[0].values), strict=True):
            assert type(ours) is CountingTensor
            assert ours.tensor.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()


@pytest.mark.parametrize("layer", LAYERS)
def test_inputs_are_neither_modified_nor_referenced(layer: str):
    cache, reference = (cache_of(layer) for _ in range(2))
    for keys, values in chunks():
        inputs = keys.copy(), values.copy()
        for array in inputs:
            array.flags.writeable = False
        cache.update(*inputs, 0)
        assert np.array_equal(inputs[0], keys)
        assert np.array_equal(inputs[1], values)
        for array in inputs:  # the caller reuses the memory
            array.flags.writeable = True
            array.fill(99)
        reference.update(torch.from_numpy(keys), torch.from_numpy(values), 0)
        assert torch.equal(cache.layers[0].keys, reference.layers[0].keys)
        assert torch.equal(cache.layers[0].values, reference.layers[0].values)


@pytest.mark.parametrize("layer", LAYERS)
def test_copy_returns_independent_memory(framework: Framework, layer: str):
    cache = cache_of(layer, copy=True)
    first = cache.update(*map(framework.make, states(5)), 0)
    before = [framework.to_numpy(tensor).copy() for tensor in first]
    cache.reset()
    cache.update(*map(framework.make, states(5, seed=9)), 0)
    for tensor, expected in zip(first, before, strict=True):
        assert np.array_equal(framework.to_numpy(tensor), expected)
    stored = cache.layers[0].keys
    returned, _ = cache.update(*map(framework.make, states(1)), 0)
    start = stored.untyped_storage().data_ptr()
    assert not start <= framework.pointer(returned) < start + stored.untyped_storage().nbytes()


@pytest.mark.parametrize("by_default", [False, True])
def test_update_overrides_the_copy_default(by_default: bool):
    cache = Cache(layer_class_to_replicate=DynamicLayer, copy=by_default)
    keys, values = states(5)
    for choice in (None, True, False):
        returned, _ = cache.update(keys, values, 0, copy=choice)
        assert np.shares_memory(returned, cache.layers[0].keys.numpy()) != (by_default if choice is None else choice)


@pytest.mark.parametrize("out", [None, "bhsd", "bshd"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_are_converted(framework: Framework, layout: str, out: str | None):
    """Without `out_layout`, the output has the input layout."""

    def to_layout(array: np.ndarray, name: str) -> np.ndarray:
        return array.swapaxes(1, 2) if name == "bshd" else array

    cache = Cache(layer_class_to_replicate=DynamicLayer, layout=layout, out_layout=out)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    for keys, values in chunks():
        seen.append((keys, values))
        got = cache.update(framework.make(to_layout(keys, layout)), framework.make(to_layout(values, layout)), 0)
        for ours, parts in zip(got, zip(*seen, strict=True), strict=True):
            expected = to_layout(np.concatenate(parts, axis=2), out or layout)
            assert np.array_equal(framework.to_numpy(ours), expected)
    assert cache.layers[0].keys.shape == (2, 3, sum(CHUNKS), 4)


def test_keys_and_values_may_have_different_array_types():
    keys, values = states(3)
    cache = DynamicCache(GPTConfig(num_layers=2))
    ours, theirs = cache.update(keys, torch.from_numpy(values), 0)
    assert isinstance(ours, np.ndarray)
    assert isinstance(theirs, torch.Tensor)
    again, _ = cache.update(torch.from_numpy(keys), values, 0)
    assert torch.equal(again, torch.from_numpy(np.concatenate((keys, keys), axis=2)))


def test_a_rejected_tensor_leaves_the_cache_unchanged(framework: Framework):
    keys, values = states(3)
    inputs = framework.make(keys), framework.make(values)
    cache = Cache(layer_class_to_replicate=DynamicLayer)
    with pytest.raises(CacheError):
        cache.update(inputs[0], values.tolist(), 0)
    assert cache.layers == []
    cache.update(*inputs, 0)
    before = cache.layers[0].keys.clone()
    for wrong in ((inputs[0], None), (keys.astype(">f4"), values.astype(">f4")), states(3)[:1] + (np.array("text"),)):
        with pytest.raises(CacheError):
            cache.update(*wrong, 0)
    for other in (np.float64, np.float16):  # NumPy often promotes to float64; the cache must not do so silently
        with pytest.raises(CacheError, match="float"):
            cache.update(keys.astype(other), values.astype(other), 0)
    assert cache.get_seq_length() == 3
    assert torch.equal(cache.layers[0].keys, before)


def test_crop_and_reorder_preserve_the_array_type(framework: Framework):
    cache, reference = DynamicCache(), DynamicCache()
    for step, (keys, values) in enumerate(chunks()):
        got = cache.update(framework.make(keys), framework.make(values), 0)
        expected = reference.update(torch.from_numpy(keys), torch.from_numpy(values), 0)
        for ours, theirs in zip(got, expected, strict=True):
            assert np.array_equal(framework.to_numpy(ours), theirs.numpy())
        for target in (cache, reference):
            target.crop(-2 if step % 2 else 0)
            target.reorder([1, 0])
    other = cache.fork()
    other.update(*map(framework.make, states(1)), 0)
    assert cache.get_seq_length() == reference.get_seq_length() == other.get_seq_length() - 1


def test_registered_types_work_with_a_complete_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("whimbrel.cache.foreign._REGISTERED", {})
    register_foreign(tuple, lambda rows: torch.tensor(rows), lambda tensor: tuple(tensor.tolist()))
    rows = ([[[1.0, 2.0]]],)
    cache = DynamicCache()
    cache.update(rows, rows, 0)
    keys, _ = cache.update(rows, rows, 0)
    assert keys == ([[[1.0, 2.0], [1.0, 2.0]]],)


@pytest.mark.gpu
def test_cupy_works_with_a_complete_cache():
    cupy = pytest.importorskip("cupy", reason="needs the package 'cupy'")
    cache, reference = DynamicCache(), DynamicCache()
    for keys, values in chunks():
        got = cache.update(cupy.asarray(keys), cupy.asarray(values), 0)
        expected = reference.update(torch.from_numpy(keys), torch.from_numpy(values), 0)
        for ours, theirs, stored in zip(got, expected, (cache.layers[0].keys, cache.layers[0].values), strict=True):
            assert isinstance(ours, cupy.ndarray)
            assert ours.data.ptr == stored.data_ptr()
            assert np.array_equal(cupy.asnumpy(ours), theirs.numpy())
