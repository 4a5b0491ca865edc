"""Task files: both record formats of each task, and one-line errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.evaluate import TASKS, Item
from whimbrel.evaluate.tasks import find_file, find_task, read_items

FORMS = {
    "arc_easy": (
        {"query": "Question: Hot?\nAnswer:", "choices": ["Ice", "Fire", "Tea"], "gold": 1},
        {"question": "Hot?", "choices": {"text": ["Ice", "Fire", "Tea"], "label": ["1", "2", "3"]}, "answerKey": "2"},
        Item(tuple(("Question: Hot?\nAnswer:", choice) for choice in (" Ice", " Fire", " Tea")), 1, (3, 4, 3)),
    ),
    "piqa": (
        {"query": "Question: Boil\n", "choices": ["heat", "cool it"], "gold": 0},
        {"goal": "Boil", "sol1": "heat", "sol2": "cool it", "label": 0},
        Item((("Question: Boil\nAnswer:", " heat"), ("Question: Boil\nAnswer:", " cool it")), 0, (4, 7)),
    ),
    "winogrande": (
        {"context_options": ["Ann met Bo, so Ann", "Ann met Bo, so Bo"], "continuation": "left.", "gold": 1},
        {"sentence": "Ann met Bo, so _ left.", "option1": "Ann", "option2": "Bo", "answer": "2"},
        Item((("Ann met Bo, so Ann", " left."), ("Ann met Bo, so Bo", " left.")), 1, (5, 5)),
    ),
    "lambada": (
        {"context": "He saw the", "continuation": "sea"},
        {"text": "He saw the sea"},
        Item((("He saw the", " sea"),), 0, (3,)),
    ),
}


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FORMS)
def test_both_record_formats_give_the_same_item(name):
    short, published, item = FORMS[name]
    assert TASKS[name].item(short) == TASKS[name].item(published) == item


def test_hellaswag_markup_is_removed():
    record = {
        "activity_label": "Tea",
        "ctx_a": "[header] How to make tea [title] Boil [step] Use  a pot.",
        "ctx_b": "then SHE",
        "endings": [" pours [substeps] water. ", "naïve"],
        "label": "1",
    }
    item = TASKS["hellaswag"].item(record)
    context = "Tea: How to make tea. Boil Use a pot. Then she"
    assert item.pairs == ((context, " pours water."), (context, " naïve"))
    assert item.gold == 1
    assert item.lengths == (12, 5)  # characters, not bytes


def test_metrics_of_each_task():
    named = {name: list(task.metrics) for name, task in TASKS.items()}
    choice = ["acc", "acc_norm"]
    assert named == {
        "arc_challenge": choice,
        "arc_easy": choice,
        "hellaswag": choice,
        "lambada": ["acc", "perplexity"],
        "piqa": choice,
        "winogrande": ["acc"],
    }


@pytest.mark.parametrize("name", TASKS)
def test_bundled_files_can_be_read(fixtures, name):
    items = read_items(TASKS[name], find_file(TASKS[name], fixtures / "eval"))
    assert len(items) == 24
    choices = {"lambada": {1}, "piqa": {2}, "winogrande": {2}, "hellaswag": {4}}
    assert {len(item.pairs) for item in items} == choices.get(name, {3, 4, 5})


def test_compressed_files_and_task_names_are_found(tmp_path):
    record = FORMS["lambada"][1]
    with gzip.open(tmp_path / "lambada.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n\n" + json.dumps(record) + "\n")
    path = find_file(TASKS["lambada"], tmp_path)
    assert path.name == "lambada.jsonl.gz"
    assert len(read_items(TASKS["lambada"], path)) == 2
    assert len(read_items(TASKS["lambada"], path, limit=1)) == 1
    write(tmp_path / "lambada_openai_test.jsonl", record)
    assert find_file(TASKS["lambada"], tmp_path).name == "lambada_openai_test.jsonl"


def test_file_search_order(workdir, monkeypatch):
    for folder in ("given", "named", "data/eval"):
        (workdir / folder).mkdir(parents=True)
        write(workdir / folder / "piqa_val.jsonl", FORMS["piqa"][0])
    assert find_file(TASKS["piqa"]) == Path("data/eval/piqa_val.jsonl")
    monkeypatch.setenv("WHIMBREL_EVAL_DATA", "named")
    assert find_file(TASKS["piqa"]) == Path("named/piqa_val.jsonl")
    assert find_file(TASKS["piqa"], "given") == Path("given/piqa_val.jsonl")


def test_missing_file_error_lists_the_expected_names(workdir):
    with pytest.raises(DataError, match="no file for task piqa in data/eval: expected piqa_val.jsonl, .*--data"):
        find_file(TASKS["piqa"])


def test_unknown_task_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown task 'hellaswagg': choose from arc_challenge, arc_easy"):
        find_task("hellaswagg")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"query": "Q", "choices": ["a", "b"]}, "piqa.jsonl line 2: expected fields (query, choices, gold)"),
        (
            {"query": "Q", "choices": ["a", "b"], "gold": 2},
            "line 2: expected the index of the correct choice below 2, got 2",
        ),
        (
            {"query": "Q", "choices": ["a", "b"], "gold": -1},
            "line 2: expected the index of the correct choice below 2, got -1",
        ),
        (
            {"query": "Q", "choices": ["a", "b"], "gold": "0"},
            "line 2: expected a 0-based integer index in 'gold', got \"0\"",
        ),
        ({"query": "Q", "choices": ["a", ""], "gold": 0}, "line 2: expected non-empty choices, got an empty one"),
        ({"query": "Q", "choices": 7, "gold": 0}, "line 2: expected a list of strings in 'choices', got 7"),
        (
            {"goals": "Q"},
            "expected fields (query, choices, gold) or (goal, sol1, sol2, label), got (goals): 'goal' is missing",
        ),
        ({}, "got (): 'goal' is missing"),
        ([1, 2], "line 2: expected an object, got list"),
    ],
)
def test_invalid_records_are_rejected_with_their_line(tmp_path, record, message):
    path = write(tmp_path / "piqa.jsonl", FORMS["piqa"][0], record)
    with pytest.raises(DataError) as error:
        read_items(TASKS["piqa"], path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


HELLASWAG = {"activity_label": "Tea", "ctx_a": "Boil", "ctx_b": "then", "endings": ["a", "b"], "label": 0}


@pytest.mark.parametrize("given", [None, True, 1.5, [5], {"text": "ab"}, [["a"]], "\ud800", [None]])
def test_fields_of_the_wrong_type_are_rejected(given):
    forms = [(name, form) for name, both in FORMS.items() for form in both[:2]]
    for name, record in [*forms, ("hellaswag", HELLASWAG), ("arc_challenge", FORMS["arc_easy"][0])]:
        TASKS[name].item(record)
        for field in record:
            with pytest.raises(DataError) as error:
                TASKS[name].item(record | {field: given})
            assert str(error.value).startswith("expected ")
            assert str(error.value).endswith(f" in '{field}', got {json.dumps(given)}")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("arc_easy", {"query": 5}, "expected a valid Unicode string in 'query', got 5"),
        ("arc_easy", {"choices": "ab", "gold": 0}, "expected a list of strings in 'choices', got \"ab\""),
        ("arc_easy", {"gold": "1"}, "expected a 0-based integer index in 'gold', got \"1\""),
        ("arc_easy", {"query": ["x" * 1000]}, f"expected a valid Unicode string in 'query', got [\"{'x' * 58}"),
        ("lambada", {"continuation": ["a"]}, "expected a valid Unicode string in 'continuation', got [\"a\"]"),
    ],
)
def test_error_names_the_field_and_its_value(name, change, message):
    with pytest.raises(DataError) as error:
        TASKS[name].item(FORMS[name][0] | change)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("arc_easy", {"answerKey": "A"}, "expected one of the labels 1, 2, 3 in 'answerKey', got 'A'"),
        ("arc_easy", {"choices": {"text": ["a", "b"], "label": ["1"]}}, "two lists of strings of equal length"),
        ("winogrande", {"answer": "3"}, 'expected "1" or "2" in \'answer\', got "3"'),
        ("winogrande", {"sentence": "Ann left."}, "expected a sentence with _ in place of a name in 'sentence', got"),
        ("piqa", {"label": "1"}, "expected a 0-based integer index in 'label', got \"1\""),
        ("lambada", {"text": "ends in a space "}, "got an empty one"),
    ],
)
def test_invalid_published_records_are_rejected(name, change, message):
    with pytest.raises(DataError) as error:
        TASKS[name].item(FORMS[name][1] | change)
    assert message in str(error.value)


def test_files_with_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "the sea"}\r\n\r\n{"text": "a tree"}\r\n')
    assert [item.pairs for item in read_items(TASKS["lambada"], path)] == [(("the", " sea"),), (("a", " tree"),)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no items for task piqa"),
        (b'{"query": ', "line 1 is not JSON"),
        (b"\xff\xfe", "is not UTF-8 after line 0"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"gold": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
    ],
)
def test_damaged_files_are_rejected(tmp_path, content, message):
    path = tmp_path / "piqa.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_items(TASKS["piqa"], path)


def test_damaged_compressed_files_are_rejected(tmp_path):
    lines = "".join(json.dumps(FORMS["piqa"][0] | {"number": number}) + "\n" for number in range(2000))
    packed, path = gzip.compress(lines.encode()), tmp_path / "piqa.jsonl.gz"
    for damaged in (packed[:-2000], packed[:10] + b"\xff" * 100, lines.encode()):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot read .*piqa.jsonl.gz after line \d+: "):
            read_items(TASKS["piqa"], path)


def test_limit_below_one_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="limit: .* got 0"):
        read_items(TASKS["piqa"], write(tmp_path / "piqa.jsonl", FORMS["piqa"][0]), limit=0)
