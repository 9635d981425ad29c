"""A publication tells the metric of its model beside the version before, and proposes a canary while there is none."""

from __future__ import annotations

import shlex

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.refresh import probe
from embeddings.store import open_store
from tests.trainer.item_tables import dataset_at, genre_of, items_table, job_of, write_log
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.runs.events import read_events

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "report"}}
SHELVED = np.arange(1000, 1060)
"""Items that nobody clicked, which make the table large enough for a canary."""


def prepared(folder, brands=7, **rows):
    path = write_log(folder, **rows)
    brand = SHELVED % brands
    shelved = {
        "item": SHELVED,
        "genres": [f"g{genre_of(one)}" for one in SHELVED],
        "brand": brand,
        "price": brand * 1.5,
    }
    table = items_table()
    if brands == 1:
        table = table.set_column(table.column_names.index("brand"), "brand", pa.array([0] * len(table)))
    pq.write_table(pa.concat_tables([table, pa.table(shelved)]), folder / "items.parquet")
    return path


def published(folder, path, name, parent=None, loss="sampled_softmax", **changes):
    directory = write_run(
        folder / name, run_id=name, job=job_of({"loss": loss}, publish=PUBLISH, **changes),
        dataset=dataset_at(path), store_url=str(folder / "store"), parent_version=parent,
    )  # fmt: skip
    assert execute(read_run(directory), start_ranks) == 0
    events = [event.fields for event in read_events(directory)]
    read = "the user tower reads user, taste; the item tower item, genres, brand, price"
    (said,) = [one["message"] for one in events if str(one.get("message")).startswith(read)]
    assert ("AUC of the label may stay near .5" in said) == (loss == "sampled_softmax")
    publication = next(one for one in events if one["type"] == "publication")
    metric, of_epochs = publication["quality"]["metric"], [one for one in events if one["type"] == "metric"]
    return publication, {(one["split"], one["epoch"]): one[metric] for one in of_epochs if metric in one}


def test_a_version_has_the_metric_of_its_model_beside_its_parents(tmp_path):
    path = prepared(tmp_path)
    first, metrics = published(tmp_path, path, "first")
    epoch = first["quality"]["epoch"]
    assert first["quality"]["metric"] == "auc"
    assert first["quality"]["before"] is None
    for split in ("validation", "test"):
        assert first["quality"][split] == metrics[split, epoch]
    assert metrics["validation", epoch] == max(metrics["validation", one] for one in (1, 2))
    assert first["proposed_canary"] == (
        "no canary watches items: to have each refresh tested by the column 'brand' of the item table (7 classes), add "
        f"one: evenkeel canaries add items brand {shlex.quote(str(tmp_path / 'items.parquet'))} --id-column item "
        "--label-column brand"
    )
    collection = open_store(tmp_path / "store").collection("items")
    table = pq.read_table(tmp_path / "items.parquet")
    probe.register(collection, "brand", table["item"].to_numpy(), table["brand"].to_pylist())
    # It learns so few rows by heart, and the last epoch is published.
    second, metrics = published(
        tmp_path, prepared(tmp_path, num_rows=600), "second", first["version"], epochs=5, loss="bce",
        optimizer={"kind": "adam", "learning_rate": 0.1},
        regularizers={"early_stopping": {"metric": "logloss", "keep": "last", "patience": 100}},
    )  # fmt: skip
    curve = [metrics["validation", one] for one in range(1, 6)]
    assert curve[-1] > min(curve) + 0.01, curve
    assert (second["status"], second["proposed_canary"]) == ("published", None)
    assert second["quality"] == collection.manifest(second["version"])["quality"]
    assert second["quality"]["validation"] == curve[-1]
    assert "which is published: leave regularizers.early_stopping out" in second["quality"]["overfits"]
    assert second["quality"]["before"] == {
        "version": first["version"], **{name: first["quality"][name] for name in ("metric", "validation", "test")},
    }  # fmt: skip


def test_no_canary_is_proposed_of_one_class(tmp_path):
    assert published(tmp_path, prepared(tmp_path, brands=1), "first")[0]["proposed_canary"] is None
