"""Random misuse of the command line: every case exits with 2 and one line on standard error, without a traceback.

Other seeds work, too: no case may be a valid command.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer

from whimbrel.cli.main import COMMANDS, main
from whimbrel.data.prepare import prepare
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig

CASES = 200
SEED = 18
CONFIG = """
output_dir = "run"
[model]
context_length = 16
vocab_size = 257
num_layers = 1
embd_size = 16
num_heads = 2
[data]
path = "shards"
[train]
steps = 2
tokens_per_step = 32
device = "cpu"
"""

NOT_NUMBERS = ("many", "1e", "0x1g", "1,000", "", "--", "½", "true", "[1]", "9" * 5000)
BAD_PATHS = ("nope", "../nope", "a/b/c", "empty", "notes.pdf", "broken.json", "x" * 300, "\x1b[31m", "", "empty.txt")
NUMERIC = {
    "prepare": ("--shard-size", "--total-tokens", "--val-tokens", "--workers"),
    "train": ("--nproc", "--max-restarts"),
    "generate": ("--n", "--num-beams", "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--seed"),
    "chat": ("--max-new-tokens", "--temperature", "--top-k", "--seed"),
    "serve": ("--port",),
    "watch": ("--port",),
    "quickstart": ("--minutes", "--depth"),
}
BELOW_RANGE = {
    "prepare": ("--shard-size", "--total-tokens", "--workers"),
    "generate": ("--n", "--num-beams", "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p"),
    "quickstart": ("--minutes", "--depth"),
}
TARGETS = {
    "prepare": ["birds.txt", "--out-dir", "out"],
    "train": ["run.toml"],
    "finetune": ["model", "birds.txt"],
    "memory": ["run.toml"],
    "generate": ["model", "hello"],
    "chat": ["model"],
    "serve": ["model"],
    "eval": ["model"],
    "export": ["model", "out.gguf"],
    "finalize": ["model", "out"],
    "plot": ["model"],
    "runs": [],
    "verify": ["shards"],
    "tokenizer": ["show"],
    "doctor": [],
    "quickstart": ["birds.txt"],
    "watch": ["model"],
    "push": ["model", "owner/name"],
}
BAD_SETTINGS = (
    "--train.steps=0", "--train.steps=-1", "--train.steps=many", "--train.steps=1.5", "--train.stepz=3", "--steps=3",
    "--optim.lr=fast", "--optim.lr=-1", "--optim.lr=nan", "--optim.name=adamx", "--optim.betas=1",
    "--model.num_heads=3",
    "--model.vocab_size=0", "--model.preset=gpt5", "--model.embd_size=17", "--data.path=nope", "--data.path=empty",
    "--data.path=birds.txt/x", "--train.device=gpu", "--train.precision=fp3", "--train=5", "--nothing.at.all=1",
    "--schedule.name=spiral", "--schedule.warmup_steps=-5", "--validation.every=0", "--checkpoint.every=-2",
    "--train.tokens_per_step=7", "--train.micro_batch=0", "--model.context_length=x", "--sample.every=0",
    "--parallel.strategy=magic", "--train.compile", "--train.compile=maybe", "--..=1",
    "--=1", "--train.=1", "--a.b.c.d=1", "--log.run_name", "--output_dir=\0", "--model.path=nope", "--optim=none.x",
)  # fmt: skip
BAD_TOML = (
    "", "[", "output_dir = 5", "a = 1\na = 2", "\x00", "[train]\nsteps = 1", 'output_dir = "r"\n[train]\nstep = 1',
    "[[train]]\nsteps=1", "train = [1, 2]", "x = " + "[" * 5000, "[model]\npreset = 3", "é = 1",
)  # fmt: skip


class Misuse:
    """Generates command lines that must be refused."""

    def __init__(self, rng: random.Random) -> None:
        self.pick, self.rng = rng.choice, rng

    def __call__(self) -> list[str]:
        kinds = (
            self.unknown_command, self.unknown_option, self.missing_argument, self.extra_argument, self.not_a_number,
            self.out_of_range, self.bad_path, self.bad_path, self.bad_setting, self.bad_setting, self.bad_toml,
            self.bad_choice, self.bad_choice, self.bad_choice,
        )  # fmt: skip
        return self.pick(kinds)()

    def misspelled(self, word: str) -> str:
        place = self.rng.randrange(len(word))
        return self.pick(
            (word[:place] + word[place + 1 :], word[:place] + "q" + word[place:], word + "x", word[::-1] + "z")
        )

    def unknown_command(self) -> list[str]:
        return [self.misspelled(self.pick(list(COMMANDS))) + "q", *self.pick(([], ["model"], ["--help-me"]))]

    def unknown_option(self) -> list[str]:
        name = self.pick(list(TARGETS))
        option = self.pick(
            (f"--{self.misspelled('temperature')}", "-Q", "-", "--seeds", "-xyz", "--no-such", "---", "-9", "--é")
        )
        return [name, *(["show"] if name == "tokenizer" else TARGETS[name]), option, *self.pick(([], ["3"]))]

    def missing_argument(self) -> list[str]:
        return [
            self.pick(
                (
                    "train",
                    "generate",
                    "chat",
                    "serve",
                    "export",
                    "finalize",
                    "plot",
                    "verify",
                    "control",
                    "memory",
                    "quickstart",
                    "push",
                )
            )
        ]

    def extra_argument(self) -> list[str]:
        name = self.pick(("train", "generate", "chat", "serve", "export", "verify", "memory"))
        return [name, *TARGETS[name], "one", self.pick(("two", "a=b", "", "é", "\x1b[0m"))]

    def not_a_number(self) -> list[str]:
        name = self.pick(list(NUMERIC))
        return [name, *TARGETS[name], f"{self.pick(NUMERIC[name])}={self.pick(NOT_NUMBERS)}"]

    def out_of_range(self) -> list[str]:
        name = self.pick(list(BELOW_RANGE))
        option = self.pick(BELOW_RANGE[name])
        values = ("-1", "-999999999999999999999") if option in ("--temperature", "--top-k", "--min-p") else ("0", "-1")
        return [name, *TARGETS[name], f"{option}={self.pick(values)}"]

    def bad_path(self) -> list[str]:
        name = self.pick(
            ("train", "memory", "generate", "chat", "serve", "export", "finalize", "eval", "plot", "verify", "prepare",
             "compare", "control", "tokenizer", "quickstart", "watch", "push")
        )  # fmt: skip
        path = self.pick(BAD_PATHS[:3] if name == "watch" else BAD_PATHS)  # `watch` waits for runs in any directory
        rest = {
            "push": ["owner/name"],
            "export": ["out"],
            "finalize": ["out"],
            "control": ["status"],
            "compare": ["model"],
            "generate": ["hi"],
        }
        if name == "eval":
            rest["eval"] = ["--text", "birds.txt"]
        if name == "tokenizer":
            return [name, "show", path]
        return [name, path, *rest.get(name, [])]

    def bad_setting(self) -> list[str]:
        return [
            "train",
            "run.toml",
            self.pick(BAD_SETTINGS),
            *self.pick(([], ["--plain"], ["--optim.weight_decay=0.1"])),
        ]

    def bad_toml(self) -> list[str]:
        Path("bad.toml").write_text(self.pick(BAD_TOML), encoding="utf-8")
        return [self.pick(("train", "memory")), "bad.toml"]

    def bad_choice(self) -> list[str]:
        return self.pick((
            ["generate", "model", "hi", "--quantize", self.pick(("int3", "", "8"))],
            ["generate", "model", "hi", "--kv-cache-dtype", "int5"],
            ["generate", "model", "hi", "--device", self.pick(("gpu", "tpu", "cuda:99", ""))],
            ["generate", "model", "hi", "--tokenizer", self.pick(BAD_PATHS[:7])],
            ["generate", "model", "hi", "--draft", self.pick(("nope", "empty"))],
            ["generate", "model", "hi", "--num-beams", "2", "--seed", "1"],
            ["export", "model", "out", "--format", self.pick(("ggfu", "", "onnx"))],
            ["export", "model", "empty.txt"],
            ["finalize", "model", "out", "--quantize", "int3"],
            ["control", "model", self.pick(("pause", "", "STOP", "--", "status"))],
            ["eval", "model", "--tasks", self.pick(("nope", "", ","))],
            ["eval", "model", "--text", self.pick(BAD_PATHS[:6])],
            ["plot", "model", "--panels", self.pick(("", "lo ss", "loss,,"))],
            ["plot", "shards"],
            ["compare", "model"],
            ["prepare", "birds.txt", "--out-dir", self.pick(("birds.txt", "birds.txt/x"))],
            ["prepare", "birds.txt", "--tokenizer", self.pick(("nope", "empty", "birds.txt", ""))],
            ["prepare", "birds.txt", "--encoding", self.pick(("utf-9", "", "\0"))],
            ["prepare", "birds.txt", "--separator", ""],
            ["prepare", "birds.txt", "--name", self.pick(("a/b", "", "x_train", "é/é"))],
            ["prepare", "birds.txt", "--val", "nope"],
            ["prepare", "birds.txt", "--val", "birds.txt"],
            ["prepare", "notes.pdf"],
            ["prepare", "broken.jsonl"],
            ["prepare", "latin.txt"],
            ["prepare"],
            ["tokenizer", "train", "birds.txt", "--out-dir", "t", "--vocab-size", self.pick(("0", "10", "-5"))],
            ["tokenizer", "train", "empty", "--out-dir", "t"],
            ["serve", "model", "--port", self.pick(("99999999", "-1"))],
            ["init", self.pick(("nope", "", "run.toml"))],
            ["quickstart", "birds.txt", "--out-dir", self.pick((".", "..", "", "a b", "birds.txt", "x_train"))],
            ["quickstart", "birds.txt", "--encoding", self.pick(("utf-9", ""))],
            ["quickstart", "birds.txt", "--tokenizer", self.pick(("nope", "empty", "birds.txt", ""))],
            ["quickstart", "birds.txt", "--separator", ""],
            ["watch", "model", "--host", self.pick(("256.1.1.1", "nosuchhost.invalid"))],
            ["push", "model", self.pick(("name", "a/b/c", "a b/c", ""))],
            ["memory", "run.toml", "--device", "gpu"],
            ["memory", "run.toml", "--optimizer", "adamx"],
        ))  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, shards, a config, and files that are none of them."""
    folder = tmp_path_factory.mktemp("misuse")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = GPT(GPTConfig(context_length=32, vocab_size=257, num_layers=1, embd_size=16, num_heads=2))
    save_model(model, folder / "model", tokenizer)
    (folder / "birds.txt").write_text("the whimbrel is a wader " * 50)
    prepare([str(folder / "birds.txt")], folder / "shards", tokenizer, name="birds")
    (folder / "run.toml").write_text(CONFIG)
    (folder / "empty").mkdir()
    (folder / "empty.txt").write_text("")
    (folder / "notes.pdf").write_bytes(bytes(range(256)))
    (folder / "broken.json").write_text("{")
    (folder / "broken.jsonl").write_text('{"text": 3}\n')
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    return folder


def fail(*_: object, **__: object) -> None:
    raise AssertionError("this command is valid: it would have served a page")


def test_random_misuse_is_one_line_without_a_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr("whimbrel.server.http.Server.run_on", fail)  # so that a valid command does not wait forever
    misuse = Misuse(random.Random(SEED))
    failures = []
    for _ in range(CASES):
        arguments = misuse()
        try:
            main(arguments)
        except SystemExit as ended:
            code: object = ended.code
        except BaseException as error:
            code = repr(error)
        captured = capfd.readouterr()
        lines = [line for line in captured.err.splitlines() if line.startswith("whimbrel")]
        if code != 2 or len(lines) != 1 or "Traceback" in captured.err + captured.out or "\x1b" in captured.err:
            failures.append((arguments, code, captured.err[-500:]))
    assert not failures, "\n".join(f"{[a[:80] for a in case]} -> {code}: {err}" for case, code, err in failures)
