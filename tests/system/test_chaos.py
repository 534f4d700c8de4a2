"""The short chaos suite: one harm of each kind, each right after version 2 of a synchronous run.

`make chaos` does all harms at random moments.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.chaos.fleet import IMPATIENT, Fleet, running_fleet
from scripts.chaos.harm import Harm
from scripts.chaos.harms import HARMS
from scripts.chaos.moments import Moment
from scripts.chaos.store_harms import outage
from scripts.chaos.trial import try_moment, undisturbed
from scripts.stack import StackOptions

pytestmark = pytest.mark.system

S3_DOWN = Harm(name="s3 down for 5 s", strike=outage(5.0))
NAMES = (
    "both generators killed",
    "trainer killed",
    "orchestrator killed",
    "both weight-proxies killed",
)
EMPTIED = HARMS["valkey killed, restarted empty"]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is harmed, and the adapter that every run must give."""

    fleet: Fleet
    model: Path
    expected_sha256: str


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Subject]:
    options = StackOptions(
        data_dir=tmp_path_factory.mktemp("chaos"), generators=2, settings=IMPATIENT
    )
    with running_fleet(options, sys.stdout) as fleet:
        yield Subject(fleet=fleet, model=tiny_model, expected_sha256=undisturbed(fleet, tiny_model))


@pytest.mark.parametrize(
    "harm", [*(HARMS[name] for name in NAMES), S3_DOWN], ids=lambda harm: harm.name
)
def test_q8_a_harm_delays_a_run_and_changes_nothing_else(subject: Subject, harm: Harm) -> None:
    """Invariants 1 to 4; the adapter is that of the undisturbed run, byte for byte."""
    check(subject, harm)


def test_q3_workers_take_jobs_again_after_the_broker_has_restarted_empty(subject: Subject) -> None:
    check(subject, EMPTIED)


def check(subject: Subject, harm: Harm) -> None:
    moment = Moment(number=1, harm=harm.name, max_versions=0, after_version=2, delay_s=0, seed=7)
    trial = try_moment(subject.fleet, subject.model, moment, harm, subject.expected_sha256)
    assert trial.violations == ()
    assert (trial.ended, trial.byte_equal) == (True, True)
