"""What ``evenkeel doctor`` says of rows, database, feature store and files of runs, each there and each away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.ops.locations import check_locations
from tests.contracts.store_servers import CREDENTIALS, s3_server
from tests.support.free_ports import free_port


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DATA_ROOTS", "DATABASE_URL", "STORE_URL", "RUN_STORAGE", "EXECUTOR", "INTERNAL_URL"):
        monkeypatch.delenv(f"EVENKEEL_{name}", raising=False)
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))


def checks() -> dict[str, Any]:
    return {check.name: check for check in check_locations()}


def test_locations_of_this_machine_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_DATA_ROOTS", str(tmp_path))
    assert {name: check.level for name, check in checks().items()} == {"data": "ok"}
    monkeypatch.setenv("EVENKEEL_DATA_ROOTS", f"{tmp_path}:{tmp_path}/nowhere")
    (check,) = checks().values()
    assert (check.level, check.message) == ("fail", f"data root {tmp_path}/nowhere is not a directory that can be read")


@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o700, False), (0o755, True), (0o750, True), (0o711, True), (0o2770, False), (0o2775, True)]
)
@pytest.mark.parametrize("variable", ["HOME", "STORE_URL"])
def test_directories_that_others_can_read_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, mode: int, is_open: bool
) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir()
    directory.chmod(mode)
    monkeypatch.setenv(f"EVENKEEL_{variable}", str(directory))
    found = checks()
    assert ("modes" in found) == is_open
    if is_open:
        assert found["modes"].level == "fail"
        assert found["modes"].remedy == f"chmod -R go-rwx {directory}"


def test_a_setting_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_RUN_STORAGE", "ftp://bucket/runs")
    assert checks()["data"].level == "fail"
    assert "ftp://bucket/runs" in checks()["data"].message


@pytest.mark.process
def test_a_bucket_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("EVENKEEL_EXECUTOR", "ray_jobs")
    monkeypatch.setenv("EVENKEEL_RAY_ADDRESS", "http://127.0.0.1:8265")
    monkeypatch.setenv("EVENKEEL_INTERNAL_URL", "http://127.0.0.1:8080")
    with s3_server("bucket") as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        monkeypatch.setenv("EVENKEEL_RUN_STORAGE", "s3://bucket/runs")
        monkeypatch.setenv("EVENKEEL_STORE_URL", f"s3://bucket/store?endpoint_override=http://{address}")
        monkeypatch.setenv("EVENKEEL_DATA_ROOTS", "s3://bucket/rows")
        found = checks()
        assert {name: check.level for name, check in found.items()} == {"data": "warn", "store": "ok", "storage": "ok"}
        assert found["data"].message == "data root s3://bucket/rows: no such bucket, or nothing is there"
        from trainer.storage.storage_registry import open_storage

        storage = open_storage("s3://bucket")
        assert storage.list("runs/") == [], "what was put to try is gone"
        storage.put_if_absent("rows/one", b"1")
        assert checks()["data"].message == "data roots s3://bucket/rows"
        monkeypatch.setenv("EVENKEEL_RUN_STORAGE", "s3://other/runs")
        away = checks()["storage"]
        assert away.level == "fail"
        assert away.message.startswith("s3://other/runs: ")
    monkeypatch.setenv("EVENKEEL_RUN_STORAGE", "s3://bucket/runs")
    found = checks()
    assert {name: check.level for name, check in found.items()} == dict.fromkeys(("data", "store", "storage"), "fail")
    assert all(check.remedy for check in found.values())


def test_a_database_is_asked_and_its_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_DATABASE_URL", f"postgresql+asyncpg://me:secret@127.0.0.1:{free_port()}/test")
    check = checks()["database"]
    assert check.level == "fail"
    assert "secret" not in check.message
    assert "EVENKEEL_DATABASE_URL" in check.remedy


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_database_that_answers(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_DATABASE_URL", database_url)
    assert checks()["database"].level == "ok"
