"""Validation of request bodies."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from pydantic import ValidationError

from whimbrel.server.errors import from_validation_errors
from whimbrel.server.schema import ChatCompletionRequest, CompletionRequest

USER = [{"role": "user", "content": "a"}]


def completion(**fields) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "tiny", "prompt": "a", **fields})


def chat(**fields) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "tiny", "messages": USER, **fields})


def error_of(error: ValidationError) -> tuple[str, str | None, str | None]:
    found = from_validation_errors(error.errors())
    return str(found), found.param, found.code


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([1.0, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_all_prompt_formats_are_accepted(fields, prompts):
    assert completion(prompt=fields).prompt == prompts


@pytest.mark.parametrize(
    "fields", [None, 1, True, {}, [], [[]], [[1], []], ["a", 1], [True], [1.5], [[1], "a"], [[["a"]]]]
)
def test_invalid_prompt_formats_are_rejected(fields):
    with pytest.raises(ValidationError) as excinfo:
        completion(prompt=fields)
    assert error_of(excinfo.value)[1] == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("parallel_tool_calls", False),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "low"),
        ("store", True),
        ("service_tier", "flex"),
        ("audio", {}),
    ],
)
def test_unsupported_options_are_rejected_by_name(name: str, value):
    with pytest.raises(ValidationError) as excinfo:
        chat(**{name: value})
    message, param, code = error_of(excinfo.value)
    assert (param, code) == (name, "unsupported_parameter")
    assert f"{name} is not supported" in message


def test_values_without_effect_are_accepted():
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "audio": None}
    assert chat(**neutral, temperature=None, stop=None) == chat(tools=[], tool_choice="none")
    assert completion(suffix=None, best_of=1, user=None) == completion()


def test_neutral_values_must_have_the_right_type():
    for value in (0, 0.0):  # 0 == False in Python
        with pytest.raises(ValidationError):
            chat(store=value)
    with pytest.raises(ValidationError):
        completion(best_of=True)


def test_an_unknown_field_is_rejected_with_a_suggestion():
    with pytest.raises(ValidationError) as excinfo:
        completion(max_token=5)
    message, param, code = error_of(excinfo.value)
    assert "did you mean 'max_tokens'" in message
    assert (param, code) == ("max_token", "unknown_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "1"},
        {"temperature": True},
        {"temperature": 2.1},
        {"top_p": 0},
        {"n": 0},
        {"n": 1.5},
        {"n": True},
        {"stream": 1},
        {"stream": "true"},
        {"seed": -1},
        {"seed": 2**63},
        {"logprobs": True},
        {"stop": [""]},
        {"stop": ["a"] * 17},
        {"stop": "a" * 257},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {"1": True}},
        {"logit_bias": [1]},
        {"logit_bias": {str(token): 0 for token in range(1025)}},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": 1}},
        {"stream": True, "stream_options": {"other": 1}},
        {"echo": "yes"},
        {"model": 1},
    ],
)
def test_values_of_the_wrong_type_or_range_are_rejected(fields: dict):
    with pytest.raises(ValidationError) as excinfo:
        completion(**fields)
    message, param, _ = error_of(excinfo.value)
    assert param.partition(".")[0] in fields
    assert message.count("\n") == 0


def test_integers_may_be_written_with_a_decimal_point():
    request = completion(n=2.0, seed=7.0, max_tokens=3.0, logit_bias={"5": -1})
    assert (request.n, request.seed, request.max_tokens, request.logit_bias) == (2, 7, 3, {5: -1.0})


def test_message_content_and_roles():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    replied = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []}
    request = chat(messages=[{"role": "user", "content": parts}, replied])
    assert [message.content for message in request.messages] == ["ab", "c"]
    for broken in (
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "other", "content": "a"},
        {"role": "user"},
    ):
        with pytest.raises(ValidationError) as excinfo:
            chat(messages=[broken])
        assert error_of(excinfo.value)[1].startswith("messages")


def test_invalid_combinations_are_rejected():
    assert chat(max_completion_tokens=3).max_new_tokens == chat(max_tokens=3).max_new_tokens == 3
    with pytest.raises(ValidationError, match="set one of them"):
        chat(max_tokens=3, max_completion_tokens=3)
    with pytest.raises(ValidationError, match="requires logprobs"):
        chat(top_logprobs=2)


TOOL = {"function": {"parameters": {"z": 1, "a": None}, "name": "f"}, "type": "function", "extra": 1}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": null, "a": 1.0}'}}


def test_tools_keep_their_fields_and_order():
    """Templates render them as JSON."""
    assert str(chat(tools=[TOOL], tool_choice="auto").tools) == str([TOOL])


def test_messages_with_tool_calls_and_results():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "It is 2.", "tool_calls": []},
    ]
    called = {**CALL, "function": {"name": "f", "arguments": {"b": None, "a": 1.0}}}
    assert [message.for_template() for message in chat(messages=messages).messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("tools", {}),
        ("tools", [TOOL] * 129),
        ("tools", ["f"]),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "strict": True}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", 1),
        ("messages", [{"role": "assistant"}]),
        ("messages", [{"role": "assistant", "tool_calls": []}]),
        ("messages", [{"role": "user", "content": "a", "tool_calls": [CALL]}]),
        ("messages", [{"role": "user", "content": "a", "name": "b"}]),
        ("messages", [{"role": "tool", "content": "a"}]),
        ("messages", [{"role": "tool", "tool_call_id": "1"}]),
        ("messages", [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]),
        *(
            ("messages", [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": bad}}]}])
            for bad in ({}, "{", "1", "[" * 100_000)
        ),
    ],
)
def test_invalid_tools_and_calls_are_rejected(param: str, value):
    with pytest.raises(ValidationError) as excinfo:
        chat(**{param: value})
    message, found, _ = error_of(excinfo.value)
    assert found.partition(".")[0] == param
    assert message.count("\n") == 0
