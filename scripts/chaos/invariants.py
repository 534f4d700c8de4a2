"""The invariants of a run that has ended, checked on its history: pure functions.

1  a version never changes and is never skipped; all its bytes are there
2  what was trained came from a published version, with its hash, recent enough
3  no group is trained twice, none is lost without an event that says why
4  the run ends as if nothing had happened
"""

from collections import Counter
from collections.abc import Iterator

from scripts.chaos.history import GroupRecord, History, VersionRecord


def violations(history: History) -> list[str]:
    """A sentence for everything that is not as it must be; none where all is well."""
    return [
        *_versions_have_no_gap(history),
        *(fault for version in history.versions for fault in _bytes_are_those_named(version)),
        *(fault for group in _trained(history) for fault in _policy_is_right(group, history)),
        *_no_group_is_trained_twice(history),
        *_no_group_is_lost(history),
        *_the_run_is_over(history),
    ]


def _versions_have_no_gap(history: History) -> Iterator[str]:
    published = [record.version for record in history.versions]
    if published != list(range(len(published))):
        yield f"the published versions are {published}: one is missing or comes twice"
    newest = len(published) - 1 if published else None
    if history.version != newest:
        yield f"the orchestrator is at version {history.version}, the weight-proxy at {newest}"
    told = [event.version for event in history.events if event.kind == "version_published"]
    if told != published:
        yield f"the log tells of versions {told}, published were {published}"
    for record in history.versions:
        if record.parent != (record.version - 1 if record.version else None):
            yield f"version {record.version} has parent {record.parent}"
    prefixes = Counter(record.prefix for record in history.versions)
    for prefix, count in prefixes.items():
        if count > 1:
            yield f"{count} versions share the prefix {prefix}"


def _bytes_are_those_named(record: VersionRecord) -> Iterator[str]:
    if not record.is_in_store:
        yield f"the manifest of version {record.version} in the store is missing or another one"
    for file in record.files:
        named = (file.size_bytes, file.sha256)
        if (file.stored_size_bytes, file.stored_sha256) != named:
            yield f"{file.name} of version {record.version} is not what its manifest says"


def _trained(history: History) -> list[GroupRecord]:
    return [group for group in history.groups if group.status == "trained"]


def _policy_is_right(group: GroupRecord, history: History) -> Iterator[str]:
    hashes = {record.version: record.adapter_sha256 for record in history.versions}
    name = f"group {group.group_id}"
    if len(group.samples) != history.group_size:
        yield f"{name} has {len(group.samples)} samples in the store, not {history.group_size}"
    for version, sha256 in {(s.policy_version, s.adapter_sha256) for s in group.samples}:
        if hashes.get(version) != sha256:
            yield f"{name} was sampled from version {version} under a hash never published"
    oldest = min((sample.policy_version for sample in group.samples), default=None)
    if oldest != group.policy_version:
        yield f"{name} is booked under version {group.policy_version} but sampled from {oldest}"
    if hashes.get(group.policy_version or 0) != group.adapter_sha256:
        yield f"{name} is booked under a hash that version {group.policy_version} never had"
    if oldest is None or group.trained_step is None:
        yield f"{name} is trained, but not said when or from what"
    elif (behind := group.trained_step - 1 - oldest) > history.max_versions or behind < 0:
        yield f"{name} was {behind} versions behind, {history.max_versions} are allowed"


def _no_group_is_trained_twice(history: History) -> Iterator[str]:
    steps = Counter(job.version for job in history.trained)
    for version, count in steps.items():
        if count > 1:
            yield f"{count} train jobs made version {version}"
    used = Counter(group_id for job in history.trained for group_id in job.group_ids)
    for group_id, count in used.items():
        if count > 1:
            yield f"group {group_id} was trained {count} times"
    made = {group_id: job.version for job in history.trained for group_id in job.group_ids}
    for group in _trained(history):
        if made.get(group.group_id) != group.trained_step:
            yield f"group {group.group_id} is booked under step {group.trained_step}, no job's step"


def _no_group_is_lost(history: History) -> Iterator[str]:
    known = [group.index for group in history.groups]
    if known != list(range(history.num_groups)):
        yield f"{history.num_groups} groups were started, {len(known)} are known"
    explained = {
        group_id
        for event in history.events
        if event.kind == "groups_dropped"
        for group_id in event.group_ids
    }
    for group in history.groups:
        if group.status not in ("trained", "dropped"):
            yield f"group {group.group_id} is still {group.status}"
        if group.status == "dropped" and group.group_id not in explained:
            yield f"group {group.group_id} was dropped, and no event says why"


def _the_run_is_over(history: History) -> Iterator[str]:
    if history.status != "succeeded":
        yield f"the run is {history.status}: {history.status_reason}"
    elif history.version != history.steps:
        yield f"the run succeeded at version {history.version} of {history.steps}"
    for job_id in history.open_job_ids:
        yield f"job {job_id} is still open"
