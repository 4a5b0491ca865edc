"""The thread that owns the engine: delivery of events, cancellation, failures, shutdown."""

from __future__ import annotations

import asyncio
import logging

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from tests.unit.server.running import FaultyEngine

from whimbrel.base.errors import RequestError
from whimbrel.inference import Engine, Event, Request, SamplingParams
from whimbrel.server.errors import ApiError
from whimbrel.server.worker import MAX_STEP_FAILURES, Worker

GREEDY = SamplingParams(temperature=0.0)


def ask(prompt: tuple[int, ...] = (1, 2, 3), length: int = 5, **options) -> Request:
    return Request(prompt_ids=prompt, max_new_tokens=length, sampling=GREEDY, **options)


def alone(engine: Engine, request: Request) -> list[int]:
    engine.add_request(request)
    tokens = []
    while engine.busy:
        tokens += [event.token for event in engine.step()]
    return tokens


async def tokens_of(job, texts: int = 1) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    async for arrived in job:
        for place, event in arrived:
            found.setdefault((place, event.sample), []).append(event.token)
            texts -= event.finish_reason is not None
        if not texts:
            return found
    raise AssertionError("a job does not end by itself")


def at_work(engine, act) -> None:
    """Run `act` on a worker that is started and closed around it."""

    async def run() -> None:
        worker = Worker(engine)
        worker.start()
        try:
            async with asyncio.timeout(30):
                await act(worker)
        finally:
            await worker.close()

    asyncio.run(run())


def test_concurrent_jobs_receive_their_own_events(engine: Engine):
    requests = [ask((number, 7)) for number in range(6)]
    expected = [alone(engine, request) for request in requests]

    async def act(worker: Worker) -> None:
        first, second = await asyncio.gather(worker.submit(requests[:4]), worker.submit(requests[4:]))
        found = await asyncio.gather(tokens_of(first, 4), tokens_of(second, 2))
        assert [found[0][place, 0] for place in range(4)] + [found[1][place, 0] for place in range(2)] == expected

    at_work(engine, act)


def test_submit_accepts_all_requests_of_a_job_or_none(engine: Engine):
    async def act(worker: Worker) -> None:
        with pytest.raises(RequestError, match="token id 60000"):
            await worker.submit([ask(), ask((60000,))])
        assert not engine.busy
        await tokens_of(await worker.submit([ask()]))

    at_work(engine, act)


def test_cancel_frees_a_job_a_request_or_a_sample(engine: Engine):
    faulty = FaultyEngine(engine)

    async def act(worker: Worker) -> None:
        faulty.unblock.clear()
        job = await worker.submit([ask(length=100, n=3), ask((9,), length=6)])
        faulty.unblock.set()
        job.cancel(0, 1)
        async for arrived in job:
            if any(place == 1 and event.finish_reason for place, event in arrived):
                break
        while worker.stats.running != 2:
            await asyncio.sleep(0.01)
        job.cancel(0)
        job.cancel()
        job.cancel()
        await tokens_of(await worker.submit([ask()]))
        assert not engine.busy
        assert engine.stats().free_blocks == engine.stats().blocks

    at_work(faulty, act)


def test_cancelling_submit_leaves_no_active_request(engine: Engine):
    faulty = FaultyEngine(engine)

    async def act(worker: Worker) -> None:
        faulty.unblock.clear()
        await worker.submit([ask(length=100)])
        await asyncio.to_thread(faulty.stepping.wait)  # the thread is inside a step
        waiting = asyncio.create_task(worker.submit([ask(length=100)]))
        await asyncio.sleep(0.05)
        waiting.cancel()
        faulty.unblock.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await tokens_of(await worker.submit([ask()]))
        assert len(worker._active) <= 1

    at_work(faulty, act)


def test_a_failed_step_fails_only_its_requests(engine: Engine, caplog):
    faulty = FaultyEngine(engine)
    expected = alone(engine, ask())

    async def act(worker: Worker) -> None:
        jobs = [await worker.submit([ask((number,), length=100)]) for number in (1, 2)]
        faulty.failing = 1
        for job in jobs:
            with pytest.raises(ApiError, match="the engine failed") as failed:
                await tokens_of(job)
            assert failed.value.status == 500
        assert worker.healthy
        assert engine.stats().free_blocks == engine.stats().blocks
        assert (await tokens_of(await worker.submit([ask()])))[0, 0] == expected

    with caplog.at_level(logging.ERROR):
        at_work(faulty, act)
    assert "simulated step failure" in caplog.text


def test_repeated_failures_make_the_worker_unhealthy_until_a_success(engine: Engine):
    faulty = FaultyEngine(engine)

    async def act(worker: Worker) -> None:
        faulty.failing = MAX_STEP_FAILURES
        for left in reversed(range(MAX_STEP_FAILURES)):
            with pytest.raises(ApiError):
                await tokens_of(await worker.submit([ask()]))
            assert worker.healthy == (left > 0)
        await tokens_of(await worker.submit([ask()]))
        assert worker.healthy

    at_work(faulty, act)


class Scripted(FaultyEngine):
    """Returns scripted events for each request, one per step."""

    def __init__(self, engine: Engine, *scripts: list[Event]) -> None:
        super().__init__(engine)
        self.scripts, self.steps = list(scripts), []

    @property
    def busy(self) -> bool:
        return bool(self.steps)

    def add_request(self, request: Request) -> int:
        self.steps = self.scripts.pop(0).copy()
        return 0

    def step(self) -> list[Event]:
        return [self.steps.pop(0)]

    def abort(self, request: int, sample: int | None = None) -> None:
        pass


def test_requests_that_fail_after_some_tokens_count_as_failures(engine: Engine):
    failing = [Event(0, 0, 5), Event(0, 0, finish_reason="error")]
    faulty = Scripted(engine, *[failing] * MAX_STEP_FAILURES, [Event(0, 0, 5), Event(0, 0, finish_reason="stop")])

    async def act(worker: Worker) -> None:
        for left in reversed(range(MAX_STEP_FAILURES)):
            await tokens_of(await worker.submit([ask()]))
            assert worker.healthy == (left > 0)
        await tokens_of(await worker.submit([ask()]))
        assert worker.healthy

    at_work(faulty, act)


def test_a_stop_string_counts_as_success(engine: Engine):
    failing = [[Event(0, 0, finish_reason="error")]] * (MAX_STEP_FAILURES - 1)
    faulty = Scripted(engine, *failing, [Event(0, 0, 5)], *failing)

    async def act(worker: Worker) -> None:
        for _ in failing:
            await tokens_of(await worker.submit([ask()]))
        job = await worker.submit([ask()])
        async for _ in job:
            break
        job.cancel(0, 0)
        for _ in failing:
            await tokens_of(await worker.submit([ask()]))
            assert worker.healthy

    at_work(faulty, act)


def test_a_failing_cancel_stops_the_worker_without_hanging(engine: Engine, monkeypatch, caplog):
    faulty = FaultyEngine(engine)

    def broken(request: int, sample: int | None = None) -> None:
        raise RuntimeError("simulated cancel failure")

    async def act(worker: Worker) -> None:
        faulty.failing = 1
        monkeypatch.setattr(faulty, "abort", broken)
        with pytest.raises(ApiError):
            await tokens_of(await worker.submit([ask()]))
        with pytest.raises(ApiError, match="has stopped") as ended:
            while True:
                await worker.submit([ask()])
        assert ended.value.status == 503
        assert not worker.healthy

    at_work(faulty, act)
    assert "the engine has stopped" in caplog.text


def test_stop_fails_running_jobs(engine: Engine):
    async def act(worker: Worker) -> None:
        job = await worker.submit([ask(length=100)])
        worker.stop()
        with pytest.raises(ApiError, match="has stopped"):
            await tokens_of(job)
        job.cancel()

    at_work(engine, act)
