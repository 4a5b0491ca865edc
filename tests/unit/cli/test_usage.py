"""Usage errors and help: suggestions for unknown options, completion, prompts on standard input, narrow terminals."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer

from whimbrel.cli.main import COMMANDS, main
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig


@pytest.fixture
def whimbrel(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("generate", "model", "-t", "3"), "did you mean --temperature, --tokenizer, --top-k or --top-p?"),
        (("chat", "model", "-T", "3"), "did you mean --temperature, --template, --tokenizer, --top-k or --top-p?"),
        (("generate", "model", "--checkpoint", "3"), "unknown option --checkpoint; see whimbrel generate --help"),
        (("train", "run.toml", "--zzz"), "unknown option --zzz; `whimbrel train --settings` lists"),
        (("train", "run.toml", "--pain"), "unknown option --pain: did you mean --plain?"),
        (("generate", "model", "--temprature", "3"), "did you mean --temperature?"),
        (("generate", "model", "--max_new_token", "3"), "did you mean --max-new-tokens?"),
        (("finalize", "model", "--out-dir", "x"), "unknown option --out-dir; see whimbrel finalize --help"),
        (("init", "chat-lora", "--name", "x"), "unknown option --name; see whimbrel init --help"),
        (("generate", "model", "one", "two"), "quote a prompt"),
        (("train", "run.toml", "-steps", "5"), "unknown option -steps: did you mean --train.steps?"),
        (("train", "run.toml", "-lr=3"), "did you mean --optim.lr?"),
        (("train", "run.toml", "optim.lr=3"), "write --optim.lr=3"),
        (("train", "run.toml", "steps=5"), "write --train.steps=5"),
        (("generate", "model", "hi", "seed=5"), "write --seed=5"),
        (("train", "run.toml", "qqqq=5"), "see whimbrel train --help"),
        (("train", "run.toml", "--resume"), "rerun the same command"),
        (("finetune", "m", "d", "--out-dir", "x", "--resume=true"), "rerun the same command"),
        (("train", "run.toml", "--resume_from_checkpoint", "x"), "rerun the same command"),
        (("train", "run.toml", "--validation"), "such as --validation."),
        (("train", "run.toml", "-Q"), "unknown option -Q; see whimbrel train --help"),
        (("train",), "Missing argument 'CONFIG'; see whimbrel train --help"),
        (("export", "model"), "Missing argument 'OUT'"),
        (("tokenizer", "train", "--out-dir", "x"), "Missing argument 'SOURCE...'"),
        (("prepare", "a.txt", "--shard-size", "x"), "'--shard-size': expected a valid integer, got 'x'"),
        (("prepare", "a.txt", "--workers", "0"), "'--workers': expected a value greater than or equal to 1, got '0'"),
        (("quickstart", "a.txt", "--minutes", "zero"), "'--minutes': expected a valid number, got 'zero'"),
        (("serve", "model", "--max-requests", "0"), "--max-requests: expected at least 1, got 0"),
        (("serve", "model", "--allow-host", ""), "--allow-host: expected a host name"),
        (("serve", "model", "--host", "nosuchhost.invalid"), "expected an address of this machine for --host"),
        (("serve", "model", "--name", ""), "expected a model id for --name, got an empty string"),
        (("tokenizer", "train", "run.toml", "--out-dir", "run.toml"), "expected a directory for --out-dir"),
        (("prepare", "shakespear"), "no such file: shakespear (did you mean shakespeare?)"),
        (("prepare", "shakespeare", "--encoding", "idna"), "unknown --encoding 'idna'"),
        (("prepare", "shakespeare", "--shard-size", "1"), "expected --shard-size of at least 28"),
        (("prepare", "link.txt"), "link.txt (a broken symbolic link to moved.txt)"),
        (("prepare", "pipe"), "got the pipe or device pipe"),
        (("generate", "link.txt", "hi"), "broken symbolic link to moved.txt"),
        (("--versoin",), "did you mean --version?"),
        (("tokenizer", "trian"), "Did you mean 'train'?"),
    ],
)
def test_usage_errors_say_what_to_do(whimbrel, workdir: Path, arguments: tuple[str, ...], expected: str) -> None:
    Path("run.toml").touch()
    Path("link.txt").symlink_to("moved.txt")
    os.mkfifo("pipe")
    code, out, err = whimbrel(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize("columns", [40, 80])
def test_help_never_cuts_off_a_name(whimbrel, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = whimbrel("--help")
    listed = [line.split()[0] for line in out.partition("Commands:")[2].splitlines() if line[:3].strip()]
    assert (code, listed) == (0, list(COMMANDS))
    assert "..." not in out.partition("Commands:")[2]
    _, out, _ = whimbrel("tokenizer")
    assert "transformers" in out.partition("Commands:")[2]
    assert "..." not in out.partition("Commands:")[2]
    for command, option in (("generate", "--repetition-penalty"), ("eval", "--max-new-tokens")):
        _, out, _ = whimbrel(command, "--help")
        assert option in out
        assert "…" not in out


@pytest.mark.parametrize(
    ("command", "usage", "listed"),
    [
        (["generate"], "[OPTIONS] MODEL [PROMPT]", ["MODEL", "PROMPT"]),
        (["train"], "[OPTIONS] CONFIG", ["CONFIG"]),
        (["plot"], "[OPTIONS] RUNS...", ["RUNS..."]),
        (["prepare"], "[OPTIONS] [SOURCE]...", ["SOURCE..."]),
        (["tokenizer", "show"], "[OPTIONS] [TOKENIZER]", ["TOKENIZER"]),
    ],
)
def test_help_shows_arguments_in_uppercase(whimbrel, command: list[str], usage: str, listed: list[str]) -> None:
    _, out, _ = whimbrel(*command, "--help")
    assert out.splitlines()[0] == f"Usage: whimbrel {' '.join(command)} {usage}"
    arguments = out.partition("Arguments:")[2].partition("Options:")[0].splitlines()
    assert [line.split()[0] for line in arguments if line[:3].strip()] == listed


@pytest.mark.parametrize(
    ("words", "expected"),
    [("whimbrel gen", "generate"), ("whimbrel generate --temp", "--temperature"),
     ("whimbrel train run.toml --train.steps=3 --pl", "--plain"),
     ("whimbrel train run.toml --train.micro_b", "--train.micro_batch"),
     ("whimbrel train shake", "shakespeare-cpu"), ("whimbrel train s", "small.toml shakespeare-cpu"),
     ("whimbrel train runs/", ""), ("whimbrel init gpt2-f", "gpt2-fast-20m"), ("whimbrel init s", "shakespeare-cpu"),
     ("whimbrel control runs/a st", "status stop")],
)  # fmt: skip
def test_shell_completion(workdir: Path, words: str, expected: str) -> None:
    (workdir / "small.toml").touch()
    environment = os.environ | {
        "_WHIMBREL_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "from whimbrel.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected.split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "model"
    config = GPTConfig(context_length=32, vocab_size=257, num_layers=1, embd_size=16, num_heads=2)
    save_model(GPT(config), folder, byte_tokenizer())
    return str(folder)


@pytest.mark.parametrize("prompt", [(), ("-",)])
def test_prompt_is_read_from_standard_input(
    whimbrel, model: str, monkeypatch: pytest.MonkeyPatch, prompt: tuple[str, ...]
) -> None:
    options = ("--max-new-tokens", "4", "--temperature", "0", "--device", "cpu")
    _, expected, _ = whimbrel("generate", model, "Once upon", *options)
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\n"))
    assert whimbrel("generate", model, *prompt, *options) == (0, expected, "")


def test_standard_input_is_not_read_if_there_is_a_prompt(whimbrel, model: str, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ignored"))
    code, out, _ = whimbrel("generate", model, "Once", "--max-new-tokens", "1", "--device", "cpu")
    assert (code, out[:4]) == (0, "Once")
    assert sys.stdin.read() == "ignored"


def test_standard_input_that_is_not_utf8_is_an_error(whimbrel, model: str, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    code, _, err = whimbrel("generate", model)
    assert code == 2
    assert "expected UTF-8 on standard input" in err
