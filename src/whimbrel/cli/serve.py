"""`whimbrel serve MODEL`: the model over HTTP, until told to stop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whimbrel.base.errors import MissingExtraError
from whimbrel.cli.model_options import Cache, Device, Model, TokenizerPath, Weights
from whimbrel.cli.terminal import print_text

if TYPE_CHECKING:
    from whimbrel.server import ServeConfig
    from whimbrel.server.served_model import ServedModel

__all__ = ["serve"]

KEY_VARIABLE = "WHIMBREL_API_KEY"


def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(help="The address to listen at; any but this machine's own needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen at; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            show_envvar=True,
            help="What clients must send; the variable keeps it out of the list of processes.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that clients may call this server by besides its own; '*' is any. May be repeated."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model. (default: the name of its directory)")
    ] = None,
    weights: Weights = None,
    cache: Cache = "none",
    compile: Annotated[  # noqa: A002
        bool,
        typer.Option("--compile", help="Compile the decoding step: slower startup, faster generation."),
    ] = False,
    max_batch: Annotated[int, typer.Option(help="How many texts go on at once.")] = 64,
    pages: Annotated[
        int | None, typer.Option(help="Pages of 16 tokens in the cache. (default: enough, or what memory gives)")
    ] = None,
    max_requests: Annotated[int, typer.Option(help="Requests held at once, running or waiting.")] = 256,
    max_connections: Annotated[
        int, typer.Option(help="Maximum number of open connections; lower if the open-file limit requires it.")
    ] = 1024,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="The longest prompt. (default: what the model's context has room for)")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="The largest body of a request.")] = 4 * 1024**2,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may take to finish once told to stop.")
    ] = 30.0,
    device: Device = None,
    tokenizer: TokenizerPath = None,
) -> None:
    """Serve a model over HTTP, in the manner of OpenAI's API, with a chat page.

    Ends on SIGTERM or Ctrl-C once what runs has finished; a second one ends it at once.
    """
    from whimbrel.server import ServeConfig

    config = ServeConfig(
        host=host,
        port=port,
        # Typer takes an empty variable for none; who sets one means to have a key, and is told that it is empty.
        api_key=os.environ.get(KEY_VARIABLE) if api_key is None else api_key,
        allowed_hosts=tuple(allow_host or ()),
        max_requests=max_requests,
        max_connections=max_connections,
        max_prompt_tokens=max_prompt_tokens,
        max_body_bytes=max_body_bytes,
        drain_seconds=drain_seconds,
    )
    load = partial(_load, model, name=name, tokenizer=tokenizer, device=device, weights=weights)
    _run(config, load, {"max_batch": max_batch, "num_blocks": pages, "cache": cache, "compile": compile})


def _run(config: ServeConfig, load: Callable[[], ServedModel], engine: dict[str, Any]) -> None:
    """Serve the model that `load` gives, once the address is ours."""
    try:
        from whimbrel.server.app import Service
        from whimbrel.server.http import Server, bind_socket, server_url
    except ModuleNotFoundError as error:
        raise MissingExtraError("serving a model", str(error.name), "serve") from error
    from whimbrel.inference import Engine, EngineConfig

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("whimbrel.server").setLevel(logging.INFO)
    limits = EngineConfig(**engine)
    with bind_socket(config) as sock:
        served = load()
        runs = Engine(served.model, limits)
        runs.warm_up()  # compiles, before connections are accepted
        server = Server(Service(served, runs, config))
        where = f"serving {served.name} at {server_url(sock)} (chat page at /, API at /v1)"
        server.run_on(sock, on_ready=lambda: print_text(where, "\n"))


def _load(
    model: Path, *, name: str | None, tokenizer: Path | None, device: str | None, weights: str | None
) -> ServedModel:
    from whimbrel.server.served_model import load_served_model
    from whimbrel.train.device import choose_device

    return load_served_model(model, name=name, tokenizer=tokenizer, device=choose_device(device), weights=weights)
