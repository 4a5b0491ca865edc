"""Evaluating tasks: metrics, truncation, hashes."""

from __future__ import annotations

import json

import pytest

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.files import sha256_file
from whimbrel.evaluate import TASKS, evaluate_items, evaluate_tasks
from whimbrel.evaluate.tasks import read_items


def test_metrics_follow_from_the_scores(scorer, fixtures):
    path = fixtures / "eval" / "winogrande_val.jsonl"
    result = evaluate_tasks(scorer, ["winogrande"], fixtures / "eval")["winogrande"]
    right = []
    for item in read_items(TASKS["winogrande"], path):
        first, second = (scorer.score(scorer.encode_pairs([pair]))[0].loglikelihood for pair in item.pairs)
        right.append(item.gold == (first < second))
    assert result.metrics["acc"].value == pytest.approx(sum(right) / 24)
    assert 0 < sum(right) < 24
    assert (result.items, result.file, result.file_sha256) == (24, path.name, sha256_file(path))


def test_items_with_different_numbers_of_choices(scorer, fixtures):
    items = read_items(TASKS["arc_easy"], fixtures / "eval" / "arc_easy_test.jsonl")
    assert {len(item.pairs) for item in items} == {3, 4, 5}
    together, _ = evaluate_items(scorer, TASKS["arc_easy"], items)
    alone = [evaluate_items(scorer, TASKS["arc_easy"], [item])[0]["acc"].value for item in items]
    assert together["acc"].value == pytest.approx(sum(alone) / len(alone))


def test_truncated_contexts_are_counted(scorer, fixtures):
    items = read_items(TASKS["hellaswag"], fixtures / "eval" / "hellaswag_val.jsonl", limit=5)
    _, truncated = evaluate_items(scorer, TASKS["hellaswag"], items)
    sizes = [len(scorer.tokenizer.encode(context + text)) for item in items for context, text in item.pairs]
    assert truncated == sum(size > 65 for size in sizes) > 0


def test_items_hash_identifies_the_questions(scorer, fixtures, tmp_path):
    lines = (fixtures / "eval" / "piqa_val.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    results = []
    other = json.loads(lines[0])
    changed_gold = [json.dumps(other | {"gold": 1 - other["gold"]}), *lines[1:]]
    for number, records in enumerate((lines, lines[:2], changed_gold, lines)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "piqa.jsonl").write_text("\n".join(json.dumps(json.loads(line)) for line in records))
        results.append(evaluate_tasks(scorer, ["piqa"], folder)["piqa"])
    first, shorter, turned_sha256, again = (result.items_sha256 for result in results)
    assert first == again
    assert len({first, shorter, turned_sha256}) == 3
    limited = evaluate_tasks(scorer, ["piqa"], fixtures / "eval", limit=3)["piqa"]
    assert limited.items_sha256 == first
    assert limited.file_sha256 != results[0].file_sha256


def test_all_files_are_read_before_scoring(scorer, fixtures, tmp_path, monkeypatch):
    (tmp_path / "piqa.jsonl").write_bytes((fixtures / "eval" / "piqa_val.jsonl").read_bytes())
    monkeypatch.setattr(type(scorer), "score", lambda *_, **__: pytest.fail("scored too early"))
    with pytest.raises(DataError, match="no file for task winogrande"):
        evaluate_tasks(scorer, ["piqa", "winogrande"], tmp_path)
    with pytest.raises(ConfigError, match="at least one task"):
        evaluate_tasks(scorer, [], tmp_path)
