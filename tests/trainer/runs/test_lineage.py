"""What a run says of itself: in an event, and in the manifest of the version that it publishes."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from embeddings.store import open_store
from trainer.data.batches.prepared import PreparedData
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.lineage import git_commit, lineage_of, spec_sha256


def test_event_and_manifest_tell_the_same(make_run, small, tmp_path):
    publish = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}
    few = small.write_rows(tmp_path / "few.parquet", num_rows=300)
    run = make_run(uri=few, epochs=1, publish=publish)
    assert execute(run, start_ranks) == 0
    (told,) = small.events(run.directory, "lineage")
    assert told["dataset_fingerprint"] == PreparedData.open(run.data).dataset_fingerprint
    assert told["spec_sha256"] == spec_sha256(run.job)
    assert told["packages"]["torch"] == version("torch")
    assert (told["parent_version"], told["warm_start"]) == (None, None)
    assert told["row_figures"] == PreparedData.open(run.data).row_figures
    assert told["row_figures"]["rows"] == 300
    manifest = open_store(run.store_url).collection("items").manifest()
    assert manifest["lineage"] == {name: told[name] for name in manifest["lineage"]}
    assert set(manifest["lineage"]) == set(told) - {"type", "time", "attempt"}

    start = {"parent_version": "v000001", "init_checkpoint": str(run.checkpoints)}
    features = {"item": {"type": "id"}, "user": {"type": "id"}, "again": {"type": "id", "column": "user"}}
    refresh = make_run("refresh", uri=few, epochs=1, publish=publish, features=features, **start)
    assert execute(refresh, start_ranks) == 0
    later = lineage_of(refresh)
    assert (told["drift"], later["drift"]) == (None, [])
    assert any(
        "rows are like those of the parent run" in one["message"] for one in small.events(refresh.directory, "info")
    )
    assert (later["parent_version"], later["warm_start"]) == ("v000001", str(run.checkpoints))
    (note,) = later["inherited"]
    assert told["inherited"] == []
    assert note.startswith("init_from: 'again' added")
    assert later["dataset_fingerprint"] != told["dataset_fingerprint"]
    assert spec_sha256(run.job) != spec_sha256(small.job(epochs=2))


@pytest.mark.process
def test_the_commit_is_the_one_that_git_tells(tmp_path: Path):
    assert git_commit(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "main")
    assert git_commit(tmp_path) is None
    git("commit", "-q", "--allow-empty", "-m", "first")
    first = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == first
    git("pack-refs", "--all")
    assert git_commit(tmp_path) == first
    git("checkout", "-q", "--detach")
    assert git_commit(tmp_path) == first
