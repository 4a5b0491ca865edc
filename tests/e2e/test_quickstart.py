"""`whimbrel quickstart`: from text files to an evaluated model, resumable, with a config for `whimbrel train`."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tests.support.commands import whimbrel

from whimbrel.checkpoint import latest_checkpoint
from whimbrel.config import load_toml, recipe_files
from whimbrel.data import read_manifest
from whimbrel.model_io import load_model
from whimbrel.train import load_run_config, read_log
from whimbrel.train.callback import TrainerControl
from whimbrel.train.callbacks import ProgressCallback

COMMAND = ("quickstart", "texts", "--minutes", "0.01", "--depth", "1", "--out-dir", "runs/small", "--plain")


@pytest.fixture
def texts(workdir: Path, shakespeare: str) -> Path:
    """A directory with a text file and a jsonl file."""
    folder = workdir / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(shakespeare[:40_000])
    rows = [json.dumps({"text": text}) for text in shakespeare[40_000:80_000].split("\n\n")]
    (folder / "b.jsonl").write_text("\n".join(rows))
    return folder


def losses(run: Path, kind: str = "step") -> list[float]:
    return [line["loss"] for line in read_log(run / "log.jsonl") if line["kind"] == kind]


def test_trains_evaluates_and_prints_commands_that_work(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel(*COMMAND) == 0
    out = capsys.readouterr().out
    run = Path("runs/small")
    manifest = read_manifest("data/small")
    assert manifest is not None
    assert manifest.tokens("train") > 10 * manifest.tokens("val") > 10_000
    config = load_run_config("runs/small.toml")
    assert config.model.num_layers == 1
    assert len(losses(run)) == config.train.steps
    held_out = re.search(r"Held-out text: loss ([\d.]+) per token", out)
    assert held_out is not None
    # Windows of the eval command overlap, so a token has at least as much context as in validation.
    assert float(held_out[1]) < losses(run)[0]
    generate, serve, export = (shlex.split(line, comments=True) for line in out.splitlines()[-3:])
    assert (generate[:2], serve) == (["whimbrel", "generate"], ["whimbrel", "serve", "runs/small"])
    assert whimbrel(*generate[1:], "--max-new-tokens", 4) == 0
    pytest.importorskip("gguf")
    assert whimbrel(*export[1:]) == 0
    assert Path(export[-1]).read_bytes().startswith(b"GGUF")


def test_a_source_listed_twice_is_reported_once(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel("quickstart", "texts/a.txt", *COMMAND[1:]) == 0
    assert capsys.readouterr().err.count("a.txt is listed more than once") == 1


def test_a_finished_run_is_continued_by_the_printed_command(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel(*COMMAND) == 0
    capsys.readouterr()
    assert whimbrel(*COMMAND) == 0
    found = re.search(r"nothing to do; choose another --out-dir .* with whimbrel (train .*)=N", capsys.readouterr().out)
    assert found is not None
    steps = load_run_config("runs/small.toml").train.steps
    assert steps is not None
    assert whimbrel(*found[1].split(), str(steps + 1), "--plain") == 0
    assert len(losses(Path("runs/small"))) == steps + 1


def test_the_text_of_the_package_is_shared_with_no_recipe(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quickstart prepares it in its own way, so a recipe must not find these shards."""
    assert whimbrel("quickstart", "shakespeare", "--minutes", "0.01", "--depth", "1", "--plain") == 0
    assert "Text: 1 source, about 1.1 MB" in capsys.readouterr().out
    paths = {load_toml(file)["data"].get("path") for file in recipe_files().values()}
    assert str(next(Path("data").iterdir())) not in paths


def test_a_folder_reports_ignored_files_once(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (texts / "LICENSE").write_text("Permission is granted.")
    (texts / "setup.py").write_text("pass")
    assert whimbrel(*COMMAND) == 0
    assert capsys.readouterr().err.count("ignoring 2 of 4 files in texts (1 without extension, 1 .py)") == 1
    named = [str(path) for path in sorted(texts.iterdir())]
    assert whimbrel("quickstart", *named, *COMMAND[2:-2], "runs/named", "--plain") == 0
    manifest = read_manifest("data/named")
    assert manifest is not None
    assert [source.name for source in manifest.sources] == ["LICENSE", "a.txt", "b.jsonl", "setup.py"]


def test_config_trains_the_same_run(texts: Path) -> None:
    assert whimbrel(*COMMAND) == 0
    assert whimbrel("train", "runs/small.toml", "--output_dir=runs/again", "--plain") == 0
    assert losses(Path("runs/again")) == losses(Path("runs/small"))


def test_interrupted_run_is_resumed_by_the_same_command(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(self: ProgressCallback, *, control: TrainerControl, **event: object) -> None:
        del self, event
        control.should_training_stop = True

    with monkeypatch.context() as patch:
        patch.setattr(ProgressCallback, "on_step_end", stop, raising=False)
        assert whimbrel(*COMMAND) == 0
    out = capsys.readouterr().out
    assert out.lower().count("resume") == 1
    assert "rerun the same command to resume" in out
    text = Path("runs/small.toml").read_text()
    assert len(losses(Path("runs/small"))) == 1
    assert whimbrel(*COMMAND) == 0
    assert Path("runs/small.toml").read_text() == text
    assert len(losses(Path("runs/small"))) == load_run_config("runs/small.toml").train.steps
    assert whimbrel("train", "runs/small.toml", "--output_dir=runs/again", "--plain") == 0
    first, second = (load_model(latest_checkpoint(Path("runs") / name)) for name in ("small", "again"))
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_depth_is_chosen_by_measured_speed(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel("quickstart", "texts", "--minutes", "0.01", "--plain") == 0
    config = Path("runs/texts.toml").read_text()
    measured = re.search(r"# Speed in tokens/s: ([\d,]+ at depth .+)", config)
    chosen = re.search(r"# Model: depth (\d+) \(lowest predicted loss", config)
    assert measured is not None
    assert chosen is not None
    depths = re.findall(r"at depth (\d+)", measured[1])
    assert chosen[1] in depths
    assert depths == sorted(depths, key=int)
    assert len(depths) > 1
    assert config.splitlines()[0] == "# Written by: whimbrel quickstart texts --minutes 0.01"
    assert "Done in" in capsys.readouterr().out


def test_other_options_do_not_resume_the_run(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    Path("runs/small.toml").write_text("# Written by: whimbrel quickstart texts --minutes 5 --out-dir runs/small\n")
    assert whimbrel(*COMMAND) == 2
    assert "--minutes 5" in capsys.readouterr().err
    assert not Path("data").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "no such file"),
        (("texts", "--minutes", "0"), "--minutes > 0"),
        (("texts", "--minutes", "nan"), "--minutes > 0"),
        (("texts", "--depth", "0"), "--depth from 1"),
        (("short.txt",), "at least 10 kB of text"),
        (("texts", "--out-dir", "."), "--out-dir to end in a name"),
        (("texts", "--out-dir", ".."), "--out-dir to end in a name"),
        (("texts", "--out-dir", "a b"), "--out-dir to end in a name"),
        (("texts", "--out-dir", "short.txt"), "is a file"),
        (("texts", "--encoding", "nope"), "unknown --encoding 'nope'"),
        (("texts", "--tokenizer", "short.txt"), "short.txt"),
        ((), "Missing argument"),
    ],
)
def test_misuse_is_refused_in_one_line(
    texts: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    Path("short.txt").write_text("to be or not to be\n" * 20)
    assert whimbrel("quickstart", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert not Path("runs").exists()
    assert not Path("data").exists()


def test_runs_of_other_commands_are_left_alone(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/config.toml").write_text("")
    assert whimbrel(*COMMAND) == 2
    assert "choose another --out-dir" in capsys.readouterr().err


def test_changed_text_is_refused(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel(*COMMAND) == 0
    more = texts / "more.txt"
    more.write_text("One more file.\n" * 10)
    assert whimbrel(*COMMAND) == 2
    assert "the text has changed" in capsys.readouterr().err
    more.unlink()
    assert whimbrel(*COMMAND) == 0
    assert "Resuming runs/small" in capsys.readouterr().out


def test_models_that_do_not_fit_in_memory_are_refused(
    texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", lambda name: pages[name])
    assert whimbrel(*COMMAND) == 2
    assert "fits in 400.0 KiB of memory, got depth 1" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_deleted_shards_are_prepared_again(texts: Path) -> None:
    assert whimbrel(*COMMAND) == 0
    fingerprint = (Path("data/small") / "manifest.json").read_text()
    shutil.rmtree("data/small")
    shutil.rmtree("runs/small")
    assert whimbrel(*COMMAND) == 0
    assert (Path("data/small") / "manifest.json").read_text() == fingerprint


def test_separate_commands_prepare_the_same_shards(texts: Path) -> None:
    """With a separator that the shell and the comment both have to quote."""
    (texts / "a.txt").write_text((texts / "a.txt").read_text().replace("\n\n", "\n\\n \t"))
    command = [*COMMAND[:-1], "--separator", r"\n\\n \t", "--plain"]
    assert whimbrel(*command) == 0
    config = Path("runs/small.toml").read_text()
    manifest = (Path("data/small") / "manifest.json").read_text()
    assert json.loads(manifest)["documents"] > 100
    shutil.rmtree("data")
    tokenizer, prepare, *_ = (shlex.split(line) for line in re.findall("#   whimbrel (.*)", config))
    assert whimbrel(*tokenizer) == 0
    assert whimbrel(*prepare) == 0
    assert (Path("data/small") / "manifest.json").read_text() == manifest


def test_repetitive_text_is_refused_and_leaves_no_shards(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "repeated.txt").write_text("to be or not to be\n" * 1000)
    assert whimbrel("quickstart", "repeated.txt", "--minutes", "0.01", "--plain") == 2
    assert "expected at least 257 validation tokens" in capsys.readouterr().err
    assert not Path("data/repeated").exists()


def test_shards_of_another_tokenizer_are_refused(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whimbrel(*COMMAND) == 0
    shutil.rmtree("runs")
    assert whimbrel(*COMMAND, "--tokenizer", "gpt2") == 2
    assert "different tokenizer" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_runs_inside_the_directory_of_text_are_not_read(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(texts)
    command = ("quickstart", ".", *COMMAND[2:])
    assert whimbrel(*command) == 0
    manifest = read_manifest("data/small")
    assert manifest is not None
    assert {source.name for source in manifest.sources} == {"a.txt", "b.jsonl"}
    assert Path("runs/small/log.jsonl").exists()
    assert whimbrel(*command) == 0
