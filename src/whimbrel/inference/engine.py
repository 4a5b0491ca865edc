"""The inference engine: continuous batching of many requests on one model."""

from __future__ import annotations

import math
import os
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, islice

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError, RequestError
from whimbrel.cache.buffer import KV_CODECS
from whimbrel.inference.adapters import AdapterSelection, with_adapters
from whimbrel.inference.model_runner import (
    NON_FINITE,
    NOT_SAMPLED,
    Chunk,
    DecodeGraphs,
    LaunchedSteps,
    ModelRunner,
)
from whimbrel.inference.paged_cache import BlockPool
from whimbrel.inference.sampling import log_probabilities, sample
from whimbrel.inference.scheduler import Plan, Scheduler
from whimbrel.inference.sequence import Event, FinishReason, Logprob, Request, Sequence
from whimbrel.inference.speculative import ModelDraft, verify
from whimbrel.model_io import Adapter
from whimbrel.models import GPT
from whimbrel.ops.compiler import check_compiler

__all__ = ["Engine", "EngineConfig", "Stats"]

MEMORY_FRACTION = {"cuda": 0.8, "cpu": 0.25}
"""Fraction of a GPU's free memory, or of a machine's total memory, for KV-cache blocks if `num_blocks` is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine options: KV cache size, batching, compilation."""

    block_size: int = 16
    """Tokens per block of the KV cache."""
    num_blocks: int | None = None
    """Blocks of the KV cache. (default: enough for `max_batch` sequences of the full context, if memory allows)"""
    max_batch: int = 64
    """Maximum number of sequences that run at once."""
    prefill_chunk: int = 512
    """Maximum number of prompt tokens per step, over all sequences, padding included."""
    kv_cache_dtype: str = "none"
    """Quantization of keys and values: none, fp8, int8 or int4."""
    prefix_cache: bool = True
    """Reuse the blocks of earlier requests that start with the same tokens."""
    multi_step: int = 8
    """Maximum number of tokens decoded ahead of the host with CUDA graphs or `compile`: decoding is faster, but tokens
    arrive in groups. On a GPU, half of them are decoded while the host processes the other half."""
    compile: bool = False
    """Compile the decode step: takes up to minutes at `warm_up` or the first request, then decoding is faster."""
    cuda_graphs: bool = True
    """On a GPU, capture the decode step in CUDA graphs."""
    cpu_kernels: bool = True
    """On a CPU, decode with C++ code, which is compiled once per machine. PyTorch is used without a compiler, and where
    that code does not apply: adapters, fp8 weights, quantized KV caches."""
    gpu_kernels: bool = True
    """On a GPU, decode batches of up to eight sequences with one CUDA kernel per step, which is compiled once per model
    and batch size. PyTorch is used for larger batches, without `cuda_graphs`, and where that kernel does not apply:
    fp32, adapters."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch", "prefill_chunk", "multi_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.kv_cache_dtype not in KV_CODECS:
            expected = ", ".join(KV_CODECS)
            raise ConfigError(f"kv_cache_dtype: expected one of {expected}, got {self.kv_cache_dtype!r}")


@dataclass(frozen=True, slots=True)
class Stats:
    """Gauges and counters of an engine since it was created."""

    running: int
    waiting: int
    blocks: int
    free_blocks: int
    preemptions: int
    prompt_tokens: int
    prefix_hits: int
    """Tokens found in the prefix cache, including those of preempted sequences."""
    new_tokens: int


class Engine:
    """Call `add_request` at any time, `step` while `busy`, and `abort` for requests that are no longer needed.

    The output of a request does not depend on what else is in the batch. With `adapters`, by name, each request selects
    one or none; the engine then uses a copy of `model` that shares its weights. Not thread-safe.
    """

    def __init__(
        self, model: GPT, config: EngineConfig | None = None, adapters: Mapping[str, Adapter] | None = None
    ) -> None:
        self.config = config or EngineConfig()
        self._selection: AdapterSelection | None = None
        if adapters:
            model, self._selection = with_adapters(model, adapters, self.config.max_batch)
        self.model = model
        if self.config.compile:
            check_compiler(model.token_embedding.weight.device, "compile")
        self.pool = _build_pool(model, self.config)
        capacity = (self.pool.num_blocks - 1) * self.pool.block_size
        self.pool.single_sequence = self.config.max_batch == 1 and capacity < 2 * model.config.context_length
        self.context_length = min(model.config.context_length, capacity)
        """Maximum length of a sequence, prompt included: the model's context, or the pool if that is smaller."""
        self._graphs: DecodeGraphs | None = None
        uses_cuda_graphs = self.config.cuda_graphs and self.pool.device.type == "cuda"
        if self.config.compile or uses_cuda_graphs:
            self._graphs = DecodeGraphs(
                model,
                self.pool,
                max_batch=self.config.max_batch,
                compile_step=self.config.compile,
                gpu_kernels=self.config.gpu_kernels,
            )
        self._runs_ahead = uses_cuda_graphs and self.config.multi_step >= 4
        self.runner = ModelRunner(model, self.pool, self._graphs, self._selection, cpu_kernels=self.config.cpu_kernels)
        self._scheduler = Scheduler(
            self.pool,
            max_batch=self.config.max_batch,
            prefill_chunk=self.config.prefill_chunk,
            prefix_cache=self.config.prefix_cache,
            max_steps=1 if self._graphs is None else self.config.multi_step // (2 if self._runs_ahead else 1),
        )
        self._launched: tuple[Plan, LaunchedSteps] | None = None
        self._dropped: set[Sequence] = set()  # sequences of the launched steps whose tokens are not needed
        self._sequences: dict[int, list[Sequence]] = {}  # by request id
        self._request_ids = count()
        self._prompt_tokens = self._new_tokens = 0

    def warm_up(self) -> None:
        """Compile the decode step and capture its CUDA graphs ahead of the first request.

        Takes seconds (CUDA graphs, C++ code on a CPU) to minutes (a large model with `compile`).
        """
        if self._graphs is not None:
            self._graphs.warm_up()
        else:
            self.runner.warm_up()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._sequences)

    def stats(self) -> Stats:
        """Cheap: does not synchronize with the device."""
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
        """Queue a request; returns its id. Raises RequestError if it can never be served."""
        self._check(request)
        request_id = next(self._request_ids)
        adapter = self.adapter_index(request.adapter)
        seq = Sequence.from_request(request, request_id, self.pool, self.context_length, adapter)
        self._sequences[request_id] = [seq]
        self._scheduler.add(seq)
        self._prompt_tokens += len(request.prompt_ids)
        return request_id

    def adapter_index(self, name: str | None) -> int:
        """The index of an adapter, 0 for the base model; raises RequestError for an unknown name."""
        index = 0 if name is None else None if self._selection is None else self._selection.index(name)
        if index is None:
            names = ", ".join(self._selection.names) if self._selection is not None else "none"
            raise RequestError(f"adapter: expected one of the loaded adapters ({names}), got '{name}'")
        return index

    def abort(self, request_id: int, sample: int | None = None) -> None:
        """Cancel a request, or one of its samples, and free its blocks immediately. Does nothing if it has finished."""
        for seq in list(self._sequences.get(request_id, ())):
            if sample is None or seq.samples == [sample]:
                self._remove(seq)
            elif sample in seq.samples:
                seq.remove_sample(sample)

    def step(self) -> list[Event]:
        """Schedule, run the model and sample a token for every sequence that has no pending tokens left."""
        if self._launched is not None:
            return self._read_launched()
        self._propose()
        plan = self._scheduler.schedule()
        if plan.num_steps > 1:
            self._launch(plan)
            return self._read_launched()
        events: list[Event] = []
        ready: list[Sequence] = []
        logits: list[Tensor] = []
        if plan.decodes:
            ready += plan.decodes
            logits.append(self.runner.decode([Chunk(seq.block_table, seq.next_tokens(1)) for seq in plan.decodes]))
            for seq in plan.decodes:
                seq.advance(1, cache=self.config.prefix_cache)
        if plan.prefills:
            self._prefill(plan, ready, logits, events)
        if ready:
            events += self._sample(ready, logits[0] if len(logits) == 1 else torch.cat(logits))
        return events

    def _propose(self) -> None:
        """Get draft tokens for sequences with speculative decoding, before blocks are reserved for them."""
        # Not for all waiting sequences: a draft model allocates a KV cache at the first proposal of each.
        admissible = islice(self._scheduler.waiting, self.config.max_batch)
        for seq in (*self._scheduler.running, *admissible):
            if seq.draft is None or seq.proposal is not None or seq.num_pending > self.config.prefill_chunk:
                continue
            # All proposed tokens may be accepted, and the model adds one more: they must fit.
            limit = min(
                seq.request.num_draft_tokens,
                seq.max_length - len(seq.tokens) - 1,
                self.context_length - (len(seq.tokens) - seq.start),
            )
            if limit > 0:
                proposal = seq.draft.propose(seq.history, limit, seq.request.sampling, seq.rng)
                seq.proposal = proposal if proposal.tokens else None

    def _prefill(self, plan: Plan, ready: list[Sequence], logits: list[Tensor], events: list[Event]) -> None:
        """Process pending tokens; adds sequences that have none left to `ready` with their `logits`.

        Sequences with draft tokens are finished here: their `events` are added.
        """
        sequences, counts = plan.prefills, plan.prefill_counts()
        offsets: list[list[int]] = []  # logits needed to score the prompt, to verify drafts, to sample
        num_scored: list[int] = []
        for seq, tokens in zip(sequences, counts, strict=True):
            start, unscored = seq.block_table.num_tokens, seq.unscored
            scored = range(max(start, unscored.start), min(start + tokens, unscored.stop))
            num_scored.append(len(scored))
            is_last = tokens == seq.num_pending + seq.num_proposed
            last = range(seq.num_pending - 1, tokens) if is_last else range(0)
            offsets.append([*(position - start for position in scored), *last])
        chunks = [Chunk(seq.block_table, seq.next_tokens(n)) for seq, n in zip(sequences, counts, strict=True)]
        chunk_logits = self.runner.prefill(chunks, offsets)
        _score_prompts(sequences, [logits_TV[:n] for logits_TV, n in zip(chunk_logits, num_scored, strict=True)])
        for seq, tokens, scored_count, logits_TV in zip(sequences, counts, num_scored, chunk_logits, strict=True):
            last_logits = logits_TV[scored_count:]
            if seq.proposal is not None:
                events += self._verify(seq, last_logits)
                continue
            seq.advance(tokens, cache=self.config.prefix_cache)
            if len(last_logits):
                ready.append(seq)
                logits.append(last_logits)

    def _verify(self, seq: Sequence, logits_TV: Tensor) -> list[Event]:
        """Accept or reject the draft tokens of a sequence; the next step overwrites rejected ones in the cache."""
        assert seq.proposal is not None
        events = self._prompt_event(seq)
        proposal, seq.proposal = seq.proposal, None
        if not logits_TV.amax(-1).isfinite().all():
            return [*events, self._finish(seq, "error")]
        tokens = verify(logits_TV, proposal, seq.history, seq.request.sampling, seq.rng)
        scores = [Logprob(None)] * len(tokens)
        if seq.request.logprobs is not None:
            sampled = torch.tensor(tokens, device=logits_TV.device)
            results = log_probabilities(logits_TV[: len(tokens)], sampled, seq.request.logprobs)
            scores = [Logprob(logprob, tuple(top)) for logprob, top in results]
        for index, (token, score) in enumerate(zip(tokens, scores, strict=True)):
            if index == len(tokens) - 1:  # everything before the last token is stored
                seq.advance(seq.num_pending, cache=self.config.prefix_cache)
            self._new_tokens += 1
            events.append(self._append(seq, token, score))
            if events[-1].finish_reason is not None:
                break
        return events

    def _launch(self, plan: Plan, previous: LaunchedSteps | None = None, after: int = 0) -> None:
        """Launch several steps without waiting for the device, following the `after` steps of `previous`, if any."""
        chunks = [Chunk(seq.block_table, seq.next_tokens(1)) for seq in plan.decodes]
        params = [seq.request.sampling for seq in plan.decodes]
        end = after + plan.num_steps
        keys = [
            [0] * plan.num_steps if seq.request.sampling.greedy else seq.rng.next_keys(end)[after:]
            for seq in plan.decodes
        ]
        self._launched = plan, self.runner.decode_steps(chunks, params, keys, previous)

    def _read_launched(self) -> list[Event]:
        """The tokens of the launched steps.

        Before the host reads them, it launches the next steps of the same sequences, so that a GPU has work while the
        host processes the tokens. If a sequence ends, its later tokens are dropped. Its blocks may be in use again
        then: the device runs what was launched in order, so they are overwritten only after those steps.
        """
        assert self._launched is not None
        (plan, steps), self._launched = self._launched, None
        following = self._scheduler.schedule_ahead(plan) if self._runs_ahead and not self._dropped else None
        if following is not None:
            self._launch(following, steps, plan.num_steps)
        events: list[Event] = []
        for seq, tokens in zip(plan.decodes, steps.tokens(), strict=True):
            if seq in self._dropped:
                continue
            # Tokens after a stop token are dropped; if their logits were not finite, the blocks may contain NaN too.
            discard = NON_FINITE in tokens
            for token in tokens:
                if token == NOT_SAMPLED:
                    seq.has_wide_nucleus = True
                    self._dropped.add(seq)
                    break
                seq.advance(1, cache=self.config.prefix_cache)
                if token == NON_FINITE:
                    event = self._finish(seq, "error")
                else:
                    self._new_tokens += 1
                    if not seq.request.sampling.greedy:
                        seq.rng.key()  # used
                    event = self._append(seq, token, Logprob(None), discard=discard)
                events.append(event)
                if event.finish_reason is not None:
                    break
        if self._launched is None:
            self._dropped.clear()
        return events

    def _sample(self, ready: list[Sequence], logits: Tensor) -> list[Event]:
        """Sample a token for each sequence without pending tokens; finish those that are complete."""
        events: list[Event] = []
        sequences: list[Sequence] = []
        rows: list[int] = []  # of `logits`, for each of `sequences`
        max_logits, tokens_B = logits.max(-1)
        finite = [math.isfinite(value) for value in max_logits.tolist()]
        for index, seq in enumerate(ready):
            events += self._prompt_event(seq)
            for each in self._split(seq):
                if not finite[index]:
                    events.append(self._finish(each, "error"))
                elif each.is_complete:
                    events.append(self._finish(each, "length"))
                else:
                    sequences.append(each)
                    rows.append(index)
        if not sequences:
            return events
        if rows != list(range(len(ready))):
            index_B = torch.tensor(rows, device=logits.device)
            logits, tokens_B = logits[index_B], tokens_B[index_B]
        params = [seq.request.sampling for seq in sequences]
        if not all(each.is_argmax for each in params):
            keys = [0 if seq.request.sampling.greedy else seq.rng.key() for seq in sequences]
            tokens_B = sample(logits, params, keys, [seq.history for seq in sequences], check=False)
        scores = _score(sequences, logits, tokens_B)
        tokens = tokens_B.tolist()
        self._new_tokens += len(tokens)
        events += [self._append(*each) for each in zip(sequences, tokens, scores, strict=True)]
        return events

    def _prompt_event(self, seq: Sequence) -> list[Event]:
        """The log-probabilities of the prompt, once, if they were requested."""
        if seq.request.prompt_logprobs is None or seq.num_sampled > 0:
            return []
        return [Event(seq.request_id, seq.sample, prompt=tuple(seq.logprobs))]

    def _split(self, seq: Sequence) -> list[Sequence]:
        """One running sequence per sample."""
        if len(seq.samples) == 1:
            return [seq]
        sequences = seq.split()
        for fork in sequences[1:]:
            self._sequences[seq.request_id].append(fork)
            self._scheduler.add_fork(fork)
        return sequences

    def _append(self, seq: Sequence, token: int, score: Logprob, *, discard: bool = False) -> Event:
        """Add a sampled token to a sequence, or finish it; `discard` zeros its blocks in that case."""
        if token in seq.request.stop_ids:
            return self._finish(seq, "stop", discard=discard)
        seq.append(token)
        finish_reason: FinishReason | None = None
        if seq.is_complete:
            finish_reason = "length"
            self._remove(seq)
        return Event(seq.request_id, seq.sample, token, score.logprob, score.top, finish_reason)

    def _finish(self, seq: Sequence, finish_reason: FinishReason, *, discard: bool = False) -> Event:
        self._remove(seq, discard=discard or finish_reason == "error")
        return Event(seq.request_id, seq.sample, finish_reason=finish_reason)

    def _remove(self, seq: Sequence, *, discard: bool = False) -> None:
        self._scheduler.remove(seq, discard=discard)
        if self._launched is not None:
            self._dropped.add(seq)
        sequences = self._sequences[seq.request_id]
        sequences.remove(seq)
        if not sequences:
            del self._sequences[seq.request_id]

    def _check(self, request: Request) -> None:
        config, prompt = self.model.config, request.prompt_ids
        self.adapter_index(request.adapter)
        unknown = next((token for token in prompt if not 0 <= token < config.vocab_size), None)
        if unknown is not None:
            raise RequestError(f"prompt_ids: expected token ids from 0 to {config.vocab_size - 1}, got {unknown}")
        request.sampling.check_vocabulary(config.vocab_size)
        limit = self.context_length + (1 if request.max_new_tokens == 0 else -1)
        shift = request.context_shift and request.prompt_logprobs is None
        if len(prompt) > limit and not shift:
            limited_by = "model's context" if self.context_length == config.context_length else "KV cache"
            raise RequestError(f"prompt_ids: expected at most {limit} tokens (the {limited_by}), got {len(prompt)}")
        if request.n > self.config.max_batch:
            raise RequestError(f"n: expected at most {self.config.max_batch} (max_batch), got {request.n}", field="n")
        if isinstance(request.draft, ModelDraft) and request.draft.vocab_size != config.vocab_size:
            raise RequestError(
                f"draft: expected a model with the same vocabulary of {config.vocab_size} tokens, got "
                f"{request.draft.vocab_size}"
            )


def _score(sequences: abc.Sequence[Sequence], logits: Tensor, tokens: Tensor) -> list[Logprob]:
    """Log-probabilities of the new tokens where they were requested."""
    scores = [Logprob(None)] * len(sequences)
    requested = {row: seq.request.logprobs for row, seq in enumerate(sequences) if seq.request.logprobs is not None}
    if requested:
        index = torch.tensor(list(requested), device=logits.device)
        results = log_probabilities(logits[index], tokens[index], max(requested.values()))
        for (row, num_top), (logprob, top) in zip(requested.items(), results, strict=True):
            scores[row] = Logprob(logprob, tuple(top[:num_top]))
    return scores


def _score_prompts(sequences: abc.Sequence[Sequence], logits: abc.Sequence[Tensor]) -> None:
    """Add log-probabilities of the next prompt tokens to their sequences, with one synchronization for all of them."""
    scored = [(seq, logits_TV) for seq, logits_TV in zip(sequences, logits, strict=True) if len(logits_TV)]
    if not scored:
        return
    targets: list[int] = []
    for seq, logits_TV in scored:
        targets += seq.request.prompt_ids[len(seq.logprobs) : len(seq.logprobs) + len(logits_TV)]
    joined = scored[0][1] if len(scored) == 1 else torch.cat([logits_TV for _, logits_TV in scored])
    max_top = max(seq.request.prompt_logprobs or 0 for seq, _ in scored)
    results = iter(log_probabilities(joined, torch.tensor(targets, device=joined.device), max_top))
    for seq, logits_TV in scored:
        num_top = seq.request.prompt_logprobs
        seq.logprobs += [Logprob(logprob, tuple(top[:num_top])) for logprob, top in islice(results, len(logits_TV))]


def _build_pool(model: GPT, config: EngineConfig) -> BlockPool:
    weight = model.token_embedding.weight
    dtype, device = weight.dtype, weight.device
    num_blocks, codec = config.num_blocks, config.kv_cache_dtype
    nbytes = BlockPool.block_nbytes(model.config, config.block_size, dtype=dtype, codec=codec)
    memory = _available_memory(device)
    if num_blocks is None:
        full_context_blocks = config.max_batch * -(-model.config.context_length // config.block_size) + 1
        num_blocks = max(2, min(full_context_blocks, int(memory * MEMORY_FRACTION.get(device.type, 0.25)) // nbytes))
    elif num_blocks * nbytes > memory:
        raise ConfigError(f"num_blocks: expected at most {memory // nbytes} (the memory of {device}), got {num_blocks}")
    return BlockPool(model.config, num_blocks, config.block_size, dtype=dtype, device=device, codec=codec)


def _available_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, or the total memory of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
