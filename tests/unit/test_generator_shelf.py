"""Which versions stay and which go, without any engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offbeat.contracts.weights import Canary
from offbeat.errors import LeaseLostError, UnavailableError
from services.generator.engines.base import never_cancelled
from services.generator.shelf import Policy, Shelf

SOON_S = 10.0
CANARY = Canary(prompt_ids=(1,), completion_ids=(2,), logprobs=(-1.0,))


def policy_of(version: int) -> Policy:
    return Policy(
        name=f"run-v{version}",
        version=version,
        adapter_sha256="0" * 64,
        folder=Path(),
        canary=CANARY,
    )


class Setting:
    """A shelf and what it dropped."""

    def __init__(self, spare_max: int) -> None:
        self.dropped: list[int] = []
        self.shelf = Shelf(spare_max, lambda policy: self.dropped.append(policy.version))

    @property
    def versions(self) -> list[int]:
        return [policy.version for policy in self.shelf.policies()]

    def publish(self, version: int) -> None:
        """A version that no job holds."""
        self.shelf.give_back(self.add(version))

    def add(self, version: int) -> Policy:
        policy = policy_of(version)
        self.shelf.add(policy)
        return policy

    def lend(self, min_version: int = 0) -> Policy:
        policy = self.shelf.lend_newest(min_version, never_cancelled, SOON_S)
        assert policy is not None
        return policy


def test_the_newest_version_is_lent() -> None:
    setting = Setting(spare_max=1)
    setting.publish(1)
    setting.publish(2)
    assert setting.lend().version == 2


def test_the_newest_and_the_spare_ones_stay() -> None:
    setting = Setting(spare_max=2)
    for version in range(6):
        setting.publish(version)
    assert setting.versions == [3, 4, 5]
    assert setting.dropped == [0, 1, 2]


def test_what_is_lent_out_stays_however_old_it_is() -> None:
    """L7: by reference count, never by version arithmetic."""
    setting = Setting(spare_max=1)
    setting.publish(1)
    first = setting.lend()
    for version in range(2, 9):
        setting.publish(version)
    assert setting.versions == [1, 8]
    second = setting.shelf.lend(1)
    assert second == first
    setting.shelf.give_back(first)
    assert setting.versions == [1, 8]
    setting.shelf.give_back(first)
    assert setting.versions == [1, 8]
    setting.publish(9)
    assert setting.versions == [8, 9]


def test_an_older_version_that_is_pulled_again_goes_when_it_comes_back() -> None:
    setting = Setting(spare_max=0)
    setting.publish(5)
    old = setting.add(2)
    assert setting.versions == [2, 5]
    setting.shelf.give_back(old)
    assert setting.versions == [5]


def test_a_job_waits_for_the_version_that_it_needs() -> None:
    setting = Setting(spare_max=1)
    setting.publish(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(setting.lend, 3)
        setting.publish(2)
        assert not waiting.done()
        setting.publish(3)
        assert waiting.result(timeout=SOON_S).version == 3


def test_a_job_does_not_wait_for_ever() -> None:
    assert Setting(spare_max=1).shelf.lend_newest(0, never_cancelled, 0.0) is None


def test_a_job_that_is_taken_away_waits_no_longer() -> None:
    def check() -> None:
        raise LeaseLostError("taken")

    with pytest.raises(LeaseLostError):
        Setting(spare_max=1).shelf.lend_newest(0, check, SOON_S)


def test_a_closed_shelf_keeps_only_what_is_lent_out_and_takes_nothing() -> None:
    setting = Setting(spare_max=2)
    for version in range(3):
        setting.publish(version)
    held = setting.lend()
    setting.shelf.close()
    assert setting.versions == [2]
    assert not setting.shelf.touch()
    with pytest.raises(UnavailableError, match="run-v3 came too late"):
        setting.add(3)
    setting.shelf.give_back(held)
    assert setting.versions == []
    assert sorted(setting.dropped) == [0, 1, 2]


def test_it_is_idle_only_while_nothing_is_lent_out() -> None:
    setting = Setting(spare_max=1)
    held = setting.add(1)
    assert setting.shelf.idle_s() == 0
    setting.shelf.give_back(held)
    assert setting.shelf.idle_s() > 0


def test_a_name_is_loaded_or_dropped_by_one_thread_at_a_time() -> None:
    """L6: twenty threads, one name."""
    shelf = Setting(spare_max=1).shelf
    inside, most = 0, 0
    guard = threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, most
        with shelf.exclusive("run-v1"):
            with guard:
                inside += 1
                most = max(most, inside)
            shelf.pause(0.001)
            with guard:
                inside -= 1

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(work, range(100)))
    assert most == 1


def test_a_version_that_is_being_dropped_cannot_be_loaded_at_the_same_time() -> None:
    dropping, finish = threading.Event(), threading.Event()

    def drop(_: Policy) -> None:
        dropping.set()
        finish.wait()

    shelf = Shelf(0, drop)
    policies = [policy_of(version) for version in (1, 2)]
    for policy in policies:
        shelf.add(policy)
    with ThreadPoolExecutor(2) as pool:
        returned = pool.submit(shelf.give_back, policies[0])
        dropping.wait()

        def load() -> bool:
            with shelf.exclusive("run-v1"):
                return finish.is_set()

        loading = pool.submit(load)
        with shelf.exclusive("run-v2"):
            assert not loading.done()
        finish.set()
        assert loading.result(timeout=SOON_S)
        returned.result()
