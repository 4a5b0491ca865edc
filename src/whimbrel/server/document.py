"""The OpenAPI document, with what only the served model settles: its name and its vocabulary."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from whimbrel.server.served import Served

__all__ = ["document"]


def document(app: FastAPI, served: Served) -> dict[str, Any]:
    """What /openapi.json says; made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        schemas = made["components"]["schemas"]
        for name in ("CompletionRequest", "ChatRequest"):
            schemas[name]["properties"]["model"]["enum"] = [served.name]
            schemas[name]["properties"]["seed"]["anyOf"][0]["maximum"] = 2**63 - 1  # which became a rounded float
        [named] = made["paths"]["/v1/models/{name}"]["get"]["parameters"]
        named["schema"]["enum"] = [served.name]
        _bound_ids(schemas["CompletionRequest"]["properties"]["prompt"], served.model.config.vocab_size - 1)
        app.openapi_schema = made
    return app.openapi_schema


def _bound_ids(schema: dict[str, Any], most: int) -> None:
    """Say how large a token id can be, wherever one is described."""
    if schema.get("type") == "integer":
        schema["maximum"] = most
    for inner in [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())]:
        _bound_ids(inner, most)
