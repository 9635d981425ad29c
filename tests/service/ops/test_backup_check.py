"""The restore drill of docs/guides/reliability.md: database and store of different moments, either one the older."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from service.client import Client
from service.core import tables
from service.core.settings import Settings
from service.ops import doctor
from service.ops.backup_check import OutOfStep, out_of_step
from tests.service import published, serving
from tests.service.service_kit import BOTH, client_of, job_body, running, until, wait_for
from tests.service.small_run import SmallRuns

pytestmark = [pytest.mark.anyio, pytest.mark.slow, BOTH]

PUBLISH = {"collection": "items", "feature": "item"}


class Backups:
    """Of the test's database, as the page says, by name."""

    def __init__(self, settings: Settings, folder: Path):
        self._url = make_url(settings.database_url)
        self._folder = folder

    def make(self, name: str) -> None:
        if self._url.get_backend_name() == "sqlite":
            self._copy(Path(str(self._url.database)), self._folder / name)
        else:
            self._call("pg_dump", "-Fc", "-n", self._schema, "-f", str(self._folder / name))

    def restore(self, name: str) -> None:
        if self._url.get_backend_name() != "sqlite":
            self._call("psql", "-q", "-c", f'DROP SCHEMA "{self._schema}" CASCADE')
            self._call("pg_restore", "--exit-on-error", str(self._folder / name))
            return
        database = Path(str(self._url.database))
        for file in (database.name, f"{database.name}-wal", f"{database.name}-shm"):
            database.with_name(file).unlink(missing_ok=True)
        self._copy(self._folder / name, database)

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        """SQLite's own backup, whole also while it is written to."""
        with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(target)) as new:
            old.backup(new)

    @property
    def _schema(self) -> str:
        return str(self._url.query["search_path"])

    def _call(self, program: str, *arguments: str) -> None:
        """The program of the newest PostgreSQL here: it reads what servers of its own version and older have."""
        places = [Path(found).resolve().parent for found in [shutil.which("pg_config")] if found]
        places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
        binary = next((str(place / program) for place in places if (place / program).exists()), program)
        url = self._url.set(drivername="postgresql").difference_update_query(["search_path"])
        connection = ("-d", url.render_as_string(hide_password=False))
        subprocess.run([binary, *connection, *arguments], check=True, timeout=120)


@pytest.fixture
def backups(settings: Settings, tmp_path: Path) -> Backups:
    folder = tmp_path / "backups"
    folder.mkdir()
    return Backups(settings, folder)


def told(settings: Settings, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, OutOfStep], str]:
    """What is out of step, by name, and which version is served, asked of a service that is up again."""
    url = {"EVENKEEL_DATABASE_URL": settings.database_url}
    with serving.serving(directory, "api", **url) as served, Client(served.url, served.key) as client:
        found = {one.name: one for one in out_of_step(client, served.home / "runs")}
        current = client.version("items")["version"]
        monkeypatch.setenv("EVENKEEL_URL", served.url)
        monkeypatch.setenv("EVENKEEL_HOME", str(served.home))
        warned = {check.name: check.message for check in doctor.check_service() if check.level == "warn"}
    assert warned == {name: one.message for name, one in found.items()}
    return found, current


async def publish(app: Any, client: Any, settings: Settings) -> str:
    """A job that has run and says that it published; and the version, as a real run would write it."""
    job = (await client.post("/v1/jobs", json=job_body(publish=PUBLISH))).json()["id"]
    done = await wait_for(client, job, "succeeded")
    version, _ = published.publish(settings, job=job)
    async with app.state.database.write() as connection:
        publication = {**done["publication"], "version": version}
        changed = tables.job.update().where(tables.job.c.id == job).values(publication=publication)
        await connection.execute(changed)
    return str(job)


async def erase(client: Any, item: int) -> None:
    body = {"ids": [item], "reason": "asked to"}
    (await client.post("/v1/collections/items/erase", json=body)).raise_for_status()


async def test_a_database_and_a_store_of_different_moments(
    settings: Settings,
    runs: SmallRuns,
    dataset_body: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backups: Backups,
) -> None:
    settings = dataclasses.replace(settings, role="all", max_runs=2)
    store, earlier_store = Path(settings.store_url), tmp_path / "store"
    async with running(settings, executor=runs) as app:
        key = settings.admin_key_file.read_text().strip()
        async with client_of(app, key) as client:
            assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
            first = await publish(app, client, settings)
            under_way = (await client.post("/v1/jobs", json=job_body("told"))).json()["id"]

            async def progressed() -> Any:
                return (await client.get(f"/v1/jobs/{under_way}")).json()["progress"]

            await until(progressed)
            backups.make("earlier")
            await erase(client, 7001)  # no run has it, so that the next may publish
            shutil.copytree(store, earlier_store)
            # What the backups do not know: a run's end, a job, its version.
            (settings.run_dir(under_way) / "finish").touch()
            whole = await wait_for(client, under_way, "succeeded")
            second = await publish(app, client, settings)
            await erase(client, 7002)
            async with app.state.database.write() as connection:
                # As an upgrade does: a table that stayed would end the next one.
                await connection.execute(sa.text("CREATE TABLE of_a_later_version (id integer)"))
    backups.make("later")
    num_launched = len(runs.launched)

    # The older database beside the newer store and runs.
    backups.restore("earlier")
    async with running(settings, executor=runs) as app, client_of(app, key) as client:
        async with app.state.database.read() as connection:
            names = await connection.run_sync(lambda one: sa.inspect(one).get_table_names())
        assert "job" in names
        assert "of_a_later_version" not in names
        found = await wait_for(client, under_way, "succeeded")
        kept = ("attempt", "metrics", "progress", "publication")
        assert {name: found[name] for name in kept} == {name: whole[name] for name in kept}
        assert (await client.get(f"/v1/jobs/{second}")).status_code == 404
        assert len(runs.launched) == num_launched, "nothing ran twice"
    out, served = told(settings, tmp_path, monkeypatch)
    assert set(out) == {"database", "runs"}
    assert f"items v000002 by {second}" in out["database"].message
    assert first not in out["database"].message
    assert second in out["runs"].message
    assert under_way not in out["runs"].message
    assert served == "v000002", "what is published is served, whatever the database knows"

    # The older store beside the newer database.
    backups.restore("later")
    shutil.rmtree(store)
    shutil.copytree(earlier_store, store)
    out, served = told(settings, tmp_path, monkeypatch)
    assert set(out) == {"store", "erasures"}
    assert f"items v000002 by {second}" in out["store"].message
    assert out["erasures"].message.count("items at ") == 1, "the one that the older store has not"
    assert served == "v000001"

    # Both of one moment again.
    backups.restore("earlier")
    shutil.rmtree(settings.run_dir(second))
    assert told(settings, tmp_path, monkeypatch)[0] == {}


async def test_what_another_tenant_has_is_not_out_of_step(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = (("ads", settings.data_roots[0]),)
    settings = dataclasses.replace(settings, role="all", max_runs=2, tenant_data_roots=roots)
    async with running(settings, executor=runs) as app:
        operator = settings.admin_key_file.read_text().strip()
        async with client_of(app, operator) as client:

            async def key(scope: str) -> str:
                body = {"name": "theirs", "scopes": [scope]}
                made = await client.post("/v1/keys", json=body, headers={"Evenkeel-Tenant": "ads"})
                return str(made.raise_for_status().json()["key"])

            theirs = {scope: await key(scope) for scope in ("admin", "jobs:read")}
            (await client.post("/v1/datasets", json=dataset_body)).raise_for_status()
            await publish(app, client, settings)
        async with client_of(app, theirs["admin"]) as client:
            (await client.post("/v1/datasets", json=dataset_body)).raise_for_status()
            for _ in range(2):  # a version more than the other tenant's collection of this name has
                await publish(app, client, settings.for_tenant("ads"))
    with serving.serving(tmp_path, "api", EVENKEEL_DATABASE_URL=settings.database_url) as served:
        for one in (operator, theirs["admin"]):
            with Client(served.url, one) as asking:
                assert [version["version"] for version in asking.versions("items")][-1] == "v000001"
                assert list(out_of_step(asking, served.home / "runs")) == []
        monkeypatch.setenv("EVENKEEL_URL", served.url)
        monkeypatch.setenv("EVENKEEL_API_KEY", theirs["jobs:read"])
        (warned,) = (check for check in doctor.check_service() if check.level == "warn")
    assert "could not check" in warned.message, "a key that may not look ends no other check"


async def test_a_job_that_was_queued_when_the_backup_was_made_and_has_run_since_does_not_run_again(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any], backups: Backups
) -> None:
    async with running(settings) as app:
        key = settings.admin_key_file.read_text().strip()
        async with client_of(app, key) as client:
            assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
            job = (await client.post("/v1/jobs", json=job_body(publish=PUBLISH))).json()["id"]
    backups.make("before")
    settings = dataclasses.replace(settings, role="all")
    async with running(settings, executor=runs) as app, client_of(app, key) as client:
        whole = await wait_for(client, job, "succeeded")
    backups.restore("before")
    async with running(settings, executor=runs) as app, client_of(app, key) as client:
        found = await wait_for(client, job, "succeeded")
        async with app.state.database.read() as connection:
            assert await connection.scalar(sa.select(sa.func.count()).select_from(tables.job)) == 1
    assert len(runs.launched) == 1
    assert (found["attempt"], found["metrics"]) == (whole["attempt"], whole["metrics"])
