"""What a run has made, brought to this machine: whole, or not at all."""

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

from offbeat.adapter_archive import ARCHIVE_BYTES_MAX, unpack
from offbeat.contracts.runs import ModelView
from offbeat.contracts.weights import VersionFile
from offbeat.errors import IntegrityError

Chunks = AbstractContextManager[Iterable[bytes]]
"""A body that is read as it comes."""


def save_adapter(body: Chunks, path: Path) -> None:
    """The zip of an adapter: as it is where the path ends in `.zip`, else as a PEFT folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".offbeat-") as temporary:
        scratch = Path(temporary)
        archive = scratch / "adapter.zip"
        _save(body, archive, ARCHIVE_BYTES_MAX)
        if path.suffix.lower() == ".zip" and not path.is_dir():
            os.replace(archive, path)
        else:
            files = scratch / "files"
            files.mkdir()
            unpack(archive, path, files)


def save_model(model: ModelView, body_of: Callable[[str], Chunks], folder: Path) -> None:
    """The files of a model, those that are in the folder already left out. Raises `IntegrityError`
    for one that is not what the run has written."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.files:
        target = folder / file.name
        if target.exists() and _is_whole(target, file):
            continue
        with TemporaryDirectory(dir=folder, prefix=".offbeat-") as temporary:
            part = Path(temporary) / file.name
            _save(body_of(file.name), part, file.size_bytes)
            if not _is_whole(part, file):
                raise IntegrityError(f"{file.name} is not what the run has written: try again")
            os.replace(part, target)


def _save(body: Chunks, target: Path, bytes_max: int) -> None:
    num_bytes = 0
    with body as chunks, target.open("wb") as file:
        for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > bytes_max:
                raise IntegrityError(f"{target.name} is larger than {bytes_max} bytes")
            file.write(chunk)


def _is_whole(path: Path, expected: VersionFile) -> bool:
    if path.stat().st_size != expected.size_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == expected.sha256
