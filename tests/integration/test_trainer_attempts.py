"""Attempts at a step that die, come late, lose their job or cannot upload; and steps that
overlap."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from offbeat import keys
from offbeat.contracts.jobs import ReadyGroup
from offbeat.contracts.leases import Lease
from offbeat.contracts.weights import Manifest
from offbeat.errors import LeaseLostError, UnavailableError, WorkerError
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from offbeat.worker import HandIn, JobContext
from offbeat.worker_api import WeightProxyClient
from services.trainer.checkpoint import STATE_TENSORS
from services.trainer.publish import Trainer
from services.trainer.run import train
from tests.trainer import STEP_GROUPS, Run, finished, hashes, new_run_like, steps, trainer_on
from tests.waiting import wait_until


class Interrupted(JobContext):
    """Does something in the middle of the job: at the first check between units of work."""

    def __init__(self, lease: Lease, interruption: Callable[[], object]) -> None:
        super().__init__(lease)
        self.interruption: Callable[[], object] | None = interruption

    def check(self) -> None:
        if self.interruption is not None:
            interruption, self.interruption = self.interruption, None
            interruption()
        super().check()


class CountingStore(S3ObjectStore):
    """A store that counts how often each object is read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reads: Counter[str] = Counter()

    def get(self, key: str, *, size_bytes: int | None = None) -> bytes:
        self.reads[key] += 1
        return super().get(key, size_bytes=size_bytes)


class FailingStore(S3ObjectStore):
    """A store that stops taking objects at some moment."""

    is_down = False

    def put(self, key: str, body: bytes) -> None:
        if self.is_down:
            raise UnavailableError("the store is down")
        super().put(key, body)


def assert_same_step(
    run: Run, trainer: Trainer, groups: Sequence[ReadyGroup], tiny_model: Path
) -> None:
    """The next attempt makes what a trainer without a history makes of a twin run."""
    made = run.train(trainer, 0, groups, attempt=2)
    twin = new_run_like(run)
    fresh = trainer_on(tiny_model, run.store, run.proxy)
    twin.init(fresh)
    assert hashes(made) == hashes(steps(twin, fresh, 0, 1)[0])


def test_a_published_version_is_adopted_without_work(run: Run, trainer: Trainer) -> None:
    """An attempt died between its publish and its report: the next one only reports."""
    version_0 = run.init(trainer)
    groups = run.put_groups(version_0, STEP_GROUPS)
    first = run.train(trainer, 0, groups)
    run.store.put(groups[0].rollouts_key, b"would fail to decode")
    assert run.train(trainer, 0, groups, attempt=2) == first
    assert run.init(trainer, job_id="init-again") == version_0


def test_a_state_that_is_still_in_memory_is_not_fetched(run: Run, trainer: Trainer) -> None:
    """The next job of the run finds base model, masters and moments where it left them."""
    version_0 = run.init(trainer)
    run.store.put(keys.version_file(version_0, STATE_TENSORS), b"would be refused")
    assert run.train(trainer, 0, run.put_groups(version_0, STEP_GROUPS)).version == 1


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_step_asks_for_the_newest_version_and_for_no_other(
    run: Run, tiny_model: Path, *, takes_over: bool
) -> None:
    """It is the parent, of which all samples are, or none follows yet: either is known then."""
    asked: list[str] = []
    with WeightProxyClient(str(run.proxy.http.base_url)) as client:
        client.http.event_hooks["request"] = [
            lambda request: asked.append(f"{request.method} {request.url.path.rpartition('/')[2]}")
        ]
        trainer = trainer_on(tiny_model, run.store, client)
        run.init(trainer)
        steps(run, trainer, 0, 1)
        steps(run, trainer_on(tiny_model, run.store, client) if takes_over else trainer, 1, 2)
    assert asked == ["GET 0", "PUT 0", "GET latest", "PUT 1", "GET latest", "PUT 2"]


def test_a_trainer_that_comes_second_goes_on_from_the_winner(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    """The late one drops its own state: its next step equals the winner's next step."""
    other = trainer_on(tiny_model, run.store, run.proxy)
    groups = run.put_groups(run.init(trainer), STEP_GROUPS)
    late_groups = run.put_groups(run.init(trainer), [STEP_GROUPS[0]], name="late")
    won: list[Manifest] = []
    context = Interrupted(
        run.train_lease(0, late_groups, "late"),
        lambda: won.append(run.train(other, 0, groups, job_id="winner")),
    )
    assert finished(train(context, trainer)) == won[0]
    assert won[0].job_id == "winner"
    next_groups = run.put_groups(won[0], STEP_GROUPS, name="generate-1")
    after = run.train(trainer, 1, next_groups)
    twin = new_run_like(run)
    twin.init(other)
    steps(twin, other, 0, 1)
    assert hashes(after) == hashes(steps(twin, other, 1, 2)[0])


def test_a_job_that_was_taken_away_publishes_nothing_and_the_next_attempt_is_undisturbed(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    groups = run.put_groups(run.init(trainer), STEP_GROUPS)
    context = JobContext(run.train_lease(0, groups))
    context.revoke()
    with pytest.raises(LeaseLostError):
        train(context, trainer)
    assert run.proxy.version(run.run_id, 1) is None
    assert_same_step(run, trainer, groups, tiny_model)


def test_the_next_step_starts_while_its_parent_is_handed_in(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    """The versions are those of a trainer that publishes each step before the next."""
    version_0 = run.init(trainer)
    groups = run.put_groups(version_0, STEP_GROUPS)
    late_groups = run.put_groups(version_0, STEP_GROUPS, name="late")
    first = train(JobContext(run.train_lease(0, groups)), trainer)
    second = train(JobContext(run.train_lease(1, late_groups)), trainer)
    assert run.proxy.version(run.run_id, 1) is None
    overlapped = [finished(first), finished(second)]
    twin, other = new_run_like(run), trainer_on(tiny_model, run.store, run.proxy)
    version_0 = twin.init(other)
    plain = [twin.train(other, 0, twin.put_groups(version_0, STEP_GROUPS))]
    plain += [twin.train(other, 1, twin.put_groups(version_0, STEP_GROUPS, name="late"))]
    assert [hashes(manifest) for manifest in overlapped] == [hashes(one) for one in plain]


def test_x5_a_step_whose_parent_was_never_published_is_not_published(
    run: Run, trainer: Trainer
) -> None:
    version_0 = run.init(trainer)
    lost = train(JobContext(run.train_lease(0, run.put_groups(version_0, STEP_GROUPS))), trainer)
    assert isinstance(lost, HandIn)
    orphan = train(
        JobContext(run.train_lease(1, run.put_groups(version_0, STEP_GROUPS, name="late"))), trainer
    )
    with pytest.raises(WorkerError, match="was not published: the step is taken again"):
        finished(orphan)
    assert run.proxy.version(run.run_id, 2) is None


def test_a_step_whose_parent_lost_to_another_version_is_not_published(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    version_0 = run.init(trainer)
    groups = run.put_groups(version_0, STEP_GROUPS)
    others = run.put_groups(version_0, [STEP_GROUPS[0]], name="others")
    loser = train(JobContext(run.train_lease(0, others, "loser")), trainer)
    orphan = train(JobContext(run.train_lease(1, groups)), trainer)
    winner = run.train(trainer_on(tiny_model, run.store, run.proxy), 0, groups, job_id="winner")
    assert finished(loser) == winner
    with pytest.raises(WorkerError, match="was not published"):
        finished(orphan)


def test_rollouts_that_wait_for_the_next_step_are_fetched_beside_this_one(
    run: Run, tiny_model: Path, s3_settings: ObjectStoreSettings
) -> None:
    store = CountingStore.connect(s3_settings)
    assert isinstance(store, CountingStore)
    trainer = trainer_on(tiny_model, store, run.proxy)
    version_0 = run.init(trainer)
    groups = run.put_groups(version_0, STEP_GROUPS)
    waiting = run.put_groups(version_0, STEP_GROUPS, name="late")
    key = waiting[0].rollouts_key
    context = JobContext(run.train_lease(0, groups))
    context.waiting_rollouts = (key,)
    finished(train(context, trainer))
    wait_until(lambda: store.reads[key] == 1)
    run.train(trainer, 1, waiting)
    assert store.reads[key] == 1


def test_a_step_whose_upload_failed_can_be_repeated(
    run: Run, tiny_model: Path, s3_settings: ObjectStoreSettings
) -> None:
    """The optimizer had moved, but nobody may ever see it: memory still holds the parent."""
    store = FailingStore.connect(s3_settings)
    assert isinstance(store, FailingStore)
    trainer = trainer_on(tiny_model, store, run.proxy)
    groups = run.put_groups(run.init(trainer), STEP_GROUPS)
    store.is_down = True
    with pytest.raises(UnavailableError, match="the store is down"):
        run.train(trainer, 0, groups)
    store.is_down = False
    assert_same_step(run, trainer, groups, tiny_model)
