"""A server on a real socket, in a thread of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from whimbrel.inference import Engine, EngineConfig, Event, Request, Stats
from whimbrel.server import ServeConfig
from whimbrel.server.app import Service
from whimbrel.server.http import Server, bind_socket, server_url
from whimbrel.server.served_model import ServedModel


class FaultyEngine:
    """A real engine whose next `failing` steps raise, and whose steps wait while `unblock` is cleared."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failing = 0
        self.unblock, self.stepping = threading.Event(), threading.Event()
        self.unblock.set()

    @property
    def busy(self) -> bool:
        return self.engine.busy

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    def add_request(self, request: Request) -> int:
        return self.engine.add_request(request)

    def step(self) -> Sequence[Event]:
        self.stepping.set()
        self.unblock.wait(30)
        if self.failing:
            self.failing -= 1
            raise RuntimeError("simulated step failure")
        return self.engine.step()

    def abort(self, request: int, sample: int | None = None) -> None:
        self.engine.abort(request, sample)

    def stats(self) -> Stats:
        return self.engine.stats()


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until `condition` returns true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@dataclass(frozen=True)
class RunningServer:
    """A running server and its parts."""

    client: httpx.Client
    engine: FaultyEngine
    service: Service
    server: Server
    thread: threading.Thread


@contextmanager
def running(served: ServedModel, num_blocks: int = 256, **settings) -> Iterator[RunningServer]:
    config = ServeConfig(**({"port": 0} | settings))
    engine = FaultyEngine(Engine(served.model, EngineConfig(num_blocks=num_blocks, max_batch=16)))
    service = Service(served, engine, config)
    server = Server(service)
    ready = threading.Event()
    with bind_socket(config) as sock:
        thread = threading.Thread(target=server.run_on, args=[sock, ready.set])
        thread.start()
        assert ready.wait(60)
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        try:
            with httpx.Client(base_url=server_url(sock), headers=headers, timeout=30) as client:
                yield RunningServer(client, engine, service, server, thread)
        finally:
            engine.unblock.set()
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive()
