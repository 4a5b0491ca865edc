"""Recipes: `whimbrel recipes`, `whimbrel init`, and their names in place of a configuration file."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.support.commands import whimbrel
from tests.support.finetuning import reversal_task, save_base_model, write_chats, write_preferences
from tests.support.runs import prepare_text

from whimbrel.base.errors import ConfigError
from whimbrel.config import config_file, read_recipe, recipe_files
from whimbrel.data import read_manifest
from whimbrel.models import preset_names
from whimbrel.models.families import config_to_hf
from whimbrel.train import load_run_config, read_log
from whimbrel.train.build import accumulation_steps

FINETUNING = [name for name in recipe_files() if name.startswith(("chat-", "dpo-"))]
PRETRAINING = [name for name in recipe_files() if name not in FINETUNING]
SMALL_MODEL = ("--model.num_layers=1", "--model.embd_size=32", "--model.context_length=32", "--model.vocab_size=300")
SHORT = ("--train.steps=2", "--train.tokens_per_step=128", "--train.device=cpu", "--plain")


@pytest.fixture
def base_and_samples(workdir: Path) -> Path:
    """A directory with a tiny chat model, chats and preference pairs."""
    save_base_model(workdir / "base")
    _, pairs = reversal_task()
    write_chats(workdir / "chats.jsonl", pairs)
    write_preferences(workdir / "pairs.jsonl", pairs)
    return workdir


def paths(name: str) -> list[str]:
    data = "pairs.jsonl" if name.startswith("dpo-") else "chats.jsonl"
    return ["--model.path=base", f"--data.path={data}", "--data.sequence_length=64"] if name in FINETUNING else []


@pytest.mark.parametrize("name", recipe_files())
def test_every_recipe_loads_and_its_step_is_divisible(base_and_samples: Path, name: str) -> None:
    config = load_run_config(name, paths(name))
    assert config.output_dir == Path("runs") / name
    accumulation_steps(config.tokens_per_step, config.train.micro_batch or 1, config.sequence_length)


@pytest.mark.parametrize("name", recipe_files())
def test_every_recipe_states_its_data_and_explains_its_settings(name: str) -> None:
    recipe, text = read_recipe(recipe_files()[name]), recipe_files()[name].read_text(encoding="utf-8")
    assert recipe.summary.endswith(".")
    if name in PRETRAINING:
        assert None not in (recipe.loss, recipe.memory, recipe.time)
    settings = [line for line in text.splitlines() if re.match(r"\w+ = ", line)]
    assert sum("  # " in line for line in settings) > len(settings) / 5


def test_the_loss_of_a_recipe_is_the_published_one(root: Path) -> None:
    results = root / "bench" / "results"
    last = list(read_log(results / "gpt2-baseline-20m.jsonl"))[-1]
    measured = json.loads((results / "recipe-loss.json").read_text(encoding="utf-8"))["results"]["variants"]["final"]
    assert read_recipe(recipe_files()["gpt2-baseline-20m"]).loss == f"{last['loss']:.3f}"
    assert read_recipe(recipe_files()["gpt2-fast-20m"]).loss == f"{measured['mean_test_loss']:.3f}"
    load_run_config("gpt2-fast-20m", [*paths("gpt2-fast-20m"), *(f"--{each}" for each in measured["overrides"])])


def test_recipes_are_listed_with_figures_and_computed_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {
        row[0]: row[1:] for line in lines[1 : 1 + len(recipe_files())] if (row := re.split(r"\s{2,}", line.strip()))
    }
    assert list(rows) == list(recipe_files())
    assert rows["gpt2-baseline-20m"] == ["124M", "20M tokens", "6.863", "13.5 GiB", "39 s, H200"]
    assert rows["chat-lora"][:3] == ["yours", "chats", "-"]
    assert all(any(line.startswith(f"{name}:") for line in lines) for name in rows)


def test_recipes_and_presets_have_different_names() -> None:
    assert not {*recipe_files()} & {*preset_names()}


def test_a_file_of_the_same_name_wins_and_a_directory_does_not(workdir: Path) -> None:
    Path("shakespeare-cpu").mkdir()
    assert config_file("shakespeare-cpu") == recipe_files()["shakespeare-cpu"]
    Path("chat-lora").write_text('output_dir = "mine"\n[data]\npath = "shards"\n[model]\n[train]\nsteps = 1\n')
    assert config_file("chat-lora") == Path("chat-lora")
    assert load_run_config("chat-lora").output_dir == Path("mine")


@pytest.mark.parametrize("name", ["runs/mine", "mine", "runs"])
def test_a_config_next_to_or_in_a_directory_is_suggested(workdir: Path, name: str) -> None:
    Path("runs/mine").mkdir(parents=True)
    files = {"runs/mine": "runs/mine.toml", "mine": "mine.toml", "runs": "runs/config.toml"}
    Path(files[name]).touch()
    with pytest.raises(ConfigError, match=f"expected a TOML file.*did you mean {files[name]}?"):
        config_file(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shakespere-cpu", "no such configuration file or recipe: shakespere-cpu: did you mean 'shakespeare-cpu'?"),
        ("xyz", r"no such configuration file or recipe: xyz \(choose from: chat-full, chat-lora, .*"),
        ("configs/chat-lora.toml", "no such configuration file: configs/chat-lora.toml: did you mean .* 'chat-lora'?"),
        ("runs/chat-lora.json/config.toml", "no such configuration file: runs/chat-lora.json/config.toml$"),
    ],
)
def test_an_unknown_name_is_an_error_with_suggestions(workdir: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(name)


def test_a_broken_link_is_reported_as_such(workdir: Path) -> None:
    Path("run.toml").symlink_to("moved.toml")
    with pytest.raises(ConfigError, match="run.toml .*broken symbolic link to moved.toml"):
        config_file("run.toml")


def test_memory_accepts_recipes_and_suggests_presets(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("memory", "shakespeare-cpu", "--device=cpu", "--optimizer=adamw", "--train.micro_batch=2")
    assert whimbrel(*command, *SMALL_MODEL) == 0
    assert "2 sequences of 32 tokens" in capsys.readouterr().out
    assert whimbrel("memory", "llama2-7") == 2
    assert "did you mean 'llama2-7b'?" in capsys.readouterr().err


def test_init_copies_a_recipe_once(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_files()["chat-lora"].read_bytes()
    assert whimbrel("init", "chat-lora") == 0
    assert "whimbrel train chat-lora.toml" in capsys.readouterr().out
    assert Path("chat-lora.toml").read_bytes() == recipe
    Path("chat-lora.toml").write_text("# edited")
    assert whimbrel("init", "chat-lora") == 2
    assert "chat-lora.toml exists: pass --force" in capsys.readouterr().err
    assert Path("chat-lora.toml").read_text() == "# edited"
    assert whimbrel("init", "chat-lora", "--force") == 0
    assert Path("chat-lora.toml").read_bytes() == recipe


def test_init_writes_to_a_file_or_into_a_directory(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("here").mkdir()
    assert whimbrel("init", "dpo-lora", "here") == whimbrel("init", "dpo-lora", "new/mine.toml") == 0
    recipe, mine = (tomllib.loads(Path(name).read_text()) for name in ("here/dpo-lora.toml", "new/mine.toml"))
    assert mine == recipe | {"output_dir": "runs/mine"}
    capsys.readouterr()
    assert whimbrel("init", "dpo-lora", "my run.toml") == 0
    assert "whimbrel train 'my run.toml'" in capsys.readouterr().out
    assert tomllib.loads(Path("my run.toml").read_text())["output_dir"] == "runs/my run"
    assert whimbrel("init", "dpo-lor") == 2
    assert capsys.readouterr().err == "whimbrel: unknown recipe 'dpo-lor': did you mean 'dpo-lora'?\n"
    assert sorted(path.name for path in workdir.iterdir()) == ["here", "my run.toml", "new"]


@pytest.mark.parametrize("recipe", ["shakespeare-cpu", "mine.toml"])
def test_text_of_the_package_is_prepared_first(workdir: Path, capfd: pytest.CaptureFixture[str], recipe: str) -> None:
    """Also for the copy that `whimbrel init` writes."""
    assert whimbrel("init", "shakespeare-cpu", "mine.toml") == 0
    small = ("--model.num_layers=1", *SHORT, "--train.tokens_per_step=256")
    train = ("train", recipe, *small)
    assert whimbrel(*train, "--data.path=elsewhere") == 2
    assert "no such directory: elsewhere" in capfd.readouterr().err
    assert not Path("data").exists()
    assert whimbrel(*train) == 0
    assert capfd.readouterr().out.count("$ whimbrel") == 2
    manifest = read_manifest("data/shakespeare-cpu")
    assert manifest is not None
    assert manifest.tokenizer.vocab_size == 2048
    assert manifest.tokens("val") >= 20_000
    assert whimbrel(*train, "--train.steps=3") == 0
    assert "$ whimbrel" not in capfd.readouterr().out


def test_init_then_train(workdir: Path, shakespeare: str) -> None:
    prepare_text(workdir, shakespeare[:20_000], val_tokens=800)
    assert whimbrel("init", "shakespeare-cpu", "mine.toml") == 0
    edited = Path("mine.toml").read_text().replace('path = "data/shakespeare-cpu"', 'path = "shards"')
    Path("mine.toml").write_text(edited)
    assert whimbrel("train", "mine.toml", *SMALL_MODEL, *SHORT) == 0
    steps = [line for line in read_log(Path("runs/mine/log.jsonl")) if line["kind"] == "step"]
    assert [line["tokens"] for line in steps] == [128, 128]


@pytest.mark.parametrize("name", FINETUNING)
def test_fine_tuning_recipes_train(base_and_samples: Path, name: str) -> None:
    short = (*paths(name), *SHORT, "--train.epochs=none")
    assert whimbrel("train", name, *short, "--output_dir=run") == 0
    lines = list(read_log(Path("run/log.jsonl")))
    assert [line["kind"] for line in lines if line["kind"] in ("step", "validation")] == ["step", "step", "validation"]
    files = {path.name for path in Path("run/checkpoints/step-00000002/model").iterdir()}
    assert ("adapter_config.json" in files) == (name != "chat-full")


@pytest.mark.parametrize(
    ("name", "given", "missing"),
    [
        ("chat-lora", [], "model.path and data.path: pass --model.path=PATH --data.path=PATH, .*"),
        ("chat-full", ["--data.path=chats.jsonl"], "model.path: pass --model.path=PATH, .*"),
        ("chat-full", ["--data.path=chats.jsonl", "--model.path=none"], "model.path: pass --model.path=PATH, .*"),
        ("dpo-lora", ["--model.path=base"], "data.path: pass --data.path=PATH, .*"),
    ],
)
def test_missing_paths_are_named_with_their_options(
    workdir: Path, capsys: pytest.CaptureFixture[str], name: str, given: list[str], missing: str
) -> None:
    assert whimbrel("train", name, *given) == 2
    assert re.fullmatch(f"whimbrel: fine-tuning needs {missing}\n", capsys.readouterr().err)
    assert not list(workdir.iterdir())


def test_the_recipe_for_a_laptop_is_a_llama() -> None:
    """So that its model can be exported to GGUF."""
    assert config_to_hf(load_run_config("shakespeare-cpu").model.architecture)["model_type"] == "llama"
