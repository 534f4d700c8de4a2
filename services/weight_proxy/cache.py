"""A bounded cache of files on local disk, addressed by their SHA-256.

However many readers ask for a file at once, the object store is read once. Files are downloaded
under a temporary name, verified, then renamed, so a name that is a hash always has that content.
All bookkeeping happens on the event loop, without locks; only downloads run in threads.
"""

import asyncio
import hashlib
import os
import re
from collections import OrderedDict
from io import BufferedReader
from pathlib import Path
from uuid import uuid4

from anyio import CapacityLimiter, to_thread
from prometheus_client import Counter

from offbeat.contracts.weights import VersionFile
from offbeat.errors import IntegrityError, UnavailableError
from offbeat.objects import ObjectStore, check_size

DOWNLOADS_MAX = 8
"""Files read from the store at a time; more would only share the same network."""
IN_MEMORY_BYTES_MAX = 16 * 2**20
"""Up to here one request brings the whole file, which is hashed on its way to the disk. A larger
one comes in ranges side by side, and is read back."""
OPEN_ATTEMPTS_MAX = 3
"""A file may be evicted between its download and its use, when the cache is far too small."""
PART_SUFFIX = ".part"
HASH_NAME = re.compile(r"[0-9a-f]{64}")


class FileCache:
    """The files in one folder, least recently used first. The folder belongs to one process."""

    def __init__(
        self, folder: Path, store: ObjectStore, bytes_max: int, store_reads: Counter
    ) -> None:
        self._folder = folder
        self._store = store
        self._bytes_max = bytes_max
        self._store_reads = store_reads
        self._sizes_bytes: OrderedDict[str, int] = OrderedDict()
        self._used_bytes = 0
        """Stored files and those on their way."""
        self._downloads: dict[tuple[str, VersionFile], asyncio.Task[None]] = {}
        self._limiter = CapacityLimiter(DOWNLOADS_MAX)
        self._scan()

    async def open(self, key: str, file: VersionFile) -> BufferedReader:
        """The verified file, open: it can be read to its end even if it is evicted meanwhile.

        Raises `IntegrityError` where the object is not what `file` says, `UnavailableError` where
        the store does not answer or the cache has no room.
        """
        for _ in range(OPEN_ATTEMPTS_MAX):
            if (opened := self._open_stored(file)) is not None:
                return opened
            await self.fetch(key, file)
        raise UnavailableError(f"the cache evicts files before they are read: {self._advice()}")

    async def fetch(self, key: str, file: VersionFile) -> None:
        """Read this object from the store and verify it, even if its content is cached already. No
        more is read than it should have.

        Calls for the same object at the same time share one read. Errors as for `open`.
        """
        download = (key, file)
        task = self._downloads.get(download)
        if task is None:
            task = asyncio.create_task(self._download(key, file))
            self._downloads[download] = task
            task.add_done_callback(lambda _: self._downloads.pop(download))
        # A reader that goes away must not take the download from the others.
        await asyncio.shield(task)

    def _open_stored(self, file: VersionFile) -> BufferedReader | None:
        if file.sha256 not in self._sizes_bytes:
            return None
        path = self._folder / file.sha256
        if self._sizes_bytes[file.sha256] != file.size_bytes or not path.exists():
            self._forget(file.sha256)  # Cut by a crash, or somebody emptied the folder.
            return None
        self._sizes_bytes.move_to_end(file.sha256)
        return path.open("rb")

    async def _download(self, key: str, file: VersionFile) -> None:
        if file.size_bytes > IN_MEMORY_BYTES_MAX:
            # Before other files make room for what may not be there.
            await to_thread.run_sync(
                check_size, self._store, key, file.size_bytes, limiter=self._limiter
            )
        self._reserve(file.size_bytes)
        try:
            await to_thread.run_sync(self._download_verified, key, file, limiter=self._limiter)
        except BaseException:
            self._used_bytes -= file.size_bytes
            raise
        # Another object with the same content may have arrived before.
        self._used_bytes -= self._sizes_bytes.pop(file.sha256, 0)
        self._sizes_bytes[file.sha256] = file.size_bytes

    def _download_verified(self, key: str, file: VersionFile) -> None:
        part = self._folder / (uuid4().hex + PART_SUFFIX)
        self._store_reads.inc()
        try:
            if file.size_bytes <= IN_MEMORY_BYTES_MAX:
                sha256 = _write(part, self._store.get(key, size_bytes=file.size_bytes))
            else:
                self._store.download(key, part)
                sha256 = _read_back(part)
            if sha256 != file.sha256:
                raise IntegrityError(
                    f"{key!r} has sha256 {sha256}, but its manifest says {file.sha256}"
                )
            part.replace(self._folder / file.sha256)
        finally:
            part.unlink(missing_ok=True)

    def _reserve(self, size_bytes: int) -> None:
        while self._sizes_bytes and self._used_bytes + size_bytes > self._bytes_max:
            self._forget(next(iter(self._sizes_bytes)))
        if self._used_bytes + size_bytes > self._bytes_max:
            raise UnavailableError(f"no room for {size_bytes} bytes: {self._advice()}")
        self._used_bytes += size_bytes

    def _forget(self, name: str) -> None:
        self._used_bytes -= self._sizes_bytes.pop(name)
        (self._folder / name).unlink(missing_ok=True)

    def _scan(self) -> None:
        """Take over what an earlier process left; without its unfinished downloads."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for part in self._folder.glob(f"*{PART_SUFFIX}"):
            part.unlink()
        stored = [path for path in self._folder.iterdir() if HASH_NAME.fullmatch(path.name)]
        for path in sorted(stored, key=lambda path: path.stat().st_mtime_ns):
            self._sizes_bytes[path.name] = path.stat().st_size
            self._used_bytes += path.stat().st_size
        self._reserve(0)

    def _advice(self) -> str:
        return f"raise OFFBEAT_WEIGHT_PROXY_CACHE_BYTES_MAX above {self._bytes_max}"


def _write(part: Path, body: bytes) -> str:
    """The hash of what was written."""
    with part.open("xb") as content:
        content.write(body)
        content.flush()
        os.fsync(content.fileno())
    return hashlib.sha256(body).hexdigest()


def _read_back(part: Path) -> str:
    """The hash of what lies on the disk."""
    with part.open("rb") as content:
        os.fsync(content.fileno())
        return hashlib.file_digest(content, "sha256").hexdigest()
