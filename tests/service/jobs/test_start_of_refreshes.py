"""What a refresh starts from once versions were held: what is served, or the newest held rows that are sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from embeddings.store import Collection, StoreUnavailable
from service.core.errors import Problem
from service.core.settings import Settings
from service.jobs.submission import Lineage, lineage
from tests.service import published
from tests.service.service_kit import job_body, wait_for
from trainer.spec import JobSpec, parse_job

PUBLISH = {"collection": "items", "feature": "item"}


def refresh(held: str | None = "go_on", **fields: Any) -> JobSpec:
    start = {"collection": "items", **({} if held is None else {"held": held})}
    return parse_job(job_body(init_from=start, publish=PUBLISH, **fields))


@pytest.fixture
def collection(settings: Settings) -> Collection:
    return published.store_at(settings).collection("items")


def hold(collection: Collection, job: str, *, sound: bool, parent: str | None = "current") -> str:
    parent = collection.current() if parent == "current" else parent
    ids = list(range(10, 510, 10))
    version = published.write(
        collection, ids, published.directions(50, 9), job=job, parent=parent, extra={"sound": sound}
    )
    collection.hold(version, ["it moved"])
    return version


def ran(settings: Settings, job: str) -> Path:
    checkpoints = settings.run_dir(job) / "checkpoints"
    checkpoints.mkdir(parents=True)
    return checkpoints


def start(settings: Settings, job: JobSpec) -> Lineage:
    return lineage(settings, published.store_at(settings), job)


def test_only_sound_rows_are_gone_on_from_unless_a_job_skips_them(settings: Settings, collection: Collection) -> None:
    served, _ = published.publish(settings, job="job-1")
    at_first = Lineage(served, ran(settings, "job-1"), None)
    assert start(settings, refresh()) == at_first
    version = hold(collection, "job-2", sound=True)
    after = Lineage(served, ran(settings, "job-2"), version)
    assert start(settings, refresh()) == after
    # A fault does not hand itself on, and does not hide what was sound before it.
    hold(collection, "job-3", sound=False)
    ran(settings, "job-3")
    assert start(settings, refresh()) == after
    assert start(settings, refresh(None)) == after
    assert start(settings, refresh("skip")) == at_first
    # A job that publishes elsewhere, or nothing, starts from what is served.
    reads = parse_job(job_body(init_from={"collection": "items"}))
    elsewhere = parse_job(job_body(init_from={"collection": "items"}, publish={**PUBLISH, "collection": "films"}))
    for job in (reads, elsewhere):
        found = start(settings, job)
        assert (found.init_checkpoint, found.start_version) == (at_first.init_checkpoint, None)
    # Something new is served: what was held under the old one is of the past.
    newest, _ = published.publish(settings, job="job-4", seed=4)
    last = ran(settings, "job-4")
    assert start(settings, refresh()) == Lineage(newest, last, None)


def test_what_rests_on_another_version_or_has_no_checkpoints_is_not_gone_on_from(
    settings: Settings, collection: Collection
) -> None:
    served, _ = published.publish(settings, job="job-1")
    at_first = Lineage(served, ran(settings, "job-1"), None)
    hold(collection, "job-2", sound=True)  # its run directory is gone
    assert start(settings, refresh()) == at_first
    newest, _ = published.publish(settings, job="job-3", seed=3)
    hold(collection, "job-2", sound=True, parent=served)
    ran(settings, "job-2")
    last = ran(settings, "job-3")
    assert start(settings, refresh()) == Lineage(newest, last, None)


def test_a_store_that_is_away_is_told_from_a_version_that_is_not_there(
    settings: Settings, collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish(settings, job="job-1")
    job = parse_job(job_body(init_from={"collection": "items"}))

    def away(self: Collection, version: str = "current") -> dict[str, Any]:
        raise StoreUnavailable("redis://store: Redis cannot be reached")

    monkeypatch.setattr(Collection, "manifest", away)
    with pytest.raises(StoreUnavailable):
        start(settings, job)
    monkeypatch.undo()
    with pytest.raises(Problem, match="has no version 'v000099'"):
        start(settings, parse_job(job_body(init_from={"collection": "items", "version": "v000099"})))


@pytest.mark.anyio
async def test_an_attempt_that_is_repeated_starts_where_the_first_did(
    service: httpx.AsyncClient, settings: Settings, collection: Collection
) -> None:
    """What it has trained rests on that; a version that was held meanwhile is not what its rows are of."""
    published.publish(settings, job="job-1")
    ran(settings, "job-1")
    first = hold(collection, "job-2", sound=True)
    ran(settings, "job-2")
    body = job_body("fail", init_from={"collection": "items", "held": "go_on"}, publish=PUBLISH)
    job = (await service.post("/v1/jobs", json=body)).raise_for_status().json()
    await wait_for(service, job["id"], "failed")
    run = settings.run_dir(job["id"]) / "run.json"
    assert json.loads(run.read_text())["start_version"] == first
    hold(collection, "job-3", sound=True)
    ran(settings, "job-3")
    assert (await service.post(f"/v1/jobs/{job['id']}/retry")).status_code == 202
    await wait_for(service, job["id"], "failed")
    again = json.loads(run.read_text())
    assert (again["attempt"], again["start_version"]) == (2, first)
    assert again["init_checkpoint"] == str(settings.run_dir("job-2") / "checkpoints")
