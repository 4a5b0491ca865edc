"""`LLM`, the front end of the engine; `generate` for a single prompt of token ids; `encode_prompt` for text."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError, DataError, RequestError
from whimbrel.base.progress import Progress
from whimbrel.inference.adapters import open_adapter
from whimbrel.inference.beam import Beam, beam_search
from whimbrel.inference.detokenizer import TextStream, stream_text
from whimbrel.inference.engine import Engine, EngineConfig
from whimbrel.inference.sampling import SamplingParams, non_finite_error
from whimbrel.inference.sequence import Event, Logprob, Request, as_token_ids, as_token_set
from whimbrel.inference.speculative import Draft
from whimbrel.model_io import ModelLocation, ModelSource, load_tokenizer, open_model
from whimbrel.models import GPT
from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, ChatTemplate, Message, Tokenizer
from whimbrel.tokenization.tokenizer import EncodedPrompt

__all__ = ["LLM", "Completion", "RequestOutput", "encode_prompt", "generate"]

Prompt = str | Sequence[int] | Tensor

MIN_TOKENS_FOR_GRAPHS = 64
"""Below this many tokens, capturing a CUDA graph takes longer than it saves."""


@dataclass(slots=True)
class Completion:
    """One completion of a prompt."""

    tokens: list[int] = field(default_factory=list)
    """Without the prompt and the stop token; tokens that spell a stop string are included."""
    finish_reason: Literal["stop", "length"] | None = None
    """`stop` if a stop token or a stop string ended it."""
    text: str | None = None
    """Up to the stop string; None without a tokenizer."""
    hit_stop_string: bool = False
    """Whether a stop string ended it, not a stop token."""
    logprobs: list[Logprob] = field(default_factory=list)
    """Log-probability of each token before temperature and penalties, if `logprobs` was set."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The completions of one prompt."""

    prompt_ids: list[int]
    outputs: list[Completion]
    """One per sample."""


class LLM:
    """Generates text with the inference engine: in batches, with a paged KV cache, and on a GPU with CUDA graphs.

    `model` is a `GPT`, or a path: a run (its newest checkpoint), a model or adapter directory, or a llama2.c file. With
    a path (or what `open_model` returns), the tokenizer, the end-of-text tokens and the default sampling parameters
    come with the model, and `quantize` (int8, int8-dynamic, int4, fp8) quantizes the weights while loading. `device`
    and `quantize` are for paths only. `adapters` are directories or runs with adapters of the model, by name; requests
    that choose one, or none, are batched together. Other keyword arguments are those of `EngineConfig`.
    """

    def __init__(
        self,
        model: GPT | ModelSource | str | Path,
        tokenizer: Tokenizer | str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        quantize: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **engine_options: Any,
    ) -> None:
        self.tokenizer: Tokenizer | None = None
        self.eos_ids: frozenset[int] = frozenset()
        """End-of-text token ids."""
        self.bos_id: int | None = None
        self._location: ModelLocation | None = None
        self.default_sampling: dict[str, Any] = {}
        """Sampling parameters of the model's generation_config.json."""
        if isinstance(model, str | Path):
            model = open_model(model, tokenizer)
        if isinstance(model, ModelSource):
            self.tokenizer, defaults = model.tokenizer, model.generation_config
            self.eos_ids, self.bos_id = frozenset(defaults.eos_token_ids), defaults.bos_token_id
            self.default_sampling = dict(defaults.sampling)
            self._location = model.location
            if device is None:
                device = "cuda" if torch.cuda.is_available() else "cpu"
            model = model.load_model(device=device, quantize=quantize)
        else:
            for name, value in (("device", device), ("quantize", quantize)):
                if value is not None:
                    raise ConfigError(
                        f"{name}: expected None with a loaded model, got {value!r}: pass its path instead"
                    )
        if self.tokenizer is None and tokenizer is not None:
            self.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
            self.eos_ids = frozenset({self.tokenizer.eot_id})
        opened = {
            name: open_adapter(name, path, model, self._location, self.tokenizer)
            for name, path in (adapters or {}).items()
        }
        self._adapters = {name: source for name, (_, source) in opened.items()}
        self._check_tokenizers()
        self.engine = Engine(
            model, EngineConfig(**engine_options), {name: adapter for name, (adapter, _) in opened.items()}
        )
        self._event_queues: dict[int, deque[Event]] = {}  # request id -> events not yet consumed

    def _check_tokenizers(self) -> None:
        for name, source in self._adapters.items():
            if source is not None and self.tokenizer is not None:
                vocabularies = [each.pipeline.get_vocab() for each in (source.tokenizer, self.tokenizer)]
                if vocabularies[0] != vocabularies[1]:
                    raise ConfigError(
                        f"adapters: expected '{name}' to use the base model's tokenizer, got another: load it alone"
                    )

    @property
    def model(self) -> GPT:
        return self.engine.model

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template, or `DEFAULT_CHAT_TEMPLATE`."""
        return (None if self._location is None else self._location.chat_template()) or DEFAULT_CHAT_TEMPLATE

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int = 256,
        n: int = 1,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_ids: int | Collection[int] | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        draft: Draft | None = None,
        num_draft_tokens: int = 4,
        parse_special: bool = True,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Generate `n` completions per prompt (a string or token ids); returns one result per prompt.

        A completion does not depend on the other prompts; the first of each prompt is what `whimbrel.generate` returns
        for the same seed. A sequence that fills the model's context continues from the newest half of it.
        """
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "n": n,
            "seed": seed,
            "logprobs": logprobs,
            "draft": draft,
        }
        options |= {"num_draft_tokens": num_draft_tokens, "adapter": adapter}
        stop_set = self._stop_set(stop_ids, ignore_eos, adapter)
        is_single = isinstance(prompts, str | Tensor) or (len(prompts) > 0 and isinstance(prompts[0], int))
        requests = [
            self._request(self.encode(prompt, parse_special=parse_special), sampling, stop_set, **options)
            for prompt in cast("Sequence[Prompt]", [prompts] if is_single else prompts)
        ]
        return self.complete(requests, [stop] * len(requests))

    def complete(
        self,
        requests: Sequence[Request],
        stop: Sequence[Sequence[str]] = (),
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Run requests that may have different settings; `stop` has the stop strings of each request.

        `progress` advances by one per completion.
        """
        stop = stop or [()] * len(requests)
        streams = [
            [self._text_stream(request, strings) for _ in range(request.n)]
            for request, strings in zip(requests, stop, strict=True)
        ]
        text = None if self.tokenizer is None else ""
        outputs = [[Completion(text=text) for _ in range(request.n)] for request in requests]
        for index, event in self._run(requests):
            completion, stream = outputs[index][event.sample], streams[index][event.sample]
            if event.token is not None and completion.finish_reason is None:
                completion.tokens.append(event.token)
                if requests[index].logprobs is not None:
                    completion.logprobs.append(Logprob(event.logprob, event.top))
                if stream is not None and completion.text is not None:
                    completion.text += stream.push(event.token)
                    if stream.stopped:
                        completion.finish_reason, completion.hit_stop_string = "stop", True
                        self._finish(event)
            if event.finish_reason in ("stop", "length") and completion.finish_reason is None:
                completion.finish_reason = event.finish_reason
            if progress is not None and event.finish_reason is not None:
                progress.advance(1)
        for completion, stream in zip(chain(*outputs), chain(*streams), strict=True):
            if stream is not None and completion.text is not None:
                completion.text += stream.flush()
        return [RequestOutput(list(request.prompt_ids), each) for request, each in zip(requests, outputs, strict=True)]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int = 256,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_ids: int | Collection[int] | None = None,
        ignore_eos: bool = False,
        draft: Draft | None = None,
        num_draft_tokens: int = 4,
        parse_special: bool = True,
        adapter: str | None = None,
    ) -> Iterator[str]:
        """Yield generated text as it becomes available, in pieces of complete characters.

        Arguments are validated immediately, not at the first piece. Closing the iterator aborts the request.
        """
        ids, stop_set = self.encode(prompt, parse_special=parse_special), self._stop_set(stop_ids, ignore_eos, adapter)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed, "draft": draft, "adapter": adapter}
        options |= {"num_draft_tokens": num_draft_tokens}
        request = self._request(ids, sampling, stop_set, **options)
        if self.tokenizer is None:
            raise RequestError("expected a tokenizer to stream text, got none: pass tokenizer to LLM")
        return stream_text(self.tokenizer, ids, self._tokens(request), stop)

    def stream_tokens(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int = 256,
        seed: int | None = None,
        stop_ids: int | Collection[int] | None = None,
        ignore_eos: bool = False,
        draft: Draft | None = None,
        num_draft_tokens: int = 4,
        adapter: str | None = None,
    ) -> Iterator[int]:
        """Like `stream`, but yields token ids."""
        ids, stop_set = self.encode(prompt), self._stop_set(stop_ids, ignore_eos, adapter)
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed, "draft": draft, "adapter": adapter}
        options |= {"num_draft_tokens": num_draft_tokens}
        request = self._request(ids, sampling, stop_set, **options)
        return self._tokens(request)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        adapter: str | None = None,
        **options: Any,
    ) -> RequestOutput:
        """The answer to a conversation, rendered with the model's or the adapter's chat template.

        `tools` are JSON schemas of functions; calls are not parsed from the text. Other options are as in `generate`.
        """
        if self.tokenizer is None:
            raise RequestError("expected a tokenizer to chat, got none: pass tokenizer to LLM")
        source = self._source(adapter)
        template = self.template if source is None else source.chat_template() or DEFAULT_CHAT_TEMPLATE
        ids = template.encode(self.tokenizer, messages, tools=tools)
        stop = (*template.stop_strings, *options.pop("stop", ()))
        [output] = self.generate([ids], sampling, stop=stop, adapter=adapter, **options)
        return output

    def beam_search(
        self,
        prompt: Prompt,
        *,
        num_beams: int = 4,
        max_new_tokens: int = 256,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
        adapter: str | None = None,
    ) -> list[Beam]:
        """The most likely continuations of a prompt, best first; see `whimbrel.inference.beam_search`."""
        return beam_search(
            self.engine,
            self.encode(prompt),
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            length_penalty=length_penalty,
            stop_ids=self._stop_set(None, ignore_eos, adapter),
            adapter=adapter,
        )

    def encode(self, prompt: Prompt, *, parse_special: bool = True) -> list[int]:
        """Token ids of a prompt; an empty string is the model's BOS token."""
        if not isinstance(prompt, str):
            return as_token_ids(prompt, self.model.config.vocab_size)
        if self.tokenizer is None:
            raise RequestError("expected token ids, got a string: pass tokenizer to LLM")
        return encode_prompt(self.tokenizer, prompt, parse_special=parse_special, bos_id=self.bos_id).ids

    def _request(
        self, ids: list[int], sampling: SamplingParams | None, stop_ids: frozenset[int], **options: Any
    ) -> Request:
        if sampling is None:
            source = self._source(options["adapter"])
            sampling = SamplingParams(
                **(self.default_sampling if source is None else source.generation_config.sampling)
            )
        sampling.check_vocabulary(self.model.config.vocab_size)
        if options["max_new_tokens"] < 1:
            raise RequestError(f"max_new_tokens: expected at least 1, got {options['max_new_tokens']}")
        return Request(prompt_ids=tuple(ids), sampling=sampling, stop_ids=stop_ids, context_shift=True, **options)

    def _text_stream(self, request: Request, stop: Sequence[str]) -> TextStream | None:
        if self.tokenizer is None:
            if stop:
                raise RequestError("stop: expected a tokenizer to find stop strings, got none: pass tokenizer to LLM")
            return None
        return TextStream(self.tokenizer, request.prompt_ids, stop)

    def _stop_set(
        self, stop_ids: int | Collection[int] | None, ignore_eos: bool, adapter: str | None
    ) -> frozenset[int]:
        if ignore_eos:
            return as_token_set(stop_ids)
        source = self._source(adapter)
        return as_token_set(stop_ids) | (self.eos_ids if source is None else {*source.generation_config.eos_token_ids})

    def _source(self, adapter: str | None) -> ModelSource | None:
        """Tokenizer, chat template and generation defaults of an adapter; None: use the model's."""
        self.engine.adapter_index(adapter)
        return None if adapter is None else self._adapters[adapter]

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Event]]:
        """Events with the index of their request, until all have finished.

        Several iterators may be interleaved: each step advances all of them. Closing an iterator aborts its requests.
        """
        if not requests:
            raise RequestError("prompts: expected at least one, got none")
        indices: dict[int, int] = {}
        queue: deque[Event] = deque()
        try:
            for index, request in enumerate(requests):
                request_id = self.engine.add_request(request)
                indices[request_id], self._event_queues[request_id] = index, queue
            unfinished = sum(request.n for request in requests)
            while unfinished:
                while not queue:
                    for event in self.engine.step():
                        self._event_queues[event.request_id].append(event)
                event = queue.popleft()
                if event.finish_reason == "error":
                    raise non_finite_error()
                unfinished -= event.finish_reason is not None
                yield indices[event.request_id], event
        finally:
            for request_id in indices:
                self.engine.abort(request_id)
                del self._event_queues[request_id]

    def _finish(self, event: Event) -> None:
        """Finish a sample whose text reached a stop string; the engine only knows stop tokens."""
        if event.finish_reason is None:
            queue = self._event_queues[event.request_id]
            dropped = [each for each in queue if (each.request_id, each.sample) == (event.request_id, event.sample)]
            for each in dropped:
                queue.remove(each)
            self.engine.abort(event.request_id, event.sample)
            queue.append(Event(event.request_id, event.sample, finish_reason="stop"))

    def _tokens(self, request: Request) -> Iterator[int]:
        for _, event in self._run([request]):
            if event.token is not None:
                yield event.token


def encode_prompt(
    tokenizer: Tokenizer,
    text: str,
    *,
    parse_special: bool = True,
    bos_id: int | None = None,
    max_tokens: int | None = None,
) -> EncodedPrompt:
    """Token ids of a text prompt, as from transformers' `tokenizer(text)`; raises RequestError if it is not Unicode.

    Special tokens in the text are parsed (`<|im_start|>` is one token) unless `parse_special` is false. An empty prompt
    is `bos_id`, by default the tokenizer's. If a text has far more than `max_tokens` tokens, only its beginning is
    encoded, which already exceeds the limit.
    """
    try:
        encoded = tokenizer.encode_prompt(text, parse_special=parse_special, max_tokens=max_tokens)
    except DataError as error:  # a lone surrogate, which is also how Python represents invalid bytes of a command line
        raise RequestError(f"prompt: {error}", field="prompt") from error
    return encoded if encoded.ids else EncodedPrompt([tokenizer.bos_id if bos_id is None else bos_id], [0])


def generate(
    model: GPT,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop_ids: int | Collection[int] | None = None,
    stop: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    kv_cache_dtype: str = "none",
    compile: bool = False,  # noqa: A002
) -> list[int]:
    """Generate token ids after a prompt; the prompt and the stop token are not included.

    Temperature 0 is greedy. The same seed gives the same tokens. `stop` are strings, found in the text that
    `tokenizer` decodes. A sequence that fills the model's context continues from the newest half of it.
    `kv_cache_dtype` is the quantization of keys and values: none, fp8, int8 or int4. Every call builds an engine: use
    `LLM` for many prompts.
    """
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
    )
    ids = as_token_ids(prompt_ids, model.config.vocab_size)
    block_size = EngineConfig().block_size
    length = min(len(ids) + max(max_new_tokens, 1), model.config.context_length)
    llm = LLM(
        model,
        tokenizer,
        max_batch=1,
        num_blocks=-(-length // block_size) + 1,
        prefill_chunk=length,
        prefix_cache=False,
        kv_cache_dtype=kv_cache_dtype,
        compile=compile,
        cuda_graphs=max_new_tokens >= MIN_TOKENS_FOR_GRAPHS,
    )
    [output] = llm.generate(
        [ids], sampling, max_new_tokens=max_new_tokens, seed=seed, stop=stop, stop_ids=stop_ids, ignore_eos=True
    )
    return output.outputs[0].tokens
