"""The FastAPI app: routes of the OpenAI-compatible API, health, metrics and the web pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer

from whimbrel import __version__
from whimbrel.inference import PromptLimits, SamplingParams
from whimbrel.inference import Request as EngineRequest
from whimbrel.server.config import ServeConfig
from whimbrel.server.errors import ApiError, ErrorBody, add_error_handlers, json_response
from whimbrel.server.middleware import (
    METRICS_CONTENT_TYPE,
    AccessMiddleware,
    BodyMiddleware,
    Metrics,
    MetricsMiddleware,
    RequestTracker,
    is_authorized,
    on_request_end,
    request_log,
)
from whimbrel.server.schema import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    GenerationRequest,
    ModelCard,
    ModelList,
)
from whimbrel.server.served_model import Prompt, ServedModel
from whimbrel.server.static_files import add_static_files
from whimbrel.server.streaming import ChatFormat, CompletionFormat, PromptContext, ResponseBuilder, ResponseFormat
from whimbrel.server.tool_calls import find_parser, supports_tools
from whimbrel.server.worker import EngineProtocol, Worker
from whimbrel.tokenization.chat_template import DEFAULT_CHAT_TEMPLATE

__all__ = ["Service"]

T = TypeVar("T")

COMPLETIONS, CHAT_COMPLETIONS = "/v1/completions", "/v1/chat/completions"
PAGE_ACCESS = "/page/access"
"""Tells the pages whether to ask for a key. A rejected request would be logged as an error in the browser's console."""
DEFAULT_MAX_TOKENS = 16
"""`max_tokens` of a completion request that does not set it."""

SAMPLING_PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)

ENCODER_THREADS = 2
"""Number of threads that encode completion prompts, and of those that render and encode conversations."""

STATIC_FILES = {
    "/": "chat.html",
    "/docs": "docs.html",
    "/favicon.ico": "icon.svg",  # which browsers request with a JSON document
    "/page/chat.css": "chat.css",
    "/page/chat.js": "chat.js",
    "/page/client.js": "client.js",
    "/page/docs.css": "docs.css",
    "/page/docs.js": "docs.js",
    "/page/dompurify.js": "dompurify/purify.min.js",
    "/page/icon.svg": "icon.svg",
    "/page/markdown.js": "markdown.js",
    "/page/marked.js": "marked/marked.umd.js",
    "/page/theme.css": "theme.css",
    "/page/turns.js": "turns.js",
}

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is invalid or cannot be served."},
    "5XX": {"model": ErrorBody, "description": "The server failed or is unavailable."},
}


class Service:
    """The app of one served model and its adapters, with its worker, request tracker and metrics."""

    def __init__(
        self, model: ServedModel, engine: EngineProtocol, config: ServeConfig, adapters: Sequence[ServedModel] = ()
    ) -> None:
        self.model, self.config = model, config
        self.models = {each.name: each for each in (model, *adapters)}
        self.worker, self.requests = Worker(engine), RequestTracker()
        # Few threads, since each can use a lot of memory; two pools, so a slow chat template cannot block prompts.
        self._prompt_threads = ThreadPoolExecutor(ENCODER_THREADS, "whimbrel-encode")
        self._chat_threads = ThreadPoolExecutor(ENCODER_THREADS, "whimbrel-chat")
        self.app = FastAPI(
            title="Whimbrel",
            version=__version__,
            summary=f"OpenAI-compatible API of the model {model.name}.",
            docs_url=None,  # FastAPI's own pages load scripts from other sites; /docs is ours
            redoc_url=None,
            redirect_slashes=False,
            lifespan=self._lifespan,
        )
        add_error_handlers(self.app)
        self._add_routes()
        self.app.openapi = self._openapi  # type: ignore[method-assign]
        page_paths = {PAGE_ACCESS, *STATIC_FILES}
        paths = {*page_paths, COMPLETIONS, CHAT_COMPLETIONS, "/health", "/metrics", "/openapi.json", "/v1/models"}
        self.metrics = Metrics(self.worker, paths)
        # The middleware added last runs first.
        body_paths = (COMPLETIONS, CHAT_COMPLETIONS)
        self.app.add_middleware(BodyMiddleware, config=config, requests=self.requests, paths=body_paths)
        public_paths = {"/health", *page_paths}
        self.app.add_middleware(AccessMiddleware, config=config, requests=self.requests, public_paths=public_paths)
        debug_paths = {"/health", "/metrics", *page_paths}  # polled, or requested with every page
        self.app.add_middleware(MetricsMiddleware, metrics=self.metrics, debug_paths=debug_paths)

    def _add_routes(self) -> None:
        # `AccessMiddleware` checks the key; this only documents it in /openapi.json.
        router = APIRouter(dependencies=[Depends(HTTPBearer(auto_error=False))] if self.config.api_key else [])
        add = router.add_api_route
        add("/v1/models", self.list_models, responses=ERROR_RESPONSES | {200: {"model": ModelList}})
        add("/v1/models/{name:path}", self.get_model, responses=ERROR_RESPONSES | {200: {"model": ModelCard}})
        add(COMPLETIONS, self.create_completion, methods=["POST"], responses=_streaming_responses(CompletionResponse))
        add(
            CHAT_COMPLETIONS,
            self.create_chat_completion,
            methods=["POST"],
            responses=_streaming_responses(ChatCompletionResponse),
        )
        add("/metrics", self.get_metrics, responses=ERROR_RESPONSES, response_class=Response)
        self.app.include_router(router)
        self.app.add_api_route("/health", self.health, responses=ERROR_RESPONSES)
        self.app.add_api_route("/health", self.health, methods=["HEAD"], include_in_schema=False)
        self.app.add_api_route(PAGE_ACCESS, self.get_access, include_in_schema=False)
        add_static_files(self.app, STATIC_FILES)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.worker.start()
        yield
        for pool in (self._prompt_threads, self._chat_threads):
            pool.shutdown(wait=False, cancel_futures=True)
        await self.worker.close()

    def stop(self) -> None:
        """Stop generating; running requests fail."""
        self.worker.stop()

    async def health(self) -> Response:
        """Return 200 if the server can answer requests."""
        if self.requests.draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        if not self.worker.healthy:
            raise ApiError(503, "the engine keeps failing: see the server log", code="engine_failed")
        return json_response({"status": "ok"})

    async def get_access(self, request: Request) -> Response:
        """Return whether the request has the API key, if one is needed. Requests to the API without it get a 401."""
        authorized = is_authorized(request.scope, self.config.api_key)
        return json_response({"authorized": authorized}, headers={"Cache-Control": "no-store"})

    async def get_metrics(self) -> Response:
        """Return metrics of the server and its engine in Prometheus' text format."""
        return Response(self.metrics.text(), media_type=METRICS_CONTENT_TYPE)

    async def list_models(self) -> Response:
        """List the served model and its adapters."""
        return json_response({"object": "list", "data": [self._model_card(each) for each in self.models.values()]})

    async def get_model(self, name: str) -> Response:
        """Describe the served model, or an adapter."""
        return json_response(self._model_card(self._find_model(name)))

    async def create_completion(self, body: CompletionRequest, request: Request) -> Response:
        """Complete one or more prompts."""
        model = self._check_request(body, len(body.prompt))
        max_new_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompts = await _run_in_thread(
            self._prompt_threads,
            model.encode_prompts,
            body.prompt,
            self._max_prompt_tokens(max_new_tokens),
            body.parse_special is not False,
            self._truncate_to(body, max_new_tokens),
        )
        contexts = [PromptContext(prompt, body.stop or (), echo=bool(body.echo)) for prompt in prompts]
        prompt_logprobs = body.logprobs if body.echo else None
        engine_requests = [
            self._engine_request(model, body, prompt, max_new_tokens, body.logprobs, prompt_logprobs)
            for prompt in prompts
        ]
        response_format = CompletionFormat(model.token_texts, with_logprobs=body.logprobs is not None)
        return await self._respond(model, body, request, contexts, engine_requests, response_format)

    async def create_chat_completion(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        model = self._check_request(body, 1)
        max_new_tokens = self.worker.context_length if body.max_new_tokens is None else body.max_new_tokens
        messages = [message.for_template() for message in body.messages]
        tools = None if body.tool_choice == "none" else body.tools or None
        prompt = await _run_in_thread(
            self._chat_threads,
            model.encode_chat,
            messages,
            self._max_prompt_tokens(max_new_tokens),
            tools,
            self._truncate_to(body, max_new_tokens),
        )
        parser = tools and find_parser(model.chat_template, {tool["function"]["name"] for tool in tools})
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        stops = [*(body.stop or ()), *model.chat_template.stop_strings]
        contexts = [PromptContext(prompt, stops, echo=False, tool_parser=parser or None)]
        engine_requests = [self._engine_request(model, body, prompt, max_new_tokens, logprobs)]
        response_format = ChatFormat(model.token_texts, with_logprobs=bool(body.logprobs))
        return await self._respond(model, body, request, contexts, engine_requests, response_format)

    async def _respond(
        self,
        model: ServedModel,
        body: GenerationRequest,
        request: Request,
        contexts: Sequence[PromptContext],
        engine_requests: Sequence[EngineRequest],
        response_format: ResponseFormat,
    ) -> Response:
        """Submit requests to the engine and build the response from their events."""
        job = await self.worker.submit(engine_requests)
        on_request_end(request.scope, job.cancel)
        builder = ResponseBuilder(model, body, contexts, job, response_format)
        entry = request_log(request.scope)
        entry.user, entry.usage = body.user, builder.usage
        return builder.stream() if body.stream else await builder.complete()

    def _engine_request(
        self,
        model: ServedModel,
        body: GenerationRequest,
        prompt: Prompt,
        max_new_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> EngineRequest:
        sampling = {name: value for name in SAMPLING_PARAMETERS if (value := getattr(body, name)) is not None}
        return EngineRequest(
            prompt_ids=prompt.ids,
            max_new_tokens=min(max_new_tokens, self.worker.context_length),
            sampling=SamplingParams(**{**model.default_sampling, **sampling}, logit_bias=body.logit_bias),
            seed=body.seed,
            n=body.n or 1,
            stop_ids=model.eos_ids,
            adapter=model.adapter,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _check_request(self, body: GenerationRequest, num_prompts: int) -> ServedModel:
        """The model of a request; raises ApiError if there is none, or if it asks for too many completions."""
        model = self._find_model(body.model)
        choices, limit = num_prompts * (body.n or 1), self.config.max_choices
        if choices > limit:
            message = f"expected at most {limit} completions per request (prompts x n), got {choices}"
            raise ApiError(400, message, param="n", code="invalid_value")
        return model

    def _find_model(self, name: str) -> ServedModel:
        if name not in self.models:
            served = ", ".join(map(repr, self.models))
            message = f"unknown model {name[:64]!r}: this server serves {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.models[name]

    def _max_prompt_tokens(self, max_new_tokens: int) -> int:
        """Maximum prompt length that leaves space for a new token, unless none is requested."""
        limit = self.worker.context_length - min(1, max_new_tokens)
        return min(limit, self.config.max_prompt_tokens or limit)

    def _truncate_to(self, body: GenerationRequest, max_new_tokens: int) -> PromptLimits | None:
        """The lengths to which prompts are truncated, if the request asks for it and the context can be halved."""
        if body.truncation != "auto" or self.worker.context_length < 2:
            return None
        limit = self._max_prompt_tokens(max_new_tokens)
        limits = PromptLimits.of(self.worker.context_length, max_new_tokens)
        return PromptLimits(min(limits.complete, limit), min(limits.truncated, limit), limit)

    def _model_card(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "whimbrel",
            "parent": self.model.name if model.adapter else None,
            "context_length": self.worker.context_length,
            "num_parameters": model.model.num_parameters(),
            "dtype": model.dtype,
            "vocab_size": model.model.config.vocab_size,
            "has_chat_template": model.chat_template is not DEFAULT_CHAT_TEMPLATE,
            "supports_tools": supports_tools(model.chat_template),
            "generation_config": model.generation_config,
        }

    def _openapi(self) -> dict[str, Any]:
        """The OpenAPI document, with the model's name and vocabulary size filled in."""
        app = self.app
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            schemas = document["components"]["schemas"]
            for name in ("CompletionRequest", "ChatCompletionRequest"):
                schemas[name]["properties"]["model"]["enum"] = list(self.models)
                # pydantic writes it as a float, which rounds it.
                schemas[name]["properties"]["seed"]["anyOf"][0]["maximum"] = 2**63 - 1
            [parameter] = document["paths"]["/v1/models/{name}"]["get"]["parameters"]
            parameter["schema"]["enum"] = list(self.models)
            if not any(each.chat_template.features.reads_tools for each in self.models.values()):
                for name, field in (("ChatCompletionRequest", "tools"), ("Message", "tool_calls")):
                    del schemas[name]["properties"][field]
            prompt = schemas["CompletionRequest"]["properties"]["prompt"]
            _limit_token_ids(prompt, self.model.model.config.vocab_size - 1)
            app.openapi_schema = document
        return app.openapi_schema


def _streaming_responses(model: type) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a route that can stream."""
    description = (
        "The completions. With stream = true they are sent in chunks of the same format, one per event, then [DONE]."
    )
    return ERROR_RESPONSES | {200: {"model": model, "content": {"text/event-stream": {}}, "description": description}}


def _limit_token_ids(schema: dict[str, Any], maximum: int) -> None:
    """Set the maximum of all integers in a JSON schema."""
    if schema.get("type") == "integer":
        schema["maximum"] = maximum
    for inner in [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())]:
        _limit_token_ids(inner, maximum)


async def _run_in_thread(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
