"""The zip of a PEFT folder, unpacked without trusting it: bare names, bounded size, whole files.

What is in the folder's files is for `peft` to judge.
"""

import os
import shutil
import stat
import zipfile
import zlib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from offbeat.contracts.weights import FILE_BYTES_MAX, FileName
from offbeat.errors import IntegrityError

ARCHIVE_BYTES_MAX = FILE_BYTES_MAX + 2**20
"""The weights and, beside them, a configuration."""
ARCHIVE_FILES_MAX = 16

_FILE_NAME = TypeAdapter(FileName)


def unpack(archive: Path, folder: Path, scratch: Path) -> None:
    """Put the archive's files into the folder, none of them before all are read and checked.

    `scratch` is an empty folder on the same file system. Raises `IntegrityError`.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = opened.infolist()
            _check(members, archive.stat().st_size)
            for member in members:
                with opened.open(member) as source, (scratch / member.filename).open("wb") as file:
                    shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
        raise IntegrityError(f"the adapter is not a whole zip: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    for member in members:
        os.replace(scratch / member.filename, folder / member.filename)


def _check(members: list[zipfile.ZipInfo], archive_bytes: int) -> None:
    """Refuse what could write outside the folder or fill the disk: nothing in an adapter's archive
    is compressed, so its files have no more bytes than have arrived."""
    if len(members) > ARCHIVE_FILES_MAX:
        raise IntegrityError(f"the adapter has more than {ARCHIVE_FILES_MAX} files")
    if len({member.filename for member in members}) < len(members):
        raise IntegrityError("the adapter has two files of one name")
    size_bytes = sum(member.file_size for member in members)
    if size_bytes > ARCHIVE_BYTES_MAX:
        raise IntegrityError(f"the adapter is larger than {ARCHIVE_BYTES_MAX} bytes")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise IntegrityError(
                f"the adapter has a compressed file, {member.filename!r}: download it from an "
                "orchestrator of this version"
            )
        if stat.S_ISLNK(member.external_attr >> 16):
            raise IntegrityError(f"the adapter has a link in it: {member.filename!r}")
        try:
            _FILE_NAME.validate_python(member.filename)
        except ValidationError:
            raise IntegrityError(f"the adapter has a bad file name: {member.filename!r}") from None
    if size_bytes > archive_bytes:
        raise IntegrityError("the adapter's zip claims more bytes of its files than it has")
