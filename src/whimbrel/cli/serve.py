"""`whimbrel serve MODEL`: serve a model over HTTP."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whimbrel.base.errors import ConfigError, MissingExtraError
from whimbrel.cli.model_options import Base, Compile, Device, KVCacheDtype, Model, Quantize, TokenizerPath
from whimbrel.cli.terminal import print_text

if TYPE_CHECKING:
    from whimbrel.model_io import Adapter
    from whimbrel.server import ServeConfig
    from whimbrel.server.served_model import ServedModel

    Served = tuple[ServedModel, list[ServedModel], dict[str, Adapter]]
    """The model and its adapters for the server, and the adapters for the engine."""

__all__ = ["serve"]

KEY_VARIABLE = "WHIMBREL_API_KEY"
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="Also serve this adapter under the model id NAME; can be repeated.",
    ),
]


def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; anything other than loopback requires an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            show_envvar=True,
            help="API key that clients must send. Use the environment variable to keep it out of process listings.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Allow requests for this host name, or '*' for any; can be repeated."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Model id in the API. (default: the name of the model's directory)")
    ] = None,
    adapter: Adapters = None,
    quantize: Quantize = None,
    kv_cache_dtype: KVCacheDtype = "none",
    compile: Compile = False,  # noqa: A002
    max_batch: Annotated[int, typer.Option(help="Maximum number of sequences that run at once.")] = 64,
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            help="Number of KV cache blocks of 16 tokens. (default: enough for --max-batch sequences, if memory allows)"
        ),
    ] = None,
    max_requests: Annotated[int, typer.Option(help="Maximum number of requests, running or waiting.")] = 256,
    max_connections: Annotated[
        int, typer.Option(help="Maximum number of open connections; lower if the open-file limit requires it.")
    ] = 1024,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Maximum prompt length in tokens. (default: the context length minus 1)")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Maximum size of a request body, in bytes.")] = 4 * 1024**2,
    drain_seconds: Annotated[float, typer.Option(help="Seconds to wait for running requests on shutdown.")] = 30.0,
    device: Device = None,
    tokenizer: TokenizerPath = None,
    base: Base = None,
) -> None:
    """Serve a model over HTTP: an OpenAI-compatible API and a chat page.

    SIGTERM or Ctrl-C stops the server once running requests have finished; a second signal stops it immediately.
    """
    from whimbrel.server import ServeConfig

    _check_names(host, name)
    config = ServeConfig(
        host=host,
        port=port,
        # Typer ignores an empty variable. Read it here, so that it is an error rather than a server without a key.
        api_key=os.environ.get(KEY_VARIABLE) if api_key is None else api_key,
        allowed_hosts=tuple(allow_host or ()),
        max_requests=max_requests,
        max_connections=max_connections,
        max_prompt_tokens=max_prompt_tokens,
        max_body_bytes=max_body_bytes,
        drain_seconds=drain_seconds,
    )
    load = partial(
        _load,
        model,
        adapters=_parse_adapters(adapter or []),
        base=base,
        name=name,
        tokenizer=tokenizer,
        device=device,
        quantize=quantize,
    )
    _run(
        config,
        load,
        {"max_batch": max_batch, "num_blocks": kv_blocks, "kv_cache_dtype": kv_cache_dtype, "compile": compile},
    )


def _check_names(host: str, name: str | None) -> None:
    """Raise for an empty model id, and for a host name without an address: no API key would help."""
    if name is not None and not name.strip():
        raise ConfigError("expected a model id for --name, got an empty string: omit it to use the directory's name")
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"expected an address of this machine for --host, got '{host}', which has no address: omit it to listen on "
            "127.0.0.1"
        ) from error


def _run(config: ServeConfig, load: Callable[[], Served], engine_options: dict[str, Any]) -> None:
    """Bind the address, so that an address in use is reported immediately, then load the model and serve it."""
    try:
        from whimbrel.server.app import Service
        from whimbrel.server.http import Server, bind_socket, server_url
    except ModuleNotFoundError as error:
        raise MissingExtraError("serving a model", str(error.name), "serve") from error
    from whimbrel.inference import Engine, EngineConfig

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("whimbrel.server").setLevel(logging.INFO)
    engine_config = EngineConfig(**engine_options)
    with bind_socket(config) as sock:
        served, served_adapters, adapters = load()
        engine = Engine(served.model, engine_config, adapters)
        engine.warm_up()  # compiles, before connections are accepted
        server = Server(Service(served, engine, config, served_adapters))
        names = ", ".join([served.name, *adapters])
        message = f"serving {names} at {server_url(sock)} (chat page at /, API at /v1)"
        server.run_on(sock, on_ready=lambda: print_text(message, "\n"))


def _parse_adapters(options: Sequence[str]) -> dict[str, Path]:
    """The values of --adapter by name."""
    adapters: dict[str, Path] = {}
    for option in options:
        name, separator, path = option.partition("=")
        if not (name and separator and path):
            raise ConfigError(f"expected --adapter NAME=PATH, got '{option}'")
        if name in adapters:
            raise ConfigError(f"--adapter {name} is given twice: rename one of them")
        adapters[name] = Path(path)
    return adapters


def _load(
    model: Path,
    *,
    adapters: dict[str, Path],
    base: Path | None,
    name: str | None,
    tokenizer: Path | None,
    device: str | None,
    quantize: str | None,
) -> Served:
    from whimbrel.server.served_model import load_served_model, open_served_adapters
    from whimbrel.train.device import choose_device

    served = load_served_model(
        model, base=base, name=name, tokenizer=tokenizer, device=choose_device(device), quantize=quantize
    )
    return served, *open_served_adapters(served, model, adapters, base=base)
