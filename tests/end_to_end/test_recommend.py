"""A user's recommendations over HTTP through two warm refreshes: each day they are those of the day's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.store import open_store
from embeddings.vectors.item_vectors import CARRIED
from service.app import create_app
from service.core.settings import Settings
from tests.trainer.publishing.test_users import MODELS, history_of, trained, write_log
from trainer.inference.predict import Predictor
from trainer.runs.directory import Run

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end, pytest.mark.anyio]

USERS, K = ["u03", "u07", "u31", "u44"], 20


def own_lists(run: Run, days: Path) -> list[list[int]]:
    """The day's model's own top items that a user has not seen, from ``predict`` of its checkpoint."""
    items = pq.read_table(days).column("item").unique().to_pylist()
    lists = []
    for user in USERS:
        had = history_of(run, user)
        if run.job.model.reads_sequences:
            rows = pa.table({"user": [user], "item": pa.array([had], pa.list_(pa.int64()))})
            lists.append(Predictor(run.directory, k=K).predict(rows).column("items")[0].as_py())
            continue
        left = [item for item in items if item not in had]
        scores = Predictor(run.directory).predict(pa.table({"user": [user] * len(left), "item": left})).column(0)
        lists.append([left[row] for row in np.argsort(-scores.to_numpy())[:K]])
    return lists


@pytest.mark.parametrize("kind", ["bpr", "two_tower", "sasrec"])
async def test_recommendations_follow_the_model_through_refreshes(kind: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", role="api", store_url=str(tmp_path / "store"))
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        key = (settings.home / "admin.key").read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            before: dict[str, Any] = {}
            for day in range(3):
                rows = write_log(tmp_path / f"day{day}", seed=day)
                run = trained(tmp_path, f"day{day}", rows, MODELS[kind], seed=day, **before)
                body = {"users": USERS, "k": 2 * K, "exclude_seen": True}
                answer = (await client.post("/v1/collections/items/recommend", json=body)).json()
                collection = open_store(run.store_url).collection("items")
                assert answer["version"] == collection.current() == f"v00000{day + 1}"
                reader = collection.open()
                carried = set(reader.ids.to_numpy(zero_copy_only=False)[reader.statuses == CARRIED].tolist())
                for user, own in zip(answer["users"], own_lists(run, rows), strict=True):
                    served = [item["id"] for item in user["items"] if item["id"] not in carried]
                    assert served[:K] == own[:K], (day, user["id"])
                before = {
                    "init_from": {"job": run.run_id}, "init_checkpoint": str(run.checkpoints),
                    "parent_version": answer["version"],
                }  # fmt: skip
            assert collection.recommender().users.scored is not None
