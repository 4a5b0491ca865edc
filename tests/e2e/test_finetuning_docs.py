"""The examples of docs/finetuning.md and docs/chat-models.md run in the order of the page, with fewer steps.

The first Python block of a page writes its data, so it runs first. TOML blocks are saved under the name that the next
`whimbrel train` command has. A tiny model is in the place of the one from the Hub.
"""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.commands import whimbrel
from tests.support.documentation import read_page
from tests.support.finetuning import save_small_chat_model

from whimbrel.cli.train import run_settings

FINETUNING, CHAT_MODELS = "docs/finetuning.md", "docs/chat-models.md"
BLOCK = re.compile(r"^```(bash|python|toml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHORTER = {
    "finetune": "--train.epochs=none --train.steps=2 --train.micro_batch=2 --plain",
    "train": "--train.epochs=none --train.steps=2 --plain",
}


class Example(NamedTuple):
    """A Python block, a command, or the TOML file of a command."""

    language: str
    code: str


def examples(page: str) -> list[Example]:
    """What the reader of a page runs, in order."""
    blocks = [Example(*block) for block in BLOCK.findall(read_page(page))]
    first = next(block for block in blocks if block.language == "python")
    found = [first]
    for block in blocks:
        if block.language == "bash":
            lines = block.code.replace("\\\n", " ").splitlines()
            commands = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines]
            found += [Example("bash", command) for command in commands if command]
        elif block is not first:
            found.append(block)
    return found


@pytest.fixture(scope="module")
def finetuning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that docs/finetuning.md expects."""
    folder = tmp_path_factory.mktemp("finetuning")
    save_small_chat_model(folder / HUB_MODEL)
    save_small_chat_model(folder / "models" / "base", is_base=True)
    (folder / "notes.jsonl").write_text('{"text": "Parcels are sent on Monday."}\n' * 20)
    return folder


@pytest.fixture(scope="module")
def chat_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat-models")


def run_example(example: Example, following: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an example in the working directory. A server runs for the Python block after it."""
    if example.language == "toml":
        name = next(shlex.split(each.code)[2] for each in following if each.code.startswith("whimbrel train"))
        Path(name).write_text(example.code)
    elif example.language == "python" and "127.0.0.1" not in example.code:
        exec(compile(example.code, "example", "exec", dont_inherit=True), {"__name__": "example"})  # noqa: S102
    elif example.code.startswith("whimbrel serve"):
        client = following[0].code if following and "127.0.0.1" in following[0].code else ""
        run_server(shlex.split(example.code)[2:], client)
    elif example.language == "bash":
        program, verb, *arguments = shlex.split(example.code)
        assert program == "whimbrel"
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n"))
        if verb == "chat":
            arguments.append("--max-new-tokens=8")
        assert whimbrel(verb, *arguments, *SHORTER.get(verb, "").split()) == 0


def run_server(arguments: list[str], client: str) -> None:
    pytest.importorskip("openai", reason="needs the package 'openai'")
    from tests.e2e.serving import serving

    with serving(Path(arguments[0]), *arguments[1:]) as server:
        code = client.replace("http://127.0.0.1:8000", server.url).replace('"none"', f'"{server.key}"')
        exec(compile(code, "client", "exec", dont_inherit=True), {})  # noqa: S102
        with server.client() as http:
            assert http.get("/v1/models").status_code == 200


def numbered(page: str) -> list[object]:
    return [
        pytest.param(number, id=f"{number}-{'-'.join(example.code.split()[:2])}")
        for number, example in enumerate(examples(page))
    ]


@pytest.mark.parametrize("number", numbered(FINETUNING))
def test_finetuning_examples_run(finetuning: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if "from peft" in examples(FINETUNING)[number].code:
        pytest.importorskip("peft")
    monkeypatch.chdir(finetuning)
    run_example(examples(FINETUNING)[number], examples(FINETUNING)[number + 1 :], monkeypatch)


@pytest.mark.parametrize("number", numbered(CHAT_MODELS))
def test_chat_model_examples_run(chat_models: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(chat_models)
    run_example(examples(CHAT_MODELS)[number], examples(CHAT_MODELS)[number + 1 :], monkeypatch)


def test_dry_run_prints_what_is_shown(finetuning: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The labels and the rendered sample are those of the page; numbers depend on tokenizer and model."""
    (shown,) = re.findall(r"--dry-run\n```\n\n```text\n(.*?)^```", read_page(FINETUNING), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(finetuning)
    whimbrel("finetune", HUB_MODEL, "chats.jsonl", "--val", "0.05", "--out-dir", "runs/shown", "--dry-run")
    printed = capsys.readouterr().out

    def outline(text: str) -> list[str]:
        return [line if line.startswith("  <|") or "[[" in line else line.split("  ")[0] for line in text.splitlines()]

    assert outline(printed) == outline(shown)


@pytest.mark.parametrize("page", [FINETUNING, CHAT_MODELS])
def test_settings_that_are_mentioned_exist(page: str) -> None:
    settings = {setting.name for setting in run_settings()}
    mentioned = set(re.findall(r"--([a-z]+\.\w+)", read_page(page))) - {"section.name"}
    assert mentioned <= settings


def test_formats_in_the_table_are_detected(tmp_path: Path) -> None:
    from whimbrel.data.conversations import FORMATS, ConversationReader

    rows = re.findall(r"^\| `([\w-]+)` \| `(\{.*\})` \|$", read_page(FINETUNING), re.MULTILINE)
    assert {name for name, _ in rows} == set(FORMATS)
    for name, line in rows:
        file = tmp_path / f"{name}.jsonl"
        file.write_text(line + "\n")
        reader = ConversationReader([str(file)])
        assert len(list(reader)) == 1
        assert list(reader.report.formats.values()) == [name]
