"""State round-trips through tensors and JSON exactly; unsupported values are rejected with their path."""

from __future__ import annotations

import collections
import enum
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import pack, read_tensors, serialization, unpack, write_tensors
from whimbrel.checkpoint.serialization import TensorEntry, write_tensor_file


def round_trip(state: Any, folder: Path) -> Any:
    tensors, tree = pack(state)
    write_tensors(folder / "x.safetensors", tensors)
    return unpack(read_tensors(folder / "x.safetensors"), json.loads(json.dumps(tree)))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(plain)
def test_nested_state_round_trips_with_its_types(state: Any) -> None:
    tensors, tree = pack(state)
    back = unpack(tensors, json.loads(json.dumps(tree)))
    assert back == state
    assert repr(back) == repr(state)  # 1 is not True, 0.0 is not -0.0


def test_nan_infinity_and_large_integers_round_trip() -> None:
    back = unpack({}, json.loads(json.dumps(pack([math.inf, -math.inf, math.nan, -0.0, 5e-324])[1])))
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])
    assert math.copysign(1, back[3]) == -1
    assert back[4] == 5e-324


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)  # fmt: skip
def test_every_dtype_and_shape_round_trips_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    matrix = torch.randint(0, 2, (3, 5)).to(dtype)
    state = {
        "matrix": matrix,
        "column": matrix.T[1:],
        "number": matrix[0, 0],
        "none": matrix[:0],
        "byte": torch.ones(1),
    }
    back = round_trip(state, tmp_path)
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).contiguous().view(torch.uint8))


def test_nan_payload_is_preserved(tmp_path: Path) -> None:
    odd = torch.tensor([0x7FC00001, 0x80000000 - 2**32], dtype=torch.int32).view(torch.float32)
    back = round_trip({"odd": odd}, tmp_path)["odd"]
    assert torch.equal(back.view(torch.int32), odd.view(torch.int32))


def test_optimizer_state_round_trips(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    state, back = optimizer.state_dict(), round_trip(optimizer.state_dict(), tmp_path)
    assert list(back["state"]) == [0, 1]
    assert back["param_groups"] == state["param_groups"]
    for index, values in state["state"].items():
        for name, tensor in values.items():
            assert torch.equal(back["state"][index][name], tensor)


def test_shared_tensor_is_stored_once(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0))
    back = round_trip({"embedding": weight, "head": weight.data, "part": weight[2:]}, tmp_path)
    assert set(load_file(tmp_path / "x.safetensors")) == {"embedding", "part"}
    assert back["embedding"] is back["head"]
    assert torch.equal(back["part"], torch.arange(2.0, 6.0))


def test_colliding_paths_stay_distinct(tmp_path: Path) -> None:
    one, two, three, four = (torch.tensor(float(i)) for i in range(4))
    back = round_trip({"a/b": one, "a": {"b": two}, 1: three, "1": four}, tmp_path)
    assert (back["a/b"], back["a"]["b"], back[1], back["1"]) == (0.0, 1.0, 2.0, 3.0)
    empty = round_trip([torch.zeros(0), torch.zeros(0)], tmp_path)
    assert [tensor.shape for tensor in empty] == [(0,), (0,)]


def test_numpy_scalars_become_python_numbers() -> None:
    _, tree = pack([np.float32(0.5), np.int64(3), np.bool_(True), np.float64(0.1)])
    assert [type(value) for value in tree["list"]] == [float, int, bool, float]


class Color(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "odd",
    [
        object(), {1}, Color.RED, Point(1, 2), 1j, np.arange(3), np.longdouble(1), torch.Size([1]),
        torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse(), torch.empty(2, device="meta"),
    ],
)  # fmt: skip
def test_unsupported_types_are_rejected_with_their_path(odd: Any) -> None:
    with pytest.raises(CheckpointError, match="expected .* got .* at 'a/0/b'") as caught:
        pack({"a": [{"b": odd}]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [(1, 2), None, True, 1.5])
def test_keys_must_be_str_or_int(key: Any) -> None:
    with pytest.raises(CheckpointError, match="expected state keys of type str or int"):
        pack({key: 1})


def test_unknown_node_type_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="unknown node type 'set'"):
        unpack({}, {"set": []})


def test_safetensors_reads_our_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "WRITE_CHUNK", 3)
    entries = [
        TensorEntry("long", "int64", (2,), 16),
        TensorEntry("none", "float32", (0, 4), 0),
        TensorEntry("one", "uint8", (), 1),
    ]
    contents = [memoryview(bytes([1, *[0] * 7, 2, *[0] * 7])), memoryview(b""), memoryview(b"\x07")]
    write_tensor_file(tmp_path / "x.safetensors", entries, contents, {"format": "pt"})
    found = load_file(tmp_path / "x.safetensors")
    assert found["long"].tolist() == [1, 2]
    assert found["none"].shape == (0, 4)
    assert found["one"].shape == ()
    assert int(found["one"]) == 7
    raw = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "pt"}


def test_tensor_contents_are_read_lazily(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    sizes = []

    def contents():
        for _ in range(3):
            sizes.append(path.stat().st_size)
            yield memoryview(bytes(100))

    write_tensor_file(path, [TensorEntry(name, "uint8", (100,), 100) for name in "abc"], contents())
    assert [size - sizes[0] for size in sizes] == [0, 100, 200]


def test_wrong_number_of_bytes_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 4 bytes for 'a', got 3"):
        write_tensor_file(tmp_path / "x", [TensorEntry("a", "float32", (1,), 4)], [memoryview(b"abc")])
