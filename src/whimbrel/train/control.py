"""Control a running training job: query its status, save, stop or abort, and stop on a signal. Does not import torch.

A thread of the run listens on a loopback port. Port and access token are in `endpoint.json` in the run directory, with
mode 0600. Request and reply are one line of JSON each. The training thread never blocks on this: after each step it
checks a queue of requests.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from whimbrel.base.errors import RequestError
from whimbrel.base.files import PARTIAL
from whimbrel.base.lock import is_alive
from whimbrel.config import did_you_mean_path
from whimbrel.train.callback import TrainerCallback, TrainerControl

__all__ = [
    "ACTIONS",
    "SIGNALS",
    "ControlCallback",
    "ControlServer",
    "Endpoint",
    "SignalHandler",
    "query_status",
    "send_request",
]

ACTIONS = {
    "status": "reports its status",
    "save": "saves after the current step",
    "stop": "stops after the current step, with the configured final evaluation and save",
    "save-stop": "saves after the current step and stops without an evaluation",
    "abort": "stops after the current step without evaluating or saving",
}
"""The requests that a run accepts, and the reply to each."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that stop a run gracefully."""

RunState = Literal["running", "dead", "other-host", "other-user", "ended"]

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_REQUEST_BYTES = 4096
REQUEST_TIMEOUT = 2.0
"""Seconds that a client has to send its request."""
MAX_CLIENTS = 16
"""Maximum number of open connections; a new one closes the oldest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address and access token of a run, stored in `endpoint.json`."""

    host: str
    port: int
    token: str
    pid: int

    @staticmethod
    def path(run: Path) -> Path:
        return run / "endpoint.json"

    @classmethod
    def read(cls, run: Path) -> Endpoint | None:
        """The endpoint of a run; None if missing or invalid. Raises PermissionError for another user's run."""
        try:
            return cls(**json.loads(cls.path(run).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            return None

    def write(self, run: Path) -> None:
        """Write the file atomically, readable only by its owner."""
        run.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=run, prefix=PARTIAL)  # creates it with mode 0600
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        os.replace(name, self.path(run))


def send_request(run: Path, action: str, timeout: float = 5.0) -> dict[str, Any]:
    """Send a request to a run and return its reply; raises RequestError if it is not on this host or rejects it."""
    try:
        endpoint = Endpoint.read(run)
    except PermissionError as error:
        raise RequestError(f"{run} belongs to another user: only its owner can control it") from error
    if not run.is_dir():
        raise RequestError(f"no such run directory: {run}{did_you_mean_path(run, ['config.toml'])}")
    if endpoint is None:
        raise RequestError(f"{run} is not running: it has no {Endpoint.path(run).name}")
    if endpoint.host != socket.gethostname():
        raise RequestError(f"{run} is running on {endpoint.host}: run this command there")
    try:
        with socket.create_connection((LOOPBACK, endpoint.port), timeout=timeout) as connection:
            connection.sendall(json.dumps({"token": endpoint.token, "action": action}).encode() + b"\n")
            reply = json.loads(_read_line(connection, time.monotonic() + timeout, limit=1 << 20))
    except TimeoutError as error:
        if is_alive(endpoint.pid):
            raise RequestError(f"{run} did not answer within {timeout:g} s: try again") from error
        raise RequestError(f"{run} is not running: process {endpoint.pid} has exited") from error
    except (OSError, ValueError) as error:
        raise RequestError(f"{run} is not running: its endpoint does not respond") from error
    if not isinstance(reply, dict) or reply.get("ok") is not True:
        raise RequestError(f"{run} rejected the request: {reply.get('error') if isinstance(reply, dict) else reply}")
    return reply


def query_status(run: Path, timeout: float = 1.0) -> tuple[RunState, dict[str, Any] | None]:
    """Whether a run is running, and the status it reports if it is.

    dead: it was killed and left its endpoint behind; other-host: its endpoint is on another host; other-user: it
    belongs to another user, so it is either running or was killed.
    """
    try:
        endpoint = Endpoint.read(run)
    except PermissionError:
        return "other-user", None
    if endpoint is None:
        return "ended", None
    if endpoint.host != socket.gethostname():
        return "other-host", None
    try:
        return "running", send_request(run, "status", timeout).get("status")
    except RequestError as error:
        busy = isinstance(error.__cause__, TimeoutError) and is_alive(endpoint.pid)
        return "running" if busy else "dead", None


class ControlServer:
    """Listens in a thread and calls `handler` for each request with a valid token.

    Connections are non-blocking, so that a silent client does not delay others.
    """

    def __init__(self, run: Path, handler: Callable[[str], dict[str, Any]]) -> None:
        self._run = run
        self._handler = handler
        self._token = secrets.token_urlsafe(32)
        self._socket = socket.create_server((LOOPBACK, 0))
        self._socket.settimeout(0)
        self._clients: dict[socket.socket, _Client] = {}
        port = self._socket.getsockname()[1]
        self._endpoint = Endpoint(host=socket.gethostname(), port=port, token=self._token, pid=os.getpid())
        try:
            self._endpoint.write(run)
        except OSError:
            self._socket.close()
            raise
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="whimbrel-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the endpoint file, unless another run has replaced it."""
        self._open = False
        with contextlib.suppress(PermissionError):  # another user has replaced it
            if Endpoint.read(self._run) == self._endpoint:
                Endpoint.path(self._run).unlink()
        with (
            contextlib.suppress(OSError),
            socket.create_connection(self._socket.getsockname(), timeout=REQUEST_TIMEOUT),
        ):
            pass  # wakes up the thread
        self._thread.join(2 * REQUEST_TIMEOUT)
        self._socket.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while self._open:
                now = time.monotonic()
                for expired in [connection for connection, client in self._clients.items() if client.deadline <= now]:
                    self._drop(expired, selector)
                deadline = min((client.deadline for client in self._clients.values()), default=None)
                for key, _ in selector.select(None if deadline is None else deadline - now):
                    if key.fileobj is self._socket:
                        self._accept(selector)
                    elif key.fileobj in self._clients:  # it may just have been closed in favor of a newer one
                        self._receive(key.fileobj, selector)
            for connection in list(self._clients):
                self._drop(connection, selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:  # the client has disconnected
            return
        except OSError:  # e.g. out of file descriptors: close our connections so that training can open files
            for connection in list(self._clients):
                self._drop(connection, selector)
            time.sleep(REQUEST_TIMEOUT)
            return
        if len(self._clients) == MAX_CLIENTS:
            self._drop(next(iter(self._clients)), selector)
        connection.settimeout(0)
        self._clients[connection] = _Client(time.monotonic() + REQUEST_TIMEOUT)
        selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: Any, selector: selectors.BaseSelector) -> None:
        """Read available bytes; reply once the request is complete, too long or ended by the client."""
        client = self._clients[connection]
        try:
            chunk = connection.recv(MAX_REQUEST_BYTES)
            client.line += chunk
            if chunk and len(client.line) <= MAX_REQUEST_BYTES and not client.line.endswith(b"\n"):
                return
            connection.send(json.dumps(self._reply(client.line)).encode() + b"\n")  # fits into an empty buffer
        except BlockingIOError:
            return
        except OSError:  # the client disconnected
            pass
        self._drop(connection, selector)

    def _drop(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        del self._clients[connection]
        selector.unregister(connection)
        connection.close()

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            return {"ok": False, "error": f"expected one line of JSON of at most {MAX_REQUEST_BYTES} bytes"}
        token = str(request.get("token")).encode(errors="replace")
        if not hmac.compare_digest(token, self._token.encode()):
            return {"ok": False, "error": "wrong token"}
        action = request.get("action")
        if not isinstance(action, str) or action not in ACTIONS:
            return {"ok": False, "error": f"unknown action {action!r} (choose from: {', '.join(ACTIONS)})"}
        return {"ok": True, **self._handler(action)}


@dataclass(slots=True)
class _Client:
    """A connection with an incomplete request."""

    deadline: float
    line: bytes = b""


class ControlCallback(TrainerCallback):
    """Serves `whimbrel control` requests from the start to the end of training."""

    def __init__(self) -> None:
        self.is_draining = False
        """Whether to save and stop without evaluating."""
        self.reason: str | None = None
        """Why the run stops, printed for the user."""
        self._requests: deque[str] = deque()
        self._server: ControlServer | None = None
        self._state: Any = None
        self._metrics: dict[str, Any] = {}
        self._step_seconds = 0.0
        self._checkpoint: str | None = None

    def on_train_begin(self, **event: Any) -> None:
        self._state = event["state"]
        if self._state.is_world_process_zero:
            self._requests.clear()
            self.is_draining, self.reason = False, None
            output_dir = Path(event["trainer"].config.output_dir)
            try:
                self._server = ControlServer(output_dir, self._answer)
            except OSError as error:
                logger.warning(
                    "whimbrel control is not available for this run: %s (%s)", error, Endpoint.path(output_dir)
                )

    def on_train_metrics(self, **event: Any) -> None:
        self._metrics = event["metrics"]
        seconds = self._metrics["seconds"]
        self._step_seconds += (seconds - self._step_seconds) * (0.1 if self._step_seconds else 1.0)

    def on_save(self, **event: Any) -> None:
        self._checkpoint = str(event["checkpoint"])

    def on_step_end(self, **event: Any) -> None:
        if self._requests:
            self._apply(self.pop_requests(), event["control"])

    def on_prediction_step(self, **event: Any) -> None:
        self.on_step_end(**event)

    def on_evaluate(self, **event: Any) -> None:
        """Apply requests that arrived during an evaluation."""
        self.on_step_end(**event)

    def on_train_end(self, **event: Any) -> None:
        del event
        if self._server is not None:
            self._server.close()
            self._server = None

    def pop_requests(self) -> frozenset[str]:
        """The actions requested since the last call.

        Only the process that listens has requests; with several ranks, it must broadcast them.
        """
        actions = set()
        while self._requests:
            actions.add(self._requests.popleft())
        return frozenset(actions)

    def _apply(self, actions: frozenset[str], control: TrainerControl) -> None:
        control.should_save |= not actions.isdisjoint({"save", "save-stop"})
        control.should_training_stop |= not actions.isdisjoint({"stop", "save-stop"})
        control.should_abort_without_save |= "abort" in actions
        self.is_draining |= "save-stop" in actions
        if actions - {"save"}:
            self.reason = f"requested by whimbrel control {' '.join(sorted(actions))}"

    def _answer(self, action: str) -> dict[str, Any]:
        """Reply to a request; runs in the listening thread, so it only reads state and appends to the queue."""
        step, total, metrics = self._state.global_step, self._state.max_steps, self._metrics
        if action != "status":
            self._requests.append(action)
            return {"message": ACTIONS[action], "step": step}
        rate = metrics["tokens"] / metrics["seconds"] if metrics.get("tokens") and metrics["seconds"] else None
        status = {
            "pid": os.getpid(), "step": step, "max_steps": total, "loss": metrics.get("loss"), "lr": metrics.get("lr"),
            "tokens_per_second": rate,
            "eta_seconds": self._step_seconds * (total - step) if self._step_seconds else None,
            "checkpoint": self._checkpoint,
        }  # fmt: skip
        return {"status": status}


def _read_line(connection: socket.socket, deadline: float, limit: int) -> bytes:
    """Read until the end of the line, `limit` bytes or the end of the stream; raises TimeoutError at the deadline."""
    line = b""
    while len(line) <= limit and not line.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        chunk = connection.recv(limit)
        if not chunk:
            break
        line += chunk
    return line


class SignalHandler:
    """Records the first signal in `received`, which the training loop polls; a second signal kills the process.

    Handlers are installed inside the `with` block, and only in the main thread, as Python requires.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalHandler:
        self.received = None
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(signum)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
