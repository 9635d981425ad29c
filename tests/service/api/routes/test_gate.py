"""The gate over HTTP: canaries, and who overrode it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.refresh.publish import Gate as GateMode
from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.refresh.publish import Settings as StageSettings
from embeddings.vectors.item_vectors import ItemVectors
from service.core.settings import Settings
from tests.service import published

pytestmark = pytest.mark.anyio

N, D = 300, 8


def refresh(settings: Settings, name: str, seed: int, noise: float = 0.05, model: str = "bpr") -> str:
    """A published version, straight from the stage: three overlapping clusters and some noise."""
    store = published.store_at(settings)
    centres = np.repeat(2 * np.eye(3, D), N // 3, axis=0)
    base = centres + np.random.default_rng(0).standard_normal((N, D))
    vectors = (base + noise * np.random.default_rng(seed).standard_normal((N, D))).astype(np.float32)
    end = publish_candidate(
        store,
        name,
        RefreshRequest(
            ItemVectors(np.arange(N), vectors),
            StageSettings(ema=None, gate=GateMode("report")),
            parent_version=store.collection(name).current(),
            model=model,
        ),
    )
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
    assert "name columns of the table: id, genre" in answer.text


async def test_labels_may_be_a_column_of_the_item_table(client: httpx.AsyncClient, settings: Settings) -> None:
    """As CSV, with a row without a label and one without an id."""
    refresh(settings, "items", 1)
    path = settings.data_roots[0] / "items.csv"
    rows = [f"{number},{'abc'[number // (N // 3)]}" for number in range(N)]
    path.write_text("\n".join(["sku,kind", *rows[:-1], f"{N - 1},", ",c"]) + "\n")
    body = {"name": "kind", "uri": str(path), "id_column": "sku", "label_column": "kind"}
    answer = await client.post("/v1/collections/items/canaries", json=body)
    assert answer.status_code == 201, answer.text
    (made,) = answer.json()["items"]
    assert (made["num_items"], made["classes"]) == (N - 1, ["a", "b", "c"])
    assert made["accuracy"] > 0.6


async def test_canaries_are_copied_to_another_collection(client: httpx.AsyncClient, settings: Settings) -> None:
    refresh(settings, "items", 1)
    refresh(settings, "others", 2)
    await client.post("/v1/collections/items/canaries", json={"name": "kind", "uri": labels_file(settings)})
    copied = await client.post("/v1/collections/others/canaries", json={"copy_from": "items"})
    assert (copied.status_code, [one["name"] for one in copied.json()["items"]]) == (201, ["kind"])
    refresh(settings, "others", 3)
    assert "canary_churn[kind]" in (await client.get("/v1/collections/others/versions/current")).json()["metrics"]


async def test_there_is_no_calibration(client: httpx.AsyncClient, settings: Settings) -> None:
    refresh(settings, "items", 1)
    for answer in (
        await client.get("/v1/collections/items/calibration"),
        await client.post("/v1/collections/items/calibration", json={"nulls": "nulls", "versions": ["v000001"]}),
    ):
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:evenkeel:not-found")


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
