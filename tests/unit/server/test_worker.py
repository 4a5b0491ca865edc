"""The thread that owns the engine: events reach who asked, cancelling frees, failing tells everybody."""

from __future__ import annotations

import asyncio
import logging

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from tests.unit.server.running import Faulty

from whimbrel.base.errors import RequestError
from whimbrel.inference import Engine, Event, Request, SamplingParams
from whimbrel.server.errors import ApiError
from whimbrel.server.worker import FAILURES_TO_BE_UNWELL, Worker

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


def test_jobs_side_by_side_have_their_own_events(engine: Engine):
    requests = [ask((number, 7)) for number in range(6)]
    expected = [alone(engine, request) for request in requests]

    async def act(worker: Worker) -> None:
        first, second = await asyncio.gather(worker.submit(requests[:4]), worker.submit(requests[4:]))
        found = await asyncio.gather(tokens_of(first, 4), tokens_of(second, 2))
        assert [found[0][place, 0] for place in range(4)] + [found[1][place, 0] for place in range(2)] == expected

    at_work(engine, act)


def test_all_requests_of_a_job_are_taken_or_none(engine: Engine):
    async def act(worker: Worker) -> None:
        with pytest.raises(RequestError, match="token id 60000"):
            await worker.submit([ask(), ask((60000,))])
        assert not engine.busy
        await tokens_of(await worker.submit([ask()]))

    at_work(engine, act)


def test_cancelling_frees_a_job_a_request_or_a_sample(engine: Engine):
    faulty = Faulty(engine)

    async def act(worker: Worker) -> None:
        faulty.go_on.clear()
        job = await worker.submit([ask(length=100, n=3), ask((9,), length=6)])
        faulty.go_on.set()
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


def test_one_who_leaves_while_asking_holds_nothing(engine: Engine):
    faulty = Faulty(engine)

    async def act(worker: Worker) -> None:
        faulty.go_on.clear()
        await worker.submit([ask(length=100)])
        await asyncio.to_thread(faulty.stepping.wait)  # the thread is busy, and does not hear
        waiting = asyncio.create_task(worker.submit([ask(length=100)]))
        await asyncio.sleep(0.05)
        waiting.cancel()
        faulty.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await tokens_of(await worker.submit([ask()]))
        assert len(worker._held) <= 1

    at_work(faulty, act)


def test_a_step_that_fails_fails_its_requests_and_no_others(engine: Engine, caplog):
    faulty = Faulty(engine)
    expected = alone(engine, ask())

    async def act(worker: Worker) -> None:
        jobs = [await worker.submit([ask((number,), length=100)]) for number in (1, 2)]
        faulty.failing = 1
        for job in jobs:
            with pytest.raises(ApiError, match="the engine failed") as failed:
                await tokens_of(job)
            assert failed.value.status == 500
        assert worker.well
        assert engine.stats().free_blocks == engine.stats().blocks
        assert (await tokens_of(await worker.submit([ask()])))[0, 0] == expected

    with caplog.at_level(logging.ERROR):
        at_work(faulty, act)
    assert "this step was told to fail" in caplog.text


def test_an_engine_that_keeps_failing_is_unwell_until_it_succeeds(engine: Engine):
    faulty = Faulty(engine)

    async def act(worker: Worker) -> None:
        faulty.failing = FAILURES_TO_BE_UNWELL
        for left in reversed(range(FAILURES_TO_BE_UNWELL)):
            with pytest.raises(ApiError):
                await tokens_of(await worker.submit([ask()]))
            assert worker.well == (left > 0)
        await tokens_of(await worker.submit([ask()]))
        assert worker.well

    at_work(faulty, act)


class Scripted(Faulty):
    """Gives each request the events of its script, one at a step."""

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
    faulty = Scripted(engine, *[failing] * FAILURES_TO_BE_UNWELL, [Event(0, 0, 5), Event(0, 0, finish_reason="stop")])

    async def act(worker: Worker) -> None:
        for left in reversed(range(FAILURES_TO_BE_UNWELL)):
            await tokens_of(await worker.submit([ask()]))
            assert worker.well == (left > 0)
        await tokens_of(await worker.submit([ask()]))
        assert worker.well

    at_work(faulty, act)


def test_a_stop_string_counts_as_success(engine: Engine):
    failing = [[Event(0, 0, finish_reason="error")]] * (FAILURES_TO_BE_UNWELL - 1)
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
            assert worker.well

    at_work(faulty, act)


def test_an_engine_that_cannot_even_let_go_ends_the_worker_and_nothing_hangs(engine: Engine, monkeypatch, caplog):
    faulty = Faulty(engine)

    def broken(request: int, sample: int | None = None) -> None:
        raise RuntimeError("and this one cannot be cancelled")

    async def act(worker: Worker) -> None:
        faulty.failing = 1
        monkeypatch.setattr(faulty, "abort", broken)
        with pytest.raises(ApiError):
            await tokens_of(await worker.submit([ask()]))
        with pytest.raises(ApiError, match="has ended") as ended:
            while True:
                await worker.submit([ask()])
        assert ended.value.status == 503
        assert not worker.well

    at_work(faulty, act)
    assert "the engine has ended" in caplog.text


def test_closing_ends_what_runs(engine: Engine):
    async def act(worker: Worker) -> None:
        job = await worker.submit([ask(length=100)])
        worker.stop()
        with pytest.raises(ApiError, match="has ended"):
            await tokens_of(job)
        job.cancel()

    at_work(engine, act)
