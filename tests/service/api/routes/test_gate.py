"""The gate over HTTP and on the command line: canaries, calibration, and who overrode it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.refresh.publish import Gate as GateMode
from embeddings.refresh.publish import Settings as StageSettings
from embeddings.refresh.publish import publish_candidate
from embeddings.vectors.item_vectors import ItemVectors
from service.cli.gate import null_job
from service.core.settings import Settings
from tests.service import published
from trainer.spec import parse_job

pytestmark = pytest.mark.anyio

N, D = 300, 8


def refresh(settings: Settings, name: str, seed: int, noise: float = 0.05, model: str = "bpr") -> str:
    """A published version, straight from the stage: three overlapping clusters and some noise."""
    store = published.store_at(settings)
    centres = np.repeat(2 * np.eye(3, D), N // 3, axis=0)
    base = centres + np.random.default_rng(0).standard_normal((N, D))
    vectors = (base + noise * np.random.default_rng(seed).standard_normal((N, D))).astype(np.float32)
    end = publish_candidate(
        store, name, ItemVectors(np.arange(N), vectors), StageSettings(ema=None, gate=GateMode("report")),
        parent_version=store.collection(name).current(), model=model,
    )  # fmt: skip
    return str(end.version)


def labels_file(settings: Settings, **columns: Any) -> str:
    path = settings.data_roots[0] / "labels.parquet"
    pq.write_table(pa.table({"id": np.arange(N), "label": np.repeat(["a", "b", "c"], N // 3), **columns}), path)
    return str(path)


# --- canaries --------------------------------------------------------------------------------------------------------


async def test_a_canary_is_registered_listed_and_removed(client: httpx.AsyncClient, settings: Settings) -> None:
    refresh(settings, "items", 1)
    body = {"name": "kind", "uri": labels_file(settings)}
    answer = await client.post("/v1/collections/items/canaries", json=body)
    assert answer.status_code == 201, answer.text
    (made,) = answer.json()["items"]
    assert (made["num_items"], made["classes"], made["version"]) == (N, ["a", "b", "c"], "v000001")
    assert made["accuracy"] > 0.6 > made["majority"]
    assert "weights" not in made
    assert (await client.get("/v1/collections/items/canaries")).json()["items"] == [made]
    refresh(settings, "items", 2)
    metrics = (await client.get("/v1/collections/items/versions/current")).json()["metrics"]
    assert metrics["canary_accuracy[kind]"] > 0.6
    assert (await client.delete("/v1/collections/items/canaries/kind")).status_code == 204
    assert (await client.get("/v1/collections/items/canaries")).json() == {"items": []}
    gone = await client.delete("/v1/collections/items/canaries/kind")
    assert (gone.status_code, gone.json()["type"]) == (404, "urn:evenkeel:canary-not-found")


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"name": "kind"}, 422, "give name and uri, or copy_from"),
        ({"name": "kind", "copy_from": "items"}, 422, "give name and uri, or copy_from"),
        ({"name": "kind", "uri": "LABELS", "copy_from": "items"}, 422, "give name and uri, or copy_from"),
        ({"name": "kind", "uri": "/etc/passwd"}, 422, "outside the data roots"),
        ({"name": "A b", "uri": "LABELS"}, 422, "name"),
        ({"copy_from": "nothing"}, 404, "no collection 'nothing'"),
    ],
)
async def test_canaries_that_cannot_be(
    client: httpx.AsyncClient, settings: Settings, body: dict[str, Any], status: int, says: str
) -> None:
    refresh(settings, "items", 1)
    uri = labels_file(settings)
    body = {name: uri if value == "LABELS" else value for name, value in body.items()}
    answer = await client.post("/v1/collections/items/canaries", json=body)
    assert answer.status_code == status
    assert says in answer.text


async def test_no_file_of_a_directory_is_read_that_was_not_checked(
    client: httpx.AsyncClient, settings: Settings, tmp_path: Path
) -> None:
    refresh(settings, "items", 1)
    folder = settings.data_roots[0] / "labels"
    folder.mkdir()
    Path(labels_file(settings)).rename(folder / "own.parquet")
    others = tmp_path / "others.parquet"
    pq.write_table(pa.table({"id": np.arange(N), "label": ["secret"] * N}), others)
    (folder / "linked.bin").symlink_to(others)
    answer = await client.post("/v1/collections/items/canaries", json={"name": "kind", "uri": str(folder)})
    assert answer.status_code == 201, answer.text
    assert answer.json()["items"][0]["classes"] == ["a", "b", "c"]
    (folder / "own.parquet").unlink()
    none = await client.post("/v1/collections/items/canaries", json={"name": "kind", "uri": str(folder)})
    assert none.status_code == 422


async def test_labels_without_their_columns(client: httpx.AsyncClient, settings: Settings) -> None:
    refresh(settings, "items", 1)
    path = settings.data_roots[0] / "odd.parquet"
    pq.write_table(pa.table({"id": [1], "genre": ["a"]}), path)
    answer = await client.post("/v1/collections/items/canaries", json={"name": "kind", "uri": str(path)})
    assert answer.status_code == 422
    assert "lacks the column label" in answer.text


# --- calibration -----------------------------------------------------------------------------------------------------


async def test_calibration_by_nulls_of_a_scratch_collection(client: httpx.AsyncClient, settings: Settings) -> None:
    refresh(settings, "items", 1)
    await client.post("/v1/collections/items/canaries", json={"name": "kind", "uri": labels_file(settings)})
    refresh(settings, "scratch", 10)
    copied = await client.post("/v1/collections/scratch/canaries", json={"copy_from": "items"})
    assert [one["name"] for one in copied.json()["items"]] == ["kind"]
    nulls = [refresh(settings, "scratch", seed) for seed in (11, 12, 13)]
    assert (await client.get("/v1/collections/items/calibration")).json() == {"items": []}
    body = {"nulls": "scratch", "versions": nulls, "limits": {"newly_carried": 0.4}}
    answer = await client.post("/v1/collections/items/calibration", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["model"], found["num_nulls"]) == ("bpr", 3)
    assert found["limits"]["newly_carried"] == 0.4
    assert found["limits"]["cosine_mean"] == pytest.approx(found["nulls"]["cosine_mean"]["worst"] - 0.02)
    assert "canary_churn[kind]" in found["limits"]
    assert (await client.get("/v1/collections/items/calibration")).json() == {"items": [found]}
    # The scratch versions are given up but for the anchor, their figures stay.
    states = [one["state"] for one in (await client.get("/v1/collections/scratch/versions")).json()["items"]]
    assert states == ["published", "expired", "expired", "superseded"]


async def test_calibrations_that_cannot_be(client: httpx.AsyncClient, settings: Settings) -> None:
    refresh(settings, "items", 1)
    refresh(settings, "scratch", 10)
    nulls = [refresh(settings, "scratch", seed) for seed in (11, 12, 13)]

    async def refused(status: int, says: str, **changes: Any) -> None:
        body = {"nulls": "scratch", "versions": nulls, **changes}
        answer = await client.post("/v1/collections/items/calibration", json=body)
        assert answer.status_code == status
        assert says in answer.text

    await refused(422, "2 null refreshes: at least 3", versions=nulls[:2])
    await refused(422, f"{nulls[0]}: named more than once", versions=[nulls[0]] * 3)
    await refused(422, "'current': not the names of versions", versions=["current"] * 3)
    await refused(422, "no such metric", limits={"cosine_maen": 0.5})
    served = [refresh(settings, "items", seed) for seed in (2, 3, 4)]
    await refused(422, "'items' is no scratch collection", nulls="items", versions=served)
    assert "expired" not in {one["state"] for one in published.store_at(settings).collection("items").versions()}
    for seed in (20, 21, 22, 23, 24):
        refresh(settings, "others", seed)
    await refused(422, "'others' is no scratch collection", nulls="others", versions=["v000003", "v000004", "v000005"])
    await refused(422, "'others' is no scratch collection", nulls="others", versions=["v000002", "v000003", "v000004"])
    assert "expired" not in {one["state"] for one in published.store_at(settings).collection("others").versions()}
    await refused(404, "no collection 'nothing'", nulls="nothing")
    await refused(404, "no version 'v000099'", versions=[*nulls, "v000099"])
    assert (await client.get("/v1/collections/items/calibration")).json() == {"items": []}


# --- override --------------------------------------------------------------------------------------------------------


async def test_an_override_is_kept_with_reason_and_key(client: httpx.AsyncClient, settings: Settings) -> None:
    published.publish(settings)
    held = published.hold(settings)
    path = f"/v1/collections/items/versions/{held}/promote"
    answer = await client.post(path, json={"reason": "a new catalogue", "override_gate": True})
    override = answer.json()["override"]
    keys = {one["id"] for one in (await client.get("/v1/keys")).json()["items"]}
    assert override["reason"] == "a new catalogue"
    assert override["key"] in keys
    (switch, *_) = (await client.get("/v1/collections/items")).json()["history"]
    assert (switch["override_gate"], switch["key"]) == (True, override["key"])
    # It stays with the version when another one is served, and when it has expired.
    later, _ = published.publish(settings, seed=5)
    assert (await client.get(f"/v1/collections/items/versions/{held}")).json()["override"] == override
    published.store_at(settings).collection("items").retain(1)
    manifest = (await client.get(f"/v1/collections/items/versions/{held}")).json()
    assert (manifest["state"], manifest["override"]) == ("expired", override)
    assert (await client.get(f"/v1/collections/items/versions/{later}")).json()["override"] is None


async def test_a_promotion_that_overrides_nothing_says_so(client: httpx.AsyncClient, settings: Settings) -> None:
    first, _ = published.publish(settings)
    published.publish(settings, seed=1)
    path = f"/v1/collections/items/versions/{first}/promote"
    answer = await client.post(path, json={"reason": "rollback", "override_gate": True})
    assert answer.json()["override"] is None
    (switch, *_) = (await client.get("/v1/collections/items")).json()["history"]
    assert switch["key"]


# --- the jobs of `evenkeel calibrate` --------------------------------------------------------------------------------

JOB: dict[str, Any] = {
    "spec_version": 1,
    "name": "n" * 60,
    "dataset": {"name": "films"},
    "model": {"kind": "bpr", "embedding_dim": 8},
    "optimizer": {"kind": "adam", "learning_rate": 0.005},
    "epochs": 1,
    "batch_size": 64,
    "seed": 3,
    "init_from": {"collection": "items", "version": "current"},
    "publish": {"collection": "items", "feature": "item", "gate": {"mode": "enforce"}, "views": [{"name": "wide"}]},
}


async def test_null_jobs_differ_by_seed_and_touch_nothing_that_is_served() -> None:
    spec = parse_job(JOB)
    job = spec.model_dump(mode="json")
    # As the service will read them.
    nulls = [parse_job(null_job(spec, "items", "scratch", number).model_dump(mode="json")) for number in range(3)]
    assert len({null.seed for null in nulls} | {3}) == 4
    for null in nulls:
        assert null.publish is not None
        assert (null.publish.collection, null.publish.gate.mode, null.publish.views) == ("scratch", "report", ())
    starts = [null.init_from.collection for null in nulls if null.init_from is not None]
    assert starts == ["items", "scratch", "scratch"]
    same = {"seed", "name", "publish", "init_from"}
    for null in nulls:
        document = null.model_dump(mode="json")
        assert {name: document[name] for name in document.keys() - same} == {
            name: job[name] for name in job.keys() - same
        }
    assert null_job(parse_job({**JOB, "init_from": None}), "items", "scratch", 1).init_from is None
