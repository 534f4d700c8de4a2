"""Pulls the adapter of a version to a local folder of this process, whole or not at all."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from offbeat.contracts.weights import ADAPTER_FILES, Manifest, VersionFile
from offbeat.errors import ConflictError, UnavailableError
from offbeat.worker_api import WeightProxyClient

PREDECESSOR_TIMEOUT_S = 10.0
"""How long the process that this one replaces may take to end."""


class Scratch:
    """A folder that is this process's own as long as it lives.

    A process that was killed leaves its folder behind; the next one on the machine finds its lock
    free and removes it.
    """

    def __init__(self, root: Path, owner: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.folder = root / owner
        self._lock = FileLock(root / f"{owner}.lock")
        try:
            self._lock.acquire(timeout=PREDECESSOR_TIMEOUT_S)
        except Timeout as error:
            raise ConflictError(
                f"a process of this machine is worker {owner!r} already: set OFFBEAT_WORKER_ID"
            ) from error
        for lock_file in root.glob("*.lock"):
            if lock_file.stem != owner:
                _remove_if_dead(lock_file)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()


def pull(
    proxy: WeightProxyClient, manifest: Manifest, root: Path, at_hand: Mapping[str, Path]
) -> Path:
    """The PEFT folder of the version below `root`, every byte checked against the manifest.

    `at_hand` names files of other versions by their hash: what is among them is copied, as the
    configuration nearly always is. It saves a round trip to a proxy that may be far away.

    Raises `UnavailableError` and leaves nothing behind where the download broke off or brought
    other bytes.
    """
    name = f"v{manifest.version:06d}-{manifest.adapter_sha256[:12]}"
    target = root / manifest.run_id / name
    partial = target.with_name(f"{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for file_name in ADAPTER_FILES:
            expected, path = manifest.file(file_name), partial / file_name
            if not _copy(at_hand.get(expected.sha256), path, expected.sha256):
                _download(proxy, manifest, expected, path)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _copy(source: Path | None, path: Path, sha256: str) -> bool:
    """Whether the file is there now. That of a version which is dropped just now is not."""
    if source is None:
        return False
    try:
        shutil.copyfile(source, path)
    except FileNotFoundError:
        return False
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
            return True
    path.unlink()
    return False


def _download(
    proxy: WeightProxyClient, manifest: Manifest, expected: VersionFile, path: Path
) -> None:
    digest, size_bytes = hashlib.sha256(), 0
    with (
        path.open("xb") as file,
        proxy.stream_file(manifest.run_id, manifest.version, expected.name) as chunks,
    ):
        for chunk in chunks:
            size_bytes += len(chunk)
            if size_bytes > expected.size_bytes:
                break
            digest.update(chunk)
            file.write(chunk)
    if (size_bytes, digest.hexdigest()) != (expected.size_bytes, expected.sha256):
        raise UnavailableError(
            f"{expected.name} of version {manifest.version} arrived with {size_bytes} bytes, not "
            f"the {expected.size_bytes} that were published: it is pulled again"
        )


def _remove_if_dead(lock_file: Path) -> None:
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return
    shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
    lock_file.unlink(missing_ok=True)
    lock.release()
