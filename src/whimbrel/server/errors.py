"""What went wrong, in the shape that OpenAI's clients know: `{"error": {"message", "type", "param", "code"}}`."""

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

__all__ = ["ApiError", "ErrorBody", "answer_errors", "json_response", "shown"]

SHOWN = 60
"""Characters of what a client sent that are repeated to it."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxlong = 3, SHOWN, SHOWN, 10_000
_SHORT.maxstring = _SHORT.maxother = 4 * SHOWN


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer with a status of 400 or more."""

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
        """The error as a client reads it."""
        return {"error": {"message": str(self), "type": _kind(self.status), "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body, self.status, self.headers)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`body` as JSON in ASCII: half a surrogate pair that a client sent can be repeated to it."""
    return Response(json.dumps(body, separators=(",", ":")), status, dict(headers or {}), "application/json")


def answer_errors(app: FastAPI) -> None:
    """Have every fault of a request answered in this one shape."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return ApiError(400, str(error), param=error.field, code="invalid_value").response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = {
            400: "the body cannot be read as JSON in UTF-8: send a JSON object",
            404: f"there is no {path}: /openapi.json lists what there is",
            405: f"{path} takes no {request.method}: it takes {(error.headers or {}).get('Allow', 'others')}",
        }.get(error.status_code, str(error.detail))
        code = "invalid_json" if error.status_code == 400 else None
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server failed on this request: its log says why", code="internal_error").response()


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first fault that the schema of a body found."""
    first = errors[0]
    kind, context = first["type"], first.get("ctx", {})
    param = context.get("param") or ".".join(str(part) for part in first["loc"] if part != "body") or None
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context['error']}", code="invalid_json")
    if kind == "missing":
        what = "the body is empty: send a JSON object" if param is None else f"{param} is missing: it is required"
        return ApiError(400, what, param=param, code="missing_required_parameter")
    if "param" in context:
        return ApiError(400, first["msg"], param=param, code=kind)
    words = first["msg"][:1].lower() + first["msg"][1:]
    message = f"{param or 'the body'} = {shown(first['input'])} cannot be used: {words}"
    return ApiError(400, message, param=param, code="invalid_value")


def shown(given: Any) -> str:
    """What a client sent as an error repeats it: no more than its beginning."""
    text = _SHORT.repr(given)  # reads only the first values of a long list
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _kind(status: int) -> str:
    """OpenAI's word for a class of errors."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
