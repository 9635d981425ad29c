"""A schedule's refreshes once the gate holds one: from rows to what people are told, with real runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from service.client import Client
from tests.service import serving
from tests.service.serving import Served
from tests.support.world import World, date_of
from trainer.runs.run_process import terminate

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end, pytest.mark.process]


def dataset_document(rows: Path) -> dict[str, Any]:
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    return {
        "name": "log", "uri": str(rows), "features": features, "label": {"column": "click"}, "partition": "date",
    }  # fmt: skip


def job_document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "held",
        "dataset": {"name": "log"},
        "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 16, "init": {"kind": "hash", "std": 0.1}},
        "optimizer": {"kind": "adam", "learning_rate": 0.006},
        "sse": {},
        "epochs": 2,
        "batch_size": 256,
        "publish": {"collection": "items", "feature": "item", "views": [{"name": "rff", "dim": 32}]},
        **changes,
    }


def publication(client: Client, job_id: str) -> dict[str, Any]:
    ended = client.wait(job_id, timeout_seconds=900)
    assert ended["state"] == "succeeded", ended["error"]
    return {**ended["publication"], "start": ended["lineage"]["start_version"], "job": job_id}


def command(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [serving.EVENKEEL, *arguments], env=served.environment(), capture_output=True, text=True, check=False
    )


def test_an_assortment_that_changed_is_held_told_of_and_then_a_new_generation(tmp_path: Path) -> None:
    """From day 3 on six tenths of the items are gone. Each held refresh goes on from the one before it.

    The third one is served as a new generation, and its view reads as before.
    """
    with serving.serving(tmp_path, "all") as served, Client(served.url, served.key) as client:
        rows = served.data / "rows"
        rows.mkdir()
        world = World("switch", 0)
        tables = [world.day(day) for day in range(6)]
        for day in range(3):
            pq.write_table(tables[day], rows / f"{day}.parquet")
        client.add_dataset(dataset_document(rows))
        first = job_document(epochs=8)
        first["dataset"]["window"] = {"start": date_of(2), "days": 3}
        assert publication(client, client.submit(first)["id"])["status"] == "published"
        first_served = client.version("items", "v000001")

        job = job_document(init_from={"collection": "items"})
        job["dataset"]["window"] = {"start": "{firing_date}", "days": 1}
        client.add_schedule({"name": "daily", "cron": "0 3 1 1 *", "job": job})
        ended = []
        for day in range(3, 6):
            pq.write_table(tables[day], rows / f"{day}.parquet")
            ended.append(publication(client, client.trigger("daily", firing_date=date_of(day))["job_id"]))
            if day == 4:
                _told_of_two(served, client, ended)

        found = [(one["status"], one["version"], one["start"], one["held_in_a_row"]) for one in ended]
        assert found == [
            ("held", "v000002", None, 1),
            ("held", "v000003", "v000002", 2),
            ("published", "v000004", "v000003", 0),
        ]
        newest = client.version("items", "v000004")
        assert newest["released"] == {
            "in_a_row": 3, "failed": ["unreplaced"], "generation": 2, "same_coordinates": [1],
        }  # fmt: skip
        assert newest["anchor_generation"] == first_served["anchor_generation"] + 1
        assert client.collection("items")["current"] == "v000004"
        assert client.collection("items")["held"]["in_a_row"] == 0
        # What was trained while nothing was published is in the newest, also where the last day had no row of it.
        earlier = sorted(set(tables[3].column("item").to_pylist()) - set(tables[5].column("item").to_pylist()))
        status = client.vectors("items", earlier, version="v000002").status
        trained = [item for item, found in zip(earlier, status, strict=True) if found == "found"]
        assert len(trained) > 10
        assert set(client.vectors("items", trained).status.tolist()) == {"found"}
        # An item of both versions is where it was, and a view has the same frequencies.
        both = sorted(set(tables[2].column("item").to_pylist()) & set(tables[5].column("item").to_pylist()))
        old, new = (client.vectors("items", both, version=version) for version in ("v000001", "v000004"))
        found = (old.status == "found") & (new.status == "found")
        assert found.sum() > 30
        cosines = (old.vectors[found] * new.vectors[found]).sum(axis=1)
        assert cosines.mean() > 0.6
        images = [client.vectors(ids=both, view="rff", version=one).vectors for one in ("v000001", "v000004")]
        kernel = (images[0][found] * images[1][found]).sum(axis=1)
        assert np.corrcoef(kernel, cosines)[0, 1] > 0.6
        assert "new generation" in command(served, "job", ended[-1]["job"]).stdout
        for run in (served.home / "runs").glob("job_*"):
            terminate(run, 0)


def _told_of_two(served: Served, client: Client, ended: list[dict[str, Any]]) -> None:
    """What people see while two in a row are held."""
    held = client.collection("items")["held"]
    assert (held["in_a_row"], held["versions"], held["max_held"]) == (2, ["v000002", "v000003"], 3)
    assert held["since"] == client.version("items", "v000002")["created_at"] == ended[-1]["held_since"]
    assert held["diagnosis"] == ended[-1]["diagnosis"]
    assert ended[0]["diagnosis"]["cause"] == "items"
    assert [one["metric"] for one in ended[0]["diagnosis"]["failed"]] == ["unreplaced"]

    (newest, *_) = client.firings("daily")
    assert (newest["outcome"], newest["job_state"]) == ("started", "succeeded")
    assert newest["publication"] == {"status": "held", "version": "v000003", "held_in_a_row": 2}
    (schedule,) = client.schedules()
    assert schedule["last_publication"]["held_in_a_row"] == 2
    assert schedule["last_publication"]["job_id"] == ended[-1]["job"]

    shown = command(served, "job", ended[-1]["job"]).stdout
    assert "held v000003 (2 in a row)" in shown
    assert f"held 2 times in a row since {held['since']}" in shown
    assert f"held because: {held['diagnosis']['summary']}" in shown
    assert "METRIC\tVALUE\tBOUND\tLIMIT\tTIMES\tABOUT" in shown
    assert f"what to do: {held['diagnosis']['advice']}" in shown
    versions = command(served, "versions", "items")
    assert held["diagnosis"]["summary"] in versions.stdout
    assert f"items: held 2 times in a row since {held['since']}" in versions.stderr
    assert "held v000003 (2 in a row)" in command(served, "schedules", "firings", "daily").stdout
    assert "held v000003 (2 in a row)" in command(served, "schedules", "list").stdout
    assert "held v000003 (2 in a row)" in command(served, "jobs").stdout
    assert json.loads(command(served, "versions", "items", "--json").stdout)[0]["sound"] is True
