"""Runs whose data and checkpoints lie in a run storage: hosts come and go, and the bits are the same."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest
import torch

from embeddings.object_storage import ObjectStorage
from embeddings.store import open_store
from tests.contracts import store_servers
from tests.support import forked
from tests.support.trained_runs import lead
from tests.trainer.launch.detached_runs import everything
from trainer.checkpoint.select import newest_of, pick
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.remote_data import fetch_prepared
from trainer.generalization.command import main as generalization
from trainer.inference.export import export
from trainer.inference.exported_model import Exported
from trainer.inference.predict import predict
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.storage.folders import Folders
from trainer.storage.storage_registry import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.process]

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with store_servers.s3_server("runs") as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        yield "s3://runs/of-tests"


def files_of(run) -> set[str]:
    """What of the run's data this host has."""
    return {path.relative_to(run.data).as_posix() for path in run.data.rglob("*") if path.is_file()}


def test_a_run_whose_host_is_lost_goes_on_on_another_with_the_same_bits(
    make_run, small, tmp_path, monkeypatch, bucket
) -> None:
    """The second host has neither the first one's directory nor the rows; a third warm-starts from the result."""
    uri = small.write_rows(tmp_path / "rows.parquet")
    settings = {"uri": uri, "checkpoint": {"every_steps": 7}, "publish": PUBLISH}
    storage = f"{bucket}/run"

    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "first-cache"))
    first = make_run("first", storage=storage, epochs=1000, **settings)
    process = forked.start(lead, first.directory, log=first.directory / "log.txt")
    folders = Folders(open_storage(storage), "checkpoints")
    deadline = time.monotonic() + 300
    while len(folders.names()) < 2:
        assert process.exitcode is None, (first.directory / "log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    shutil.rmtree(first.directory)
    shutil.rmtree(tmp_path / "first-cache")
    os.rename(uri, tmp_path / "moved.parquet")

    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "second-cache"))
    kept = newest_of(second := make_run("second", storage=storage, attempt=2, **settings), second.checkpoints)
    assert kept is not None
    epochs = kept.extra["position"]["step"] // 25 + 2
    second = make_run("second", storage=storage, attempt=2, epochs=epochs, **settings)
    assert execute(second, start_ranks) == 0, small.events(second.directory, "error")
    openings = [event for event in small.events(second.directory, "info") if "alpha" in event]
    assert [event["resumed_from_step"] for event in openings] == [kept.extra["position"]["step"]]
    assert [event["status"] for event in small.events(second.directory, "publication")] == ["published"]

    os.rename(tmp_path / "moved.parquet", uri)
    exported = export(second.directory)
    assert exported["directory"] == f"{storage}/exports/{pick(second)[0].path.name}"
    examples = pq.read_table(uri).slice(0, 20)
    assert (
        Exported(exported["directory"])
        .predict(examples)
        .equals(Exported(export(second.directory, tmp_path / "exported")["directory"]).predict(examples))
    )
    with pytest.raises(FileExistsError, match="is there already"):
        export(second.directory)
    pq.write_table(examples, tmp_path / "examples.parquet")
    predict(second.directory, tmp_path / "examples.parquet", f"{storage}/predictions/examples.parquet")
    report = [str(second.directory), "--report", "--out", str(tmp_path / "report")]
    assert generalization(report) == 0
    left = {one.name for one in open_storage(storage).list("")}
    assert {"predictions/examples.parquet", "reports/generalization/report.html"} <= left

    whole = make_run("whole", epochs=epochs, **settings | {"publish": None})
    assert execute(whole, start_ranks) == 0
    ended, expected = everything(pick(second)[0]), everything(pick(whole)[0])
    assert [name for name in expected if not torch.equal(ended[name], expected[name])] == []
    assert files_of(second) == files_of(whole)
    version = open_store(second.store_url).collection("items").current()
    assert version is not None

    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "third-cache"))
    third = make_run(
        "third", storage=f"{bucket}/third", init_checkpoint=f"{storage}/checkpoints", parent_version=version,
        **settings, epochs=1, init_from={"collection": "items"},
    )  # fmt: skip
    assert execute(third, start_ranks) == 0, small.events(third.directory, "error")
    assert any("warm start from" in event["message"] for event in small.events(third.directory, "info"))


def test_a_storage_that_is_away_is_said_and_is_worth_another_try(make_run, small, monkeypatch, tmp_path) -> None:
    for name, value in (store_servers.CREDENTIALS | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(ObjectStorage.__init__.__kwdefaults__, "retries", 0)
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "cache"))
    run = make_run(storage="s3://runs/away")
    assert execute(run, start_ranks) == 75
    (error,) = small.events(run.directory, "error")
    assert error["code"] == "storage"
    assert "see that the object store is up" in error["message"]


def test_data_that_were_prepared_anew_replace_the_run_s(make_run, small, monkeypatch, tmp_path) -> None:
    """No checkpoint is of the old ones, and ranks of other hosts take the one folder that is there."""
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "cache"))
    storage = (tmp_path / "there").as_uri()
    uri = small.write_rows(tmp_path / "rows.parquet")
    settings = {"storage": storage, "uri": uri, "epochs": 1}
    run = make_run("one", **settings)

    def stop_before_the_first_step(_) -> None:
        raise RuntimeError("lost")

    assert execute(run, stop_before_the_first_step) != 0
    data = Folders(open_storage(storage), "data")
    (old,) = data.names()
    small.write_rows(uri, seed=1)
    run = make_run("two", attempt=2, **settings)
    assert execute(run, start_ranks) == 0, small.events(run.directory, "error")
    (new,) = data.names()
    assert new != old
    other = make_run("other", **settings)
    fetch_prepared(other.folders(other.data), other.data)
    assert PreparedData.fingerprint_of(other.data) == new
    assert files_of(other) == files_of(run)
