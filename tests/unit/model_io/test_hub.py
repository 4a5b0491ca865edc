"""Models on the Hub, with a local stand-in: downloads, the cache, and what goes wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.finetuning import save_base_model
from tests.support.hub_server import TOKEN, HubServer, hub_server

import whimbrel
from whimbrel.base.errors import CheckpointError, ConfigError, MissingExtraError
from whimbrel.model_io import locate_model, open_model, save_adapter
from whimbrel.model_io.finalize import PUBLISHED
from whimbrel.model_io.hub import EXPECTED_PATH, check_write_access, is_hub_id, resolve_path, upload_model
from whimbrel.models import LoraConfig, apply_lora
from whimbrel.models.lora import lora_parameters

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub itself


@pytest.fixture
def hub(workdir: Path) -> Iterator[HubServer]:
    with hub_server(workdir / "cache") as server:
        yield server


@pytest.fixture
def base(workdir: Path) -> Path:
    return save_base_model(workdir / "base")


@pytest.fixture
def adapter(base: Path, workdir: Path) -> Path:
    """Adapters of curlew/base."""
    model = whimbrel.load_model(base)
    apply_lora(model, LoraConfig(rank=2))
    with torch.no_grad():
        for _, parameter in lora_parameters(model):
            parameter.add_(0.1)
    save_adapter(model, workdir / "adapter", base_model="curlew/base")
    return workdir / "adapter"


def test_a_model_is_downloaded_once(hub, base):
    (base / "checkpoint-5").mkdir()
    for name in ("checkpoint-5/model.safetensors", "consolidated.safetensors", "pytorch_model.bin"):
        shutil.copy(base / "model.safetensors", base / name)
    hub.add("curlew/base", base)
    model, expected = whimbrel.load_model("curlew/base"), whimbrel.load_model(base)
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())
    fetched = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert fetched == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert not any("checkpoint-5" in request for request in hub.requests)
    hub.requests.clear()
    opened = open_model("curlew/base")
    assert opened.chat_template() is not None
    assert opened.path == locate_model(Path("curlew/base")).directory
    assert hub.requests == []


def test_an_interrupted_download_is_completed(hub, base):
    hub.add("curlew/base", base)
    directory = resolve_path("curlew/base")
    for name in ("model.safetensors", "tokenizer.json"):
        (directory / name).unlink()
        shutil.rmtree(directory.parents[1] / "trees", ignore_errors=True)  # as caches of earlier versions
        assert (resolve_path("curlew/base") / name).is_file()


def test_a_revision(hub, base):
    repo = hub.add("curlew/base", base)
    first = repo.branches["main"]
    (base / "chat_template.jinja").write_text("new")
    repo.commit({file.name: file.read_bytes() for file in base.iterdir()}, "v2")
    assert open_model("curlew/base@v2").chat_template().source == "new"
    assert open_model("curlew/base").chat_template().source != "new"
    assert resolve_path(f"curlew/base@{first}").name == first
    with pytest.raises(CheckpointError, match="it has no revision 'v9'"):
        resolve_path("curlew/base@v9")


def test_local_paths_are_never_looked_up(hub, base, workdir):
    hub.add("curlew/base", base)
    hub.add("runs/typo", base)
    (workdir / "runs").mkdir()
    (workdir / "curlew").mkdir()
    local = save_base_model(workdir / "curlew" / "base", embd_size=64)
    assert resolve_path("curlew/base") == Path("curlew/base")
    assert whimbrel.load_model("curlew/base").config.embd_size == 64
    for name in ("runs/typo", "nope", "../nope", "/nope/nope", "a/b/c", "models/model.gguf", "stories/15M.bin"):
        with pytest.raises(CheckpointError, match="no run or model at"):
            resolve_path(name)
    assert hub.requests == []
    shutil.rmtree(local)
    with pytest.raises(CheckpointError, match="hf download curlew/base"):
        resolve_path("curlew/base")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a/b", True), ("a-1/b.c_d", True), ("a/b@main", True), ("a/b@refs/pr/1", True), ("a", False), ("/a/b", False),
     ("../b", False), ("a/..", False), ("a/b/c", False), ("a/-b", False), ("a b/c", False)],
)  # fmt: skip
def test_ids(name, expected):
    assert is_hub_id(name) is expected


def test_failures_are_one_line_with_a_remedy(hub, base, monkeypatch):
    hub.add("curlew/gated", base, gated=True)
    hub.add("curlew/private", base, private=True)
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    hub.add("curlew/pickle", base)
    messages = {
        "curlew/gated": "accept its terms at http://.*/curlew/gated, then log in with `hf auth login`",
        "curlew/private": "no such model .* or it is private",
        "curlew/nope": "no such model",
        "curlew/pickle": "has no config.json or no model.safetensors",
    }
    for name, message in messages.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            resolve_path(name)
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(CheckpointError, match="the token is invalid"):
        resolve_path("curlew/base")
    monkeypatch.delenv("HF_TOKEN")
    hub.down = True
    with pytest.raises(CheckpointError, match="503") as caught:
        resolve_path("curlew/base")
    assert str(caught.value).count("Server error") == 1
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        CheckpointError, match="curlew/base does not exist locally.*no connection to .*check the network"
    ):
        resolve_path("curlew/base")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        resolve_path("curlew/base")


def test_a_downloaded_model_needs_no_network(hub, base, monkeypatch):
    hub.add("curlew/base", base)
    expected = resolve_path("curlew/base")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_path("curlew/base") == expected


def test_a_mistyped_path_names_the_runs_next_to_it(hub, workdir):
    for name in ("shakespeare", "tickets"):
        (workdir / "runs" / name / "checkpoints").mkdir(parents=True)
    (workdir / "runs" / "notes").mkdir()
    for path, end in (
        ("runs/shakespare", ": did you mean runs/shakespeare?"),
        (workdir / "runs" / "ticket", f": did you mean {workdir}/runs/tickets?"),
        ("runs/x", " (runs has shakespeare, tickets)"),
        ("runs/notes/x/y", f": {EXPECTED_PATH}"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(f"no run or model at {path}{end}") + "$"):
            resolve_path(path)
    assert hub.requests == []


def test_without_the_extra(workdir, monkeypatch):
    monkeypatch.setattr("whimbrel.model_io.hub.find_spec", lambda name: None)
    for call in (lambda: whimbrel.load_model("curlew/base"), lambda: check_write_access("wader/model")):
        with pytest.raises(MissingExtraError, match=r"pip install 'whimbrel\[hub\]'"):
            call()
    with pytest.raises(CheckpointError, match="no run or model at nope"):
        whimbrel.load_model("nope")


def test_the_base_of_an_adapter_is_downloaded_when_asked(hub, base, adapter, workdir):
    hub.add("curlew/base", base)
    hub.add("curlew/adapter", adapter)
    base.rename(workdir / "moved")
    with pytest.raises(CheckpointError, match="pass --base curlew/base to download it"):
        locate_model(adapter)
    assert hub.requests == []
    location = locate_model("curlew/adapter")
    assert location.is_adapter
    assert "models--curlew--base" in str(location.root)
    assert locate_model(adapter).root == locate_model(adapter, "curlew/base").root == location.root
    model = whimbrel.load_model("curlew/adapter", merge=False)
    save_adapter(model, workdir / "again")
    recorded = json.loads((workdir / "again" / "adapter_config.json").read_text())
    assert (recorded["base_model_name_or_path"], recorded["revision"]) == ("curlew/base", location.root.name)


# Uploads


@pytest.fixture
def token(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def test_only_model_files_are_uploaded(hub, base, token):
    (base / "additional_chat_templates").mkdir()
    (base / "optimizer").mkdir()
    published = {file.name for file in base.iterdir() if file.is_file()} | {"additional_chat_templates/tools.jinja"}
    (base / "additional_chat_templates" / "tools.jinja").write_text("x")
    for name in ("log.jsonl", "optimizer.safetensors", "trained.safetensors", "optimizer/model.safetensors", "x.json"):
        (base / name).write_text("x")
    assert upload_model(base, PUBLISHED, "wader/model") == f"{hub.url}/wader/model"
    assert set(hub.repos["wader/model"].files()) == published | {".gitattributes"}
    assert hub.repos["wader/model"].files()["model.safetensors"] == (base / "model.safetensors").read_bytes()


def test_a_second_upload_replaces_the_first(hub, base, token):
    upload_model(base, PUBLISHED, "wader/model")
    files = hub.repos["wader/model"].files()
    hub.repos["wader/model"].commit(files | {"LICENSE": b"x", "onnx/model.safetensors": b"x"})
    model = whimbrel.load_model(base)
    shutil.rmtree(base)
    whimbrel.save_model(model, base, max_shard_size=10**5)
    assert (base / "model.safetensors.index.json").is_file()
    upload_model(base, PUBLISHED, "wader/model")
    assert hub.repos["wader/model"].files().keys() == {
        ".gitattributes", "LICENSE", "onnx/model.safetensors", *(file.name for file in base.iterdir())
    }  # fmt: skip


def test_private_models_and_branches(hub, base, token):
    upload_model(base, PUBLISHED, "wader/model", private=True)
    assert hub.repos["wader/model"].private
    for _ in range(2):  # the branch exists the second time
        assert upload_model(base, PUBLISHED, "wader/model", revision="v2") == f"{hub.url}/wader/model/tree/v2"
    assert hub.repos["wader/model"].branches.keys() == {"main", "v2"}
    hub.add("wader/public", base)
    before = dict(hub.repos["wader/public"].branches)
    with pytest.raises(ConfigError, match="wader/public exists and is public: omit --private"):
        upload_model(base, PUBLISHED, "wader/public", private=True)
    assert hub.repos["wader/public"].branches == before


def test_missing_rights(hub, base, monkeypatch):
    with pytest.raises(ConfigError, match="cannot push .*: log in with `hf auth login`, or set HF_TOKEN"):
        check_write_access("wader/model")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(ConfigError, match="the token is invalid"):
        check_write_access("wader/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_write_access("wader/model")
    with pytest.raises(ConfigError, match="other/model: the token has no write access.* one of curlews, wader"):
        check_write_access("other/model")
    check_write_access("curlews/model")
    hub.role = "read"
    with pytest.raises(ConfigError, match="cannot push to wader/model: the token is read-only"):
        check_write_access("wader/model")
    hub.role = "fineGrained"
    check_write_access("other/model")  # its organizations are unknown
    with pytest.raises(ConfigError, match="no write access to other/model"):
        upload_model(base, PUBLISHED, "other/model")
