"""A whole fleet in one event loop: it joins, rests, does the work of a case, and is watched."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from offbeat.contracts.runs import RunStatus
from offbeat.objects import S3ObjectStore
from scripts.bench.scale_calls import DIAGNOSIS, PUBLISH, RUN, SUBMIT, Caller, Ledger, Service
from scripts.bench.scale_cases import ScaleCase, scale_spec
from scripts.bench.scale_generator import Generator
from scripts.bench.scale_meter import Meter, Reading, Sizes
from scripts.bench.scale_trainer import Trainer
from scripts.bench.scale_worker import Surroundings, Worker

JOINS_A_SECOND = 200
LAG_PROBE_S = 0.05
WATCH_S = 1.0
SIZES_EVERY_S = 5.0
LATE_S = 90.0
"""A case that is so late is cut off; its figures are those of what was done."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What was noted between two readings."""

    begin: Reading
    end: Reading
    ledger: Ledger
    lags_s: list[float] = field(default_factory=list)
    """By how much the fleet's own event loop was late."""
    sizes: list[Sizes] = field(default_factory=list)
    steps: int = 0
    finished: bool = True

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end.at_s - self.begin.at_s


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A case that was run."""

    case: ScaleCase
    idle: Phase
    work: Phase


class Fleet:
    """The workers of a case, and the client that submits its runs."""

    def __init__(self, case: ScaleCase, around: Surroundings, meter: Meter) -> None:
        self._case = case
        self._around = around
        self._meter = meter
        self._workers: list[Worker] = [
            *(Generator(f"generator-{n}", around) for n in range(1, case.generators + 1)),
            *(Trainer(f"trainer-{n}", around) for n in range(1, case.trainers + 1)),
        ]
        self._client = Caller(around.urls, around.ledger)

    async def measure(self, idle_s: float) -> Measured:
        """Let the fleet join, rest and work."""
        async with asyncio.TaskGroup() as tasks:
            running: list[asyncio.Task[None]] = []
            for worker in self._workers:
                running.append(tasks.create_task(worker.run()))
                await asyncio.sleep(1 / JOINS_A_SECOND)
            for worker in self._workers:
                await worker.joined.wait()
            idle = await self._rest(idle_s)
            _say(f"    {len(running)} workers have joined; {self._case.runs} runs begin")
            work = await self._work()
            for task in running:
                task.cancel()
        self._client.close()
        return Measured(case=self._case, idle=idle, work=work)

    async def _rest(self, idle_s: float) -> Phase:
        self._around.ledger.take()
        begin = self._meter.reading()
        await asyncio.sleep(idle_s)
        return Phase(begin=begin, end=self._meter.reading(), ledger=self._around.ledger.take())

    async def _work(self) -> Phase:
        sizes = [await asyncio.to_thread(self._meter.sizes, 0)]
        begin = self._meter.reading()
        async with _lags() as lags_s:
            specs = [scale_spec(self._case, number) for number in range(self._case.runs)]
            submitted = [self._client.call(SUBMIT, spec) for spec in specs]
            answers = await asyncio.gather(*submitted)
            runs = [str(json.loads(answer.content)["id"]) for answer in answers]
            finished = await self._watch(runs, begin.at_s, sizes)
            end = self._meter.reading()
        steps = self._steps()
        sizes.append(await asyncio.to_thread(self._meter.sizes, steps))
        return Phase(
            begin=begin,
            end=end,
            ledger=self._around.ledger.take(),
            lags_s=lags_s,
            sizes=sizes,
            steps=steps,
            finished=finished,
        )

    def _steps(self) -> int:
        return max(0, self._around.ledger.calls(PUBLISH) - self._case.runs)

    async def _watch(self, runs: list[str], began_s: float, sizes: list[Sizes]) -> bool:
        """Until all runs have ended, or that takes far too long; whether they have."""
        total = self._case.runs * self._case.steps
        deadline = began_s + self._case.work_s + LATE_S
        while self._steps() < total or not await self._have_succeeded(runs):
            await asyncio.sleep(WATCH_S)
            _say(f"\r    {self._steps()} of {total} steps", end="")
            if time.monotonic() > sizes[-1].at_s + SIZES_EVERY_S:
                sizes.append(await asyncio.to_thread(self._meter.sizes, self._steps()))
            if time.monotonic() > deadline:
                _say(" - cut off")
                await self._say_why(runs)
                return False
        _say(f" after {time.monotonic() - began_s:.0f} s")
        return True

    async def _say_why(self, runs: list[str]) -> None:
        for route, complaint in self._around.ledger.complaints.items():
            _say(f"    {route}: {complaint}")
        for run in runs:
            if not await self._have_succeeded([run]):
                answer = await self._client.call(DIAGNOSIS, run=run)
                _say(f"    {run}: {answer.content.decode()}")

    async def _have_succeeded(self, runs: list[str]) -> bool:
        for run in runs:
            status = json.loads((await self._client.call(RUN, run=run)).content)["status"]
            assert status in (RunStatus.RUNNING, RunStatus.SUCCEEDED), f"{run} has {status}"
            if status != RunStatus.SUCCEEDED:
                return False
        return True


def measure(
    case: ScaleCase,
    urls: dict[Service, str],
    broker_url: str,
    store: S3ObjectStore,
    meter: Meter,
    idle_s: float,
) -> Measured:
    """Run a case against services that are up."""

    around = Surroundings(case=case, urls=urls, broker_url=broker_url, store=store, ledger=Ledger())

    async def run() -> Measured:
        return await Fleet(case, around, meter).measure(idle_s)

    return asyncio.run(run())


@asynccontextmanager
async def _lags() -> AsyncIterator[list[float]]:
    lags_s: list[float] = []

    async def probe() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(LAG_PROBE_S)
            lags_s.append(time.monotonic() - began - LAG_PROBE_S)

    task = asyncio.create_task(probe())
    try:
        yield lags_s
    finally:
        task.cancel()


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stdout, flush=True)
