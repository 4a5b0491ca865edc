"""`whimbrel finalize` on a run, a checkpoint and a model directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.support.commands import whimbrel
from tests.support.finetuning import reversal_task, run_config, save_base_model, write_chats, write_preferences
from tests.support.runs import prepare_text
from torch.nn import functional as F

from whimbrel.checkpoint import checkpoint_path
from whimbrel.data import read_shard
from whimbrel.data.packing import TokenizedSamples
from whimbrel.data.prepare import prepare
from whimbrel.model_io import load_model, load_tokenizer, save_model, weight_state_dict
from whimbrel.tokenization import train_tokenizer
from whimbrel.train import read_log, train
from whimbrel.train.run_config import build_run_config

MODEL = {"context_length": 32, "vocab_size": 300, "num_layers": 1, "embd_size": 128, "num_heads": 4, "init_std": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """Shards and a run on them, with checkpoints of steps 2, 4 and 6, that gets worse after step 2."""
    folder = tmp_path_factory.mktemp("work")
    prepare_text(folder, shakespeare[:20_000], val_tokens=800)
    table = {
        "output_dir": str(folder / "run"),
        "model": MODEL,
        "data": {"path": str(folder / "shards")},
        "train": {"steps": 6, "tokens_per_step": 256, "micro_batch": 8, "device": "cpu"},
        "optim": {"lr": 0.5},
        "validation": {"every": 2},
        "checkpoint": {"every": 2},
    }
    train(build_run_config(table))
    return folder


@pytest.fixture
def work(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory next to `folder`."""
    monkeypatch.chdir(tmp_path)
    return folder


def run(*arguments: object) -> int:
    return whimbrel(*arguments, "--device", "cpu")


def measured(folder: str, side: str) -> dict:
    return json.loads(Path(folder, "finalize.json").read_text())[side]["measured"]


def validation(folder: Path) -> dict[int, float]:
    return {line["after"]: line["loss"] for line in read_log(folder / "run/log.jsonl") if line["kind"] == "validation"}


def test_run_is_evaluated_on_its_validation_data(work, capsys):
    assert run("finalize", work / "run", "out", "--quantize", "int4") == 0
    before, after = measured("out", "before"), measured("out", "after")
    assert before["loss"] == pytest.approx(validation(work)[6], rel=1e-5)
    [shard] = sorted((work / "shards").glob("*_val_*.bin"))
    ids = torch.from_numpy(read_shard(shard).astype("int64"))
    rows = (len(ids) - 1) // 32
    assert before["tokens"] == rows * 32
    x, y = ids[: rows * 32].view(rows, 32), ids[1 : rows * 32 + 1].view(rows, 32)
    with torch.no_grad():
        exact = F.cross_entropy(load_model("out")(x).logits.double().flatten(0, 1), y.flatten())
    assert after["loss"] == pytest.approx(float(exact), rel=1e-5)
    assert abs(after["loss"] - before["loss"]) > 1e-3
    printed = capsys.readouterr().out
    assert "float32 -> int4, float32" in printed
    assert f"loss {before['loss']:.4f} -> {after['loss']:.4f}, on {rows * 32:,} tokens of shards" in printed
    change = torch.tensor(after["loss"] - before["loss"], dtype=torch.float64).expm1()
    assert f"({float(change):+.2%})" in printed
    card = Path("out/README.md").read_text()
    assert "lr = 0.5" in card
    assert str(work) not in card


def test_checkpoint_by_step_metric_or_path(work):
    losses = validation(work)
    best = min(losses, key=lambda step: losses[step])
    assert best != 6, "the run was to get worse"
    ways = {"best": best, "latest": 6, "4": 4}
    for which, step in ways.items():
        assert run("finalize", work / "run", f"to-{which}", "--checkpoint", which) == 0
        expected = load_model(checkpoint_path(work / "run", step))
        assert torch.equal(load_model(f"to-{which}").lm_head.weight, expected.lm_head.weight)
        assert measured(f"to-{which}", "before")["loss"] == pytest.approx(losses[step], rel=1e-5)
    assert run("finalize", checkpoint_path(work / "run", 4), "by-path") == 0
    assert measured("by-path", "before")["loss"] == pytest.approx(losses[4], rel=1e-5)


def test_model_directory_is_evaluated_on_text(work, capsys):
    tokenizer = load_tokenizer(work / "run")
    save_model(load_model(work / "run"), "model", tokenizer)
    Path("held-out.txt").write_text("ROMEO:\nBut, soft! what light through yonder window breaks?\n" * 9)
    assert run("finalize", "model", "one", "--quantize", "int8") == 0
    assert "held-out loss not measured: pass text or token shards with --data" in capsys.readouterr().out
    assert measured("one", "before") is None
    assert run("finalize", "model", "none", "--quantize", "int5") == 2
    assert capsys.readouterr().out == ""
    assert run("finalize", "model", "two", "--quantize", "int8", "--data", "held-out.txt", "--tokens", "64") == 0
    ids = torch.tensor([tokenizer.eot_id, *tokenizer.encode(Path("held-out.txt").read_text())])[:65]
    with torch.no_grad():
        logits = load_model("model")(ids[:64].view(2, 32)).logits
    exact = F.cross_entropy(logits.double().flatten(0, 1), ids[1:])
    assert measured("two", "before")["loss"] == pytest.approx(float(exact), rel=1e-5)
    assert measured("two", "before")["tokens"] == 64
    assert run("finalize", "model", "three", "--data", work / "shards") == 0
    assert measured("three", "before")["loss"] == pytest.approx(validation(work)[6], rel=1e-5)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_a_fine_tuned_run_is_evaluated_on_its_validation_samples_or_on_chats(tmp_path, capsys, objective):
    base = save_base_model(tmp_path / "base")
    write = write_chats if objective == "sft" else write_preferences
    data = write(tmp_path / "chats.jsonl", reversal_task()[0][:40])
    sections = {"data": {"path": str(data), "val": 0.2}, "lora": {"rank": 2}, "objective": {"name": objective}}
    train(run_config(base, data, tmp_path / "run", **sections))
    base.rename(tmp_path / "moved")
    options = ("--merge", "--base", tmp_path / "moved", "--device", "cpu")
    assert run("finalize", tmp_path / "run", tmp_path / "one", "--quantize", "int4", *options) == 0
    assert "of samples/val" in capsys.readouterr().out
    validations = [line for line in read_log(tmp_path / "run/log.jsonl") if line["kind"] == "validation"]
    found = measured(tmp_path / "one", "before")["loss"]
    if objective == "sft":
        assert found == pytest.approx(validations[-1]["loss"], rel=1e-5)
    assert measured(tmp_path / "one", "after")["loss"] != pytest.approx(found, rel=1e-5)
    held_out = TokenizedSamples.load(tmp_path / "run/samples/val")
    assert run("finalize", tmp_path / "run", tmp_path / "two", *options, "--data", data) == 0
    answers = sum(len(answer) + 1 for _, answer in reversal_task()[0][:40])
    assert measured(tmp_path / "two", "before")["tokens"] == answers
    chosen = [held_out[i][1].sum() for i in range(0, len(held_out), 2 if held_out.pair else 1)]
    assert measured(tmp_path / "one", "before")["tokens"] == sum(chosen)


def test_generation_settings_and_chat_template(work, capsys):
    Path("chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    Path("generation.json").write_text('{"repetition_penalty": 1.1, "top_k": 5}')
    options = ("--chat-template", "chat.jinja", "--generation-config", "generation.json", "--max-new-tokens", "9")
    assert run("finalize", work / "run", "sampled", *options, "--temperature", "0.25", "--top-k", "40") == 0
    table = json.loads(Path("sampled/generation_config.json").read_text())
    given = {"do_sample": True, "temperature": 0.25, "top_k": 40, "max_new_tokens": 9, "repetition_penalty": 1.1}
    assert table | given == table
    assert Path("sampled/chat_template.jinja").read_text() == Path("chat.jinja").read_text()
    assert run("finalize", work / "run", "greedy", *options, "--temperature", "0") == 0
    table = json.loads(Path("greedy/generation_config.json").read_text())
    assert (table["do_sample"], table["temperature"], table["top_k"]) == (False, None, None)
    capsys.readouterr()
    for model, options in {
        "greedy": (),
        "sampled": ("--temperature", "0"),
    }.items():  # missing fields come from the model
        assert run("generate", model, "ROMEO", *options) == 0
    assert run("generate", "greedy", "ROMEO", "--max-new-tokens", "2") == 0
    greedy, sampled, short = capsys.readouterr().out.split("ROMEO")[1:]
    assert greedy == sampled
    assert greedy.startswith(short.rstrip("\n"))
    assert len(short) < len(greedy)


def test_generate_quantizes_on_load(work, capsys):
    assert run("finalize", work / "run", "out", "--quantize", "int4") == 0
    capsys.readouterr()
    assert (
        run("generate", work / "run", "ROMEO", "--temperature", "0", "--max-new-tokens", "20", "--quantize", "int4")
        == 0
    )
    assert run("generate", "out", "ROMEO", "--temperature", "0", "--max-new-tokens", "20") == 0
    loaded, stored = capsys.readouterr().out.split("ROMEO")[1:]
    assert loaded == stored
    assert run("generate", "out", "ROMEO", "--quantize", "int8") == 2
    assert "already quantized as int4, not int8: omit quantize" in capsys.readouterr().err


@pytest.fixture
def qat(work: Path, tmp_path: Path) -> Path:
    """The run with a QAT recipe in its config; QAT checkpoints are unquantized too."""
    settings = (work / "run/config.toml").read_text()
    (tmp_path / "qat").mkdir()
    (tmp_path / "qat/checkpoints").symlink_to(work / "run/checkpoints")
    (tmp_path / "qat/config.toml").write_text(settings.replace("[train]", '[train]\nqat_recipe = "int4-weight-only"'))
    return tmp_path / "qat"


def test_qat_run_uses_its_recipe(qat, work, capsys):
    assert run("finalize", qat, "own") == 0
    assert run("finalize", qat, "same", "--quantize", "int4") == 0
    own, same, expected = (
        weight_state_dict(model)
        for model in (load_model("own"), load_model("same"), load_model(work / "run", quantize="int4"))
    )
    assert all(torch.equal(own[name], tensor) and torch.equal(same[name], tensor) for name, tensor in expected.items())
    assert run("finalize", qat, "other", "--quantize", "int8") == 2
    assert "expected --quantize int4-weight-only" in capsys.readouterr().err
    assert not Path("other").exists()
    assert run("finalize", qat, "other", "--quantize", "int8", "--ignore-qat-recipe") == 0
    assert run("finalize", qat, "plain", "--quantize", "none") == 0
    recipes = [json.loads(Path(name, "finalize.json").read_text())["recipe"] for name in ("own", "other", "plain")]
    assert recipes == ["int4-weight-only", "int8", None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quantize", "int3"), "--quantize: expected one of .* got 'int3'"),
        (("--checkpoint", "5"), r"expected latest, best or a saved step of .* \(2, 4, 6\), got 5"),
        (("--checkpoint", "first"), "expected latest, best or a saved step .* got first"),
        (("--temperature", "-1"), "temperature.* -1.0"),
        (("--chat-template", "nowhere.jinja"), "no chat template at nowhere.jinja"),
        (("--generation-config", "nowhere.json"), "no generation config at nowhere.json"),
        (("--data", "nowhere.txt"), "no such file: nowhere.txt"),
    ],
)
def test_invalid_options_are_one_error_line(work, tmp_path, capsys, options, message):
    assert run("finalize", work / "run", "out", *options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_option_needs_a_run(work, capsys):
    save_model(load_model(work / "run"), "model")
    assert run("finalize", "model", "out", "--checkpoint", "best") == 2
    assert "--checkpoint best needs a run, got model" in capsys.readouterr().err


def test_shards_of_another_tokenizer_are_rejected(work, tmp_path, capsys, shakespeare):
    (tmp_path / "text.txt").write_text(shakespeare[:9_000])
    other = train_tokenizer([shakespeare[-9_000:]], 290)
    prepare(["text.txt"], "shards", other, name="tiny", separator="\n\n", val_tokens=500)
    assert run("finalize", work / "run", "out", "--data", "shards") == 2
    assert "prepared with a different tokenizer" in capsys.readouterr().err
