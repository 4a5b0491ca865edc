"""Fine-tuning data: formats, their normalization to messages, and what is rejected with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data.conversations import SKIP_BAD_HINT, ConversationReader, detect_format, parse_sample

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
GOOD = {"messages": [USER, ASSISTANT]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
PARSED_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def write_lines(path: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


VALID = [
    (GOOD, "messages", [USER, ASSISTANT], None),
    (
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"text": "kind."}]},
                USER,
                ASSISTANT,
            ]
        },
        "messages",
        [message("system", "Be kind."), USER, ASSISTANT],
        None,
    ),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                message("tool", ""),
                ASSISTANT,
            ]
        },
        "messages",
        [USER, message("assistant", "", tool_calls=[PARSED_CALL]), message("tool", ""), ASSISTANT],
        None,
    ),
    (
        {"messages": [USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 1}]},
        "messages",
        [USER, ASSISTANT, USER, ASSISTANT],
        (3,),
    ),
    ({"prompt": "Hi", "completion": "Hello!"}, "prompt-completion", [USER, ASSISTANT], None),
    (
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
        "prompt-completion",
        [USER, ASSISTANT, USER, ASSISTANT],
        (3,),
    ),
    (
        {
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}],
            "system": "Be kind.",
        },
        "sharegpt",
        [message("system", "Be kind."), USER, ASSISTANT],
        None,
    ),
    ({"conversations": [USER, ASSISTANT]}, "sharegpt", [USER, ASSISTANT], None),
    (
        {"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Hello!"]}},
        "sharegpt",
        [USER, ASSISTANT],
        None,
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "Hello!"},
            ]
        },
        "sharegpt",
        [
            USER,
            message(
                "assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
            ),
            message("tool", "3"),
            ASSISTANT,
        ],
        None,
    ),
    ({"instruction": "Hi", "input": "", "output": "Hello!", "text": "x"}, "alpaca", [USER, ASSISTANT], None),
    (
        {"instruction": "Add", "input": "1 + 2", "output": "3", "system": "Count.", "history": [["Hi", "Hello!"]]},
        "alpaca",
        [message("system", "Count."), USER, ASSISTANT, message("user", "Add\n\n1 + 2"), message("assistant", "3")],
        None,
    ),
]


@pytest.mark.parametrize(("row", "name", "messages", "supervised"), VALID)
def test_formats_are_detected_and_become_messages(row, name, messages, supervised) -> None:
    assert detect_format(row) == name
    chat = parse_sample(row, name).chat
    assert list(chat.messages) == messages
    assert chat.supervised == supervised


def test_tools_may_be_a_json_string() -> None:
    for tools in (TOOLS, json.dumps(TOOLS)):
        assert parse_sample({**GOOD, "tools": tools}, "messages").chat.tools == TOOLS
    for tools in (None, [], "null", "[]"):
        assert parse_sample({**GOOD, "tools": tools}, "messages").chat.tools is None


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Hello!", "rejected": "No."},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [message("assistant", "No.")]},
        {"prompt": "Hi", "chosen": [USER, ASSISTANT], "rejected": [USER, message("assistant", "No.")], "messages": []},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, message("assistant", "No.")]},
    ],
)
def test_preference_pairs_share_their_prompt(row: dict[str, Any]) -> None:
    assert detect_format(row) == "preference"
    pair = parse_sample(row, "preference")
    assert list(pair.chosen.messages) == [USER, ASSISTANT]
    assert list(pair.rejected.messages) == [USER, message("assistant", "No.")]


def test_answers_in_the_prompt_of_a_pair_are_not_supervised() -> None:
    turns = [USER, ASSISTANT, USER]
    pair = parse_sample(
        {"chosen": [*turns, ASSISTANT], "rejected": [*turns, message("assistant", "No.")]}, "preference"
    )
    assert pair.chosen.supervised == pair.rejected.supervised == (3,)


BAD = [
    ("{", "not JSON", "not JSON"),
    ("[1]", "not JSON", "expected a JSON object, got a list"),
    ('{"messages": "\\xff"}', "not JSON", "not JSON"),
    ({"messages": [message("robot", "Hi"), ASSISTANT]}, "wrong role", r"messages\[0\] .*system.*assistant.*\"robot\""),
    ({"messages": [message(3, "Hi"), ASSISTANT]}, "wrong role", "got 3"),
    ({"messages": [ASSISTANT, USER]}, "wrong role", "expected a system or user message first"),
    ({"messages": [USER, message("assistant", " \n")]}, "empty turn", r"messages\[1\]\.content \(role assistant\)"),
    ({"messages": [message("user", ""), ASSISTANT]}, "empty turn", r"messages\[0\]"),
    (
        {"messages": [message("user", {"text": "Hi"}), ASSISTANT]},
        "nested content",
        r"messages\[0\]\.content to be a string",
    ),
    ({"messages": [message("user", [["Hi"]]), ASSISTANT]}, "nested content", r"to be text, got the part \[\"Hi\"\]"),
    ({"messages": [message("user", [{"type": "image_url"}]), ASSISTANT]}, "nested content", "image_url"),
    ({"messages": [USER]}, "no assistant turn", "expected an assistant turn"),
    ({"messages": [USER, {**ASSISTANT, "weight": 0}]}, "no assistant turn", "expected an assistant turn"),
    ({"messages": {"role": ["user", "assistant"], "content": ["Hi"]}}, "missing fields", "content, got none"),
    ({"messages": []}, "missing fields", "expected a list of messages in 'messages', got"),
    ({"messages": "Hi"}, "missing fields", "expected a list of messages"),
    ({"messages": ["Hi"]}, "missing fields", r"expected messages\[0\] to be an object"),
    ({"messages": [{"content": "Hi"}, ASSISTANT]}, "missing fields", r"expected 'role' in messages\[0\]"),
    ({"messages": [USER, {"role": "assistant"}]}, "missing fields", r"messages\[1\]\.content, got none"),
    ({"a": 1}, "missing fields", "expected 'messages' .format messages., got the fields a"),
    (
        {"instruction": "Hi", "output": "Hello!"},
        "mixed formats",
        r"expected format messages, as in .*line 1, got alpaca",
    ),
    ({"id": 7, **GOOD}, "duplicate id", r"duplicate id 7, first in .*line 1"),
    (
        {"system": "A", "messages": [message("system", "B"), USER, ASSISTANT]},
        "wrong role",
        "expected one system prompt",
    ),
    ({"system": 3, **GOOD}, "nested content", "expected a string in 'system', got 3"),
    ({**GOOD, "tools": "{"}, "wrong tools", "expected JSON in tools"),
    ({**GOOD, "tools": {"f": 1}}, "wrong tools", "expected 'tools' to be a list"),
    ({"messages": [USER, message("assistant", "", tool_calls=[{"x": 1}])]}, "wrong tools", "a function with a name"),
    ({"messages": [USER, message("assistant", "", tool_calls="f")]}, "wrong tools", "to be a list"),
]


@pytest.mark.parametrize(("row", "reason", "expected"), BAD)
def test_bad_lines_are_reported_with_their_number_or_skipped(row, reason: str, expected: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"id": 7, **GOOD}, "", row, GOOD)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3: .*{expected}") as excinfo:
        list(ConversationReader([path]))
    assert "\n" not in str(excinfo.value)
    reader = ConversationReader([path], skip_bad=True)
    assert len(list(reader)) == 2 == reader.report.samples
    assert reader.report.skipped == {reason: 1}
    assert [f"{error} ({SKIP_BAD_HINT})" for error in reader.report.errors] == [str(excinfo.value)]
    assert reader.report.formats == {"a.jsonl": "messages"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"chosen": "a", "rejected": "b"}, "expected a 'prompt'"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "different answers"),
        ({"prompt": "Hi", "chosen": [USER], "rejected": [ASSISTANT]}, "'chosen' to answer the prompt .*got user"),
        ({"prompt": "Hi", "chosen": "", "rejected": "b"}, "expected text in chosen"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "b"}, "expected a list of messages in 'chosen', got 3"),
    ],
)
def test_bad_preference_pairs_are_reported(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"line 1: .*{expected}"):
        list(ConversationReader([write_lines(tmp_path / "a.jsonl", row)]))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": " ", "output": "x"}, "expected text in 'instruction'"),
        ({"instruction": "Hi", "output": 3}, "expected output.content to be a string, got 3"),
        ({"instruction": "Hi", "output": "x", "history": [["a"]]}, "list of pairs"),
        ({"text": ["a"]}, "expected a string in 'text'"),
        (
            {"question": "Hi", "answer": "x"},
            r"expected the fields .*instruction and output \(alpaca\).*got question, answer",
        ),
    ],
)
def test_bad_rows_of_other_formats_are_reported(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"line 1: .*{expected}"):
        list(ConversationReader([write_lines(tmp_path / "a.jsonl", row)]))


def test_files_of_every_kind_have_the_same_samples(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                USER,
                message("assistant", "", tool_calls=[CALL]),
                message("tool", "3", tool_call_id="c1"),
                ASSISTANT,
            ]
        },
        *({"messages": [message("user", f"Hi {n}"), ASSISTANT]} for n in range(100)),
    ]
    path = Path(write_lines(tmp_path / "a.jsonl", *rows))
    expected = [sample.chat for sample in ConversationReader([str(path)])]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "c.jsonl.zst").write_bytes(pa.Codec("zstd").compress(path.read_bytes(), asbytes=True))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")  # fills absent fields with null
    for name in ("b.jsonl.gz", "c.jsonl.zst", "d.parquet"):
        samples = list(ConversationReader([str(tmp_path / name)]))
        assert [sample.chat for sample in samples] == expected
        assert samples[5].location == str(tmp_path / name) + (", row 5" if "parquet" in name else ", line 6")
    reader = ConversationReader([str(tmp_path)])
    assert len(list(reader)) == 4 * len(rows)
    assert set(reader.report.formats.values()) == {"messages"}


def test_hub_datasets_are_read_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from whimbrel.data.sources import HubDataset

    rows = [{"messages": [{**USER, "name": None}, ASSISTANT], "system": None}, {"messages": [USER]}]
    monkeypatch.setattr(HubDataset, "_rows", lambda self, skip: iter(rows[skip:]))
    reader = ConversationReader(["owner/chats"], skip_bad=True)
    [sample] = reader
    assert sample.chat.messages == [USER, ASSISTANT]
    assert reader.report.errors[0].startswith("owner/chats, row 1: expected an assistant turn")


def test_text_files_and_formats_by_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A story.")
    write_lines(tmp_path / "b.jsonl", {"text": "Another."})
    write_lines(tmp_path / "c.jsonl", GOOD)
    reader = ConversationReader([str(tmp_path)])
    first, second, third = reader
    assert (first.text, second.text) == ("A story.", "Another.")
    assert third.chat.messages == [USER, ASSISTANT]
    assert reader.report.formats == {"a.txt": "text", "b.jsonl": "text", "c.jsonl": "messages"}
    write_lines(tmp_path / "d.jsonl", {"prompt": "Hi", "chosen": "a", "rejected": "b"})
    with pytest.raises(DataError, match=r"preference data in all files or in none.*d\.jsonl \(preference\)"):
        list(reader.__class__([str(tmp_path)], skip_bad=True))


def test_a_format_can_be_set(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {**GOOD, "text": "plain"})
    [sample] = ConversationReader([path], format="text")
    assert sample.text == "plain"
    with pytest.raises(
        DataError, match="line 1: expected 'instruction' .format alpaca., got the fields messages, text"
    ):
        list(ConversationReader([path], format="alpaca"))
    with pytest.raises(ConfigError, match="format: expected one of .*got 'messges': did you mean 'messages'"):
        ConversationReader([path], format="messges")


def test_data_without_samples_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no samples in a\.jsonl"):
        list(ConversationReader([write_lines(tmp_path / "a.jsonl", "")]))
    with pytest.raises(DataError, match=r"no samples in b\.jsonl \(1 skipped: .*line 1: not JSON"):
        list(ConversationReader([write_lines(tmp_path / "b.jsonl", "{")], skip_bad=True))


def test_a_json_array_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for name in ("array.jsonl", "array.json"):
        (tmp_path / name).write_text(json.dumps([{"prompt": "a", "completion": "b"}], indent=1))
    with pytest.raises(DataError, match=r"line 1: expected a JSON object per line, got an array: write one .*jq -c"):
        list(ConversationReader([str(tmp_path / "array.jsonl")]))
    with pytest.raises(ConfigError, match=r"got .*array\.json: write one object per line \(jq -c"):
        ConversationReader([str(tmp_path / "array.json")])
