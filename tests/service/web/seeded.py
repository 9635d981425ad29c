"""A service with something of everything to look at: jobs in every state, versions, one of them held, a schedule."""

from __future__ import annotations

import contextlib
import datetime
import json
import sqlite3
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from embeddings.refresh.publish import RefreshRequest, Settings, publish_candidate
from embeddings.store import open_store
from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import ItemVectors
from embeddings.vectors.user_vectors import SeenLists, UserVectors
from tests.service import serving
from tests.service.serving import Served

COLLECTION = "items"
DIM, NUM_ITEMS, NUM_USERS = 16, 480, 40
GENRES = ("comedy", "drama", "crime", "war", "music", "western", "news", "family")
CURVES = {
    "adam": [0.741, 0.733, 0.712, 0.701],
    "adam-ar": [0.738, 0.749, 0.753, 0.7545],
    "nightly": [0.744, 0.748],
}
DRIFT = [{"kind": "label_rate", "message": "the label rate is 0.31, it was 0.18"}]
LONG_NAME = "a-very-long-name-of-a-job-that-somebody-gave-it-in-a-hurry-here"


def job_spec(name: str, optimizer: str = "adam_ar", **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "dataset": {"name": "clicks"},
        "model": {"kind": "two_tower"},
        "optimizer": {"kind": optimizer},
        "epochs": 4,
        "publish": {"collection": COLLECTION, "feature": "item"},
        **fields,
    }


def fill(served: Served) -> dict[str, str]:
    """The ids of the jobs by name."""
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.key}"}, timeout=60) as client:

        def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = client.post(path, json=body)
            assert answer.is_success, answer.text
            return dict(answer.json())

        post("/v1/datasets", serving.dataset(served.data))
        ids = {
            name: post("/v1/jobs", job_spec(name, optimizer, **fields))["id"]
            for name, optimizer, fields in (
                ("adam", "adam", {"labels": {"team": "ranking"}}),
                ("adam-ar", "adam_ar", {"labels": {"team": "ranking", "stage": "trial"}}),
                (LONG_NAME, "sgd", {}),
                ("broken", "adam_ar", {}),
                ("drifted", "adam_ar", {}),
                ("nightly", "adam_ar", {}),
                ("waiting", "sgd", {}),
            )
        }
        held = publish_versions(served, ids)
        _jobs(served, ids, held)
        nightly = {"name": "every-night", "cron": "0 3 * * *", "timezone": "Europe/Berlin", "job": job_spec("nightly")}
        post("/v1/schedules", nightly)
        post("/v1/schedules", {"name": "stopped", "cron": "0 4 * * 1", "job": job_spec("weekly"), "paused": True})
        ids["fired"] = post("/v1/schedules/every-night/trigger", {})["job_id"]
        served.set_job(ids["fired"], state="cancelled", finished_at=_ago(minutes=9))
        post("/v1/keys", {"name": "reader", "scopes": ["jobs:read", "features:read"]})
    return ids


def publish_versions(served: Served, ids: dict[str, str]) -> dict[str, Any]:
    """Refreshes that each learnt in coordinates of their own, the last of other items: what became of that one."""
    random = np.random.default_rng(7)
    store = open_store(served.settings.store_url)
    centres = random.standard_normal((8, DIM)) * 2
    clusters = random.integers(0, len(centres), NUM_ITEMS)
    rows = centres[clusters] + random.standard_normal((NUM_ITEMS, DIM)) * 0.5
    outcome = None
    for night in range(7):
        parent = None if outcome is None else outcome.version
        rows = rows + random.standard_normal(rows.shape) * (0.12 + 0.05 * (night % 3))
        turned = rows @ np.linalg.qr(random.standard_normal((DIM, DIM)))[0] if night else rows
        candidate = ItemVectors(np.arange(1, NUM_ITEMS + 1) * 10, turned.astype(np.float32))
        # User u likes what is near item 10 u, the one item that it has had; the first version has no users.
        had = SeenLists(candidate.keys, np.arange(NUM_USERS), np.arange(NUM_USERS + 1))
        genres = [GENRES[cluster] for cluster in clusters]
        texts = {"genre": genres, "title": [f"The {genre} of number {row}" for row, genre in enumerate(genres)]}
        columns = ItemColumns(candidate.keys, {name: pa.array(one, pa.large_string()) for name, one in texts.items()})
        users = UserVectors(
            np.arange(1, NUM_USERS + 1), turned[:NUM_USERS].astype(np.float32), had, unit_items=True, columns=columns
        )
        outcome = publish_candidate(
            store,
            COLLECTION,
            RefreshRequest(
                candidate,
                Settings(),
                job_id=ids["adam-ar"] if night == 6 else None,
                parent_version=parent,
                model="m",
                users=users if night else None,
            ),
        )
        assert outcome.status == "published", outcome.reasons
    assert outcome is not None
    shuffled = turned[random.permutation(NUM_ITEMS)].astype(np.float32)
    held = publish_candidate(
        store,
        COLLECTION,
        RefreshRequest(
            ItemVectors(candidate.ids, shuffled),
            Settings(),
            job_id=ids["drifted"],
            parent_version=outcome.version,
            model="m",
            lineage={"drift": DRIFT},
        ),
    )
    assert held.status == "held"
    manifest = store.collection(COLLECTION).manifest(str(held.version))
    return {"status": "held", "collection": COLLECTION, "held_in_a_row": 1} | {
        name: manifest[name] for name in ("version", "reasons", "gate", "diagnosis")
    }


def _jobs(served: Served, ids: dict[str, str], held: dict[str, Any]) -> None:
    done = {"epoch": 4, "epochs": 4, "step": 800, "steps": 800, "examples_per_second": 98765.0}
    needs = {"workers": 1, "cores": 1.0, "memory_bytes": 1_234_567_890, "gpus": 0, "counted": True}
    began = {"started_at": _ago(minutes=40), "attempt": 1, "needs": needs}
    error = {"code": "bad-data", "message": "column 'click' holds <NaN>", "remedy": "clean it"}
    published = {"status": "published", "collection": COLLECTION, "version": "v000007", "reasons": []}
    lineage = {
        "dataset_fingerprint": "1e855d9395f1a7e3",
        "spec_sha256": "fefaa67620cbc669",
        "git_commit": None,
        "packages": {"evenkeel": "0.1.0", "torch": "2.13.0"},
        "drift": [],
        "warm_start": f"/runs/{ids['adam']}/checkpoints/step-000000000800",
    }
    for name, columns in {
        "adam": {"state": "succeeded", "progress": done},
        "adam-ar": {"state": "succeeded", "progress": done, "publication": published, "lineage": lineage},
        LONG_NAME: {"state": "succeeded", "progress": done},
        "broken": {"state": "failed", "error": error},
        "drifted": {
            "state": "succeeded", "progress": done, "publication": held, "lineage": {**lineage, "drift": DRIFT},
        },
        "nightly": {"state": "running", "progress": {**done, "epoch": 3, "step": 500, "starved": 0.55}},
    }.items():  # fmt: skip
        ended = {} if columns["state"] == "running" else {"finished_at": _ago(minutes=12)}
        served.set_job(ids[name], **began, **ended, **columns)
    served.set_job(ids["waiting"], reason="2 cores are free, 4 are asked for")
    buckets = [
        {"bucket": number, "ids": 100, "min_count": 4**number, "max_count": 4 ** (number + 1), "norm": norm,
         "examples": 1000, "auc": 0.6 + norm / 10}
        for number, norm in enumerate([0.2, 0.5, 0.9, 1.2])
    ]  # fmt: skip
    metrics = []
    for name, curve in CURVES.items():
        for epoch, auc in enumerate(curve, 1):
            metrics.append((ids[name], epoch, "train", {"loss": 0.6 - 0.05 * epoch}))
            for split in ("validation", "test"):
                values: dict[str, Any] = {"auc": auc - 0.001 * (split == "test"), "logloss": 0.5 + 0.01 * epoch}
                if split == "test" and epoch == len(curve):
                    values |= {"frequency_buckets": buckets}
                metrics.append((ids[name], epoch, split, values))
    with contextlib.closing(sqlite3.connect(served.home / "evenkeel.db", timeout=120)) as database, database:
        database.executemany(
            'INSERT INTO job_metric (job_id, epoch, split, "values") VALUES (?, ?, ?, ?)',
            [(*one[:3], json.dumps(one[3])) for one in metrics],
        )
    for name in ("adam-ar", "nightly"):
        run_dir = served.settings.run_dir(ids[name])
        run_dir.mkdir(parents=True)
        (run_dir / "log.txt").write_text("".join(f"step {step}: loss {0.7 - step / 2000:.3f}\n" for step in range(500)))
        told = [
            {"time": _ago(seconds=2400 - 2 * step).replace(" ", "T") + "Z", "attempt": 1, "type": "progress",
             "step": step, "loss": 0.7 - step / 2000, "examples_per_second": 90_000 + 8000 * np.sin(step / 40),
             "cores": 3.6 - 2.0 * (step > 500), "starved": 0.05 + 0.5 * (step > 500),
             "memory_bytes": int(2**30 * (1.1 - 0.6 * np.exp(-step / 90)))}
            for step in range(0, 800, 10)
        ]  # fmt: skip
        (run_dir / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in told))


def _ago(**since: int) -> str:
    """A time as SQLite keeps it."""
    at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(**since)
    return at.strftime("%Y-%m-%d %H:%M:%S.%f")
