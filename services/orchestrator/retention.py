"""What may be removed from a run's folder in the object store: a pure decision.

Two kinds of objects go: those that the run's `retention` section gives up, and what lost attempts
have left behind. Whatever cannot be told apart from something in use stays: keys that nobody knows,
jobs that are not over, versions above the newest one that the orchestrator knows of, since one of
those may be published already.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from offbeat import keys
from offbeat.contracts.run_spec import RetentionSection
from offbeat.contracts.weights import ADAPTER_FILES
from offbeat.objects import StoredObject

SPARE_VERSIONS = 2
"""Versions behind the staleness bound that stay: a generator may be about to pull one."""
DEBRIS_AGE = timedelta(days=1)
"""What a lost attempt wrote stays so long, though its job is over: longer than any attempt writes,
and than clocks differ."""


class Reason(StrEnum):
    """Why an object may go."""

    ADAPTER = "adapters"
    STATE = "trainer_states"
    SAMPLES = "samples"
    DEBRIS = "debris"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run when it is decided which of some objects go."""

    retention: RetentionSection
    max_versions: int
    """The staleness bound."""
    checkpoint_every: int = 1
    """Versions that go on from one stored state."""
    newest: int | None
    """The newest version that the orchestrator knows of."""
    prefixes: Mapping[int, str] = field(default_factory=dict)
    """Where the winner of each published version lies."""
    used_adapters: frozenset[int] = frozenset()
    """Versions that an open job, another run or the user's interest names."""
    used_states: frozenset[int] = frozenset()
    """Versions that an open job starts from."""
    used_keys: frozenset[str] = frozenset()
    """The prompts, and samples that are not trained yet or that an open job reads."""
    taken: Mapping[str, int | None] = field(default_factory=dict)
    """Of each job that is over, the attempt whose result was taken, or None."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """An object that may go."""

    object: StoredObject
    key: keys.AttemptKey
    reason: Reason


def removals(objects: Iterable[StoredObject], facts: RunFacts, now: datetime) -> list[Removal]:
    """Those of the objects that may go now."""
    found: list[Removal] = []
    for entry in objects:
        key = keys.parse(entry.key)
        if key is None or entry.key in facts.used_keys:
            continue
        reason = _reason(entry, key, facts, now)
        if reason is not None:
            found.append(Removal(object=entry, key=key, reason=reason))
    return found


def keeps_state(version: int, facts: RunFacts) -> bool:
    """Whether the trainer state of a published version stays: as long as a version is wanted that
    goes on from it."""
    newest = facts.newest if facts.newest is not None else version
    last = max(version, min(version + facts.checkpoint_every - 1, newest))
    return any(_wants_state(one, newest, facts) for one in range(version, last + 1))


def _wants_state(version: int, newest: int, facts: RunFacts) -> bool:
    every = facts.retention.keep_every
    return (
        version > newest - facts.retention.keep_last_states
        or bool(every and version % every == 0)
        or version in facts.used_states
    )


def keeps_adapter(version: int, facts: RunFacts) -> bool:
    """Whether the adapter of a published version stays: wherever its state does, and longer."""
    newest = facts.newest if facts.newest is not None else version
    return (
        version == 0
        or version > newest - facts.retention.keep_last
        or version >= newest - facts.max_versions - SPARE_VERSIONS
        or version in facts.used_adapters
        or keeps_state(version, facts)
    )


def _reason(
    entry: StoredObject, key: keys.AttemptKey, facts: RunFacts, now: datetime
) -> Reason | None:
    age = now - entry.modified_at
    if key.folder == "versions":
        return _version_reason(entry, key, facts, age)
    if key.job_id not in facts.taken:
        return None
    if facts.taken[key.job_id] != key.attempt:
        return Reason.DEBRIS if age > DEBRIS_AGE else None
    is_old = age > timedelta(days=facts.retention.rollout_days)
    return Reason.SAMPLES if is_old and key.folder in ("rollouts", "evals") else None


def _version_reason(
    entry: StoredObject, key: keys.AttemptKey, facts: RunFacts, age: timedelta
) -> Reason | None:
    version = key.version
    if version is None or facts.newest is None or version > facts.newest:
        return None
    winner = facts.prefixes.get(version)
    if winner is None:
        return None
    if not entry.key.startswith(winner):
        return Reason.DEBRIS if age > DEBRIS_AGE else None
    if key.name in ADAPTER_FILES:
        return None if keeps_adapter(version, facts) else Reason.ADAPTER
    return None if keeps_state(version, facts) else Reason.STATE
