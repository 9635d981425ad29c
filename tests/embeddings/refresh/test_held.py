"""Refreshes held in a row: how many, why, which of them may be gone on from, and what ends a row of honest ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.refresh import probe
from embeddings.refresh.diagnosis import diagnose
from embeddings.refresh.gate import Check, decide
from embeddings.refresh.gate_checks.registry import CHECKS, LIMITS, subject_of
from embeddings.refresh.held_versions import held_in_a_row, sound_version
from embeddings.refresh.hold_policy import FAULTS
from embeddings.refresh.model_comparison import ModelComparison, ModelDifference
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import Gate, RefreshRequest, Settings, View, publish_candidate
from embeddings.refresh.settings import MAX_HELD
from embeddings.refresh.usual import Usual
from embeddings.store import Collection, open_store
from embeddings.vectors.item_vectors import FOUND, ItemVectors
from trainer.spec import Gate as GateSpec

N, D = 400, 8
Refresh = Callable[..., Publication]


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return open_store(tmp_path).collection("items")


@pytest.fixture
def refresh(tmp_path: Path, collection: Collection) -> Refresh:
    """``refresh(vectors, gate, ids=..., counts=..., views=...)``: a refresh of what is served."""

    def publish(
        vectors: np.ndarray,
        gate: Gate | None = None,
        *,
        ids: Any = None,
        counts: Any = None,
        views: Any = (),
        **options: Any,
    ) -> Publication:
        ids = np.arange(len(vectors)) if ids is None else ids
        candidate = ItemVectors(ids, vectors.astype(np.float32), counts=counts)
        options.setdefault("parent_version", collection.current())
        settings = Settings(gate=gate or Gate(), views=views)
        return publish_candidate(open_store(tmp_path), "items", RefreshRequest(candidate, settings, **options))

    return publish


def base() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((N, D))


def noisy(rows: np.ndarray, seed: int, noise: float = 0.1) -> np.ndarray:
    """Rows of a refresh by chance."""
    return rows + noise * np.random.default_rng(seed).standard_normal(rows.shape)


def elsewhere(share: float = 0.5) -> np.ndarray:
    """The base, with a share of the items at other places."""
    rows = base()
    count = int(share * N)
    rows[:count] = np.random.default_rng(77).standard_normal((count, D))
    return rows


def models(candidate: float = 0.71, high: float = 0.02, served: float = 0.70) -> ModelComparison:
    """A comparison of AUCs: of a model that is no worse, where nothing else is said."""
    return ModelComparison("v000001", (ModelDifference("auc", "all", 1000, served, candidate, high - 0.02, high),))


def rows(**figures: float | None) -> dict[str, Any]:
    """The lineage of a run on rows like those of every other day, but for some figures."""
    usual = {"rows": 10_000.0, "largest_user": 0.01, "pairing": 0.8, "pairing_newest": 0.8}
    return {"drift": [], "row_figures": usual | figures}


MODELS = models()
SKIPPED = ModelComparison("v000001", skipped="the served model's checkpoints are gone")


# --- in a row --------------------------------------------------------------------------------------------------------


def test_held_ones_are_counted_since_the_last_switch(refresh: Refresh, collection: Collection) -> None:
    assert (refresh(base()).held_in_a_row, held_in_a_row(collection)) == (0, [])
    ends = [refresh(noisy(elsewhere(), seed)) for seed in range(2)]
    assert [(end.status, end.held_in_a_row) for end in ends] == [("held", 1), ("held", 2)]
    first = collection.manifest("v000002")
    assert {end.held_since for end in ends} == {first["created_at"]}
    assert {end.max_held for end in ends} == {3}
    assert [one["version"] for one in held_in_a_row(collection)] == ["v000002", "v000003"]
    # A publication ends the row, and so does a promotion; a rollback does too, of what was held under the other one.
    assert refresh(noisy(base(), 5)).held_in_a_row == 0
    assert held_in_a_row(collection) == []
    refresh(noisy(elsewhere(), 6))
    collection.promote("v000005", "the world moved", True)
    assert held_in_a_row(collection) == []
    assert refresh(noisy(base(), 7)).held_in_a_row == 1
    collection.promote("v000001", "back")
    assert held_in_a_row(collection) == []


def test_a_run_that_is_repeated_counts_once(refresh: Refresh) -> None:
    refresh(base())
    ends = [refresh(noisy(elsewhere(), 1), job_id="day-2") for _ in range(2)]
    assert [(end.version, end.held_in_a_row) for end in ends] == [("v000002", 1)] * 2
    assert ends[0].diagnosis == ends[1].diagnosis


# --- limits of a job -------------------------------------------------------------------------------------------------


def test_limits_of_a_job_come_before_others(refresh: Refresh) -> None:
    """They leave a first version alone, of which there is no distance."""
    loose = {"cosine_mean": 0.2, "cosine_low": 0.9, "anchor_cosine": 0.2}
    assert refresh(base(), Gate(limits={"newly_carried": -1.0, "coverage": 1.1})).status == "published"
    end = refresh(noisy(elsewhere(), 1), Gate(limits=loose))
    assert end.status == "published"
    assert {check["metric"]: check["threshold"] for check in end.gate}["cosine_mean"] == 0.2
    # What only informs is held where a job says so.
    end = refresh(noisy(elsewhere(), 2), Gate(limits={**loose, "newly_carried": -1.0, "effective_rank": 1.0}))
    limits = {check["metric"]: check["threshold"] for check in end.gate}
    assert (end.status, limits["newly_carried"], limits["effective_rank"]) == ("held", -1.0, 1.0)
    assert [check["metric"] for check in end.gate if check["verdict"] == "fail"] == ["newly_carried"]


# --- why -------------------------------------------------------------------------------------------------------------

ROWS_MOVED = {"drift": [{"what": "new_ids", "message": "0.4 of the examples have a new 'item'"}]}


def test_where_rows_moved_too_the_data_are_the_cause(refresh: Refresh) -> None:
    refresh(base())
    end = refresh(noisy(elsewhere(), 1), lineage=ROWS_MOVED)
    assert end.diagnosis is not None
    assert end.diagnosis["cause"] == "data"
    assert end.diagnosis["summary"].startswith("The data moved (0.4 of the examples have a new 'item')")
    assert end.diagnosis["rows"] == ["0.4 of the examples have a new 'item'"]
    assert "promote" in end.diagnosis["advice"]


@pytest.mark.parametrize(
    ("lineage", "said"),
    [({"drift": []}, "the rows are like those before"), ({"drift": None}, "nothing is known of the rows before")],
)
def test_where_they_did_not_the_run_is_looked_at_first(refresh: Refresh, lineage: Any, said: str) -> None:
    refresh(base())
    end = refresh(noisy(elsewhere(), 1), lineage=lineage)
    assert end.diagnosis is not None
    assert end.diagnosis["cause"] == "vectors"
    assert said in end.diagnosis["summary"]


def test_items_that_went_are_told_from_vectors_that_moved(refresh: Refresh) -> None:
    refresh(base())
    end = refresh(noisy(base(), 1)[: N * 2 // 5])
    assert end.diagnosis is not None
    assert end.diagnosis["cause"] == "items"
    assert [one["metric"] for one in end.diagnosis["failed"]] == ["unreplaced"]


@pytest.mark.parametrize("fault", ["collapsed", "not finite", "without a model"])
def test_faults_of_a_run_are_never_the_datas(refresh: Refresh, fault: str) -> None:
    refresh(base(), model="bpr")
    rows, model = noisy(base(), 1), "bpr"
    if fault == "collapsed":
        rows[:, 1:] *= 1e-3
    elif fault == "not finite":
        rows[: N // 5] = np.nan
    else:
        model = "mf"
    end = refresh(rows, lineage=ROWS_MOVED, model=model)
    assert end.diagnosis is not None
    assert end.diagnosis["cause"] == ("generation" if fault == "without a model" else "run")


def test_what_is_at_fault_is_the_worst_of_what_failed() -> None:
    turned = Check("cosine_mean", 0.70, 0.85, at_most=False)
    gone = Check("unreplaced", 0.7, 0.5, at_most=True)
    shuffled = Check("pairing", 0.5, 0.7, at_most=False)
    worse = Check("model_gain[all]", -0.02, -0.005, at_most=False)
    norms = Check("norm_change_p95", 10.0, 9.0, at_most=True)
    collapsed = Check("effective_rank", 1.2, 4.0, at_most=False)

    def found(*checks: Check, lineage: Any = None) -> tuple[str, str]:
        diagnosis = diagnose(checks, lineage)
        assert diagnosis is not None
        assert len(diagnosis.failed) == len(checks)
        return diagnosis.cause, diagnosis.summary

    assert found(gone)[0] == "items"
    assert found(gone)[1].startswith("The data moved: other items have rows than before")
    assert found(gone, turned)[0] == "vectors"
    assert found(gone, turned, lineage=ROWS_MOVED)[0] == "data"
    cause, summary = found(gone, turned, worse, lineage=ROWS_MOVED)
    assert (cause, summary.startswith("The model is worse (rows: 0.4 of the examples")) == ("model", True)
    cause, summary = found(gone, turned, worse, shuffled)
    assert (cause, summary.startswith("The rows are unlike those of the days before: ")) == ("rows", True)
    assert found(gone, norms)[0] == "vectors"
    cause, summary = found(gone, turned, worse, shuffled, norms, collapsed)
    assert (cause, summary.startswith("The run is at fault: ")) == ("run", True)


def test_a_fault_of_the_run_is_diagnosed_with_the_remedy_of_its_job() -> None:
    metrics = {"dim": 16.0, "effective_rank": 1.1, "finite": 1.0}
    fitting = diagnose(decide(metrics, remedies={"effective_rank": "set model.loss"}).checks, None)
    assert fitting is not None
    assert fitting.advice == "Do not promote it. Set model.loss. Then run the job again."
    general = diagnose(decide(metrics).checks, None)
    assert general is not None
    assert "train longer" in general.advice


def test_a_failure_says_what_is_usual_and_how_many_times_as_far_it_is() -> None:
    usual = Usual(0.9, 0.01, 6)
    diagnosis = diagnose([Check("cosine_mean", 0.78, 0.86, at_most=False, usual=usual)], None)
    assert diagnosis is not None
    (failure,) = diagnosis.failed
    assert (failure.usual, failure.times) == (0.9, pytest.approx(3.0))
    assert "cosine_mean is 0.78, at least 0.86 is asked for (usually 0.9)" in diagnosis.summary


def test_an_overtaken_run_says_so(refresh: Refresh) -> None:
    refresh(base())
    refresh(noisy(base(), 1))
    end = refresh(noisy(base(), 2), parent_version="v000001")
    assert end.status == "held"
    assert end.diagnosis is not None
    assert end.diagnosis["cause"] == "stale"
    assert end.diagnosis["summary"] == "The run was overtaken: version v000002 of 'items' is current, not v000001."


def test_by_how_much_is_how_far_from_the_best_in_units_of_the_limit() -> None:
    checks = [
        Check("cosine_mean", 0.70, 0.85, at_most=False),
        Check("newly_carried", 0.75, 0.5, at_most=True),
        Check("effective_rank", 2.0, 4.0, at_most=False),
        Check("finite", 0.9, 1.0, at_most=False),
        Check("knn_overlap", float("nan"), 0.25, at_most=False),
        Check("coverage", 0.99, 0.95, at_most=False),
    ]
    diagnosis = diagnose(checks, None)
    assert diagnosis is not None
    found = {
        one.metric: (one.value, one.bound, None if one.times is None else round(one.times, 6))
        for one in diagnosis.failed
    }
    assert found == {
        "finite": (0.9, "at_least", None),  # nothing less than all will do
        "knn_overlap": (None, "at_least", None),
        "cosine_mean": (0.70, "at_least", 2.0),
        "effective_rank": (2.0, "at_least", 2.0),
        "newly_carried": (0.75, "at_most", 1.5),
    }
    assert [one.times for one in diagnosis.failed[2:]] == sorted(
        (one.times for one in diagnosis.failed[2:]), reverse=True
    )
    assert diagnose(checks[-1:], None) is None


def test_every_metric_with_a_limit_is_about_something() -> None:
    assert {subject_of(metric) for check in CHECKS for metric in (limit.metric for limit in check.limits)} == {
        "items", "vectors", "rows", "model", "run",
    }  # fmt: skip
    of = {subject: [metric for metric in LIMITS if subject_of(metric) == subject] for subject in FAULTS}
    assert {"finite", "coverage", "effective_rank"} <= set(of["run"])
    assert set(of["rows"]) == {"model_metric_before",
        "log_rows", "log_users", "largest_user", "pairing", "pairing_newest", "popularity",
    }  # fmt: skip
    assert set(of["model"]) == {"model_gain", "model_metric"}
    assert subject_of("canary_drop[genre]") == "vectors"
    assert subject_of("same_model") == "run"


# --- what a refresh may go on from -----------------------------------------------------------------------------------


def test_a_sound_version_is_gone_on_from_and_others_do_not_hide_it(refresh: Refresh, collection: Collection) -> None:
    refresh(base())
    assert sound_version(collection) is None
    # Without a model beside the served one only other items are trusted.
    refresh(noisy(base(), 1)[: N * 2 // 5])
    found = sound_version(collection)
    assert found is not None
    assert found["version"] == "v000002"
    refresh(noisy(elsewhere(), 2))
    assert not collection.manifest("v000003")["sound"]
    again = sound_version(collection)
    assert again is not None
    assert again["version"] == "v000002"
    collection.promote("v000003", "the world moved", True)
    assert sound_version(collection) is None


@pytest.mark.parametrize(
    ("options", "sound"),
    [
        ({"models": MODELS}, True),
        ({"models": models(candidate=0.69, high=-0.004)}, True),
        ({"models": models(candidate=0.66, high=-0.006)}, False),
        ({"models": SKIPPED}, False),
        ({}, False),
        ({"models": MODELS, "lineage": rows(pairing=0.5)}, False),
        ({"models": MODELS, "lineage": rows(rows=100.0)}, False),
        ({"models": MODELS, "lineage": rows(largest_user=0.5)}, False),
        ({"models": MODELS, "lineage": rows(pairing=None, pairing_newest=None)}, True),
    ],
)
def test_sound_is_nothing_wrong_with_run_rows_and_model(
    refresh: Refresh, collection: Collection, options: dict[str, Any], sound: bool
) -> None:
    refresh(base(), lineage=rows())
    end = refresh(noisy(elsewhere(), 1), **options)
    assert end.status == "held"
    assert collection.manifest(str(end.version))["sound"] == sound


def test_a_stuck_collection_whose_items_all_went_goes_on_by_its_held_versions(
    refresh: Refresh, collection: Collection
) -> None:
    """Nothing but the held versions can say where the served coordinates are, and they are enough."""
    places = np.r_[base(), np.random.default_rng(5).standard_normal((3 * N, D))]

    def day(ids: np.ndarray, seed: int, start: str | None) -> Publication:
        basis = np.linalg.qr(np.random.default_rng(50 + seed).standard_normal((D, D)))[0]
        return refresh(noisy(places[ids], seed) @ basis, ids=ids, start_version=start, models=MODELS, lineage=rows())

    refresh(base(), lineage=rows())
    some, many = np.arange(N, N + 99), np.arange(2 * N, 3 * N)
    first = day(np.r_[N - 100 : N, some], 1, None)
    assert (first.status, first.diagnosis is not None and first.diagnosis["cause"]) == ("held", "items")
    # None of these is served. A run from what is served would have coordinates of its own.
    second_ids = np.r_[some, many]
    lost = day(second_ids, 2, None)
    assert (lost.status, lost.diagnosis is not None and lost.diagnosis["cause"]) == ("held", "generation")
    assert sound_version(collection) == collection.manifest("v000002")
    second = day(second_ids, 3, "v000002")
    third = day(many, 4, second.version)
    fourth = day(many, 5, third.version)
    for end, start, ids in ((second, first, some), (third, second, many), (fourth, third, many)):
        manifest = collection.manifest(str(end.version))
        assert (manifest["alignment"]["onto"], manifest["sound"]) == (start.version, True)
        pair = [collection.open(str(one.version)).lookup(ids)[1] for one in (start, end)]
        assert np.sum(pair[0] * pair[1], axis=1).mean() > 0.95
    # The run of other coordinates broke the row; three honest ones after it end it.
    assert [end.status for end in (second, third, fourth)] == ["held", "held", "published"]
    assert (collection.current(), collection.manifest()["anchor_generation"]) == (fourth.version, 3)
    assert day(many, 6, None).status == "published"


# --- the end of a row ------------------------------------------------------------------------------------------------


def test_the_third_honest_day_opens_a_generation_in_the_same_coordinates(
    refresh: Refresh, collection: Collection
) -> None:
    refresh(base(), lineage=rows(), views=(View("wide", dim=64, sigma=1.0, frequencies="gaussian"),))
    before = {view["name"]: view for view in collection.views()}
    frequencies = collection.frequencies("wide")
    basis = np.linalg.qr(np.random.default_rng(3).standard_normal((D, D)))[0]
    # Somebody's own view, which no job names, is of the generation too.
    before["mine"] = collection.create_view("mine", sigma=0.7)
    probe.register(collection, "side", np.arange(N // 2, N), (np.arange(N // 2) % 2).tolist())
    ends = [refresh(noisy(elsewhere(), seed) @ basis, models=MODELS, lineage=rows()) for seed in range(3)]
    assert [end.status for end in ends] == ["held", "held", "published"]
    manifests = [collection.manifest(str(end.version)) for end in ends]
    assert [one["sound"] for one in manifests] == [True] * 3
    assert [one["not_released"] for one in manifests] == [
        "1 of 3 sound refreshes in a row", "2 of 3 sound refreshes in a row", None,
    ]  # fmt: skip
    assert [one["released"] for one in manifests[:2]] == [None] * 2
    released = manifests[2]["released"]
    assert (released["in_a_row"], released["generation"]) == (3, 2)
    assert {"cosine_mean", "cosine_low"} <= set(released["failed"])
    assert (ends[-1].released, ends[-1].held_in_a_row) == (released, 0)
    assert manifests[2]["comparison"] == MODELS.as_json()
    # What was let through says so, and what failed stays with it.
    assert (collection.current(), manifests[2]["anchor_generation"]) == ("v000004", 2)
    assert (manifests[2]["anchor_version"], manifests[2]["parent"]) == ("v000004", "v000001")
    assert any("cosine_mean" in remark for remark in manifests[2]["remarks"])
    # The items that stayed are where they were, whatever basis the run had.
    stayed = np.arange(N // 2, N)
    vectors = {version: collection.open(version).lookup(stayed)[1] for version in ("v000001", "v000004")}
    assert np.sum(vectors["v000001"] * vectors["v000004"], axis=1).mean() > 0.8
    # The views are those of before, with the same frequencies, for whoever was fitted on them.
    after = {view["name"]: view for view in collection.views() if "map" not in view}
    assert set(after) == {"items_raw", "items_rff", "wide", "mine"}
    for name, view in after.items():
        same = ("kind", "dim", "sigma", "seed", "frequencies", "dim_in", "materialized", "sha256")
        assert {field: view[field] for field in same} == {field: before[name][field] for field in same}
        assert view["anchor_generation"] == 2
    np.testing.assert_array_equal(collection.frequencies("wide"), frequencies)
    status, phi = collection.view_lookup("wide", stayed)
    assert (status == FOUND).all()
    frozen = collection.view_features("wide", "v000001")
    np.testing.assert_allclose(phi, frozen.transform(vectors["v000004"]), atol=1e-5)
    # The next refresh is of the new generation, and its drift is counted from here.
    following = refresh(noisy(elsewhere(), 9), models=MODELS, lineage=rows())
    assert following.status == "published", following.reasons
    assert following.anchor_generation == 2
    assert collection.manifest()["drift_from"] == "v000004"
    assert following.metrics["anchor_cosine"] > 0.9
    # Consumers of before are still read.
    assert "canary_drop[side]" in following.metrics


def test_hold_goes_on_holding(refresh: Refresh, collection: Collection) -> None:
    refresh(base())
    gate = Gate(max_held=2, when_stuck="hold")
    ends = [refresh(noisy(elsewhere(), seed), gate, models=MODELS) for seed in range(4)]
    assert [(end.status, end.held_in_a_row) for end in ends] == [("held", number) for number in (1, 2, 3, 4)]
    assert collection.versions()[-1]["not_released"] == "publish.gate.when_stuck is hold"
    assert collection.versions()[-1]["sound"]
    assert collection.current() == "v000001"


@pytest.mark.parametrize("metric", ["pairing", "model_metric_before"])
def test_rows_that_drift_are_never_held_for_good(refresh: Refresh, collection: Collection, metric: str) -> None:
    """Each day's are a little beyond what is usual. The third is served, and is what is usual from then on."""
    refresh(base(), lineage=rows())
    assert refresh(noisy(base(), 9), models=MODELS, lineage=rows()).status == "published"
    drifted = (
        {"lineage": rows(pairing=0.78)} if metric == "pairing" else {"lineage": rows(), "models": models(served=0.45)}
    )
    ends = [refresh(noisy(base(), seed), **{"models": MODELS} | drifted) for seed in range(5)]
    assert [end.status for end in ends] == ["held", "held", "published", "published", "published"]
    assert [one["sound"] for one in collection.versions()[2:4]] == [True, True]
    assert collection.manifest("v000005")["released"]["failed"] == [metric]


@pytest.mark.parametrize("fault", ["rows", "model", "collapsed", "not finite", "dim"])
def test_a_fault_is_never_released(refresh: Refresh, collection: Collection, fault: str) -> None:
    counts = np.full(N, 20)
    refresh(base(), counts=counts, lineage=rows())
    for seed in range(3):
        vectors, compared, lineage = noisy(elsewhere(), seed), MODELS, rows()
        if fault == "rows":
            lineage = rows(pairing=0.5)
        elif fault == "model":
            compared = models(candidate=0.6, high=-0.05)
        elif fault == "collapsed":
            vectors[:, 1:] *= 1e-3
        elif fault == "not finite":
            vectors[: N // 5] = np.nan
        else:
            vectors = vectors[:, :-1]
        end = refresh(vectors, Gate(max_held=1), counts=counts, models=compared, lineage=lineage)
        assert end.status == "held"
        manifest = collection.manifest(str(end.version))
        failed = {
            "rows": "pairing", "model": "model_gain[all]", "collapsed": "effective_rank", "not finite": "finite",
            "dim": "same_dim",
        }  # fmt: skip
        assert (manifest["sound"], manifest["released"]) == (False, None)
        assert failed[fault] in manifest["not_released"]
        assert end.diagnosis is not None
        assert end.diagnosis["cause"] == {"rows": "rows", "model": "model", "dim": "generation"}.get(fault, "run")
    # A row of faults does not count for an honest one that follows.
    assert refresh(noisy(elsewhere(), 9), Gate(max_held=2), counts=counts, models=MODELS).status == "held"
    assert collection.versions()[-1]["not_released"] == "1 of 2 sound refreshes in a row"


@pytest.mark.parametrize(("compared", "said"), [(SKIPPED, SKIPPED.skipped), (None, "compared with the served one")])
def test_without_a_comparison_of_models_a_row_does_not_end_and_it_says_why(
    refresh: Refresh, collection: Collection, compared: ModelComparison | None, said: str
) -> None:
    refresh(base(), lineage=rows())
    for seed in range(3):
        end = refresh(noisy(elsewhere(), seed), Gate(max_held=1), models=compared, lineage=rows())
        assert end.status == "held"
    reason = collection.versions()[-1]["not_released"]
    assert reason.startswith("its model was not compared with the served one")
    assert reason.endswith(said)


def test_what_is_held_besides_the_gate_is_not_released(refresh: Refresh, collection: Collection) -> None:
    refresh(base(), views=(View("v", sigma=0.5),))
    gate = Gate(max_held=1)
    end = refresh(noisy(elsewhere(), 1), gate, models=MODELS, views=(View("v", sigma=0.9),))
    assert (end.status, collection.current()) == ("held", "v000001")
    assert "view 'v' exists with other sigma" in end.reasons[0]
    # Nor is a run that was overtaken: it is aligned onto what nobody is served any more.
    assert refresh(noisy(base(), 2)).status == "published"
    end = refresh(noisy(elsewhere(), 3), gate, models=MODELS, parent_version="v000001")
    assert (end.status, collection.current(), end.released) == ("held", "v000003", None)


def test_a_view_that_the_releasing_run_brings_is_there_in_the_new_generation(
    refresh: Refresh, collection: Collection
) -> None:
    refresh(base())
    end = refresh(noisy(elsewhere(), 1), Gate(max_held=1), models=MODELS, views=(View("new", sigma=0.5),))
    assert (end.status, end.anchor_generation) == ("published", 2)
    assert {view["name"] for view in collection.views() if "map" not in view} == {"items_raw", "items_rff", "new"}


def test_a_held_version_that_is_damaged_holds_nothing_up(
    refresh: Refresh, collection: Collection, tmp_path: Path
) -> None:
    """Its manifest counts in the row; a run that started from it is aligned onto what is served."""
    refresh(base())
    refresh(noisy(elsewhere(), 1), models=MODELS)
    (file,) = tmp_path.glob("collections/items/versions/v000002/items.arrow")
    file.write_bytes(file.read_bytes()[:-100])
    end = refresh(noisy(elsewhere(), 2), Gate(max_held=2), models=MODELS, start_version="v000002")
    assert (end.status, end.anchor_generation) == ("published", 2)
    assert open_store(tmp_path).collection("items").manifest()["alignment"]["onto"] == "v000001"


def test_defaults_are_those_of_the_spec() -> None:
    assert GateSpec().max_held == MAX_HELD == Gate().max_held
    assert GateSpec().when_stuck == Gate().when_stuck == "new_generation"
