"""A chain of refreshes over a sliding window: ids come, go on and are retired, on one rank and on two."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import torch

from embeddings.store import open_store
from embeddings.vectors.item_vectors import CARRIED, FOUND, MISSING
from trainer.checkpoint.format import latest_valid
from trainer.checkpoint.warm_start import id_maps
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}, "ema": None, "align": False}


def rows_by_id(run):
    """id -> (weight, state) as the run's last checkpoint stores them."""
    found = latest_valid(run.checkpoints)
    weight, state = found.read_rows("item")
    ids = id_maps(found)["item"].ids.to_pylist()
    assert len(weight) == len(ids) + 2
    return {
        id_: (weight[row], {name: value[row] for name, value in state.items()}) for row, id_ in enumerate(ids, start=2)
    }


def assert_untouched(ids, before, after):
    assert len(ids) > 10
    for id_ in ids:
        assert torch.equal(after[id_][0], before[id_][0]), id_
        for name, value in before[id_][1].items():
            assert torch.equal(after[id_][1][name], value), (id_, name)


def test_ids_unseen_for_too_long_lose_their_row_and_nothing_else_moves(make_run, small, tmp_path, pooled_ranks):
    def window(start):
        """Items from ``start`` on, 100 of them."""
        path = small.write_rows(tmp_path / f"rows-{start}.parquet", seed=start, num_items=100)
        table = pq.read_table(path)
        items = table.column("item").to_numpy() + start
        column = table.column_names.index("item")
        pq.write_table(table.set_column(column, "item", [items]), path)
        return path

    def refresh(name, start, parent=None, version=None, **changes):
        # Without SSE a row is touched by its own examples alone.
        settings = {"epochs": 1, "sse": {}, "publish": PUBLISH, "uri": window(start)} | changes
        if parent is not None:
            settings["init_from"] = {"job": parent.run_id, "retire_after_runs": 2}
            settings |= {"init_checkpoint": str(parent.checkpoints), "parent_version": version}
        run = make_run(name, **settings)
        assert execute(run, pooled_ranks if changes else start_ranks) == 0, small.events(run.directory, "error")
        return run, rows_by_id(run), small.events(run.directory, "publication")[-1]["version"]

    def status(ids):
        return store.open().lookup(np.array(sorted(ids)))[0]

    store = open_store(str(tmp_path / "store")).collection("items")
    first, rows_1, version = refresh("first", 0)
    two = {"resources": {"num_workers": 2}, "sharding": {"item": "row_wise", "user": "table_wise"}}
    second, rows_2, version = refresh("second", 40, first, version, **two)
    # Nothing is retired after one run without an example: rows that were left behind are as they were, and carried.
    assert rows_1.keys() < rows_2.keys()
    idle = [id_ for id_ in rows_1 if id_ < 40]
    assert_untouched(idle, rows_1, rows_2)
    assert set(status(idle)) == {CARRIED}
    for id_ in rows_2.keys() - rows_1.keys():
        assert id_ >= 40
        assert rows_2[id_][1]["last_update_step"] > latest_valid(first.checkpoints).step

    third, rows_3, version = refresh("third", 80, second, version)
    retired = rows_2.keys() - rows_3.keys()
    assert retired == {id_ for id_ in rows_1 if id_ < 40}
    kept_idle = [id_ for id_ in rows_2 if 40 <= id_ < 80]
    assert_untouched(kept_idle, rows_2, rows_3)
    maps = id_maps(latest_valid(third.checkpoints))["item"]
    assert (maps.run, set(maps.retired.to_pylist())) == (3, retired)
    # What is served lets go of them too.
    assert set(status(retired)) == {MISSING}
    assert set(status(kept_idle)) == {CARRIED}
    assert FOUND in status(rows_3.keys())
    assert store.manifest(version)["retired"] == len(retired)
    told = " ".join(event["message"] for event in small.events(third.directory, "info"))
    assert f"{len(retired)} retired" in told
