"""Tool calls: parsed from generated text, whatever the pieces in which it arrives."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from hypothesis import given
from hypothesis import strategies as st
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.chat_templates import QWEN_TOOLS

from whimbrel.base.errors import RequestError
from whimbrel.inference import Event
from whimbrel.server.served_model import Prompt
from whimbrel.server.streaming import Choice, Delta, PromptContext
from whimbrel.server.tool_calls import HermesParser, Llama3JsonParser, ToolCallParser, find_parser
from whimbrel.tokenization import BUILTIN_TEMPLATES, ChatTemplate

ADD = '{"name": "add", "arguments": {"a": 1, "b": [null, "é"]}}'
ADD_CALL = ("add", {"a": 1, "b": [None, "é"]})
LLAMA_ADD = ADD.replace("arguments", "parameters")


def parse(parser: ToolCallParser, pieces: list[str]) -> tuple[str, list[tuple[str, dict]]]:
    content, calls = "", []
    for parsed in [*map(parser.push, pieces), parser.flush()]:
        content += parsed.content
        calls += parsed.calls
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


def llama3_parser() -> Llama3JsonParser:
    return Llama3JsonParser({"add", "now"})


HERMES = [
    (f"<tool_call>\n{ADD}\n</tool_call>", "", [ADD_CALL]),
    (f"<tool_call>{ADD}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>\n", "", [ADD_CALL] * 2),
    (f"Let me see.\n\n<tool_call>\n{ADD}\n</tool_call>", "Let me see.", [ADD_CALL]),
    (f"<tool_call>[{ADD}, {LLAMA_ADD}]</tool_call> done", " done", [ADD_CALL] * 2),
    (f"<tool_call>\n{ADD}", "", [ADD_CALL]),  # ended by a stop token
    ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ('<tool_call>{"name": "now", "arguments": {"a": "</tool"}}</tool_call>', "", [("now", {"a": "</tool"})]),
]
LLAMA3 = [
    (LLAMA_ADD, "", [ADD_CALL]),
    (f"\n {ADD} ", "", [ADD_CALL]),
    (f"<|python_tag|>{LLAMA_ADD}; {LLAMA_ADD}", "", [ADD_CALL] * 2),
    ('{"name": "now", "parameters": {}}', "", [("now", {})]),
]
HERMES_CONTENT = [
    "",
    " ",
    "Hello!\n",
    "a <tool_calls> b <tool",
    "<tool_call>",
    "<tool_call></tool_call>",
    "x <tool_call>{</tool_call> y ",
    "<tool_call>1</tool_call>",
    '<tool_call>{"name": 1}</tool_call>',
    '<tool_call>{"name": "a", "arguments": 1}</tool_call>',
    '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>',
    '<tool_call>{"name": "a", "arguments": {"b": 1e999}}</tool_call>',
    "<tool_call>" + "[" * 100_000 + "</tool_call>",
    f"<tool_call>{ADD[:-5]}",
]
LLAMA3_CONTENT = [
    "",
    "\n",
    "Hello {",
    "{",
    '{"answer": 1}',
    '{"name": "other", "parameters": {}}',
    f"{LLAMA_ADD} is the call",
    "<|python",
    "<|python_tag|>print(1)",
]


@pytest.mark.parametrize(
    ("create", "text", "content", "calls"),
    [
        *((HermesParser, *case) for case in HERMES),
        *((llama3_parser, *case) for case in LLAMA3),
        *((HermesParser, text, text, []) for text in HERMES_CONTENT),
        *((llama3_parser, text, text, []) for text in LLAMA3_CONTENT),
    ],
)
def test_calls_and_content_do_not_depend_on_the_pieces(create, text: str, content: str, calls: list):
    for size in (1, 2, 3, 7, 50, len(text) + 1):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert parse(create(), pieces) == (content, calls)


TAGS = st.sampled_from(["<tool_call>", "</tool_call>", ADD, " ", "\n", "<", "tool_call>", "{", "a"])


@given(st.lists(TAGS, max_size=12))
def test_pieces_with_incomplete_and_nested_tags(pieces: list[str]):
    text = "".join(pieces)
    content, calls = parse(HermesParser(), pieces)
    assert (content, calls) == parse(HermesParser(), [text])
    if not calls:
        assert content == text
    # Only the calls and whitespace are taken out; the last call may have no end.
    taken = "".join(text.split()).count("".join(ADD.split())) - "".join(content.split()).count("".join(ADD.split()))
    assert taken == len(calls)


def test_text_is_sent_as_soon_as_it_cannot_be_a_call():
    parser = HermesParser()
    assert [parser.push(piece).content for piece in ("a", " b ", "<", "to", "ol> ", "c")] == [
        "a",
        " b",
        "",
        "",
        " <tool>",
        " c",
    ]
    assert [llama.content for llama in map(llama3_parser().push, ("\n", "Yes", " {"))] == ["", "\nYes", " {"]


@pytest.mark.parametrize("special", [False, True])
def test_tags_may_be_special_tokens(special: bool):
    """Other special tokens are not part of the text."""
    tokenizer = byte_tokenizer(("<|end|>", "<|other|>", *(["<tool_call>", "</tool_call>"] if special else [])))
    context = PromptContext(Prompt("", (65,)), (), echo=False, tool_parser=HermesParser)
    choice = Choice(0, context, tokenizer, with_logprobs=True)
    ids = tokenizer.encode_prompt(f"Wait<|other|>\n<tool_call>{ADD}</tool_call>").ids
    total = Delta()
    for token in ids:
        total.extend(choice.add(Event(0, 0, token, -1.0)))
    total.extend(choice.add(Event(0, 0, finish_reason="stop")))
    assert (total.text, total.finish, len(total.tokens)) == ("Wait", "tool_calls", len(ids))
    assert [(call.name, json.loads(call.arguments)) for call in total.tool_calls] == [ADD_CALL]


def test_a_choice_cut_off_after_a_call_has_finish_reason_length():
    tokenizer = byte_tokenizer(("<|end|>",))
    choice = Choice(
        0, PromptContext(Prompt("", (65,)), (), False, tool_parser=HermesParser), tokenizer, with_logprobs=False
    )
    *ids, last = tokenizer.encode(f"<tool_call>{ADD}</tool_call> a")
    deltas = [*(choice.add(Event(0, 0, token)) for token in ids), choice.add(Event(0, 0, last, finish_reason="length"))]
    assert (deltas[-1].text, deltas[-1].finish) == (" a", "length")
    assert sum(len(delta.tool_calls) for delta in deltas) == 1


def test_the_template_determines_the_format():
    for source in (QWEN_TOOLS, BUILTIN_TEMPLATES["chatml"].source):
        assert find_parser(ChatTemplate(source), {"add"}) is HermesParser
    for source in ('{{ tools }}{"name": function, "parameters": object}', r'{{ "{\"name\": 1, \"parameters\": 2}" }}'):
        llama = find_parser(ChatTemplate(source), {"add"})()
        assert isinstance(llama, Llama3JsonParser)
        assert parse(llama, [LLAMA_ADD]) == ("", [ADD_CALL])
    for source in ("{{ tools }}[TOOL_CALLS]", "{{ tools }}<tool_call><function={{ name }}>"):
        with pytest.raises(
            RequestError, match="expected a chat template that writes tool calls as <tool_call>"
        ) as excinfo:
            find_parser(ChatTemplate(source), {"add"})
        assert excinfo.value.field == "tools"
