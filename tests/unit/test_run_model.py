"""Random lives of a run: workers answer in any order, fail, come and go; users pause and resume.

Whatever happens, the bounds of the design hold at every step, and a run that is let alone ends.
"""

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from offbeat.contracts.jobs import JobKind
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import RunStatus
from services.orchestrator.run_state import (
    Drop,
    End,
    Evaluate,
    Generate,
    Group,
    Init,
    Prepare,
    RunAction,
    RunState,
    Train,
)
from services.orchestrator.runs import GENERATION_FAILURES_MAX, next_commands
from services.orchestrator.status import next_status
from tests.specs import spec

ENDING_STEPS_MAX = 2000


@dataclass(frozen=True)
class GenerateJob:
    """An open generate job."""

    indexes: tuple[int, ...]
    min_version: int


class RunLife(RuleBasedStateMachine):
    """One run, with everything that the orchestrator keeps of it in memory."""

    spec: RunSpec

    @initialize(
        max_versions=st.integers(0, 3),
        groups_per_step=st.integers(1, 5),
        steps=st.integers(1, 6),
        every=st.integers(0, 3),
    )
    def begin(self, max_versions: int, groups_per_step: int, steps: int, every: int) -> None:
        self.spec = spec(
            staleness={"max_versions": max_versions},
            rollout={"groups_per_step": groups_per_step},
            train={"steps": steps},
            data={"eval_size": 2},
            eval={"every_steps": every},
        )
        self.status = RunStatus.RUNNING
        self.prepared = False
        self.version: int | None = None
        self.set_up: Counter[JobKind] = Counter()
        self.generate_jobs: list[GenerateJob] = []
        self.train_jobs: list[Train] = []
        self.computed_steps = 0
        self.evaluated: set[int] = set()
        self.open_evaluations: list[int] = []
        self.ready: dict[int, int] = {}
        self.fate: dict[int, str] = {}
        self.next_group = 0
        self.failures = 0
        self.generators = 1
        self.decide()

    def state(self) -> RunState:
        return RunState(
            spec=self.spec,
            status=self.status,
            prepared=self.prepared,
            version=self.version,
            open_jobs={
                **self.set_up,
                JobKind.TRAIN: len(self.train_jobs),
                JobKind.EVALUATE: len(self.open_evaluations),
            },
            evaluated=frozenset(self.evaluated),
            generating=sum(len(job.indexes) for job in self.generate_jobs),
            training=sum(len(job.indexes) for job in self.train_jobs),
            computed_steps=self.computed_steps,
            ready=[Group(index=i, policy_version=v) for i, v in sorted(self.ready.items())],
            generation_failures=self.failures,
            generators=self.generators,
        )

    def decide(self) -> None:
        """What the scheduler does; deciding again must change nothing."""
        for command in next_commands(self.state()):
            self.carry_out(command)
        assert next_commands(self.state()) == []

    def carry_out(self, command: object) -> None:
        match command:
            case Prepare():
                self.set_up[JobKind.PREPARE] += 1
            case Init():
                self.set_up[JobKind.INIT] += 1
            case Evaluate(version=version):
                assert version not in self.evaluated
                self.evaluated.add(version)
                self.open_evaluations.append(version)
            case Generate(num_groups=count, min_version=version):
                assert version == self.version
                indexes = tuple(range(self.next_group, self.next_group + count))
                self.next_group += count
                self.generate_jobs.append(GenerateJob(indexes, version))
            case Train(base_version=base, indexes=indexes):
                assert self.version is not None
                assert base == self.version + self.computed_steps
                assert len(self.train_jobs) == self.computed_steps
                assert len(indexes) == self.spec.rollout.groups_per_step
                for index in indexes:
                    assert base - self.ready.pop(index) <= self.spec.staleness.max_versions
                self.train_jobs.append(command)
            case Drop(indexes=indexes, reason=reason):
                for index in indexes:
                    del self.ready[index]
                    self.bury(index, reason)
            case End(action=action):
                self.status = next_status(self.status, action)
            case _:
                raise AssertionError(command)

    def bury(self, index: int, fate: str) -> None:
        assert index not in self.fate, "a group meets its fate once"
        self.fate[index] = fate

    @precondition(lambda self: sum(self.set_up.values()) > 0)
    @rule()
    def finish_set_up(self) -> None:
        (kind,) = self.set_up.elements()
        self.set_up.clear()
        if kind is JobKind.PREPARE:
            self.prepared = True
        else:
            self.version = 0
        self.decide()

    @precondition(lambda self: self.generate_jobs)
    @rule(data=st.data())
    def finish_generation(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.generate_jobs) - 1))
        job = self.generate_jobs.pop(place)
        assert self.version is not None
        made_by = data.draw(st.integers(job.min_version, self.version))
        self.failures = 0
        for index in job.indexes:
            self.ready[index] = made_by
        self.decide()

    @precondition(lambda self: self.generate_jobs and self.failures + 1 < GENERATION_FAILURES_MAX)
    @rule()
    def lose_generation(self) -> None:
        for index in self.generate_jobs.pop(0).indexes:
            self.bury(index, "job_lost")
        self.failures += 1
        self.decide()

    @precondition(lambda self: self.train_jobs and not self.computed_steps)
    @rule()
    def compute_step(self) -> None:
        self.computed_steps = 1
        self.decide()

    @precondition(lambda self: self.computed_steps)
    @rule()
    def lose_hand_in(self) -> None:
        """The step is taken again; a later one may be under way already."""
        self.computed_steps = 0
        self.decide()

    @precondition(lambda self: self.train_jobs)
    @rule()
    def finish_step(self) -> None:
        job = self.train_jobs.pop(0)
        self.computed_steps = 0
        for index in job.indexes:
            self.bury(index, "trained")
        assert job.base_version == self.version
        self.version = job.base_version + 1
        self.decide()

    @precondition(lambda self: self.open_evaluations)
    @rule()
    def finish_evaluation(self) -> None:
        self.open_evaluations.pop()
        self.decide()

    @precondition(lambda self: self.status is RunStatus.RUNNING)
    @rule()
    def pause(self) -> None:
        self.status = next_status(self.status, RunAction.PAUSE)
        assert next_commands(self.state()) == []

    @precondition(lambda self: self.status is RunStatus.PAUSED)
    @rule()
    def resume(self) -> None:
        self.status = next_status(self.status, RunAction.RESUME)
        self.decide()

    @rule(count=st.integers(0, 4))
    def generators_come_and_go(self, count: int) -> None:
        self.generators = count
        self.decide()

    @invariant()
    def no_more_is_under_way_than_the_bound_allows(self) -> None:
        if not hasattr(self, "version") or self.version is None:
            return
        state = self.state()
        window = (self.spec.staleness.max_versions + 1) * self.spec.rollout.groups_per_step
        assert state.generating + state.training + len(self.ready) <= window

    def teardown(self) -> None:
        """Let alone, with workers that answer, the run ends and every group has met its fate."""
        if not hasattr(self, "spec"):
            return
        if self.status is RunStatus.PAUSED:
            self.resume()
        for _ in range(ENDING_STEPS_MAX):
            if self.status is not RunStatus.RUNNING:
                break
            self.let_somebody_answer()
        assert self.status is RunStatus.SUCCEEDED
        trained = [index for index, fate in self.fate.items() if fate == "trained"]
        steps = self.spec.train.steps
        assert len(trained) == steps * self.spec.rollout.groups_per_step
        assert self.version == steps

    def let_somebody_answer(self) -> None:
        if sum(self.set_up.values()):
            self.finish_set_up()
        elif self.generate_jobs:
            job = self.generate_jobs.pop(0)
            self.failures = 0
            self.ready |= dict.fromkeys(job.indexes, self.version or 0)
            self.decide()
        elif self.train_jobs:
            self.finish_step()
        elif self.open_evaluations:
            self.finish_evaluation()
        else:
            raise AssertionError(f"the run stands still: {replace(self.state(), spec=self.spec)}")


TestRunLife = RunLife.TestCase
TestRunLife.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
