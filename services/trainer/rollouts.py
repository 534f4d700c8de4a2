"""The rollouts of a step: fetched, checked group by group, in the order of the job.

A group counts only if every sample names a policy that was published under that very hash and is
recent enough. The others are left out with their reason, and the manifest lists them.

Rollouts that wait for later steps are fetched and decoded beside the step that computes.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from offbeat.contracts.jobs import ReadyGroup
from offbeat.contracts.rollouts import Rollout
from offbeat.contracts.run_spec import StalenessSection
from offbeat.errors import IntegrityError
from offbeat.objects import ObjectStore
from offbeat.tables import decode_rollouts

FETCH_THREADS = 8
OBJECTS_AHEAD_MAX = 64
"""Rollout objects held at once, a few MB each: those of this step and of the next ones."""

Group = tuple[Rollout, ...]
"""The samples of one prompt, in order."""


class RolloutFetcher:
    """Rollout objects, decoded, most of them before they are needed. For one thread's use."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch")
        self._objects: OrderedDict[str, Future[list[Rollout]]] = OrderedDict()

    def prefetch(self, keys: Sequence[str]) -> None:
        """Begin to fetch what will be needed soon."""
        self._begin(keys)
        self._forget_oldest()

    def fetch(self, keys: Sequence[str]) -> dict[str, list[Rollout]]:
        """The objects by key; they stay at hand, for groups of them that the next step takes."""
        self._begin(keys)
        rollouts = {key: self._objects[key].result() for key in keys}
        self._forget_oldest()
        return rollouts

    def _begin(self, keys: Sequence[str]) -> None:
        for key in keys:
            begun = self._objects.get(key)
            if begun is None or (begun.done() and begun.exception()):
                self._objects[key] = self._pool.submit(self._fetch, key)
            self._objects.move_to_end(key)

    def _forget_oldest(self) -> None:
        while len(self._objects) > OBJECTS_AHEAD_MAX:
            self._objects.popitem(last=False)

    def _fetch(self, key: str) -> list[Rollout]:
        return decode_rollouts(self._store.get(key))


def fetch_groups(fetcher: RolloutFetcher, ready: Sequence[ReadyGroup]) -> dict[str, Group]:
    """The named groups by id, in the order given; one object may hold several of them."""
    objects = fetcher.fetch(sorted({group.rollouts_key for group in ready}))
    samples: dict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for key, rollouts in objects.items():
        for sample in rollouts:
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
