"""Forward passes of the engine: tokens and block tables in, logits out; CUDA graphs and the compiled decode step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import compress
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from whimbrel.inference.adapters import AdapterSelection
from whimbrel.inference.block_manager import BlockTable
from whimbrel.inference.cpu_decoder import CpuDecoder, create_decoder
from whimbrel.inference.cuda_decoder import BATCH_SIZES, CudaDecoder, create_cuda_decoder, unsupported_reason
from whimbrel.inference.paged_cache import BlockPool, ContiguousCache, PagedBatch
from whimbrel.inference.sampling import Sampler, SamplingParams
from whimbrel.models import GPT, KVCache
from whimbrel.models.layers import eval_mode

__all__ = [
    "NON_FINITE",
    "NOT_SAMPLED",
    "Chunk",
    "DecodeGraphs",
    "LaunchedSteps",
    "ModelRunner",
    "decode_one",
    "prefill",
]

WARMUP_RUNS = 3
"""Runs before graph capture, so that autotuning, compilation and module loading are not captured."""

MIN_TABLE_TOKENS = 256
"""Tokens covered by the narrowest block table on a CPU: attention over fewer tokens is hardly faster."""

NON_FINITE, NOT_SAMPLED = -1, -2
"""Instead of a token, for `ModelRunner.decode_steps`."""

NO_RECOMPILE_LIMIT = 2**31 - 1
"""Effectively disables the recompile limits of torch."""


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def _inference(method: MethodT) -> MethodT:
    """Decorate a method to run in inference mode, and the model without dropout."""

    @wraps(method)
    def run(self: ModelRunner | DecodeGraphs, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(), eval_mode(self.model):
            return method(self, *args, **kwargs)

    return cast(MethodT, run)


class Chunk(NamedTuple):
    """New tokens of one sequence. Its block table has blocks reserved for them."""

    table: BlockTable
    tokens: list[int]


class ModelRunner:
    """Runs the model over chunks of sequences: `decode` for one token each, `prefill` for several.

    Without `graphs` the model runs eagerly, or on a CPU, for a few tokens at a time, in a `CpuDecoder`. Layers that the
    caller compiled for training run eagerly too, since every new length would be compiled again.
    """

    def __init__(
        self,
        model: GPT,
        pool: BlockPool,
        graphs: DecodeGraphs | None = None,
        selection: AdapterSelection | None = None,
        *,
        cpu_kernels: bool = True,
    ) -> None:
        self.model, self._pool, self._graphs, self._selection = model, pool, graphs, selection
        self._uses_cpu_kernels = cpu_kernels and graphs is None and selection is None
        self._cpu_decoder: CpuDecoder | None = None
        self._has_compiled_layers = any(module._compiled_call_impl is not None for module in model.modules())

    @_inference
    def decode(self, chunks: Sequence[Chunk]) -> Tensor:
        """Process one token of each sequence; the logits (sequences, vocabulary) of the next token."""
        if self._graphs is not None:
            self._select_adapters(chunks)
            tokens, batch = self._batch(chunks, self._graphs.padded_size(len(chunks)))
            return self._graphs(tokens, batch)[: len(chunks)]
        if (decoder := self._decoder()) is not None:
            return torch.cat(decoder.run(chunks, [[0]] * len(chunks)))
        tokens, cache = self._inputs(chunks)
        with _run_eagerly() if self._has_compiled_layers else nullcontext():
            logits: Tensor = self.model(tokens, cache=cache).logits
        return logits[:, -1]

    def warm_up(self) -> None:
        """Compile the C++ code of a CPU, if this model can use it."""
        self._decoder()

    def _decoder(self) -> CpuDecoder | None:
        """The decoder of the CPU, created at the first use and whenever parameters were replaced."""
        if self._cpu_decoder is not None and self._cpu_decoder.is_current:
            return self._cpu_decoder
        if self._uses_cpu_kernels:
            self._cpu_decoder = create_decoder(self.model, self._pool)
            self._uses_cpu_kernels = self._cpu_decoder is not None
        return self._cpu_decoder

    @_inference
    def decode_steps(
        self,
        chunks: Sequence[Chunk],
        params: Sequence[SamplingParams],
        keys: Sequence[Sequence[int]],
        previous: LaunchedSteps | None = None,
    ) -> LaunchedSteps:
        """Launch several steps of each sequence, sampled with one key per token. Needs graphs.

        After `previous` steps of the same sequences, whose tokens the host need not know yet, only the block tables of
        `chunks` are used.
        """
        assert self._graphs is not None
        tokens, batch = self._batch(chunks, self._graphs.padded_size(len(chunks)))
        keys_SB = self._to_device(torch.tensor(keys).t().contiguous())
        if previous is not None:
            return self._graphs.decode_steps(None, batch, keys_SB, previous.sampler)
        self._select_adapters(chunks)
        sampler = None if all(each.greedy for each in params) else Sampler(params, self._pool.device)
        return self._graphs.decode_steps(tokens, batch, keys_SB, sampler)

    def _select_adapters(self, chunks: Sequence[Chunk]) -> None:
        if self._selection is not None:
            self._selection.set([chunk.table.adapter for chunk in chunks])

    @_inference
    def prefill(self, chunks: Sequence[Chunk], offsets: Sequence[Sequence[int]]) -> list[Tensor]:
        """Process several tokens of each sequence; the logits (offsets, vocabulary) after the tokens at `offsets`."""
        if (decoder := self._decoder()) is not None:
            short = [len(chunk.tokens) <= decoder.max_tokens for chunk in chunks]
            if all(short):
                return decoder.run(chunks, offsets)
            if any(short):  # each sequence runs where it would run alone, so that its output is the same
                ours = iter(decoder.run(*_select(chunks, offsets, short)))
                others = iter(self._prefill(*_select(chunks, offsets, [not is_short for is_short in short])))
                return [next(ours if is_short else others) for is_short in short]
        return self._prefill(chunks, offsets)

    def _prefill(self, chunks: Sequence[Chunk], offsets: Sequence[Sequence[int]]) -> list[Tensor]:
        """`prefill` in PyTorch."""
        tokens, cache = self._inputs(chunks)
        with _run_eagerly() if self._has_compiled_layers else nullcontext():
            hidden = self.model.hidden_states(tokens, cache=cache)
        width = tokens.size(1)
        flat_indices = [index * width + offset for index, each in enumerate(offsets) for offset in each]
        index = torch.tensor(flat_indices, dtype=torch.long, device=hidden.device)
        logits = self.model.logits(hidden.flatten(0, 1)[index])
        return list(logits.split([len(each) for each in offsets]))

    def _inputs(self, chunks: Sequence[Chunk]) -> tuple[Tensor, KVCache]:
        """Tokens (sequences, tokens) and the cache for an eager pass."""
        self._select_adapters(chunks)
        if len(chunks) == 1 and self._pool.device.type == "cpu" and chunks[0].table.is_contiguous:
            table, tokens = chunks[0]
            return torch.tensor([tokens]), ContiguousCache(self._pool, table.blocks[0], table.num_tokens)
        return self._batch(chunks, len(chunks))

    def _batch(self, chunks: Sequence[Chunk], batch_size: int) -> tuple[Tensor, PagedBatch]:
        """Tokens (batch_size, longest chunk) and their cache; one transfer to the device."""
        width = max(len(chunk.tokens) for chunk in chunks)
        num_blocks = max(len(chunk.table.blocks) for chunk in chunks)
        ints = np.zeros(batch_size * (width + num_blocks + 2), dtype=np.int32)
        sizes = [batch_size * width, batch_size * num_blocks, batch_size, batch_size]
        tokens, tables, starts, counts = np.split(ints, np.cumsum(sizes)[:-1])
        tokens, tables = tokens.reshape(batch_size, width), tables.reshape(batch_size, num_blocks)
        for index, (table, new) in enumerate(chunks):
            starts[index], counts[index] = table.num_tokens, len(new)
            tokens[index, : len(new)] = new
            blocks = table.blocks
            tables[index, : len(blocks)] = blocks
            # Attention masks these but reads them, so they must be finite: repeat a block of the same sequence.
            tables[index, len(blocks) :] = blocks[-1]
        stored = int((starts + counts).max()) - width
        on_device = self._to_device(torch.from_numpy(ints)).split(sizes)
        tables_on_device = on_device[1].view(batch_size, num_blocks)
        batch = PagedBatch(self._pool, tables_on_device, on_device[2], on_device[3], stored=stored)
        return on_device[0].view(batch_size, width), batch

    def _to_device(self, tensor: Tensor) -> Tensor:
        """A copy that does not wait for the steps that a GPU still has to run: that needs pinned memory."""
        if self._pool.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._pool.device, non_blocking=True)


@dataclass(slots=True)
class LaunchedSteps:
    """Decode steps that may still be running."""

    sampler: Sampler | None
    _tokens: Tensor
    """(sequences, steps), on the host; valid once `_copied` has happened."""
    _copied: torch.cuda.Event | None

    def tokens(self) -> list[list[int]]:
        """Wait for the tokens of each sequence.

        NON_FINITE stands for logits that are not finite, and NOT_SAMPLED for the first token that `Sampler.draw` could
        not sample; the tokens after either mean nothing.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return cast("list[list[int]]", self._tokens.tolist())


@dataclass(slots=True)
class RecordedStep:
    """The decode step at one batch size and block-table width. The next replay overwrites its result."""

    tokens: Tensor
    tables: Tensor
    starts: Tensor
    counts: Tensor
    replay: Callable[[], tuple[Tensor, Tensor]]
    """Runs the step on the tensors above: the logits, and the argmax of each row, -1 where they are not finite."""
    decoder: CudaDecoder | None = None
    """Owns the buffers of the step."""
    guards_checked: bool = False
    """Whether compiled code has evaluated its guards on these tensors, so that the next calls can skip them."""

    def fill(self, tokens_B1: Tensor | None, batch: PagedBatch) -> None:
        """Copy a batch to the tensors; without tokens only the tables, to continue where the last step ended.

        A table that is too wide repeats the last block of each row, which is masked.
        """
        blocks = batch.tables.size(1)
        self.tables[:, :blocks] = batch.tables
        if blocks < self.tables.size(1):
            self.tables[:, blocks:] = batch.tables[:, -1:]
        if tokens_B1 is None:
            return
        self.tokens.copy_(tokens_B1)
        self.starts.copy_(batch.starts)
        self.counts.copy_(batch.counts)


class DecodeGraphs:
    """The decode step as one launch: a CUDA graph, compiled code or both, for a few batch sizes.

    For a small model, Python takes longer to launch the kernels of a step than the GPU takes to run them. So the step
    is recorded once per batch size, with static input tensors (tokens, block tables, lengths), and replayed;
    smaller batches are padded. Attention reads as many blocks as the block table is wide, so the table is only as wide
    as the longest sequence needs. A step writes its argmax tokens to the inputs of the next one, where a `Sampler` may
    replace them, so several steps can be replayed before the host reads the result.
    """

    def __init__(
        self, model: GPT, pool: BlockPool, *, max_batch: int, compile_step: bool, gpu_kernels: bool = False
    ) -> None:
        self.model, self._pool = model, pool
        self._gpu_kernels = gpu_kernels
        self._max_blocks = -(-model.config.context_length // pool.block_size)
        if gpu_kernels and pool.device.type == "cuda" and unsupported_reason(model, pool) is None:
            max_batch = next((size for size in BATCH_SIZES if size >= max_batch), max_batch)
        self._sizes = [1 << power for power in range((max_batch - 1).bit_length())] + [max_batch]
        self._compiled = compile_step
        self._step: Callable[..., tuple[Tensor, Tensor]] = self._decode
        if compile_step:
            # cpp_wrapper: kernels are also called from C++. A CUDA graph makes no calls at all.
            options: dict[str, Any] = {"size_asserts": False, "cpp_wrapper": pool.device.type == "cpu"}
            self._step = torch.compile(self._decode, fullgraph=True, dynamic=False, options=options)
        self._recorded: dict[tuple[int, int], RecordedStep] = {}
        self._graph_pool: Any = None

    def padded_size(self, num_sequences: int) -> int:
        """The smallest recorded batch size for this many sequences."""
        return next(size for size in self._sizes if size >= num_sequences)

    def table_width(self, blocks: int) -> int:
        """The block-table width for a batch whose longest sequence has `blocks`.

        On a GPU, attention stops at the length of each sequence, so one width serves all. On a CPU, compiled code takes
        any width.
        """
        minimum = -(-MIN_TABLE_TOKENS // self._pool.block_size)
        if self._max_blocks <= max(minimum, 1) or self._pool.device.type == "cuda":
            return self._max_blocks
        return min(self._max_blocks, max(2, minimum, blocks))  # torch.compile treats a size of 1 as a constant

    @_inference
    def warm_up(self) -> None:
        """Compile the step and capture graphs ahead of the first request.

        On a CPU, the step is compiled for batch size 1 and for larger batches; on a GPU, one graph per batch size.
        """
        sizes = self._sizes if self._pool.device.type == "cuda" else self._sizes[:2]
        for batch_size in sizes:
            for _ in self._replays(self._get_step(batch_size, 1), 1):
                pass

    def __call__(self, tokens_B1: Tensor, batch: PagedBatch) -> Tensor:
        """The logits (batch, vocabulary) of the next token of each sequence."""
        recorded = self._get_step(len(tokens_B1), batch.tables.size(1))
        recorded.fill(tokens_B1, batch)
        [(logits_BV, _)] = self._replays(recorded, 1)
        return logits_BV

    def decode_steps(
        self, tokens_B1: Tensor | None, batch: PagedBatch, keys_SB: Tensor, sampler: Sampler | None
    ) -> LaunchedSteps:
        """Launch steps that each read the token of the one before; greedy without a sampler.

        Without `tokens_B1`, they continue the steps that were launched last.
        """
        recorded = self._get_step(*batch.tables.shape)
        recorded.fill(tokens_B1, batch)
        steps, size = keys_SB.shape
        sampled_BS = recorded.tokens.new_empty((size, steps))
        for step, (logits_BV, argmax_B) in enumerate(self._replays(recorded, steps)):
            tokens_B = argmax_B[:size]
            if sampler is not None:
                drawn_B = sampler.draw(logits_BV[:size], keys_SB[step])
                recorded.tokens[:size, 0] = drawn_B.clamp(min=0)
                tokens_B = torch.where(tokens_B < 0, NON_FINITE, torch.where(drawn_B < 0, NOT_SAMPLED, drawn_B))
            sampled_BS[:, step] = tokens_B
        if not sampled_BS.is_cuda:
            return LaunchedSteps(sampler, sampled_BS, None)
        on_host = torch.empty(size, steps, dtype=sampled_BS.dtype, pin_memory=True)
        on_host.copy_(sampled_BS, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(sampled_BS.device))
        return LaunchedSteps(sampler, on_host, copied)

    def _replays(self, recorded: RecordedStep, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The results of `count` steps. Compiled code is compiled, and its guards evaluated, in the very first one.

        The tensors of a recorded step never change, so guards that passed once need not be evaluated again; a CUDA
        graph has none.
        """
        if self._compiled and self._pool.device.type != "cuda":
            if not recorded.guards_checked:
                with _unlimited_compilations():
                    first = recorded.replay()
                recorded.guards_checked, count = True, count - 1
                yield first
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                for _ in range(count):
                    yield recorded.replay()
        else:
            for _ in range(count):
                yield recorded.replay()

    def _get_step(self, batch_size: int, blocks: int) -> RecordedStep:
        key = batch_size, self.table_width(blocks)
        if key not in self._recorded:
            with _unlimited_compilations() if self._compiled else nullcontext():
                self._recorded[key] = self._record(*key)
        return self._recorded[key]

    def _decode(self, tokens: Tensor, tables: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        batch = PagedBatch(self._pool, tables, starts, counts)
        logits: Tensor = self.model(tokens, cache=batch).logits[:, -1]
        max_logits, argmax = logits.max(-1)
        tokens.copy_(argmax[:, None])
        starts.add_(counts)
        return logits, torch.where(max_logits.isfinite(), argmax, -1)

    def _record(self, batch_size: int, width: int) -> RecordedStep:
        device = self._pool.device
        tokens, tables = (torch.zeros(batch_size, size, dtype=torch.int32, device=device) for size in (1, width))
        starts, counts = (torch.zeros(batch_size, dtype=torch.int32, device=device) for _ in range(2))
        inputs = tokens, tables, starts, counts  # all zeros is padding, which is written to block 0
        if self._compiled:
            self._mark_dynamic(*inputs)
        decoder = create_cuda_decoder(self.model, self._pool, batch_size) if self._gpu_kernels else None
        step = self._step if decoder is None else decoder.step
        if device.type != "cuda":
            return RecordedStep(*inputs, replay=lambda: step(*inputs))
        side_stream = torch.cuda.Stream(device)  # warm-up before capture must run on a side stream
        side_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side_stream):
            for _ in range(WARMUP_RUNS):
                step(*inputs)
        torch.cuda.current_stream(device).wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            outputs = step(*inputs)
        self._graph_pool = self._graph_pool or graph.pool()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return outputs

        return RecordedStep(*inputs, replay=replay, decoder=decoder)

    def _mark_dynamic(self, tokens: Tensor, tables: Tensor, starts: Tensor, counts: Tensor) -> None:
        """Compile once for all block-table widths, and on a CPU for all batches of two sequences or more."""
        if self._pool.device.type == "cpu" and len(tokens) > 1:
            for tensor in (tokens, tables, starts, counts):
                torch._dynamo.mark_dynamic(tensor, 0)
        if self.table_width(1) < self._max_blocks:
            torch._dynamo.mark_dynamic(tables, 1)


def _select(
    chunks: Sequence[Chunk], offsets: Sequence[Sequence[int]], selected: Sequence[bool]
) -> tuple[list[Chunk], list[Sequence[int]]]:
    return list(compress(chunks, selected)), list(compress(offsets, selected))


def prefill(model: GPT, ids_BT: Tensor, cache: KVCache) -> Tensor:
    """Process tokens with any KV cache, eagerly; the logits (B, V) of the next token of each sequence."""
    with torch.inference_mode(), eval_mode(model), _run_eagerly():
        ids_BT = ids_BT.to(model.lm_head.weight.device)
        return cast(Tensor, model(ids_BT, cache=cache, logits_to_keep=1).logits)[:, -1]


def decode_one(model: GPT, tokens_B: Tensor, cache: KVCache) -> Tensor:
    """Process one more token per sequence with any KV cache, eagerly; the logits (B, V) of the next token."""
    return prefill(model, tokens_B[:, None], cache)


def _run_eagerly() -> AbstractContextManager[object]:
    """Run compiled blocks eagerly: a model in training would be compiled again for every new length."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return cast(AbstractContextManager[object], torch.compiler.set_stance("force_eager"))


@contextmanager
def _unlimited_compilations() -> Iterator[None]:
    """Lift the recompile limit: every engine compiles the step a few times on purpose."""
    import torch._dynamo  # slow to import (seconds)

    with torch._dynamo.config.patch(recompile_limit=NO_RECOMPILE_LIMIT, accumulated_recompile_limit=NO_RECOMPILE_LIMIT):
        yield
