"""The job that is proposed for clicks and an item table publishes, for shops of different shapes."""

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
    """Sizes of a shop whose users like some categories of its items."""

    rows: int
    users: int
    items: int
    categories: int
    numbers: int = 0
    other_clicks: float = 0.1
    """Share of clicks on items of other categories than the one that the user likes at that moment."""

    def write(self, folder: Path) -> tuple[Path, Path]:
        rng = np.random.default_rng(0)
        category = rng.integers(0, self.categories, self.items)
        liked = rng.dirichlet(np.full(self.categories, 0.2), self.users)
        user = rng.integers(0, self.users, self.rows)
        wanted = (liked.cumsum(1)[user] < rng.random(self.rows)[:, None]).sum(1).clip(max=self.categories - 1)
        of_category = [np.append(np.flatnonzero(category == one), 0) for one in range(self.categories)]
        item = np.array([rng.choice(of_category[one]) for one in wanted])
        item = np.where(rng.random(self.rows) < 0.2, rng.integers(0, self.items, self.rows), item)
        clicked = rng.random(self.rows) < np.where(category[item] == wanted, 0.5, self.other_clicks)
        rows = {"customer": user, "sku": [f"S{one}" for one in item], "clicked": clicked.astype("int8")}
        items = {"sku": [f"S{one}" for one in range(self.items)], "category": [f"c{one}" for one in category]}
        items |= {"price": np.exp(rng.normal(3.0, 0.8, self.items)).round(2)}
        items |= {f"number_{one}": rng.normal(size=self.items) for one in range(self.numbers)}
        for name, columns in (("rows", rows), ("items", items)):
            pq.write_table(pa.table(columns), folder / f"{name}.parquet")
        return folder / "rows.parquet", folder / "items.parquet"


@pytest.mark.slow
@pytest.mark.parametrize(
    "shop",
    [
        Shop(16_000, 1200, 300, 6),
        Shop(16_000, 400, 1500, 20, numbers=3),
        Shop(24_000, 2000, 120, 10, other_clicks=0.02),
    ],
    ids=["few categories", "many items", "popular items"],
)
def test_the_proposed_job_publishes(shop: Shop, tmp_path: Path) -> None:
    rows, items = shop.write(tmp_path)
    document = propose(rows, items=items).document
    dataset = parse_dataset(document)
    job = parse_job(job_of(document)).against(dataset)
    assert job.model.kind == "two_tower"
    run = read_run(
        write_run(tmp_path / "run", run_id="shop", job=job, dataset=dataset, store_url=str(tmp_path / "store"))
    )
    assert execute(run, start_ranks) == 0
    told = next(event.fields for event in read_events(run.directory) if event.fields["type"] == "publication")
    assert (told["status"], told["reasons"]) == ("published", [])
    rank = next(check["value"] for check in told["gate"] if check["metric"] == "effective_rank")
    assert rank > 4.0
