"""The app: a served model, its worker and its routes behind the gate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Response
from fastapi.security import HTTPBearer

from whimbrel import __version__
from whimbrel.server.config import ServeConfig
from whimbrel.server.document import document
from whimbrel.server.errors import ApiError, answer_errors, json_response
from whimbrel.server.gate import Gate
from whimbrel.server.intake import Intake
from whimbrel.server.metrics import CONTENT_TYPE, Meter, Metrics
from whimbrel.server.page import FILES, page_routes
from whimbrel.server.routes import FAULTS, Routes
from whimbrel.server.served import Served
from whimbrel.server.traffic import Traffic
from whimbrel.server.worker import Steps, Worker

__all__ = ["Service"]

TAKING = ("/v1/completions", "/v1/chat/completions")
"""Paths that take a body."""


class Service:
    """What a running server is made of."""

    def __init__(self, served: Served, engine: Steps, config: ServeConfig) -> None:
        self.config, self.traffic, self.worker = config, Traffic(), Worker(engine)
        self.app = FastAPI(
            title="Whimbrel",
            version=__version__,
            summary=f"The model {served.name}, in the manner of OpenAI's API.",
            docs_url=None,  # FastAPI's own pages load scripts from elsewhere; /docs is ours
            redoc_url=None,
            redirect_slashes=False,
            lifespan=self._lifespan,
        )
        answer_errors(self.app)
        # The gate asks for the key: this only tells the document so.
        guarded = [Depends(HTTPBearer(auto_error=False))] if config.api_key else []
        self._routes = Routes(served, self.worker, config)
        self.app.include_router(self._routes.router, dependencies=guarded)
        self.app.add_api_route("/metrics", self.count, dependencies=guarded, responses=FAULTS, response_class=Response)
        self.app.add_api_route("/health", self.health, responses=FAULTS)
        self.app.add_api_route("/health", self.health, methods=["HEAD"], include_in_schema=False)
        self.app.include_router(page_routes())
        self.app.openapi = lambda: document(self.app, served)  # type: ignore[method-assign]
        self.metrics = Metrics(self.worker, {*FILES, *TAKING, "/health", "/metrics", "/openapi.json", "/v1/models"})
        # The last is the first that a request meets.
        self.app.add_middleware(Intake, config=config, traffic=self.traffic, paths=TAKING)
        self.app.add_middleware(Gate, config=config, traffic=self.traffic, open_paths={"/health", *FILES})
        self.app.add_middleware(Meter, metrics=self.metrics)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.worker.start()
        yield
        self._routes.close()
        await self.worker.close()

    async def health(self) -> Response:
        """Say whether requests are answered."""
        if self.traffic.draining:
            raise ApiError(503, "the server is stopping", code="draining")
        if not self.worker.well:
            raise ApiError(503, "the engine keeps failing: see the server log", code="engine_failed")
        return json_response({"status": "ok"})

    async def count(self) -> Response:
        """Give the counts of the server and its engine, for Prometheus."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)
