"""What a warm start takes over where features, layers and optimizers change: scores, rows and moments before step 1."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.support.gathered import gather_table
from embeddings.store import open_store
from trainer.checkpoint.format import latest_valid
from trainer.checkpoint.record import TrainingRecord
from trainer.checkpoint.warm_start import inherited_alpha
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import build, choose_alpha
from trainer.distributed.inherited import InheritedCheckpoint
from trainer.distributed.materialize import stored_rows
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.models.registry import MODELS
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job
from trainer.training.dense_parameters import dense_optimizer

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
PAIRS, SEQUENCES = ("mf", "bpr"), ("item2vec", "gru4rec", "sasrec", "hstu")
TOGETHER = ("wukong", "autoint")
"""Kinds that normalise fields together."""
SMALL = {
    "xdeepfm": {"cin_layers": [5, 3]},
    "wukong": {"fm_vectors": 3, "linear_vectors": 2, "fm_rank": 3, "fm_hidden": [6]},
    "dcnv2": {"structure": "parallel", "low_rank": 3},
    "autoint": {"attention_layers": 2, "attention_units": 3},
    "finalmlp": {"gate_hidden": [5], "fusion_heads": 2},
    "din": {"attention_hidden": [5], "attention_activation": "relu"},
    "esmm": {"tasks": {"buy": {"given": "click"}}},
    "mmoe": {"experts": 3, "tower_hidden": [4]},
    "ple": {"levels": 2, "label_experts": 1, "shared_experts": 1, "tower_hidden": [4]},
    "shared_bottom": {"tower_hidden": [4]},
    "gru4rec": {"gru_layers": 2},
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
        "ts": np.arange(size),
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
        if kind in (*PAIRS, *SEQUENCES):
            document["features"] = {name: {"type": "id"} for name in ("user", "item")}
            document |= {"timestamp": "ts"} if kind in SEQUENCES else {}
        return parse_dataset(document | label)

    def job(self, kind, **changes):
        hidden = {} if kind in ("fm", *PAIRS, *SEQUENCES) else {"hidden": [8, 6]}
        model = {
            "kind": kind,
            "loss": "bce",
            "embedding_dim": 4,
            "init": {"kind": "hash", "std": 0.3},
            **hidden,
            **SMALL.get(kind, {}),
        }
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
            parent_version=self._served(changes),
        )  # fmt: skip
        run = read_run(directory)
        assert execute(run, start_ranks) == code
        return run

    def _served(self, changes):
        if "publish" not in changes:
            return None
        collection = open_store(str(self.folder / "store")).collection(changes["publish"]["collection"])
        return collection.manifest("current")["version"] if collection.exists() else None

    def parent(self, kind, **changes):
        key = f"{kind}-{json.dumps(changes, sort_keys=True)}"
        if key not in self._parents:
            self._parents[key] = self.run(f"parent-{kind}-{len(self._parents)}", kind, **changes)
        return self._parents[key]

    def scores(self, run, table=None):
        table = self.table if table is None else table
        if run.job.model.reads_sequences:
            # The scores of all items of those that each of a few users has not had, the highest first.
            some = table.slice(0, 100)
            users = pa.table({"user": some["user"], "item": some["liked"]})
            return Predictor(run.directory, k=3).predict(users)["scores"].combine_chunks().flatten().to_numpy()
        found = Predictor(run.directory).predict(table)
        return np.stack([found[name].to_numpy() for name in found.column_names if name.startswith(("logit", "score"))])


@pytest.fixture(scope="module")
def runs(tmp_path_factory, table):
    return Runs(tmp_path_factory.mktemp("runs"), table)


def check_scores(runs, parent, child, table=None):
    before, after = runs.scores(parent), runs.scores(child, table)
    assert np.abs(before).max() > 0.2, "the parent has learned nothing, so that nothing is compared"
    np.testing.assert_allclose(after, before, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["dnn", *TOGETHER])
def test_features_in_another_order_give_the_same_scores(runs, kind):
    parent = runs.parent(kind)
    child = runs.run(f"turned-{kind}", kind, dict(reversed(BASE.items())), parent, **STILL, epochs=1)
    check_scores(runs, parent, child)
    old, new = latest_valid(parent.checkpoints), latest_valid(child.checkpoints)
    for name in old.tables:
        (weight, state), (weight_now, state_now) = old.read_rows(name), new.read_rows(name)
        assert torch.equal(weight, weight_now)
        assert state.keys() == state_now.keys()


ADDED = {
    "context": {"type": "id"},
    "age": {"type": "dense", "transform": "standardize"},
    "other": {"type": "vector", "dim": 2},
    "given": {"type": "vector", "dim": 2, "column": "other", "mode": "as_given"},
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TOGETHER])
def test_added_features_and_wider_layers_leave_the_scores_as_they_are_and_learn(runs, kind):
    parent = runs.parent(kind)
    features = {"context": ADDED["context"], **dict(reversed(BASE.items())), **ADDED}
    if kind not in ("fm", "wide_deep", "deepfm", "xdeepfm"):
        features["seen"] = {"type": "id", "shares": "item"}
    wider = {} if kind in ("fm", "finalmlp") else {"hidden": [11, 9]}
    wider |= {"xdeepfm": {"cin_layers": [6, 4]}, "finalmlp": {"gate_hidden": [7]}}.get(kind, {})
    wider |= {"tower_hidden": [6]} if "tower_hidden" in SMALL.get(kind, {}) else {}
    child = runs.run(f"more-{kind}", kind, features, parent, **STILL, epochs=1, model=SMALL.get(kind, {}) | wider)
    check_scores(runs, parent, child)
    # Nothing of it is dead: each added feature changes scores once it is trained, also without units of its own.
    trained = runs.run(f"trained-{kind}", kind, features, parent)
    scores = runs.scores(trained)
    for name in (*ADDED, *(["seen"] if "seen" in features else [])):
        column = features[name].get("column", name)
        other = runs.table.set_column(
            runs.table.column_names.index(column), column, runs.table[column].take(pa.array(np.arange(600)[::-1]))
        )
        assert np.abs(runs.scores(trained, other) - scores).max() > 1e-4, name


@pytest.mark.parametrize("kind", ["dnn", "fm", "wukong"])
def test_added_fresh_begins_as_a_new_model(runs, kind):
    parent = runs.parent(kind)
    init_from = {"added": "fresh"}
    features = {**BASE, "context": {"type": "id"}, "age": ADDED["age"]}
    child = runs.run(f"fresh-{kind}", kind, features, parent, **STILL, epochs=1, init_from=init_from)
    assert np.abs(runs.scores(child) - runs.scores(parent)).max() > 1e-3
    assert latest_valid(child.checkpoints).read_rows("context")[0].abs().max() > 0.1
    for name, rows in latest_valid(parent.checkpoints).tables.items():
        assert torch.equal(*(latest_valid(one.checkpoints).read_rows(name, 0, rows)[0] for one in (parent, child)))


def test_a_renamed_feature_and_dropped_ones_go_on_as_they_were(runs):
    parent = runs.parent("dlrm")
    renamed = {
        **BASE,
        "word": {"type": "id", "column": "query"},
        "vector": {**BASE["embedding"], "column": "embedding"},
    }
    for name in ("query", "embedding"):
        del renamed[name]
    init_from = {"renamed": {"query": "word", "embedding": "vector"}}
    child = runs.run("renamed", "dlrm", renamed, parent, **STILL, epochs=1, init_from=init_from)
    check_scores(runs, parent, child)
    old, new = (latest_valid(one.checkpoints) for one in (parent, child))
    assert torch.equal(old.read_rows("query")[0], new.read_rows("word")[0])
    less = {name: one for name, one in BASE.items() if name not in ("query", "price")}
    init_from = {"dropped": ["query", "price"]}
    dropped = latest_valid(
        runs.run("less", "dnn", less, runs.parent("dnn"), **STILL, epochs=1, init_from=init_from).checkpoints
    )
    whole = latest_valid(runs.parent("dnn").checkpoints)
    # [user | item | query | liked | price | embedding]: what is left, and its moments, by name.
    first = whole.read_dense()["model/tower.0.weight"]
    names = [f"{name} {column}" for name in BASE if name not in ("price", "embedding") for column in range(4)]
    names += [f"embedding {column}" for column in range(4)] + ["price 0"]
    left = [place for place, name in enumerate(names) if not name.startswith(("query", "price"))]
    assert torch.equal(dropped.read_dense()["model/tower.0.weight"], first[:, left])


DEEPER = {kind: {"hidden": [8, 7, 9]} for kind in KINDS if kind not in ("fm", "finalmlp")} | {
    "finalmlp": {"gate_hidden": [5, 7]},
    "wukong": {"hidden": [9, 6, 6, 7], "fm_hidden": [7, 6, 8]},
    "mmoe": {"hidden": [8, 6, 6], "tower_hidden": [4, 4]},
    "ple": {"hidden": [8, 7, 9], "tower_hidden": [5, 6]},
    "shared_bottom": {"tower_hidden": [4, 5, 4]},
}
# lightgcn scores by the rows that it was trained on.
WIDER = {kind: {"embedding_dim": 7} for kind in MODELS if kind not in ("wukong", "sasrec", "hstu", "lightgcn")}
SIZES = [(kind, one) for sizes in (DEEPER, WIDER) for kind, one in sizes.items()]


@pytest.mark.parametrize(("kind", "larger"), SIZES, ids=lambda one: one if isinstance(one, str) else "-".join(one))
def test_deeper_layers_and_wider_vectors_leave_the_scores_as_they_are_and_learn(runs, kind, larger):
    parent = runs.parent(kind)
    model = SMALL.get(kind, {}) | larger
    name = f"{'wider' if 'embedding_dim' in larger else 'deeper'}-{kind}"
    child = runs.run(f"{name}-still", kind, BASE, parent, **STILL, epochs=1, model=model)
    check_scores(runs, parent, child)
    trained = runs.run(name, kind, BASE, parent, model=model)
    assert np.abs(runs.scores(trained) - runs.scores(parent)).max() > 1e-3
    before, after, learned = (latest_valid(one.checkpoints) for one in (parent, child, trained))
    for table in before.tables:
        (rows, _), (now, _), (later, _) = (one.read_rows(table) for one in (before, after, learned))
        dim = child.job.model.embedding_dim
        vectors = [now[:, part * dim : part * dim + 4] for part in range(now.shape[1] // dim)]
        kept = torch.cat([*vectors, now[:, now.shape[1] // dim * dim :]], dim=1)
        assert torch.equal(kept, rows)
        assert (later[2:].std(0) > 1e-4).all(), f"a column of {table} is dead"


MOVING = {"kind": "adam_ar", "alpha": 0.002, "learning_rate": 0.05, "decay": "at_read"}


@pytest.mark.parametrize(
    ("trained", "changes"),
    [
        (MOVING, {"learning_rate": 0.01}),
        (MOVING, {"moments": "lazy", "beta1": 0.5}),
        (MOVING, {"alpha": 0.0001}),
        (MOVING, {"kind": "adagrad_ar"}),
        ({"kind": "adamw", "weight_decay": 0.5, "learning_rate": 0.05}, {"weight_decay": 0.1}),
        ({"kind": "adagrad", "learning_rate": 0.05}, {"kind": "rowwise_adam", "learning_rate": 0.01}),
        ({"kind": "adam", "learning_rate": 0.05}, {"kind": "sgd"}),
        (MOVING | {"decay": "by_epoch"}, {"learning_rate": 0.01}),
        (MOVING, {"decay": "by_epoch"}),
        (MOVING | {"decay": "by_epoch"}, {"decay": "at_read"}),
    ],
)
def test_rows_read_the_same_under_another_row_optimizer(runs, trained, changes):
    """Deferred decay and momentum of idle rows are counted with the parent's settings, not with the job's."""
    parent = runs.parent("dnn", optimizer=trained, batch_size=10)
    record = latest_valid(parent.checkpoints)
    idle = record.read_rows("user")[1]["last_update_step"] < record.step
    assert int(idle[2:].sum()) > 0, "no row is idle, so that nothing is owed"
    job = runs.job("dnn", optimizer={**trained, **changes}, batch_size=10)
    loaded, state = load(runs, parent, job)
    kind = changes.get("kind", trained["kind"])
    if kind == trained["kind"] and "m" in state:
        # Moments of dense semantics shrink at each step, touched or not: by the parent's betas, until its last step.
        moments = record.read_rows("user")[1]["m"].double()
        ages = record.step - record.read_rows("user")[1]["last_update_step"].double()
        if trained.get("decay") != "by_epoch":
            faded = moments * (0.9**ages)[:, None]
            torch.testing.assert_close(state["m"].double(), faded, atol=1e-7, rtol=1e-5)
        assert float((state["m"].double() - moments).abs().max()) > 1e-4
    for name in record.tables:
        expected = stored_rows(parent.job, record, name, 0, record.tables[name]).read(name)
        torch.testing.assert_close(loaded[name], expected, atol=2e-6, rtol=0)


def load(runs, parent, job):
    """The rows, and the state of users, of a job that goes on from a parent on the same rows, before its first step."""
    data, checkpoint = PreparedData.open(parent.data), latest_valid(parent.checkpoints)
    with single_rank_group():
        alpha = inherited_alpha(job, TrainingRecord.of(checkpoint)) or choose_alpha(job, data.steps_per_epoch)
        sharded = build(job, data, alpha=alpha, epoch_steps=TrainingRecord.of(checkpoint).epoch_steps)
        inherited = InheritedCheckpoint(checkpoint, job, parent.dataset, sharded)
        assert inherited.optimizer_notes
        rows = {name: torch.arange(count) for name, count in inherited.tables.items()}
        sharded.load_from(inherited, dense_optimizer=dense_optimizer(job, sharded), parent_rows=rows)
        (piece,) = (one for one in sharded.local_pieces() if one.name == "user")
        return {name: gather_table(sharded, name).rows for name in rows}, piece.tables.state("user")


def test_moments_of_common_parameters_go_on_and_new_ones_have_none(runs):
    parent = runs.parent("dnn")
    child = runs.run(
        "moments", "dnn", {"age": ADDED["age"], **BASE}, parent, **STILL, epochs=1, model={"hidden": [9, 6]}
    )
    job, checkpoint = child.job, latest_valid(parent.checkpoints)
    with single_rank_group():
        sharded = build(job, PreparedData.open(child.data), alpha=None)
        found = InheritedCheckpoint(checkpoint, job, child.dataset, sharded).read_dense()
    before = checkpoint.read_dense()
    for part in ("exp_avg", "exp_avg_sq"):
        old, new = (one[f"optimizer/tower.0.weight/{part}"] for one in (before, found))
        assert old.shape == (8, 21)
        assert new.shape == (9, 22)
        assert torch.equal(new[:8, :20], old[:, :20])
        # [... | age, price]: numbers in the order of the dataset.
        assert torch.equal(new[:8, 21], old[:, 20])
        assert not new[8].any()
        assert not new[:, 20].any()
    assert torch.equal(found["optimizer/tower.0.weight/step"], before["optimizer/tower.0.weight/step"])


IDS = {name: BASE[name] for name in ("user", "item", "query")}


@pytest.mark.parametrize(
    ("kind", "model", "features", "larger"),
    [
        ("fm", {}, IDS, {}),
        ("dlrm", {}, IDS, {"hidden": [8, 7, 8]}),
        ("autoint", {"hidden": []}, BASE, {}),
        ("finalmlp", {"first_gate": ["user", "liked"], "gate_hidden": []}, BASE, {}),
        ("finalmlp", {"second_gate": ["user", "liked"]}, BASE, {"gate_hidden": [6, 8, 9]}),
        ("dcnv2", {"structure": "stacked", "low_rank": None}, BASE, {"hidden": [10, 7, 9, 7]}),
        ("dnn", {"init": {"kind": "zero"}}, BASE, {"hidden": [8, 6, 6]}),
    ],
)
def test_larger_sizes_beside_other_settings_and_added_features(runs, kind, model, features, larger):
    model = SMALL.get(kind, {}) | model
    parent = runs.parent(kind, model=model) if features is BASE else runs.run(f"ids-{kind}", kind, IDS, model=model)
    more = {**dict(reversed(features.items())), **({} if kind in TOGETHER or features is IDS else ADDED)}
    name = f"{len(more)}-{'-'.join(model)}-{kind}"
    model |= {"embedding_dim": 7, **larger}
    check_scores(runs, parent, runs.run(f"still-{name}", kind, more, parent, **STILL, epochs=1, model=model))
    learned = latest_valid(runs.run(name, kind, more, parent, model=model).checkpoints)
    for table in learned.tables:
        assert (learned.read_rows(table)[0][2:].std(0) > 1e-4).all(), f"a column of {table} is dead"


def test_moments_of_moved_layers_and_longer_rows_go_on_and_those_of_added_ones_begin(runs):
    parent = runs.parent("wide_deep")
    job = runs.job("wide_deep", model={"hidden": [8, 7, 9], "embedding_dim": 7})
    checkpoint, data = latest_valid(parent.checkpoints), PreparedData.open(parent.data)
    with single_rank_group():
        inherited = InheritedCheckpoint(checkpoint, job, parent.dataset, build(job, data, alpha=None))
    before, found = checkpoint.read_dense(), inherited.read_dense()
    for part in ("exp_avg", "exp_avg_sq"):
        old, new = before[f"optimizer/tower.4.weight/{part}"], found[f"optimizer/tower.6.weight/{part}"]
        assert old.any()
        assert torch.equal(new[:, :6], old)
        assert not new[:, 6:].any()
    assert not any(name.startswith("optimizer/tower.4.") for name in found)
    assert torch.equal(found["model/tower.4.weight"][:6], torch.eye(6, 7))
    columns = [0, 1, 2, 3, 7]  # [v | w]: the weight of an id stays behind its vector
    for (old, state), (new, state_now) in [(one.read_rows("item") for one in (checkpoint, inherited))]:
        assert torch.equal(new[:, columns], old)
        assert not new[:, 4:7].any()
        assert state["m"].any()
        for name, value in state.items():
            assert torch.equal(state_now[name][:, columns] if value.dim() == 2 else state_now[name], value)
            assert value.dim() == 1 or not state_now[name][:, 4:7].any()
    part, state = inherited.read_rows("item", 3, 5, 2, 4)  # of a rank that holds some columns
    assert torch.equal(part, inherited.read_rows("item")[0][3:8, 2:6])
    assert state["m"].shape == (5, 4)


def test_row_wise_moments_go_on_in_longer_rows(runs):
    optimizer = {"optimizer": {"kind": "rowwise_adam", "learning_rate": 0.05}}
    parent = runs.parent("bpr", **optimizer)
    job = runs.job("bpr", **optimizer, model={"embedding_dim": 7})
    checkpoint, data = latest_valid(parent.checkpoints), PreparedData.open(parent.data)
    with single_rank_group():
        inherited = InheritedCheckpoint(checkpoint, job, parent.dataset, build(job, data, alpha=None))
    for table, width in (("user", 7), ("item", 8)):
        (old, state), (new, state_now) = (one.read_rows(table) for one in (checkpoint, inherited))
        assert new.shape[1] == width
        row_wise = [name for name, value in state.items() if value.dim() == 1]
        assert any(value.is_floating_point() and value.any() for value in map(state.get, row_wise))
        assert all(torch.equal(state[name], state_now[name]) for name in row_wise)
        assert torch.equal(new[:, -1], old[:, -1]) is (table == "item")  # the bias stays the last column
        # Items begin at zero in the new columns, users do not: one factor of the product has to move the other.
        assert bool(new[2:, 4:7].any()) is (table == "user")
        assert not new[0].any(), "padding"


def test_a_refresh_with_deeper_layers_is_published_and_one_with_longer_vectors_held(runs):
    publish = {"publish": {"collection": "items", "feature": "item", "align": False}}
    first = runs.run("refresh-1", "two_tower", **publish)
    collection = open_store(first.store_url).collection("items")
    assert collection.manifest("current")["version"] == "v000001"
    deeper = runs.run("refresh-2", "two_tower", BASE, first, **publish, **STILL, epochs=1, model=DEEPER["two_tower"])
    check_scores(runs, first, deeper)
    served, again = (collection.open(one) for one in ("v000001", "v000002"))
    np.testing.assert_array_equal(again.items().vectors[:], served.items().vectors[:])
    assert again.manifest.anchor_generation == served.manifest.anchor_generation == 1
    longer = {**DEEPER["two_tower"], **WIDER["two_tower"]}
    wider = runs.run("refresh-3", "two_tower", BASE, deeper, **publish, **STILL, epochs=1, model=longer)
    check_scores(runs, first, wider)
    held = collection.manifest("v000003")
    assert collection.manifest("current")["version"] == "v000002"
    checks = {one["metric"]: one for one in held["gate"]}
    assert checks["same_dim"]["verdict"] != "pass"
    assert "dim was 4, is 7: this begins a new anchor generation" in json.dumps(checks["same_dim"])
    assert held["anchor_generation"] == 2
    vectors = collection.open("v000003").items().vectors[:]
    assert vectors.shape[1] == 7
    elsewhere = {"publish": publish["publish"] | {"collection": "longer"}}
    runs.run("refresh-4", "two_tower", BASE, deeper, **elsewhere, **STILL, epochs=1, model=longer)
    assert open_store(first.store_url).collection("longer").manifest("current")["version"] == "v000001"


def test_a_warm_start_whose_dense_optimizer_is_of_another_kind_trains(runs, small):
    parent = runs.parent("dnn")
    child = runs.run("sgd", "dnn", BASE, parent, dense_optimizer={"kind": "sgd", "learning_rate": 0.01}, epochs=1)
    assert any("dense_optimizer has another kind" in one["message"] for one in small.events(child.directory, "info"))
