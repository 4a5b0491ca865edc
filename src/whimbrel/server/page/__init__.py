"""The chat page and the API's page: files that load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter, Response

__all__ = ["FILES", "page_routes"]

FILES = {
    "/": ("chat.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    "/page/chat.css": ("chat.css", "text/css"),
    "/page/chat.js": ("chat.js", "text/javascript"),
    "/page/docs.js": ("docs.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a browser lets the page do: load and talk to this server, and nothing else."""


def page_routes() -> APIRouter:
    """The pages' files, which are no part of the API."""
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in FILES.items():
        sender = _sender(resources.files(__name__).joinpath(name).read_bytes(), kind)
        router.add_api_route(path, sender, methods=["GET", "HEAD"])
    return router


def _sender(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    async def send() -> Response:
        return Response(content, headers=headers, media_type=kind)

    return send
