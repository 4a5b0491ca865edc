"""Invalid llama2.c files, and quantization; tests/parity compares the models of valid ones."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from whimbrel.base.errors import CheckpointError
from whimbrel.model_io import load_model, weight_state_dict
from whimbrel.precision import quantize_


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" * 10, "too short for a llama2.c model"),
        (struct.pack("<7i", 0x616B3432, 1, 0, 0, 0, 0, 0), "expected llama2.c version 0, got version 1"),
        (struct.pack("<7i", 64, 172, 4, 5, 5, 512, 128), "not a llama2.c model: expected embd_size to be a multiple"),
        (struct.pack("<7i", 64, 172, 0, 4, 4, 512, 128), "num_layers >= 1"),
        (struct.pack("<7i", 64, 172, 4, 4, 4, 512, 128) + b"\0" * 400, "expected 932124 bytes .* got 428"),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, content, message):
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_weights_are_quantized_after_loading(tmp_path: Path):
    path = tmp_path / "model.bin"
    sizes = (2 * 50 * 64, 64, 4 * 64 * 64, 64, 3 * 128 * 64, 64, 2 * 8 * 8)
    numbers = np.random.default_rng(0).standard_normal(sum(sizes), dtype=np.float32)
    path.write_bytes(struct.pack("<7i", 64, 128, 1, 4, 4, -50, 8) + numbers.tobytes())
    expected_model, loaded = load_model(path), load_model(path, quantize="int8")
    quantize_(expected_model, "int8")
    expected = weight_state_dict(expected_model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weight_state_dict(loaded).items())
    assert sum(name.endswith(".codes") for name in expected) == 4
