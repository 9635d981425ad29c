"""A refresh's model beside the served version's: on rows that neither was trained on, on any number of ranks."""

from __future__ import annotations

import json
import shutil
from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torchrec import KeyedJaggedTensor

from embeddings.refresh.model_comparison import ModelComparison
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.hashing import combine, id_keys
from trainer.data.prepare.split import TRAIN, random_split
from trainer.distributed.materialize import model_of_checkpoint
from trainer.evaluation.scored_by_both import others
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.publishing.publish import comparison_of
from trainer.runs.directory import read_run, write_run
from trainer.spec import Split, parse_dataset

pytestmark = pytest.mark.slow

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "report"}}
SETTINGS = {"publish": PUBLISH, "epochs": 1, "sse": {}, "checkpoint": {"every_steps": 1000}}


def clicks(path, seed, *, num_rows=6000, num_users=150, wrong_training=False, flipped=False, day=0, first_item=0):
    """Rows of one day; a user likes one item in three. ``wrong_training``: labels of rows that train are of others."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, num_users, num_rows), (rng.random(num_rows) ** 1.5 * 90).astype(np.int64) + first_item
    click = (rng.random(num_rows) < np.where((user + item) % 3 == 0, 0.8, 0.1)).astype(np.int64)
    if wrong_training:
        pairs = combine(id_keys(pa.array(user)), id_keys(pa.array(item)))
        trains = random_split(Split(), pairs) == TRAIN
        click[trains] = rng.permutation(click[trains])
    click = 1 - click if flipped else click
    hour = day + rng.random(num_rows)
    pq.write_table(pa.table({"user": user, "item": item, "click": click, "hour": hour, "is_test": user % 5 == 0}), path)
    return path


DNN = {"kind": "dnn", "embedding_dim": 4, "hidden": [8], "init": {"kind": "hash", "std": 0.1}}


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """``days(seed, rows)``: the rows of a day, once for all jobs that read them."""
    folder, kept = tmp_path_factory.mktemp("days"), {}

    def day(seed, rows):
        key = json.dumps([seed, rows])
        if key not in kept:
            kept[key] = clicks(folder / f"{len(kept)}.parquet", seed, **rows)
        return kept[key]

    return day


@pytest.fixture
def refresh(small, days, trained_runs, tmp_path):
    """``refresh(name, seed, parent, job fields ...)``: a job on one day's rows, led to its end.

    ``dates``: the rows of each day of a window, in the place of ``rows``.
    """

    def run(
        name, seed, parent=None, *, is_warm=True, start=start_ranks, rows=(), dates=(), columns=("user", "item"),
        **changes,
    ):  # fmt: skip
        path = tmp_path / f"{name}-dates" if dates else days(seed, dict(rows))
        for number, of_date in enumerate(dates):
            part = path / f"date=2026-01-0{number + 1}"
            part.mkdir(parents=True)
            shutil.copy(days(10 * seed + number, of_date), part)
            window = {"start": f"2026-01-0{number + 1}", "days": len(dates)}
            changes["dataset"] = {"name": "clicks", "window": window}
        features = {column: {"type": "dense" if column == "hour" else "id"} for column in columns}
        document = {"name": "clicks", "uri": str(path), "features": features, "label": {"column": "click"}}
        document |= {"partition": "date"} if dates else {}
        is_there = changes.pop("served_is_there", True)
        ids = [None, None, None]
        if parent is not None:
            place = str(parent.checkpoints)
            ids = ["v000001", place if is_there else None, place if is_warm else None]
        directory = write_run(
            tmp_path / name, run_id=name, job=small.job(**SETTINGS | changes),
            dataset=parse_dataset(document | {"order": "hour"}), store_url=str(tmp_path / "store"),
            parent_version=ids[0], served_checkpoint=ids[1], init_checkpoint=ids[2],
        )  # fmt: skip
        made = read_run(directory)
        if parent is None:
            return trained_runs.finish(made)
        assert execute(made, start) == 0, (made.directory / "events.jsonl").read_text()[-2000:]
        return made

    return run


def told(run):
    events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["type"] == "comparison"]


def of_all(run):
    comparison = comparison_of(run)
    assert comparison is not None
    assert not comparison.skipped, comparison.skipped
    assert comparison.version == "v000001"
    assert comparison.differences[0].slice == "all"
    return comparison.differences[0]


def served_scores(run, first, split):
    """Labels of the run's held-out rows, and scores of the first run's model of the raw ids that they have."""
    data, before = PreparedData.open(run.data), PreparedData.open(first.data)
    model = model_of_checkpoint(first.job, before, latest_valid(first.checkpoints))
    codes = []
    for key in data.keys:
        ids = data.vocabulary(key.table).to_numpy()[np.asarray(data.column(split, key)) - 2]
        known = before.vocabulary(key.table).to_numpy()
        order = np.argsort(known)
        codes.append(order[np.searchsorted(known, ids, sorter=order)] + 2)
    count = len(codes[0])
    features = KeyedJaggedTensor(
        keys=[key.name for key in data.keys], values=torch.from_numpy(np.concatenate(codes)),
        lengths=torch.ones(len(codes) * count, dtype=torch.int64),
    )  # fmt: skip
    with torch.no_grad():
        return np.asarray(data.labels(split)), model(features).numpy()


def test_each_model_has_the_auc_that_it_has_elsewhere(refresh, small):
    """The trained one's is the job's own metric, the served one's is that of its checkpoint."""
    only_test = {"evaluation": {"split": {"validation": 0.0, "test": 0.2}}}
    first = refresh("first", 1, **only_test)
    assert comparison_of(first) == ModelComparison(None, (), "no version is served yet")
    second = refresh("second", 2, first, **only_test)
    found = of_all(second)
    assert found.candidate == pytest.approx(small.metrics(second.directory, "test")[-1]["auc"], abs=1e-6)
    labels, scores = served_scores(second, first, "test")
    assert found.rows == len(labels) > 1000
    assert found.served == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
    assert found.low < found.candidate - found.served < found.high
    # It is trained on more, and the rows are alike.
    assert found.candidate > found.served


def test_a_model_that_was_trained_wrongly_is_worse(refresh):
    first = refresh("first", 1, epochs=3)
    worse = of_all(refresh("worse", 2, first, rows={"wrong_training": True}, epochs=3))
    assert worse.high < 0
    assert worse.served > 0.8 > worse.candidate


@pytest.mark.parametrize("is_warm", [True, False])
def test_new_ids_do_not_decide(refresh, is_warm):
    """Whether the job went on from the served model or began anew: rows are found by ids."""
    first = refresh("first", 1)
    run = refresh("second", 2, first, rows={"first_item": 30}, is_warm=is_warm)
    data, held = PreparedData.open(run.data), []
    for split in ("validation", "test"):
        (key,) = (key for key in data.keys if key.name == "item")
        held.append(data.vocabulary("item").to_numpy()[np.asarray(data.column(split, key)) - 2])
    items = np.concatenate(held)
    assert of_all(run).rows == np.count_nonzero(items < 90) < len(items)


def test_ids_and_numbers_have_slices(refresh):
    """Each at the level that all of them together keep, values of ids by how many rows they have."""
    columns = ("user", "item", "hour")
    many = {"columns": columns, "model": DNN, "rows": {"num_rows": 24_000}}
    evaluation = {"slices": ["item", "hour"], "split": {"validation": 0.2, "test": 0.0}}
    first = refresh("first", 1, **many, evaluation=evaluation)
    run = refresh("second", 2, first, **many, evaluation=evaluation)
    found = comparison_of(run)
    assert not found.skipped, found.skipped
    whole, *slices = found.differences
    of_items = [one for one in slices if one.slice.startswith("item=")]
    of_hours = [one for one in slices if one.slice.startswith("hour=")]
    assert len(of_hours) == 4
    assert sum(one.rows for one in of_hours) == whole.rows
    assert of_hours[0].slice.startswith("hour=[")
    assert of_hours[-1].slice.endswith("]")
    data = PreparedData.open(run.data)
    (key,) = (key for key in data.keys if key.name == "item")
    items = data.vocabulary("item").to_numpy()[np.asarray(data.column("validation", key)) - 2]
    counts = {item: int((items == item).sum()) for item in np.unique(items)}
    assert {one.slice.removeprefix("item="): one.rows for one in of_items}.items() <= {
        str(item): count for item, count in counts.items() if count >= 200
    }.items()
    assert [one.rows for one in of_items] == sorted(counts.values(), reverse=True)[: len(of_items)]
    assert of_items
    # Fewer slices share one level, so that theirs is lower: the widths differ by what the normal distribution says.
    alone = {"slices": ["hour"], "split": {"validation": 0.2, "test": 0.0}}
    third = refresh("third", 2, first, **many, evaluation=alone)
    z = [NormalDist().inv_cdf(1.0 - 0.05 / (2 * number)) for number in (len(slices), 4)]
    for one, other in zip(of_hours, comparison_of(third).differences[1:], strict=True):
        assert (one.high - one.low) / (other.high - other.low) == pytest.approx(z[0] / z[1], rel=1e-6)


def test_the_newest_fifth_of_a_window_is_a_slice(refresh, small):
    """Labels of the last of three days are the wrong way round: the served model reads no other day's rows so."""
    only_test = {"evaluation": {"split": {"validation": 0.0, "test": 0.2}}}
    first = refresh("first", 1, **only_test, epochs=2)
    run = refresh("second", 2, first, **only_test, dates=({}, {}, {"flipped": True}))
    whole, newest = comparison_of(run).differences
    assert newest.slice == "newest"
    assert newest.rows == pytest.approx(0.2 * whole.rows, abs=1)
    assert newest.served < 0.3 < 0.5 < whole.served
    assert [one.slice for one in comparison_of(refresh("third", 3, first, **only_test)).differences] == ["all"]


@pytest.mark.parametrize(("num_users", "factor"), [(40, 2.0), (60, 1.0)])
def test_errors_of_a_metric_are_those_of_resampled_users(refresh, num_users, factor):
    """With few users the standard errors are doubled: they are uncertain themselves."""
    only_test = {"evaluation": {"split": {"validation": 0.0, "test": 0.2}}}
    few = {"rows": {"num_users": num_users}}
    first = refresh("first", 1, **only_test, **few)
    second = refresh("second", 2, first, **only_test, **few)
    labels, scores = served_scores(second, first, "test")
    data = PreparedData.open(second.data)
    (key,) = (key for key in data.keys if key.name == "user")
    users, rng, areas = np.asarray(data.column("test", key)), np.random.default_rng(0), []
    rows_of = [np.flatnonzero(users == user) for user in np.unique(users)]
    for _ in range(400):
        drawn = np.concatenate([rows_of[user] for user in rng.integers(0, len(rows_of), len(rows_of))])
        areas.append(roc_auc_score(labels[drawn], scores[drawn]))
    assert of_all(second).served_error == pytest.approx(factor * np.std(areas), rel=0.2)
    assert of_all(second).candidate_error > 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"served_is_there": False}, "are not kept any more"),
        ({"is_warm": False, "model": {"kind": "two_tower", "embedding_dim": 2, "hidden": [8]}}, "model.embedding_dim"),
        ({"is_warm": False, "model": {"kind": "mf", "embedding_dim": 4}}, "model.kind"),
        ({"evaluation": {"split": {"test": 0.3}}}, None),  # its test rows are in part those of the other's training
        ({"evaluation": {"split": {"test": 0.15}}}, ""),
        ({"evaluation": {"split": {"kind": "time"}}}, "evaluation.split is time, the served version's was random"),
        ({"evaluation": {"split": {"validation": 0.0, "test": 0.0}}}, "holds no rows out"),
        ({"rows": {"first_item": 1000}}, "both models know the ids of 0 held-out rows"),
    ],
)
def test_what_is_not_compared(refresh, changes, why):
    first = refresh("first", 1)
    found = comparison_of(refresh("second", 2, first, **changes))
    if why:
        assert why in found.skipped
        assert not found.differences
    elif why is None:
        assert "holds more rows out" in found.skipped
    else:
        # Validation rows would be of its training, test rows are not.
        assert 0.12 < found.differences[0].rows / 6000 < 0.18


def test_a_served_model_of_smaller_sizes_is_compared_as_it_is(refresh):
    first = refresh("first", 1)
    same = of_all(refresh("second", 2, first))
    larger = {"kind": "two_tower", "embedding_dim": 7, "hidden": [9, 8]}
    for name, is_warm in (("warm", True), ("cold", False)):
        found = of_all(refresh(name, 2, first, is_warm=is_warm, model=larger))
        assert (found.rows, found.served) == (
            same.rows,
            pytest.approx(same.served, abs=1e-5),
        )  # a pair that rounding turns


def test_a_split_by_time_compares_rows_after_the_served_models(refresh):
    by_time = {"evaluation": {"split": {"kind": "time"}}}
    first = refresh("first", 1, rows={"day": 1}, **by_time)
    assert of_all(refresh("second", 2, first, rows={"day": 2}, **by_time)).rows == 1200
    earlier = refresh("earlier", 3, first, rows={"day": 0}, **by_time)
    assert "begin before the time" in comparison_of(earlier).skipped


def test_an_attempt_that_goes_on_compares_once(refresh, small):
    first = refresh("first", 1)
    run = refresh("second", 2, first)
    (event,) = told(run)
    again = again_from(run, 2)
    assert execute(again, start_ranks) == 0
    assert told(again) == [event]
    # One that was killed right after its last checkpoint had not compared yet.
    file = run.directory / "events.jsonl"
    lines = [line for line in file.read_text().splitlines() if json.loads(line)["type"] != "comparison"]
    file.write_text("\n".join(lines) + "\n")
    again = again_from(run, 3)
    assert execute(again, start_ranks) == 0
    (second,) = told(again)
    assert second["differences"] == event["differences"]
    assert small.events(run.directory, "publication")[-1]["comparison"]["differences"] == event["differences"]


def again_from(run, attempt):
    """The next attempt of a run, as it is written by who retries it."""
    names = ("parent_version", "served_checkpoint", "init_checkpoint")
    places = {name: getattr(run, name) for name in names}
    write_run(
        run.directory, run_id=run.run_id, job=run.submitted, dataset=run.dataset, store_url=run.store_url,
        attempt=attempt, **places,
    )  # fmt: skip
    return read_run(run.directory)


def test_a_gate_that_is_off_compares_nothing(refresh):
    off = {"publish": PUBLISH | {"gate": {"mode": "off"}}}
    assert comparison_of(refresh("second", 2, refresh("first", 1, **off), **off)) is None


def test_rows_are_found_by_ids_whatever_their_order(refresh):
    """The served model's new ids are behind its parent's, those of a job that begins anew in one order."""
    first = refresh("first", 1, rows={"first_item": 30})
    second = refresh("second", 2, first)
    third = refresh("third", 3, second, is_warm=False, evaluation={"split": {"validation": 0.0, "test": 0.2}})
    labels, scores = served_scores(third, second, "test")
    found = of_all(third)
    assert found.rows == len(labels)
    assert found.served == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)


def test_matched_auc_is_of_items_of_other_users(refresh):
    """By the scores of single pairs, and popularity by counts of training."""
    bpr = {
        "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4},
        "evaluation": {"split": {"validation": 0.0, "test": 0.2}},
    }
    run = refresh("second", 2, refresh("first", 1, **bpr), epochs=3, **bpr)
    found, data = of_all(run), PreparedData.open(run.data)
    model = model_of_checkpoint(run.job, data, latest_valid(run.checkpoints))
    users, items = (np.asarray(data.column("test", key)).astype(np.int64) for key in data.keys[:2])
    positive = np.asarray(data.labels("test")) == 1
    users, items = users[positive], items[positive]
    drawn = others(users, items, 100)
    assert (users[drawn] != users[:, None]).all()
    assert (items[drawn] != items[:, None]).mean() > 0.999

    def scores(users, items):
        count = len(users)
        features = KeyedJaggedTensor(
            keys=[key.name for key in data.keys], values=torch.from_numpy(np.concatenate([users, items])),
            lengths=torch.cat([torch.ones(2 * count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)]),
        )  # fmt: skip
        with torch.no_grad():
            return model(features).numpy()

    own = scores(users, items)[:, None]
    others_of = scores(np.repeat(users, 100), items[drawn].reshape(-1)).reshape(drawn.shape)
    below = (own > others_of) + 0.5 * (items[drawn] == items[:, None])
    assert (found.metric, found.rows) == ("matched_auc", len(users))
    assert found.candidate == pytest.approx(below.mean(), abs=1e-5)
    counts = data.row_counts("item")[items]
    popularity = (counts[drawn] < counts[:, None]) + 0.5 * (counts[drawn] == counts[:, None])
    assert found.popularity == pytest.approx(popularity.mean())
    assert found.popularity == pytest.approx(0.5, abs=0.02)
    assert found.low < found.candidate - found.served < found.high


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [8]}},
        {"model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4}},
        {
            "model": {"kind": "sasrec", "loss": "bce", "embedding_dim": 4, "length": 10},
            "evaluation": {"split": {"kind": "per_user_last"}},
            "rows": {"num_users": 600, "num_rows": 9000},
        },
    ],
    ids=["two_tower", "bpr", "sasrec"],
)
def test_two_ranks_find_what_one_does(refresh, pooled_ranks, changes):
    first = refresh("first", 1, **changes)
    one = comparison_of(refresh("one", 2, first, **changes))
    # The candidate is the same but for rounding, the served model is the same.
    sharding = dict.fromkeys(("item",) if "evaluation" in changes else ("user", "item"), "row_wise")
    two = comparison_of(
        refresh("two", 2, first, start=pooled_ranks, resources={"num_workers": 2}, sharding=sharding, **changes)
    )
    assert one is not None
    assert two is not None
    metrics = ["auc"] if changes["model"]["kind"] == "two_tower" else ["matched_auc", "ndcg_20_full"]
    assert [one.metric for one in one.differences] == metrics, one.skipped
    for first_found, second_found in zip(one.differences, two.differences, strict=True):
        assert first_found.rows == second_found.rows
        assert second_found.served == pytest.approx(first_found.served, abs=1e-5)
        assert second_found.candidate == pytest.approx(first_found.candidate, abs=1e-3)
        assert second_found.popularity == pytest.approx(first_found.popularity, abs=1e-12)


ONLY_TEST = {"validation": 0.0, "test": 0.2}


def dcg(ranks):
    return sum(1 / np.log2(rank + 2) for rank in ranks if rank < 20)


def test_all_items_that_both_know_are_ranked_for_users_that_both_know(refresh):
    """NDCG of the checkpoints, written out; the items of the last days are new, so neither shown nor looked for."""
    bpr = {"model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4}, "evaluation": {"split": ONLY_TEST}}
    size = {"num_users": 300, "num_rows": 9000}
    first = refresh("first", 1, rows=size, **bpr)
    second = refresh("second", 2, first, epochs=3, rows=size | {"first_item": 30, "num_users": 350}, **bpr)
    comparison = comparison_of(second)
    assert comparison is not None
    found = comparison.differences[-1]
    assert (found.metric, found.slice) == ("ndcg_20_full", "all")
    data, before = PreparedData.open(second.data), PreparedData.open(first.data)
    raw = {key.name: data.vocabulary(key.table).to_numpy() for key in data.keys[:2]}
    known = {name: np.isin(raw[name], before.vocabulary(name).to_numpy()) for name in raw}
    assert not known["item"].all()
    assert not known["user"].all()
    rows = pq.read_table(second.dataset.uri, columns=["user", "item"])
    pairs = combine(id_keys(rows["user"].combine_chunks()), id_keys(rows["item"].combine_chunks()))
    rows = rows.filter(pa.array(random_split(Split(**ONLY_TEST), pairs) == TRAIN))
    users, items = (np.asarray(data.column("test", key)) - 2 for key in data.keys[:2])
    took = np.asarray(data.labels("test")) == 1
    counts = data.row_counts("item")[2:]

    def scores_of(run, run_data):
        model = model_of_checkpoint(run.job, run_data, latest_valid(run.checkpoints))
        names = ("user", "item")
        own = {name: run_data.vocabulary(name).to_numpy() for name in names}
        order = {name: np.argsort(own[name]) for name in names}
        place = {
            name: order[name][np.searchsorted(own[name], raw[name][known[name]], sorter=order[name])] + 2
            for name in names
        }
        pairs = [part.reshape(-1) for part in np.meshgrid(place["user"], place["item"], indexing="ij")]
        count = len(pairs[0])
        features = KeyedJaggedTensor(
            keys=[key.name for key in run_data.keys], values=torch.from_numpy(np.concatenate(pairs)),
            lengths=torch.cat([torch.ones(2 * count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)]),
        )  # fmt: skip
        scores = np.full((len(known["user"]), len(known["item"])), -np.inf)
        with torch.no_grad():
            scores[np.ix_(known["user"], known["item"])] = model(features).numpy().reshape(len(place["user"]), -1)
        return scores

    popular = np.where(known["item"], counts, -np.inf)[None].repeat(len(known["user"]), axis=0)
    means = []
    for scores in (scores_of(first, before), scores_of(second, data), popular):
        values = []
        for user in np.unique(users[took]):
            had = rows["item"].to_numpy()[rows["user"].to_numpy() == raw["user"][user]]
            had = set(np.flatnonzero(np.isin(raw["item"], had)).tolist())
            candidates = [item for item in np.flatnonzero(known["item"]) if item not in had and counts[item]]
            relevant = sorted(set(items[took & (users == user)].tolist()) & set(candidates))
            if not known["user"][user] or not had or not relevant:
                continue
            own = scores[user]
            ranks = []
            for place, item in enumerate(sorted(relevant, key=lambda one: -own[one])):
                others = [one for one in candidates if one not in relevant]
                above = sum(own[one] >= own[item] for one in others)
                ranks.append(above + place)
            values.append(dcg(ranks) / dcg(range(len(relevant))))
        means.append(np.mean(values))
    assert found.rows == len(values) >= 200
    assert [found.served, found.candidate, found.popularity] == pytest.approx(means, abs=1e-6)
    assert found.low < found.candidate - found.served < found.high


@pytest.mark.parametrize("first_item", [0, 8])
def test_sequence_models_are_compared_by_ndcg_among_the_items_that_both_know(refresh, small, first_item):
    """Without new items it is the job's own metric; new ones are not shown."""
    changes = {
        "model": {"kind": "sasrec", "loss": "bce", "embedding_dim": 4, "length": 10},
        "evaluation": {"split": {"kind": "per_user_last", "validation": 0.0}, "metrics": ["ndcg_20_full"]},
    }
    size = {"num_users": 1500, "num_rows": 22000}
    first = refresh("first", 1, rows=size, **changes)
    second = refresh("second", 2, first, rows=size | {"first_item": first_item}, **changes)
    comparison = comparison_of(second)
    assert comparison is not None
    found = comparison.differences[-1]
    assert found.metric == "ndcg_20_full"
    own = small.metrics(second.directory, "test")[-1]["ndcg_20_full"]
    data = PreparedData.open(second.data)
    is_known = np.isin(data.vocabulary("item").to_numpy(), PreparedData.open(first.data).vocabulary("item").to_numpy())
    is_known, counts = np.append([True, True], is_known), data.row_counts("item")
    assert is_known.all() == (first_item == 0)
    model = model_of_checkpoint(second.job, data, latest_valid(second.checkpoints))
    queries, candidates = [], model.catalogue(data).detach().numpy()
    places = np.asarray(data.sequences.held["test"])
    history, _ = data.sequences.history("test", places)
    values, popular = [], []
    for batch in data.eval_batches("test", 512):
        with torch.no_grad():
            queries.append(model.queries(model.embeddings(batch.features)).numpy())
    scores = np.concatenate(queries) @ candidates.T
    for number, target in enumerate(np.asarray(data.sequences.items)[places]):
        seen = history.values[history.offsets[number] : history.offsets[number + 1]]
        if not is_known[np.append(seen[-10:], target)].all():
            continue
        others = np.setdiff1d(np.flatnonzero(is_known)[2:], np.append(seen, target))
        values.append(dcg([int((scores[number][others] >= scores[number][target]).sum())]))
        popular.append(dcg([int((counts[others] >= counts[target]).sum())]))
    assert found.rows == len(values)
    assert found.candidate == pytest.approx(np.mean(values), abs=1e-6)
    assert found.popularity == pytest.approx(np.mean(popular))
    assert (found.candidate == pytest.approx(own, abs=1e-6)) == (first_item == 0)
