"""Each message in a heading of docs/troubleshooting.md is what the program prints in that situation.

`...` in a heading stands for any text. Headings without a message describe symptoms.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.commands import whimbrel
from tests.support.documentation import read_page
from tests.support.runs import train_demo_run

PAGE = "docs/troubleshooting.md"
HEADING = re.compile(r"^### `(.*)`(?: \(.*\))?$", re.MULTILINE)
RUN = "runs/demo"
CONFIG = f"{RUN}/config.toml"
Case = Callable[[pytest.MonkeyPatch], object]
CASES: dict[str, Case] = {}


def provokes(words: str) -> Callable[[Case], Case]:
    """Register a function that prints or returns the message of the only heading that contains these words."""

    def register(case: Case) -> Case:
        CASES[words] = case
        return case

    return register


def command(words: str, line: str) -> None:
    """Register a command that provokes a message."""
    CASES[words] = lambda _: whimbrel(*line.split())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """A directory with a run of two steps, and bad text files."""
    folder = tmp_path_factory.mktemp("troubleshooting")
    train_demo_run(folder, shakespeare[:40_000], context_length=32)
    (folder / "latin.txt").write_bytes("un café\n".encode("latin-1"))
    (folder / "null.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    (folder / "other-key.jsonl").write_text('{"body": "a"}\n')
    (folder / "short.txt").write_text("To be, or not to be.\n")
    (folder / "directory").mkdir()
    (folder / "directory" / "file").touch()
    return folder


command("device 'cuda'", f"train {CONFIG} --train.device=cuda --output_dir=runs/x")
command("not UTF-8", "prepare latin.txt --out-dir x")
command("got null", "prepare null.jsonl --out-dir x")
command("no key 'text'", "prepare other-key.jsonl --out-dir x")
command("no such file", "prepare shrot.txt --out-dir x")
command("too many to train on", "prepare short.txt --val-tokens 500 --out-dir x")
command("has shards prepared", "prepare short.txt --out-dir shards")
command("unknown setting", f"train {CONFIG} --train.stesp=5 --output_dir=runs/x")
command("nothing to do", f"train {CONFIG} --plain")
command("No checkpoint found", f"train {CONFIG} --train.steps=1 --output_dir=runs/new --plain")
command("non-finite", f"train {CONFIG} --optim.lr=1e30 --train.steps=4 --output_dir=runs/nan --plain")
command("expected a model with", f"train {CONFIG} --model.num_layers=2 --train.steps=4")
command("no run or model", "generate runs/nope text")
command("cannot be downloaded", "generate owner/nope text")
command("is not empty", f"export {RUN} directory")
command("0.0.0.0", f"serve {RUN} --host 0.0.0.0")


@provokes("matplotlib")
def missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    whimbrel("plot", RUN)


@provokes("out of memory")
def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ..."
        )

    monkeypatch.setattr("whimbrel.train.Trainer.from_config", fail)
    assert whimbrel("train", CONFIG, "--output_dir=runs/x") == 2


@provokes("has no val shards")
def no_validation_split(_: pytest.MonkeyPatch) -> None:
    whimbrel("prepare", "text.txt", "--tokenizer", "shards", "--out-dir", "all-train")
    whimbrel("train", CONFIG, "--data.path=all-train", "--validation.every=1", "--output_dir=runs/x")


@provokes("was made with a vocabulary")
def wrong_vocabulary(_: pytest.MonkeyPatch) -> None:
    whimbrel("train", CONFIG, "--model.vocab_size=200", "--output_dir=runs/x")


@provokes("expected shards with the tokens")
def other_data(_: pytest.MonkeyPatch) -> None:
    """The remedy works too: without the component `dataset`, the run continues with the other shards."""
    whimbrel("prepare", "text.txt", "--tokenizer", "shards", "--val-tokens", "900", "--out-dir", "other")
    copy = ["--output_dir=runs/copy", "--plain"]
    whimbrel("train", CONFIG, *copy)
    assert whimbrel("train", CONFIG, *copy, "--data.path=other", "--train.steps=4") == 2
    assert whimbrel("train", CONFIG, *copy, "--data.path=other", "--train.steps=4", "--resume.skip=dataset") == 0


@provokes("is in use by process")
def run_in_use(_: pytest.MonkeyPatch) -> None:
    from whimbrel.base.lock import DirectoryLock

    with DirectoryLock(RUN):
        whimbrel("train", CONFIG, "--train.steps=4")


@provokes("has no tokenizer")
def no_tokenizer(_: pytest.MonkeyPatch) -> None:
    from whimbrel.model_io import load_model, save_model

    save_model(load_model(RUN), Path("untokenized"))
    whimbrel("generate", "untokenized", "text")


@provokes("maximum prompt length")
def prompt_too_long(_: pytest.MonkeyPatch) -> str:
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    from whimbrel.server.errors import ApiError
    from whimbrel.server.served_model import load_served_model

    with pytest.raises(ApiError) as raised:
        load_served_model(RUN).encode_prompts(["to be " * 20], max_tokens=31)
    return str(raised.value)


@provokes("cannot listen")
def port_in_use(_: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        whimbrel("serve", RUN, "--port", other.getsockname()[1])


@provokes("GGUF has no architecture")
def gguf_refused(_: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    from whimbrel.model_io import save_model
    from whimbrel.models import GPT, preset
    from whimbrel.tokenization import load_tokenizer

    model = GPT(replace(preset("gpt2-fast"), vocab_size=300, num_layers=1, embd_size=64, num_heads=1))
    save_model(model, Path("fast"), load_tokenizer("shards"))
    whimbrel("export", "fast", "fast.gguf")


@provokes("does not recognize this architecture")
def transformers_without_import(_: pytest.MonkeyPatch) -> str:
    """In another process, because other tests import whimbrel.hf."""
    pytest.importorskip("transformers")
    program = """
import json, pathlib
from transformers import AutoConfig
pathlib.Path("unknown").mkdir(exist_ok=True)
pathlib.Path("unknown/config.json").write_text(json.dumps({"model_type": "whimbrel"}))
try:
    AutoConfig.from_pretrained("unknown")
except ValueError as error:
    print(" ".join(str(error).split()))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("heading", HEADING.findall(read_page(PAGE)))
def test_message_is_printed(
    heading: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (case,) = [case for words, case in CASES.items() if words in heading]
    monkeypatch.chdir(directory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    returned = case(monkeypatch)
    printed = " ".join(" ".join((*capsys.readouterr(), str(returned))).split())
    pattern = ".*".join(re.escape(part) for part in heading.split("..."))
    assert re.search(pattern, printed), printed


def test_every_case_has_a_heading() -> None:
    headings = HEADING.findall(read_page(PAGE))
    assert [words for words in CASES if not any(words in heading for heading in headings)] == []
