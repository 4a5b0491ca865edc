"""Commands on models of the Hub, and `whimbrel push`, with a local stand-in for the Hub."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.support.commands import whimbrel
from tests.support.finetuning import save_base_model, write_chats
from tests.support.hub_server import TOKEN, HubServer, hub_server
from tests.support.runs import train_demo_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from whimbrel.config import load_toml
from whimbrel.model_io import load_model

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub itself
IDS = torch.arange(12)[None] + 97
FINETUNE = ("--epochs", 1, "--plain", "--train.device=cpu", "--train.micro_batch=4", "--train.tokens_per_step=256")


@pytest.fixture
def hub(workdir: Path) -> Iterator[HubServer]:
    """A Hub with the model curlew/base."""
    with hub_server(workdir / "cache") as server:
        server.add("curlew/base", save_base_model(workdir / "base"))
        (workdir / "base").rename(workdir / "original")
        (workdir / "text.txt").write_text("To be, or not to be. " * 30)
        write_chats(workdir / "chats.jsonl", [("ab", "ba"), ("abc", "cba")] * 40)
        yield server


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


COMMANDS = {
    "generate": ("curlew/base", "ab", "--max-new-tokens", 2, "--device", "cpu"),
    "draft": ("original", "ab", "--max-new-tokens", 2, "--device", "cpu", "--draft", "curlew/base"),
    "chat": ("curlew/base", "--max-new-tokens", 2, "--device", "cpu"),
    "eval": ("curlew/base", "--text", "text.txt", "--device", "cpu"),
    "finalize": ("curlew/base", "out", "--quantize", "int8", "--device", "cpu"),
    "export": ("curlew/base", "out"),
    "serve": ("curlew/base", "--port", 0, "--device", "cpu"),
    "finetune": ("curlew/base", "chats.jsonl", "--out-dir", "run", "--dry-run", *FINETUNE),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_download_a_model_by_id(hub, monkeypatch, capsys, command):
    served = []
    monkeypatch.setattr("whimbrel.server.http.Server.run_on", lambda self, sock, on_ready: served.append(on_ready()))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert whimbrel("generate" if command == "draft" else command, *COMMANDS[command]) == 0
    assert any("/resolve/" in request for request in hub.requests)
    hub.requests.clear()
    if command == "serve":
        assert served
        assert "serving base at" in capsys.readouterr().out


def test_train_from_a_hub_model(hub, shakespeare, capsys):
    assert whimbrel("prepare", "text.txt", "--tokenizer", "curlew/base", "--out-dir", "shards") == 0
    Path("run.toml").write_text(
        'output_dir = "run"\n[data]\npath = "shards"\n[train]\nsteps = 1\ntokens_per_step = 64\nmicro_batch = 1\n'
        'device = "cpu"\n'
    )
    for _ in range(2):  # the second time, it resumes
        assert whimbrel("train", "run.toml", "--model.path=curlew/base", "--plain") == 0
    recorded = Path(load_toml(Path("run/config.toml"))["model"]["path"])
    assert recorded.parent.parent.name == "models--curlew--base"
    hub.requests.clear()
    assert whimbrel("train", "run/config.toml", "--train.steps=2", "--plain") == 0
    assert hub.requests == []
    # The architecture is that of the model, which conflicts with the file.
    Path("other.toml").write_text(Path("run.toml").read_text() + "[model]\nnum_layers = 9\nembd_size = 8\n"
                                  "vocab_size = 300\n")  # fmt: skip
    assert whimbrel("train", "other.toml", "--model.path=curlew/base", "--output_dir=other", "--plain") == 2
    assert "conflicts with model.path" in capsys.readouterr().err


def test_failed_downloads_are_one_line(hub, capsys):
    for arguments in (
        ("generate", "curlew/nope", "Hi"),
        ("finetune", "curlew/nope", "chats.jsonl", "--out-dir", "run"),
    ):
        assert whimbrel(*arguments) == 2
        error = capsys.readouterr().err
        assert "curlew/nope does not exist locally, and cannot be downloaded" in error
        assert len(error.strip().splitlines()) == 1


def test_environment_variables_select_the_hub(hub, workdir):
    """In another process, with the settings that users have."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(workdir / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "whimbrel", "export", "curlew/base", "out"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (workdir / "home" / "hub" / "models--curlew--base").is_dir()
    assert (workdir / "out" / "model.safetensors").is_file()


# push


def test_push_a_run(hub, token, shakespeare, workdir, capsys):
    train_demo_run(workdir, shakespeare[:20_000], context_length=32)
    capsys.readouterr()
    assert whimbrel("push", "runs/demo", "wader/demo") == 0
    printed = capsys.readouterr().out
    assert f"Pushed to {hub.url}/wader/demo" in printed
    assert "wader/demo: " in printed
    files = hub.repos["wader/demo"].files()
    assert files.keys() == {
        ".gitattributes", "README.md", "config.json", "finalize.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    card = files["README.md"].decode()
    assert 'whimbrel.load_model("wader/demo")' in card
    assert "| loss |" in card
    assert str(workdir) not in card
    expected = load_model("runs/demo").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_model("wader/demo").state_dict().items())


def test_a_fine_tuned_model_loads_in_transformers(hub, token, workdir):
    options = ("--full", "--lr", "1e-3", *FINETUNE)
    assert whimbrel("finetune", "curlew/base", "chats.jsonl", "--out-dir", "run", *options) == 0
    assert whimbrel("push", "run", "wader/tuned", "--private", "--revision", "v1") == 0
    assert hub.repos["wader/tuned"].private
    card = hub.repos["wader/tuned"].files("v1")["README.md"].decode()
    assert "\nbase_model: curlew/base\n" in card
    assert str(workdir) not in card
    loaded = AutoModelForCausalLM.from_pretrained("wader/tuned", revision="v1").eval()
    tokenizer = AutoTokenizer.from_pretrained("wader/tuned", revision="v1")
    assert tokenizer.chat_template is not None
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, load_model("run").eval()(IDS).logits, atol=1e-5, rtol=1e-5)


def test_adapters_load_in_peft(hub, token, workdir, capsys):
    assert whimbrel("finetune", "curlew/base", "chats.jsonl", "--out-dir", "run", *FINETUNE) == 0
    assert whimbrel("push", "run", "wader/lora") == 0
    files = hub.repos["wader/lora"].files()
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= files.keys()
    assert not files.keys() & {"config.json", "model.safetensors", "trained.safetensors"}
    table = json.loads(files["adapter_config.json"])
    commit = hub.repos["curlew/base"].branches["main"]
    assert (table["base_model_name_or_path"], table["revision"]) == ("curlew/base", commit)
    assert str(workdir) not in files["README.md"].decode()
    base = AutoModelForCausalLM.from_pretrained("curlew/base")
    expected = load_model("run").eval()(IDS).logits.detach()
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, "wader/lora").eval()(IDS).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(load_model("wader/lora").eval()(IDS).logits, expected, atol=1e-5, rtol=1e-5)

    assert whimbrel("push", "run", "wader/merged", "--merge") == 0
    torch.testing.assert_close(load_model("wader/merged").eval()(IDS).logits, expected, atol=1e-5, rtol=1e-5)


def test_adapters_of_a_local_model_need_a_base_on_the_hub(hub, token, capsys):
    assert whimbrel("finetune", "original", "chats.jsonl", "--out-dir", "run", *FINETUNE) == 0
    capsys.readouterr()
    assert whimbrel("push", "run", "wader/lora") == 2
    assert "not on the Hub" in (error := capsys.readouterr().err)
    assert "--base owner/name, or add --merge" in error
    assert "wader/lora" not in hub.repos
    assert whimbrel("push", "run", "wader/lora", "--base", "curlew/base") == 0
    table = json.loads(hub.repos["wader/lora"].files()["adapter_config.json"])
    assert table["base_model_name_or_path"] == "curlew/base"


def test_a_finalized_directory_is_pushed_as_it_is(hub, token, capsys):
    assert whimbrel("finalize", "original", "int8", "--quantize", "int8", "--device", "cpu") == 0
    Path("int8/README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    Path("int8/log.jsonl").write_text("x")
    assert whimbrel("push", "int8", "wader/int8") == 0
    files = hub.repos["wader/int8"].files()
    assert files["README.md"] == Path("int8/README.md").read_bytes()
    assert files["model.safetensors"] == Path("int8/model.safetensors").read_bytes()
    assert "log.jsonl" not in files
    capsys.readouterr()
    assert whimbrel("push", "int8", "wader/other", "--checkpoint", "best") == 2
    assert "--checkpoint best needs a run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model", "a/b/c", "wader/model@v2", "../model"])
def test_push_needs_owner_and_name(hub, token, capsys, name):
    assert whimbrel("push", "original", name) == 2
    assert f"expected the Hub model as owner/name, got '{name}'" in capsys.readouterr().err


def test_push_without_a_token_writes_nothing(hub, capsys):
    assert whimbrel("push", "original", "wader/model") == 2
    error = capsys.readouterr().err
    assert "log in with `hf auth login`, or set HF_TOKEN" in error
    assert len(error.strip().splitlines()) == 1
    assert hub.requests == []


def test_push_to_another_owner_fails_before_the_conversion(hub, token, monkeypatch, capsys):
    monkeypatch.setattr("whimbrel.model_io.finalize_model", lambda *args, **named: pytest.fail("converted"))
    assert whimbrel("push", "original", "other/model") == 2
    assert "cannot push to other/model: the token has no write access" in capsys.readouterr().err


def test_push_without_held_out_data_names_no_option_it_lacks(hub, token, shakespeare, workdir, capsys):
    train_demo_run(workdir, shakespeare[:20_000], context_length=32)
    (workdir / "shards").rename(workdir / "moved")
    capsys.readouterr()
    assert whimbrel("push", "runs/demo", "wader/demo") == 0
    assert "held-out loss not measured" in (printed := capsys.readouterr().out)
    assert "`whimbrel finalize` with --data, and push the directory" in printed
