"""From a request to an answer: submit it, follow its texts, send them whole or as they grow."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse

from whimbrel.server.choice import Choice, Piece, Source
from whimbrel.server.errors import ApiError, json_response
from whimbrel.server.requests import Drawing
from whimbrel.server.served import Served
from whimbrel.server.shapes import Shape
from whimbrel.server.worker import Job, non_finite

__all__ = ["Answer"]


class Answer:
    """The texts of one request, in the shape of its route."""

    def __init__(self, served: Served, asked: Drawing, sources: Sequence[Source], job: Job, shape: Shape) -> None:
        self._job, self._shape, self._sources = job, shape, sources
        n = asked.n or 1
        self._choices = [
            [Choice(place * n + sample, source, served.tokenizer, scored=shape.scored) for sample in range(n)]
            for place, source in enumerate(sources)
        ]
        self._usage_asked = asked.stream_options is not None and asked.stream_options.include_usage
        self._head = {
            "id": f"{shape.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }

    async def whole(self) -> Response:
        """Every text at once, when the last has ended."""
        texts = {choice.index: Piece() for choices in self._choices for choice in choices}
        async for choice, piece in self._pieces():
            texts[choice.index].extend(piece)
        choices = [self._shape.whole(index, text) for index, text in texts.items()]
        head = {**self._head, "object": self._shape.whole_object}
        return json_response({**head, "choices": choices, "usage": self.usage()})

    def stream(self) -> Response:
        """Texts as they grow, as server-sent events."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(), headers=headers, media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        head = {**self._head, "object": self._shape.piece_object}
        if self._usage_asked:
            head["usage"] = None
        try:
            for choices in self._choices:
                for choice in choices:
                    if (opening := self._shape.opening(choice.index)) is not None:
                        yield _event({**head, "choices": [opening]})
            async for choice, piece in self._pieces():
                yield _event({**head, "choices": [self._shape.piece(choice.index, piece)]})
            if self._usage_asked:
                yield _event({**head, "choices": [], "usage": self.usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status has been sent: all that is left is to say so
            yield _event(error.body)

    async def _pieces(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """What can be sent, until every text has ended. Tokens of a text that came together go out together."""
        going_on = sum(len(choices) for choices in self._choices)
        async for arrived in self._job:
            grown: dict[Choice, Piece] = {}
            for place, event in arrived:
                if event.prompt is not None:
                    self._sources[place].scores = event.prompt
                choice = self._choices[place][event.sample]
                if event.finish_reason == "error" and choice.finish is None:
                    raise non_finite()
                piece = choice.take(event)
                grown.setdefault(choice, Piece()).extend(piece)
                if piece.finish is not None:
                    going_on -= 1
                    if event.finish_reason is None:  # a stop string, of which the engine knows nothing
                        self._job.cancel(place, event.sample)
            for choice, piece in grown.items():
                if piece:
                    yield choice, piece
            if not going_on:
                return

    def usage(self) -> dict[str, int]:
        """Token counts of the prompts and of the completions so far."""
        read = sum(len(source.prompt.ids) for source in self._sources)
        written = sum(choice.tokens for choices in self._choices for choice in choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
