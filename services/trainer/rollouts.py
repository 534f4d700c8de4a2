"""The rollouts of a step: fetched, checked group by group, in the order of the job.

A group counts only if every sample names a policy that was published under that very hash and is
recent enough. The others are left out with their reason, and the manifest lists them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from offbeat.contracts.jobs import ReadyGroup
from offbeat.contracts.rollouts import Rollout
from offbeat.contracts.run_spec import StalenessSection
from offbeat.errors import IntegrityError, NotFoundError
from offbeat.objects import ObjectStore
from offbeat.tables import decode_rollouts
from offbeat.worker_api import WeightProxyClient

FETCH_THREADS = 8
HASHES_CACHED_MAX = 1024
"""Hashes never change once published; a run needs those of its last few versions."""

Group = tuple[Rollout, ...]
"""The samples of one prompt, in order."""


def fetch_groups(store: ObjectStore, ready: Sequence[ReadyGroup]) -> dict[str, Group]:
    """The named groups by id, in the order given; one object may hold several of them."""
    objects = sorted({group.rollouts_key for group in ready})
    with ThreadPoolExecutor(FETCH_THREADS) as pool:
        bodies = dict(zip(objects, pool.map(store.get, objects), strict=True))
    samples: dict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for key, body in bodies.items():
        for sample in decode_rollouts(body):
            samples[key, sample.group_id].append(sample)
    groups: dict[str, Group] = {}
    for group in ready:
        found = samples[group.rollouts_key, group.group_id]
        if not found:
            raise IntegrityError(f"{group.rollouts_key!r} has no group {group.group_id!r}")
        if len({sample.prompt_ids for sample in found}) > 1:
            raise IntegrityError(f"the samples of group {group.group_id!r} differ in their prompt")
        groups[group.group_id] = tuple(sorted(found, key=lambda sample: sample.sample))
    return groups


def refusal(
    group: Group, base_version: int, staleness: StalenessSection, hashes: Mapping[int, str | None]
) -> str | None:
    """Why the group must not be trained on; None where it may."""
    for sample in group:
        if hashes[sample.policy_version] != sample.adapter_sha256:
            return f"version {sample.policy_version} was not published with this sample's hash"
        versions_behind = base_version - sample.policy_version
        if staleness.policy == "drop" and versions_behind > staleness.max_versions:
            return f"version {sample.policy_version} is {versions_behind} versions behind"
    return None


def published_hashes(proxy: WeightProxyClient) -> Callable[[str, int], str | None]:
    """The adapter's hash of a version, remembered once the version is published."""

    @lru_cache(HASHES_CACHED_MAX)
    def known(run_id: str, version: int) -> str:
        published = proxy.version(run_id, version)
        if published is None:
            raise NotFoundError(f"run {run_id!r} has no version {version}")
        return published.manifest.adapter_sha256

    def lookup(run_id: str, version: int) -> str | None:
        try:
            return known(run_id, version)
        except NotFoundError:
            return None

    return lookup
