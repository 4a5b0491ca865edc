"""The files of the web pages, with headers that keep them from loading anything from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import PurePosixPath

from fastapi import FastAPI, Request, Response

__all__ = ["add_static_files"]

MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_static_files(app: FastAPI, files: Mapping[str, str]) -> None:
    """Add a route for each file: `files` maps URL paths to names in `whimbrel/server/static`."""
    for path, name in files.items():
        content = resources.files("whimbrel.server").joinpath("static", name).read_bytes()
        response = (content, MEDIA_TYPES[PurePosixPath(name).suffix])

        async def send_file(request: Request, response: tuple[bytes, str] = response) -> Response:
            return Response(response[0], headers=HEADERS, media_type=response[1])

        app.add_route(path, send_file, methods=["GET"], include_in_schema=False)
