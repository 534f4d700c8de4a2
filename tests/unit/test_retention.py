"""What may be removed from a run's folder, and above all what may not."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import keys
from offbeat.contracts.run_spec import RetentionSection
from offbeat.objects import StoredObject
from services.orchestrator.retention import (
    SPARE_VERSIONS,
    Reason,
    RunFacts,
    removals,
)

NOW = datetime(2026, 11, 30, tzinfo=UTC)
FILES = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "trainer_state.safetensors",
    "trainer_state.json",
)


def stored(key: str, age_days: float = 100) -> StoredObject:
    return StoredObject(key=key, size_bytes=1, modified_at=NOW - timedelta(days=age_days))


def prefix(version: int, attempt: int = 1) -> str:
    return keys.version_prefix("run-a", version, f"job-{version}", attempt)


def facts(newest: int | None, retention: dict[str, float], **more: object) -> RunFacts:
    known = {
        "max_versions": 4,
        "prefixes": {
            version: prefix(version) for version in range(0 if newest is None else newest + 1)
        },
        **more,
    }
    return RunFacts(retention=RetentionSection.model_validate(retention), newest=newest, **known)


def version_files(newest: int) -> list[StoredObject]:
    return [stored(prefix(version) + name) for version in range(newest + 1) for name in FILES]


def versions(found: list, reason: Reason) -> list[int]:
    return sorted({removal.key.version for removal in found if removal.reason is reason})


def test_old_states_go_before_old_adapters_and_every_nth_version_stays() -> None:
    known = facts(20, {"keep_last": 8, "keep_last_states": 2, "keep_every": 5})
    found = removals(version_files(20), known, NOW)
    kept_states = {0, 5, 10, 15, 19, 20}
    kept_adapters = kept_states | set(range(13, 21))
    assert versions(found, Reason.STATE) == sorted(set(range(21)) - kept_states)
    assert versions(found, Reason.ADAPTER) == sorted(set(range(21)) - kept_adapters)
    assert len(found) == 2 * (21 - 6) + 2 * (21 - len(kept_adapters))


def test_version_zero_and_the_newest_stay_where_nothing_else_is_asked_for() -> None:
    known = facts(9, {"keep_last": 1, "keep_last_states": 1, "keep_every": 0}, max_versions=0)
    found = removals(version_files(9), known, NOW)
    assert versions(found, Reason.ADAPTER) == [1, 2, 3, 4, 5, 6]
    assert versions(found, Reason.STATE) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_a_state_stays_while_versions_that_go_on_from_it_are_wanted() -> None:
    """Of full fine-tuning with a state at every fifth version: 12 goes on from that of 10."""
    known = facts(12, {"keep_last": 1, "keep_last_states": 1, "keep_every": 0}, checkpoint_every=5)
    found = removals([stored(prefix(n) + "trainer_state.json") for n in range(13)], known, NOW)
    assert versions(found, Reason.STATE) == [0, 1, 2, 3, 4, 5, 6, 7]
    replayed = replace(known, used_states=frozenset({3}))
    found = removals([stored(prefix(n) + "trainer_state.json") for n in range(13)], replayed, NOW)
    assert versions(found, Reason.STATE) == [4, 5, 6, 7]


def test_samples_go_by_age_and_only_when_their_job_is_over() -> None:
    taken = keys.rollouts("run-a", "job-1", 2)
    waiting = keys.rollouts("run-a", "job-2", 1)
    under_way = keys.rollouts("run-a", "job-3", 1)
    evaluated = keys.evaluation("run-a", 7, "job-4", 1)
    objects = [stored(key) for key in (taken, waiting, under_way, evaluated)]
    known = facts(
        None,
        {"rollout_days": 30},
        taken={"job-1": 2, "job-2": 1, "job-4": 1},
        used_keys=frozenset({waiting}),
    )
    found = removals(objects, known, NOW)
    assert [(item.object.key, item.reason) for item in found] == [
        (taken, Reason.SAMPLES),
        (evaluated, Reason.SAMPLES),
    ]
    young = [stored(entry.key, age_days=29) for entry in objects]
    assert removals(young, known, NOW) == []


def test_what_lost_attempts_wrote_goes_after_a_day() -> None:
    lost = [
        keys.rollouts("run-a", "job-1", 1),
        keys.prompts("run-a", "job-9", 1, "train"),
        prefix(3, attempt=2) + "trainer_state.json",
    ]
    known = facts(5, {}, taken={"job-1": 2, "job-9": None})
    assert [item.object.key for item in removals(map(stored, lost), known, NOW)] == lost
    assert removals([stored(key, age_days=0.9) for key in lost], known, NOW) == []


def test_a_version_that_may_have_been_published_unheard_stays() -> None:
    """A run was cancelled after the publish of version 6, before its completion was heard."""
    unheard = [stored(prefix(6, attempt) + name) for attempt in (1, 2) for name in FILES]
    known = facts(5, {"keep_last": 1, "keep_every": 0}, taken={"job-6": None})
    assert removals(unheard, known, NOW) == []


def test_what_nobody_knows_stays() -> None:
    strange = [
        "runs/run-a/manifests/000001.json",
        "runs/run-a/skipped/000001-job-1-1.json",
        "runs/run-a/notes.txt",
        keys.rollouts("run-a", "job-unknown", 1),
        "runs/run-a/versions/garbage/adapter_config.json",
    ]
    assert removals(map(stored, strange), facts(50, {"keep_last": 1}), NOW) == []


numbers = st.integers(0, 60)


@settings(max_examples=150, deadline=None)
@given(
    newest=numbers,
    keep_last=st.integers(1, 30),
    keep_last_states=st.integers(1, 30),
    keep_every=st.integers(0, 12),
    max_versions=st.integers(0, 12),
    used_adapters=st.frozensets(numbers),
    used_states=st.frozensets(numbers),
    used_jobs=st.frozensets(numbers),
    open_jobs=st.frozensets(numbers),
    age_days=st.floats(0, 400),
)
def test_what_is_in_use_is_never_removed(
    newest: int,
    keep_last: int,
    keep_last_states: int,
    keep_every: int,
    max_versions: int,
    used_adapters: frozenset[int],
    used_states: frozenset[int],
    used_jobs: frozenset[int],
    open_jobs: frozenset[int],
    age_days: float,
) -> None:
    sample_keys = {n: keys.rollouts("run-a", f"job-{n}", 1) for n in range(61)}
    prompts = keys.prompts("run-a", "job-0", 1, "train")
    known = facts(
        newest,
        {
            "keep_last": keep_last,
            "keep_last_states": keep_last_states,
            "keep_every": keep_every,
        },
        max_versions=max_versions,
        used_adapters=used_adapters,
        used_states=used_states,
        used_keys=frozenset({prompts, *(sample_keys[n] for n in used_jobs)}),
        taken={f"job-{n}": 1 for n in range(61) if n not in open_jobs},
    )
    objects = [
        *(stored(prefix(version) + name) for version in range(61) for name in FILES),
        *(stored(key, age_days) for key in (*sample_keys.values(), prompts)),
    ]
    removed = {item.object.key for item in removals(objects, known, NOW)}
    pullable = {0, *range(max(0, newest - max_versions - SPARE_VERSIONS), 61)}
    for version in pullable | used_adapters | used_states:
        assert prefix(version) + FILES[0] not in removed
        assert prefix(version) + FILES[1] not in removed
    for version in {newest, *range(newest, 61)} | used_states:
        assert not any(prefix(version) + name in removed for name in FILES)
    for number in used_jobs | open_jobs:
        assert sample_keys[number] not in removed
    assert prompts not in removed
    states = {key for key in removed if "trainer_state" in key}
    for version in range(61):
        adapter_gone = prefix(version) + FILES[0] in removed
        assert not adapter_gone or prefix(version) + FILES[2] in states
