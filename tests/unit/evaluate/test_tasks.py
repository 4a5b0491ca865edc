"""From files to questions: both forms of each task, and what is wrong with a file in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.evaluate import TASKS, Item
from whimbrel.evaluate.files import find_file, find_task, read_items

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
def test_both_forms_ask_the_same(name):
    short, published, item = FORMS[name]
    assert TASKS[name].item(short) == TASKS[name].item(published) == item


def test_hellaswag_loses_the_marks_of_its_pages():
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


def test_each_task_has_its_metrics():
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
def test_the_bundled_questions_are_read(fixtures, name):
    items = read_items(TASKS[name], find_file(TASKS[name], fixtures / "eval"))
    assert len(items) == 24
    choices = {"lambada": {1}, "piqa": {2}, "winogrande": {2}, "hellaswag": {4}}
    assert {len(item.pairs) for item in items} == choices.get(name, {3, 4, 5})


def test_packed_files_and_plain_names_are_found(tmp_path):
    record = FORMS["lambada"][1]
    with gzip.open(tmp_path / "lambada.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n\n" + json.dumps(record) + "\n")
    path = find_file(TASKS["lambada"], tmp_path)
    assert path.name == "lambada.jsonl.gz"
    assert len(read_items(TASKS["lambada"], path)) == 2
    assert len(read_items(TASKS["lambada"], path, limit=1)) == 1
    write(tmp_path / "lambada_openai_test.jsonl", record)
    assert find_file(TASKS["lambada"], tmp_path).name == "lambada_openai_test.jsonl"


def test_files_are_looked_for_where_told_then_in_the_environment_then_in_the_usual_folder(workdir, monkeypatch):
    for folder in ("told", "named", "data/eval"):
        (workdir / folder).mkdir(parents=True)
        write(workdir / folder / "piqa_val.jsonl", FORMS["piqa"][0])
    assert find_file(TASKS["piqa"]) == Path("data/eval/piqa_val.jsonl")
    monkeypatch.setenv("WHIMBREL_EVAL_DATA", "named")
    assert find_file(TASKS["piqa"]) == Path("named/piqa_val.jsonl")
    assert find_file(TASKS["piqa"], "told") == Path("told/piqa_val.jsonl")


def test_what_was_looked_for_and_where_is_said(workdir):
    expected = (
        "no file of the task piqa in data/eval: looked for piqa_val.jsonl, piqa_val.jsonl.gz, piqa.jsonl, "
        "piqa.jsonl.gz; name their folder with --data or WHIMBREL_EVAL_DATA"
    )
    with pytest.raises(DataError) as raised:
        find_file(TASKS["piqa"])
    assert str(raised.value) == expected


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(
        ConfigError, match="no task 'hellaswagg': there are arc_challenge, arc_easy, hellaswag, lambada"
    ):
        find_task("hellaswagg")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"query": "Q", "choices": ["a", "b"]}, "piqa.jsonl line 2: no 'gold' among 'query', 'choices'"),
        ({"query": "Q", "choices": ["a", "b"], "gold": 2}, "line 2: the right choice is number 2 of 2, counted from 0"),
        ({"query": "Q", "choices": ["a", "b"], "gold": -1}, "line 2: the right choice is number -1"),
        ({"query": "Q", "choices": ["a", "b"], "gold": "0"}, "line 2: 'gold' is \"0\": give a whole number"),
        ({"query": "Q", "choices": ["a", ""], "gold": 0}, "line 2: a choice is empty"),
        ({"query": "Q", "choices": 7, "gold": 0}, "line 2: 'choices' is 7: give a list of texts"),
        ({"goals": "Q"}, "no 'goal' among 'goals': give query choices gold, or goal sol1 sol2 label"),
        ({}, "line 2: no 'goal' among nothing"),
        ([1, 2], "line 2: holds a list, not an object"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, record, message):
    path = write(tmp_path / "piqa.jsonl", FORMS["piqa"][0], record)
    with pytest.raises(DataError) as raised:
        read_items(TASKS["piqa"], path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


HELLASWAG = {"activity_label": "Tea", "ctx_a": "Boil", "ctx_b": "then", "endings": ["a", "b"], "label": 0}


@pytest.mark.parametrize("given", [None, True, 1.5, [5], {"text": "ab"}, [["a"]], "\ud800", [None]])
def test_a_field_of_the_wrong_kind_is_named_with_what_is_wanted(given):
    forms = [(name, form) for name, both in FORMS.items() for form in both[:2]]
    for name, record in [*forms, ("hellaswag", HELLASWAG), ("arc_challenge", FORMS["arc_easy"][0])]:
        TASKS[name].item(record)
        for field in record:
            with pytest.raises(DataError) as raised:
                TASKS[name].item(record | {field: given})
            assert str(raised.value).startswith(f"'{field}' is {json.dumps(given)}: give ")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("arc_easy", {"query": 5}, "'query' is 5: give a text of valid Unicode"),
        ("arc_easy", {"choices": "ab", "gold": 0}, "'choices' is \"ab\": give a list of texts"),
        ("arc_easy", {"gold": "1"}, "'gold' is \"1\": give a whole number, counted from 0"),
        ("arc_easy", {"query": ["x" * 1000]}, f"'query' is [\"{'x' * 58}: give a text of valid Unicode"),
        ("lambada", {"continuation": ["a"]}, "'continuation' is [\"a\"]: give a text of valid Unicode"),
    ],
)
def test_one_line_says_which_field_what_it_is_and_what_is_wanted(name, change, message):
    with pytest.raises(DataError) as raised:
        TASKS[name].item(FORMS[name][0] | change)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("arc_easy", {"answerKey": "A"}, "'answerKey' is 'A': give one of the labels, 1, 2, 3"),
        ("arc_easy", {"choices": {"text": ["a", "b"], "label": ["1"]}}, "lists of texts that are equally long"),
        ("winogrande", {"answer": "3"}, '\'answer\' is "3": give "1" or "2"'),
        ("winogrande", {"sentence": "Ann left."}, "'sentence' is \"Ann left.\": give a text with _"),
        ("piqa", {"label": "1"}, "'label' is \"1\": give a whole number"),
        ("lambada", {"text": "ends in a space "}, "a choice is empty"),
    ],
)
def test_a_published_line_that_is_no_question_is_told(name, change, message):
    with pytest.raises(DataError) as raised:
        TASKS[name].item(FORMS[name][1] | change)
    assert message in str(raised.value)


def test_files_from_windows_are_read(tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "the sea"}\r\n\r\n{"text": "a tree"}\r\n')
    assert [item.pairs for item in read_items(TASKS["lambada"], path)] == [(("the", " sea"),), (("a", " tree"),)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no question of the task piqa"),
        (b'{"query": ', "line 1 is not JSON"),
        (b"\xff\xfe", "is not UTF-8 after line 0"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"gold": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    path = tmp_path / "piqa.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_items(TASKS["piqa"], path)


def test_a_packed_file_that_is_damaged_is_named(tmp_path):
    lines = "".join(json.dumps(FORMS["piqa"][0] | {"number": number}) + "\n" for number in range(2000))
    packed, path = gzip.compress(lines.encode()), tmp_path / "piqa.jsonl.gz"
    for damaged in (packed[:-2000], packed[:10] + b"\xff" * 100, lines.encode()):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot read .*piqa.jsonl.gz after line \d+: "):
            read_items(TASKS["piqa"], path)


def test_a_limit_below_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="limit = 0 must be at least 1"):
        read_items(TASKS["piqa"], write(tmp_path / "piqa.jsonl", FORMS["piqa"][0]), limit=0)
