"""Which waiting job goes to the broker next: pure, fair, shallow.

The broker holds a few ready jobs and no more, so that priority and fairness are decided here, at
the last moment, and a broker that loses everything loses nothing worth keeping.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.contracts.jobs import JobKind, WorkerRole
from services.orchestrator.fairness import NO_LENGTH_S

MESSAGES_PER_WORKER = 1
"""Messages that wait in the broker for each worker: enough that none idles between two jobs."""

Lane = tuple[WorkerRole, str]
"""A queue: role and pool."""
NO_QUOTAS: Mapping[str, int] = {}
NOTHING_SERVED: Mapping[tuple[str, WorkerRole], float] = {}

KIND_ORDER = (
    JobKind.CHAT,
    JobKind.PREPARE,
    JobKind.TOKENIZE,
    JobKind.INIT,
    JobKind.EVALUATE,
    JobKind.TRAIN,
    JobKind.GENERATE,
    JobKind.REPLAY,
)


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """A queued job without a message."""

    seq: int
    job_id: str
    run_id: str
    kind: JobKind
    pool: str
    priority: int
    project_id: str

    @property
    def lane(self) -> Lane:
        """The queue it belongs to."""
        return self.kind.role, self.pool

    @property
    def share(self) -> tuple[str, WorkerRole]:
        """Whose clock counts it."""
        return self.run_id, self.kind.role


def choose(
    waiting: Sequence[WaitingJob],
    *,
    sent: Mapping[Lane, int],
    workers: Mapping[Lane, int],
    busy: Mapping[str, int],
    quotas: Mapping[str, int] = NO_QUOTAS,
    served_s: Mapping[tuple[str, WorkerRole], float] = NOTHING_SERVED,
    lengths_s: Mapping[tuple[str, WorkerRole], float] = NOTHING_SERVED,
) -> list[WaitingJob]:
    """The jobs to send now, in order.

    `sent` counts the messages in each lane that nobody has leased, `workers` the workers alive,
    `busy` the jobs of each run that are sent or leased. Higher priority goes first; among equals
    the run that has had the least of the role's workers, then the one with the fewest jobs under
    way, so that no run waits for a longer one; within a run, set-up and evaluation before
    generation, then the older job. `served_s` is what each run has had, with what is under way, and
    `lengths_s` how long its jobs usually take (`fairness.py`). `quotas` says how many more jobs
    each project may have sent or leased; the rest of a project that is at its limit is passed over.
    """
    lines = _lines(waiting)
    room = {
        lane: MESSAGES_PER_WORKER * max(1, workers.get(lane, 0)) - sent.get(lane, 0)
        for lane in {line[0].lane for line in lines}
    }
    shares = Counter(busy)
    clocks = defaultdict[tuple[str, WorkerRole], float](float, served_s)
    quota = {line[0].project_id: quotas.get(line[0].project_id, len(waiting)) for line in lines}

    def rank(line: deque[WaitingJob]) -> tuple[int, float, int, int, int]:
        job = line[0]
        kind_order = KIND_ORDER.index(job.kind)
        return (-job.priority, clocks[job.share], shares[job.run_id], kind_order, job.seq)

    chosen: list[WaitingJob] = []
    while lines := [
        line for line in lines if line and room[line[0].lane] > 0 and quota[line[0].project_id] > 0
    ]:
        job = min(lines, key=rank).popleft()
        chosen.append(job)
        room[job.lane] -= 1
        shares[job.run_id] += 1
        clocks[job.share] += lengths_s.get(job.share, NO_LENGTH_S)
        quota[job.project_id] -= 1
    return chosen


def _lines(waiting: Sequence[WaitingJob]) -> list[deque[WaitingJob]]:
    """The jobs of each run and queue, in their order: what else decides is the same for all of a
    line."""
    lines: dict[tuple[str, Lane], list[WaitingJob]] = defaultdict(list)
    for job in waiting:
        lines[job.run_id, job.lane].append(job)
    return [
        deque(sorted(line, key=lambda job: (KIND_ORDER.index(job.kind), job.seq)))
        for line in lines.values()
    ]
