"""The weight-proxy's file cache: one read however many readers, a bound, and what outlives it."""

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from offbeat.contracts.weights import VersionFile
from offbeat.errors import IntegrityError, ObjectNotFoundError, UnavailableError
from offbeat.objects import StoredObject
from services.weight_proxy.cache import IN_MEMORY_BYTES_MAX, FileCache


class MemoryStore:
    """An object store in a dict, whose reads can be held back."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.open_gate = threading.Event()
        self.open_gate.set()

    def put(self, key: str, body: bytes) -> None:
        self.objects[key] = body

    def get(self, key: str, *, size_bytes: int | None = None) -> bytes:
        assert self.open_gate.wait(timeout=60)
        if key not in self.objects:
            raise ObjectNotFoundError(f"no object under {key!r}")
        body = self.objects[key]
        if size_bytes not in (None, len(body)):
            raise IntegrityError(f"{key!r} has {len(body)} bytes, not {size_bytes}")
        return body

    def download(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key))

    def size_bytes(self, key: str) -> int | None:
        return len(self.objects[key]) if key in self.objects else None

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        for key in self.list(prefix):
            size_bytes, never = len(self.objects[key]), datetime.min.replace(tzinfo=UTC)
            yield StoredObject(key=key, size_bytes=size_bytes, modified_at=never)

    def list(self, prefix: str) -> Iterator[str]:
        yield from sorted(key for key in self.objects if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)


BODIES = {"a": b"a" * 40, "b": b"b" * 40, "c": b"c" * 40}


def described(name: str) -> VersionFile:
    body = BODIES[name]
    return VersionFile(name=name, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(dict(BODIES))


@pytest.fixture
def reads() -> Counter:
    return Counter("reads", "Reads.", registry=CollectorRegistry())


def count(reads: Counter) -> float:
    return next(iter(reads.collect())).samples[0].value


async def read(cache: FileCache, name: str) -> bytes:
    with await cache.open(name, described(name)) as opened:
        return opened.read()


def stored_names(folder: Path) -> set[str]:
    by_hash = {described(name).sha256: name for name in BODIES}
    return {by_hash.get(path.name, path.name) for path in folder.iterdir()}


def test_hundred_readers_at_once_share_one_read(
    tmp_path: Path, store: MemoryStore, reads: Counter
) -> None:
    async def scenario() -> list[bytes]:
        cache = FileCache(tmp_path, store, 100, reads)
        store.open_gate.clear()
        readers = [asyncio.create_task(read(cache, "a")) for _ in range(100)]
        await asyncio.sleep(0)
        readers[0].cancel()  # The first to ask goes away: the others still get their file.
        await asyncio.sleep(0)
        store.open_gate.set()
        return await asyncio.gather(*readers[1:])

    assert asyncio.run(scenario()) == [BODIES["a"]] * 99
    assert count(reads) == 1


def test_least_recently_used_file_goes_first(
    tmp_path: Path, store: MemoryStore, reads: Counter
) -> None:
    async def scenario() -> None:
        cache = FileCache(tmp_path, store, 100, reads)
        for name in ("a", "b", "a", "c"):
            assert await read(cache, name) == BODIES[name]

    asyncio.run(scenario())
    assert stored_names(tmp_path) == {"a", "c"}
    assert count(reads) == 3


def test_an_open_file_survives_its_eviction(
    tmp_path: Path, store: MemoryStore, reads: Counter
) -> None:
    async def scenario() -> bytes:
        cache = FileCache(tmp_path, store, 50, reads)
        opened = await cache.open("a", described("a"))
        await read(cache, "b")
        assert stored_names(tmp_path) == {"b"}
        with opened:
            return opened.read()

    assert asyncio.run(scenario()) == BODIES["a"]


def test_files_survive_a_restart_and_unfinished_ones_do_not(
    tmp_path: Path, store: MemoryStore, reads: Counter
) -> None:
    async def fill() -> None:
        cache = FileCache(tmp_path, store, 100, reads)
        await read(cache, "a")
        await read(cache, "b")

    asyncio.run(fill())
    (tmp_path / "cut.part").write_bytes(b"half")
    asyncio.run(read(FileCache(tmp_path, store, 100, reads), "a"))
    assert stored_names(tmp_path) == {"a", "b"}
    assert count(reads) == 2
    FileCache(tmp_path, store, 50, reads)
    assert stored_names(tmp_path) == {"b"}, "a smaller bound holds from the start"


def test_damaged_files_are_read_again(tmp_path: Path, store: MemoryStore, reads: Counter) -> None:
    async def scenario() -> None:
        cache = FileCache(tmp_path, store, 100, reads)
        await read(cache, "a")
        (tmp_path / described("a").sha256).unlink()
        assert await read(cache, "a") == BODIES["a"]

    asyncio.run(scenario())
    (tmp_path / described("a").sha256).write_bytes(b"cut")
    assert asyncio.run(read(FileCache(tmp_path, store, 100, reads), "a")) == BODIES["a"]
    assert count(reads) == 3


@pytest.mark.parametrize(
    ("body", "wrong"),
    [(b"x" * 40, "sha256 .*, but its manifest says"), (b"a" * 39, "39 bytes, not 40")],
)
def test_wrong_bytes_are_never_kept(
    tmp_path: Path, store: MemoryStore, reads: Counter, body: bytes, wrong: str
) -> None:
    async def scenario() -> None:
        cache = FileCache(tmp_path, store, 50, reads)
        with pytest.raises(IntegrityError, match=rf"'a' has {wrong}"):
            await read(cache, "a")
        with pytest.raises(ObjectNotFoundError):
            await cache.open("missing", described("a"))
        assert stored_names(tmp_path) == set()
        assert await read(cache, "b") == BODIES["b"], "failures gave their room back"

    store.put("a", body)
    asyncio.run(scenario())


def test_fetch_reads_the_object_even_if_its_content_is_cached(
    tmp_path: Path, store: MemoryStore, reads: Counter
) -> None:
    async def scenario() -> None:
        cache = FileCache(tmp_path, store, 85, reads)
        await cache.fetch("a", described("a"))
        with pytest.raises(IntegrityError):
            await cache.fetch("b", described("a"))
        for _ in range(3):
            await cache.fetch("a", described("a"))
        await read(cache, "c")

    asyncio.run(scenario())
    assert count(reads) == 6
    assert stored_names(tmp_path) == {"a", "c"}, "content that came twice is counted once"


def test_a_file_larger_than_the_cache_is_refused(
    tmp_path: Path, store: MemoryStore, reads: Counter
) -> None:
    cache = FileCache(tmp_path, store, 39, reads)
    with pytest.raises(UnavailableError, match="CACHE_BYTES_MAX above 39"):
        asyncio.run(read(cache, "a"))
    assert count(reads) == 0


def test_a_file_too_large_for_memory_is_checked_on_the_disk(
    tmp_path: Path, store: MemoryStore, reads: Counter
) -> None:
    body = bytes(IN_MEMORY_BYTES_MAX + 1)
    file = VersionFile(name="large", size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())

    async def scenario() -> bytes:
        cache = FileCache(tmp_path, store, len(body), reads)
        await cache.fetch("a", described("a"))
        with pytest.raises(ObjectNotFoundError):
            await cache.fetch("large", file)
        store.objects["large"] = body[:-1]
        with pytest.raises(IntegrityError, match=f"has {len(body) - 1} bytes, not {len(body)}"):
            await cache.fetch("large", file)
        assert stored_names(tmp_path) == {"a"}, "no file made room for what was not there"
        store.objects["large"] = body[:-1] + b"x"
        with pytest.raises(IntegrityError, match="but its manifest says"):
            await cache.fetch("large", file)
        store.objects["large"] = body
        with await cache.open("large", file) as opened:
            return opened.read()

    assert asyncio.run(scenario()) == body
    assert [path.name for path in tmp_path.iterdir()] == [file.sha256]
