"""A full disk under EVENKEEL_HOME: a clear 503, nothing half-written, and on it goes once there is room."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_kit import client_of, running
from sqlalchemy.exc import SQLAlchemyError

from service import app
from service.settings import Settings

pytestmark = pytest.mark.anyio


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
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


async def test_a_full_disk(settings: Settings, small_disk: Path, dataset_body: dict[str, Any]) -> None:
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
            assert (await client.get("/readyz")).json()["errors"][0]["field"] == "disk"
            assert (await client.get("/v1/datasets/second")).status_code == 404
            assert (await client.get("/v1/datasets/ratings")).status_code == 200
            ballast.unlink()
            assert (await client.post("/v1/datasets", json={**dataset_body, "name": "second"})).status_code == 201


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
