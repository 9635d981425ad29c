"""``evenkeel calibrate`` and ``evenkeel canaries`` against a real service, store and stage; jobs are carried out by the
test, which publishes vectors of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.refresh.publish import publish_candidate
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors
from service.client import Client
from tests.service import serving
from tests.service.serving import Run, Served
from trainer.spec import parse_job

N, D = 300, 8


def carry_out(served: Served, job: dict[str, Any], noise: float = 0.05) -> str | None:
    """What the runner and a run would do: publish vectors, which differ by the seed alone, and end the job."""
    spec = parse_job(job["spec"])
    assert spec.publish is not None
    if spec.labels.get("behave") == "fail" and spec.seed != 1:
        served.set_job(job["id"], state="failed", error={"code": "x", "message": "row 7 is bad", "remedy": ""})
        return None
    centres = np.repeat(2 * np.eye(3, D), N // 3, axis=0)
    base = centres + np.random.default_rng(0).standard_normal((N, D))
    moved = base + noise * np.random.default_rng(spec.seed).standard_normal((N, D))
    store = open_store(served.settings.store_url)
    end = publish_candidate(
        store, spec.publish.collection, ItemVectors(np.arange(N), moved.astype(np.float32)), spec.publish,
        job_id=job["id"], parent_version=store.collection(spec.publish.collection).current(), model=spec.model.kind,
    )  # fmt: skip
    publication = {"status": end.status, "version": end.version, "reasons": end.reasons}
    served.set_job(job["id"], state="succeeded", publication=publication)
    return end.version


@pytest.fixture
def worker(served: Served) -> Iterator[None]:
    """Carries queued jobs out while the test goes on."""
    ended = threading.Event()

    def work() -> None:
        with Client(served.url, served.key) as client:
            while not ended.wait(0.2):
                for job in client.jobs(state="queued"):
                    carry_out(served, job)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    ended.set()
    thread.join()


def refreshed(served: Served, collection: str, **fields: Any) -> dict[str, Any]:
    """A collection with one version, of a job that refreshes it."""
    publish = {"collection": collection, "feature": "item"}
    model = {"kind": "two_tower", "embedding_dim": D}
    with Client(served.url, served.key) as client:
        body = {**serving.job(f"{collection}-job", seed=1, publish=publish, model=model), **fields}
        job = client.job(client.submit(body)["id"])
    carry_out(served, job)
    return job


def labels_file(served: Served) -> Path:
    path = served.data / "labels.parquet"
    pq.write_table(pa.table({"id": np.arange(N), "label": np.repeat(["a", "b", "c"], N // 3)}), path)
    return path


def test_calibrate_runs_nulls_and_sets_the_limits(run: Run, served: Served, worker: None) -> None:
    refreshed(served, "films")
    assert run("canaries", "add", "films", "kind", str(labels_file(served))).code == 0
    before = run("versions", "films").out
    done = run("calibrate", "films", "--runs", "3", "--limit", "newly_carried=0.3")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0].split("\t") == ["METRIC", "NULL MEAN", "SPREAD", "WORST", "LIMIT"]
    with Client(served.url, served.key) as client:
        (found,) = client.calibration("films")
    rows = {line.split("\t")[0]: line.split("\t")[4] for line in done.out.splitlines()[1:]}
    assert rows["cosine_mean"] == f"{found['limits']['cosine_mean']:.6g}"
    assert (found["num_nulls"], found["model"], found["limits"]["newly_carried"]) == (3, "two_tower", 0.3)
    assert {"cosine_mean", "canary_drop[kind]", "canary_churn[kind]"} <= found["limits"].keys()
    assert "trains from scratch" in done.err
    # Four jobs, the first of which is what the others are measured against; what is served did not change.
    assert [source.split("/")[1] for source in found["source"]] == ["v000002", "v000003", "v000004"]
    assert run("versions", "films").out == before
    # Nobody is called for the age of the nulls.
    (scratch,) = {source.split("/")[0] for source in found["source"]}
    shown = httpx.get(f"{served.url}/metrics").raise_for_status().text
    assert 'evenkeel_collection_age_seconds{collection="films"}' in shown
    assert scratch not in shown


def test_a_collection_of_the_longest_name_is_calibrated(run: Run, served: Served, worker: None) -> None:
    name = "f" * 63
    refreshed(served, name, name="films-job")
    done = run("calibrate", name, "--runs", "3")
    assert done.code == 0, done.err


def test_a_null_that_fails_ends_the_calibration(run: Run, served: Served, worker: None) -> None:
    refreshed(served, "books", labels={"behave": "fail"})
    done = run("calibrate", "books", "--runs", "3")
    assert done.code == 1
    assert "null refresh 0" in done.err
    assert "row 7 is bad" in done.err
    with Client(served.url, served.key) as client:
        assert client.calibration("books") == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nothing",), 1, "no collection 'nothing'"),
        (("films", "--runs", "2"), 2, "--runs"),
        (("films", "--limit", "cosine_mean"), 2, "not METRIC=VALUE"),
    ],
)
def test_calibrations_that_do_not_begin(
    run: Run, served: Served, arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = run("calibrate", *arguments)
    assert done.code == code
    assert says in done.err


def test_the_job_must_be_one_that_refreshes_the_collection(run: Run, served: Served, tmp_path: Path) -> None:
    import yaml

    job = refreshed(served, "songs")
    file = tmp_path / "other.yaml"
    file.write_text(yaml.safe_dump({**job["spec"], "publish": {"collection": "others", "feature": "item"}}))
    done = run("calibrate", "songs", "--spec", str(file))
    assert done.code == 1
    assert "publishes to 'others', not to 'songs'" in done.err


def test_canaries_on_the_command_line(run: Run, served: Served) -> None:
    refreshed(served, "plays")
    done = run("canaries", "add", "plays", "kind", str(labels_file(served)))
    assert done.code == 0, done.err
    assert done.out.startswith("canary kind: 300 items, 3 classes, accuracy 0.")
    (line,) = run("canaries", "list", "plays").out.splitlines()[1:]
    assert line.split("\t")[:5] == ["kind", "v000001", "1", "300", "3"]
    assert run("canaries", "delete", "plays", "kind").code == 0
    assert run("canaries", "list", "plays", "--json").out.strip() == "[]"
    assert run("canaries", "delete", "plays", "kind").code == 1
