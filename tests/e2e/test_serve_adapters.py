"""`whimbrel serve --adapter`: several adapters of one base model, chosen by the request's model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.e2e.serving import ServerProcess, serving
from tests.support.models import save_with_adapters

from whimbrel.inference import LLM, SamplingParams
from whimbrel.tokenization import ChatTemplate

openai = pytest.importorskip("openai", reason="needs the package 'openai'")

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    save_with_adapters(folder, ["first", "second"])
    ChatTemplate("<{{ messages[0]['content'] }}>").save(folder / "second")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    options = [f"--adapter={name}={folder / name}" for name in ("first", "second")]
    with serving(folder / "base", *options) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as sync_client:
        yield sync_client


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """The greedy continuation of the prompt by each model alone."""
    found = {}
    for name in ("base", "first", "second"):
        [output] = LLM(folder / name, device="cpu").generate(PROMPT, SamplingParams(temperature=0), max_new_tokens=24)
        found[name] = output.outputs[0].text or ""
    assert len(set(found.values())) == 3
    return found


def complete(client, model: str) -> str:
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text


def test_model_and_adapters_are_listed(client):
    assert [model.id for model in client.models.list()] == ["base", "first", "second"]
    assert client.models.retrieve("second").id == "second"
    assert client.models.retrieve("second").parent == "base"
    for request in (lambda: client.models.retrieve("third"), lambda: complete(client, "third")):
        with pytest.raises(openai.NotFoundError, match="serves 'base', 'first', 'second'"):
            request()


def test_requests_choose_the_adapter(client, expected):
    assert {name: complete(client, name) for name in expected} == expected


def test_concurrent_requests_of_all_adapters(client, expected):
    names = ["first", "base", "second"] * 6
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(lambda name: complete(client, name), names)) == [expected[name] for name in names]


def test_chat_uses_the_template_of_the_adapter(client):
    messages = [{"role": "user", "content": "hi"}]
    tokens = {
        name: client.chat.completions.create(model=name, messages=messages, max_tokens=1).usage.prompt_tokens
        for name in ("base", "first", "second")
    }
    assert tokens["second"] == len("<hi>")
    assert tokens["first"] == tokens["base"] > len("<hi>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter=first"], "expected --adapter NAME=PATH, got 'first'"),
        (["--adapter=a=x", "--adapter=a=y"], "--adapter a is given twice"),
        (["--adapter=base={folder}/first"], "--adapter base: the model already has this name"),
        (["--adapter=a={folder}/nowhere"], "no run or model at"),
    ],
)
def test_bad_options_are_reported_in_one_line(folder, options, message):
    command = [sys.executable, "-m", "whimbrel", "serve", str(folder / "base"), "--port=0"]
    command += [option.format(folder=folder) for option in options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
