"""A full disk under EVENKEEL_HOME: a clear 503, nothing half-written, and on it goes once there is room. A disk that is
mounted read-only: the same, and the remedy is another."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import SQLAlchemyError

from service import app
from service.core import disk
from service.core.settings import Settings
from service.identity import audit
from service.jobs import run_events
from tests.service import published
from tests.service.service_kit import client_of, job_body, running, until, wait_for
from tests.service.small_run import SmallRuns

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted: {done.stderr.strip()}")
    yield folder
    # A store maps its files: the disk is gone once nobody looks at them.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


async def test_a_full_disk(
    settings: Settings, small_disk: Path, dataset_body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    home = small_disk / "home"
    settings = dataclasses.replace(settings, home=home, database_url=f"sqlite+aiosqlite:///{home / 'evenkeel.db'}")
    async with running(settings) as service:
        async with client_of(service, settings.admin_key_file.read_text().strip()) as client:
            assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
            ballast = small_disk / "ballast"
            with pytest.raises(OSError, match="No space"):
                fill(ballast)
            refused = await client.post("/v1/datasets", json={**dataset_body, "name": "second"})
            assert refused.status_code == 503
            assert "full" in refused.json()["detail"]
            assert refused.headers["retry-after"] == "5"
            # That it was asked for is said where it still can be.
            lost = [line for line in caplog.messages if "entry lost" in line]
            assert len(lost) == 1
            assert '"action": "POST /v1/datasets"' in lost[0]
            assert '"status": 503' in lost[0]
            assert (home / audit.FILE_NAME).read_bytes() == b""
            assert (await client.get("/readyz")).json()["errors"][0]["field"] == "disk"
            assert (await client.get("/v1/datasets/second")).status_code == 404
            assert (await client.get("/v1/datasets/ratings")).status_code == 200
            ballast.unlink()
            assert (await client.post("/v1/datasets", json={**dataset_body, "name": "second"})).status_code == 201


async def test_a_full_store(settings: Settings, small_disk: Path, dataset_body: dict[str, Any]) -> None:
    """What is served is served; what writes to the store is told 507, and takes effect once there is room."""
    settings = dataclasses.replace(settings, store_url=str(small_disk / "store"))
    first, _ = published.publish(settings)
    second, _ = published.publish(settings, seed=2)
    async with running(settings) as service:
        async with client_of(service, settings.admin_key_file.read_text().strip()) as client:
            ballast = small_disk / "ballast"
            with pytest.raises(OSError, match="No space"):
                fill(ballast)
            metrics = (await client.get("/metrics")).text
            assert 'evenkeel_disk_free_bytes{disk="store"} 0.0' in metrics
            assert 'evenkeel_disk_bytes{disk="store"} 2.097152e+06' in metrics
            promote = f"/v1/collections/items/versions/{first}/promote"
            writes = {
                promote: {"reason": "back"},
                "/v1/views": {"name": "raw", "collection": "items", "kind": "identity"},
            }
            for path, body in writes.items():
                refused = await client.post(path, json=body)
                assert (refused.status_code, refused.json()["type"]) == (507, "urn:evenkeel:store-full"), path
            current = "/v1/collections/items/versions/current"
            assert (await client.get(current)).json()["version"] == second
            assert (await client.post("/v1/collections/items/vectors", json={"ids": [10]})).status_code == 200
            ballast.unlink()
            assert (await client.post(promote, json=writes[promote])).status_code == 200
            assert (await client.get(current)).json()["version"] == first


def mount_again(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


async def test_a_read_only_store(settings: Settings, small_disk: Path) -> None:
    settings = dataclasses.replace(settings, store_url=str(small_disk / "store"))
    first, _ = published.publish(settings)
    second, _ = published.publish(settings, seed=2)
    async with running(settings) as service:
        async with client_of(service, settings.admin_key_file.read_text().strip()) as client:
            mount_again(small_disk, "ro")
            promote = f"/v1/collections/items/versions/{first}/promote"
            writes = {
                promote: {"reason": "back"},
                "/v1/views": {"name": "raw", "collection": "items", "kind": "identity"},
                "/v1/collections/items/erase": {"ids": [10], "reason": "asked to"},
            }
            for path, body in writes.items():
                refused = await client.post(path, json=body)
                assert (refused.status_code, refused.json()["type"]) == (503, "urn:evenkeel:store-unavailable"), path
                assert "Read-only file system: nothing was published" in refused.json()["detail"]
            current = "/v1/collections/items/versions/current"
            assert (await client.get(current)).json()["version"] == second
            assert (await client.post("/v1/collections/items/vectors", json={"ids": [10]})).status_code == 200
            mount_again(small_disk, "rw")
            for path, body in writes.items():
                assert (await client.post(path, json=body)).is_success, path
            assert (await client.get(current)).json()["version"] == first


def test_starting_on_a_read_only_disk_is_a_clear_error(small_disk: Path) -> None:
    home = small_disk / "home"
    settings = Settings(home=home, database_url=f"sqlite+aiosqlite:///{home / 'evenkeel.db'}", role="api")
    for begun in (False, True):
        mount_again(small_disk, "ro")
        reason = asyncio.run(app._reason_not_to_start(settings))
        assert reason is not None
        assert "mounted read-only: mount it writable" in reason or not begun
        assert "Read-only file system" in reason or begun
        assert "make room" not in reason
        mount_again(small_disk, "rw")
        asyncio.run(app._try_start(settings))
    mount_again(small_disk, "ro")
    assert disk.space(settings).level == "full"
    assert "mount it writable" in str(disk.shortage(settings))
    mount_again(small_disk, "rw")


async def test_runs_are_held_before_the_disk_is_full(
    settings: Settings, runs: SmallRuns, dataset_body: dict[str, Any]
) -> None:
    """Low: it is said. Below the reserve: a job waits, with the reason, and starts by itself once there is room."""
    free = shutil.disk_usage(settings.data_roots[0]).free
    settings = dataclasses.replace(settings, role="all", disk_warn_bytes=4 * free)
    low, reserved = (
        dataclasses.replace(settings, disk_reserve_bytes=reserve)
        for reserve in (0, 2 * free)  # nothing is written to bring it about: the disk stays what it is
    )
    async with running(reserved, executor=runs) as service:
        async with client_of(service, settings.admin_key_file.read_text().strip()) as client:
            assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
            job = (await client.post("/v1/jobs", json=job_body())).json()["id"]

            async def held() -> Any:
                shown = (await client.get(f"/v1/jobs/{job}")).json()
                return shown["reason"] if "EVENKEEL_DISK_RESERVE_BYTES" in (shown["reason"] or "") else None

            assert "make room" in await until(held)
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
            assert "no run is started" in ready.json()["checks"]["disk"]
            assert runs.launched == []
    async with running(low, executor=runs) as service:
        async with client_of(service, settings.admin_key_file.read_text().strip()) as client:
            await wait_for(client, job, "succeeded")
            ready = (await client.get("/readyz")).json()
            assert ready["status"] == "ok"
            assert "make room, because no run is started below" in ready["checks"]["disk"]
            metrics = (await client.get("/metrics")).text
            assert "evenkeel_disk_free_bytes" in metrics


def test_a_run_that_could_not_write_its_error_is_told_of_the_full_disk(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    run_dir.mkdir()
    with pytest.raises(OSError, match="No space"):
        fill(small_disk / "ballast")
    error = run_events.unreported(run_dir, None, None)
    assert (error["code"], "0 bytes are free" in error["message"]) == ("disk_full", True)
    assert "free space" in error["remedy"]


def test_starting_on_a_full_disk_is_a_clear_error(small_disk: Path) -> None:
    """With so much room that the database, its log or the key is what does not fit; and no room at all."""
    settings = Settings(home=small_disk / "home", role="api")
    ballast = small_disk / "ballast"
    failed = 0
    for free_bytes in (8_000, 60_000, 100_000, 140_000, 160_000, 170_000, 180_000):
        ballast.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - free_bytes))
        try:
            asyncio.run(app._try_start(settings))
        except (OSError, SQLAlchemyError) as error:
            failed += 1
            said = app._why_not(settings, error)
            assert f"bytes are free under {settings.home}, make room" in said
            assert "\n" not in said
            assert not settings.admin_key_file.exists()
        # Nothing half-written stands in the way once there is room.
        ballast.unlink()
        asyncio.run(app._try_start(settings))
        assert settings.admin_key_file.read_text().startswith("ek_")
        shutil.rmtree(settings.home)
    assert failed >= 4
