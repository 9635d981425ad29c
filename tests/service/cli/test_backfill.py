"""``evenkeel schedules backfill`` against a real service; jobs are carried out by the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from service.client import Client
from tests.service import serving
from tests.service.serving import Run, Served

HELD = {"status": "held", "version": "v000007", "held_in_a_row": 2, "reasons": ["it moved"]}
ENDINGS: dict[str, dict[str, Any]] = {
    "2026-01-02": {"state": "succeeded", "publication": HELD},
    "2026-01-04": {"state": "failed", "error": {"code": "x", "message": "row 7 is bad", "remedy": ""}},
}


@pytest.fixture
def fired(served: Served) -> Iterator[list[str]]:
    """Ends queued jobs as ENDINGS says of their date, all others as published; the dates, in order."""
    ended, dates = threading.Event(), []

    def work() -> None:
        with Client(served.url, served.key) as client:
            while not ended.wait(0.05):
                for job in client.jobs(state="queued", name="days"):
                    dates.append(job["spec"]["dataset"]["window"]["start"])
                    published = {"state": "succeeded", "publication": {"status": "published", "version": "v000001"}}
                    served.set_job(job["id"], **ENDINGS.get(dates[-1], published))

    thread = threading.Thread(target=work)
    thread.start()
    yield dates
    ended.set()
    thread.join()


@pytest.fixture
def daily(run: Run, served: Served, tmp_path: Path) -> Iterator[str]:
    rows = served.data / "days.parquet"
    pq.write_table(pa.table({"user": [1, 2], "item": [3, 4], "click": [0, 1], "date": ["2026-01-01"] * 2}), rows)
    dataset = serving.dataset(served.data, "clicks") | {"name": "days", "uri": str(rows), "partition": "date"}
    spec, window = tmp_path / "days.yaml", {"start": "{firing_date}"}
    job = {"name": "days", "dataset": {"name": "days", "window": window}, "model": {"kind": "two_tower"}}
    with Client(served.url, served.key) as client:
        client.add_dataset(dataset)
    spec.write_text(yaml.safe_dump(job))
    assert run("schedules", "add", "days", str(spec), "--cron", "0 3 * * *").code == 0
    yield "days"
    run("schedules", "delete", "days")


def test_days_are_done_in_order(run: Run, daily: str, fired: list[str]) -> None:
    done = run("schedules", "backfill", daily, "--from", "2026-01-05", "--to", "2026-01-07")
    assert done.code == 0, done.err
    assert fired == ["2026-01-05", "2026-01-06", "2026-01-07"]
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == fired
    assert all(line.endswith("succeeded  published v000001") for line in lines)


def test_it_stops_at_what_is_held_and_at_what_fails(run: Run, daily: str, fired: list[str]) -> None:
    done = run("schedules", "backfill", daily, "--from", "2026-01-01", "--to", "2026-01-05")
    assert done.code == 3
    assert fired == ["2026-01-01", "2026-01-02"]
    assert "held v000007 (2 in a row)" in done.out
    assert "2026-01-02: version v000007 is held" in done.err
    fired.clear()
    done = run("schedules", "backfill", daily, "--from", "2026-01-02", "--to", "2026-01-05", "--past-held", "--json")
    assert done.code == 1
    assert fired == ["2026-01-02", "2026-01-03", "2026-01-04"]
    assert [(one["firing_date"], one["state"], one["status"]) for one in done.json] == [
        ("2026-01-02", "succeeded", "held"),
        ("2026-01-03", "succeeded", "published"),
        ("2026-01-04", "failed", None),
    ]
    assert "2026-01-04: job" in done.err
    assert "row 7 is bad" in done.err
    assert "backfill days --from 2026-01-04 --to 2026-01-05" in done.err


def test_what_cannot_be_backfilled_is_refused(run: Run, daily: str, served: Served, fired: list[str]) -> None:
    done = run("schedules", "backfill", daily, "--from", "2026-01-05", "--to", "2026-01-04")
    assert done.code == 2
    assert "is before" in done.err
    with Client(served.url, served.key) as client:
        job = client.schedule(daily)["job"]
        job["dataset"]["window"] = None
        client.change_schedule(daily, job=job)
    done = run("schedules", "backfill", daily, "--from", "2026-01-04", "--to", "2026-01-05")
    assert done.code == 1
    assert "the same rows on every date" in done.err
    assert fired == []
