"""Errors: missing key, unknown host name, bodies that are too large or invalid."""

from __future__ import annotations

import json
import socket

import pytest
from tests.e2e.serving import ServerProcess, httpx

PUBLIC_PATHS = {"/", "/docs", "/health", "/page/chat.css", "/page/chat.js", "/page/docs.js", "/page/icon.svg"}
COMPLETIONS = "/v1/completions"


def check_error(response: httpx.Response, status: int, code: str | None = None) -> str:
    """Check that the response is an error in OpenAI's format; returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert code in (None, error["code"])
    assert "\n" not in error["message"]
    return error["message"]


def routes(server: ServerProcess) -> list[tuple[str, str]]:
    paths = httpx.get(f"{server.url}/openapi.json", headers=server.headers).json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def test_every_route_except_health_and_static_files_requires_the_key(server: ServerProcess):
    documented = routes(server)
    assert len(documented) == 6
    others = [("GET", "/openapi.json"), ("POST", "/docs"), ("GET", "/v1/nothing"), ("POST", "/"), ("POST", "/health")]
    others += [("GET", "/page/../metrics"), ("GET", "//v1/models"), ("GET", "/page/secret"), ("DELETE", "/v1/models")]
    protected = [pair for pair in [*documented, *others] if pair[0] != "GET" or pair[1] not in PUBLIC_PATHS]
    wrong_headers = [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {server.key}"},
        {"Authorization": "Bearer"},
    ]
    with httpx.Client(base_url=server.url) as client:
        for method, path in protected:
            for headers in wrong_headers:
                response = client.request(method, path.replace("{name}", "tiny"), headers=headers)
                check_error(response, 401, "invalid_api_key")
                assert response.headers["WWW-Authenticate"] == "Bearer"
        repeated_header = [("Authorization", f"Bearer {server.key}"), ("Authorization", "Bearer wrong")]
        check_error(client.get("/v1/models", headers=repeated_header), 401)
        for path in PUBLIC_PATHS:
            assert client.get(path).status_code == 200
        assert client.get("/v1/models", headers={"Authorization": f"bearer {server.key}"}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "localhost@evil.example:80x"])
def test_an_unknown_host_name_gets_421(server: ServerProcess, host: str):
    for path in ("/health", "/"):
        check_error(httpx.get(f"{server.url}{path}", headers={"Host": host}), 421, "unknown_host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "127.0.0.2:80", "[::1]:8000"])
def test_loopback_host_names_are_accepted(server: ServerProcess, host: str):
    assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "missing_required_parameter"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
        (b'{"a":' * 100_000, None),
        (b"9" * 100_000, None),
        (b"null", None),
        (b"[1]", "invalid_value"),
        (b'"text"', "invalid_value"),
        (b"{}", "missing_required_parameter"),
        (b'{"model": "tiny"}', "missing_required_parameter"),
        (b'{"model": "other", "prompt": "a"}', "model_not_found"),
        (b'{"model": "\\ud800", "prompt": "a"}', "model_not_found"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "stop": "\\ud800"}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "temperature": Infinity}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"1": NaN}}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"999999": 1}}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "max_tokens": 1e400}', "invalid_value"),
        (b'{"model": "tiny", "prompt": [50257]}', "invalid_value"),
        (b'{"model": "tiny", "prompt": [-1]}', "invalid_value"),
        (b'{"model": "tiny", "prompt": []}', "invalid_value"),
        (b'{"model": "tiny", "prompt": [[]]}', "invalid_value"),
        (b'{"model": "tiny", "prompt": ["a", 1]}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "n": 65}', "invalid_value"),
        (b'{"model": "tiny", "prompt": ["a", "a", "a", "a", "a"], "n": 64}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "logprobs": 21}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "stop": [' + b'"a",' * 16 + b'"a"]}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "max_tokens": -1}', "invalid_value"),
        (b'{"model": "tiny", "prompt": "a", "' + b"x" * 3_000_000 + b'": 1}', "unknown_parameter"),
        (b'{"model": "tiny", "prompt": [' + b"null," * 600_000 + b"null]}", "invalid_value"),
        (b'{"model": "tiny", "prompt": [' + b"1," * 1_000_000 + b"1]}", "context_length_exceeded"),
        (b'{"model": "tiny", "prompt": "' + b"a" * 4_000_000 + b'"}', "context_length_exceeded"),
        (b'{"model": "tiny", "prompt": "' + b"the cat " * 400_000 + b'"}', "context_length_exceeded"),
    ],
    ids=lambda value: value[:48].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_an_invalid_body_gets_400(server: ServerProcess, body: bytes, code: str | None):
    headers = server.headers | {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}{COMPLETIONS}", content=body, headers=headers, timeout=30)
    check_error(response, 404 if code == "model_not_found" else 400, code)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "a"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "user", "content": "a", "name": "b"},
        {"role": "user", "content": "\ud800"},
        "a",
    ],
)
def test_an_invalid_message_gets_400(server: ServerProcess, message):
    body = json.dumps({"model": "tiny", "messages": [message]})
    headers = server.headers | {"Content-Type": "application/json"}
    check_error(httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers), 400)


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "multipart/form-data", "application/xml", "application/jsonx"]
)
def test_another_content_type_gets_415(server: ServerProcess, content_type: str | None):
    headers = server.headers | ({"Content-Type": content_type} if content_type else {})
    check_error(httpx.post(f"{server.url}{COMPLETIONS}", content=b"{}", headers=headers), 415, "unsupported_media_type")


def test_unknown_methods_and_paths(server: ServerProcess):
    with server.client() as client:
        response = client.get(COMPLETIONS)
        check_error(response, 405)
        assert response.headers["Allow"] == "POST"
        check_error(client.get("/v2"), 404)
        check_error(client.get("/v1/models/"), 404)
        check_error(client.get("/redoc"), 404)
        for path in PUBLIC_PATHS:
            assert client.head(path).status_code == 200


def test_a_body_that_is_too_large_gets_413(server: ServerProcess):
    body = b'{"model": "tiny", "prompt": "' + b"a" * 20_000_000 + b'"}'
    headers = server.headers | {"Content-Type": "application/json"}

    def in_pieces():
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    for content in (body, in_pieces()):
        response = httpx.post(f"{server.url}{COMPLETIONS}", content=content, headers=headers, timeout=30)
        assert "4194304 bytes" in check_error(response, 413, "too_large")


def test_a_large_content_length_gets_413_before_the_body_arrives(server: ServerProcess):
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.key}\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as conn:
        conn.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 99999999\r\n\r\n{{".encode())
        assert conn.recv(4096).startswith(b"HTTP/1.1 413")
    with socket.create_connection((host, int(port)), timeout=10) as conn:
        conn.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99999999\r\n\r\n{{".encode())
        assert conn.recv(4096).startswith(b"HTTP/1.1 401")


def test_the_server_is_healthy_after_all_errors(server: ServerProcess):
    server.wait_until_idle()
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"}).status_code == 200
    statuses = {name: count for name, count in server.metrics().items() if name.startswith("whimbrel_requests_total")}
    assert statuses
    assert [name for name in statuses if 'status="5' in name] == []
