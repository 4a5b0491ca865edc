"""Many requests on one model: each step reads a little of every text, and a request does not feel its neighbours."""

from __future__ import annotations

import os
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.cache.paged import BlockPool
from whimbrel.inference.graphs import DecodeGraphs
from whimbrel.inference.model_runner import ModelRunner
from whimbrel.inference.sampling import log_probabilities, sample
from whimbrel.inference.scheduler import Scheduler
from whimbrel.inference.sequence import Event, Finish, Logprob, Request, Sequence
from whimbrel.models import GPT
from whimbrel.ops.compiler import check_compiler

__all__ = ["Engine", "EngineConfig", "Stats"]

SHARE_OF_MEMORY = {"cuda": 0.8, "cpu": 0.25}
"""How much of a GPU's free memory, or of a machine's whole, the pages may take where their number is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How much the engine takes on at once."""

    block_size: int = 16
    """Tokens of one page of the cache."""
    num_blocks: int | None = None
    """Blocks of the cache; enough for `max_batch` texts of the whole context, or what memory gives, when not given."""
    max_batch: int = 64
    """How many texts go on at once."""
    prefill_chunk: int = 512
    """How many tokens of prompts are read in one step, over all texts, padding included."""
    cache: str = "none"
    """How keys and values are stored: as they are (`none`), or coded: `fp8`, `int8`, `int4`."""
    prefix_cache: bool = True
    """Whether a text may begin with pages that another left behind."""
    ahead: int = 8
    """How many greedy tokens are drawn at most before anyone looks at them, where steps are recorded; they come
    together, and fewer waits for the device make them faster."""
    compile: bool = False
    """Compile the decoding step: `warm_up`, or else the first requests, wait for it; generation is then faster."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch", "prefill_chunk", "ahead"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine in numbers; tokens and preemptions are counted from its beginning."""

    running: int
    waiting: int
    blocks: int
    free_blocks: int
    preemptions: int
    prompt_tokens: int
    """Tokens of prompts that were taken on."""
    prefix_hits: int
    """Tokens that did not have to be read, because a page held them already."""
    new_tokens: int


class Engine:
    """Continuous batching: `add_request` requests at any time, call `step` while `busy`, `abort` what nobody waits for.

    One thread owns an engine.
    """

    def __init__(self, model: GPT, config: EngineConfig | None = None) -> None:
        self.model, self.config = model, config or EngineConfig()
        if self.config.compile:
            check_compiler(model.token_embedding.weight.device, "compile")
        self.pool = _build_pool(model, self.config)
        room = (self.pool.num_blocks - 1) * self.pool.block_size
        self.context_length = min(model.config.context_length, room)
        """The longest text, prompt included: the model's, or what the pool has room for where that is less."""
        self.runner = ModelRunner(model, self.pool)
        self._graphs: DecodeGraphs | None = None
        if self.pool.device.type == "cuda" or self.config.compile:
            self._graphs = DecodeGraphs(
                model, self.pool, max_batch=self.config.max_batch, compile_step=self.config.compile
            )
            self.runner.decode, self.runner.padded = self._graphs, self._graphs.padded
        self._scheduler = Scheduler(
            self.pool,
            max_batch=self.config.max_batch,
            prefill_chunk=self.config.prefill_chunk,
            prefix_cache=self.config.prefix_cache,
            ahead=1 if self._graphs is None else self.config.ahead,
        )
        self._rows: dict[int, list[Sequence]] = {}
        self._numbers = count()
        self._prompt_tokens = self._new_tokens = 0

    def warm_up(self) -> None:
        """Compile the decoding step and capture its CUDA graphs, so that the first requests do not wait for it.

        Takes seconds (CUDA graphs) to minutes (a large model with `compile`); does nothing without either.
        """
        if self._graphs is not None:
            self._graphs.warm_up()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._rows)

    def stats(self) -> Stats:
        """Where the engine stands."""
        scheduler = self._scheduler
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks=self.pool.num_blocks - 1,
            free_blocks=self.pool.available,
            preemptions=scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            prefix_hits=scheduler.prefix_hits,
            new_tokens=self._new_tokens,
        )

    def add_request(self, request: Request) -> int:
        """Take on a request and give it a number; what can never be served is refused here."""
        self._check(request)
        number = next(self._numbers)
        row = Sequence.of(request, number, self.pool, self.context_length)
        self._rows[number] = [row]
        self._scheduler.add(row)
        self._prompt_tokens += len(request.prompt_ids)
        return number

    def abort(self, request: int, sample: int | None = None) -> None:
        """Drop a request, or one of its samples; pages are free at once. One that has ended is let be."""
        for row in list(self._rows.get(request, ())):
            if sample is None or row.samples == [sample]:
                self._drop(row)
            elif sample in row.samples:
                row.leave_out(sample)

    def step(self) -> list[Event]:
        """Read the next tokens of the texts whose turn it is, and draw one more where all has been read."""
        plan = self._scheduler.schedule()
        work = list(plan.work)
        if not work:
            return []
        if plan.ahead > 1 and self._graphs is not None:
            drawn = self.runner.run_ahead(plan, self._graphs)
            return [
                event for row, tokens in zip(plan.decoding, drawn, strict=True) for event in self._go_on(row, tokens)
            ]
        result = self.runner.run(plan)
        for row, tokens in work:
            row.block_table.advance(row.tokens, row.block_table.stored + tokens, remember=self.config.prefix_cache)
        for row, logits in result.prompts:
            _score_prompt(row, logits)
        return self._finish(result.rows, result.logits)

    def _finish(self, ready: list[Sequence], logits: Tensor) -> list[Event]:
        """Draw a token for each row that has read all it knows, and end those that have come to their end."""
        events: list[Event] = []
        rows: list[Sequence] = []
        picks: list[int] = []
        finite = logits.amax(-1).isfinite().tolist()
        for index, row in enumerate(ready):
            if row.drawn == 0 and row.request.prompt_logprobs is not None:
                events.append(Event(row.number, row.sample, prompt=tuple(row.scores)))
            for each in self._split(row):
                if not finite[index]:
                    events.append(self._end(each, "error"))
                elif each.complete:
                    events.append(self._end(each, "length"))
                else:
                    rows.append(each)
                    picks.append(index)
        if not rows:
            return events
        if picks != list(range(len(ready))):
            logits = logits[torch.tensor(picks, device=logits.device)]
        drawn = _draw(rows, logits)
        scores = _score(rows, logits, drawn)
        tokens = drawn.tolist()
        self._new_tokens += len(tokens)
        events += [self._take(*taken) for taken in zip(rows, tokens, scores, strict=True)]
        return events

    def _split(self, row: Sequence) -> list[Sequence]:
        """A row for each sample, all of them running."""
        rows = row.split() if len(row.samples) > 1 else [row]
        for other in rows[1:]:
            self._rows[row.number].append(other)
            self._scheduler.join(other)
        return rows

    def _go_on(self, row: Sequence, drawn: list[int]) -> Iterator[Event]:
        """Let a row take tokens that were drawn one after the other, up to one that ends it."""
        for token in drawn:
            row.block_table.advance(row.tokens, row.block_table.stored + 1, remember=self.config.prefix_cache)
            self._new_tokens += token >= 0
            event = (
                self._end(row, "error") if token < 0 else self._take(row, token, Logprob(None), broken=min(drawn) < 0)
            )
            yield event
            if event.finish_reason is not None:
                return

    def _take(self, row: Sequence, token: int, score: Logprob, *, broken: bool = False) -> Event:
        """Let a row go on with a token that was drawn, or end; pages that are `broken` past it are of no use."""
        if token in row.request.stop_ids:
            return self._end(row, "stop", broken=broken)
        row.tokens.append(token)
        finish: Finish | None = None
        if row.complete:
            finish = "length"
            self._drop(row)
        return Event(row.number, row.sample, token, score.logprob, score.top, finish)

    def _end(self, row: Sequence, finish: Finish, *, broken: bool = False) -> Event:
        self._drop(row, broken=broken or finish == "error")
        return Event(row.number, row.sample, finish_reason=finish)

    def _drop(self, row: Sequence, *, broken: bool = False) -> None:
        self._scheduler.remove(row, broken=broken)
        rows = self._rows[row.number]
        rows.remove(row)
        if not rows:
            del self._rows[row.number]

    def _check(self, request: Request) -> None:
        config, prompt = self.model.config, request.prompt_ids
        strange = next((token for token in prompt if not 0 <= token < config.vocab_size), None)
        if strange is not None:
            raise RequestError(
                f"token id {strange} is outside the model's vocabulary: ids run from 0 to {config.vocab_size - 1}"
            )
        request.sampling.check_vocabulary(config.vocab_size)
        most = self.context_length - min(1, request.max_new_tokens)
        if len(prompt) > most:
            whose = "model's context" if self.context_length == config.context_length else "cache"
            raise RequestError(f"a prompt of {len(prompt)} tokens: the {whose} has room for {most}")
        if request.n > self.config.max_batch:
            raise RequestError(
                f"n = {request.n} samples: the engine draws at most {self.config.max_batch} at once", field="n"
            )


def _draw(rows: abc.Sequence[Sequence], logits: Tensor) -> Tensor:
    samplings = [row.request.sampling for row in rows]
    keys = [0 if row.request.sampling.greedy else row.rng.key() for row in rows]
    return sample(logits, samplings, keys, [row.history for row in rows])


def _score(rows: abc.Sequence[Sequence], logits: Tensor, tokens: Tensor) -> list[Logprob]:
    """Scores of the rows that asked for them."""
    scores = [Logprob(None)] * len(rows)
    asked = {index: row.request.logprobs for index, row in enumerate(rows) if row.request.logprobs is not None}
    if asked:
        picked = torch.tensor(list(asked), device=logits.device)
        found = log_probabilities(logits[picked], tokens[picked], max(asked.values()))
        for (index, number), (logprob, top) in zip(asked.items(), found, strict=True):
            scores[index] = Logprob(logprob, tuple(top[:number]))
    return scores


def _score_prompt(row: Sequence, logits: Tensor) -> None:
    first = len(row.scores)
    tokens = torch.tensor(row.request.prompt_ids[first : first + len(logits)], device=logits.device)
    found = log_probabilities(logits, tokens, row.request.prompt_logprobs or 0)
    row.scores += [Logprob(logprob, tuple(top)) for logprob, top in found]


def _build_pool(model: GPT, config: EngineConfig) -> BlockPool:
    weight = model.token_embedding.weight
    dtype, device, pages = weight.dtype, weight.device, config.num_blocks
    page = BlockPool.block_nbytes(model.config, config.block_size, dtype=dtype, codec=config.cache)
    memory = _memory(device)
    if pages is None:
        enough = config.max_batch * -(-model.config.context_length // config.block_size) + 1
        pages = max(2, min(enough, int(memory * SHARE_OF_MEMORY.get(device.type, 0.25)) // page))
    elif pages * page > memory:
        raise ConfigError(
            f"num_blocks = {pages} take {pages * page} bytes: {device} has room for {memory // page} pages"
        )
    return BlockPool(model.config, pages, config.block_size, dtype=dtype, device=device, codec=config.cache)


def _memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, or that the whole machine has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
