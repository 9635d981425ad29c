"""Jobs over HTTP, with nobody to run them: submission, idempotency, lists, cancel, retry, delete, report."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from service.core import tables
from service.identity import idempotency
from service.jobs import job_records
from tests.service.service_kit import BOTH, client_of, job_body, submit

pytestmark = [pytest.mark.anyio, BOTH]


async def end(app: FastAPI, job_id: str, *happenings: Any) -> None:
    async with app.state.database.write() as connection:
        for happening in happenings:
            await job_records.move(connection, await job_records.locked(connection, job_id), happening)


async def test_a_submitted_job_is_shown(client: httpx.AsyncClient, dataset: str) -> None:
    response = await client.post("/v1/jobs", json=job_body(labels={"team": "ads"}))
    assert response.status_code == 202
    job = response.json()
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (await client.get(response.headers["location"])).json() == job
    assert job["state"] == "queued"
    assert job["labels"]["team"] == "ads"
    assert job["metrics"] == []
    promised = {
        "id", "name", "state", "created_at", "started_at", "finished_at", "attempt", "progress", "metrics",
        "publication", "error",
    }  # fmt: skip
    assert promised <= set(job)
    created = datetime.datetime.fromisoformat(job["created_at"])
    assert created.utcoffset() == datetime.timedelta(0)


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"dataset": {"name": "unknown"}}, "dataset.name", "no dataset 'unknown'"),
        ({"sse": {"itm": {"probability": 0.1}}}, "sse.itm", "no such feature"),
        (
            {"model": {"kind": "item2vec"}, "regularizers": {"dropout": 0.1}},
            "regularizers.dropout",
            "not available yet",
        ),
        ({"epochs": 0}, "epochs", "greater than or equal to 1"),
        ({"optimiser": {}}, "optimiser", "no such field"),
        ({"dataset": {"name": "ratings", "window": {"start": "{firing_date}"}}}, "dataset.window.start", "schedules"),
        ({"dataset": {"name": "ratings", "window": {"start": "tomorrow"}}}, "dataset.window.start", "neither a date"),
        ({"init_from": {"job": "job_none"}}, "init_from.job", "no job 'job_none'"),
        ({"kernel": "import os"}, "kernel", "'evenkeel' or 'fbgemm'"),
        (
            {"tracking": [{"kind": "mlflow", "uri": "http://10.0.0.1"}]},
            "tracking.0.uri",
            "may not send to http://10.0.0.1",
        ),
        ({"labels": {f"label-{number}": "x" for number in range(65)}}, "labels", "a job may have at most 64"),
    ],
)
async def test_a_bad_job_is_refused(
    reading: httpx.AsyncClient, change: dict[str, Any], field: str, message: str
) -> None:
    response = await reading.post("/v1/jobs", json={**job_body(), **change})
    assert response.status_code == 422
    error = response.json()["errors"][0]
    assert error["field"] == field
    assert message in error["message"]
    assert (await reading.get("/v1/jobs")).json()["items"] == []


async def test_every_problem_of_a_job_has_its_field_and_remedy(client: httpx.AsyncClient, dataset: str) -> None:
    wrong = {"optimizer": {"kind": "adam", "weight_decay": 0.1}, "micro_batches": 9, "batch_size": 8}
    response = await client.post("/v1/jobs", json={**job_body(), **wrong})
    told = {error["field"]: (error["message"], error["remedy"]) for error in response.json()["errors"]}
    assert told["micro_batches"] == ("a batch of 8 cannot be cut into 9 parts", "use fewer")
    message, remedy = told["optimizer.weight_decay"]
    assert message == "adam has none"
    assert remedy.endswith("or leave it 0")
    scheduled = {"name": "daily", "cron": "0 3 * * *", "job": {**job_body(), **wrong}}
    response = await client.post("/v1/schedules", json=scheduled)
    assert {error["field"] for error in response.json()["errors"]} == {
        "job.micro_batches",
        "job.optimizer.weight_decay",
    }


async def test_what_does_not_fit_the_dataset_names_each_field(client: httpx.AsyncClient, dataset: str) -> None:
    response = await client.post("/v1/jobs", json={**job_body(), "sharding": {"shop": "row_wise"}, "tables": {"x": {}}})
    assert [error["field"] for error in response.json()["errors"]] == ["sharding.shop", "tables.x"]


async def test_a_dataset_whose_file_went_is_refused(client: httpx.AsyncClient, dataset: str, data_file: Any) -> None:
    data_file.unlink()
    response = await client.post("/v1/jobs", json=job_body())
    assert response.status_code == 422
    assert "no such file" in response.json()["detail"]


async def test_a_dry_run_predicts_and_makes_nothing(reading: httpx.AsyncClient) -> None:
    response = await reading.post("/v1/jobs", json=job_body(epochs=3, batch_size=2), params={"dry_run": "true"})
    assert response.status_code == 200, response.text
    assert response.json()["valid"] is True
    estimate = response.json()["estimate"]
    assert estimate["steps"] == 3 * estimate["steps_per_epoch"] > 0
    assert estimate["peak_memory_bytes"] > 0
    assert estimate["seconds_per_epoch"] >= 0
    bad = await reading.post("/v1/jobs", json=job_body(dataset={"name": "unknown"}), params={"dry_run": "true"})
    assert bad.status_code == 422
    assert (await reading.get("/v1/jobs")).json()["items"] == []


@pytest.mark.parametrize("dry_run", ["true", "false"])
async def test_what_no_rank_could_hold_is_refused(reading: httpx.AsyncClient, dry_run: str) -> None:
    """100 MB for a worker: less than the process alone. A dry run counts the rows as well."""
    body = job_body(resources={"memory_bytes_per_worker": 10**8})
    response = await reading.post("/v1/jobs", json=body, params={"dry_run": dry_run})
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["field"] == "resources"
    assert "resources.memory_bytes_per_worker is 100,000,000: " in error["message"]
    assert "+ process 943,718,400 = " in error["message"]
    assert ("table item: " in error["message"]) == (dry_run == "true")
    assert error["remedy"].startswith("allow more")
    assert (await reading.get("/v1/jobs")).json()["items"] == []


@pytest.mark.parametrize("dry_run", ["true", "false"])
async def test_what_no_gpu_of_this_machine_could_hold_is_refused(
    reading: httpx.AsyncClient, dry_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.sizing.gpus.machine_gpu_bytes", lambda: 10**6)
    body = job_body(resources={"gpus_per_worker": 1})
    response = await reading.post("/v1/jobs", json=body, params={"dry_run": dry_run})
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert "bytes of its GPU, which has 1,000,000: table " in error["message"]
    assert error["remedy"].startswith("a smaller batch_size")


# --- idempotency -----------------------------------------------------------------------------------------------------


async def test_the_same_key_and_body_is_the_same_job(client: httpx.AsyncClient, dataset: str) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = await client.post("/v1/jobs", json=job_body(), headers=headers)
    again = await client.post("/v1/jobs", json=job_body(), headers=headers)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["location"] == first.headers["location"]
    other = await client.post("/v1/jobs", json=job_body(epochs=2), headers=headers)
    assert other.status_code == 422
    assert "another body" in other.json()["detail"]
    fresh = await client.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k2"})
    assert fresh.json()["id"] != first.json()["id"]
    assert len((await client.get("/v1/jobs")).json()["items"]) == 2


async def test_many_at_once_make_one_job(client: httpx.AsyncClient, dataset: str) -> None:
    """Each is answered with the one job, or told that the first is in flight; repeated, all get the one job."""

    async def send() -> httpx.Response:
        while True:
            response = await client.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": "k"})
            if response.status_code != 409:
                return response
            assert response.json()["type"] == "urn:evenkeel:request-in-flight"
            await asyncio.sleep(0.02)

    answers = await asyncio.gather(*(send() for _ in range(12)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len((await client.get("/v1/jobs")).json()["items"]) == 1


async def test_a_refused_request_frees_its_key(client: httpx.AsyncClient, dataset: str) -> None:
    headers = {"Idempotency-Key": "k"}
    bad = job_body(dataset={"name": "unknown"})
    assert (await client.post("/v1/jobs", json=bad, headers=headers)).status_code == 422
    assert (await client.post("/v1/jobs", json=job_body(), headers=headers)).status_code == 202


async def test_keys_of_two_callers_do_not_meet(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, key_with: Any
) -> None:
    headers = {"Idempotency-Key": "k"}
    mine = await client.post("/v1/jobs", json=job_body(), headers=headers)
    async with client_of(app, await key_with("jobs:write", "jobs:read")) as other:
        theirs = await other.post("/v1/jobs", json=job_body(epochs=3), headers=headers)
    assert theirs.status_code == 202
    assert theirs.json()["id"] != mine.json()["id"]


async def test_reservations_in_flight_overtaken_and_old(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    database = app.state.database
    table = tables.idempotency

    async def age(by: datetime.timedelta) -> None:
        async with database.write() as connection:
            created = await connection.scalar(sa.select(table.c.created_at))
            await connection.execute(table.update().values(created_at=created - by))

    slow = await idempotency.reserve(database, "key", "k", "body")
    with pytest.raises(Exception, match="still in flight"):
        await idempotency.reserve(database, "key", "k", "body")
    await age(idempotency.IN_FLIGHT)
    quick = await idempotency.reserve(database, "key", "k", "body")
    job = await submit(client)
    async with database.write() as connection:
        await idempotency.complete(connection, quick, job_id=job["id"])
    with pytest.raises(Exception, match="took over"):
        async with database.write() as connection:
            await idempotency.complete(connection, slow, job_id="job_second")
    await idempotency.release(database, slow)
    assert await idempotency.reserve(database, "key", "k", "body") == idempotency.Done(job["id"], None)
    await age(idempotency.KEPT)
    assert isinstance(await idempotency.reserve(database, "key", "k", "another body"), idempotency.Reservation)


# --- lists -----------------------------------------------------------------------------------------------------------


async def test_lists_filter(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    one = await submit(client, labels={"team": "ads"})
    two = await submit(client, name="other", labels={"team": "feed"})
    await client.post(f"/v1/jobs/{one['id']}/cancel")

    async def ids(**parameters: str) -> list[str]:
        return [job["id"] for job in (await client.get("/v1/jobs", params=parameters)).json()["items"]]

    assert await ids() == [two["id"], one["id"]]
    assert await ids(state="cancelled") == [one["id"]]
    assert await ids(state="running") == []
    assert await ids(name="other") == [two["id"]]
    assert await ids(label="team=ads") == [one["id"]]
    assert await ids(label="team") == [two["id"], one["id"]]
    assert await ids(label="team=x' OR '1'='1") == []
    assert await ids(label="ads") == []


async def test_pages_are_stable_while_jobs_arrive(client: httpx.AsyncClient, dataset: str) -> None:
    made = []
    for _ in range(5):
        made.append((await submit(client))["id"])
        await asyncio.sleep(0.002)  # ids sort by millisecond
    found: list[str] = []
    cursor = None
    while True:
        page = (await client.get("/v1/jobs", params={"limit": 2} | ({"cursor": cursor} if cursor else {}))).json()
        found += [job["id"] for job in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        await submit(client)
    assert found == made[::-1]


# --- cancel, retry, delete -------------------------------------------------------------------------------------------


async def test_cancel_of_a_queued_job(client: httpx.AsyncClient, dataset: str) -> None:
    job = await submit(client)
    first = await client.post(f"/v1/jobs/{job['id']}/cancel")
    again = await client.post(f"/v1/jobs/{job['id']}/cancel")
    assert (first.status_code, first.json()["state"]) == (202, "cancelled")
    assert (again.status_code, again.json()["state"]) == (200, "cancelled")
    assert first.json()["finished_at"] is not None


@pytest.mark.parametrize("ending", ["succeeded", "failed"])
async def test_cancel_of_an_ended_job_is_409(
    app: FastAPI, client: httpx.AsyncClient, dataset: str, ending: str
) -> None:
    job = await submit(client)
    await end(app, job["id"], "claimed", "running", ending)
    response = await client.post(f"/v1/jobs/{job['id']}/cancel")
    assert response.status_code == 409
    assert ending in response.json()["detail"]


async def test_retry(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    job = await submit(client)
    path = f"/v1/jobs/{job['id']}/retry"
    assert (await client.post(path)).status_code == 409
    await end(app, job["id"], "claimed", "running", "failed")
    again = await client.post(path)
    assert (again.status_code, again.json()["state"]) == (202, "queued")
    assert again.json()["finished_at"] is None
    await end(app, job["id"], "claimed", "running", "succeeded")
    refused = await client.post(path)
    assert refused.status_code == 409
    assert "new job" in refused.json()["detail"]


KEPT = {
    "id", "tenant", "name", "spec", "dataset_spec", "schedule_id", "schedule", "created_at", "attempt", "attempts",
    "home_id", "lease", "released", "parent_version", "events_offset", "heartbeat_at", "progress", "needs", "lineage",
    "traceparent",
}  # fmt: skip
FORGOTTEN = {"reason", "started_at", "finished_at", "launched_at", "failures", "preparation", "publication", "error"}


async def test_a_retry_forgets_how_the_attempt_ended(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    """Each column of a job is either kept or forgotten: one that is added has to be listed here."""
    job = await submit(client)
    await end(app, job["id"], "claimed", "running", "failed")
    filled = {
        column.name: value
        for column in tables.job.c
        for kind, value in ((tables.UtcTime, tables.now()), (sa.JSON, {"a": 1}), (sa.Text, "reason"))
        if isinstance(column.type, kind) and column.name not in ("spec", "dataset_spec")
    }
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job["id"])
        await job_records.change(connection, row, failures=3, **filled)
        before = dict(row)
        after = await job_records.retry(connection, job["id"])
        assert after == await job_records.get(connection, job["id"])
    changed = {name for name, value in after.items() if value != before[name]}
    assert changed == FORGOTTEN | {"state", "not_before"}
    assert [after["failures"], *(after[name] for name in FORGOTTEN - {"failures"})] == [0, *[None] * 7]
    assert tables.job.c.keys() == [name for name in after if name in KEPT | changed]


async def test_delete(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    headers = {"Idempotency-Key": "k"}
    job = (await client.post("/v1/jobs", json=job_body(labels={"team": "a"}), headers=headers)).json()
    path = f"/v1/jobs/{job['id']}"
    assert (await client.delete(path)).status_code == 409
    await client.post(path + "/cancel")
    directory = app.state.settings.run_dir(job["id"])
    directory.mkdir()
    (directory / "log.txt").write_text("text")
    for released, status in ((False, 409), (True, 204)):  # not while a process of it may be left
        async with app.state.database.write() as connection:
            await connection.execute(tables.job.update().values(released=released))
        assert (await client.delete(path)).status_code == status
    assert (await client.get(path)).status_code == 404
    assert (await client.delete(path)).status_code == 404
    assert list(app.state.settings.runs.iterdir()) == []
    new = await client.post("/v1/jobs", json=job_body(labels={"team": "a"}), headers=headers)
    assert new.json()["id"] != job["id"]


async def test_unknown_jobs_are_404(client: httpx.AsyncClient) -> None:
    for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("POST", "/retry"), ("GET", "/logs"),
                         ("GET", "/events"), ("GET", "/report")]:  # fmt: skip
        assert (await client.request(method, f"/v1/jobs/job_none{path}")).status_code == 404


# --- report ----------------------------------------------------------------------------------------------------------


async def begun(app: FastAPI, client: httpx.AsyncClient) -> dict[str, Any]:
    """A job that has run and may have metrics."""
    job = await submit(client)
    async with app.state.database.write() as connection:
        await job_records.change(connection, await job_records.locked(connection, job["id"]), attempt=1)
    return job


async def test_report_as_json_and_html(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    job = await begun(app, client)
    async with app.state.database.write() as connection:
        for epoch, auc in [(1, 0.70), (2, 0.75), (3, 0.71)]:
            row = {"job_id": job["id"], "epoch": epoch, "split": "validation", "values": {"auc": auc}}
            await connection.execute(tables.job_metric.insert().values(row))
        row = await job_records.locked(connection, job["id"])
        publication = {"status": "held", "collection": "items", "version": "v000002", "reasons": ["<b>cosine</b>"]}
        moved = [{"what": "new_ids", "moved": True, "message": "0.4 of the examples have a new '<i>item'"}]
        lineage = {"drift": moved, "warnings": ["joins <i>none"]}
        await job_records.change(connection, row, publication=publication, lineage=lineage)
    path = f"/v1/jobs/{job['id']}/report"
    report = (await client.get(path)).json()
    assert report["best"]["epoch"] == 2
    assert report["last"]["epoch"] == 3
    assert "fell by 0.0400 from epoch 2 to epoch 3" in report["finding"]
    assert report["drift"] == moved
    assert report["warnings"] == ["joins <i>none"]
    page = await client.get(path, headers={"Accept": "text/html,application/xhtml+xml"})
    assert page.headers["content-type"].startswith("text/html")
    assert "0.75000" in page.text
    assert "&lt;b&gt;cosine&lt;/b&gt;" in page.text
    assert "<b>" not in page.text
    assert "<li>joins &lt;i&gt;none</li>" in page.text
    assert page.text.count("<svg") == 1


async def test_report_charts_what_models_that_rank_have(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    job = await begun(app, client)
    async with app.state.database.write() as connection:
        for epoch, ndcg in [(1, 0.31), (2, 0.42)]:
            values = {"auc": None, "ndcg_10": ndcg, "hit_rate_10": 2 * ndcg}
            row = {"job_id": job["id"], "epoch": epoch, "split": "test", "values": values}
            await connection.execute(tables.job_metric.insert().values(row))
    page = await client.get(f"/v1/jobs/{job['id']}/report", headers={"Accept": "text/html"})
    assert page.text.count("<svg") == 2  # there is no AUC to draw
    assert "test, epoch 2: NDCG@10 0.4200" in page.text
    assert "test, epoch 2: hit rate@10 0.8400" in page.text


async def test_report_draws_calibration_and_frequency_buckets(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    job = await begun(app, client)
    bins = [{"rows": 50.0, "prediction": 0.1, "share": 0.12}, {"rows": 50.0, "prediction": 0.4, "share": 0.3}]
    bucket = {"bucket": 1, "ids": 812, "min_count": 1, "max_count": 3, "norm": 0.125, "examples": 77, "auc": 0.6543}
    unseen = bucket | {"bucket": 0, "ids": 0, "norm": None, "auc": None}
    async with app.state.database.write() as connection:
        for epoch in (1, 2):
            values = {"auc": 0.7, "ece": 0.06, "calibration": bins, "frequency_buckets": [unseen, bucket]}
            row = {"job_id": job["id"], "epoch": epoch, "split": "test", "values": values}
            await connection.execute(tables.job_metric.insert().values(row))
    path = f"/v1/jobs/{job['id']}/report"
    assert (await client.get(path)).json()["metrics"][0]["calibration"] == bins
    page = (await client.get(path, headers={"Accept": "text/html"})).text
    assert page.count("<svg") == 2  # AUC, and calibration of the last epoch alone
    assert "predicted 0.4000, observed 0.3000" in page
    assert "Items by how often they were trained on, test, epoch 2" in page
    for figure in ("812", "0.12500", "0.65430", "77"):
        assert f'<td class="number">{figure}</td>' in page
    assert 'title="calibration"' not in page[page.index('id="h-epochs"') : page.index("</table>")]
    shown = (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert shown["metrics"][1]["frequency_buckets"][1]["auc"] == 0.6543


@pytest.mark.slow
async def test_report_of_real_valued_labels_is_of_their_rmse(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    job = await begun(app, client)
    async with app.state.database.write() as connection:
        for epoch, rmse in [(1, 0.95), (2, 0.87), (3, 0.91)]:
            row = {"job_id": job["id"], "epoch": epoch, "split": "validation", "values": {"rmse": rmse, "mae": 0.7}}
            await connection.execute(tables.job_metric.insert().values(row))
    path = f"/v1/jobs/{job['id']}/report"
    report = (await client.get(path)).json()
    assert (report["best"]["epoch"], report["last"]["epoch"]) == (2, 3)
    assert report["finding"] == "validation RMSE rose by 0.0400 from epoch 2 to epoch 3: it overfits"
    page = (await client.get(path, headers={"Accept": "text/html"})).text
    assert "validation, epoch 2: RMSE 0.8700" in page


async def test_report_shows_each_of_several_labels(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    job = await begun(app, client)
    bins = [{"rows": 50.0, "prediction": 0.1, "share": 0.12}, {"rows": 50.0, "prediction": 0.4, "share": 0.3}]
    bucket = {"bucket": 1, "ids": 9, "min_count": 1, "max_count": 3, "norm": 0.125, "examples": 77, "auc": 0.6}
    async with app.state.database.write() as connection:
        for epoch, auc in [(1, 0.70), (2, 0.75), (3, 0.71)]:
            values = {
                "auc/click": auc, "auc/buy": 0.9 - auc / 4, "rmse/visits": 2.0, "calibration/buy": bins,
                "frequency_buckets/buy": [bucket],
            }  # fmt: skip
            row = {"job_id": job["id"], "epoch": epoch, "split": "validation", "values": values}
            await connection.execute(tables.job_metric.insert().values(row))
    path = f"/v1/jobs/{job['id']}/report"
    report = (await client.get(path)).json()
    assert report["finding"].startswith("validation AUC of click fell by 0.0400 from epoch 2 to epoch 3")
    page = (await client.get(path, headers={"Accept": "text/html"})).text
    assert page.count("<svg") == 4  # two AUC, an RMSE, a calibration
    assert "validation, epoch 3: AUC of buy 0.7225" in page
    assert "Share of positives of buy by prediction, validation, epoch 3" in page
    assert "trained on, AUC of buy, validation, epoch 3" in page
    assert "calibration/buy" not in page
