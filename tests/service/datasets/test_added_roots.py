"""Data roots added on the service's machine: seen at once, for whole real paths, and only from a file of the owner."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from service.cli.main import app as cli
from service.cli.output import CommandError
from service.core import added_roots
from service.core.settings import Settings
from service.ops.locations import check_locations
from tests.service.service_kit import client_of, job_body, running

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_HOME", str(settings.home))
    monkeypatch.setenv("EVENKEEL_DATA_ROOTS", str(settings.data_roots[0]))


def roots(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["roots", *map(str, arguments)])


def refused(result: Result) -> CommandError:
    assert isinstance(result.exception, CommandError)
    return result.exception


@pytest.fixture
def elsewhere(tmp_path: Path, dataset_body: dict[str, Any]) -> Path:
    folder = tmp_path / "else where"
    folder.mkdir()
    shutil.copy(dataset_body["uri"], folder / "rows.parquet")
    return folder


async def infer(client: httpx.AsyncClient, uri: Path | str, **headers: str) -> httpx.Response:
    return await client.post("/v1/datasets/infer", json={"uri": str(uri)}, headers=headers)


async def test_the_running_service_reads_a_root_from_when_it_is_added_until_it_is_removed(
    client: httpx.AsyncClient, dataset_body: dict[str, Any], elsewhere: Path, settings: Settings
) -> None:
    body = {**dataset_body, "uri": str(elsewhere / "rows.parquet")}
    error = (await client.post("/v1/datasets", json=body)).json()["errors"][0]
    assert "outside the data roots" in error["message"]
    assert f"`evenkeel roots add '{elsewhere}'`" in error["remedy"]
    added = roots("add", elsewhere)
    assert (added.exit_code, added.output) == (0, f"the service of {settings.home} reads rows below {elsewhere}\n")
    assert (
        roots(
            "add",
            elsewhere / "..",
        ).exit_code
        == 0
    )
    assert roots("remove", elsewhere / "..").exit_code == 0
    assert (await client.post("/v1/datasets", json=body)).status_code == 201
    job = job_body()
    assert (await client.post("/v1/jobs", json=job)).status_code == 202
    assert str(elsewhere) in roots("list").output
    assert roots("remove", elsewhere).exit_code == 0
    for response in (await infer(client, elsewhere), await client.post("/v1/jobs", json=job)):
        assert (response.status_code, "outside the data roots" in response.text) == (422, True)
    assert "was not added" in refused(roots("remove", elsewhere)).message


async def test_what_lies_beside_a_root_stays_outside(
    client: httpx.AsyncClient, elsewhere: Path, settings: Settings, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.parquet"
    pq.write_table(pa.table({"user": [1]}), outside)
    (tmp_path / "else where too").mkdir()
    (elsewhere / "link.parquet").symlink_to(outside)
    assert roots("add", elsewhere).exit_code == 0
    for uri in (
        elsewhere / ".." / "outside.parquet",
        elsewhere / "link.parquet",
        elsewhere,
        tmp_path / "else where too",
        outside,
    ):
        response = await infer(client, uri)
        assert (response.status_code, "outside the data roots" in response.text) == (422, True), uri
    (elsewhere / "link.parquet").unlink()
    (elsewhere / "own").symlink_to(settings.home)
    assert "outside the data roots" in (await infer(client, elsewhere / "own" / "evenkeel.db")).text
    assert (await infer(client, elsewhere)).status_code == 200


async def test_a_root_that_becomes_a_link_opens_nothing(
    client: httpx.AsyncClient, elsewhere: Path, tmp_path: Path
) -> None:
    assert roots("add", elsewhere).exit_code == 0
    (tmp_path / "secret").mkdir()
    elsewhere.rename(tmp_path / "secret" / "moved")
    elsewhere.symlink_to(tmp_path / "secret" / "moved")
    assert "outside the data roots" in (await infer(client, elsewhere / "rows.parquet")).text


async def test_a_link_that_is_added_opens_what_it_leads_to(
    client: httpx.AsyncClient, elsewhere: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(elsewhere)
    assert roots("add", tmp_path / "link").output.endswith(f"{elsewhere}\n")
    assert (await infer(client, tmp_path / "link" / "rows.parquet")).status_code == 200


async def test_other_tenants_have_their_own_roots(client: httpx.AsyncClient, elsewhere: Path) -> None:
    assert roots("add", elsewhere).exit_code == 0
    error = (await infer(client, elsewhere, **{"Evenkeel-Tenant": "ads"})).json()["errors"][0]
    assert "EVENKEEL_TENANT_DATA_ROOTS" in error["remedy"]


@pytest.mark.parametrize("what", ["mode", "link", "folder", "pipe"])
async def test_a_file_that_others_may_have_written_is_not_read(
    what: str, client: httpx.AsyncClient, elsewhere: Path, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    assert roots("add", elsewhere).exit_code == 0
    file = settings.home / added_roots.FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if what == "mode":
        file.chmod(0o622)
    else:
        file.rename(elsewhere / "list")
        {"link": lambda: file.symlink_to(elsewhere / "list"), "folder": file.mkdir, "pipe": lambda: os.mkfifo(file)}[
            what
        ]()
    with caplog.at_level(logging.WARNING, "evenkeel"):
        assert (await infer(client, elsewhere)).status_code == 422
    assert f"{file} is not read" in caplog.text


async def test_the_own_files_of_the_service_are_no_root(
    settings: Settings, dataset_body: dict[str, Any], elsewhere: Path
) -> None:
    async with running(settings) as app, client_of(app, settings.admin_key_file.read_text().strip()) as client:
        chosen = settings.home / "chosen"
        chosen.mkdir()
        shutil.copy(dataset_body["uri"], chosen / "rows.parquet")
        assert "cannot be a data root" in refused(roots("add", chosen)).message
        added_roots.write(settings.home, (chosen, settings.home, elsewhere))
        assert (await infer(client, chosen)).status_code == 422
        assert (await infer(client, elsewhere)).status_code == 200


async def test_nobody_adds_a_root_over_the_network(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert not [path for path in paths if "roots" in path]


async def test_folders_and_homes_that_are_not_there(
    elsewhere: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENKEEL_HOME", str(settings.home / "not-there"))
    error = refused(roots("add", elsewhere))
    assert ("there is no such home" in error.message, error.code) == (True, 2)
    monkeypatch.setenv("EVENKEEL_HOME", str(settings.home))
    settings.home.mkdir(exist_ok=True)
    for missing in (elsewhere / "missing", elsewhere / "rows.parquet"):
        error = refused(roots("add", missing))
        assert ("no such folder" in error.message, error.code) == (True, 2)
    assert roots("add", elsewhere).exit_code == 0
    assert [check.level for check in check_locations() if check.name == "data"] == ["ok"]
    shutil.rmtree(elsewhere)
    (check,) = (check for check in check_locations() if check.name == "data")
    assert (check.level, "roots remove" in check.remedy) == ("fail", True)
    assert roots("remove", elsewhere).exit_code == 0
    assert str(elsewhere) not in roots("list").output
