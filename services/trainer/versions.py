"""The published versions of runs, as a trainer knows them.

A version that can be seen never changes, so one that was read, or published here, is not asked for
again: a step of a run that one trainer takes asks once.
"""

import threading

from cachetools import LRUCache

from offbeat.contracts.weights import Manifest, PublishedVersion
from offbeat.worker_api import VersionTakenError, WeightProxyClient

REMEMBERED_MAX = 256
"""A few KB each: a step needs its parent, and the versions that its samples came from."""


class Versions:
    """Safe to share between threads: an upload runs beside the next step."""

    def __init__(self, proxy: WeightProxyClient) -> None:
        self._proxy = proxy
        self._remembered: LRUCache[tuple[str, int], Manifest] = LRUCache(REMEMBERED_MAX)
        self._lock = threading.Lock()

    def get(self, run_id: str, version: int) -> Manifest | None:
        """One version, or None where it is not published."""
        with self._lock:
            known = self._remembered.get((run_id, version))
        return known or self._remember(self._proxy.version(run_id, version))

    def adapter_sha256(self, run_id: str, version: int) -> str | None:
        """The hash that every sample of this version names, or None where it is not published."""
        manifest = self.get(run_id, version)
        return manifest.adapter_sha256 if manifest else None

    def newest(self, run_id: str, after: int, wait_s: float = 0.0) -> Manifest | None:
        """The newest version above `after`, or None while there is none."""
        return self._remember(self._proxy.wait_for_newer(run_id, after, wait_s))

    def publish(self, manifest: Manifest) -> Manifest:
        """Make the version visible. Returns the manifest that holds it: another one may have come
        first."""
        try:
            winner = self._proxy.publish(manifest)
        except VersionTakenError as taken:
            winner = taken.winner
        self._remember(winner)
        return winner.manifest

    def _remember(self, published: PublishedVersion | None) -> Manifest | None:
        if published is None:
            return None
        manifest = published.manifest
        with self._lock:
            self._remembered[manifest.run_id, manifest.version] = manifest
        return manifest
