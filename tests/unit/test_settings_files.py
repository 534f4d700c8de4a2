"""Settings that are files, as secrets are mounted."""

from pathlib import Path

import pytest

from offbeat.settings import ObjectStoreSettings, QueueSettings


def test_a_setting_is_read_from_the_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "offbeat_redis_url").write_text("redis://:secret@redis:6379/0\n")
    (tmp_path / "OFFBEAT_S3_SECRET_ACCESS_KEY").write_text("upper case")
    monkeypatch.delenv("OFFBEAT_REDIS_URL", raising=False)
    monkeypatch.delenv("OFFBEAT_S3_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.setenv("OFFBEAT_SECRETS_DIR", str(tmp_path))
    assert QueueSettings().redis_url.get_secret_value() == "redis://:secret@redis:6379/0"
    assert ObjectStoreSettings().secret_access_key.get_secret_value() == "upper case"


def test_the_environment_goes_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "offbeat_s3_bucket").write_text("file")
    monkeypatch.setenv("OFFBEAT_SECRETS_DIR", str(tmp_path))
    monkeypatch.setenv("OFFBEAT_S3_BUCKET", "environment")
    assert ObjectStoreSettings().bucket == "environment"


def test_without_the_folder_no_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "offbeat_s3_bucket").write_text("file")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OFFBEAT_SECRETS_DIR", raising=False)
    monkeypatch.delenv("OFFBEAT_S3_BUCKET", raising=False)
    assert ObjectStoreSettings().bucket == "offbeat"
