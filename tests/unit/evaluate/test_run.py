"""Tasks from their files to numbers."""

from __future__ import annotations

import json

import pytest

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.files import sha256_file
from whimbrel.evaluate import TASKS, evaluate_items, evaluate_tasks
from whimbrel.evaluate.files import read_items


def test_numbers_are_those_of_the_scores(subject, fixtures):
    path = fixtures / "eval" / "winogrande_val.jsonl"
    result = evaluate_tasks(subject, ["winogrande"], fixtures / "eval")["winogrande"]
    right = []
    for item in read_items(TASKS["winogrande"], path):
        first, second = (subject.score(subject.pairs([pair]))[0].loglikelihood for pair in item.pairs)
        right.append(item.gold == (first < second))
    assert result.metrics["acc"].value == pytest.approx(sum(right) / 24)
    assert 0 < sum(right) < 24
    assert (result.items, result.file, result.file_sha256) == (24, path.name, sha256_file(path))


def test_each_item_gets_the_scores_of_its_own_choices(subject, fixtures):
    """Items of three, four and five choices stand beside each other."""
    items = read_items(TASKS["arc_easy"], fixtures / "eval" / "arc_easy_test.jsonl")
    assert {len(item.pairs) for item in items} == {3, 4, 5}
    together, _ = evaluate_items(subject, TASKS["arc_easy"], items)
    alone = [evaluate_items(subject, TASKS["arc_easy"], [item])[0]["acc"].value for item in items]
    assert together["acc"].value == pytest.approx(sum(alone) / len(alone))


def test_contexts_that_were_cut_are_counted(subject, fixtures):
    items = read_items(TASKS["hellaswag"], fixtures / "eval" / "hellaswag_val.jsonl", limit=5)
    _, cut = evaluate_items(subject, TASKS["hellaswag"], items)
    sizes = [len(subject.tokenizer.encode(context + text)) for item in items for context, text in item.pairs]
    assert cut == sum(size > 65 for size in sizes) > 0


def test_a_hash_tells_questions_apart(subject, fixtures, tmp_path):
    lines = (fixtures / "eval" / "piqa_val.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    results = []
    other = json.loads(lines[0])
    turned = [json.dumps(other | {"gold": 1 - other["gold"]}), *lines[1:]]
    for number, records in enumerate((lines, lines[:2], turned, lines)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "piqa.jsonl").write_text("\n".join(json.dumps(json.loads(line)) for line in records))
        results.append(evaluate_tasks(subject, ["piqa"], folder)["piqa"])
    first, shorter, turned_sha256, again = (result.items_sha256 for result in results)
    assert first == again
    assert len({first, shorter, turned_sha256}) == 3
    limited = evaluate_tasks(subject, ["piqa"], fixtures / "eval", limit=3)["piqa"]
    assert limited.items_sha256 == first
    assert limited.file_sha256 != results[0].file_sha256


def test_all_is_found_before_anything_is_scored(subject, fixtures, tmp_path, monkeypatch):
    (tmp_path / "piqa.jsonl").write_bytes((fixtures / "eval" / "piqa_val.jsonl").read_bytes())
    monkeypatch.setattr(type(subject), "score", lambda *_, **__: pytest.fail("scored too early"))
    with pytest.raises(DataError, match="no file of the task winogrande"):
        evaluate_tasks(subject, ["piqa", "winogrande"], tmp_path)
    with pytest.raises(ConfigError, match="no task is named"):
        evaluate_tasks(subject, [], tmp_path)
