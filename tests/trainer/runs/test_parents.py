"""Which run `evenkeel train` starts from where a job names a collection or a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.store import StoreUnavailable, open_store
from embeddings.vectors.item_vectors import ItemVectors
from trainer.runs.parents import Start, served_checkpoints, start_of
from trainer.spec import InitFrom

RUN_ID = "daily-3-0a1b2c3d"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def version(store: str, job: str | None, parent: str | None = None, **extra: Any) -> str:
    collection = open_store(store).collection("items")
    return collection.write(ItemVectors(np.arange(4), np.eye(4, dtype=np.float32)), job=job, parent=parent, extra=extra)


def ran(folder: Path, run_id: str) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": run_id}))
    return folder / "checkpoints"


@pytest.mark.parametrize("folder", ["daily-3", RUN_ID, "elsewhere"])
def test_the_run_of_what_is_served_is_found_by_its_id(store: str, runs: Path, folder: str) -> None:
    open_store(store).collection("items").publish(version(store, RUN_ID), None)
    ran(runs / "daily-2", "daily-2-ffffffff")
    (runs / "torn").mkdir()
    (runs / "torn" / "run.json").write_text("{")
    start = Start(ran(runs / folder, RUN_ID).resolve())
    assert start_of(InitFrom(collection="items"), None, store, runs) == start
    assert start_of(InitFrom(collection="items", version="v000001"), "items", store, runs) == start
    assert start_of(InitFrom(job=RUN_ID), "items", store, runs) == start


def test_a_folder_of_its_name_that_is_another_run_is_passed_over(store: str, runs: Path) -> None:
    open_store(store).collection("items").publish(version(store, RUN_ID), None)
    ran(runs / "daily-3", "daily-3-ffffffff")
    with pytest.raises(ValueError, match=rf"version v000001 of 'items' needs run {RUN_ID}.*give --init RUN_DIR"):
        start_of(InitFrom(collection="items"), None, store, runs)
    with pytest.raises(ValueError, match=r"init_from.job 'other' needs run other"):
        start_of(InitFrom(job="other"), None, store, runs)


def test_sound_held_rows_are_gone_on_from_by_a_job_of_that_collection(store: str, runs: Path) -> None:
    collection = open_store(store).collection("items")
    collection.publish(version(store, "first-1-00000000"), None)
    held = version(store, "second-1-00000000", "v000001", sound=True)
    collection.hold(held, ["it moved"])
    first, second = (ran(runs / f"{name}-1", f"{name}-1-00000000") for name in ("first", "second"))
    assert start_of(InitFrom(collection="items"), None, store, runs) == Start(first.resolve())
    for settings, published in (({}, "items"), ({"held": "go_on"}, None), ({"version": "current"}, "items")):
        going_on = InitFrom(collection="items", **settings)
        assert start_of(going_on, published, store, runs) == Start(second.resolve(), held)
    for settings, published in (({}, "films"), ({"held": "skip"}, "items"), ({"version": "v000001"}, "items")):
        from_served = InitFrom(collection="items", **settings)
        assert start_of(from_served, published, store, runs) == Start(first.resolve())


@pytest.mark.parametrize("there", [False, True])
def test_without_a_publication_the_remedies_are_named(store: str, runs: Path, there: bool) -> None:
    if there:
        version(store, RUN_ID)  # a candidate
    for held in ("skip", "go_on"):
        with pytest.raises(ValueError, match="leave init_from out for the first training, or give --init"):
            start_of(InitFrom(collection="items", held=held), "items", store, runs)


def test_of_a_store_that_is_away_training_from_nothing_is_no_remedy(runs: Path) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        start_of(InitFrom(collection="items"), "items", "redis://127.0.0.1:1/0", runs)
    assert "leave init_from out" not in str(caught.value)


def test_the_checkpoints_behind_what_is_served(store: str, runs: Path, tmp_path: Path) -> None:
    """The checkpoints are those of the version's run; there are none if that run trained on after it."""
    elsewhere = ran(tmp_path / "elsewhere", RUN_ID)
    name = version(store, RUN_ID)

    def served(version: str, start: Path | None = None) -> str | None:
        return served_checkpoints(store, "items", version, runs, None if start is None else str(start))

    assert served(name) is None
    assert served(name, ran(tmp_path / "other", "other-1")) is None
    assert served(name, elsewhere) == str(elsewhere)
    here = ran(runs / "daily-3", RUN_ID)
    assert served(name) == str(here.resolve())
    assert served(version(store, RUN_ID, name, training_step=40)) is None
    assert served("v000009") is None
