"""`whimbrel eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.commands import whimbrel

import whimbrel as package
from whimbrel.base.files import PARTIAL
from whimbrel.evaluate import TASKS, Scorer, evaluate_tasks, perplexity
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.tokenization import train_tokenizer


@pytest.fixture(scope="module")
def model(shakespeare: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = train_tokenizer([shakespeare[:20_000]], 300)
    torch.manual_seed(0)
    shape = {"num_layers": 1, "embd_size": 32, "num_heads": 2, "embd_init_std": 0.5, "init_std": 0.2}
    save_model(GPT(GPTConfig(context_length=64, vocab_size=300, **shape)), folder, tokenizer)
    return folder


def rows(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.splitlines()]


def test_tasks_are_printed_and_written(model, fixtures, tmp_path, capsys):
    out, data = tmp_path / "results.json", fixtures / "eval"
    options = ("--tasks", "piqa, winogrande", "--data", data, "--limit", 10, "--device", "cpu", "--out", out)
    assert whimbrel("eval", model, *options) == 0
    expected = evaluate_tasks(Scorer.load(model), ["piqa", "winogrande"], data, limit=10)
    table = rows(capsys.readouterr().out)
    assert table[0] == ["task", "items", "metric", "value", "stderr"]
    for name, metric in (("piqa", "acc"), ("piqa", "acc_norm"), ("winogrande", "acc")):
        value, stderr = expected[name].metrics[metric]
        assert [name, "10", metric, f"{value:.4f}", "±", f"{stderr:.4f}"] in table
    written = json.loads(out.read_text())
    assert written["tasks"]["piqa"]["acc_norm"] == expected["piqa"].metrics["acc_norm"].value
    assert written["tasks"]["piqa"]["acc_norm_stderr"] == expected["piqa"].metrics["acc_norm"].stderr
    assert written["tasks"]["piqa"]["items_sha256"] == expected["piqa"].items_sha256
    assert written["tasks"]["winogrande"]["file"] == "winogrande_val.jsonl"
    assert written["model"]["name"] == str(model)
    assert written["model"]["parameters"] == Scorer.load(model).model.num_parameters()
    settings = {"limit": 10, "batch_size": None, "quantize": None, "parse_special": True, "device": "cpu"}
    context_length = Scorer.load(model).model.config.context_length
    settings |= {"chat": False, "multiturn": True, "max_new_tokens": min(256, context_length // 2), "stop": None}
    assert written["settings"] == settings
    assert written["versions"]["whimbrel"] == package.__version__
    assert written["versions"]["torch"] == torch.__version__
    assert not list(tmp_path.glob(f"{PARTIAL}*"))


def test_tasks_all(model, fixtures, monkeypatch, capsys):
    monkeypatch.setenv("WHIMBREL_EVAL_DATA", str(fixtures / "eval"))
    assert whimbrel("eval", model, "--tasks", "all", "--limit", 2, "--batch-size", 3, "--device", "cpu") == 0
    printed = capsys.readouterr().out
    names = {row[0] for row in rows(printed)[1:] if len(row) == 6}
    assert names == set(TASKS)
    for name, result in evaluate_tasks(Scorer.load(model), list(TASKS), limit=2).items():
        line = f"{name}: {result.truncated} contexts were truncated"
        assert (line in printed) == (result.truncated > 0)


def test_bits_per_byte_of_text(model, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text('{"body": "To be, or not to be"}\n{"body": "naïve"}\n', encoding="utf-8")
    (tmp_path / "text.txt").write_text("That is the question.")
    options = ("--text", tmp_path / "texts.jsonl", "--text-key", "body", "--text", tmp_path / "text.txt")
    assert whimbrel("eval", model, *options, "--device", "cpu", "--out", tmp_path / "results.json") == 0
    scorer = Scorer.load(model)
    written = json.loads((tmp_path / "results.json").read_text())["texts"]
    printed = rows(capsys.readouterr().out)
    for name, texts in (("texts.jsonl", ["To be, or not to be", "naïve"]), ("text.txt", ["That is the question."])):
        found = perplexity(scorer, texts)
        assert written[str(tmp_path / name)]["bits_per_byte"] == pytest.approx(found.bits_per_byte)
        assert written[str(tmp_path / name)]["bytes"] == sum(len(text.encode()) for text in texts)
        [row] = [row for row in printed if row[0].endswith(name)]
        assert row[1:4] == [str(len(texts)), str(found.tokens), str(found.bytes)]
        assert row[4:] == [f"{found.bits_per_byte:.4f}", f"{found.bits_per_token:.4f}", f"{found.perplexity:.4f}"]


def test_token_shards(model, tmp_path, capsys):
    (tmp_path / "train.txt").write_text("something else")
    (tmp_path / "val.txt").write_text("To be, or not to be")
    shards = ("--out-dir", tmp_path / "shards", "--tokenizer", model, "--val", tmp_path / "val.txt")
    assert whimbrel("prepare", tmp_path / "train.txt", *shards) == 0
    capsys.readouterr()
    numbers = []
    for source in (tmp_path / "shards", tmp_path / "val.txt"):
        assert whimbrel("eval", model, "--text", source, "--device", "cpu") == 0
        numbers.append(rows(capsys.readouterr().out)[1][1:])
    assert numbers[0] == numbers[1]


def test_quantize_and_dtype_options(model, fixtures, tmp_path, capsys):
    values = set()
    for number, options in enumerate(((), ("--quantize", "int8"), ("--dtype", "bf16"))):
        out = tmp_path / f"{number}.json"
        given = ("--tasks", "lambada", "--data", fixtures / "eval", "--limit", 3, "--device", "cpu", "--out", out)
        assert whimbrel("eval", model, *given, *options) == 0
        written = json.loads(out.read_text())
        values.add(written["tasks"]["lambada"]["perplexity"])
    assert written["model"]["dtype"] == "bfloat16"
    assert len(values) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (),
            "expected --tasks (arc_challenge, arc_easy, hellaswag, lambada, piqa, winogrande, gsm8k), --generate or",
        ),
        (("--tasks", "mmlu"), "unknown task 'mmlu': choose from arc_challenge"),
        (("--tasks", "piqa"), "no file for task piqa in data/eval: expected piqa_val.jsonl"),
        (("--tasks", "piqa", "--data", "elsewhere"), "no file for task piqa in elsewhere"),
        (("--text", "nothing.txt"), "no such file: nothing.txt"),
        (("--text", "empty.txt"), "empty.txt contains no text"),
        (
            ("--tasks", "lambada", "--data", "."),
            "lambada.jsonl line 1: expected a valid Unicode string in 'text', got 5",
        ),
        (("--tasks", "piqa", "--limit", "0"), "--limit"),
        (("--generate", "nothing.jsonl"), "no such file: nothing.jsonl"),
        (("--generate", "empty.txt"), "empty.txt has no items"),
        (("--generate", "lambada.jsonl"), "lambada.jsonl line 1: expected fields (question, answer), (prompt, answer)"),
        (("--generate", "questions.jsonl"), "questions.jsonl line 2: expected a solution that ends with '#### '"),
        (("--tasks", "gsm8k", "--data", "."), "no file for task gsm8k in .: expected gsm8k_test.jsonl"),
        (("--text", "empty.txt", "--shots", "1"), "--shots needs --tasks or --generate"),
        (("--text", "empty.txt", "--stop", "x"), "--stop needs --generate or --tasks gsm8k"),
        (("--tasks", "piqa", "--max-new-tokens", "9"), "--max-new-tokens needs --generate or --tasks gsm8k"),
        (("--tasks", "piqa", "--no-multiturn"), "--no-multiturn needs --chat"),
        (("--tasks", "piqa", "--chat", "--no-parse-special"), "--chat cannot be combined with --no-parse-special"),
        (
            ("--generate", "questions.jsonl", "--limit", "1", "--max-new-tokens", "9999"),
            "--max-new-tokens: expected less than the model's context",
        ),
        (("--generate", "questions.jsonl", "--limit", "1", "--stop", ""), "stop: expected non-empty strings"),
        (("--generate", "questions.jsonl", "--shots-data", "empty.txt"), "expected --shots of at least 1"),
    ],
)
def test_invalid_options_are_one_error_line(model, workdir, capsys, options, message):
    Path("empty.txt").touch()
    Path("questions.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n{"question": "2+2", "answer": "4"}')
    Path("lambada.jsonl").write_text('{"text": 5}')
    assert whimbrel("eval", model, *options, "--out", "results.json") == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert not Path("results.json").exists()


def test_generated_answers_are_printed_and_written(model, tmp_path, capsys):
    questions = [{"prompt": f"Say {letter}", "answer": letter} for letter in "abcd"]
    file, out = tmp_path / "held-out.jsonl", tmp_path / "results.json"
    file.write_text("\n".join(map(json.dumps, questions)))
    options = ("--generate", file, "--shots", 1, "--chat", "--no-multiturn", "--max-new-tokens", 4, "--device", "cpu")
    assert whimbrel("eval", model, *options, "--out", out, "--log-samples") == 0
    printed = capsys.readouterr().out
    table = rows(printed)
    assert [str(file), "4", "exact_match", "0.0000", "±", "0.0000"] in table
    assert [row[2] for row in table[1:3]] == ["exact_match", "ended"]
    assert "few-shot examples per question: 1, from held-out.jsonl" in printed
    written = json.loads(out.read_text())
    result = written["tasks"][str(file)]
    assert (result["shots"], result["shots_file"], result["items"]) == (1, "held-out.jsonl", 4)
    assert written["settings"]["chat"] is True
    assert (written["settings"]["multiturn"], written["settings"]["max_new_tokens"]) == (False, 4)
    for sample, question in zip(result["samples"], questions, strict=True):
        asked = sample["prompt"].removeprefix("User: Say ").removesuffix("\nAssistant:")
        assert asked.endswith(f"\n\nSay {question['answer']}")
        assert sample["answer"] == question["answer"] != asked[0]
        assert 0 < sample["tokens"] <= 4
    assert result["ended"] == sum(sample["finish_reason"] == "eos" for sample in result["samples"]) / 4


def test_samples_are_written_on_request_only(model, fixtures, tmp_path, capsys):
    out = tmp_path / "results.json"
    options = ("--tasks", "piqa", "--data", fixtures / "eval", "--limit", 2, "--device", "cpu")
    assert whimbrel("eval", model, *options, "--out", out) == 0
    assert "samples" not in json.loads(out.read_text())["tasks"]["piqa"]
    assert whimbrel("eval", model, *options, "--out", out, "--log-samples") == 0
    samples = json.loads(out.read_text())["tasks"]["piqa"]["samples"]
    assert [len(sample["choices"]) for sample in samples] == [2, 2]
    for sample in samples:
        best = max(range(2), key=lambda index: sample["choices"][index]["loglikelihood"])
        assert sample["acc"] == (best == sample["gold"])
    assert whimbrel("eval", model, *options, "--log-samples") == 2
    assert "--log-samples writes the samples to --out" in capsys.readouterr().err


def test_bad_file_is_reported_before_loading(workdir, capsys):
    Path("questions.jsonl").write_text('{"prompt": "1+1", "answer": 2}')
    assert whimbrel("eval", "no-such-model", "--generate", "questions.jsonl") == 2
    assert "questions.jsonl line 1: expected a valid Unicode string in 'answer', got 2" in capsys.readouterr().err


def test_missing_file_is_reported_before_loading(workdir, capsys):
    assert whimbrel("eval", "no-such-model", "--tasks", "piqa") == 2
    assert "no file for task piqa" in capsys.readouterr().err


def test_results_are_printed_even_if_writing_fails(model, fixtures, tmp_path, capsys):
    (tmp_path / "file").touch()
    options = ("--tasks", "piqa", "--data", fixtures / "eval", "--limit", 2, "--device", "cpu")
    assert whimbrel("eval", model, *options, "--out", tmp_path / "file" / "results.json") == 2
    printed = capsys.readouterr()
    assert "acc_norm" in printed.out
    assert "results.json" in printed.err.splitlines()[-1]


@pytest.mark.parametrize("folder", ["", "."])
def test_out_directory_is_rejected_before_loading(folder, tmp_path, capsys):
    assert whimbrel("eval", tmp_path / "nothing", "--text", "any", "--out", folder) == 2
    assert "expected a file for --out" in capsys.readouterr().err
