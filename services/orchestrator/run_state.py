"""The data of a run's decisions: what is known of it, and what can be asked for.

`runs.py` has the decisions. Nothing here does anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from offbeat.contracts.jobs import JobKind
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import RunStatus


class GroupStatus(StrEnum):
    """`generating -> ready -> training -> trained`, or `dropped` with a reason at any point."""

    GENERATING = "generating"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


class RunAction(StrEnum):
    """What can be done to a run."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    RETRY = "retry"
    SUCCEED = "succeed"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group that is generated and waits for its turn."""

    index: int
    policy_version: int
    has_signal: bool = True
    """Whether its rewards differ; a group without has no advantage and no gradient."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """All that decides what a run does next."""

    spec: RunSpec
    status: RunStatus
    prepared: bool
    """Whether the prompts, or the examples, lie in the store."""
    version: int | None
    """The newest published version; none before version 0."""
    open_jobs: Mapping[JobKind, int] = field(default_factory=dict)
    """Jobs that are queued or leased, by kind."""
    evaluated: frozenset[int] = frozenset()
    """Versions with an evaluation, in whatever status."""
    generating: int = 0
    """Groups in open generate jobs."""
    oldest_generating: int | None = None
    """The oldest version that one of them may be sampled with; none where there are none."""
    training: int = 0
    """Groups in open train jobs."""
    computed_steps: int = 0
    """Open train jobs that have only their hand-in left; one at the most in practice."""
    ready: Sequence[Group] = ()
    """Generated groups in order of their index."""
    refilled: int = 0
    """Groups that dynamic sampling has replaced for the next step."""
    generation_failures: int = 0
    generators: int = 1
    """Generators in the run's pool that get jobs."""
    generating_runs: int = 1
    """Runs that share them, with this one."""
    trainers: int = 1
    runtime_s: float = 0.0
    """Since the run was started or taken up again."""
    worker_seconds: float = 0.0
    """Time that workers have spent on the run's jobs."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Start the job that reads the data."""


@dataclass(frozen=True, kw_only=True)
class Init:
    """Start the init job."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Start a generate job for the next groups in order."""

    num_groups: int
    min_version: int


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Start the evaluation of a version."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Train:
    """Start a train job over these groups."""

    base_version: int
    indexes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TrainExamples:
    """Start a train job over the examples whose turn it is."""

    base_version: int


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Give up groups, with an event that says why."""

    indexes: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class End:
    """End the run."""

    action: RunAction
    reason: str


Command = Prepare | Init | Generate | Evaluate | Train | TrainExamples | Drop | End
