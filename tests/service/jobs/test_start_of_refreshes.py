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
from trainer.runs.directory import write_run
from trainer.spec import JobSpec, parse_dataset, parse_job

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
    first = ran(settings, "job-1")
    at_first = Lineage(served, first, None, first)
    assert start(settings, refresh()) == at_first
    version = hold(collection, "job-2", sound=True)
    # What it is compared with is what is served, whatever it goes on from.
    after = Lineage(served, ran(settings, "job-2"), version, first)
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
    assert start(settings, refresh()) == Lineage(newest, last, None, last)


def test_a_version_that_evenkeel_train_published_is_gone_on_from(settings: Settings, collection: Collection) -> None:
    """The folder of such a run lacks the random end of its id; a folder of that name of another run is none of it."""
    served, _ = published.publish(settings, job="daily-1-0a1b2c3d")
    checkpoints = ran(settings, "daily-1")
    (checkpoints.parent / "run.json").write_text('{"run_id": "daily-1-ffffffff"}')
    with pytest.raises(Problem) as refused:
        start(settings, refresh())
    assert "the checkpoints of job daily-1-0a1b2c3d no longer exist" in refused.value.errors[0]["message"]
    (checkpoints.parent / "run.json").write_text('{"run_id": "daily-1-0a1b2c3d"}')
    assert start(settings, refresh()) == Lineage(served, checkpoints, None, checkpoints)


def test_what_rests_on_another_version_or_has_no_checkpoints_is_not_gone_on_from(
    settings: Settings, collection: Collection
) -> None:
    served, _ = published.publish(settings, job="job-1")
    first = ran(settings, "job-1")
    at_first = Lineage(served, first, None, first)
    hold(collection, "job-2", sound=True)  # its run directory is gone
    assert start(settings, refresh()) == at_first
    newest, _ = published.publish(settings, job="job-3", seed=3)
    hold(collection, "job-2", sound=True, parent=served)
    ran(settings, "job-2")
    last = ran(settings, "job-3")
    assert start(settings, refresh()) == Lineage(newest, last, None, last)


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


def test_what_a_job_without_a_start_is_compared_with(settings: Settings, collection: Collection) -> None:
    served, _ = published.publish(settings, job="job-1")
    anew = parse_job(job_body(publish=PUBLISH))
    assert start(settings, anew) == Lineage(served, None)  # its run directory is gone
    assert start(settings, anew.model_copy(update={"publish": None})) == Lineage(None, None)
    first = ran(settings, "job-1")
    assert start(settings, anew) == Lineage(served, None, None, first)
    assert start(settings, parse_job(job_body(publish=PUBLISH | {"gate": {"mode": "off"}}))) == Lineage(served, None)


@pytest.mark.anyio
async def test_features_that_do_not_go_on_are_refused_before_the_run(
    service: httpx.AsyncClient, settings: Settings, collection: Collection, dataset_body: dict[str, Any]
) -> None:
    """By a dry run and a submission, against the run of the version that is served then."""
    published.publish(settings, job="job-1")
    ran(settings, "job-1")
    features = dataset_body["features"] | {"genre": {"type": "id", "column": "item"}}
    write_run(
        settings.run_dir("job-1"), run_id="job-1", job=parse_job(job_body()), store_url=settings.store_url,
        dataset=parse_dataset(dataset_body | {"features": features}),
    )  # fmt: skip
    body = job_body(init_from={"collection": "items"}, publish=PUBLISH)
    for route in ("/v1/jobs?dry_run=true", "/v1/jobs"):
        answer = await service.post(route, json=body)
        assert answer.status_code == 422, answer.text
        (problem,) = answer.json()["errors"]
        assert problem["field"] == "features.genre"
        assert "dropped: [genre]" in problem["remedy"]
    body["init_from"]["dropped"] = ["genre"]
    for sizes, field in (({"embedding_dim": 8}, "embedding_dim"), ({"hidden": [128, 64, 32]}, "hidden")):
        for route in ("/v1/jobs?dry_run=true", "/v1/jobs"):
            answer = await service.post(route, json=body | {"model": {"kind": "two_tower", **sizes}})
            assert answer.status_code == 422, answer.text
            assert answer.json()["errors"][0]["field"] == f"model.{field}"
    larger = {"kind": "two_tower", "embedding_dim": 24, "hidden": [128, 64, 64]}
    assert (await service.post("/v1/jobs?dry_run=true", json=body | {"model": larger})).status_code == 200
    assert (await service.post("/v1/jobs?dry_run=true", json=body)).status_code == 200
    assert (await service.post("/v1/jobs", json=body)).status_code == 202
