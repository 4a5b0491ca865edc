"""The thread that owns the engine: delivery of events, cancellation, failures, shutdown."""

from __future__ import annotations

import asyncio
import logging

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from tests.unit.server.running_server import FaultyEngine

from whimbrel.base.errors import RequestError
from whimbrel.inference import Engine, Event, Request, SamplingParams
from whimbrel.server.errors import ApiError
from whimbrel.server.worker import MAX_STEP_FAILURES, Worker

GREEDY = SamplingParams(temperature=0.0)


def request_of(prompt: tuple[int, ...] = (1, 2, 3), length: int = 5, **options) -> Request:
    return Request(prompt_ids=prompt, max_new_tokens=length, sampling=GREEDY, **options)


def run_alone(engine: Engine, request: Request) -> list[int]:
    engine.add_request(request)
    tokens = []
    while engine.busy:
        tokens += [event.token for event in engine.step()]
    return tokens


async def tokens_of(job, num_samples: int = 1) -> dict[tuple[int, int], list[int]]:
    tokens: dict[tuple[int, int], list[int]] = {}
    async for events in job:
        for index, event in events:
            tokens.setdefault((index, event.sample), []).append(event.token)
            num_samples -= event.finish_reason is not None
        if not num_samples:
            return tokens
    raise AssertionError("a job does not end by itself")


def run_with_worker(engine, action) -> None:
    """Run `action` on a worker that is started and closed around it."""

    async def run() -> None:
        worker = Worker(engine)
        worker.start()
        try:
            async with asyncio.timeout(30):
                await action(worker)
        finally:
            await worker.close()

    asyncio.run(run())


def test_concurrent_jobs_receive_their_own_events(engine: Engine):
    requests = [request_of((number, 7)) for number in range(6)]
    expected = [run_alone(engine, request) for request in requests]

    async def action(worker: Worker) -> None:
        first, second = await asyncio.gather(worker.submit(requests[:4]), worker.submit(requests[4:]))
        tokens = await asyncio.gather(tokens_of(first, 4), tokens_of(second, 2))
        assert [tokens[0][index, 0] for index in range(4)] + [tokens[1][index, 0] for index in range(2)] == expected

    run_with_worker(engine, action)


def test_submit_accepts_all_requests_of_a_job_or_none(engine: Engine):
    async def action(worker: Worker) -> None:
        with pytest.raises(RequestError, match="got 60000"):
            await worker.submit([request_of(), request_of((60000,))])
        assert not engine.busy
        await tokens_of(await worker.submit([request_of()]))

    run_with_worker(engine, action)


def test_cancel_frees_a_job_a_request_or_a_sample(engine: Engine):
    faulty_engine = FaultyEngine(engine)

    async def action(worker: Worker) -> None:
        faulty_engine.unblock.clear()
        job = await worker.submit([request_of(length=100, n=3), request_of((9,), length=6)])
        faulty_engine.unblock.set()
        job.cancel(0, 1)
        async for events in job:
            if any(index == 1 and event.finish_reason for index, event in events):
                break
        while worker.stats.running != 2:
            await asyncio.sleep(0.01)
        job.cancel(0)
        job.cancel()
        job.cancel()
        await tokens_of(await worker.submit([request_of()]))
        assert not engine.busy
        assert engine.stats().free_blocks == engine.stats().blocks

    run_with_worker(faulty_engine, action)


def test_cancelling_submit_leaves_no_active_request(engine: Engine):
    faulty_engine = FaultyEngine(engine)

    async def action(worker: Worker) -> None:
        faulty_engine.unblock.clear()
        await worker.submit([request_of(length=100)])
        await asyncio.to_thread(faulty_engine.stepping.wait)  # the thread is inside a step
        submission = asyncio.create_task(worker.submit([request_of(length=100)]))
        await asyncio.sleep(0.05)
        submission.cancel()
        faulty_engine.unblock.set()
        with pytest.raises(asyncio.CancelledError):
            await submission
        await tokens_of(await worker.submit([request_of()]))
        assert len(worker._active) <= 1

    run_with_worker(faulty_engine, action)


def test_a_failed_step_fails_only_its_requests(engine: Engine, caplog):
    faulty_engine = FaultyEngine(engine)
    expected = run_alone(engine, request_of())

    async def action(worker: Worker) -> None:
        jobs = [await worker.submit([request_of((number,), length=100)]) for number in (1, 2)]
        faulty_engine.failing = 1
        for job in jobs:
            with pytest.raises(ApiError, match="the engine failed") as failed:
                await tokens_of(job)
            assert failed.value.status == 500
        assert worker.healthy
        assert engine.stats().free_blocks == engine.stats().blocks
        assert (await tokens_of(await worker.submit([request_of()])))[0, 0] == expected

    with caplog.at_level(logging.ERROR):
        run_with_worker(faulty_engine, action)
    assert "simulated step failure" in caplog.text


def test_repeated_failures_make_the_worker_unhealthy_until_a_success(engine: Engine):
    faulty_engine = FaultyEngine(engine)

    async def action(worker: Worker) -> None:
        faulty_engine.failing = MAX_STEP_FAILURES
        for left in reversed(range(MAX_STEP_FAILURES)):
            with pytest.raises(ApiError):
                await tokens_of(await worker.submit([request_of()]))
            assert worker.healthy == (left > 0)
        await tokens_of(await worker.submit([request_of()]))
        assert worker.healthy

    run_with_worker(faulty_engine, action)


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
    faulty_engine = Scripted(
        engine, *[failing] * MAX_STEP_FAILURES, [Event(0, 0, 5), Event(0, 0, finish_reason="stop")]
    )

    async def action(worker: Worker) -> None:
        for left in reversed(range(MAX_STEP_FAILURES)):
            await tokens_of(await worker.submit([request_of()]))
            assert worker.healthy == (left > 0)
        await tokens_of(await worker.submit([request_of()]))
        assert worker.healthy

    run_with_worker(faulty_engine, action)


def test_a_stop_string_counts_as_success(engine: Engine):
    failing = [[Event(0, 0, finish_reason="error")]] * (MAX_STEP_FAILURES - 1)
    faulty_engine = Scripted(engine, *failing, [Event(0, 0, 5)], *failing)

    async def action(worker: Worker) -> None:
        for _ in failing:
            await tokens_of(await worker.submit([request_of()]))
        job = await worker.submit([request_of()])
        async for _ in job:
            break
        job.cancel(0, 0)
        for _ in failing:
            await tokens_of(await worker.submit([request_of()]))
            assert worker.healthy

    run_with_worker(faulty_engine, action)


def test_a_failing_cancel_stops_the_worker_without_hanging(engine: Engine, monkeypatch, caplog):
    faulty_engine = FaultyEngine(engine)

    def broken(request: int, sample: int | None = None) -> None:
        raise RuntimeError("simulated cancel failure")

    async def action(worker: Worker) -> None:
        faulty_engine.failing = 1
        monkeypatch.setattr(faulty_engine, "abort", broken)
        with pytest.raises(ApiError):
            await tokens_of(await worker.submit([request_of()]))
        with pytest.raises(ApiError, match="has stopped") as ended:
            while True:
                await worker.submit([request_of()])
        assert ended.value.status == 503
        assert not worker.healthy

    run_with_worker(faulty_engine, action)
    assert "the engine has stopped" in caplog.text


def test_stop_fails_running_jobs(engine: Engine):
    async def action(worker: Worker) -> None:
        job = await worker.submit([request_of(length=100)])
        worker.stop()
        with pytest.raises(ApiError, match="has stopped"):
            await tokens_of(job)
        job.cancel()

    run_with_worker(engine, action)
