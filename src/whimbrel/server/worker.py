"""The thread that owns the engine, and the bridge between it and the event loop.

The engine is not thread-safe, so only this thread calls it. The event loop puts actions (submit, cancel, stop) into a
queue; the thread runs them between two engine steps and sends the events of each step back in one call to the loop.
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

__all__ = ["EngineProtocol", "Job", "Worker", "non_finite_logits_error"]

MAX_STEP_FAILURES = 3
"""Consecutive failures, with no sequence finished in between, after which /health returns 503."""

_log = logging.getLogger(__name__)

Events = list[tuple[int, Event]]
"""Pairs of the index of a request in its job and one of its events."""


def engine_failed_error() -> ApiError:
    """The error for requests whose engine step raised."""
    return ApiError(500, "the engine failed on this request: see the server log", code="engine_failed")


def non_finite_logits_error() -> ApiError:
    """The error for requests with NaN or infinite logits."""
    message = "the model produced non-finite logits (NaN or infinity) for this request: check the model's weights"
    return ApiError(500, message, code="engine_failed")


def engine_stopped_error() -> ApiError:
    """The error for requests when the thread is no longer running."""
    return ApiError(503, "the engine has stopped", code="engine_stopped")


class EngineProtocol(Protocol):
    """The part of `inference.Engine` that the worker uses."""

    @property
    def busy(self) -> bool: ...
    @property
    def context_length(self) -> int: ...
    def add_request(self, request: Request) -> int: ...
    def step(self) -> Sequence[Event]: ...
    def abort(self, request_id: int, sample: int | None = None) -> None: ...
    def stats(self) -> Stats: ...


class Job:
    """The engine requests of one HTTP request, and the stream of their events."""

    def __init__(self, requests: Sequence[Request], worker: Worker) -> None:
        self.requests, self._worker = tuple(requests), worker
        self._events: asyncio.Queue[Events | ApiError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Events]:
        """All events since the last iteration. Endless: the caller stops when all samples have finished."""
        while True:
            events = self._unwrap(await self._events.get())
            while not self._events.empty():
                events = events + self._unwrap(self._events.get_nowait())
            yield events

    def cancel(self, index: int | None = None, sample: int | None = None) -> None:
        """Cancel the job, one of its requests, or one sample of a request; no effect on finished ones."""
        self._worker.call(lambda: self._worker.cancel(self, index, sample))

    @staticmethod
    def _unwrap(events: Events | ApiError) -> Events:
        if isinstance(events, ApiError):
            raise events
        return events

    def deliver(self, events: Events | ApiError) -> None:
        """Queue events for the consumer; call from the event loop."""
        self._events.put_nowait(events)


@dataclass(slots=True)
class _ActiveRequest:
    job: Job
    index: int
    samples: set[int]
    """Samples that have not finished."""


class Worker:
    """Runs an engine in its own thread."""

    def __init__(self, engine: EngineProtocol) -> None:
        self.stats: Stats = engine.stats()
        """The engine's statistics after its last step."""
        self.failures = 0
        """Steps that raised or produced non-finite logits since a sequence last finished."""
        self.context_length = engine.context_length
        """Maximum length of a sequence, prompt included, in tokens."""
        self._engine = engine
        self._active: dict[int, _ActiveRequest] = {}  # by the engine's request id
        self._actions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # guards _stopped: nothing is queued after the thread has emptied the queue
        self._stopped = self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="whimbrel-engine", daemon=True)

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and recent steps have not failed repeatedly."""
        return not self._stopped and self.failures < MAX_STEP_FAILURES

    def start(self) -> None:
        """Start the thread; call from the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to stop and fail all jobs; does not wait for it."""
        self.call(self._request_stop)

    async def close(self) -> None:
        """Stop and wait for the thread."""
        self.stop()
        await asyncio.to_thread(self._thread.join)

    async def submit(self, requests: Sequence[Request]) -> Job:
        """Submit requests to the engine, all of them or none; RequestError if one can never be served."""
        job = Job(requests, self)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call(lambda: self._accept(job, accepted))
        try:
            await accepted
        except asyncio.CancelledError:
            job.cancel()
            raise
        return job

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread between two steps; in the caller's thread if the worker has stopped."""
        with self._lock:
            if not self._stopped:
                return self._actions.put(action)
        return action()

    # All methods below run in the worker thread (actions also in the caller's, once the worker has stopped).

    def cancel(self, job: Job, index: int | None = None, sample: int | None = None) -> None:
        """Cancel a job or a part of it."""
        for request_id, active in list(self._active.items()):
            if active.job is job and index in (None, active.index):
                self._engine.abort(request_id, sample)
                if sample is not None and sample in active.samples:  # finished by a stop string
                    self.failures = 0
                active.samples -= active.samples if sample is None else {sample}
                self._remove_if_finished(request_id)

    def _accept(self, job: Job, accepted: asyncio.Future[None]) -> None:
        if self._stopped:
            return self._call_in_loop(_resolve, accepted, engine_stopped_error())
        try:
            for index, request in enumerate(job.requests):
                self._active[self._engine.add_request(request)] = _ActiveRequest(job, index, set(range(request.n)))
        except RequestError as error:
            self.cancel(job)
            return self._call_in_loop(_resolve, accepted, error)
        return self._call_in_loop(_resolve, accepted, None)

    def _request_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_actions()
                self.stats = self._engine.stats()
                if self._engine.busy and not self._stopping:
                    self._step()
        except Exception:
            _log.exception("the engine has stopped")
        finally:
            with self._lock:
                self._stopped = True
            self._fail_all(engine_stopped_error())
            while not self._actions.empty():
                self._actions.get()()

    def _run_actions(self) -> None:
        """Run all queued actions; if the engine is idle, wait for one."""
        try:
            action = self._actions.get(block=not self._engine.busy)
            while True:
                action()
                action = self._actions.get_nowait()
        except Empty:
            pass

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception:
            self.failures += 1
            _log.exception("an engine step failed with %d active requests", len(self._active))
            try:
                for request_id in self._active:
                    self._engine.abort(request_id)
                self.stats = self._engine.stats()
            finally:
                self._fail_all(engine_failed_error())
            return
        self.stats = self._engine.stats()
        self._count_failures(events)
        by_job: dict[Job, Events] = {}
        for event in events:
            active = self._active[event.request_id]
            by_job.setdefault(active.job, []).append((active.index, event))
            if event.finish_reason is not None:
                active.samples.discard(event.sample)
                self._remove_if_finished(event.request_id)
        if by_job:
            self._call_in_loop(_deliver, by_job)

    def _count_failures(self, events: Sequence[Event]) -> None:
        """Only a finished sequence shows that the engine works: it may fail after any number of tokens."""
        failed = {event.request_id for event in events if event.finish_reason == "error"}
        if failed:
            _log.error("the model produced non-finite logits (NaN or infinity): %d requests failed", len(failed))
        if any(event.finish_reason not in (None, "error") for event in events):
            self.failures = 0
        elif failed:
            self.failures += 1

    def _remove_if_finished(self, request_id: int) -> None:
        if not self._active[request_id].samples:
            del self._active[request_id]

    def _fail_all(self, error: ApiError) -> None:
        """Send an error to all jobs, without calling the engine."""
        self._call_in_loop(_deliver, {active.job: error for active in self._active.values()})
        self._active.clear()

    def _call_in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "start the worker first"
        with contextlib.suppress(RuntimeError):  # the loop is closed: no one is waiting
            self._loop.call_soon_threadsafe(function, *arguments)


def _resolve(accepted: asyncio.Future[None], error: Exception | None) -> None:
    if accepted.cancelled():
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)


def _deliver(by_job: Mapping[Job, Events | ApiError]) -> None:
    for job, events in by_job.items():
        job.deliver(events)
