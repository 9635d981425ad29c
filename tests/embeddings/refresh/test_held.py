"""Refreshes held in a row: how many, why, which of them may be gone on from, and the rule that ends a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.refresh.diagnosis import diagnose
from embeddings.refresh.gate import Check, decide
from embeddings.refresh.gate_checks.registry import CHECKS, MOVING, subject_of
from embeddings.refresh.held_versions import held_in_a_row, sound_version
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import Gate, Promote, Settings, publish_candidate
from embeddings.refresh.settings import MAX_HELD
from embeddings.store import Collection, open_store
from embeddings.vectors.item_vectors import ItemVectors
from trainer.spec import Gate as GateSpec

N, D = 400, 8
Refresh = Callable[..., Publication]


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return open_store(tmp_path).collection("items")


@pytest.fixture
def refresh(tmp_path: Path, collection: Collection) -> Refresh:
    """``refresh(vectors, gate, ids=...)``: a refresh of what is served."""

    def publish(vectors: np.ndarray, gate: Gate | None = None, *, ids: Any = None, **options: Any) -> Publication:
        candidate = ItemVectors(np.arange(len(vectors)) if ids is None else ids, vectors.astype(np.float32))
        options.setdefault("parent_version", collection.current())
        settings = Settings(gate=gate or Gate())
        return publish_candidate(open_store(tmp_path), "items", candidate, settings, **options)

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


MOVED_RULE = Gate(
    promote=Promote(("cosine_mean", "cosine_p5", "cosine_low", "knn_overlap", "kernel_rms", "anchor_cosine"))
)
ITEMS = ("newly_carried", "unreplaced")


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


def test_limits_of_a_job_come_before_others(refresh: Refresh, collection: Collection) -> None:
    """They leave a first version alone, of which there is no distance."""
    loose = {
        "cosine_mean": 0.2, "cosine_p5": -1.0, "cosine_low": 0.9, "knn_overlap": 0.0, "kernel_rms": 2.0,
        "anchor_cosine": 0.2,
    }  # fmt: skip
    assert refresh(base(), Gate(limits={"newly_carried": 0.0, "coverage": 1.1})).status == "published"
    end = refresh(noisy(elsewhere(), 1), Gate(limits=loose))
    assert end.status == "published"
    assert {check["metric"]: check["threshold"] for check in end.gate}["cosine_mean"] == 0.2
    # Below what the starting values ask for, and above it; the rank keeps its floor.
    end = refresh(noisy(elsewhere(), 2), Gate(limits={"newly_carried": -1.0, "effective_rank": 0.0}))
    limits = {check["metric"]: check["threshold"] for check in end.gate}
    assert (end.status, limits["newly_carried"], limits["effective_rank"]) == ("held", -1.0, 3.0)


# --- why -------------------------------------------------------------------------------------------------------------

ROWS_MOVED = {"drift": [{"what": "new_ids", "message": "0.4 of the examples have a new 'item'"}]}


def test_where_rows_moved_too_the_data_are_the_cause(refresh: Refresh) -> None:
    refresh(base())
    end = refresh(noisy(elsewhere(), 1), lineage=ROWS_MOVED)
    assert end.diagnosis is not None
    assert end.diagnosis["cause"] == "data"
    assert end.diagnosis["summary"].startswith("The rows moved (0.4 of the examples have a new 'item')")
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


def test_norms_are_the_runs_doing_where_directions_held() -> None:
    norms = [Check("norm_shift", 3.0, 1.5, at_most=True), Check("norm_change_p95", 0.8, 0.4, at_most=True)]
    turned = Check("cosine_mean", 0.70, 0.85, at_most=False)
    collapsed = Check("effective_rank", 2.0, 4.0, at_most=False)

    def cause(*checks: Check, lineage: Any = None) -> str:
        found = diagnose(checks, lineage)
        assert found is not None
        assert len(found.failed) == len(checks)
        return found.cause

    assert cause(*norms) == "run"
    assert cause(*norms, turned) == "vectors"
    assert cause(*norms, turned, lineage=ROWS_MOVED) == "data"
    assert cause(*norms, turned, collapsed) == "run"


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
        "items", "vectors", "run",
    }  # fmt: skip
    assert {"finite", "coverage", "effective_rank", "missing", "norm_shift"}.isdisjoint(MOVING)
    assert subject_of("cosine_mean[10-99]") == "vectors"
    assert subject_of("same_model") == "run"


# --- what a refresh may go on from -----------------------------------------------------------------------------------


def test_rows_whose_vectors_moved_no_further_than_a_refresh_may_are_gone_on_from(
    refresh: Refresh, collection: Collection
) -> None:
    refresh(base())
    assert sound_version(collection) is None
    refresh(noisy(base(), 1)[: N * 2 // 5])
    found = sound_version(collection)
    assert found is not None
    assert found["version"] == "v000002"
    # One that is not sound, be it of other items or not, does not hide it.
    refresh(noisy(elsewhere(), 2))
    assert not collection.manifest("v000003")["sound"]
    again = sound_version(collection)
    assert again is not None
    assert again["version"] == "v000002"
    collection.promote("v000003", "the world moved", True)
    assert sound_version(collection) is None


def test_a_chain_is_sound_by_its_steps_though_it_is_far_from_what_is_served(
    refresh: Refresh, collection: Collection
) -> None:
    refresh(base())
    fewer = base()[: N * 2 // 5]
    turned, steps = fewer, []
    for seed in range(3):
        turned = noisy(turned, seed, 0.45)
        start = sound_version(collection)
        refresh(turned, start_version=None if start is None else start["version"])
        steps.append(collection.versions()[-1])
    assert [one["sound"] for one in steps] == [True] * 3
    assert [one["held_before"] and one["held_before"]["is_start"] for one in steps] == [None, True, True]
    failed = [one["metric"] for one in steps[-1]["gate"] if one["verdict"] == "fail"]
    assert any(subject_of(metric) == "vectors" for metric in failed), failed
    # A fault in a chain ends it, whatever was served before.
    broken = turned[np.random.default_rng(1).permutation(len(turned))]
    refresh(broken, start_version=steps[-1]["version"])
    assert not collection.versions()[-1]["sound"]


# --- the rule --------------------------------------------------------------------------------------------------------


def test_a_rule_lets_through_what_has_settled_after_so_many(refresh: Refresh, collection: Collection) -> None:
    refresh(base())
    ends = [refresh(noisy(elsewhere(), seed), MOVED_RULE) for seed in range(3)]
    assert [end.status for end in ends] == ["held", "held", "published"]
    refused = [collection.manifest(end.version)["rule_refused"] for end in ends if end.version]
    assert refused == ["1 of 3 in a row", "2 of 3 in a row", None]
    assert ends[-1].released is not None
    assert (ends[-1].released["in_a_row"], ends[-1].released["settled"]) == (3, True)
    assert collection.current() == "v000004"
    assert ends[-1].held_in_a_row == 0
    # What was let through says so, and what failed stays with it.
    assert any(check["verdict"] == "fail" for check in collection.manifest()["gate"])
    assert collection.manifest()["remarks"]


def test_what_goes_on_moving_is_not_let_through(refresh: Refresh, collection: Collection) -> None:
    refresh(base())
    for seed in range(4):
        rows = np.random.default_rng(100 + seed).standard_normal((N, D))
        assert refresh(rows, MOVED_RULE).status == "held"
    assert collection.versions()[-1]["rule_refused"].endswith("moved on")
    # Without `settled` it would have been.
    only = Gate(promote=Promote(MOVED_RULE.promote.only if MOVED_RULE.promote else (), settled=False))
    assert refresh(np.random.default_rng(200).standard_normal((N, D)), only).status == "published"


def test_what_failed_besides_is_not_let_through(refresh: Refresh, collection: Collection) -> None:
    refresh(base())
    for seed in range(4):
        end = refresh(noisy(elsewhere(), seed), Gate(max_held=2, promote=Promote(ITEMS)))
        assert end.status == "held"
    assert "cosine_mean" in collection.versions()[-1]["rule_refused"]


@pytest.mark.parametrize("fault", ["collapsed", "not finite", "dim"])
def test_no_rule_lets_a_fault_through(refresh: Refresh, fault: str) -> None:
    """Not even one that names its checks, as nobody can write in a spec."""
    refresh(base())
    every = (*(limit.metric for check in CHECKS for limit in check.limits), "same_dim")
    for seed in range(3):
        rows = noisy(elsewhere(), seed)
        if fault == "collapsed":
            rows[:, 1:] *= 1e-3
        elif fault == "not finite":
            rows[: N // 5] = np.nan
        else:
            rows = rows[:, :-1]
        assert refresh(rows, Gate(max_held=1, promote=Promote(every, settled=False))).status == "held"


def test_a_held_version_that_is_damaged_holds_nothing_up(
    refresh: Refresh, collection: Collection, tmp_path: Path
) -> None:
    """There is nothing to have settled against, so the rule waits; a refresh that passes is published."""
    refresh(base())
    refresh(noisy(elsewhere(), 1), MOVED_RULE)
    (file,) = tmp_path.glob("collections/items/versions/v000002/items.arrow")
    file.write_bytes(file.read_bytes()[:-100])
    damaged = open_store(tmp_path).collection("items")
    rule = Gate(max_held=2, promote=MOVED_RULE.promote)
    assert refresh(noisy(elsewhere(), 2), rule).status == "held"
    assert damaged.versions()[-1]["held_before"] is None
    assert damaged.versions()[-1]["rule_refused"] == "there is none before it to compare with"
    assert refresh(noisy(base(), 3), rule).status == "published"


def test_an_overtaken_run_is_not_let_through(refresh: Refresh) -> None:
    refresh(base())
    refresh(noisy(base(), 1))
    always = Gate(max_held=1, promote=Promote(MOVING, settled=False))
    assert refresh(noisy(elsewhere(), 2), always, parent_version="v000001").status == "held"


def test_without_a_rule_nothing_is_let_through_and_defaults_are_those_of_the_spec(refresh: Refresh) -> None:
    refresh(base())
    assert [refresh(noisy(elsewhere(), seed)).held_in_a_row for seed in range(4)] == [1, 2, 3, 4]
    assert GateSpec().max_held == MAX_HELD == Gate().max_held
    assert decide({"cosine_mean": 0.1}).failed == ["cosine_mean"]
