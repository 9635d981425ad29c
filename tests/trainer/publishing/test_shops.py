"""The job proposed for clicks, with and without an item table, publishes and refreshes for shops of other shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.sources.infer import job_of, propose
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import Run, read_run, write_run
from trainer.runs.events import read_events
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job


class Shop(NamedTuple):
    """Sizes of a shop; a click depends on the product of a vector of the user and one of the item.

    An item's vector is the sum of its category's, its brand's and its own. Prices tell nothing.
    """

    rows: int
    users: int
    items: int
    categories: int
    directions: int
    popularity: float
    """Exponent of the item's rank in its share of the rows."""
    with_table: bool = True

    def write(self, folder: Path) -> tuple[Path, Path]:
        rng = np.random.default_rng(self.items)
        category, brand = rng.integers(0, self.categories, self.items), rng.integers(0, 30, self.items)
        vectors = rng.normal(size=(self.categories, self.directions))[category]
        vectors += rng.normal(scale=0.5, size=(30, self.directions))[brand]
        vectors += rng.normal(scale=0.3, size=vectors.shape)
        tastes = rng.normal(size=(self.users, self.directions))
        shares = np.arange(1, self.items + 1) ** -self.popularity
        item = rng.choice(self.items, self.rows, p=shares / shares.sum())
        user = rng.integers(0, self.users, self.rows)
        logits = (tastes[user] * vectors[item]).sum(1) * 1.5 / np.sqrt(self.directions) - 1.0
        clicked = rng.random(self.rows) < 1 / (1 + np.exp(-logits))
        rows = {"customer": user, "sku": [f"S{one}" for one in item], "clicked": clicked.astype("int8")}
        items = {"sku": [f"S{one}" for one in range(self.items)], "category": [f"c{one}" for one in category]}
        items |= {"brand": [f"b{one}" for one in brand], "price": np.exp(rng.normal(3.0, 0.8, self.items)).round(2)}
        for name, columns in (("rows", rows), ("items", items)):
            pq.write_table(pa.table(columns), folder / f"{name}.parquet")
        return folder / "rows.parquet", folder / "items.parquet"


@pytest.mark.slow
@pytest.mark.parametrize(
    "shop",
    [
        Shop(30_000, 2000, 800, 12, 4, 1.0),
        Shop(20_000, 800, 150, 6, 3, 1.1),
        Shop(30_000, 2000, 800, 12, 4, 1.0, with_table=False),
    ],
    ids=["many items", "few items", "no item table"],
)
def test_the_proposed_job_and_its_refresh_publish(shop: Shop, tmp_path: Path) -> None:
    rows, items = shop.write(tmp_path)
    proposal = propose(rows, items=items if shop.with_table else None)
    dataset, document = parse_dataset(proposal.document), job_of(proposal)
    assert document["model"]["kind"] == "two_tower"
    table = pq.read_table(rows)
    pq.write_table(table.slice(0, len(table) * 12 // 13), rows)
    first = trained(tmp_path / "first", dataset, parse_job(document))
    pq.write_table(table, rows)
    trained(tmp_path / "second", dataset, parse_job(document | {"init_from": {"collection": "rows-items"}}), first)


@pytest.mark.slow
def test_the_proposed_job_of_clicks_alone_and_its_refresh_publish(tmp_path: Path) -> None:
    rows, _ = Shop(40_000, 1500, 400, 12, 4, 0.7, with_table=False).write(tmp_path)
    table = pq.read_table(rows)
    table = table.filter(table["clicked"].to_numpy() == 1).select(["customer", "sku"]).rename_columns(["user", "track"])
    pq.write_table(table, rows)
    proposal = propose(rows)
    dataset, document = parse_dataset(proposal.document), job_of(proposal)
    assert document["model"] == {"kind": "bpr", "embedding_dim": 16}
    assert "optimizer" not in document, "the kind's defaults fill in the rest"
    pq.write_table(table.slice(0, len(table) * 12 // 13), rows)
    first = trained(tmp_path / "first", dataset, parse_job(document))
    pq.write_table(table, rows)
    trained(tmp_path / "second", dataset, parse_job(document | {"init_from": {"collection": "rows-items"}}), first)


@pytest.mark.slow
def test_a_refresh_whose_optimizer_moves_vectors_is_told_of_one_that_does_not(tmp_path: Path) -> None:
    rows, _ = Shop(12_000, 800, 300, 12, 4, 1.0, with_table=False).write(tmp_path)
    proposal = propose(rows)
    document = job_of(proposal) | {"optimizer": {"kind": "adam_ar", "learning_rate": 0.003}, "epochs": 5}
    document["publish"] = {**document["publish"], "gate": {"limits": {"effective_rank": 1}}}
    dataset = parse_dataset(proposal.document)
    first = trained(tmp_path / "first", dataset, parse_job(document))
    document["init_from"] = {"collection": "rows-items"}
    told = published(started(tmp_path / "second", dataset, parse_job(document), first))
    assert told["status"] == "held"
    assert told["diagnosis"]["advice"].startswith("The optimizer adam_ar learns rows of ids with few examples anew")
    assert "set optimizer.kind: adam. Look at the run" in told["diagnosis"]["advice"]
    document["optimizer"] = {"kind": "adam", "learning_rate": 0.003}
    trained(tmp_path / "third", dataset, parse_job(document), first)


@pytest.mark.slow
def test_a_refresh_of_too_few_items_to_align_is_told_what_helps(tmp_path: Path) -> None:
    rows, items = Shop(8_000, 400, 100, 6, 3, 1.0).write(tmp_path)
    proposal = propose(rows, items=items)
    dataset, document = parse_dataset(proposal.document), job_of(proposal) | {"epochs": 3}
    document["model"]["embedding_dim"] = 16
    first = trained(tmp_path / "first", dataset, parse_job(document))
    document["init_from"] = {"collection": "rows-items"}
    told = published(started(tmp_path / "second", dataset, parse_job(document), first))
    assert told["diagnosis"]["advice"].startswith(
        "100 items are fewer than the 192 that alignment needs with model.embedding_dim: 16: set publish.align: false, "
        "or begin anew with at most 8. If the change is meant,"
    )
    document["publish"]["align"] = False
    trained(tmp_path / "third", dataset, parse_job(document), first)


def trained(folder: Path, dataset: DatasetSpec, job: JobSpec, parent: Run | None = None) -> Run:
    """Return the run of a job whose version was published."""
    run = started(folder, dataset, job, parent)
    told = published(run)
    assert (told["status"], told["reasons"]) == ("published", [])
    return run


def started(folder: Path, dataset: DatasetSpec, job: JobSpec, parent: Run | None) -> Run:
    directory = write_run(
        folder, run_id=folder.name, job=job.against(dataset), dataset=dataset, store_url=str(folder.parent / "store"),
        parent_version=None if parent is None else "v000001",
        init_checkpoint=None if parent is None else str(parent.checkpoints),
    )  # fmt: skip
    return read_run(directory)


def published(run: Run) -> dict[str, Any]:
    """Return the publication event of a run."""
    assert execute(run, start_ranks) == 0
    return next(event.fields for event in read_events(run.directory) if event.fields["type"] == "publication")
