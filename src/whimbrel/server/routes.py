"""What the server answers: models, completions, conversations, health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from whimbrel.inference import Request as Work
from whimbrel.inference import SamplingParams
from whimbrel.server.answer import Answer
from whimbrel.server.choice import Source
from whimbrel.server.config import ServeConfig
from whimbrel.server.errors import ApiError, ErrorBody, json_response
from whimbrel.server.intake import at_the_end
from whimbrel.server.metrics import record_of
from whimbrel.server.prompts import Prompt
from whimbrel.server.requests import ChatRequest, CompletionRequest, Drawing
from whimbrel.server.served import Served
from whimbrel.server.shapes import ChatAnswer, ChatShape, CompletionAnswer, CompletionShape, Models, OneModel, Shape
from whimbrel.server.worker import Worker

__all__ = ["Routes"]

T = TypeVar("T")

DRAWN_BY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
ENCODERS = 2
"""Number of threads that encode completion prompts, and of those that encode conversations."""
COMPLETION_TOKENS = 16
"""How many tokens a completion has at most where the request does not say."""

FAULTS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorBody, "description": "The server cannot serve it now."},
}


def _answers(model: type) -> dict[int | str, dict[str, Any]]:
    """A whole answer, or the same in pieces."""
    words = "The texts that were asked for; with stream = true in pieces of the same shape, one an event, then [DONE]."
    return FAULTS | {200: {"model": model, "content": {"text/event-stream": {}}, "description": words}}


class Routes:
    """The routes of one served model."""

    def __init__(self, served: Served, worker: Worker, config: ServeConfig) -> None:
        self.served, self.worker, self.config = served, worker, config
        # Few, because each may need much memory; two kinds, because a chat template may be slow.
        self._readers = ThreadPoolExecutor(ENCODERS, "whimbrel-encode")
        self._renderers = ThreadPoolExecutor(ENCODERS, "whimbrel-chat")
        self.router = APIRouter()
        add = self.router.add_api_route
        add("/v1/models", self.models, responses=FAULTS | {200: {"model": Models}})
        add("/v1/models/{name:path}", self.model, responses=FAULTS | {200: {"model": OneModel}})
        add("/v1/completions", self.complete, methods=["POST"], responses=_answers(CompletionAnswer))
        add("/v1/chat/completions", self.converse, methods=["POST"], responses=_answers(ChatAnswer))

    def close(self) -> None:
        """Stop encoding prompts."""
        for pool in (self._readers, self._renderers):
            pool.shutdown(wait=False, cancel_futures=True)

    async def models(self) -> Response:
        """List the model that is served."""
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        """Describe the model that is served."""
        self._check_model(name)
        return json_response(self._card())

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        """Go on from one text or several."""
        self._check(asked, len(asked.prompt))
        length = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        most = self._longest_prompt(length)
        parsed = asked.parse_special is not False
        prompts = await self._in_thread(self._readers, self.served.reader.read, asked.prompt, most, parsed)
        sources = [Source(prompt, asked.stop or (), echo=bool(asked.echo)) for prompt in prompts]
        scored_before = asked.logprobs if asked.echo else None
        work = [self._work(asked, prompt, length, asked.logprobs, scored_before) for prompt in prompts]
        shape = CompletionShape(self.served.texts, scored=asked.logprobs is not None)
        return await self._answer(asked, request, sources, work, shape)

    async def converse(self, asked: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        self._check(asked, 1)
        length = self.worker.context_length if asked.length is None else asked.length
        messages = [message.model_dump() for message in asked.messages]
        for message in messages:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
        prompt = await self._in_thread(
            self._renderers, self.served.reader.converse, messages, self._longest_prompt(length)
        )
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        shape = ChatShape(self.served.texts, scored=bool(asked.logprobs))
        work = [self._work(asked, prompt, length, logprobs)]
        stops = [*(asked.stop or ()), *self.served.template.stops]
        return await self._answer(asked, request, [Source(prompt, stops, echo=False)], work, shape)

    async def _in_thread(self, pool: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)

    async def _answer(
        self,
        asked: Drawing,
        request: Request,
        sources: Sequence[Source],
        work: Sequence[Work],
        shape: Shape,
    ) -> Response:
        job = await self.worker.submit(work)
        at_the_end(request.scope, job.cancel)
        answer = Answer(self.served, asked, sources, job, shape)
        record = record_of(request.scope)
        record.user, record.usage = asked.user, answer.usage
        return answer.stream() if asked.stream else await answer.whole()

    def _work(
        self, asked: Drawing, prompt: Prompt, length: int, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> Work:
        given = {name: value for name in DRAWN_BY if (value := getattr(asked, name)) is not None}
        return Work(
            prompt_ids=prompt.ids,
            max_new_tokens=min(length, self.worker.context_length),
            sampling=SamplingParams(**{**self.served.defaults, **given}, logit_bias=asked.logit_bias),
            seed=asked.seed,
            n=asked.n or 1,
            stop_ids=self.served.stop_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _check(self, asked: Drawing, prompts: int) -> None:
        self._check_model(asked.model)
        choices = prompts * (asked.n or 1)
        if choices > self.config.max_choices:
            raise ApiError(
                400,
                f"{choices} texts in one request, prompts times n: ask for at most {self.config.max_choices}",
                param="n",
                code="invalid_value",
            )

    def _check_model(self, name: str) -> None:
        if name != self.served.name:
            raise ApiError(
                404,
                f"there is no model {name[:64]!r}: this server has {self.served.name!r}",
                param="model",
                code="model_not_found",
            )

    def _longest_prompt(self, length: int) -> int:
        """How many tokens a prompt may have before a text of `length` tokens."""
        room = self.worker.context_length - min(1, length)
        return min(room, self.config.max_prompt_tokens or room)

    def _card(self) -> dict[str, Any]:
        served = self.served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "whimbrel",
            "context_length": self.worker.context_length,
        }
