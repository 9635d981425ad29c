"""The dashboard: what its pages say for what is in the database and the store, and to whom."""

from __future__ import annotations

import dataclasses
import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi import APIRouter

from embeddings.vectors.item_columns import ItemColumns
from service.api.routes import dashboard
from service.core import tables
from service.core.settings import Settings
from service.core.tables import now
from service.web import pages, rendering
from service.web.content import jobs
from service.web.pages import Page
from service.web.rendering import duration, figure, size, verdicts
from service.web.request import DashboardRequest
from tests.service import published
from tests.service.service_kit import job_body
from tests.service.web.seeded import job_spec

pytestmark = pytest.mark.anyio

ORIGIN = {"Origin": "http://127.0.0.1:8080"}


async def fill(app: Any, client: Any, settings: Settings) -> dict[str, str]:
    """A dataset, jobs in several states with metrics, a schedule, versions of which one is held. Job ids by name."""
    data = settings.data_roots[0] / "clicks.parquet"
    pq.write_table(pa.table({"user": [1, 2], "item": [3, 4], "click": [0, 1]}), data)
    dataset = {
        "name": "clicks", "uri": str(data), "features": {"user": {"type": "id"}, "item": {"type": "id"}},
        "label": {"column": "click"},
    }  # fmt: skip
    assert (await client.post("/v1/datasets", json=dataset)).status_code == 201
    ids = {}
    for name, optimizer in (
        ("adam", "adam"),
        ("adam-ar", "adam_ar"),
        ("nightly", "adam_ar"),
        ("broken", "adam_ar"),
        ("waiting", "sgd"),
    ):
        answer = await client.post("/v1/jobs", json=job_spec(name, optimizer))
        assert answer.status_code == 202, answer.text
        ids[name] = answer.json()["id"]
    version, _ = published.publish(settings)
    held = published.hold(settings)
    curves = {"adam": [0.741, 0.733, 0.712, 0.701], "adam-ar": [0.738, 0.749, 0.751, 0.7505], "nightly": [0.744, 0.748]}
    changes = {
        "adam": {"state": "succeeded", "progress": {"epoch": 4, "epochs": 4}},
        "adam-ar": {
            "state": "succeeded", "progress": {"epoch": 4, "epochs": 4},
            "publication": {"status": "published", "collection": "items", "version": version, "reasons": []},
        },
        "nightly": {
            "state": "running", "progress": {"epoch": 3, "epochs": 4, "step": 500, "examples_per_second": 123456.0},
        },
        "broken": {
            "state": "failed",
            "error": {"code": "bad-data", "message": "column 'click' holds <NaN>", "remedy": "clean it"},
            "publication": {
                "status": "held", "collection": "items", "version": held, "reasons": ["mean_cosine 0.10 is below 0.85"],
            },
        },
    }  # fmt: skip
    async with app.state.database.write() as connection:
        for name, values in changes.items():
            times = {"started_at": now()} | ({} if values["state"] == "running" else {"finished_at": now()})
            await connection.execute(tables.job.update().where(tables.job.c.id == ids[name]).values(**values, **times))
        metrics = [
            {
                "job_id": ids[name],
                "epoch": epoch,
                "split": split,
                "values": {"auc": auc - 0.001 * (split == "test"), "logloss": 0.5},
            }
            for name, curve in curves.items()
            for epoch, auc in enumerate(curve, 1)
            for split in ("validation", "test")
        ]
        await connection.execute(tables.job_metric.insert(), metrics)
        begun = tables.job.c.id.in_({one["job_id"] for one in metrics})
        await connection.execute(tables.job.update().where(begun).values(attempt=1))
    schedule = {"name": "every-night", "cron": "0 3 * * *", "timezone": "Europe/Berlin", "job": job_spec("nightly")}
    assert (await client.post("/v1/schedules", json=schedule)).status_code == 201
    paused = {"name": "stopped", "cron": "0 4 * * *", "job": job_spec("nightly"), "paused": True}
    assert (await client.post("/v1/schedules", json=paused)).status_code == 201
    return ids


class Text(HTMLParser):
    """What a page says, tags aside."""

    def __init__(self, html: str):
        super().__init__()
        self.said: list[str] = []
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    def __str__(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.said))


async def signed_in(stranger: Any, key: str) -> None:
    answer = await stranger.post("/session", json={"key": key}, headers=ORIGIN)
    assert answer.status_code == 204, answer.text


async def test_without_a_session_there_is_the_form_and_no_data(app, client, stranger, settings: Settings):
    ids = await fill(app, client, settings)
    for address in ("/", "/dashboard/jobs", f"/dashboard/jobs/{ids['adam']}", "/dashboard/access"):
        page = await stranger.get(address)
        assert page.status_code == 200
        assert 'id="login"' in page.text
        assert "adam-ar" not in page.text
    for path in ("content", "content/jobs", "parts/versions/items"):
        assert (await stranger.get(f"/dashboard/{path}")).status_code == 401


async def test_a_job_that_prepares_says_how_far_it_is(app, client, stranger, admin_key: str, settings: Settings):
    ids = await fill(app, client, settings)
    await signed_in(stranger, admin_key)
    prepared = {"stage": "read", "rows": 4_000_000, "total_rows": 20_000_000, "rows_per_second": 210_000.0}
    for figures, text in (
        (prepared, "reading 4,000,000 of 20,000,000 rows · 210,000 rows/s"),
        (prepared | {"stage": "write", "total_rows": None}, "writing 4,000,000 rows · 210,000 rows/s"),
    ):
        change = {"state": "starting", "preparation": figures}
        async with app.state.database.write() as connection:
            await connection.execute(tables.job.update().where(tables.job.c.id == ids["waiting"]).values(change))
        for address in ("/", "/dashboard/jobs", f"/dashboard/jobs/{ids['waiting']}"):
            page = (await stranger.get(address)).text
            assert text in str(Text(page)), address
            assert ("waiting: reading rows, 20 percent" in page) == (figures is prepared)
    for state in ("running", "succeeded"):
        change = {"state": state, "preparation": None, "progress": {"epoch": 1, "epochs": 2, "starved": 0.65}}
        async with app.state.database.write() as connection:
            await connection.execute(tables.job.update().where(tables.job.c.id == ids["waiting"]).values(change))
        page = (await stranger.get(f"/dashboard/jobs/{ids['waiting']}")).text
        assert ("got 35% of the processor time that they wanted" in page) == (state == "running")


async def test_pages_say_what_there_is(app, client, stranger, admin_key: str, settings: Settings):
    ids = await fill(app, client, settings)
    await signed_in(stranger, admin_key)
    expected = {
        "/": (
            "1 job runs", "1 job waits", "1 failed in the last day", "1 held", "v000002", "serves v000001", "0.85",
            "1 of 1 checks of the gate failed: mean_cosine.", "123,456 examples/s", "column 'click' holds <NaN>",
            "every-night", "0 3 * * *", "Europe/Berlin", "disk: ok", "Next runs", "Recently finished",
        ),
        "/dashboard/jobs": (
            ids["adam"], "AUC, validation", "0.7510", "0.7500", "AUC per epoch, of the jobs above",
            "mean_cosine 0.10 is below 0.85", "column 'click' holds <NaN> clean it",
            "best 0.7410 at epoch 1, last 0.7010", "best 0.7510 at epoch 3, last 0.7505", "items v000001",
        ),
        f"/dashboard/jobs/{ids['adam']}": (
            "validation AUC fell by 0.0400 from epoch 1 to epoch 4: it overfits", "two_tower", "predicted memory",
            "Bold: epoch 1, the best by validation.",
        ),
        f"/dashboard/compare?job={ids['adam']}&job={ids['adam-ar']}": ("optimizer.kind", "adam_ar", "0.75050"),
        "/dashboard/collections": ("items", "v000001", "1 in a row"),
        "/dashboard/collections/items": (
            "mean_cosine", "1 failed of 1", "serves v000001", "50 items; all have a vector.",
        ),
        "/dashboard/schedules": ("every-night", "0 3 * * *", "Europe/Berlin", "stopped", "paused"),
        "/dashboard/schedules/every-night": ("The schedule has not fired yet", "two_tower"),
        "/dashboard/datasets": ("clicks", "user, item"),
        "/dashboard/datasets/clicks": ("no parent run", "broken"),
        "/dashboard/parts/profile/clicks": ("label rate", "0.5", "distinct"),
        "/dashboard/access": ("admin", "POST /v1/schedules", "201"),
        "/dashboard/submit": ("adam_ar", "clicks", "epochs"),
    }  # fmt: skip
    for address, texts in expected.items():
        page = await stranger.get(address)
        assert page.status_code == 200, address
        said = str(Text(page.text))
        for text in texts:
            assert text in said, (address, text)
        assert "<NaN>" not in page.text
        assert "style=" not in page.text
        assert "<script>" not in page.text


async def test_a_model_is_shown_beside_the_served_one(app, client, stranger, admin_key: str, settings: Settings):
    ids = await fill(app, client, settings)
    published.hold(settings, seed=98, extra={"comparison": published.COMPARISON})
    quality = {"quality": published.QUALITY, "proposed_canary": "no canary watches items"}
    published.publish(settings, seed=97, extra={"comparison": published.COMPARISON, **quality})
    first = {"version": None, "differences": [], "skipped": "no version is served yet"}
    async with app.state.database.write() as connection:
        for name, comparison in (("adam", published.COMPARISON), ("adam-ar", first)):
            publication = {
                "status": "none",
                "collection": None,
                "version": None,
                "reasons": [],
                "comparison": comparison,
                **quality,
            }
            mine = tables.job.c.id == ids[name]
            await connection.execute(tables.job.update().where(mine).values(publication=publication))
    await signed_in(stranger, admin_key)
    row = "country=de AUC 0.6517 0.7877 -0.0411 to -0.0309 5,000"
    pages = {
        f"/dashboard/jobs/{ids['adam']}": row,
        f"/v1/jobs/{ids['adam']}/report": row,
        f"/dashboard/jobs/{ids['adam-ar']}": "Not compared with the served model: no version is served yet.",
        "/dashboard/collections/items": row,
    }
    for address, text in pages.items():
        page = await stranger.get(address, headers={"accept": "text/html"})
        assert page.status_code == 200, (address, page.text)
        said = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.text))
        assert text in said, (address, said[said.find("Compared with the served") :][:600])
        assert "Model: auc 0.7312 (validation) in epoch 10 of 10; v000001, on its own rows: 0.7401" in said, address
        assert f"It overfits: {published.QUALITY['overfits']}." in said, address
        if "report" not in address:
            assert "no canary watches items" in said, address
    assert re.search(r"auc 0\.7312 \(0\.7401\) overfits", said)
    job = (await client.get(f"/v1/jobs/{ids['adam']}")).json()
    assert job["publication"]["comparison"] == published.COMPARISON


async def test_a_collection_with_users_asks_for_one(stranger, admin_key: str, settings: Settings):
    published.publish(settings)
    await signed_in(stranger, admin_key)
    assert "Recommend for user ID" not in (await stranger.get("/dashboard/collections/items")).text
    published.publish(settings, seed=1, users=published.users_of([1, 2]))
    page = (await stranger.get("/dashboard/collections/items")).text
    assert "Recommend for user ID" in page
    assert re.findall(r"<option[^>]*>(v\d+)", page[page.index('id="r-version"') :])[0] == "v000002"


async def test_neighbours_and_recommended_items_have_their_words(client, stranger, admin_key: str, settings: Settings):
    columns = ItemColumns(
        np.arange(1, 51) * 10, {"title": pa.array([f"<b>{one}" for one in range(1, 51)], pa.large_string())}
    )
    published.publish(settings, seed=1)
    published.publish(settings, users=dataclasses.replace(published.users_of([1, 2], [10, 20]), columns=columns))
    await signed_in(stranger, admin_key)
    page = await stranger.get("/dashboard/parts/neighbors/items?wanted=30&version=v000002&other=v000001")
    found = {}
    for version in ("v000002", "v000001"):
        answer = await client.post("/v1/collections/items/neighbors", json={"id": 30, "version": version})
        found[version] = [one["id"] for one in answer.json()["items"]]
    left, right = page.text.split("<h3>")[1:]
    for version, listed in (("v000002", left), ("v000001", right)):
        assert listed.startswith(version)
        assert [int(one) for one in re.findall(r'data-item="(\d+)"', listed)] == found[version]
        assert listed.count("only here") == len({*found[version]} - ({*found["v000002"]} & {*found["v000001"]}))
    assert f"&lt;b&gt;{found['v000002'][0] // 10}" in left
    assert "&lt;b&gt;" not in right  # it has no users, and so no columns
    page = await stranger.get("/dashboard/parts/recommended/items?user=1&version=v000002&unseen=on")
    body = {"users": [1], "k": 20, "exclude_seen": True}
    (user,) = (await client.post("/v1/collections/items/recommend", json=body)).json()["users"]
    assert [int(one) for one in re.findall(r'data-item="(\d+)"', page.text)] == [one["id"] for one in user["items"]]
    assert f"&lt;b&gt;{user['items'][0]['id'] // 10}" in page.text
    for address, status, text in (
        ("neighbors/items?wanted=7", 404, "Version v000002 has no vector of item"),
        ("neighbors/items?wanted=bob", 422, "id 'bob' is not an integer"),
        ("neighbors/none?wanted=7", 404, "there is no collection 'none'"),
        ("recommended/items?user=3", 404, "v000002 has no user 3."),
        ("recommended/items?user=1&version=v000001", 409, "has no users"),
    ):
        refused = await stranger.get(f"/dashboard/parts/{address}")
        assert (refused.status_code, text in refused.json()["detail"]) == (status, True), (address, refused.text)


async def test_the_map_is_read_in_words(stranger, admin_key: str, settings: Settings):
    published.publish(settings, seed=1)
    await signed_in(stranger, admin_key)
    kinds = pa.array([["red", "blue"][one % 2] for one in range(50)], pa.large_string())
    columns = ItemColumns(np.arange(1, 51) * 10, {"kind": kinds})
    published.publish(settings, users=dataclasses.replace(published.users_of([1]), columns=columns))
    page = (await stranger.get("/dashboard/parts/versions/items?colour=kind")).text
    said = str(Text(page))
    for text in (
        "Drawn are 50 of the 50 items that have a vector in both versions, which are all;",
        "(coloured by kind)", "along the two of 8 directions", "red 25", "blue 25", "on average over 50 items",
    ):  # fmt: skip
        assert text in said, text
    assert page.count('class="now series-1"') == page.count('class="now series-2"') == 25
    assert '<option value="kind" selected>by kind</option>' in page
    assert "coloured by" not in (await stranger.get("/dashboard/parts/versions/items")).text


async def test_many_reasons_are_folded_and_whole(app, client, stranger, admin_key: str, settings: Settings):
    ids = await fill(app, client, settings)
    reasons = [f"check {number} is 0.1, below 0.85: <the vectors> moved" for number in range(12)]
    publication = {"status": "held", "collection": "items", "version": "v000002", "reasons": reasons}
    async with app.state.database.write() as connection:
        mine = tables.job.c.id == ids["adam"]
        await connection.execute(tables.job.update().where(mine).values(publication=publication))
    await signed_in(stranger, admin_key)
    page = (await stranger.get("/dashboard/jobs")).text
    folded = re.search(rf'<details id="why-{ids["adam"]}">(.*?)</details>', page, re.DOTALL)
    assert folded is not None
    assert folded[1].count("<li>") == 11
    assert "check 0 is 0.1" not in folded[1]
    assert "<the vectors>" not in page


async def test_empty_service_says_what_to_do_first(stranger, admin_key: str):
    await signed_in(stranger, admin_key)
    for address, text in {
        "/": "evenkeel submit SPEC.yaml", "/dashboard/jobs": "evenkeel submit SPEC.yaml",
        "/dashboard/schedules": "evenkeel schedules add", "/dashboard/collections": "publish",
        "/dashboard/datasets": "evenkeel datasets infer", "/dashboard/submit": "No data set is registered",
        "/dashboard/compare": "Choose jobs",
    }.items():  # fmt: skip
        assert text in str(Text((await stranger.get(address)).text)), address


async def test_content_is_304_until_something_changes(app, client, stranger, admin_key: str, settings: Settings):
    published.publish(settings)
    await signed_in(stranger, admin_key)
    first = await stranger.get("/dashboard/content")
    etag = {"If-None-Match": first.headers["etag"]}
    assert (await stranger.get("/dashboard/content", headers=etag)).status_code == 304
    published.hold(settings)
    changed = await stranger.get("/dashboard/content", headers=etag)
    assert changed.status_code == 200
    assert "mean_cosine" in changed.text


async def test_a_held_version_says_why_it_opens_no_new_generation(
    app, client, stranger, admin_key: str, settings: Settings
):
    published.publish(settings)
    await signed_in(stranger, admin_key)
    published.hold(settings, extra={"not_released": "1 of 3 sound refreshes in a row"})
    page = str(Text((await stranger.get("/dashboard/collections/items")).text))
    assert "It opens no new generation: 1 of 3 sound refreshes in a row." in page


async def test_a_version_says_which_earlier_generations_it_serves(
    app, client, stranger, admin_key: str, settings: Settings
):
    published.publish(settings)
    published.change_model(settings, held=("the map is wrong",))
    await signed_in(stranger, admin_key)
    page = str(Text((await stranger.get("/dashboard/collections/items")).text))
    assert "@g1 served" in page
    assert "@g2 held: the map is wrong" in page
    assert "items@g1, items_rff, items_rff@g1" in page


@pytest.mark.parametrize(("cause", "offered"), [("run", False), ("vectors", True)])
async def test_a_version_that_must_not_be_promoted_has_no_button(
    app, client, stranger, admin_key: str, settings: Settings, cause: str, offered: bool
):
    published.publish(settings)
    diagnosis = {"cause": cause, "summary": "It is held.", "advice": "Set model.loss.", "failed": []}
    published.hold(settings, extra={"diagnosis": diagnosis})
    published.hold(settings, seed=7, extra={"diagnosis": diagnosis})
    await signed_in(stranger, admin_key)
    for path in ("/dashboard/collections/items", "/"):
        page = (await stranger.get(path)).text
        assert "Set model.loss." in page
        assert ("v000003/promote" in page) == offered
    assert ("v000002/promote" in (await stranger.get("/dashboard/collections/items")).text) == offered


@pytest.mark.slow
async def test_the_list_is_filtered_and_goes_page_by_page(
    app, client, stranger, admin_key: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    ids = await fill(app, client, settings)
    labelled = await client.post("/v1/jobs", json=job_spec("labelled") | {"labels": {"team": "ads"}})
    await signed_in(stranger, admin_key)

    async def listed(query: str) -> list[str]:
        page = (await stranger.get(f"/dashboard/jobs{query}")).text
        return re.findall(r'<input type="checkbox" name="job" value="(\w+)"', page)

    assert await listed("?state=failed") == [ids["broken"]]
    assert await listed("?search=ADAM") == [ids["adam-ar"], ids["adam"]]
    assert await listed(f"?search={ids['nightly']}") == [ids["nightly"]]
    assert await listed("?search=%25") == []
    assert await listed("?label=team%3Dads") == [labelled.json()["id"]]
    assert await listed("?state=nonsense") == await listed("")
    monkeypatch.setattr(jobs, "NUM_JOBS", 4)
    newest = await listed("")
    page = (await stranger.get("/dashboard/jobs")).text
    (older,) = re.findall(r'<a href="([^"]+)" rel="next">Older', page)
    assert newest + await listed(older) == [labelled.json()["id"], *reversed(ids.values())]
    refused = await stranger.get("/dashboard/jobs?cursor=nonsense")
    assert refused.status_code == 422
    assert "is not a cursor of this list" in str(Text(refused.text))


async def test_the_table_of_jobs_is_sorted_by_every_column_and_the_address_says_how(
    app, client, stranger, admin_key: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    ids = await fill(app, client, settings)
    names = {job_id: name for name, job_id in ids.items()}
    await signed_in(stranger, admin_key)

    async def shown(query: str) -> tuple[str, list[str]]:
        page = (await stranger.get(f"/dashboard/jobs{query}")).text
        return page, [names[one] for one in re.findall(r'<input type="checkbox" name="job" value="(\w+)"', page)]

    page, newest_first = await shown("?label=")
    assert newest_first == ["waiting", "broken", "nightly", "adam-ar", "adam"]
    headings = re.findall(r'<th scope="col"[^>]*><a href="([^"]+)">(.*?)</a>', page)
    links = {re.sub("<[^>]+>", "", title): html.unescape(link) for link, title in headings}
    best_first = ["adam-ar", "nightly", "adam", "waiting", "broken"]
    expected = {
        "Job": ["adam", "adam-ar", "broken", "nightly", "waiting"],
        "State": ["broken", "waiting", "nightly", "adam-ar", "adam"],
        "AUC, validation": best_first,
        "AUC, test": best_first,
        "Best epoch": ["adam", "nightly", "adam-ar", "waiting", "broken"],
        "optimizer.kind": ["adam", "broken", "nightly", "adam-ar", "waiting"],
        "optimizer.decay": ["waiting", "adam", "broken", "nightly", "adam-ar"],
        "Published": ["adam-ar", "broken", "waiting", "nightly", "adam"],
        "Created": newest_first,
    }
    assert links.keys() == {*expected, "Took"}
    for title, order in expected.items():
        sorted_page, found = await shown(links[title])
        assert found == order, title
        (direction,) = re.findall(r'aria-sort="(\w+)"', sorted_page)
        (other,) = re.findall(r'aria-sort="\w+"><a href="([^"]+)"', sorted_page)
        back, reverse = await shown(html.unescape(other))
        assert f'aria-sort="{"descending" if direction == "ascending" else "ascending"}"' in back
        assert sorted(reverse) == sorted(order)
        assert reverse != order, title
    # Smaller log losses come first; what else the address asks for stays in the links, but for the page.
    page, _ = await shown("?metric=logloss&state=succeeded&sort=took&start=0&cursor=&parameter=epochs")
    (link,) = re.findall(r'<a href="([^"]+)">log loss, test</a>', page)
    assert html.unescape(link) == "?metric=logloss&state=succeeded&parameter=epochs&sort=test"
    assert "log loss per epoch, of the jobs above" in page
    assert 'data-label="epochs">4</td>' in page
    assert 'data-label="optimizer.kind"' not in page
    monkeypatch.setattr(jobs, "NUM_JOBS", 2)
    monkeypatch.setattr(jobs, "SORTED_JOBS", 4)
    page, first = await shown("?sort=-test")
    assert first == ["adam-ar", "nightly"]
    assert "Sorted: the newest 4 of the jobs that match." in page
    (older,) = re.findall(r'<a href="([^"]+)" rel="next">Older', page)
    page, second = await shown(html.unescape(older))
    assert second == ["waiting", "broken"]
    assert 'rel="next"' not in page
    assert '<a href="?sort=-test">Newest</a>' in page
    for start in ("9" * 5000, "-1", "x"):  # Python reads no number of so many digits
        assert (await shown(f"?sort=-test&start={start}"))[1] == first
    refused = await stranger.get("/dashboard/jobs?sort=nonsense")
    assert refused.status_code == 422
    assert "there is no column 'nonsense'" in str(Text(refused.text))


async def test_a_spec_of_yaml_is_read_as_the_command_line_reads_it(stranger, admin_key: str):
    async def read(text: str) -> Any:
        return await stranger.post("/dashboard/parts/spec", content=text.encode(), headers=ORIGIN)

    assert (await read("name: x")).status_code == 401
    await signed_in(stranger, admin_key)
    answer = await read("---\nname: x  # why\nwindow: {start: 2026-01-02}\nhidden: &a [3, 2]\nagain: *a\n---\n")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"name": "x", "window": {"start": "2026-01-02"}, "hidden": [3, 2], "again": [3, 2]}
    doubling = ["a0: &a0 [1, 2]\n", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 45))]
    for refused, message in (
        ("a: 1\na: 2", "the key 'a' occurs twice"),
        ("name: [", "is not YAML in line 1, column"),
        ("[" * 2000, "is not YAML"),
        ("- 1", "A spec is one mapping of fields"),
        ("", "A spec is one mapping of fields"),
        ("name: a\n---\nname: b", "A spec is one mapping of fields"),
        ("".join(doubling[:14]), "it has more than 65536 characters as JSON"),
        ("".join(doubling), "it has more than 65536 characters as JSON"),
        ("a: &a [*a]", "cannot be written as JSON"),
        ("a: .nan", "cannot be written as JSON"),
        ("a: " + "x" * 2**16, "The text has more than 65536 characters"),
    ):
        answer = await read(refused)
        assert answer.status_code == 422, refused[:50]
        assert message in answer.json()["detail"], (refused[:50], answer.text)
    for origin in ({}, {"Origin": "http://evil.example"}):
        assert (await stranger.post("/dashboard/parts/spec", content=b"a: 1", headers=origin)).status_code == 403


async def test_what_is_not_there_is_a_page_that_says_so(stranger, admin_key: str):
    await signed_in(stranger, admin_key)
    for address, text in {
        "/dashboard/jobs/job_0": "There is no job 'job_0'.",
        "/dashboard/compare?job=job_0": "There is no job 'job_0'.",
        "/dashboard/submit?from=job_0": "There is no job 'job_0'.",
        "/dashboard/collections/none": "there is no collection 'none'",
        "/dashboard/schedules/none": "There is no schedule 'none'.",
        "/dashboard/datasets/none": "There is no dataset 'none'.",
        "/dashboard/nothing/<b>": "There is no page /dashboard/nothing/<b>.",
    }.items():
        page = await stranger.get(address)
        assert page.status_code == 404, address
        assert text in str(Text(page.text)), address
        assert "data-source" not in page.text
    many = await stranger.get("/dashboard/compare?" + "&".join(f"job=job_{number}" for number in range(7)))
    assert many.status_code == 422
    assert "compare at most 6" in str(Text(many.text))


async def test_fields_of_publish_are_apart_from_what_the_models_differ_in(
    client, stranger, admin_key: str, dataset_body: dict[str, Any]
):
    assert (await client.post("/v1/datasets", json=dataset_body)).status_code == 201
    publish = {"publish": {"collection": "items", "feature": "item"}}
    bodies = ({}, publish, {"epochs": 7, **publish})
    ids = [(await client.post("/v1/jobs", json=job_body(**{"publish": None} | body))).json()["id"] for body in bodies]
    await signed_in(stranger, admin_key)
    page = (await stranger.get(f"/dashboard/compare?job={ids[0]}&job={ids[2]}")).text
    models, publishing = page.split('<details id="publishing">')
    assert "<code>epochs</code>" in models
    assert "<code>publish." not in models
    assert "<code>publish.collection</code>" in publishing
    alone = (await stranger.get(f"/dashboard/compare?job={ids[0]}&job={ids[1]}")).text
    assert '<details id="publishing" open>' in alone
    assert "publishing" not in (await stranger.get(f"/dashboard/compare?job={ids[1]}&job={ids[2]}")).text


async def test_another_page_is_linked_and_asked_for_its_own_content(
    app, stranger, admin_key: str, monkeypatch: pytest.MonkeyPatch
):
    """A page is its data, a template and an entry: the frame and the script know neither."""

    async def gather(request: DashboardRequest) -> dict[str, Any]:
        return {"scope": f"of {request.path['name']} {request.asked('q')}"}

    another = Page("/dashboard/another/{name}", "Another", "lacking.html", gather, under="/dashboard/jobs")
    added = APIRouter()
    dashboard.add_routes(added, another)
    app.router.routes[:0] = added.routes  # the last route is that of unknown addresses
    assert 'id="login"' in (await stranger.get("/dashboard/another/one")).text
    await signed_in(stranger, admin_key)
    monkeypatch.setattr(pages, "PAGES", (*pages.PAGES, another))
    page = (await stranger.get("/dashboard/another/one?q=two")).text
    assert "<title>Another · Evenkeel</title>" in page
    assert re.findall(r'<a href="([^"]+)" aria-current="(\w+)">', page) == [("/dashboard/jobs", "true")]
    (source,) = re.findall(r'data-source="([^"]+)"', page)
    assert source == "/dashboard/content/another/one?q=two"
    assert "of one two" in (await stranger.get(source)).text
    script = rendering.static_file("dashboard.js")[0].decode()
    assert "fetch(content.dataset.source" in script
    assert "/dashboard" not in script


async def test_a_key_sees_its_scopes_alone(app, client, stranger, key_with: Any, settings: Settings):
    ids = await fill(app, client, settings)
    await signed_in(stranger, await key_with("features:read"))
    home = (await stranger.get("/")).text
    assert "lacks the scope jobs:read" in str(Text(home))
    assert "serves v000001" in str(Text(home))
    assert "every-night" not in home
    assert "/dashboard/jobs" not in home
    for address in (
        "jobs",
        f"jobs/{ids['adam']}",
        "schedules",
        "datasets/clicks",
        "parts/profile/clicks",
        "submit",
        "access",
    ):
        page = (await stranger.get(f"/dashboard/{address}")).text
        assert "lacks the scope" in str(Text(page)), address
        assert "adam-ar" not in page
    collection = (await stranger.get("/dashboard/collections/items")).text
    assert "data-ask" not in collection
    assert "evenkeel promote items v000002 --override-gate" in collection
    await signed_in(stranger, await key_with("jobs:read"))
    home = str(Text((await stranger.get("/")).text))
    assert "lacks the scope features:read" in home
    assert "every-night" in home
    assert "v000001" not in home
    assert "data-ask" not in (await stranger.get(f"/dashboard/jobs/{ids['nightly']}")).text


async def test_signing_out_ends_the_session(stranger, admin_key: str):
    await signed_in(stranger, admin_key)
    cookie = dict(stranger.cookies)
    assert (await stranger.delete("/session", headers=ORIGIN)).status_code == 204
    stranger.cookies.update(cookie)
    assert 'id="login"' in (await stranger.get("/")).text


async def test_static_files(stranger):
    page = (await stranger.get("/")).text
    addresses = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
    assert len(addresses) >= 3
    for address in addresses:
        answer = await stranger.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    for name in ("../app.py", "..%2fapp.py", "nothing.js"):
        assert (await stranger.get(f"/static/{name}")).status_code == 404


def test_nothing_is_asked_of_another_host():
    for path in [*Path("service/web/templates").glob("*.html"), *Path("service/web/static").glob("*")]:
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "//" not in re.sub(r"(?m)^\s*//.*$", "", text), path


def test_words():
    assert [duration(seconds) for seconds in (None, 0.4, 59.9, 192, 7500)] == [
        "–",
        "0 s",
        "59 s",
        "3 min 12 s",
        "2 h 5 min",
    ]
    assert [figure(value) for value in (None, 0.123456, 4, "x")] == ["–", "0.1235", "4", "x"]
    assert [size(number) for number in (None, 512, 1536, 5 * 2**40)] == ["–", "512 B", "1.5 KiB", "5.0 TiB"]
    assert verdicts([{"verdict": "pass"}] * 3) == "3 passed"
    assert verdicts([{"verdict": "pass"}, {"verdict": "fail"}]) == "1 failed of 2"
