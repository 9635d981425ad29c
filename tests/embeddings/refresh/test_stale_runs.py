"""A run that was overtaken, rolled back, given up or repeated switches nothing."""

from __future__ import annotations

import numpy as np
import pytest

from embeddings.refresh.procrustes import procrustes
from embeddings.refresh.publish import Gate, Settings
from embeddings.store import Collection, Store, StoreUnavailable, VersionReader, open_store
from embeddings.vectors.item_vectors import unit_rows
from tests.embeddings.refresh.refreshes import cosines, publish, retrained, served, shuffled_ids

pytestmark = pytest.mark.slow


def test_an_overtaken_run_is_held(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))
    publish(store, retrained(1))
    end = publish(store, retrained(2), parent="v000001")
    assert end.status == "held"
    assert "version v000002 of 'items' is current, not v000001" in end.reasons[0]
    assert collection.current() == "v000002"
    again = publish(store, retrained(2), parent="v000001", job_id="late")
    assert again == publish(store, retrained(2), parent="v000001", job_id="late")
    assert again.diagnosis is not None
    assert again.diagnosis["cause"] == "stale"
    assert publish(store, retrained(2), parent=None).status == "held"
    assert publish(store, retrained(3), parent="v000099").reasons[0].startswith("parent version v000099 cannot be read")


def test_a_parent_in_a_store_that_is_away_makes_no_run_stale(
    store: Store, collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, retrained(0))

    def away(self: Collection, version: str = "current") -> VersionReader:
        raise StoreUnavailable("redis://store: Redis cannot be reached")

    monkeypatch.setattr(Collection, "open", away)
    with pytest.raises(StoreUnavailable):
        publish(store, retrained(1), job_id="late", parent="v000001")
    monkeypatch.undo()
    assert publish(store, retrained(1), job_id="late", parent="v000001").status == "published"


def test_a_rollback_between_start_and_publication_makes_a_run_stale(store: Store, collection: Collection) -> None:
    """The run was aligned onto v000002, which is not served any more when it ends."""
    publish(store, retrained(0))
    publish(store, retrained(1))
    started_from = collection.current()
    collection.promote("v000001", "v000002 was a mistake")
    end = publish(store, retrained(2), parent=started_from)
    assert end.status == "held"
    assert "version v000001 of 'items' is current, not v000002" in end.reasons[0]
    assert collection.current() == "v000001"
    # One that starts after the rollback rests on what was rolled back to.
    after = publish(store, retrained(3))
    assert after.status == "published"
    manifest = collection.manifest()
    assert (manifest["parent"], manifest["alignment"]["onto"]) == ("v000001", "v000001")


def test_a_rollback_that_was_taken_back_does_not_matter(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))
    publish(store, retrained(1))
    collection.promote("v000001", "v000002 was a mistake")
    collection.promote("v000002", "it was not")
    assert publish(store, retrained(2), parent="v000002").status == "published"
    assert collection.manifest()["parent"] == "v000002"


def test_after_a_rollback_without_average_the_anchor_stays(store: Store, collection: Collection) -> None:
    settings = Settings(ema=None)
    for day in range(3):
        publish(store, retrained(day), settings)
    anchor = collection.open("v000001").vectors.copy()
    collection.promote("v000002", "back")
    raw = retrained(3)
    end = publish(store, raw, settings)
    assert (end.status, collection.manifest()["parent"]) == ("published", "v000002")
    assert collection.manifest()["alignment"]["onto"] == "v000001"
    np.testing.assert_allclose(served(collection), unit_rows(raw)[0] @ procrustes(raw, anchor), atol=1e-6)
    assert end.anchor_cosine == pytest.approx(cosines(served(collection), anchor).mean())


def test_a_version_that_was_held_is_held_also_when_it_has_expired(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))
    held = publish(store, shuffled_ids(retrained(1)), job_id="bad", parent="v000001")
    for day in range(1, 4):
        publish(store, retrained(day), keep_last=2)
    assert held.version is not None
    assert collection.manifest(held.version)["state"] == "expired"
    assert publish(store, shuffled_ids(retrained(1)), job_id="bad", parent="v000001").status == "held"


def test_an_expired_version_that_is_damaged_is_in_nobodys_way(store: Store, collection: Collection) -> None:
    for day in range(4):
        publish(store, retrained(day), keep_last=1)
    manifest = collection.directory / "versions/v000002/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    collection = open_store(store.url).collection("items")
    assert [one["version"] for one in collection.versions()] == ["v000001", "v000003", "v000004"]
    assert publish(open_store(store.url), retrained(4)).status == "published"
    assert collection.erase([1], "they asked")["rows"] > 0


def test_a_run_that_is_given_up_while_it_publishes_does_not_switch(store: Store, collection: Collection) -> None:
    publish(store, retrained(0))

    class GivenUp(Exception):
        pass

    def fence() -> None:
        assert collection.manifest("v000002")["state"] == "candidate"
        raise GivenUp

    with pytest.raises(GivenUp):
        publish(store, retrained(1), job_id="a", fence=fence)
    assert collection.current() == "v000001"
    # The attempt that goes on brings it to its end.
    end = publish(store, retrained(1), job_id="a", fence=lambda: None)
    assert (end.status, end.version) == ("published", "v000002")


def test_a_job_publishes_once(store: Store, collection: Collection) -> None:
    first = publish(store, retrained(0), job_id="a", parent=None)
    assert publish(store, retrained(0), job_id="a", parent=None) == first
    second = publish(store, retrained(1), job_id="b", parent="v000001")
    assert publish(store, retrained(1), job_id="b", parent="v000001").version == second.version == "v000002"
    held = publish(store, shuffled_ids(retrained(1)), job_id="c")
    assert publish(store, shuffled_ids(retrained(1)), job_id="c") == held
    # What was held is no end for a job that has been told since not to mind the gate.
    told = publish(store, shuffled_ids(retrained(1)), Settings(gate=Gate("report")), job_id="c")
    assert (told.version, told.status) == ("v000004", "published")
    # Another parent is another publication.
    assert publish(store, retrained(2), job_id="a").version == "v000005"


def test_old_versions_expire(store: Store, collection: Collection) -> None:
    for day in range(5):
        publish(store, retrained(day), keep_last=2)
    assert [m["state"] for m in collection.versions()] == [
        "superseded", "expired", "expired", "superseded", "published",
    ]  # fmt: skip
