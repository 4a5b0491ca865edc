"""`TokenDataLoader`: order, resume, shuffling, packing and document masks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data import TokenDataLoader, document_ids, write_shard
from whimbrel.data.loader import derive_seed
from whimbrel.data.prepare import prepare
from whimbrel.tokenization import load_tokenizer

EOT = 50256


LENGTHS = (701, 5, 1023, 300)


"""Token counts of the four shards; not multiples of any batch or sequence length in the tests."""


def tokens_of_shards(dtype: type = np.uint16) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    stream = random.integers(0, 50256, sum(LENGTHS)).astype(dtype)
    stream[random.integers(0, len(stream), 60)] = EOT
    stream[0] = EOT
    return np.split(stream, np.cumsum(LENGTHS)[:-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    for index, tokens in enumerate(tokens_of_shards()):
        write_shard(path / f"x_train_{index:06d}.bin", tokens)
    write_shard(path / "x_val_000000.bin", np.array([EOT, 1, 2, 3, 4], dtype=np.uint16))
    (path / "notes.txt").write_text("not a shard")
    return path


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    return np.concatenate(tokens_of_shards()).astype(np.int64)


def read_rows(folder: Path, rows: int, B: int, world_size: int, T: int = 16, **options: object) -> np.ndarray:
    """The first `rows` rows of the global order, as (row, x or y, T), read by every rank in turn."""
    ranks = [TokenDataLoader(folder, B, T, rank=r, world_size=world_size, **options) for r in range(world_size)]
    read: list[torch.Tensor] = []
    while len(read) < rows:
        for loader in ranks:
            x, y = loader.next_batch()
            assert x.shape == y.shape == (B, T)
            assert x.dtype == y.dtype == torch.int64
            read += torch.stack((x, y), dim=1)
    return torch.stack(read[:rows]).numpy()


def test_stream_is_cyclic_and_targets_are_shifted_by_one(folder: Path, stream: np.ndarray) -> None:
    rows = read_rows(folder, 400, B=4, world_size=1)
    expected = np.resize(stream, 400 * 16 + 1)
    np.testing.assert_array_equal(rows[:, 0].reshape(-1), expected[:-1])
    np.testing.assert_array_equal(rows[:, 1].reshape(-1), expected[1:])
    assert rows[0, 0, 0] == EOT


ORDERS = st.sampled_from(
    [{}, {"seed": 1}, {"seed": 1, "block": 48}, {"documents": "pack"}, {"documents": "pack", "seed": 5}]
)


@settings(max_examples=60, deadline=None)
@given(B=st.integers(1, 32), world_size=st.sampled_from([1, 2, 3]), order=ORDERS)
def test_order_does_not_depend_on_batch_size_or_ranks(folder: Path, B: int, world_size: int, order: dict) -> None:
    one_by_one = read_rows(folder, 150, B=1, world_size=1, **order)
    np.testing.assert_array_equal(read_rows(folder, 150, B, world_size, **order), one_by_one)


@settings(max_examples=40, deadline=None)
@given(steps=st.integers(0, 60), B=st.sampled_from([1, 2, 5]), after=st.sampled_from([1, 3, 4]), order=ORDERS)
def test_resume_continues_with_another_batch_size_and_number_of_ranks(
    folder: Path, steps: int, B: int, after: int, order: dict
) -> None:
    """Also with another batch size and number of ranks."""
    first = TokenDataLoader(folder, B, 16, **order)
    for _ in range(steps):
        first.next_batch()
    state = json.loads(json.dumps(first.state_dict()))
    second = TokenDataLoader(folder, after, 16, world_size=2, rank=1, **order)
    second.load_state_dict(state)
    x, y = second.next_batch()
    wanted = read_rows(folder, steps * B + 2 * after, B=1, world_size=1, **order)[-after:]
    np.testing.assert_array_equal(torch.stack((x, y), dim=1).numpy(), wanted)


@settings(deadline=None)
@given(position=st.integers(0, 10_000))
def test_resume_works_at_any_position(folder: Path, stream: np.ndarray, position: int) -> None:
    loader = TokenDataLoader(folder, 2, 8)
    loader.load_state_dict({**loader.state_dict(), "position": position})
    x, y = loader.next_batch()
    expected = np.resize(stream, position + 17)[position:]
    np.testing.assert_array_equal(x.numpy().reshape(-1), expected[:-1])
    np.testing.assert_array_equal(y.numpy().reshape(-1), expected[1:])
    assert loader.epoch == (position + 16) // len(stream)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), block=st.integers(1, 3000))
def test_shuffled_epoch_contains_every_token_once(folder: Path, stream: np.ndarray, seed: int, block: int) -> None:
    loader = TokenDataLoader(folder, 1, len(stream), seed=seed, block=block)
    first, second = (loader.next_batch() for _ in range(2))
    for x, y in (first, second):
        pairs = np.stack((x[0].numpy(), y[0].numpy()), axis=1)
        wanted = np.stack((stream, np.roll(stream, -1)), axis=1)
        np.testing.assert_array_equal(pairs[np.lexsort(pairs.T)], wanted[np.lexsort(wanted.T)])


def test_shuffle_depends_on_seed_and_epoch(folder: Path, stream: np.ndarray) -> None:
    loader = TokenDataLoader(folder, 1, len(stream), seed=1, block=8)
    first, second = loader.next_batch()[0], loader.next_batch()[0]
    other = TokenDataLoader(folder, 1, len(stream), seed=2, block=8).next_batch()[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_new_epoch_is_counted_and_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = TokenDataLoader(folder, 1, 1015)
    with caplog.at_level(logging.INFO, "whimbrel"):
        loader.next_batch()
        assert (loader.epoch, "Epoch" in caplog.text) == (0, False)
        loader.next_batch()
    assert loader.epoch == 1
    assert "Epoch 2 (2,029 training tokens)" in caplog.text
    loader.reset()
    assert (loader.position, loader.epoch) == (0, 0)
    assert loader.next_batch()[0][0, 0] == EOT


def test_packed_sequences_contain_complete_documents(folder: Path, stream: np.ndarray) -> None:
    T = 64
    loader = TokenDataLoader(folder, 1, T, documents="pack")
    read, edges = [], {*np.flatnonzero(stream == EOT).tolist(), len(stream)}
    while loader.epoch == 0:
        start = loader.position
        x, y = (side[0].numpy() for side in loader.next_batch())
        length = int((y != -100).sum())
        end = start + length
        assert (y[length:] == -100).all()
        assert (x[length:] == EOT).all()
        np.testing.assert_array_equal(x[:length], stream[start:end])
        np.testing.assert_array_equal(y[:length], np.resize(stream, end + 1)[start + 1 :])
        assert end in edges or length == T, "a row ends where a document does, or is full"
        nearest = min(edge for edge in edges if edge > end) if end < len(stream) else None
        assert end not in edges or nearest is None or nearest - start > T, "the next document would have fitted"
        read.append(length)
    assert sum(read) == len(stream)


def test_document_ids_increase_at_end_of_text() -> None:
    x = torch.tensor([[5, EOT, 1, EOT, EOT, 2], [EOT, 1, 2, 3, 4, 5]])
    assert document_ids(x, EOT).tolist() == [[0, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1]]


def test_document_ids_for_the_attention_mask(folder: Path) -> None:
    joined, masked = TokenDataLoader(folder, 2, 64), TokenDataLoader(folder, 2, 64, documents="mask")
    x, _ = masked.next_batch()
    assert torch.equal(x, joined.next_batch()[0])
    assert joined.document_ids(x) is None
    assert torch.equal(masked.document_ids(x), document_ids(x, EOT))


def test_uint32_tokens_keep_all_bits(tmp_path: Path) -> None:
    tokens = np.array([128000, 2**31 + 5, 7, 2**32 - 1], dtype=np.uint32)
    write_shard(tmp_path / "llama_000000.bin", tokens)
    x, _ = TokenDataLoader(tmp_path, 1, 4).next_batch()
    assert x[0].tolist() == tokens.tolist()


def test_val_split_is_a_separate_stream(folder: Path) -> None:
    x, y = TokenDataLoader(folder, 1, 5, split="val").next_batch()
    assert (x[0].tolist(), y[0].tolist()) == ([EOT, 1, 2, 3, 4], [1, 2, 3, 4, EOT])


@pytest.mark.parametrize(
    "options",
    [
        {"B": 0},
        {"T": 0},
        {"block": -1},
        {"block": 0},
        {"rank": 2, "world_size": 2},
        {"documents": "split"},
        {"documents": "pack", "block": 8},
    ],
)
def test_invalid_arguments_are_rejected(folder: Path, options: dict) -> None:
    with pytest.raises(ConfigError):
        TokenDataLoader(folder, **{"B": 1, "T": 4, **options})


def test_position_of_another_order_is_rejected(folder: Path) -> None:
    state = TokenDataLoader(folder, 1, 16, seed=1).state_dict()
    for other in ({}, {"seed": 2}, {"seed": 1, "block": 32}, {"split": "val", "seed": 1}, {"documents": "pack"}):
        with pytest.raises(DataError, match="saved position has"):
            TokenDataLoader(folder, 1, 16, **other).load_state_dict(state)


MEMORY = """
import sys
from pathlib import Path
import numpy as np, torch
from whimbrel.data import TokenDataLoader

def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024

def read(folder, options):
    loader = TokenDataLoader(folder, 32, 1024, **options)
    for _ in range(300):
        loader.next_batch()
    return loader

small, large = sys.argv[1:]
read(small, {})
for options in ({}, {"seed": 1}, {"documents": "pack"}):
    before = anonymous()
    loader = read(large, options)
    print(anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")
def test_large_shards_use_less_than_50_mb_of_memory(folder: Path, tmp_path: Path) -> None:
    tokens = np.tile(np.arange(1000, dtype=np.uint16), 100_000)
    tokens[::1000] = EOT
    write_shard(tmp_path / "x_train_000000.bin", tokens)
    command = [sys.executable, "-c", MEMORY, str(folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    added = [float(line) for line in done.stdout.split()]
    assert len(added) == 3
    assert max(added) < 50


@pytest.mark.gpu
@pytest.mark.parametrize("order", [{}, {"seed": 4}, {"documents": "pack"}])
def test_cuda_batches_equal_cpu_batches(folder: Path, order: dict) -> None:
    """Also after moving the position, which must discard prefetched batches."""
    cpu, cuda = TokenDataLoader(folder, 3, 16, **order), TokenDataLoader(folder, 3, 16, device="cuda", **order)
    kept = []
    for step in range(200):
        if step == 50:
            cpu.reset()
            cuda.reset()
        kept.append((cpu.next_batch(), cuda.next_batch()))
    for ours, theirs in kept:
        for a, b in zip(ours, theirs, strict=True):
            assert b.is_cuda
            assert torch.equal(a, b.cpu())


def test_split_that_starts_within_a_document_is_read(tmp_path: Path) -> None:
    tokens = np.array([7, 8, EOT, 1, 2, 3, EOT, 4], dtype=np.uint16)
    write_shard(tmp_path / "x_train_000001.bin", tokens)
    x, _ = TokenDataLoader(tmp_path, 1, 8).next_batch()
    assert x[0].tolist() == tokens.tolist()
    packed = TokenDataLoader(tmp_path, 3, 4, documents="pack")
    x, y = packed.next_batch()
    assert x.tolist() == [[7, 8, EOT, EOT], [EOT, 1, 2, 3], [EOT, 4, EOT, EOT]]
    assert (y != -100).sum(1).tolist() == [2, 4, 2]


def test_end_of_text_token_can_be_overridden(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shard(tmp_path / "x_train.bin", np.array([9, 1, 2, 9, 3], dtype=np.uint16))
    loader = TokenDataLoader(tmp_path, 1, 5, documents="mask", eot_id=9)
    x, _ = loader.next_batch()
    assert loader.document_ids(x).tolist() == [[1, 1, 1, 2, 2]]
    assert "no end-of-text token" not in caplog.text
    TokenDataLoader(tmp_path, 1, 5, documents="mask")
    assert "no end-of-text token (50256)" in caplog.text
    with pytest.raises(DataError, match="set data.eot_id"):
        TokenDataLoader(tmp_path, 1, 5, documents="pack")


def test_derived_seeds_differ_by_name_and_are_stable() -> None:
    assert derive_seed(1, "order", 0) == derive_seed(1, "order", 0)
    assert len({derive_seed(1), derive_seed(2), derive_seed(1, "order"), derive_seed(1, "order", 1)}) == 4
    assert 0 <= derive_seed(7, "x") < 2**63


def test_verify_detects_a_changed_token_on_first_read(corpus, texts: list[str], tmp_path: Path) -> None:
    source = corpus.write(tmp_path / "a.jsonl", texts)
    prepare([str(source)], tmp_path / "out", load_tokenizer("gpt2"), name="a", shard_size=5000)
    second = sorted((tmp_path / "out").glob("*.bin"))[1]
    raw = bytearray(second.read_bytes())
    raw[-2] ^= 1
    second.write_bytes(raw)
    TokenDataLoader(tmp_path / "out", 1, 8000).next_batch()
    loader = TokenDataLoader(tmp_path / "out", 1, 4000, verify=True)
    loader.next_batch()
    with pytest.raises(DataError, match=rf"{second.name} has changed"):
        loader.next_batch()
