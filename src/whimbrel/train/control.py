"""Live control of a running job: ask how it is, have it save, stop or abort.

A thread of the run listens on loopback. Where, and the token it wants to hear, stand in `endpoint.json` of the run
directory, which only its owner can read. A request is one line of JSON, and so is the reply. The training thread never
waits for any of this: after each step it looks whether a queue is empty.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from whimbrel.base.errors import RequestError
from whimbrel.base.files import PARTIAL
from whimbrel.base.lock import is_alive
from whimbrel.train.callback import TrainerCallback
from whimbrel.train.state import TrainerControl

__all__ = ["ControlCallback", "ControlServer", "Endpoint", "VERBS", "ask", "liveness"]

VERBS = {
    "status": "how it is",
    "save": "it saves after the step under way",
    "stop": "it ends after the step under way, with the evaluation and the save that its settings call for",
    "save-stop": "it saves after the step under way and ends, without an evaluation",
    "abort": "it ends after the step under way, without an evaluation and without a save",
}
"""What can be asked of a run, and what then happens."""

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LONGEST = 4096
"""Bytes of a request at most."""
PATIENCE = 2.0
"""Seconds that a client has for its whole request."""
MAX_CLIENTS = 16
"""Maximum number of open connections; a new one closes the oldest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a run listens, and to whom: `endpoint.json`."""

    host: str
    port: int
    token: str
    pid: int

    @staticmethod
    def path(run: Path) -> Path:
        """Its file."""
        return run / "endpoint.json"

    @classmethod
    def read(cls, run: Path) -> Endpoint | None:
        """The endpoint of a run; None where it has none, or one that cannot be understood.

        That of another user's run is not to be read: a PermissionError.
        """
        try:
            return cls(**json.loads(cls.path(run).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            return None

    def write(self, run: Path) -> None:
        """Put it into the run directory, whole, and never readable for anyone else."""
        run.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=run, prefix=PARTIAL)  # made with mode 0600
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
        os.replace(name, self.path(run))


def ask(run: Path, verb: str, seconds: float = 5.0) -> dict[str, Any]:
    """Send a request to a run and give its reply; an error where it does not run here or refuses."""
    try:
        endpoint = Endpoint.read(run)
    except PermissionError as error:
        raise RequestError(f"{run} is a run of another user: only that user can ask it") from error
    if endpoint is None:
        raise RequestError(f"{run} is not running: it has no {Endpoint.path(run).name}")
    if endpoint.host != socket.gethostname():
        raise RequestError(f"{run} runs on {endpoint.host}: ask it there")
    try:
        with socket.create_connection((LOOPBACK, endpoint.port), timeout=seconds) as connection:
            connection.sendall(json.dumps({"token": endpoint.token, "verb": verb}).encode() + b"\n")
            reply = json.loads(_read_line(connection, time.monotonic() + seconds, most=1 << 20))
    except TimeoutError as error:
        if is_alive(endpoint.pid):
            raise RequestError(f"{run} does not answer within {seconds:g} s: try again") from error
        raise RequestError(f"{run} is not running: process {endpoint.pid} is gone") from error
    except (OSError, ValueError) as error:
        raise RequestError(f"{run} is not running: nobody listens at its endpoint any more") from error
    if not isinstance(reply, dict) or reply.get("ok") is not True:
        raise RequestError(f"{run} refused: {reply.get('error') if isinstance(reply, dict) else reply}")
    return reply


def liveness(run: Path, seconds: float = 1.0) -> Literal["running", "dead", "elsewhere", "foreign", "ended"]:
    """Whether a run is running; dead is one that left its endpoint behind, as a killed one does.

    Of a foreign one, which belongs to another user, it cannot be told: it is running or was killed.
    """
    try:
        endpoint = Endpoint.read(run)
    except PermissionError:
        return "foreign"
    if endpoint is None:
        return "ended"
    if endpoint.host != socket.gethostname():
        return "elsewhere"
    try:
        ask(run, "status", seconds)
    except RequestError as error:
        return "running" if isinstance(error.__cause__, TimeoutError) and is_alive(endpoint.pid) else "dead"
    return "running"


class ControlServer:
    """Listens on its own thread, which calls `answer` for each request with the right token.

    Connections are read without blocking, so that a silent client delays nobody else.
    """

    def __init__(self, run: Path, answer: Callable[[str], dict[str, Any]]) -> None:
        self._run = run
        self._answer = answer
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
        """Stop listening and take the file away, unless it is that of another run by now."""
        self._open = False
        with contextlib.suppress(PermissionError):  # another user's by now
            if Endpoint.read(self._run) == self._endpoint:
                Endpoint.path(self._run).unlink()
        with contextlib.suppress(OSError), socket.create_connection(self._socket.getsockname(), timeout=PATIENCE):
            pass  # wakes the thread
        self._thread.join(2 * PATIENCE)
        self._socket.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while self._open:
                now = time.monotonic()
                for late in [own for own, client in self._clients.items() if client.deadline <= now]:
                    self._drop(late, selector)
                deadline = min((client.deadline for client in self._clients.values()), default=None)
                for key, _ in selector.select(None if deadline is None else deadline - now):
                    if key.fileobj is self._socket:
                        self._accept(selector)
                    elif key.fileobj in self._clients:  # not just closed in favor of a newer one
                        self._hear(key.fileobj, selector)
            for own in list(self._clients):
                self._drop(own, selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:  # the client has left again
            return
        except OSError:  # e.g. out of file descriptors: leave the next one to the run
            for own in list(self._clients):
                self._drop(own, selector)
            time.sleep(PATIENCE)
            return
        if len(self._clients) == MAX_CLIENTS:
            self._drop(next(iter(self._clients)), selector)
        connection.settimeout(0)
        self._clients[connection] = _Client(time.monotonic() + PATIENCE)
        selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: Any, selector: selectors.BaseSelector) -> None:
        """Read available bytes; reply once the request is complete, too long or ended by the client."""
        client = self._clients[connection]
        try:
            piece = connection.recv(LONGEST)
            client.line += piece
            if piece and len(client.line) <= LONGEST and not client.line.endswith(b"\n"):
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
            return {"ok": False, "error": f"a request is one line of JSON of at most {LONGEST} bytes"}
        token = str(request.get("token")).encode(errors="replace")
        if not hmac.compare_digest(token, self._token.encode()):
            return {"ok": False, "error": "the token is wrong"}
        verb = request.get("verb")
        if not isinstance(verb, str) or verb not in VERBS:
            return {"ok": False, "error": f"the verb is none of {', '.join(VERBS)}"}
        return {"ok": True, **self._answer(verb)}


@dataclass(slots=True)
class _Client:
    """A connection whose request is incomplete."""

    deadline: float
    line: bytes = b""


class ControlCallback(TrainerCallback):
    """Lets a run be asked for its status, for a save and for its end, from train begin to train end."""

    def __init__(self) -> None:
        self.drains = False
        """Whether the run was asked to end in a hurry."""
        self.reason: str | None = None
        """What was asked, for people."""
        self._requests: deque[str] = deque()
        self._server: ControlServer | None = None
        self._state: Any = None
        self._metrics: dict[str, Any] = {}
        self._pace = 0.0
        self._checkpoint: str | None = None

    def on_train_begin(self, **event: Any) -> None:
        """Listen."""
        self._state = event["state"]
        if self._state.is_world_process_zero:
            self._requests.clear()
            self.drains, self.reason = False, None
            output_dir = Path(event["trainer"].config.output_dir)
            try:
                self._server = ControlServer(output_dir, self._answer)
            except OSError as error:
                logger.warning("whimbrel control cannot reach this run: %s (%s)", error, Endpoint.path(output_dir))

    def on_train_metrics(self, **event: Any) -> None:
        """Remember the newest numbers for whoever asks."""
        self._metrics = event["metrics"]
        seconds = self._metrics["seconds"]
        self._pace += (seconds - self._pace) * (0.1 if self._pace else 1.0)

    def on_save(self, **event: Any) -> None:
        """Remember the newest checkpoint."""
        self._checkpoint = str(event["checkpoint"])

    def on_step_end(self, **event: Any) -> None:
        """Do what was asked since the last step."""
        if self._requests:
            self._obey(self.decide(), event["control"])

    def on_prediction_step(self, **event: Any) -> None:
        """Process requests during an evaluation too."""
        self.on_step_end(**event)

    def on_evaluate(self, **event: Any) -> None:
        """It may have been asked during an evaluation."""
        self.on_step_end(**event)

    def on_train_end(self, **event: Any) -> None:
        """Listen no more."""
        del event
        if self._server is not None:
            self._server.close()
            self._server = None

    def decide(self) -> frozenset[str]:
        """What is to be done now: all that was asked since the last time.

        Only the process that listens knows it; where there are several, this is what it has to tell the others.
        """
        asked = set()
        while self._requests:
            asked.add(self._requests.popleft())
        return frozenset(asked)

    def _obey(self, asked: frozenset[str], control: TrainerControl) -> None:
        control.should_save |= not asked.isdisjoint({"save", "save-stop"})
        control.should_training_stop |= not asked.isdisjoint({"stop", "save-stop"})
        control.should_abort_without_save |= "abort" in asked
        self.drains |= "save-stop" in asked
        if asked - {"save"}:
            self.reason = f"whimbrel control {' '.join(sorted(asked))}"

    def _answer(self, verb: str) -> dict[str, Any]:
        """The reply to a verb; called on the thread that listens, so it only reads and puts into the queue."""
        if verb != "status":
            self._requests.append(verb)
            return {"says": VERBS[verb], "step": self._state.global_step}
        return {"status": self._status()}

    def _status(self) -> dict[str, Any]:
        metrics, step, total = self._metrics, self._state.global_step, self._state.max_steps
        rate = metrics["tokens"] / metrics["seconds"] if metrics.get("tokens") and metrics["seconds"] else None
        return {
            "pid": os.getpid(), "step": step, "max_steps": total, "loss": metrics.get("loss"), "lr": metrics.get("lr"),
            "tokens_per_second": rate, "eta_seconds": self._pace * (total - step) if self._pace else None,
            "checkpoint": self._checkpoint,
        }  # fmt: skip


def _read_line(connection: socket.socket, deadline: float, most: int) -> bytes:
    """What comes until the end of the line; short where it is too long or the client ends it. Late is an error."""
    line = b""
    while len(line) <= most and not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        piece = connection.recv(most)
        if not piece:
            break
        line += piece
    return line
