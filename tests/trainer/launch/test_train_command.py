"""``evenkeel train``: a run in this terminal, from a file of two documents, and the same directory again."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from embeddings.store import open_store
from tests.support import sinks
from trainer.checkpoint.format import Checkpoint, latest_valid
from trainer.launch import driver
from trainer.launch.driver import execute
from trainer.launch.in_process import main as train_command
from trainer.launch.in_process import read_spec
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run

pytestmark = pytest.mark.slow

ADAM_AR = {"kind": "adam_ar", "learning_rate": 0.1, "alpha": 0.003}
PUBLISH = {"collection": "items", "feature": "item"}


SPEC = """
name: clicks
uri: {uri}
features: {{user: {{type: id}}, item: {{type: id}}}}
label: {{column: click}}
---
name: small
dataset: {{name: clicks}}
model: {{kind: two_tower, embedding_dim: 4, hidden: [8]}}
optimizer: {{kind: adam_ar, learning_rate: 0.1}}
batch_size: 96
publish: {{collection: items, feature: item, gate: {{mode: "off"}}}}
"""


def test_the_train_command_trains_publishes_and_goes_on_from_a_run(tmp_path, rows, monkeypatch, capsys):
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVENKEEL_STORE_URL", raising=False)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows))
    assert train_command([str(spec)]) == 0
    printed = capsys.readouterr().out
    directory = tmp_path / "home" / "runs" / "small-1"
    assert str(directory) in printed
    assert "epoch 1 test" in printed
    assert "published: v000001 of 'items' is served now" in printed
    assert (
        train_command([str(spec), "--init", str(directory), "--set", "epochs=2", "--set", "optimizer.alpha=default"])
        == 0
    )
    collection = open_store(tmp_path / "home" / "store").collection("items")
    assert collection.current() == "v000002"
    assert Checkpoint(latest_valid(tmp_path / "home/runs/small-2/checkpoints").path).extra["position"]["evaluated"] == 2


def test_the_train_command_finds_the_run_behind_what_is_served(tmp_path, rows, monkeypatch, capsys):
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVENKEEL_STORE_URL", raising=False)
    spec, runs = tmp_path / "spec.yaml", tmp_path / "home" / "runs"
    spec.write_text(SPEC.format(uri=rows))
    refresh = [str(spec), "--set", "optimizer.alpha=default", "--set", "init_from={collection: items}"]
    assert train_command(refresh) == 1
    assert "leave init_from out for the first training" in capsys.readouterr().err
    assert train_command([str(spec), "--run-dir", str(runs / "of-its-own-name")]) == 0
    assert train_command(refresh) == 0
    assert f"init_from: {runs / 'of-its-own-name' / 'checkpoints'}" in capsys.readouterr().out
    (second,) = (one for one in runs.iterdir() if (one / "run.json").exists() and one.name != "of-its-own-name")
    assert read_run(second).init_checkpoint == str(runs / "of-its-own-name" / "checkpoints")
    assert open_store(tmp_path / "home" / "store").collection("items").current() == "v000002"


def test_a_run_that_an_earlier_version_began_goes_on_with_its_decay(tmp_path, rows, monkeypatch, capsys):
    """The spec leaves the decay out, whose default was at_read: the run ends with the bits that it would have had."""
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVENKEEL_STORE_URL", raising=False)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows).split("publish:")[0])

    def train(name, epochs, *changes):
        changes = [part for change in (f"epochs={epochs}", *changes) for part in ("--set", change)]
        assert train_command([str(spec), "--run-dir", str(tmp_path / name), *changes]) == 0
        return read_run(tmp_path / name), latest_valid(tmp_path / name / "checkpoints")

    at_read = "optimizer.decay=at_read"
    _, whole = train("whole", 2, at_read)
    train("begun", 1, at_read)
    capsys.readouterr()
    run, resumed = train("begun", 2)
    assert "optimizer.decay: at_read, with which the run began" in capsys.readouterr().out
    assert run.job.optimizer.decay == "at_read"
    assert resumed.step == whole.step
    rows, state = resumed.read_rows("item")
    expected, expected_state = whole.read_rows("item")
    assert torch.equal(rows, expected)
    assert all(torch.equal(state[name], expected_state[name]) for name in expected_state)
    _, default = train("default", 2)
    assert not torch.equal(default.read_rows("item")[0], expected)


def test_rows_that_are_refused_are_told_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    rows, spec = tmp_path / "rows.csv", tmp_path / "spec.yaml"
    rows.write_text("user,item,click\n1,2,1\n3,4,maybe\n")
    spec.write_text(SPEC.format(uri=rows))
    assert train_command([str(spec)]) == 1
    told = capfd.readouterr()
    assert "Traceback" not in told.err
    (line,) = (one for one in told.out.splitlines() if one.startswith("error"))
    assert line.startswith(f"error (bad_data): {rows}, column 'click', row 1: the label is 'maybe', and labels")
    assert line.count("write it as 0 and 1") == 1


def test_a_run_directory_made_anew_is_another_job_to_the_store(tmp_path, rows, monkeypatch, capsys):
    """Held, looked at, removed, tried again: the store must not take the second run for a retry of the first."""
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVENKEEL_STORE_URL", raising=False)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows).replace('gate: {mode: "off"}', "gate: {mode: enforce}"))
    command = [str(spec), "--run-dir", str(tmp_path / "run")]
    collapsed = ["--set", "optimizer.learning_rate=0.0001", "--set", "model.init.kind=zero"]
    assert train_command([*command, *collapsed]) == 3
    assert re.search(r"^held: v000001 of 'items' is not served: .*effective_rank", capsys.readouterr().out, re.M)
    collection = open_store(tmp_path / "home" / "store").collection("items")
    assert [manifest["state"] for manifest in collection.versions()] == ["held"]
    shutil.rmtree(tmp_path / "run")
    assert train_command([*command, "--set", "publish.gate.mode=off"]) == 0
    assert collection.current() == "v000002"
    # The same directory, still there: the same job, which has its version already.
    assert train_command([*command, "--set", "publish.gate.mode=off"]) == 0
    assert len(collection.versions()) == 2


def test_sinks_have_the_version_when_the_command_ends(tmp_path, rows, monkeypatch, capsys):
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EVENKEEL_STORE_URL", raising=False)
    monkeypatch.delenv("EVENKEEL_SINKS", raising=False)
    spec, file = tmp_path / "spec.yaml", tmp_path / "sinks.yaml"
    spec.write_text(SPEC.format(uri=rows))
    to_lake = [str(spec), "--set", "publish.sinks=[lake]"]
    assert train_command(to_lake) == 1
    assert "publish.sinks names lake: there is no such sink" in capsys.readouterr().err
    with sinks.readable("lancedb", tmp_path) as lake:
        file.write_text(f"lake: {{url: '{lake.url}'}}\naway: {{url: 'postgresql://127.0.0.1:1/none'}}\n")
        monkeypatch.setenv("EVENKEEL_SINKS", str(file))
        assert train_command([*to_lake, "--set", "publish.sink_wait_seconds=60"]) == 0
        collection = open_store(tmp_path / "home" / "store").collection("items")
        assert set(lake.rows("items")) == set(collection.open().ids.to_pylist())
        assert {row[3] for row in lake.rows("items").values()} == {"v000001"}
    capsys.readouterr()
    away = [str(spec), "--set", "publish.sinks=[away]"]
    assert train_command([*away, "--set", "publish.sink_wait_seconds=0.1"]) == 1
    told = capsys.readouterr().out
    assert "error (sink_behind): version v000002 of 'items' is served, but not in its sinks after 0.1 s" in told
    # Without a wait the sink holds nothing up.
    assert train_command(away) == 0
    assert collection.current() == "v000003"
    assert "sink 'away' lacks the version: ConnectionRefusedError" in capsys.readouterr().err


def test_a_run_directory_that_is_busy_is_left_as_it_is(tmp_path, rows, make_run, capsys):
    """The command given twice: the first must still be the one that may publish."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows))
    run = make_run()
    with driver._lock(run.directory):
        assert train_command([str(spec), "--run-dir", str(run.directory)]) == 1
        assert run.still_current()
    assert "another process" in capsys.readouterr().err


def test_the_same_directory_again_goes_on_from_the_parent_it_began_with(tmp_path, rows, monkeypatch, small):
    """Killed before its first checkpoint, and started again without --init."""
    monkeypatch.setenv("EVENKEEL_HOME", str(tmp_path / "home"))
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows))
    parent, child = tmp_path / "parent", tmp_path / "child"
    assert train_command([str(spec), "--run-dir", str(parent)]) == 0
    command = [str(spec), "--run-dir", str(child)]
    assert train_command([*command, "--init", str(parent), "--set", "resources.timeout_seconds=0.0001"]) == 1
    shutil.rmtree(child / "checkpoints")
    assert train_command([str(spec), "--run-dir", str(tmp_path / "other")]) == 0  # what is served is another's by now
    assert train_command(command) == 3
    opening = [event for event in small.events(child, "info") if "alpha" in event][-1]
    assert f"warm start from {parent}" in opening["message"]
    assert small.events(child, "publication")[-1]["status"] == "held"


def test_a_warm_start_on_other_ranks_and_another_plan_is_the_same(make_run, small, tmp_path, pooled_ranks):
    two = {"num_workers": 2}
    first = make_run("first", epochs=1, resources=two, sharding={"item": "row_wise"})
    assert execute(first, pooled_ranks) == 0
    next_day = {"uri": small.write_rows(tmp_path / "next.parquet", seed=9, num_items=400), "epochs": 1}
    next_day["init_checkpoint"] = str(first.checkpoints)
    split = make_run("two", resources=two, sharding={"item": "table_wise", "user": "row_wise"}, **next_day)
    assert execute(split, pooled_ranks) == 0
    whole = make_run("one", **next_day)
    assert execute(whole, start_ranks) == 0
    ours, alone = (latest_valid(run.checkpoints) for run in (split, whole))
    for table in ("item", "user"):
        rows, state = ours.read_rows(table)
        expected, expected_state = alone.read_rows(table)
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)  # float32 sums in another order
        assert torch.equal(state["last_update_step"], expected_state["last_update_step"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.kind=adm"], "optimizer.kind"),
        (["optimiser.kind=adam"], "did you mean optimizer"),
        (["epochs"], "not PATH=VALUE"),
        (["name.x=1"], "not a part with fields"),
        (["epochs.x=1"], "epochs: Input should be"),
        (["epochs=["], "--set epochs=.: the value is not YAML"),
        (["publish.feature=history"], "publish.feature"),
    ],
)
def test_a_change_that_is_wrong_is_named(tmp_path, rows, changes, message):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows))
    with pytest.raises(ValueError, match=message):
        read_spec(spec, changes)


def test_a_change_of_the_kind_changes_the_default_of_its_decay(tmp_path, rows):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows))
    decays = [
        read_spec(spec, changes)[1].optimizer.decay
        for changes in ([], ["epochs=2"], ["optimizer.kind=adam"], ["regularizers.meda=true"])
    ]
    assert decays == ["by_epoch", "by_epoch", "at_read", "at_read"]


def test_the_train_command_needs_both_documents(tmp_path, rows, capsys):
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.format(uri=rows).split("---")[0])
    assert train_command([str(spec)]) == 1
    assert "holds no job" in capsys.readouterr().err
