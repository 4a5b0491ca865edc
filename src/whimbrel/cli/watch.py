"""`whimbrel watch`: a live dashboard of runs, which `whimbrel train` also serves for its own run."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whimbrel.base.errors import MissingExtraError
from whimbrel.train.callback import TrainerCallback

if TYPE_CHECKING:
    from whimbrel.server import ServeConfig

__all__ = ["LivePage", "watch"]

KEY_VARIABLE = "WHIMBREL_API_KEY"
GRACE_SECONDS = 5
"""How long `whimbrel train` serves the page after the run ends, so that open browsers get the last steps."""

logger = logging.getLogger(__name__)


def watch(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or directories that contain runs. (default: runs)")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 makes the page reachable from other devices.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 8001,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, show_envvar=True, help="Key that protects the page. (default: a random key)"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Allow requests for this host name, or '*' for any; can be repeated."),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the default browser.")] = False,
    inherited_socket: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show runs on a live page: loss, learning rate, gradient norm, speed, memory and samples.

    New runs and new steps appear without a reload. The printed link contains the key. On the page, you can also save
    and stop your own runs. Ctrl-C stops serving the page; the runs continue.
    """
    from whimbrel.server import ServeConfig

    config = ServeConfig(
        host=host,
        port=port,
        api_key=secrets.token_urlsafe(16) if api_key is None else api_key,
        allowed_hosts=tuple(allow_host or ()),
    )
    _run(config, runs or [Path("runs")], inherited_socket, open_page=open_page)


def _run(config: ServeConfig, directories: list[Path], inherited_socket: int | None, *, open_page: bool) -> None:
    try:
        from whimbrel.server.http import Server, bind_socket, server_url
        from whimbrel.server.run_page import RunPage
    except ModuleNotFoundError as error:
        raise MissingExtraError("the live page", str(error.name), "serve") from error
    server = Server(RunPage(directories, config))
    if inherited_socket is not None:
        threading.Thread(target=_stop_after_parent, daemon=True).start()
        with socket.socket(fileno=inherited_socket) as sock:
            server.run_on(sock)
        return
    with bind_socket(config) as sock:
        link = _link(server_url(sock), config.api_key)
        if config.host in ("0.0.0.0", "::"):
            link = _link(f"http://{socket.gethostname()}:{sock.getsockname()[1]}", config.api_key)

        def on_ready() -> None:
            print(f"watching {', '.join(map(str, directories))} at {link}", flush=True)
            if open_page and typer.launch(link) != 0:
                print("could not open a browser", flush=True)

        server.run_on(sock, on_ready=on_ready)


def _link(url: str, key: str | None) -> str:
    return f"{url}/#key={key}"


def _stop_after_parent() -> None:
    """Stop the server after the training process, which holds the other end of standard input, has exited."""
    sys.stdin.buffer.read()
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class LivePage(TrainerCallback):
    """Serves the page of the run in a separate process, so that it cannot slow down training, and prints the link.

    With `serve=False`, only logs the command that shows the run.
    """

    def __init__(self, *, serve: bool = True) -> None:
        self._serve = serve
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_available() -> bool:
        """Whether the extra `serve` is installed, and the platform can pass a socket to a subprocess."""
        packages = ("fastapi", "uvicorn", "h11", "prometheus_client")
        return os.name == "posix" and all(importlib.util.find_spec(name) is not None for name in packages)

    def on_train_begin(self, **event: Any) -> None:
        if not event["state"].is_world_process_zero or self._process is not None:
            return
        directory = Path(event["trainer"].config.output_dir)
        if not self._serve:
            logger.info("For a live page of this run: whimbrel watch %s", shlex.quote(str(directory)))
            return
        key = secrets.token_urlsafe(16)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            command = [sys.executable, "-m", "whimbrel", "watch", str(directory)]
            self._process = subprocess.Popen(
                [*command, f"--inherited-socket={sock.fileno()}"],
                stdin=subprocess.PIPE,  # EOF tells the process that training has ended, even if it was killed
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[sock.fileno()],
                start_new_session=True,  # Ctrl-C stops training, not the page
                env=_environment() | {KEY_VARIABLE: key},
            )
            print(f"Live page: {_link(f'http://127.0.0.1:{sock.getsockname()[1]}', key)}", flush=True)

    def on_train_end(self, **event: Any) -> None:
        del event
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def _environment() -> dict[str, str]:
    """The environment without torchrun's variables: the page is not part of the process group."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
