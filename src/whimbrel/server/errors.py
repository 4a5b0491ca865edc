"""Errors in the JSON format of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from whimbrel.base.errors import RequestError

__all__ = ["ApiError", "ErrorBody", "add_error_handlers", "from_validation_errors", "json_response", "preview"]

PREVIEW_LENGTH = 60
"""Maximum number of characters of client input quoted in an error message."""

_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxlevel, _SHORT_REPR.maxlist, _SHORT_REPR.maxdict = 3, PREVIEW_LENGTH, PREVIEW_LENGTH
_SHORT_REPR.maxlong, _SHORT_REPR.maxstring, _SHORT_REPR.maxother = 10_000, 4 * PREVIEW_LENGTH, 4 * PREVIEW_LENGTH

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ErrorDetail(BaseModel):
    """The `error` object of an error response."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


class ApiError(Exception):
    """An error with its HTTP status and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = ERROR_TYPES.get(self.status, default)
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The complete HTTP response."""
        return json_response(self.body, self.status, self.headers)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response in ASCII, which unlike UTF-8 can echo a lone surrogate that a client sent."""
    return Response(json.dumps(body, separators=(",", ":")), status, dict(headers or {}), "application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Convert every exception that a request can raise to an `ApiError` response."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        return ApiError(400, str(error), param=error.field, code="invalid_value").response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return from_validation_errors(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path, allowed = request.url.path, (error.headers or {}).get("Allow", "another method")
        message = {
            400: "expected a JSON object in UTF-8 as the body",
            404: f"no route {path}: see /openapi.json for the available routes",
            405: f"{path} does not support {request.method}: use {allowed}",
        }.get(error.status_code, str(error.detail))
        code = "invalid_json" if error.status_code == 400 else None
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> Response:
        return ApiError(500, "internal error: see the server log", code="internal_error").response()


def from_validation_errors(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's validation errors as an `ApiError`."""
    first = errors[0]
    kind, context = first["type"], first.get("ctx", {})
    param = context.get("param") or ".".join(str(part) for part in first["loc"] if part != "body") or None
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {context['error']}", code="invalid_json")
    if kind == "missing":
        message = "the body is empty: send a JSON object" if param is None else f"{param} is required"
        return ApiError(400, message, param=param, code="missing_required_parameter")
    if "param" in context:  # raised by `schema.raise_invalid`
        return ApiError(400, first["msg"], param=param, code=kind)
    reason = first["msg"][:1].lower() + first["msg"][1:]
    message = f"invalid value {preview(first['input'])} for {param or 'the body'}: {reason}"
    return ApiError(400, message, param=param, code="invalid_value")


def preview(value: Any) -> str:
    """The beginning of a client's value, for an error message."""
    text = _SHORT_REPR.repr(value)  # only looks at the first items of a long list
    return text if len(text) <= PREVIEW_LENGTH else f"{text[:PREVIEW_LENGTH]}..."
