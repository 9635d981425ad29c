"""The dashboard: what its pages say for what is in the database and the store, and the page in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.routes import dashboard
from service.core import tables
from service.core.settings import Settings
from service.core.tables import now
from service.web import pages, rendering
from service.web.charts import Series, epoch_ticks, line_chart, nice_ticks
from service.web.dashboard import last_auc, last_value, percent_done
from service.web.pages import Page
from service.web.rendering import duration, figure, verdicts
from tests.service import published

pytestmark = pytest.mark.anyio

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ORIGIN = {"Origin": "http://127.0.0.1:8080"}


def job_spec(name: str, optimizer: str = "adam_ar") -> dict[str, Any]:
    return {
        "name": name,
        "dataset": {"name": "clicks"},
        "model": {"kind": "two_tower"},
        "optimizer": {"kind": optimizer},
        "epochs": 4,
        "publish": {"collection": "items", "feature": "item"},
    }


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
    await fill(app, client, settings)
    page = await stranger.get("/")
    assert page.status_code == 200
    assert 'id="login"' in page.text
    assert "adam-ar" not in page.text
    assert (await stranger.get("/dashboard/content")).status_code == 401


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
        page = (await stranger.get("/")).text
        assert text in str(Text(page))
        assert ("waiting: reading rows, 20 percent" in page) == (figures is prepared)


async def test_page_says_what_there_is(app, client, stranger, admin_key: str, settings: Settings):
    ids = await fill(app, client, settings)
    await signed_in(stranger, admin_key)
    page = await stranger.get("/")
    text = str(Text(page.text))
    for expected in (
        ids["adam"], "123,456 examples/s", "0.7495", "Held by the gate: mean_cosine 0.10 is below 0.85",
        "column 'click' holds <NaN> clean it", "serves v000001", "v000002 held", "1 failed of 1",
        "every-night", "0 3 * * *", "Europe/Berlin", "stopped", "paused", "best 0.7410 at epoch 1, last 0.7010",
        "best 0.7510 at epoch 3, last 0.7505",
        "evenkeel promote items v000002 --override-gate",
    ):  # fmt: skip
        assert expected in text, expected
    assert "<NaN>" not in page.text
    assert page.text.count("<polyline") == 3
    assert "style=" not in page.text
    assert "<script>" not in page.text


async def test_long_reasons_are_folded_and_whole(app, client, stranger, admin_key: str, settings: Settings):
    ids = await fill(app, client, settings)
    reasons = [f"check {number} is 0.1, below 0.85: <the vectors> moved" for number in range(12)]
    publication = {"status": "held", "collection": "items", "version": "v000002", "reasons": reasons}
    async with app.state.database.write() as connection:
        mine = tables.job.c.id == ids["adam"]
        await connection.execute(tables.job.update().where(mine).values(publication=publication))
    await signed_in(stranger, admin_key)
    page = (await stranger.get("/")).text
    folded = re.search(rf'<details class="held-note" id="why-{ids["adam"]}">(.*?)</details>', page, re.DOTALL)
    assert folded is not None
    assert folded[1].count("<li>") == 12
    assert len(str(Text(folded[1].partition("</summary>")[0]))) < 160
    assert "<the vectors>" not in page


async def test_empty_service_says_what_to_do_first(stranger, admin_key: str):
    await signed_in(stranger, admin_key)
    text = str(Text((await stranger.get("/")).text))
    for command in ("evenkeel submit SPEC.yaml", "evenkeel schedules add", "publish"):
        assert command in text


async def test_content_is_304_until_something_changes(app, client, stranger, admin_key: str, settings: Settings):
    published.publish(settings)
    await signed_in(stranger, admin_key)
    first = await stranger.get("/dashboard/content")
    etag = {"If-None-Match": first.headers["etag"]}
    assert (await stranger.get("/dashboard/content", headers=etag)).status_code == 304
    published.hold(settings)
    changed = await stranger.get("/dashboard/content", headers=etag)
    assert changed.status_code == 200
    assert "mean_cosine 0.10 is below 0.85" in changed.text


async def test_a_second_page_is_linked_and_asked_for_its_own_content(
    app, client, stranger, admin_key: str, monkeypatch: pytest.MonkeyPatch
):
    """A second page is its data, a template and an entry: the frame and the script know neither."""

    async def gather(app: Any, principal: Any) -> dict[str, Any]:
        return dict.fromkeys(("jobs", "charts", "schedules", "collections"), None) | {"store_away": "second page"}

    second = Page("/dashboard/second", "The second", "content.html", gather)
    dashboard.add_routes(app, second)
    assert 'id="login"' in (await stranger.get("/dashboard/second")).text
    await signed_in(stranger, admin_key)
    alone = (await stranger.get("/")).text
    assert "<nav" not in alone
    assert "<title>Evenkeel</title>" in alone
    monkeypatch.setattr(pages, "PAGES", (*pages.PAGES, second))
    for path, title in {"/": "Overview", "/dashboard/second": "The second"}.items():
        page = (await stranger.get(path)).text
        assert f"<title>Evenkeel: {title}</title>" in page
        assert re.findall(r'<a href="([^"]+)" aria-current="page">([^<]+)</a>', page) == [(path, title)]
        assert re.findall(r'<nav aria-label="Pages">.*</nav>', page, re.DOTALL)
        assert all(f'<a href="{one.address}"' in page for one in pages.PAGES)
        (source,) = re.findall(r'<main id="content" data-source="([^"]+)">', page)
        answer = await stranger.get(source)
        assert answer.status_code == 200
        assert ("second page" in answer.text) == (path != "/")
    script = rendering.static_file("dashboard.js")[0].decode()
    assert "fetch(content.dataset.source" in script
    assert "/dashboard" not in script


async def test_a_key_sees_its_scopes_alone(app, client, stranger, key_with: Any, settings: Settings):
    await fill(app, client, settings)
    await signed_in(stranger, await key_with("features:read"))
    text = str(Text((await stranger.get("/")).text))
    assert "lacks the scope jobs:read" in text
    assert "serves v000001" in text
    assert "every-night" not in text
    await signed_in(stranger, await key_with("jobs:read"))
    text = str(Text((await stranger.get("/")).text))
    assert "lacks the scope features:read" in text
    assert "every-night" in text
    assert "v000001 published" not in text


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


# --- the parts -------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(1e-3, 1))
def test_ticks_enclose_and_are_round(low: float, span: float):
    ticks = nice_ticks(low, low + span)
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(ticks)
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= low + span - 1e-9
    step = ticks[1] - ticks[0]
    assert all(abs(tick / step - round(tick / step)) < 1e-4 for tick in ticks)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=40), min_size=1, max_size=8))
def test_every_point_lies_inside_the_chart(curves: list[list[float]]):
    svg = line_chart([Series(f"<{number}>", list(enumerate(curve, 1))) for number, curve in enumerate(curves)], "a & b")
    inside = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
    assert inside is not None
    width, height = map(float, inside.groups())
    dots = re.findall(r'class="dot" cx="([-\d.]+)" cy="([-\d.]+)"', svg)
    assert len(dots) == sum(map(len, curves))
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in dots)
    assert "<0>" not in svg
    assert "a &amp; b" in svg


def test_higher_is_drawn_higher():
    svg = line_chart([Series("one", [(1, 0.70), (2, 0.75), (3, 0.72)])], "t")
    heights = [float(y) for y in re.findall(r'class="dot" cx="[-\d.]+" cy="([-\d.]+)"', svg)]
    assert heights[1] < heights[2] < heights[0]


def test_a_chart_needs_a_point():
    with pytest.raises(ValueError, match="point"):
        line_chart([Series("one", [])], "t")


def test_epoch_ticks_are_few():
    assert epoch_ticks(1, 4) == [1, 2, 3, 4]
    assert len(epoch_ticks(1, 1000)) <= 10


def test_percent_done():
    assert percent_done("queued", {}) is None
    assert percent_done("running", {"epoch": 1, "epochs": 4}) == 0
    assert percent_done("running", {"epoch": 3, "epochs": 4}) == 50
    assert percent_done("running", {"epoch": 3, "epochs": 4, "step": 30, "steps": 50}) == 60
    assert percent_done("publishing", {"epoch": 4, "epochs": 4}) == 100


def test_last_auc_prefers_test():
    metrics = [
        {"epoch": 1, "split": "validation", "auc": 0.7},
        {"epoch": 1, "split": "test", "auc": 0.69},
        {"epoch": 2, "split": "validation", "auc": 0.72},
    ]
    assert last_auc(metrics) == {"split": "test", "value": 0.69, "epoch": 1}
    assert last_auc([{"epoch": 1, "split": "train", "logloss": 0.1}]) is None
    of_labels = [{"epoch": 1, "split": "test", "rmse/visits": 2.0, "auc/click": 0.7, "auc/buy": 0.8}]
    assert last_auc(of_labels) == {"split": "test", "value": 0.7, "epoch": 1}
    rated = [{"epoch": 1, "split": "validation", "rmse": 0.9}, {"epoch": 2, "split": "validation", "rmse": 0.8}]
    assert last_value(rated, "rmse") == {"split": "validation", "value": 0.8, "epoch": 2}


def test_words():
    assert [duration(seconds) for seconds in (None, 0.4, 59.9, 192, 7500)] == [
        "–",
        "0 s",
        "59 s",
        "3 min 12 s",
        "2 h 5 min",
    ]
    assert [figure(value) for value in (None, 0.123456, 4, "x")] == ["–", "0.1235", "4", "x"]
    assert verdicts([{"verdict": "pass"}] * 3) == "3 passed"
    assert verdicts([{"verdict": "pass"}, {"verdict": "fail"}]) == "1 failed of 2"


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture
def served(settings: Settings) -> Iterator[str]:
    """The address of a real service over the same home."""
    environment = {**os.environ, "EVENKEEL_HOME": str(settings.home)}
    command = [str(Path(sys.executable).with_name("evenkeel")), "serve", "--role", "api", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(300)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
async def test_in_a_browser(app, client, settings: Settings, admin_key: str, served: str, tmp_path: Path):
    """Signs in, follows a change without a reload, fits a phone, signs out; nothing in the console."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    from playwright.async_api import async_playwright

    ids = await fill(app, client, settings)
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=CHROMIUM, headless=True, args=[*flags, "--disable-component-update"],
            viewport={"width": 1280, "height": 900},
        )  # fmt: skip
        page = browser.pages[0]
        page.set_default_timeout(90_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(served)
        await page.get_by_label("API key").fill("ek_wrong_key")
        await page.get_by_role("button", name="Sign in").click()
        await page.get_by_role("alert").get_by_text("unknown, revoked or expired").wait_for()
        assert any("401" in complaint for complaint in complaints)
        complaints.clear()
        await page.get_by_label("API key").fill(admin_key)
        await page.get_by_role("button", name="Sign in").click()
        await page.get_by_role("heading", name="Jobs").wait_for()
        assert not await page.evaluate("document.cookie")
        assert await page.locator("polyline").count() == 3
        await page.get_by_text("Gate: 1 failed of 1").click()
        async with app.state.database.write() as connection:
            await connection.execute(
                tables.job.update().where(tables.job.c.name == "waiting").values(state="cancelled")
            )
        await page.get_by_text("cancelled", exact=True).wait_for(timeout=90_000)
        assert await page.get_by_role("rowheader", name="mean_cosine").is_visible()
        for width in (1280, 400):
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            if folder := os.environ.get("EVENKEEL_TEST_SCREENSHOTS"):
                for scheme in ("light", "dark"):
                    await page.emulate_media(color_scheme=scheme)
                    await page.screenshot(path=f"{folder}/dashboard-{width}-{scheme}.png", full_page=True)
        await page.get_by_role("link", name=ids["adam-ar"]).click()
        await page.get_by_role("heading", name="adam-ar").wait_for()
        assert await page.locator("polyline").count() == 2
        assert await page.evaluate("document.documentElement.scrollWidth") <= 400
        if folder := os.environ.get("EVENKEEL_TEST_SCREENSHOTS"):
            await page.screenshot(path=f"{folder}/report-400.png", full_page=True)
            await page.set_viewport_size({"width": 1280, "height": 900})
            await page.screenshot(path=f"{folder}/report-1280.png", full_page=True)
        await page.get_by_role("link", name="Evenkeel").click()
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_label("API key").wait_for()
        if folder := os.environ.get("EVENKEEL_TEST_SCREENSHOTS"):
            await page.screenshot(path=f"{folder}/login-400.png")
        await browser.close()
    assert complaints == []
