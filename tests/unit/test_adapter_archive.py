import zipfile
from pathlib import Path

import pytest

from offbeat.adapter_archive import ARCHIVE_FILES_MAX, unpack
from offbeat.errors import IntegrityError


def unpacked(tmp_path: Path, archive: Path) -> dict[str, bytes]:
    scratch, folder = tmp_path / "scratch", tmp_path / "folder"
    scratch.mkdir()
    unpack(archive, folder, scratch)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(tmp_path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    path = tmp_path / "adapter.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in members:
            archive.writestr(name, body)
    return path


def test_the_files_of_an_adapter_replace_older_ones(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "adapter_config.json").write_bytes(b"old")
    (tmp_path / "folder" / "notes.txt").write_bytes(b"mine")
    archive = write(tmp_path, ("adapter_model.safetensors", b"w"), ("adapter_config.json", b"{}"))
    assert unpacked(tmp_path, archive) == {
        "adapter_model.safetensors": b"w",
        "adapter_config.json": b"{}",
        "notes.txt": b"mine",
    }


@pytest.mark.parametrize("name", ["../out", "/out", "a/b", "..", ".hidden", "a\\b", "folder/"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(IntegrityError, match="the adapter has a bad file name"):
        unpacked(tmp_path, write(tmp_path, ("good", b"x"), (name, b"x")))
    assert not (tmp_path / "folder").exists()


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("adapter_config.json")
    link.external_attr = 0o120777 << 16
    with pytest.raises(IntegrityError, match="the adapter has a link in it"):
        unpacked(tmp_path, write(tmp_path, (link, b"/etc/passwd")))


def test_more_files_than_an_adapter_has_are_refused(tmp_path: Path) -> None:
    members = [(f"file{number}", b"x") for number in range(ARCHIVE_FILES_MAX + 1)]
    with pytest.raises(IntegrityError, match="more than 16 files"):
        unpacked(tmp_path, write(tmp_path, *members))


def test_files_that_declare_too_much_are_refused_before_they_are_read(tmp_path: Path) -> None:
    archive = write(tmp_path, ("a", b"x"), ("b", b"x"))
    body = bytearray(archive.read_bytes())
    for entry in (body.index(b"PK\x01\x02"), body.rindex(b"PK\x01\x02")):
        body[entry + 24 : entry + 28] = (2**32 - 2).to_bytes(4, "little")
    archive.write_bytes(body)
    with pytest.raises(IntegrityError, match="the adapter is larger than 4296015872 bytes"):
        unpacked(tmp_path, archive)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """100 KB for 100 MB."""
    path = tmp_path / "adapter.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_model.safetensors", bytes(100_000_000))
    with pytest.raises(IntegrityError) as refused:
        unpacked(tmp_path, path)
    assert refused.value.detail == (
        "the adapter has a compressed file, 'adapter_model.safetensors': download it from an "
        "orchestrator of this version"
    )
    assert list((tmp_path / "scratch").iterdir()) == []


def test_files_that_claim_more_than_arrived_are_refused(tmp_path: Path) -> None:
    archive = write(tmp_path, ("a", b"x" * 1000))
    body = bytearray(archive.read_bytes())
    entry = body.index(b"PK\x01\x02")
    body[entry + 20 : entry + 28] = (2**20).to_bytes(4, "little") * 2
    archive.write_bytes(body)
    with pytest.raises(IntegrityError, match="claims more bytes of its files than it has"):
        unpacked(tmp_path, archive)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    archive = write(tmp_path, ("a", b"x"), ("b", b"y"))
    archive.write_bytes(archive.read_bytes().replace(b"b", b"a"))
    with pytest.raises(IntegrityError, match="two files of one name"):
        unpacked(tmp_path, archive)


@pytest.mark.parametrize("damage", [b"", b"no zip at all"])
def test_what_is_no_zip_is_refused(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "adapter.zip"
    path.write_bytes(damage)
    with pytest.raises(IntegrityError, match="the adapter is not a whole zip"):
        unpacked(tmp_path, path)


def test_a_damaged_file_is_refused_and_nothing_appears(tmp_path: Path) -> None:
    archive = write(tmp_path, ("a", b"a" * 100), ("b", bytes(range(256)) * 8))
    body = bytearray(archive.read_bytes())
    start = body.index(b"b", body.index(b"PK\x03\x04", 4)) + 40
    body[start : start + 20] = bytes(20)
    archive.write_bytes(body)
    with pytest.raises(IntegrityError, match="the adapter is not a whole zip"):
        unpacked(tmp_path, archive)
    assert not (tmp_path / "folder").exists()
