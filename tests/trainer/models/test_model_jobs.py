"""Jobs of the CTR models and of MF: whole runs on the project's click log, ranks, resumes, refusals, predictions."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from benchmarks.support.gathered import gather_table
from embeddings.vectors.item_vectors import unit_rows
from tests.trainer.trainings import differ, snapshot, train_in_parts, train_on_ranks, trainer_of
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.click_log import ClickLog, generate
from trainer.distributed.build import build, table_configs
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.in_process import main as train_command
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.publishing.publish import item_vectors
from trainer.runs.directory import read_run, write_run
from trainer.sizing.estimate import estimate
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.publish import Anchor

# A training of each kind of model.
pytestmark = pytest.mark.slow

CLICK = ("fm", "wide_deep", "deepfm", "xdeepfm", "dcnv2", "dlrm", "pnn", "wukong", "autoint", "finalmlp", "din")
SMALL = {
    "xdeepfm": {"cin_layers": [6, 4]},
    "wukong": {"fm_vectors": 4, "linear_vectors": 4, "fm_rank": 4, "fm_hidden": [8]},
    "dcnv2": {"structure": "parallel", "low_rank": 4},
    "autoint": {"attention_layers": 2, "attention_units": 4},
    "finalmlp": {"gate_hidden": [6], "fusion_heads": 2, "first_gate": ["user"]},
    "din": {"attention_hidden": [6]},
}
OPTIONS = {"residual": True, "batch_norm": True}
FLAT = ("fm", "mf")  # without hidden layers


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Two days of clicks, with each user's last three items before the row."""
    folder = tmp_path_factory.mktemp("log")
    generate(ClickLog(num_rows=3000, num_days=2, seed=0, rows_per_user=30.0, rows_per_item=40.0), folder)
    history = {
        "type": "id_list", "shares": "item",
        "derive": {"previous": "item", "by": "user", "order": "timestamp", "length": 3},
    }  # fmt: skip
    features = {name: {"type": "id"} for name in ("user", "item", "query", "context")} | {"history": history}
    document = {
        "name": "log", "uri": str(folder), "features": features, "label": {"column": "click"}, "timestamp": "timestamp",
    }  # fmt: skip
    return parse_dataset(document)


def options_of(kind):
    """Batch norm and shortcuts, where the model has hidden layers."""
    return {} if kind in FLAT else OPTIONS


def job_of(kind, model=None, **changes):
    hidden = {} if kind in FLAT else {"hidden": [12, 8]}
    document = {
        "name": kind, "dataset": {"name": "log"},
        "model": {"kind": kind, "embedding_dim": 4, **hidden, **SMALL.get(kind, {}), **(model or {})},
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.01, "decay": "at_read", "alpha": 0.001},
        "dense_optimizer": {"learning_rate": 0.01}, "epochs": 2, "batch_size": 256,
    }  # fmt: skip
    return parse_job(document | changes)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*CLICK, "mf"])
def test_a_run_trains_evaluates_and_is_predicted(log, small, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    job = job_of(kind, options_of(kind))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all([log.model_dump(mode="json"), job.model_dump(mode="json")]))
    assert train_command([str(path), "--run-dir", str(tmp_path / "run")]) == 0
    train, test = small.metrics(tmp_path / "run", "train"), small.metrics(tmp_path / "run", "test")
    assert train[1]["loss"] < train[0]["loss"]
    # A small set of noisy clicks: chance is .5 with a standard deviation of .035.
    assert test[-1]["auc"] > 0.54
    # What validate says before: the rows and columns that the run then had.
    found = estimate(job, log)
    data = PreparedData.open(read_run(tmp_path / "run").data)
    for config in table_configs(job, data):
        assert config.dim == job.model.table_columns(config.name)
        assert found.memory.by_table[config.name].row_bytes == 4 * config.dim * 3 + 4
        assert found["tables"][config.name]["rows"] >= config.num_rows
    if kind not in ("mf", "dlrm"):
        assert found.memory.dense > 0
        shape = latest_valid(tmp_path / "run" / "checkpoints").read_dense()
        weights = [value for name, value in shape.items() if name.startswith("model/") and "running" not in name]
        assert found.memory.dense == 4 * 4 * sum(value.numel() for value in weights)


@pytest.mark.parametrize("kind", CLICK)
def test_numeric_features_are_read(log, small, tmp_path, kind):
    """The true probability of a click, as a number: a model that reads it ranks nearly as well as it does. Rows start
    from zeros, dlrm's and fm's too: with a numeric feature they have a gradient."""
    document = log.model_dump(mode="json")
    features = {name: document["features"][name] for name in ("user", "item", "history")}
    features["true"] = {"type": "dense", "column": "probability", "transform": "standardize"}
    dataset = parse_dataset(document | {"features": features})
    job = job_of(kind, {"init": {"kind": "zero"}}, batch_size=64, dense_optimizer={"learning_rate": 0.02})
    run = read_run(
        write_run(tmp_path / "run", run_id="run", job=job, dataset=dataset, store_url=str(tmp_path / "store"))
    )
    assert execute(run, start_ranks) == 0
    with single_rank_group():
        sharded = build(job, PreparedData.open(run.data), alpha=job.optimizer.alpha)
        sharded.load_from(latest_valid(run.checkpoints))
        moved = gather_table(sharded, "user").rows.abs().amax(1)
    assert (moved > 0).float().mean() > 0.9
    # Chance is .5 with a standard deviation of .035; the probability itself has .83.
    assert small.metrics(run.directory, "test")[-1]["auc"] > 0.75


@pytest.mark.parametrize("kind", ["dcnv2", "dnn"])
def test_with_batch_norm_rows_start_where_they_have_a_gradient(log, small, tmp_path, kind):
    """From zeros all samples would have the same hidden units, which batch normalisation makes 0: an AUC of .5."""
    job = job_of(kind, {"batch_norm": True})
    run = read_run(write_run(tmp_path / "run", run_id="run", job=job, dataset=log, store_url=str(tmp_path / "store")))
    assert execute(run, start_ranks) == 0
    # Chance is .5 with a standard deviation of .035.
    assert small.metrics(run.directory, "test")[-1]["auc"] > 0.54


def test_focal_loss_is_that_of_the_spec_and_its_scores_are_no_probabilities(log, small, tmp_path):
    """A step's loss is the formula with the job's gamma and alpha, with labels smoothed; the run ranks, and its scores
    are not called probabilities."""
    model = {"loss": "focal", "focal_gamma": 1.5, "focal_alpha": 0.6}
    job = job_of("deepfm", model, regularizers={"label_smoothing": 0.2}, batch_size=64)
    run = read_run(write_run(tmp_path / "run", run_id="run", job=job, dataset=log, store_url=str(tmp_path / "store")))
    assert execute(run, start_ranks) == 0
    test = small.metrics(run.directory, "test")[-1]
    assert "logloss" not in test
    # Chance is .5 with a standard deviation of .035.
    assert test["auc"] > 0.54
    with single_rank_group():
        trainer = trainer_of(job, PreparedData.open(run.data), dtype=torch.float64, backend="reference")
        (batch,) = next(iter(trainer.batches()))
        trainer.sharded.set_context(1, 0, 64)
        found = trainer.objective(batch, 1).loss
        p = torch.sigmoid(trainer.sharded.module.scores(batch))
    y = batch.labels.double() * 0.8 + 0.1
    expected = -0.6 * y * (1 - p) ** 1.5 * p.log() - 0.4 * (1 - y) * p**1.5 * (1 - p).log()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # labels are float32
    assert list(Predictor(run.directory).outputs) == ["score"]


def test_mf_publishes_its_vectors_without_the_bias(log, small, tmp_path):
    job = job_of("mf", publish={"collection": "items", "feature": "item", "views": []})
    run = read_run(write_run(tmp_path / "run", run_id="run", job=job, dataset=log, store_url=str(tmp_path / "store")))
    assert execute(run, start_ranks) == 0
    checkpoint = latest_valid(run.checkpoints)
    vectors = item_vectors(run, checkpoint)
    with single_rank_group():
        sharded = build(job, PreparedData.open(run.data), alpha=job.optimizer.alpha)
        sharded.load_from(checkpoint)
        rows = gather_table(sharded, "item", decay=False).rows
        labels = PreparedData.open(run.data).labels("train")
        assert sharded.module.mu.item() == pytest.approx(np.log(labels.mean() / (1 - labels.mean())), rel=1e-6)
    assert rows.shape[1] == 5
    assert rows[:, 4].abs().max() > 0
    order = np.argsort(PreparedData.open(run.data).vocabulary("item").to_numpy(), kind="stable")
    np.testing.assert_array_equal(vectors.vectors, rows[2:, :4].numpy()[order])
    assert small.events(run.directory, "publication")[-1]["status"] == "published"


@pytest.mark.parametrize(("kind", "feature"), [("deepfm", "item"), ("dcnv2", "query"), ("din", "item")])
def test_click_models_publish_the_rows_of_a_feature_and_go_on_from_them(log, small, tmp_path, kind, feature):
    """The second run is anchored: its vectors stay near the first one's, where the loss would leave others be."""
    publish = {"collection": "vectors", "feature": feature, "ema": None, "align": False, "gate": {"mode": "report"}}
    last = {"early_stopping": {"keep": "last", "patience": 9}}
    job = job_of(kind, {"init": {"kind": "hash", "std": 0.1}}, publish=publish, regularizers=last)
    store = str(tmp_path / "store")
    first = read_run(write_run(tmp_path / "first", run_id="first", job=job, dataset=log, store_url=store))
    assert execute(first, start_ranks) == 0
    checkpoint = latest_valid(first.checkpoints)
    vectors = item_vectors(first, checkpoint)
    with single_rank_group():
        sharded = build(job, PreparedData.open(first.data), alpha=job.optimizer.alpha)
        sharded.load_from(checkpoint)
        rows = gather_table(sharded, feature, decay=False).rows
    assert rows.shape[1] == (5 if kind == "deepfm" else 4)
    order = np.argsort(PreparedData.open(first.data).vocabulary(feature).to_numpy(), kind="stable")
    np.testing.assert_array_equal(vectors.vectors, rows[2:, :4].numpy()[order])
    (told,) = small.events(first.directory, "publication")
    assert told["status"] == "published"

    def refreshed(name, **settings):
        run = write_run(
            tmp_path / name, run_id=name, dataset=log, store_url=store, parent_version=told["version"],
            job=job.model_copy(update={"seed": 5, "publish": job.publish.model_copy(update=settings)}),
            init_checkpoint=str(first.checkpoints),
        )  # fmt: skip
        run = read_run(run)
        assert execute(run, start_ranks) == 0
        found = item_vectors(run, latest_valid(run.checkpoints))
        both = vectors.evidence & found.evidence
        assert both.sum() > 20
        return np.mean(np.sum(unit_rows(found.vectors)[0] * unit_rows(vectors.vectors)[0], axis=1)[both])

    free, anchored = refreshed("free"), refreshed("anchored", anchor=Anchor(strength=3.0))
    assert free > 0.3
    # Rows of few examples are drawn a few times.
    assert 1 - anchored < 0.6 * (1 - free)


def test_mf_learns_ratings_by_their_squared_error(small, tmp_path):
    """Ratings of a mean, biases and two factors, in 3,000 of 4,800 cells: what is left is near the noise of .2."""
    rng = np.random.default_rng(0)
    biases, factors = [rng.normal(0, 0.5, n) for n in (60, 80)], [rng.normal(0, 0.7, (n, 2)) for n in (60, 80)]
    user, item = np.divmod(rng.permutation(60 * 80)[:3000], 80)
    rating = 3.4 + biases[0][user] + biases[1][item] + (factors[0][user] * factors[1][item]).sum(1)
    rating += rng.normal(0, 0.2, len(rating))
    pq.write_table(pa.table({"user": user, "item": item, "rating": rating}), tmp_path / "ratings.parquet")
    document = {
        "name": "log", "uri": str(tmp_path / "ratings.parquet"), "label": {"value": "rating"},
        "features": {"user": {"type": "id"}, "item": {"type": "id"}},
    }  # fmt: skip
    optimizer = {"kind": "adam", "learning_rate": 0.02}
    model = {"loss": "mse", "embedding_dim": 2}
    job = job_of("mf", model, optimizer=optimizer, batch_size=128, epochs=40, regularizers={"l2": 0.001})
    run = read_run(
        write_run(
            tmp_path / "run", run_id="run", job=job, dataset=parse_dataset(document), store_url=str(tmp_path / "store")
        )
    )
    assert execute(run, start_ranks) == 0
    test = small.metrics(run.directory, "test")
    assert rating.std() > 0.9
    assert test[-1]["rmse"] < 0.35
    labels = PreparedData.open(run.data).labels("train")
    mu = latest_valid(run.checkpoints).read_dense()["model/mu"].item()
    assert mu == pytest.approx(labels.mean(), rel=1e-6)
    assert mu == pytest.approx(3.4, abs=0.3)


# --- ranks and resumes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["xdeepfm", "din", "fm", "autoint", "finalmlp"])
def test_two_ranks_train_and_score_as_one_does(log, ranks, tmp_path, kind):
    """Batch norm, dice, shortcuts, SSE; and the last batch of an epoch, whose one example leaves a rank without any."""
    options = options_of(kind)
    job = job_of(kind, options, sse={"item": {"probability": 0.1}}, optimizer={"kind": "adam", "learning_rate": 0.01})
    examples = prepare(log, job, tmp_path / "probe").num_examples["train"]
    changes = {
        "batch_size": (examples - 1) // 4, "sse": {"item": {"probability": 0.1}},
        "optimizer": {"kind": "adam", "learning_rate": 0.01},
        # Adam would divide gradients that are all rounding by their own size.
        "dense_optimizer": {"kind": "sgd", "learning_rate": 0.1},
    }  # fmt: skip
    job = job_of(kind, options, **changes)
    data = prepare(log, job, tmp_path / "data")
    steps = data.steps_per_epoch + 2
    assert data.num_examples["train"] % job.batch_size == 1
    with single_rank_group():
        expected, metrics = train_on_ranks(data.directory, job, steps)
    split = job_of(kind, options, sharding={"item": "row_wise"}, **changes)
    (found, scored), nothing = ranks(2).run(train_on_ranks, data.directory, split, steps)
    assert nothing is None
    assert found.keys() == expected.keys()
    assert any("running_variance" in name for name in found) == bool(options)
    for name, value in expected.items():
        # float64 sums in another order, over some steps of Adam.
        assert float((found[name] - value).abs().max()) < 1e-7, name
    assert scored == pytest.approx(metrics, rel=1e-7)


@pytest.mark.parametrize("kind", ["din", "mf", "fm", "autoint", "finalmlp"])
def test_stopping_and_resuming_changes_no_bit(log, tmp_path, kind):
    """Running moments and the constant of mf are in the checkpoint."""
    job = job_of(kind, options_of(kind), batch_size=512)
    data = prepare(log, job, tmp_path / "data")

    def spoil(sharded):
        if kind == "mf":
            sharded.module.mu.fill_(9.0)

    with single_rank_group():
        whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
        parts, _ = train_in_parts(job, data, tmp_path / "parts", [2, data.steps_per_epoch], spoil)
        found = snapshot(whole)
        assert any("running_mean" in name for name in found) or {"model/mu", "model/bias"} & found.keys()
        assert differ(snapshot(parts), found) == []
    assert parts.history == whole.history


def test_a_warm_start_has_the_parents_shape(log, small, tmp_path):
    run = read_run(
        write_run(
            tmp_path / "day1", run_id="day1", job=job_of("dcnv2", epochs=1), dataset=log, store_url=str(tmp_path / "s")
        )
    )
    assert execute(run, start_ranks) == 0

    def next_day(name, model):
        folder = write_run(
            tmp_path / name, run_id=name, job=job_of("dcnv2", model, epochs=1), dataset=log,
            store_url=str(tmp_path / "s"), init_checkpoint=str(run.checkpoints),
        )  # fmt: skip
        return execute(read_run(folder), start_ranks)

    assert next_day("day2", {}) == 0
    assert next_day("other", {"cross_layers": 3}) != 0
    message = small.events(tmp_path / "other", "error")[-1]["message"]
    assert "model.cross_layers: the parent was trained with 2, the job asks for 3" in message


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "model", "message"),
    [
        ("dnn", {"cross_layers": 3}, "model.cross_layers: dnn has none: use dcnv2"),
        ("deepfm", {"low_rank": 2}, "model.low_rank: deepfm has none: use dcnv2"),
        ("dcnv2", {"cin_layers": [5]}, "model.cin_layers: dcnv2 has none: use xdeepfm"),
        ("dlrm", {"fm_rank": 3}, "model.fm_rank: dlrm has none: use wukong"),
        ("wukong", {"attention_hidden": [3]}, "model.attention_hidden: wukong has none: use din"),
        ("din", {"attention_heads": 3}, "model.attention_heads: din has none: use autoint"),
        ("autoint", {"hidden": [], "residual": True}, "model.residual: it needs hidden layers, and there are none"),
        ("dnn", {"second_hidden": [3]}, "model.second_hidden: dnn has none: use finalmlp"),
        (
            "finalmlp",
            {"hidden": []},
            "model.hidden: finalmlp fuses the hidden layers of two streams: give at least one",
        ),
        ("finalmlp", {"fusion_heads": 3}, "model.fusion_heads: 3 heads do not divide the last of hidden, 8"),
        ("finalmlp", {"second_hidden": [9]}, "model.fusion_heads: 2 heads do not divide the last of second_hidden, 9"),
        ("wukong", {"embedding_dim": 1}, "which leaves nothing of a single column"),
        ("mf", {"residual": True}, "model.residual: mf has none"),
        ("fm", {"batch_norm": True}, "model.batch_norm: fm has none"),
        ("fm", {"hidden": [3]}, "model.hidden: fm has no hidden layers"),
        ("mf", {"hidden": [3]}, "model.hidden: mf has no hidden layers"),
        ("mf", {"init": {"kind": "zero"}}, "zero gives mf no gradient"),
        ("bpr", {"hidden": [], "init": {"kind": "zero"}}, "zero gives bpr no gradient"),
        ("dnn", {"hidden": [], "batch_norm": True}, "model.batch_norm: it needs hidden layers, and there are none"),
        ("dnn", {"window": 7}, "model.window: dnn has none: use item2vec"),
    ],
)
def test_what_a_kind_does_not_read_is_refused(kind, model, message):
    with pytest.raises(SpecError) as caught:
        job_of(kind, model)
    assert message in str(caught.value)


def test_what_a_kind_has_no_form_of_is_refused():
    for changes, message in (
        ({"sharding": {"item": "grid"}}, "sharding.item: grid needs pooled rows, but din reads each row on its own"),
        ({"publish": {"collection": "items", "feature": "item"}}, "the loss of din does not determine its vectors"),
    ):
        with pytest.raises(SpecError) as caught:
            job_of("din", **changes)
        assert message in str(caught.value)
    with pytest.raises(SpecError, match="mse learns numbers, not classes that can flip"):
        job_of("mf", {"loss": "mse"}, sse={"label": {"probability": 0.1}})


def test_what_does_not_fit_the_dataset_is_refused(log):
    def refused(kind, features, model=None):
        document = log.model_dump(mode="json") | {"features": features}
        with pytest.raises(ValueError) as caught:
            job_of(kind, model).against(parse_dataset(document))
        return str(caught.value)

    one = {"user": {"type": "id"}, "item": {"type": "id"}}
    assert "din needs a list of ids that shares the table of a single id" in refused("din", one)
    lists = one | {"tags": {"type": "id_list"}}
    assert "din needs a list of ids that shares the table of a single id" in refused("din", lists)
    assert "zero gives dlrm no gradient if no feature is dense" in refused("dlrm", one, {"init": {"kind": "zero"}})
    assert "dlrm multiplies pairs of features, but there is only one (user)" in refused(
        "dlrm", {"user": {"type": "id"}}
    )
    assert "zero gives fm no gradient if no feature is dense" in refused("fm", one, {"init": {"kind": "zero"}})
    assert "fm multiplies pairs of features, but there is only one (user)" in refused("fm", {"user": {"type": "id"}})
    bare = {"hidden": []}
    zero = bare | {"init": {"kind": "zero"}}
    assert "zero gives autoint no gradient if no feature is dense and there is no deep" in refused("autoint", one, zero)
    job_of("autoint", bare).against(parse_dataset(log.model_dump(mode="json") | {"features": one}))
    numbered = one | {"price": {"type": "dense"}}
    normalised = {"batch_norm": True, "init": {"kind": "zero"}}
    assert "zero with batch_norm gives a tower no gradient" in refused("dnn", one, normalised)
    for features, more in ((numbered, {}), (one, {"residual": True})):
        document = log.model_dump(mode="json") | {"features": features}
        job_of("dnn", normalised | more).against(parse_dataset(document))
    gates = {"first_gate": ["users"], "second_gate": ["price"]}
    assert "first_gate: no such feature 'users' (there are item, price, user)" in refused("finalmlp", numbered, gates)
    assert "second_gate: 'price' is a number, but gates read vectors" in refused("finalmlp", numbered, gates)
    assert "mf needs a feature named 'item'" in refused("mf", {"user": {"type": "id"}})
    assert "mf takes one item for each row, not id_list: use id" in refused(
        "mf", {"user": {"type": "id"}, "item": {"type": "id_list"}}
    )


def test_a_dump_has_the_fields_of_the_kind_and_leaves_newer_ones_at_their_defaults_out():
    """So that a field that a kind is given later changes no hash of an older spec."""
    for kind in ("dnn", "two_tower", "dcnv2"):
        dumped = parse_job({"name": "a", "dataset": {"name": "log"}, "model": {"kind": kind}}).model_dump(mode="json")
        assert dumped["model"].keys() == {"kind", "embedding_dim", "hidden", "init", "loss"}
    assert job_of("dcnv2", {"cross_layers": 5}).model_dump(mode="json")["model"]["cross_layers"] == 5


@pytest.mark.parametrize("kind", ["wide_deep", "din", "mf"])
def test_fbgemm_trains_odd_columns_and_single_rows(log, small, tmp_path, kind):
    """FBGEMM's own rows of dim + 1 columns, and of sequences: within its rounding what our kernel trains."""
    figures = []
    for kernel in ("evenkeel", "fbgemm"):
        job = job_of(kind, kernel=kernel, optimizer={"kind": "adagrad", "learning_rate": 0.05, "eps": 1e-8}, epochs=1)
        folder = write_run(tmp_path / kernel, run_id=kernel, job=job, dataset=log, store_url=str(tmp_path / "store"))
        assert execute(read_run(folder), start_ranks) == 0
        figures.append(small.metrics(folder, "test")[0]["logloss"])
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
