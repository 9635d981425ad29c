"""What a warm start takes over where features, layers and optimizers change: scores, rows and moments before step 1."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trainer.checkpoint.format import latest_valid
from trainer.checkpoint.warm_start import id_maps
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

pytestmark = pytest.mark.slow

BASE = {
    "user": {"type": "id"},
    "item": {"type": "id"},
    "query": {"type": "id"},
    "liked": {"type": "id_list", "column": "liked", "shares": "item"},
    "price": {"type": "dense", "transform": "standardize"},
    "embedding": {"type": "vector", "dim": 3},
}
CLICK = ("dnn", "fm", "wide_deep", "deepfm", "xdeepfm", "dcnv2", "dlrm", "pnn", "finalmlp", "din", "wukong", "autoint")
SEVERAL = ("esmm", "mmoe", "ple", "shared_bottom")
KINDS = (*CLICK, *SEVERAL, "two_tower")
TOGETHER = ("wukong", "autoint")
"""Kinds that normalise fields together."""
SMALL = {
    "xdeepfm": {"cin_layers": [5, 3]},
    "wukong": {"fm_vectors": 3, "linear_vectors": 2, "fm_rank": 3, "fm_hidden": [6]},
    "dcnv2": {"structure": "parallel", "low_rank": 3},
    "autoint": {"attention_layers": 2, "attention_units": 3},
    "finalmlp": {"gate_hidden": [5], "fusion_heads": 2},
    "din": {"attention_hidden": [5]},
    "mmoe": {"experts": 3, "tower_hidden": [4]},
    "ple": {"levels": 2, "label_experts": 1, "shared_experts": 1, "tower_hidden": [4]},
    "shared_bottom": {"tower_hidden": [4]},
}
LAZY = {"kind": "adam", "moments": "lazy", "learning_rate": 0.05}
STILL = {"optimizer": LAZY | {"learning_rate": 0.0}, "dense_optimizer": {"learning_rate": 0.0}}


@pytest.fixture(scope="module")
def table():
    rng, size = np.random.default_rng(3), 600
    user, item, query, context = (rng.integers(0, many, size) for many in (20, 40, 9, 6))
    price = rng.normal(2.0, 3.0, size)
    click = (rng.random(size) < 1 / (1 + np.exp(-(item % 3 - 1.0 + 0.2 * price)))).astype(int)
    columns = {
        "user": user, "item": item, "query": query, "context": context, "seen": rng.integers(0, 40, size),
        "liked": pa.array([list(rng.integers(0, 40, rng.integers(0, 4))) for _ in range(size)]),
        "price": price, "age": rng.normal(30.0, 9.0, size), "embedding": pa.array(list(rng.normal(size=(size, 3)))),
        "other": pa.array(list(rng.normal(size=(size, 2)))), "click": click, "buy": click * (item % 2),
    }  # fmt: skip
    return pa.table(columns)


class Runs:
    """Runs on one file of rows, in a folder; ``parent`` is trained once for each kind of model."""

    def __init__(self, folder, table):
        self.folder, self.table, self._parents = folder, table, {}
        pq.write_table(table, folder / "rows.parquet")

    def dataset(self, kind, features):
        label = {"labels": {"click": {"column": "click"}, "buy": {"column": "buy"}}}
        label = label if kind in SEVERAL else {"label": {"column": "click"}}
        document = {"name": "rows", "uri": str(self.folder / "rows.parquet"), "features": features}
        return parse_dataset(document | label)

    def job(self, kind, **changes):
        hidden = {} if kind == "fm" else {"hidden": [8, 6]}
        model = {"kind": kind, "embedding_dim": 4, "init": {"kind": "hash", "std": 0.3}, **hidden, **SMALL.get(kind, {})}
        document = {
            "name": kind, "dataset": {"name": "rows"}, "model": model | changes.pop("model", {}), "optimizer": LAZY,
            "dense_optimizer": {"learning_rate": 0.02}, "epochs": 2, "batch_size": 100,
        }  # fmt: skip
        return parse_job(document | changes)

    def run(self, name, kind, features=BASE, parent=None, code=0, **changes):
        directory = self.folder / name
        if parent is not None:
            changes["init_from"] = {"job": parent.run_id, **changes.pop("init_from", {})}
        write_run(
            directory, run_id=name, job=self.job(kind, **changes), dataset=self.dataset(kind, features),
            store_url=str(self.folder / "store"), init_checkpoint=None if parent is None else str(parent.checkpoints),
        )  # fmt: skip
        run = read_run(directory)
        assert execute(run, start_ranks) == code
        return run

    def parent(self, kind, **changes):
        key = f"{kind}-{json.dumps(changes, sort_keys=True)}"
        if key not in self._parents:
            self._parents[key] = self.run(f"parent-{kind}-{len(self._parents)}", kind, **changes)
        return self._parents[key]

    def scores(self, run, table=None):
        found = Predictor(run.directory).predict(self.table if table is None else table)
        return np.stack([found[name].to_numpy() for name in found.column_names if name.startswith("logit")])


@pytest.fixture(scope="module")
def runs(tmp_path_factory, table):
    return Runs(tmp_path_factory.mktemp("runs"), table)


def features_of(kind, names=BASE):
    """The features that a kind reads."""
    return {name: one for name, one in BASE.items() if name in names}


def check_scores(runs, parent, child, table=None):
    before, after = runs.scores(parent), runs.scores(child, table)
    assert np.abs(before).max() > 0.3, "the parent has learned nothing, so that nothing is compared"
    np.testing.assert_allclose(after, before, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_features_in_another_order_give_the_same_scores(runs, kind):
    parent = runs.parent(kind)
    child = runs.run(f"turned-{kind}", kind, dict(reversed(BASE.items())), parent, **STILL, epochs=1)
    check_scores(runs, parent, child)
    old, new = latest_valid(parent.checkpoints), latest_valid(child.checkpoints)
    for name in old.tables:
        (weight, state), (weight_now, state_now) = old.read_rows(name), new.read_rows(name)
        assert torch.equal(weight, weight_now)
        assert state.keys() == state_now.keys()
