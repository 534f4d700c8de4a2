"""A round of the scheduler looks at the runs to which something has happened, and at all of them
now and then."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from offbeat.contracts.jobs import JobKind, JobMessage, WorkerRole
from offbeat.contracts.leases import CompleteRequest, LeaseRequest
from services.orchestrator import leases
from services.orchestrator.access import ADMIN
from services.orchestrator.leadership import FileLock, leadership_over
from services.orchestrator.migrate import migrate
from services.orchestrator.parsed_specs import REMEMBERED_CHARS_MAX, parsed_spec
from services.orchestrator.scheduler import Scheduler, rest_s
from services.orchestrator.schema import JobRow
from services.orchestrator.store import Store
from services.orchestrator.submission import create_run
from tests.plausible import plausible_output
from tests.specs import spec

NOW = 1_000_000.0
LEASE_S = 30.0


class SilentBroker:
    """See `Broker`: it takes every message, and hands none on."""

    def send(self, kind: JobKind, pool: str, message: JobMessage) -> None:
        """See `Broker.send`."""

    def depth(self, role: WorkerRole, pool: str) -> int:
        """See `Broker.depth`."""
        return 1


class Rounds:
    """A scheduler whose rounds the test begins, and the only worker."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = NOW
        self.scheduler = Scheduler(
            store,
            SilentBroker(),
            FileLock(None),
            clock=lambda: self.now,
            uptime=lambda: 0.0,
            lease_s=LEASE_S,
            message_lost_s=1e6,
        )

    def put_off_the_sweep(self) -> None:
        """However long the test takes, no round looks at all runs because it is time to."""
        self.scheduler._sweep_at_s = math.inf  # pyright: ignore[reportPrivateUsage]

    def look_for_losses(self) -> None:
        """However little time has passed, the next round looks for leases that have run out."""
        self.scheduler._losses_at_s = 0.0  # pyright: ignore[reportPrivateUsage]

    def submit(self, name: str) -> str:
        """A new run; its id."""
        return create_run(self.store, ADMIN, spec(name=name), None, self.now).run_id

    def jobs(self, run_id: str) -> dict[JobKind, str]:
        """The run's jobs, by kind."""
        query = select(JobRow.kind, JobRow.id).where(JobRow.run_id == run_id)
        with self.store.read() as session:
            return dict(session.execute(query).all())

    def finish(self, job_id: str) -> None:
        """Lease and complete a job; nobody is told."""
        with self.store.write() as session:
            request = LeaseRequest(attempt=1, worker_id="w")
            lease = leases.lease(
                session, job_id, request, now=self.now, lease_s=LEASE_S, heartbeat_interval_s=5.0
            )
            assert not isinstance(lease, Exception)
            done = CompleteRequest(attempt=1, worker_id="w", output=plausible_output(lease))
            leases.complete(session, job_id, done, now=self.now)


@pytest.fixture
def rounds(tmp_path: Path) -> Rounds:
    store = Store.connect(f"sqlite:///{tmp_path}/orchestrator.db")
    migrate(store.engine)
    return Rounds(store)


def test_the_scheduler_rests_19_times_as_long_as_it_worked_within_bounds() -> None:
    assert [rest_s(took_s) for took_s in (0.001, 0.005, 0.01, 10.0)] == pytest.approx(
        [0.05, 0.095, 0.19, 0.25]
    )


def test_a_round_moves_on_the_run_whose_job_was_named(rounds: Rounds) -> None:
    """Both runs are prepared; only the first one's job is named, so only that run goes on."""
    one, two = rounds.submit("one"), rounds.submit("two")
    rounds.scheduler.tick()
    for run_id in (one, two):
        rounds.finish(rounds.jobs(run_id)[JobKind.PREPARE])
    rounds.scheduler.wake(rounds.jobs(one)[JobKind.PREPARE])
    rounds.put_off_the_sweep()
    rounds.scheduler.tick()
    assert JobKind.INIT in rounds.jobs(one)
    assert JobKind.INIT not in rounds.jobs(two)


def test_a_round_looks_at_everything_where_nobody_named_a_job(rounds: Rounds) -> None:
    run_id = rounds.submit("one")
    rounds.scheduler.tick()
    rounds.finish(rounds.jobs(run_id)[JobKind.PREPARE])
    rounds.scheduler.wake()
    rounds.scheduler.tick()
    assert JobKind.INIT in rounds.jobs(run_id)


def test_a_lease_that_runs_out_is_a_new_attempt_in_the_same_round(rounds: Rounds) -> None:
    """Its job is queued again, and a message for it is out."""
    run_id = rounds.submit("one")
    rounds.scheduler.tick()
    job_id = rounds.jobs(run_id)[JobKind.PREPARE]
    with rounds.store.write() as session:
        request = LeaseRequest(attempt=1, worker_id="w")
        leases.lease(
            session, job_id, request, now=rounds.now, lease_s=LEASE_S, heartbeat_interval_s=5.0
        )
    rounds.now += 2 * LEASE_S
    rounds.look_for_losses()
    rounds.scheduler.tick()
    with rounds.store.read() as session:
        row = session.scalars(select(JobRow).where(JobRow.id == job_id)).one()
        assert (row.attempt, row.enqueued_at) == (2, rounds.now)


def test_only_another_process_counts_as_elsewhere(postgres_url: str) -> None:
    """The leader knows what happened in its own process, and sweeps for what it does not know."""
    stores = [Store.connect(postgres_url) for _ in range(2)]
    leader, standby = (leadership_over(store.engine) for store in stores)
    assert (leader.acquire(), standby.acquire()) == (True, False)
    wakers: list[tuple[Callable[[], None], bool]] = [(leader.wake, False), (standby.wake, True)]
    for wake, elsewhere in wakers:
        wake()
        assert leader.wait(60.0) is elsewhere
    for leadership, store in zip((leader, standby), stores, strict=True):
        leadership.release()
        store.engine.dispose()


def test_a_spec_is_parsed_once_unless_it_is_large() -> None:
    small = spec().model_dump_json()
    assert parsed_spec(small) is parsed_spec(str(small))
    rows = [{"prompt": "x" * REMEMBERED_CHARS_MAX, "answer": "1"}]
    large = spec(data={"source": "inline", "rows": rows}).model_dump_json()
    assert parsed_spec(large) == parsed_spec(large)
    assert parsed_spec(large) is not parsed_spec(large)
