"""Every command, Python block and config of the documentation works, in the order of its page.

tests/support/documentation.py has the rules for pages, and SHORTER in doc_session.py the options that shorten commands.
The directory of a page has small files and models in the place of those that its reader has. A page is a class, so
that pages run in parallel.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.e2e.doc_session import Example, PageSession, examples
from tests.support.chat_templates import QWEN_TOOLS
from tests.support.commands import whimbrel
from tests.support.documentation import ROOT, RUN, SHOWN, Block, code_blocks, commands, pages, read_page
from tests.support.finetuning import CHAT_TOKENS, reversal_task, save_base_model, save_small_chat_model, write_chats
from tests.support.hub_server import TOKEN, hub_server
from tests.support.runs import prepare_text, train_demo_run
from torch import nn

from whimbrel.checkpoint import list_checkpoints
from whimbrel.cli.train import run_settings
from whimbrel.config import build
from whimbrel.data.conversations import FORMATS as CHAT_FORMATS
from whimbrel.data.conversations import ConversationReader
from whimbrel.inference import SamplingParams
from whimbrel.model_io import load_model, save_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.optim import OptimConfig, build_optimizer, classify_parameters
from whimbrel.precision import FORMATS, RECIPES
from whimbrel.tokenization import load_tokenizer, train_tokenizer
from whimbrel.train import read_log

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub itself
BASE, INSTRUCT = "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"
Files = Callable[[Path, str], None]
"""Writes files into a directory, given the text of the bundled corpus."""


def common_files(folder: Path, text: str) -> None:
    """The files of every page: texts, chats, and small models in the place of those of the Hub."""
    (folder / "my-texts").mkdir()
    for index in range(3):
        (folder / "my-texts" / f"{index}.txt").write_text(text[index * 100_000 : (index + 1) * 100_000])
    chats, held_out = reversal_task()
    write_chats(folder / "chats.jsonl", chats)
    write_chats(folder / "held-out.jsonl", held_out[:4])
    save_small_chat_model(folder / INSTRUCT)
    # As the real one: it has the tokens of ChatML, but no chat template.
    tokenizer = train_tokenizer([text[:20_000]], 320).with_special_tokens(CHAT_TOKENS)
    save_base_model(folder / BASE, tokenizer=tokenizer, template=None, context_length=512, embd_size=64)
    sizes = {"context_length": 128, "num_layers": 1, "embd_size": 32, "num_heads": 2}
    save_model(GPT(GPTConfig(**sizes)), folder / "openai-community/gpt2", load_tokenizer("gpt2"))


def shards(folder: Path, text: str) -> None:
    tokenizer = prepare_text(folder, text[:60_000], vocab_size=1024, val_tokens=2000)
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")


def run_config(folder: Path, _: str) -> None:
    (folder / "run.toml").write_text("""
output_dir = "runs/mine"
data = { path = "shards" }
model = { context_length = 64, vocab_size = 1024, num_layers = 2, embd_size = 64, num_heads = 4 }
train = { steps = 4, tokens_per_step = 512 }
""")


def demo_run(folder: Path, text: str) -> None:
    train_demo_run(folder, text[:40_000], context_length=64)


def two_runs(folder: Path, text: str) -> None:
    demo_run(folder, text)
    shutil.copytree(folder / "runs/demo", folder / "runs/a")
    shutil.copytree(folder / "runs/demo", folder / "runs/b")


def lora_run(folder: Path, _: str) -> None:
    options = ("--epochs=0.1", "--train.micro_batch=2", "--plain")
    assert whimbrel("finetune", INSTRUCT, "chats.jsonl", "--out-dir=runs/mine", *options) == 0


def adapters(folder: Path, text: str) -> None:
    lora_run(folder, text)
    for model in ("models/base", "models/mine"):
        shutil.copytree(folder / INSTRUCT, folder / model)
    (folder / "models/base/chat_template.jinja").write_text(QWEN_TOOLS)
    shutil.copytree(folder / "runs/mine", folder / "runs/support")
    assert whimbrel("finalize", "runs/mine", "adapters/sql") == 0


def base_model(folder: Path, _: str) -> None:
    save_small_chat_model(folder / "models/base", is_base=True)
    (folder / "notes.jsonl").write_text('{"text": "Parcels are sent on Monday."}\n' * 20)


def questions(folder: Path, text: str) -> None:
    """Tasks, and texts to score."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.copytree(ROOT / "tests/fixtures/eval", folder / "eval")
    rows = [{"question": f"What is {n} + 1?", "answer": f"One more.\n#### {n + 1}"} for n in range(8)]
    for split in ("train", "test"):
        (folder / f"eval/gsm8k_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table({"text": text[:2000].split("\n\n")}), folder / "held-out.parquet")
    (folder / "notes.txt").write_text("Parcels are sent on Monday.\n")


FILES: dict[str, tuple[Files, ...]] = {
    "docs/distributed.md": (shards, run_config),
    "docs/evaluation.md": (lora_run, questions),
    "docs/export.md": (lora_run,),
    "docs/finetuning.md": (base_model,),
    "docs/generation.md": (demo_run,),
    "docs/memory.md": (run_config,),
    "docs/precision.md": (demo_run,),
    "docs/serving.md": (adapters,),
    "docs/trainer.md": (shards,),
    "docs/watch.md": (two_runs,),
}
"""Files of a page in addition to the common ones."""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    common_files(folder, shakespeare)
    (folder / "bench").symlink_to(ROOT / "bench")
    return folder


@pytest.fixture(scope="class")
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, prepared: Path, shakespeare: str
) -> Iterator[PageSession]:
    """The directory of a page is the working directory of its tests."""
    page: str = request.cls.page
    folder = tmp_path_factory.mktemp(Path(page).stem) / "clone"
    shutil.copytree(prepared, folder, symlinks=True)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.chdir(folder)
        patch.delenv("WHIMBREL_API_KEY", raising=False)
        if page == "docs/hub.md":  # its models are on the Hub, not in the directory
            hub = stack.enter_context(hub_server(folder / "cache"))
            hub.add(BASE, folder / BASE)
            shutil.rmtree(folder / "HuggingFaceTB")
            patch.setenv("HF_TOKEN", TOKEN)
        for write in FILES.get(page, ()):
            write(folder, shakespeare)
        running = PageSession(page)
        stack.callback(running.stop)
        yield running


# What an example prints or writes, beyond that it runs


Check = Callable[[PageSession, Example], None]
CHECKS: dict[tuple[str, str], Check] = {}
"""Checks by page, and by words of the example after which they run."""


def after(page: str, words: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[page, words] = check
        return check

    return register


def prints(page: str, words: str, pattern: str) -> None:
    """The output of an example matches a regular expression."""

    def check(session: PageSession, _: Example) -> None:
        assert re.fullmatch(pattern, session.printed), session.printed

    CHECKS[page, words] = check


prints("docs/finetuning.md", "client.chat.completions", r"[\s\S]*\n")
prints("docs/generation.md", "--n 3", r"(ROMEO:[\s\S]*){3,}")
prints("docs/generation.md", "llm.generate(", r"((stop|length) \d+ 3\n){2}")
prints("docs/generation.md", "beam_search(", r"(-\d\.\d+ \[[\d, ]+\]\n){2}")
prints("docs/generation.md", "chat.ask(", r"[\s\S]*2\n")
prints("docs/serving.md", "stream=True", r"[\s\S]+")


@after("docs/finetuning.md", "--dry-run")
def dry_run_is_the_one_shown(session: PageSession, _: Example) -> None:
    """The labels and the rendered sample are those of the page; numbers depend on tokenizer and model."""
    (shown,) = re.findall(r"--dry-run\n```\n\n```text\n(.*?)^```", read_page(session.page), re.DOTALL | re.MULTILINE)

    def outline(text: str) -> list[str]:
        return [line if line.startswith("  <|") or "[[" in line else line.split("  ")[0] for line in text.splitlines()]

    assert outline(session.printed) == outline(shown)


@after("docs/optimizers.md", "[[optim.groups]]")
def groups_set_ranks(_: PageSession, example: Example) -> None:
    config = build(OptimConfig, tomllib.loads(example.code)["optim"], "optim")
    layers = [nn.ModuleDict({"attn": nn.Linear(520, 520), "mlp": nn.Linear(520, 520)}) for _ in range(2)]
    model = nn.ModuleDict({"wte": nn.Embedding(600, 520), "h": nn.ModuleList(layers)})
    optimizer = build_optimizer(config, classify_parameters(model))
    ranks = {name: group["rank"] for group in optimizer.param_groups for name in group["names"]}
    assert {name.removesuffix(".weight"): rank for name, rank in ranks.items() if name.endswith("weight")} == {
        "wte": 512, "h.0.attn": None, "h.0.mlp": None, "h.1.attn": 128, "h.1.mlp": 256,
    }  # fmt: skip


@after("docs/optimizers.md", "project_in_backward(")
def no_step_is_skipped(session: PageSession, _: Example) -> None:
    assert session.names["optimizer"].optimizer.skipped == 0


@after("docs/precision.md", "fp8_recipe")
def alternatives_are_settings(session: PageSession, example: Example) -> None:
    alternatives = re.findall(r"or: (\w+ = \"\S+?\")", example.code)
    assert len(alternatives) == 2
    for setting in alternatives:
        session.save_config(replace(example, code=re.sub("fp8_recipe.*", setting, example.code)))


@after("docs/trainer.md", "runs/hf-model")
def transformers_trainer_runs_the_same_script(session: PageSession, example: Example) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = float(session.printed.splitlines()[-1])
    code = example.code.replace("from whimbrel.train import Trainer", "from transformers import Trainer")
    session.run_python(replace(example, code=code.replace("runs/hf", "runs/theirs")))
    assert 0 < ours < 6.6  # log(1024) = 6.9 before the first step
    # The order of the data differs; transformers averages over batches, ours over targets.
    assert ours == pytest.approx(float(session.printed.splitlines()[-1]), abs=0.3)
    assert list(list_checkpoints(Path("runs/hf"))) == [10, 20, 30]
    for folder in ("runs/hf-model", "runs/hf/checkpoints/step-00000030/model"):
        assert AutoModelForCausalLM.from_pretrained(folder).config.n_layer == 2
        assert len(AutoTokenizer.from_pretrained(folder)) == 1024


@after("docs/trainer.md", "focal_loss(")
@after("docs/trainer.md", "class ZLoss")
@after("docs/trainer.md", "DPO(beta")
def metrics_are_logged(_: PageSession, example: Example) -> None:
    metric = {"focal": "accuracy", "zloss": "z", "dpo": "rewards/accuracies"}
    (run,) = re.findall(r'output_dir="runs/(\w+)"', example.code)
    steps = [line for line in read_log(Path("runs") / run / "log.jsonl") if line["kind"] == "step"]
    assert [line[metric[run]] >= 0 for line in steps] == [True] * 5


@after("docs/trainer.md", "TokenDataLoader(")
def loss_decreases(*_: object) -> None:
    assert load_model(list_checkpoints(Path("runs/shards"))[20] / "model").config.num_layers == 2
    losses = [line["loss"] for line in read_log(Path("runs/shards/log.jsonl")) if line["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.5


@after("docs/trainer.md", "runs/classifier")
def training_stops_early(session: PageSession, _: Example) -> None:
    assert "StopRequest(callback='StopWhenGood', event='on_train_metrics', kind='stop')" in session.printed


@after("docs/tutorials/quantized-weights.md", "_make_wrapper")
def class_is_short(_: PageSession, example: Example) -> None:
    (tutorial_class,) = (node for node in ast.parse(example.code).body if isinstance(node, ast.ClassDef))
    assert tutorial_class.end_lineno is not None
    assert tutorial_class.end_lineno - tutorial_class.lineno + 1 <= 60


# Tests


class Page:
    """The examples of a page, one test each."""

    page: str

    def test_example(self, session: PageSession, example: Example) -> None:
        session.run_until(example)
        for (page, words), check in CHECKS.items():
            if page == session.page and words in example.code:
                check(session, example)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is not None:
        metafunc.parametrize("example", examples(metafunc.cls.page), ids=str)


for name in pages():
    if examples(name):
        words = re.findall(r"\w+", name.removeprefix("docs/").removesuffix(".md"))
        title = "Test" + "".join(word.capitalize() for word in words)
        globals()[title] = type(title, (Page,), {"page": name, "__module__": __name__})


def test_every_block_has_a_known_language() -> None:
    unknown = [
        f"{page}, line {block.line}: {block.language or 'none'}"
        for page in pages()
        for block in code_blocks(page)
        if block.language not in RUN + SHOWN
    ]
    assert unknown == [], f"languages that run: {', '.join(RUN)}; that do not: {', '.join(SHOWN)}"


def test_commands_end_at_the_end_of_a_line_unless_they_continue() -> None:
    code = "# first\na 'b # c' # d\n\ne \\\n  f\ncurl -d '{\n}' x\ncat > y <<'EOF'\n# z\nEOF\n"
    assert commands(Block("page.md", 10, "bash", code)) == [
        (12, "a 'b # c'"), (14, "e    f"), (16, "curl -d '{\n}' x"), (18, "cat > y <<'EOF'\n# z\nEOF"),
    ]  # fmt: skip


def test_every_check_belongs_to_one_example() -> None:
    counts = {(page, words): sum(words in each.code for each in examples(page)) for page, words in CHECKS}
    assert [key for key, count in counts.items() if count != 1] == []


def test_settings_exist() -> None:
    settings = {setting.name for setting in run_settings()} | {"a.b", "section.name"}
    for page in pages():
        assert set(re.findall(r"(?<!\w)--([a-z]+\.\w+)", read_page(page))) <= settings, page


def test_tables_are_complete() -> None:
    generation = "".join(re.findall(r"^\| `.*? \|", read_page("docs/generation.md"), re.MULTILINE))
    assert sorted(re.findall(r"`(\w+)`", generation)) == sorted(field.name for field in fields(SamplingParams))
    sections = {part.partition("\n")[0]: part for part in read_page("docs/precision.md").split("\n## ")}
    for title, named in (("Recipes", RECIPES), ("Weight formats", FORMATS)):
        first = "".join(row.split("|")[1] for row in sections[title].splitlines() if row.startswith("| `"))
        assert set(re.findall(r"`(\S+?)`", first)) == set(named)


def test_formats_of_chats_are_detected(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| `(\{.*\})` \|$", read_page("docs/finetuning.md"), re.MULTILINE)
    assert {name for name, _ in rows} == set(CHAT_FORMATS)
    for name, line in rows:
        (tmp_path / name).with_suffix(".jsonl").write_text(line + "\n")
        reader = ConversationReader([str((tmp_path / name).with_suffix(".jsonl"))])
        assert len(list(reader)) == 1
        assert list(reader.report.formats.values()) == [name]


def test_ci_runs_the_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
    assert {"make demo", "make test"} <= {example.code for example in examples("README.md")}
