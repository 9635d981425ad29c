"""The job that is proposed for clicks, with and without an item table, publishes for shops of different shapes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.sources.infer import job_of, propose
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.runs.events import read_events
from trainer.spec import parse_dataset, parse_job


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
        Shop(40_000, 4000, 2000, 40, 8, 0.7),
        Shop(20_000, 800, 150, 6, 3, 1.1, with_table=False),
    ],
    ids=["few tastes", "many items", "no item table"],
)
def test_the_proposed_job_publishes(shop: Shop, tmp_path: Path) -> None:
    rows, items = shop.write(tmp_path)
    document = propose(rows, items=items if shop.with_table else None).document
    dataset = parse_dataset(document)
    job = parse_job(job_of(document)).against(dataset)
    assert job.model.kind == "two_tower"
    assert ("recall_20_full" in job.evaluation.metrics) == shop.with_table
    run = read_run(
        write_run(tmp_path / "run", run_id="shop", job=job, dataset=dataset, store_url=str(tmp_path / "store"))
    )
    assert execute(run, start_ranks) == 0
    told = next(event.fields for event in read_events(run.directory) if event.fields["type"] == "publication")
    assert (told["status"], told["reasons"]) == ("published", [])
