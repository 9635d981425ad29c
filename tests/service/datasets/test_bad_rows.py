"""Rows that cannot be trained on, through the whole service and the real trainer: the job says where and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.core.settings import Settings
from tests.service.forked_service import warm_pool_of_tests
from tests.service.service_kit import client_of, running, until
from tests.support import forked
from trainer.runs import run_process, warm_pool

pytestmark = pytest.mark.anyio

START_SECONDS = 400.0


@pytest.fixture
async def service(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """With the trainer's own launcher: the run's data are prepared before any rank or Ray is started."""
    monkeypatch.setattr(warm_pool, "start_process", warm_pool_of_tests)
    forked.ensure_running()  # it ends with the tests, not with the service
    before = psutil.Process().children()
    async with running(dataclasses.replace(settings, role="all")) as app:
        async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
            yield client
            for run in settings.runs.glob("job_*"):
                run_process.terminate(run, 5)
    new = [child for child in psutil.Process().children() if child not in before]
    # A run that ended is reaped when it is next looked for, and nobody looks any more.
    left = [child for child in new if child.status() != psutil.STATUS_ZOMBIE]
    assert left == [], "what its runs were forked from ends with the service"


def write(path: Path, click: np.ndarray) -> Path:
    rows = np.arange(len(click))
    table = pa.table({"user": rows % 50, "item": rows % 40, "click": click})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    return path


async def failed_job(client: httpx.AsyncClient, path: Path, spoil: Any = None) -> dict[str, Any]:
    """Registers the file, ``spoil``s it, and runs a job to its failure."""
    dataset = {
        "name": "clicks", "uri": str(path), "features": {"user": {}, "item": {}}, "label": {"column": "click"},
    }  # fmt: skip
    (await client.post("/v1/datasets", json=dataset)).raise_for_status()
    body = {
        "name": "bad", "dataset": {"name": "clicks"}, "model": {"kind": "two_tower"}, "retries": 2,
        "publish": {"collection": "items", "feature": "item"},
    }  # fmt: skip
    job = (await client.post("/v1/jobs", json=body)).raise_for_status().json()
    if spoil is not None:
        spoil()

    async def ended() -> Any:
        shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
        return shown if shown["state"] in ("succeeded", "failed", "cancelled") else None

    return dict(await until(ended, START_SECONDS))


@pytest.mark.parametrize("what", ["NaN label", "damaged Parquet"])
async def test_bad_rows_fail_the_job_once_with_place_and_remedy(
    service: httpx.AsyncClient, settings: Settings, what: str
) -> None:
    click = (np.arange(5000) % 2).astype(np.float64)
    if what == "NaN label":
        click[4321] = np.nan
    path = write(settings.data_roots[0] / "clicks.parquet", click)
    if what == "damaged Parquet":
        raw = bytearray(path.read_bytes())
        # Page headers and values; the footer, which is read at submission, stays whole.
        raw[4:2000] = b"\xff" * 1996
        path.write_bytes(raw)
    job = await failed_job(service, path)
    assert job["state"] == "failed"
    assert job["error"]["code"] == "bad_data"
    assert "clicks.parquet" in job["error"]["message"]
    assert ("row 4321" if what == "NaN label" else "cannot be read as Parquet") in job["error"]["message"]
    assert job["error"]["remedy"]
    assert job["attempt"] == 1, "trying again would find the same rows"
    assert job["publication"] is None
    directory = settings.run_dir(job["id"])
    assert not (directory / "data").exists()
    assert not (directory / "checkpoints").exists()
    assert (await service.get("/v1/collections")).json()["items"] == []
    assert job["error"]["message"] in (await service.get(f"/v1/jobs/{job['id']}/logs")).text


async def test_a_file_cut_short_after_it_was_registered(service: httpx.AsyncClient, settings: Settings) -> None:
    """A job that waits behind another is started later than it was checked."""
    path = write(settings.data_roots[0] / "clicks.parquet", np.arange(5000) % 2)
    job = await failed_job(service, path, lambda: path.write_bytes(path.read_bytes()[:-1000]))
    assert (job["state"], job["attempt"]) == ("failed", 1)
    assert "clicks.parquet" in job["error"]["message"]
    assert "truncated" in job["error"]["remedy"]
