"""The structure of a body, before it is parsed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from whimbrel.server.body import MAX_CONTAINERS, MAX_DEPTH, MAX_STRINGS, MAX_VALUES, check_body
from whimbrel.server.errors import ApiError


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": [' + b"[1]," * 830_000 + b"[1]]}", f"{MAX_CONTAINERS} lists and objects"),
        (b'{"prompt": [' + b'"",' * 830_000 + b'""]}', f"{MAX_STRINGS} strings"),
        (b"[" + b"1," * MAX_VALUES + b"1]", f"{MAX_VALUES} values"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"{MAX_DEPTH} levels"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), f"{MAX_DEPTH} levels"),
        (b'["\\\\",' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"]", f"{MAX_DEPTH} levels"),
        (json.dumps({"prompt": ["a"]}).encode("utf-16"), "zero byte"),
        (json.dumps({"prompt": ["a"]}).encode("utf-32-le"), "zero byte"),
    ],
    ids=range(8),
)
def test_a_body_that_is_expensive_to_parse_is_refused(body: bytes, words: str):
    with pytest.raises(ApiError, match=words) as refused:
        check_body(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "[{," * 1_000_000},
        {"prompt": '\\"[' * 500_000},
        {"prompt": '[\\\\"{,' * 300_000 + "\\"},
        {"prompt": [1] * 500_000},
        {"prompt": [[1, 2]] * 4000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "[\\"}] * 2}] * 4096},
        [[[[]]]],
    ],
    ids=range(7),
)
def test_any_text_and_ordinary_structure_pass(value: object):
    check_body(json.dumps(value).encode())
