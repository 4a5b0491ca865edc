"""Which device's kernels a tensor takes."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from whimbrel.ops import kernels_of
from whimbrel.train.memory_tracker import simulated_device


def test_a_tensor_takes_the_kernels_of_its_device_unless_it_stands_for_another():
    assert kernels_of(torch.ones(2)) == "cpu"
    assert kernels_of(torch.ones(2, device="meta")) == "meta"
    with FakeTensorMode():
        assert kernels_of(torch.ones(2)) == "cpu"
    with simulated_device("cuda"):
        assert kernels_of(torch.ones(2)) == "cuda"
        assert kernels_of(torch.nn.Parameter(torch.ones(2, 2)).split(1)[0]) == "cuda"
    assert kernels_of(torch.ones(2)) == "cpu"
