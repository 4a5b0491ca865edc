"""Few-shot examples and chat prompts; equality with lm-eval is in tests/parity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.evaluate import TASKS, Item, PromptOptions
from whimbrel.evaluate.prompts import format_item, read_questions
from whimbrel.evaluate.tasks import find_examples, generative_task
from whimbrel.tokenization import ChatTemplate

TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]", writes_bos=False, trusted=True
)
PIQA = [{"goal": f"Goal {number}", "sol1": "yes", "sol2": "no", "label": number % 2} for number in range(6)]


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def contexts(path: Path, template: ChatTemplate | None = None, **options) -> list[str]:
    task = generative_task(path)
    questions = read_questions(task, path, PromptOptions(**options))
    formatted = [
        format_item(task, *each, template, multiturn=options.get("multiturn", True))
        for each in zip(questions.items, questions.examples, strict=True)
    ]
    return [item.pairs[0][0] for item in formatted]


def test_question_is_never_its_own_example(tmp_path):
    path = write(tmp_path / "piqa.jsonl", [*PIQA, *PIQA])
    questions = read_questions(TASKS["piqa"], path, PromptOptions(shots=4))
    for item, examples in zip(questions.items, questions.examples, strict=True):
        assert len(examples) == 4
        assert item not in examples
    assert (questions.shots, questions.shots_file) == (4, path)


def test_limit_does_not_change_examples(tmp_path):
    path = write(tmp_path / "piqa.jsonl", PIQA)
    complete = read_questions(TASKS["piqa"], path, PromptOptions(shots=3))
    limited = read_questions(TASKS["piqa"], path, PromptOptions(shots=3), limit=2)
    assert limited.items == complete.items[:2]
    assert limited.examples == complete.examples[:2]


def test_file_of_examples(tmp_path):
    task, path = TASKS["piqa"], write(tmp_path / "piqa_val.jsonl", PIQA)
    assert find_examples(task, path) == path
    training = write(tmp_path / "piqa_train.jsonl", PIQA)
    assert find_examples(task, path) == training
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match=r"no examples for task piqa in .*other .*expected piqa_train.jsonl or"):
        find_examples(task, path, tmp_path / "other")
    other = write(tmp_path / "other" / "piqa_train.jsonl", PIQA)
    assert find_examples(task, path, tmp_path / "other") == find_examples(task, path, other) == other


@pytest.mark.parametrize(
    ("records", "shots", "message"),
    [
        (PIQA, 6, "piqa.jsonl: expected at least 7 examples for 6 per question, got 6: pass a smaller --shots"),
        ([PIQA[0]] * 4 + [PIQA[1]], 3, "piqa.jsonl: expected 3 examples different from the question, got 1"),
    ],
)
def test_too_few_examples_are_rejected(tmp_path, records, shots, message):
    path = write(tmp_path / "piqa.jsonl", records)
    with pytest.raises(DataError, match=message):
        read_questions(TASKS["piqa"], path, PromptOptions(shots=shots))


def test_damaged_example_is_reported_with_its_line(tmp_path):
    path, examples = write(tmp_path / "piqa.jsonl", PIQA), write(tmp_path / "examples.jsonl", [*PIQA, {"goal": 5}])
    with pytest.raises(DataError, match=r"examples.jsonl line 7: .* in 'goal'"):
        read_questions(TASKS["piqa"], path, PromptOptions(shots=1, shots_data=examples))


def test_options_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="shots: expected at least 0, got -1"):
        PromptOptions(shots=-1)
    path = write(tmp_path / "piqa.jsonl", PIQA)
    with pytest.raises(ConfigError, match="expected --shots of at least 1 with --shots-data"):
        read_questions(TASKS["piqa"], path, PromptOptions(shots_data=path))


def test_delimiters_of_multiple_choice_prompts():
    task, item, example = TASKS["piqa"], TASKS["piqa"].item(PIQA[0]), TASKS["piqa"].item(PIQA[1])
    question = "Question: Goal 0\nAnswer:"
    plain = format_item(task, item, [example])
    assert plain.pairs[0] == (f"Question: Goal 1\nAnswer: no\n\n{question}", " yes")
    turns = format_item(task, item, [example], TEMPLATE)
    assert turns.pairs[1] == (f"[user]Question: Goal 1\nAnswer:[assistant]no[user]{question}[assistant]", "no")
    single = format_item(task, item, [example], TEMPLATE, multiturn=False)
    assert single.pairs[0] == (f"[user]Question: Goal 1\nAnswer: no\n\n{question}[assistant]", "yes")


def test_formats_of_generative_files_give_the_same_prompts(tmp_path):
    forms = [
        [{"prompt": f"Say {letter}", "answer": letter} for letter in "abc"],
        [{"prompt": f"Say {letter}", "completion": letter} for letter in "abc"],
        [
            {"messages": [{"role": "user", "content": f"Say {letter}"}, {"role": "assistant", "content": letter}]}
            for letter in "abc"
        ],
    ]
    for shots, template in ((0, None), (2, None), (2, TEMPLATE)):
        rendered = [
            contexts(write(tmp_path / "held-out.jsonl", form), template, shots=shots, chat=template is not None)
            for form in forms
        ]
        assert rendered[0] == rendered[1] == rendered[2]
        assert rendered[0][2].endswith("Say c" if template is None else "[user]Say c[assistant]")
        assert rendered[0][2].count("Say") == shots + 1


def test_conversations_keep_their_earlier_messages(tmp_path):
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": f"{number}"} for number, role in enumerate(roles)]
    path = write(tmp_path / "chats.jsonl", [{"messages": messages}] * 2 + [{"messages": messages[1:]}])
    assert contexts(path, TEMPLATE, chat=True)[0] == "[system]0[user]1[assistant]2[user]3[assistant]"
    with pytest.raises(ConfigError, match="chats.jsonl has conversations .*: add --chat"):
        contexts(path)
    with pytest.raises(ConfigError, match="expected single-turn few-shot examples"):
        contexts(path, TEMPLATE, chat=True, shots=1)
    write(path, [{"messages": [messages[0], *messages[3:]]}, {"messages": messages[3:]}])
    assert contexts(path, TEMPLATE, chat=True, shots=1) == [
        "[system]0[user]3[assistant]4[user]3[assistant]",
        "[user]3[assistant]4[user]3[assistant]",
    ]


@pytest.mark.parametrize(
    "messages",
    [
        "text",
        [],
        [{"role": "user", "content": "a"}],
        [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": [{"type": "text"}]}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": "a"}, "b"],
    ],
)
def test_invalid_conversations_are_rejected(tmp_path, messages):
    path = write(tmp_path / "chats.jsonl", [{"messages": messages}])
    with pytest.raises(DataError, match=r"chats.jsonl line 1: expected a list of messages .* in 'messages', got"):
        contexts(path, TEMPLATE, chat=True)


def test_items_of_gsm8k_files(tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"question": "1 + 1?", "answer": "Two.\n#### 2"}])
    task = generative_task(path)
    assert (task.name, task.shots, [*task.filters]) == ("mine", 0, ["exact_match_strict", "exact_match_flexible"])
    assert task.item({"question": "1 + 1?", "answer": "Two.\n#### 2"}) == Item(
        (("Question: 1 + 1?\nAnswer:", " Two.\n#### 2"),), 0, (11,)
    )
    for record in ({"question": "1 + 1?", "answer": "2"}, {"question": "1 + 1?"}, {"question": "?", "answer": "#### "}):
        with pytest.raises(DataError, match="expected"):
            task.item(record)
