"""Tokenized samples for fine-tuning, packed into rows of equal length or padded.

Training on a row of several samples is the same as training on each alone if attention and positions restart at every
sample (`documents`, `position_ids`) and no sample predicts the first token of the next (`targets`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import ConfigError, DataError, RequestError
from whimbrel.base.files import atomic_directory, parse_json
from whimbrel.config import not_one_of
from whimbrel.data.conversations import (
    SKIP_BAD_HINT,
    BadSampleError,
    Conversation,
    ConversationReader,
    Document,
    Sample,
)
from whimbrel.tokenization import Chat, ChatTemplate, SupervisedTokens, Tokenizer, TrainOn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PackedRows",
    "PaddedSamples",
    "SampleStats",
    "TokenizedSamples",
    "TooLong",
    "first_fit",
    "mark_supervised",
    "tokenize_samples",
]

TooLong = Literal["truncate", "drop"]
"""What happens to samples with too many tokens: truncated after the last turn that fits, or dropped."""

IGNORE_INDEX = -100
"""Target of positions without loss, as in `whimbrel.models`."""

BATCH_DOCUMENTS = 64

ARRAYS, SAMPLES_FILE = ("ids", "mask", "offsets"), "samples.json"


@dataclass(slots=True)
class SampleStats:
    """Counts for a summary of the data."""

    samples: int = 0
    """Number of samples kept; a preference pair is one."""
    tokens: int = 0
    """Number of tokens kept."""
    supervised_tokens: int = 0
    longest: int = 0
    """Tokens of the longest sample, before truncation."""
    truncated: int = 0
    dropped: int = 0
    """Samples that were too long and not truncated."""
    unterminated: int = 0
    """Samples whose last answer does not end with a special token: from these, a model does not learn to stop."""

    misaligned: int = 0
    """Samples in which an answer starts within a token: prompts end with other tokens when the model is used."""

    @property
    def supervised_share(self) -> float:
        """Supervised tokens among all tokens."""
        return self.supervised_tokens / max(1, self.tokens)


class TokenizedSamples:
    """Samples in three flat arrays; `samples[i]` is the ids and the mask of sample i."""

    def __init__(
        self,
        ids: NDArray[Any],
        mask: NDArray[np.bool_],
        offsets: NDArray[np.int64],
        *,
        settings: Mapping[str, Any],
        stats: SampleStats,
        pair: bool = False,
    ) -> None:
        """`settings` is everything besides the data that determines the tokens, as JSON values, for the fingerprint.

        With `pair`, samples 2i and 2i + 1 are the chosen and the rejected answer of preference pair i.
        """
        self.ids, self.mask, self.offsets = ids, mask, offsets
        self.settings, self.stats, self.pair = dict(settings), stats, pair

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[part], self.mask[part]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each sample."""
        return np.diff(self.offsets)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of tokens, masks and settings: equal if and only if training sees the same samples in this order."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode())
        for array in (self.ids, self.mask, self.offsets):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the samples to a directory, which is replaced if it exists."""
        with atomic_directory(directory, replace=True) as folder:
            for name in ARRAYS:
                np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)
            description = {"settings": self.settings, "stats": asdict(self.stats), "pair": self.pair}
            (folder / SAMPLES_FILE).write_text(json.dumps(description | {"fingerprint": self.fingerprint}))

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> TokenizedSamples:
        """Saved samples, memory-mapped; raises DataError if they are damaged."""
        folder = Path(directory)
        try:
            description = parse_json((folder / SAMPLES_FILE).read_bytes())
            arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS]
            stats = SampleStats(**description["stats"])
            samples = cls(*arrays, settings=description["settings"], stats=stats, pair=description["pair"])
            if samples.fingerprint != description["fingerprint"]:
                raise ValueError("the fingerprint does not match")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder} has no readable samples ({error}): tokenize them again") from error
        return samples

    def select(self, indices: Sequence[int] | NDArray[Any]) -> TokenizedSamples:
        """The samples with these numbers, or with `pair` the pairs; counts of dropped samples are 0 in the result."""
        numbers = np.asarray(indices, dtype=np.int64)
        if self.pair:
            numbers = (2 * numbers[:, None] + np.arange(2)).reshape(-1)
        parts = [self[int(number)] for number in numbers]
        ids, mask = (_concatenate([part[column] for part in parts], self.ids.dtype) for column in (0, 1))
        offsets = np.concatenate(([0], np.cumsum([len(part) for part, _ in parts], dtype=np.int64)))
        lengths = np.diff(offsets)
        stats = SampleStats(
            samples=len(indices),
            tokens=len(ids),
            supervised_tokens=int(mask.sum()),
            longest=int(lengths.max(initial=0)),
        )
        return TokenizedSamples(
            ids, mask.astype(np.bool_), offsets, settings=self.settings, stats=stats, pair=self.pair
        )

    def split(self, fraction: float, seed: int) -> tuple[TokenizedSamples, TokenizedSamples]:
        """A training and a validation part; `fraction` (0 to 1) of the samples, but at least one, is for validation."""
        count = len(self) // (2 if self.pair else 1)
        num_validation = max(1, round(count * fraction))
        if not 0 < fraction < 1 or num_validation >= count:
            raise DataError(
                f"expected a validation fraction (0 to 1) that leaves samples for training, got {fraction} of {count}"
            )
        order = _permutation(count, seed)
        return self.select(np.sort(order[num_validation:])), self.select(np.sort(order[:num_validation]))


def tokenize_samples(
    reader: ConversationReader | Iterable[Sample],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    train_on: TrainOn = "assistant",
    max_tokens: int | None = None,
    too_long: TooLong = "truncate",
) -> TokenizedSamples:
    """Tokenize all samples of a reader, each of at most `max_tokens` tokens.

    Documents end with the end-of-text token and are supervised completely; long ones are truncated at any token.
    Preference pairs are never truncated, only dropped. `template` may be None if there are only documents. A sample
    that the template rejects raises DataError with its line; if the reader skips bad rows, it is counted in its report.
    """
    if too_long not in get_args(TooLong):
        raise ConfigError(not_one_of("too_long", too_long, get_args(TooLong)))
    stats = SampleStats()
    kept_ids: list[NDArray[Any]] = []
    kept_masks: list[NDArray[np.bool_]] = []
    is_pair = False
    for sample, result in _encode_samples(reader, tokenizer, template, train_on):
        if isinstance(result, Exception):
            if not isinstance(reader, ConversationReader) or not reader.skip_bad:
                raise DataError(f"{sample.location}: {result} ({SKIP_BAD_HINT})") from result
            reader.report.samples -= 1
            reader.report.skip(BadSampleError("rejected by the chat template", str(result)), sample.location)
            continue
        is_pair = len(result) == 2
        for tokens in result:
            tokens.mask[0] = False  # nothing predicts the first token
        stats.longest = max(stats.longest, *(len(tokens.ids) for tokens in result))
        fitted = [_fit(tokens, max_tokens, too_long) for tokens in result]
        changed = [new is not old for new, old in zip(fitted, result, strict=True)]
        if None in fitted or (is_pair and any(changed)):
            stats.dropped += 1
            continue
        stats.samples += 1
        stats.truncated += any(changed)
        stats.unterminated += not all(tokens.terminated for tokens in result)
        stats.misaligned += not all(tokens.aligned for tokens in result)
        for tokens in filter(None, fitted):
            kept_ids.append(tokens.ids.astype(tokenizer.dtype))
            kept_masks.append(tokens.mask)
    if not stats.samples:
        unit = " per answer (a sequence has space for both)" if is_pair else ""
        raise DataError(
            f"no samples of at most {max_tokens} tokens{unit} ({stats.dropped} dropped, the longest has "
            f"{stats.longest}): "
            "raise the sequence length (data.sequence_length, up to the model's context length)"
        )
    ids, mask = _concatenate(kept_ids, tokenizer.dtype), _concatenate(kept_masks, np.dtype(np.bool_))
    stats.tokens, stats.supervised_tokens = len(ids), int(mask.sum())
    offsets = np.concatenate(([0], np.cumsum([len(part) for part in kept_ids], dtype=np.int64)))
    settings = {
        "tokenizer": tokenizer.fingerprint,
        "template": None if template is None else [template.source, template.special_tokens],
        "train_on": train_on,
        "max_tokens": max_tokens,
        "too_long": too_long,
    }
    return TokenizedSamples(ids, mask, offsets, settings=settings, stats=stats, pair=is_pair)


def _encode_samples(
    samples: Iterable[Sample], tokenizer: Tokenizer, template: ChatTemplate | None, train_on: TrainOn
) -> Iterator[tuple[Sample, list[SupervisedTokens] | RequestError | DataError]]:
    """The tokens of each sample in order: one, or two for a preference pair."""
    for kind, group in itertools.groupby(samples, type):
        if kind is Document:
            documents = (sample for sample in group if isinstance(sample, Document))
            yield from _encode_documents(documents, tokenizer)
            continue
        if template is None:
            raise ConfigError(
                "expected a chat template for conversations, got none: choose one, such as data.template "
                "= chatml (with `whimbrel finetune`, --template chatml)"
            )
        pending: deque[Sample] = deque()  # read ahead by encode_for_training, which encodes batches
        results = template.encode_for_training(tokenizer, _chats(group, pending), train_on)
        for first in results:
            sample = pending.popleft()
            parts = [first] if isinstance(sample, Conversation) else [first, next(results)]
            error = next((part for part in parts if isinstance(part, RequestError)), None)
            yield sample, error or [part for part in parts if isinstance(part, SupervisedTokens)]


def _chats(samples: Iterable[Sample], pending: deque[Sample]) -> Iterator[Chat]:
    for sample in samples:
        assert not isinstance(sample, Document)
        pending.append(sample)
        yield from [sample.chat] if isinstance(sample, Conversation) else [sample.chosen, sample.rejected]


def _encode_documents(
    documents: Iterator[Document], tokenizer: Tokenizer
) -> Iterator[tuple[Document, list[SupervisedTokens] | DataError]]:
    while batch := list(itertools.islice(documents, BATCH_DOCUMENTS)):
        valid = [document for document in batch if _is_valid_unicode(document.text)]
        encoded = iter(tokenizer.encode_with_spans([document.text for document in valid], parse_special=False))
        for document in batch:
            if not _is_valid_unicode(document.text):
                yield document, DataError("expected valid Unicode, got a lone surrogate")
                continue
            ids = next(encoded).ids
            if not len(ids) or ids[-1] != tokenizer.eot_id:  # some tokenizers add it
                ids = np.append(ids, tokenizer.eot_id)
            mask, turn_ends = np.ones(len(ids), np.bool_), range(1, len(ids) + 1)
            yield document, [SupervisedTokens(ids, mask, turn_ends, terminated=True, aligned=True)]


def _is_valid_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fit(tokens: SupervisedTokens, max_tokens: int | None, too_long: TooLong) -> SupervisedTokens | None:
    """The sample, truncated at the end of a turn if it is too long; None if no supervised turn fits."""
    if max_tokens is None or len(tokens.ids) <= max_tokens:
        return tokens
    end = max((end for end in tokens.turn_ends if end <= max_tokens), default=0) if too_long == "truncate" else 0
    if not tokens.mask[:end].any():
        return None
    return tokens._replace(ids=tokens.ids[:end], mask=tokens.mask[:end])


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _permutation(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64(seed)).permutation(count)


# Rows


class PackedRows:
    """Rows of `row_tokens` tokens as a map-style dataset; each contains complete samples, in random order.

    A row has `input_ids`, `targets` (the next token of the sample; -100 where it is not supervised), `documents` (the
    number of the sample within the row, one more for padding at the end) and `position_ids` (from 0 in each sample).
    Both answers of a preference pair are in the same row: documents 2i (chosen) and 2i + 1 (rejected).
    """

    def __init__(self, samples: TokenizedSamples, row_tokens: int, *, pad_id: int, seed: int = 0) -> None:
        self.samples, self.row_tokens, self.pad_id, self.seed = samples, row_tokens, pad_id, seed
        unit = 2 if samples.pair else 1
        lengths = samples.lengths.reshape(-1, unit).sum(axis=1)
        if (longest := int(lengths.max())) > row_tokens:
            kind = "pairs" if samples.pair else "samples"
            raise DataError(
                f"expected {kind} of at most {row_tokens} tokens, got one of {longest}: increase row_tokens"
            )
        order = _permutation(len(lengths), seed)
        rows = np.array(first_fit(lengths[order].tolist(), row_tokens), dtype=np.int64)
        units = order[np.argsort(rows, kind="stable")]
        self._members = (unit * units[:, None] + np.arange(unit)).reshape(-1)
        self._offsets = np.concatenate(([0], np.cumsum(unit * np.bincount(rows))))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = {
            "input_ids": np.full(self.row_tokens, self.pad_id, np.int64),
            "targets": np.full(self.row_tokens, IGNORE_INDEX, np.int64),
            "documents": np.empty(self.row_tokens, np.int64),
            "position_ids": np.empty(self.row_tokens, np.int64),
        }
        start = number = 0
        for number, member in enumerate(self.members(index)):
            ids, targets = _inputs_and_targets(*self.samples[int(member)])
            part = slice(start, start + len(ids))
            row["input_ids"][part], row["targets"][part] = ids, targets
            row["documents"][part], row["position_ids"][part] = number, np.arange(len(ids))
            start += len(ids)
        row["documents"][start:], row["position_ids"][start:] = number + 1, np.arange(self.row_tokens - start)
        return row

    def members(self, index: int) -> NDArray[np.int64]:
        """The numbers of the samples in a row."""
        return self._members[self._offsets[index] : self._offsets[index + 1]]

    @property
    def fill_rate(self) -> float:
        """The share of tokens that are not padding."""
        return len(self.samples.ids) / (len(self) * self.row_tokens)

    @property
    def fingerprint(self) -> str:
        """A hash of the rows: equal if and only if training sees the same rows."""
        settings = [self.samples.fingerprint, self.row_tokens, self.pad_id, self.seed]
        digest = hashlib.sha256(json.dumps(settings).encode())
        for array in (self._members, self._offsets):
            digest.update(array.astype("<i8").data)
        return digest.hexdigest()


class PaddedSamples:
    """One sample or preference pair per example, as a map-style dataset; `collate` pads a batch on the right.

    A causal model needs neither mask nor positions for them: no token attends to padding after it.
    """

    def __init__(self, samples: TokenizedSamples, *, pad_id: int, pad_to_multiple_of: int = 1) -> None:
        self.samples, self.pad_id, self.pad_to_multiple_of = samples, pad_id, pad_to_multiple_of

    def __len__(self) -> int:
        return len(self.samples) // (2 if self.samples.pair else 1)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """`input_ids` and `targets`; of a pair, both with the prefixes `chosen_` and `rejected_`."""
        numbers = {"chosen_": 2 * index, "rejected_": 2 * index + 1} if self.samples.pair else {"": index}
        return {
            prefix + name: values
            for prefix, number in numbers.items()
            for name, values in zip(("input_ids", "targets"), _inputs_and_targets(*self.samples[number]), strict=True)
        }

    def collate(self, examples: Sequence[Mapping[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
        """A batch (samples, tokens of the longest) of `input_ids` and `targets`.

        Preference pairs are two samples each: 2i is chosen, 2i + 1 rejected.
        """
        import torch

        prefixes, batch = ("chosen_", "rejected_") if self.samples.pair else ("",), {}
        for name, value in (("input_ids", self.pad_id), ("targets", IGNORE_INDEX)):
            rows = [example[prefix + name] for example in examples for prefix in prefixes]
            length = -(-max(map(len, rows)) // self.pad_to_multiple_of) * self.pad_to_multiple_of
            padded = np.full((len(rows), length), value, np.int64)
            for target, row in zip(padded, rows, strict=True):
                target[: len(row)] = row
            batch[name] = torch.from_numpy(padded)
        return batch

    @property
    def fingerprint(self) -> str:
        """A hash of the examples: equal if and only if training sees the same ones."""
        settings = [self.samples.fingerprint, self.pad_id, self.pad_to_multiple_of]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _inputs_and_targets(ids: NDArray[Any], mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Position i predicts token i + 1 of the same sample if that is supervised; the last position predicts nothing."""
    targets = np.full(len(ids), IGNORE_INDEX, np.int64)
    targets[:-1][mask[1:]] = ids[1:][mask[1:]]
    return ids.astype(np.int64), targets


def first_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """The row of each item: the first one with enough space left for it.

    The free space of all rows is kept in a tree whose inner nodes are the maximum of their two children, so that the
    first row that fits is found in O(log n). Rows without items are leaves with all of their space free.
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    free, rows = [capacity] * (2 * leaves), []
    for length in lengths:
        node = 1
        while node < leaves:
            node *= 2
            if free[node] < length:
                node += 1
        rows.append(node - leaves)
        free[node] -= length
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return rows


def mark_supervised(
    tokenizer: Tokenizer, ids: NDArray[Any], mask: NDArray[np.bool_], markers: tuple[str, str] = ("[[", "]]")
) -> str:
    """The text of a sample, special tokens included, with `markers` around each supervised part."""
    changes = np.flatnonzero(np.diff(mask.astype(np.int8))) + 1
    pieces, decoded = [], ""
    for start, end in itertools.pairwise((0, *changes.tolist(), len(ids))):
        text = tokenizer.decode(ids[:end])  # from the start: some decoders strip the first space of a text
        piece = text[len(decoded) :]
        pieces.append(f"{markers[0]}{piece}{markers[1]}" if len(mask) and mask[start] else piece)
        decoded = text
    return "".join(pieces)
