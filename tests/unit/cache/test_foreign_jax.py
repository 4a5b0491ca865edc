"""JAX arrays on the CPU: conversion to torch and back."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from whimbrel.base.errors import CacheError
from whimbrel.cache.foreign import to_torch

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported, since it would preallocate GPU memory
jax = pytest.importorskip("jax", reason="needs the package 'jax'")
jnp = pytest.importorskip("jax.numpy", reason="needs the package 'jax'")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_an_array_is_read_and_returned_without_a_copy_if_contiguous(dtype: str):
    array = jnp.linspace(-2, 2, 24).reshape(2, 3, 4).astype(dtype)
    read, back = to_torch(array)
    assert read.dtype is getattr(torch, dtype)
    assert read.data_ptr() == array.unsafe_buffer_pointer()
    assert np.array_equal(read.float().numpy(), np.asarray(array.astype(jnp.float32)))
    ours = torch.linspace(0, 1, 48).to(read.dtype).view(2, 6, 4)
    returned = back(ours)
    assert isinstance(returned, jax.Array)
    assert returned.dtype == array.dtype
    assert returned.unsafe_buffer_pointer() == ours.data_ptr()
    assert np.array_equal(np.asarray(returned.astype(jnp.float32)), ours.float().numpy())


def test_a_transpose_is_returned_without_a_copy_and_other_strides_as_a_copy():
    _, back = to_torch(jnp.ones(3))
    transposed = torch.randn(8, 2, 3, 4).permute(1, 2, 0, 3)
    strided = torch.randn(2, 3, 8, 4)[:, :, :5]
    assert back(transposed).unsafe_buffer_pointer() == transposed.data_ptr()
    assert np.array_equal(np.asarray(jnp.tanh(back(transposed)) * 0 + back(transposed)), transposed.numpy())
    assert back(strided).unsafe_buffer_pointer() != strided.data_ptr()
    assert np.array_equal(np.asarray(back(strided)), strided.numpy())


def test_an_array_still_being_computed_is_awaited():
    @jax.jit
    def slow(states):
        return jax.lax.fori_loop(0, 30, lambda _, held: (held @ held) / jnp.linalg.norm(held), states)

    states = slow(jnp.eye(200) * 3 + 1)
    read, _ = to_torch(states)
    assert np.array_equal(read.clone().numpy(), np.asarray(states))


def test_a_traced_array_is_rejected_in_one_line():
    with pytest.raises(CacheError, match="expected a tensor, got .*Tracer") as refused:
        jax.jit(lambda states: to_torch(states)[0])(jnp.ones(2))
    assert "\n" not in str(refused.value)
