"""Micro-batches of datasets: order, length, and positions that restore the exact batch."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
)

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data import TokenDataLoader
from whimbrel.models import GPT, GPTConfig
from whimbrel.train import TrainerCallback
from whimbrel.train.batches import DataLoaderBatches, DatasetBatches, TokenBatches, collate, make_batches, token_count
from whimbrel.train.config import LoaderConfig

Make = Callable[..., Any]

CPU = torch.device("cpu")
KEYWORDS: dict[str, Any] = {"collate": collate, "seed": 0, "shuffle": False, "loader": LoaderConfig()}


class Counting(IterableDataset[dict[str, int]]):
    """The numbers up to `size`, in order, as an iterable without state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter({"x": i} for i in range(self.size))


class Sized(Counting):
    """An iterable dataset with a length."""

    def __len__(self) -> int:
        return self.size


class Plain:
    """Has only __iter__."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter({"x": i} for i in range(self.size))


class Stateful(Plain):
    """An iterable with state_dict and load_state_dict."""

    start = done = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        first, self.start = self.start, 0
        for i in range(first, self.size):
            self.done = i + 1
            yield {"x": i}

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["done"]


def noise() -> float:
    """A value that depends on the RNG state of Python, NumPy and torch."""
    return random.random() + np.random.rand() + float(torch.rand(()))


class Augmented(Dataset[dict[str, Any]]):
    """Examples with random augmentation."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.size:
            raise IndexError
        return {"x": index + noise()}


class AugmentedStream(IterableDataset[dict[str, Any]]):
    """The same as an iterable dataset, with a random start."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start = random.random()
        return iter({"x": start + i + noise()} for i in range(self.size))


def noisy_collate(examples: list[Any]) -> Any:
    return {key: value + noise() for key, value in collate(examples).items()}


def listed(size: int) -> list[dict[str, int]]:
    return [{"x": i} for i in range(size)]


def make(
    dataset: Any, batch_size: int = 4, *, shuffle: bool = True, join: Any = collate, **loader: Any
) -> DatasetBatches:
    return DatasetBatches(
        dataset, batch_size, CPU, collate=join, seed=7, shuffle=shuffle, loader=LoaderConfig(**loader)
    )


def streamed(size: int) -> Any:
    return datasets.Dataset.from_list([{"x": i, "y": 0} for i in range(size)]).to_iterable_dataset()


def rng_states() -> tuple[Any, ...]:
    """The global RNG states."""
    numpy = np.random.get_state(legacy=False)
    return random.getstate(), numpy["state"]["key"].tolist(), numpy["state"]["pos"], torch.get_rng_state().tolist()


def take(batches: DatasetBatches, count: int, epoch: int = 0) -> list[tuple[int, list[int]]]:
    """(epoch, values) of the next batches, over as many epochs as needed."""
    found = []
    batches.start_epoch(epoch)
    while len(found) < count:
        batch = batches.next_batch()
        if batch is None:
            epoch += 1
            batches.start_epoch(epoch)
        else:
            found.append((epoch, batch["x"].tolist()))
    return found


def flat(found: list[tuple[int, list[int]]], epoch: int) -> list[int]:
    return [value for number, values in found if number == epoch for value in values]


SOURCES = {
    "list": lambda: listed(10),
    "iterable": lambda: Counting(10),
    "sized": lambda: Sized(10),
    "plain": lambda: Plain(10),
    "own state": lambda: Stateful(10),
    "augmented": lambda: Augmented(10),
    "augmented stream": lambda: AugmentedStream(10),
    "datasets": lambda: datasets.Dataset.from_list(listed(10)),
    "stateful": lambda: streamed(10).remove_columns(["y"]),
    "shuffled": lambda: streamed(10).shuffle(seed=0, buffer_size=5),
    "shuffled, then mapped": lambda: streamed(10).shuffle(seed=0, buffer_size=5).map(lambda row: row),
    "noise in a map": lambda: streamed(10).map(lambda row: {"x": row["x"] + noise()}),
    "noise in a batched map": lambda: streamed(10).map(
        lambda rows: {"x": [x + noise() for x in rows["x"]]}, batched=True, batch_size=3
    ),
}
NOISY = ("augmented", "augmented stream", "noise in a map", "noise in a batched map")
CASES = [
    *((name, 0, join) for name in SOURCES for join in (collate, noisy_collate)),
    *(("list", 1, collate), ("plain", 1, collate), ("augmented", 1, noisy_collate), ("augmented stream", 1, collate)),
]


@pytest.mark.parametrize(("name", "workers", "join"), CASES)
def test_a_saved_position_restores_the_exact_batch(name: str, workers: int, join: Any) -> None:
    """At every batch of more than two epochs, independently of the global generators."""
    random.seed(1)
    torch.manual_seed(1)
    before = rng_states()
    uninterrupted = take(make(SOURCES[name](), join=join, workers=workers), 8)
    assert rng_states() == before
    noisy = name in NOISY or join is noisy_collate
    assert len({value for _, values in uninterrupted for value in values}) == (28 if noisy else 10)
    random.seed(2)
    torch.manual_seed(2)
    for stop in range(8):
        first = make(SOURCES[name](), join=join, workers=workers)
        first_batches = take(first, stop)
        state = first.state_dict()
        second = make(SOURCES[name](), join=join, workers=workers)
        second.load_state_dict(state)
        assert first_batches + take(second, 8 - stop, epoch=state["epoch"]) == uninterrupted


@pytest.mark.parametrize("name", ["list", "plain"])
def test_workers_stop_with_their_batches(name: str) -> None:
    """Without a garbage collection, in which torch could not tell them to stop."""
    gc.disable()
    try:
        batches = make(SOURCES[name](), workers=1)
        take(batches, 1)
        workers = multiprocessing.active_children()
        del batches
        assert workers
        assert not set(workers) & set(multiprocessing.active_children())
    finally:
        gc.enable()


def test_workers_do_not_change_batches() -> None:
    batches = [take(make(Augmented(10), join=noisy_collate, workers=workers), 5) for workers in (0, 2)]
    assert batches[0] == batches[1]


def test_the_dataset_state_is_used_if_it_is_exact() -> None:
    for name, exact in (("stateful", True), ("own state", True), ("shuffled", False), ("plain", False)):
        batches = make(SOURCES[name]())
        take(batches, 2)
        assert ("dataset" in batches.state_dict()) == exact, name


def test_first_example_does_not_change_random_numbers() -> None:
    before = rng_states()
    batches = make(Augmented(3))
    assert batches.first_example() == batches.first_example()
    assert rng_states() == before
    assert [make(SOURCES[name]()).first_example() for name in ("iterable", "sized", "plain", "stateful")] == [None] * 4


@pytest.mark.parametrize("workers", [0, 1])
def test_masked_tokens_are_the_same_after_a_resume(args: Make, fit: Make, tmp_path: Path, workers: int) -> None:
    """Losses are bit-identical with the random masks of transformers' MLM collator."""
    names = {f"w{i}": i for i in range(60)} | {"[PAD]": 60, "[MASK]": 61, "[UNK]": 62}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="[UNK]")),
        pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]",
    )  # fmt: skip
    ids = torch.randint(0, 60, (32, 16), generator=torch.Generator().manual_seed(0))
    shape = BertConfig(
        vocab_size=63, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip

    def run(resume: Any = None, **changes: Any) -> list[str]:
        torch.manual_seed(0)
        settings = args(dataloader_num_workers=workers, save_strategy="steps", save_steps=3, **changes)
        _, losses = fit(
            settings, BertForMaskedLM(shape), train_dataset=[{"input_ids": row} for row in ids.tolist()],
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3), resume=resume,
        )  # fmt: skip
        return losses.hex

    uninterrupted = run()
    assert run(resume=str(tmp_path / "run/checkpoints/step-00000003")) == uninterrupted[3:]
    assert run(output_dir=str(tmp_path / "other")) == uninterrupted


@pytest.mark.parametrize("kind", [Counting, Sized, Plain])
def test_every_kind_of_iterable_can_be_trained_on(args: Make, fit: Make, data: Make, kind: Any) -> None:
    rows = data()

    class Rows(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return iter(rows)

    trainer, losses = fit(args(), train_dataset=Rows(24), eval_dataset=Rows(24))
    assert trainer.state.global_step == len(losses.values) == 8
    assert trainer.evaluate()["eval_loss"] > 0
    if kind is Sized:
        fit(args(max_steps=-1, num_train_epochs=2), train_dataset=Rows(24))


def test_iterators_raise_an_error() -> None:
    for once in ((row for row in listed(3)), iter(listed(3)), map(dict, listed(3))):
        with pytest.raises(ConfigError, match="iterated in every epoch"):
            make(once)


def test_a_token_stream_ends_its_epochs(shards: Path) -> None:
    loader = TokenDataLoader(shards, B=4, T=32, split="val")
    batches = TokenBatches(loader, CPU)
    steps, ends = -(-2 * loader.total_tokens // 128), []
    batches.start_epoch(0)
    for step in range(1, steps + 1):
        batches.next_batch()
        if batches.exhausted():
            ends.append(step)
            batches.start_epoch(len(ends))
            assert not batches.exhausted()
    assert ends == [-(-n * loader.total_tokens // 128) for n in (1, 2)]
    state = batches.state_dict()
    again = TokenBatches(TokenDataLoader(shards, B=4, T=32, split="val"), CPU)
    again.load_state_dict(state)
    again.start_epoch(1)
    assert not again.exhausted()
    assert again.epoch == batches.epoch == loader.position / loader.total_tokens


def test_epoch_strategies_with_token_shards(args: Make, fit: Make, shards: Path) -> None:
    seen = []

    class Epochs(TrainerCallback):
        def on_epoch_end(self, **event: Any) -> None:
            seen.append(event["state"].global_step)

    model = GPT(GPTConfig(vocab_size=300, context_length=32, num_layers=1, embd_size=16, num_heads=2))
    loader = TokenDataLoader(shards, B=4, T=32, split="val")
    trainer, _ = fit(
        args(max_steps=-1, num_train_epochs=2, eval_strategy="epoch", logging_strategy="epoch"), model,
        train_dataset=loader, eval_dataset=TokenDataLoader(shards, B=4, T=32, split="val"), callbacks=[Epochs()],
    )  # fmt: skip
    ends = [-(-n * loader.total_tokens // 128) for n in (1, 2)]
    assert seen == ends
    assert [line["step"] for line in trainer.state.log_history if "eval_loss" in line] == ends


def test_loader_settings_without_effect_on_token_loaders_raise_an_error(shards: Path) -> None:
    loader = TokenDataLoader(shards, B=4, T=32)

    def make_loader(size: int | None, **settings: Any) -> Any:
        return make_batches(
            loader, size, CPU, collate=collate, seed=0, shuffle=True, loader=LoaderConfig(**settings)
        )  # fmt: skip

    assert isinstance(make_loader(None), TokenBatches)
    assert isinstance(make_loader(4), TokenBatches)
    with pytest.raises(ConfigError, match="B = 4 as batch size, got 2"):
        make_loader(2)
    for name, value in (("workers", 1), ("drop_last", True), ("pin_memory", False)):
        with pytest.raises(ConfigError, match=f"loader.{name} = {value} has no effect on a TokenDataLoader"):
            make_loader(4, **{name: value})


def test_prefetching_does_not_change_the_saved_position() -> None:
    batches = make(SOURCES["stateful"]())
    take(batches, 1)
    before = batches.state_dict()
    assert not batches.exhausted()
    assert batches.state_dict() == before


def test_every_epoch_is_reshuffled_and_has_each_example_once() -> None:
    found = take(make(listed(10)), 6)
    passes = [flat(found, number) for number in (0, 1)]
    assert [sorted(values) for values in passes] == [list(range(10))] * 2
    assert passes[0] != passes[1]
    assert [len(values) for _, values in found] == [4, 4, 2] * 2
    assert [values for _, values in take(make(listed(10), shuffle=False), 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(values) for _, values in take(make(listed(10), drop_last=True), 4)] == [4] * 4


def test_steps_for_counts_optimizer_steps() -> None:
    batches = make(listed(10))
    assert [batches.steps_for(epochs, 2) for epochs in (0.1, 1, 1.5, 2)] == [1, 2, 3, 4]
    take(batches, 2)
    assert batches.epoch == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match="expected max_steps"):
        make(Counting(3)).steps_for(1, 1)


def test_a_different_batch_size_continues_at_the_same_example() -> None:
    batches = make(listed(12), 4, shuffle=False)
    take(batches, 2)
    halved = make(listed(12), 2, shuffle=False)
    halved.load_state_dict(batches.state_dict())
    assert take(halved, 1) == [(0, [8, 9])]
    for size, expected in ((3, [[8, 9, 10], [11]]), (5, [[8, 9, 10, 11]]), (16, [[8, 9, 10, 11]])):
        for dataset in (listed(12), Counting(12), streamed(12).remove_columns(["y"])):
            other = make(dataset, size, shuffle=False)
            other.load_state_dict(batches.state_dict())
            assert take(other, len(expected)) == [(0, values) for values in expected]
            assert other.exhausted()
    loader = DataLoaderBatches(torch.utils.data.DataLoader(listed(12), batch_size=3), CPU, seed=7)
    with pytest.raises(DataError, match="divides 8.* got 3"):
        loader.load_state_dict(batches.state_dict() | {"batches": 4})


def test_invalid_datasets_and_examples_raise_an_error() -> None:
    with pytest.raises(DataError, match="at least 4 examples"):
        make(listed(3), drop_last=True)
    with pytest.raises(ConfigError, match="batch size 1, got 4"):
        make_batches(torch.utils.data.DataLoader(listed(4)), 4, CPU, **KEYWORDS)
    with pytest.raises(DataError, match="at least one example, got an empty"):
        make_batches([], 4, CPU, **KEYWORDS)
    with pytest.raises(ConfigError, match="expected a dataset, got int"):
        make_batches(3, 1, CPU, collate=collate, seed=0, shuffle=False, loader=LoaderConfig())
    with pytest.raises(ConfigError, match="num_shards for 2 workers"):
        make(Counting(3), workers=2)
    with pytest.raises(DataError, match="equal shape for 'x' .* data_collator"):
        collate([{"x": [1, 2]}, {"x": [1]}])
    with pytest.raises(DataError, match="got str"):
        collate(["a"])
    for odd in ((1,), (1, 2, 3), ()):
        with pytest.raises(DataError, match=f"dicts or pairs .* got {len(odd)}"):
            collate([odd, odd])


def test_collate_stacks_dicts_and_pairs() -> None:
    batch = collate([{"x": torch.ones(2), "label": 1}, {"x": torch.zeros(2), "label": 0}])
    assert batch["x"].shape == (2, 2)
    assert batch["labels"].tolist() == [1, 0]
    x, y = collate([(torch.ones(2), 1), (torch.zeros(2), 0)])
    assert isinstance(x, Tensor)
    assert y.tolist() == [1, 0]
    assert token_count({"input_ids": torch.zeros(2, 5, dtype=torch.int64)}) == 10
    assert token_count({"x": torch.zeros(2, 5)}) == 2


def test_a_position_in_other_data_raises_an_error() -> None:
    batches = make(listed(12))
    take(batches, 2)
    with pytest.raises(DataError, match="examples = 12 .*got 20"):
        make(listed(20)).load_state_dict(batches.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_examples_of_any_dtype_identify_a_dataset(dtype: torch.dtype, requires_grad: bool) -> None:
    def dataset(first: float) -> list[dict[str, Tensor]]:
        return [{"x": torch.tensor([first + i, 2.0]).to(dtype).requires_grad_(requires_grad)} for i in range(4)]

    state = make(dataset(1.0)).state_dict()
    assert "fingerprint" in state
    make(dataset(1.0)).load_state_dict(state)
    with pytest.raises(DataError, match="examples of this dataset differ"):
        make(dataset(3.0)).load_state_dict(state)


def test_arrays_of_objects_are_identified_by_their_values() -> None:
    def dataset(word: str) -> list[dict[str, Any]]:
        return [{"x": i, "words": np.array([word * 2, None], dtype=object)} for i in range(4)]

    state = make(dataset("a")).state_dict()
    make(dataset("a")).load_state_dict(state)
    with pytest.raises(DataError, match="examples of this dataset differ"):
        make(dataset("b")).load_state_dict(state)


def test_a_dataloader_with_other_generators_raises_an_error() -> None:
    def loader(generator: torch.Generator | None) -> DataLoader[Any]:
        return DataLoader(listed(12), batch_size=4, shuffle=True, generator=generator)

    state = DataLoaderBatches(loader(torch.Generator()), CPU, seed=0).state_dict()
    DataLoaderBatches(loader(torch.Generator()), CPU, seed=0).load_state_dict(state)
    with pytest.raises(DataError, match="1 generators .* got 0"):
        DataLoaderBatches(loader(None), CPU, seed=0).load_state_dict(state)
