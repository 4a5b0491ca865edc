"""Startup of `whimbrel serve`."""

from __future__ import annotations

import builtins
import socket
from pathlib import Path

import pytest
from tests.support.byte_tokenizer import byte_tokenizer
from typer.testing import CliRunner

from whimbrel.base.errors import CheckpointError, ConfigError, MissingExtraError
from whimbrel.cli.main import build_app
from whimbrel.cli.serve import serve
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig


def test_missing_extra_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = builtins.__import__

    def without(name: str, *rest, **named):
        if name.startswith(("whimbrel.server.app", "fastapi")):
            raise ModuleNotFoundError(f"No module named {name!r}", name="fastapi")
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"needs the package 'fastapi': pip install 'whimbrel\[serve\]'"):
        serve(tmp_path)


def test_non_loopback_address_requires_an_api_key(tmp_path: Path):
    with pytest.raises(ConfigError, match="set an API key"):
        serve(tmp_path, host="0.0.0.0")


def test_empty_api_key_variable_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WHIMBREL_API_KEY", "")
    result = CliRunner().invoke(build_app(), ["serve", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "api_key: expected non-empty" in str(result.exception)


def test_port_in_use_is_reported_before_the_model_is_loaded(tmp_path: Path):
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1 port"):
            serve(tmp_path, port=taken.getsockname()[1])


def test_connections_are_rejected_until_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def load(*given, **named):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
        raise CheckpointError("reached")

    monkeypatch.setattr("whimbrel.cli.serve._load", load)
    with pytest.raises(CheckpointError, match="reached"):
        serve(tmp_path, port=port)


def test_missing_model_is_rejected(tmp_path: Path):
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    with pytest.raises(CheckpointError, match="no run or model"):
        serve(tmp_path / "nothing", port=0)


def test_tokenizer_larger_than_the_vocabulary_is_rejected(tmp_path: Path):
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    shape = {"context_length": 16, "vocab_size": 300, "num_layers": 1, "embd_size": 16, "num_heads": 2}
    save_model(GPT(GPTConfig(**shape)), tmp_path / "model")
    with pytest.raises(ConfigError, match="at most 300 tokens .* got 50257"):
        serve(tmp_path / "model", port=0, tokenizer=Path("gpt2"), device="cpu")


MODEL_OPTIONS = ["--name", "n", "--quantize", "int4", "--device", "cpu", "--tokenizer", "gpt2"]


def test_every_option_reaches_the_engine_and_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list = []
    monkeypatch.setattr("whimbrel.cli.serve._run", lambda config, load, engine: given.extend((config, load, engine)))
    command = f"serve {tmp_path} --compile --kv-cache-dtype int8 --max-batch 3 --kv-blocks 70 --port 0 --api-key k"
    command += " --allow-host a.b --base base --adapter a=x --adapter b=y=z"
    command += " --max-requests 5 --max-connections 9 --max-prompt-tokens 6 --max-body-bytes 7 --drain-seconds 8"
    result = CliRunner().invoke(build_app(), [*command.split(), *MODEL_OPTIONS], catch_exceptions=False)
    assert result.exit_code == 0
    config, load, engine = given
    assert engine == {"max_batch": 3, "num_blocks": 70, "kv_cache_dtype": "int8", "compile": True}
    assert (config.port, config.api_key, config.allowed_hosts, config.max_requests) == (0, "k", ("a.b",), 5)
    assert config.max_connections == 9
    assert (config.max_prompt_tokens, config.max_body_bytes, config.drain_seconds) == (6, 7, 8)
    expected = {"name": "n", "tokenizer": Path("gpt2"), "device": "cpu", "quantize": "int4"}
    expected |= {"base": Path("base"), "adapters": {"a": Path("x"), "b": Path("y=z")}}
    assert (load.args, load.keywords) == ((tmp_path,), expected)


def test_engine_is_warmed_up_before_connections_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    shape = {"context_length": 16, "vocab_size": 257, "num_layers": 1, "embd_size": 16, "num_heads": 2}
    save_model(GPT(GPTConfig(**shape)), tmp_path / "model", byte_tokenizer())
    done: list[str] = []
    monkeypatch.setattr("whimbrel.inference.Engine.warm_up", lambda self: done.append("warm"))
    monkeypatch.setattr("whimbrel.server.http.Server.run_on", lambda *_, **__: done.append("serving"))
    serve(tmp_path / "model", port=0, device="cpu")
    assert done == ["warm", "serving"]
