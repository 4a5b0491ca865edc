"""The thread that owns the engine, and its bridge to the event loop: jobs in, events out, cancellation at once.

The engine is not safe to share, so nothing else ever touches it: the loop puts commands into a queue, the thread obeys
them between two steps, and what a step gives is handed to the loop in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from whimbrel.base.errors import RequestError
from whimbrel.inference import Event, Request, Stats
from whimbrel.server.errors import ApiError

__all__ = ["Job", "Steps", "Worker", "ended", "failed", "non_finite"]

FAILURES_TO_BE_UNWELL = 3
"""Consecutive failures, with no sequence finished between them, after which /health answers 503."""

_log = logging.getLogger(__name__)


def failed() -> ApiError:
    """What a request is told that the engine failed on."""
    return ApiError(500, "the engine failed on this request: the server's log says why", code="engine_failed")


def non_finite() -> ApiError:
    """The error for a request with NaN or infinite logits."""
    message = "the model produced non-finite logits (NaN or infinity) for this request: check the model's weights"
    return ApiError(500, message, code="engine_failed")


def ended() -> ApiError:
    """What a request is told once there is no engine."""
    return ApiError(503, "the server's engine has ended", code="engine_ended")


class Steps(Protocol):
    """What the worker asks of an engine."""

    @property
    def busy(self) -> bool: ...
    @property
    def context_length(self) -> int: ...
    def add_request(self, request: Request) -> int: ...
    def step(self) -> Sequence[Event]: ...
    def abort(self, request: int, sample: int | None = None) -> None: ...
    def stats(self) -> Stats: ...


class Job:
    """The requests of one client: their events as they come, until `cancel`."""

    def __init__(self, requests: Sequence[Request], worker: Worker) -> None:
        self.requests, self._worker = tuple(requests), worker
        self._arrived: asyncio.Queue[list[tuple[int, Event]] | ApiError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """All that has arrived since the last time: pairs of a request's place and its event.

        It never ends by itself: who asked knows what is enough.
        """
        while True:
            pairs = self._taken(await self._arrived.get())
            while not self._arrived.empty():
                pairs = pairs + self._taken(self._arrived.get_nowait())
            yield pairs

    def cancel(self, place: int | None = None, sample: int | None = None) -> None:
        """Give back what the job holds, or one request of it, or one sample; what has ended is let be."""
        self._worker.command(lambda: self._worker.release(self, place, sample))

    @staticmethod
    def _taken(arrived: list[tuple[int, Event]] | ApiError) -> list[tuple[int, Event]]:
        if isinstance(arrived, ApiError):
            raise arrived
        return arrived

    def deliver(self, arrived: list[tuple[int, Event]] | ApiError) -> None:
        """Called on the event loop."""
        self._arrived.put_nowait(arrived)


@dataclass(slots=True)
class _Held:
    """A request in the engine: whose it is, which of theirs, and which of its samples go on."""

    job: Job
    place: int
    samples: set[int]


class Worker:
    """Runs an engine in a thread of its own."""

    def __init__(self, engine: Steps) -> None:
        self.stats: Stats = engine.stats()
        """What the engine counted when its last step was done."""
        self.failures = 0
        """Steps that raised or produced non-finite logits since a sequence last finished."""
        self.context_length = engine.context_length
        """The longest text, prompt included, in tokens."""
        self._engine = engine
        self._held: dict[int, _Held] = {}  # by the engine's number
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._door = threading.Lock()  # no command comes in while the thread closes
        self._ended = self._ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="whimbrel-engine", daemon=True)

    @property
    def well(self) -> bool:
        """Whether requests can be expected to be answered."""
        return not self._ended and self.failures < FAILURES_TO_BE_UNWELL

    def start(self) -> None:
        """Begin, on behalf of the event loop that runs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end, and with it all jobs."""
        self.command(self._end)

    async def close(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        await asyncio.to_thread(self._thread.join)

    async def submit(self, requests: Sequence[Request]) -> Job:
        """Hand requests to the engine, all of them or none; RequestError where one can never be served."""
        job = Job(requests, self)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.command(lambda: self._accept(job, accepted))
        try:
            await accepted
        except asyncio.CancelledError:
            job.cancel()
            raise
        return job

    def command(self, act: Callable[[], None]) -> None:
        """Have the thread do something between two steps; once it has ended, do it here."""
        with self._door:
            if not self._ended:
                return self._commands.put(act)
        return act()

    def release(self, job: Job, place: int | None = None, sample: int | None = None) -> None:
        """In the thread: give back what a job holds, or a part of it."""
        for number, held in list(self._held.items()):
            if held.job is job and place in (None, held.place):
                self._engine.abort(number, sample)
                if sample is not None and sample in held.samples:  # a stop string ended it
                    self.failures = 0
                held.samples -= held.samples if sample is None else {sample}
                self._forget_ended(number)

    def _accept(self, job: Job, accepted: asyncio.Future[None]) -> None:
        if self._ended:
            return self._tell(_settle, accepted, ended())
        try:
            for place, request in enumerate(job.requests):
                self._held[self._engine.add_request(request)] = _Held(job, place, set(range(request.n)))
        except RequestError as error:
            self.release(job)
            return self._tell(_settle, accepted, error)
        return self._tell(_settle, accepted, None)

    def _end(self) -> None:
        self._ending = True

    def _run(self) -> None:
        try:
            while not self._ending:
                self._obey()
                self.stats = self._engine.stats()
                if self._engine.busy and not self._ending:
                    self._step()
        except Exception:
            _log.exception("the engine has ended")
        finally:
            with self._door:
                self._ended = True
            self._drop_all(ended())
            while not self._commands.empty():
                self._commands.get()()

    def _obey(self) -> None:
        """Do all that was commanded; with nothing to run, wait for a command."""
        try:
            act = self._commands.get(block=not self._engine.busy)
            while True:
                act()
                act = self._commands.get_nowait()
        except Empty:
            pass

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception:
            self.failures += 1
            _log.exception("a step of the engine failed, and with it the %d requests it held", len(self._held))
            try:
                for number in self._held:
                    self._engine.abort(number)
                self.stats = self._engine.stats()
            finally:
                self._drop_all(failed())
            return
        self.stats = self._engine.stats()
        self._count_failures(events)
        arrived: dict[Job, list[tuple[int, Event]]] = {}
        for event in events:
            held = self._held[event.request]
            arrived.setdefault(held.job, []).append((held.place, event))
            if event.finish_reason is not None:
                held.samples.discard(event.sample)
                self._forget_ended(event.request)
        if arrived:
            self._tell(_deliver, arrived)

    def _count_failures(self, events: Sequence[Event]) -> None:
        """Only a finished sequence proves that the engine works: it may fail after any number of tokens."""
        broken = {event.request for event in events if event.finish_reason == "error"}
        if broken:
            _log.error("the model produced non-finite logits (NaN or infinity): %d requests failed", len(broken))
        if any(event.finish_reason not in (None, "error") for event in events):
            self.failures = 0
        elif broken:
            self.failures += 1

    def _forget_ended(self, number: int) -> None:
        if not self._held[number].samples:
            del self._held[number]

    def _drop_all(self, why: ApiError) -> None:
        """Answer all that is held with an error; the engine is not asked."""
        self._tell(_deliver, {held.job: why for held in self._held.values()})
        self._held.clear()

    def _tell(self, act: Callable[..., None], *arguments: object) -> None:
        """Have the event loop do something. Once it is closed nobody waits for anything."""
        assert self._loop is not None, "a worker is started before it is told anything"
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, *arguments)


def _settle(accepted: asyncio.Future[None], error: Exception | None) -> None:
    if accepted.cancelled():
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)


def _deliver(arrived: Mapping[Job, list[tuple[int, Event]] | ApiError]) -> None:
    for job, what in arrived.items():
        job.deliver(what)
