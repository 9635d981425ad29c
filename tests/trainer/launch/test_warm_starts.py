"""A run that starts from a checkpoint or goes on from what is served: what it takes, refuses and publishes."""

from __future__ import annotations

import json
import re
import shutil

import pyarrow.parquet as pq
import pytest
import torch

from embeddings.store import open_store
from tests.trainer.launch.endings import fails_with
from trainer.checkpoint.format import checkpoints_in, latest_valid
from trainer.checkpoint.warm_start import id_maps
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.protocol import EXIT_FAILED

pytestmark = pytest.mark.slow

ADAM_AR = {"kind": "adam_ar", "learning_rate": 0.1, "alpha": 0.003}
FEATURES = {"user": {"type": "id"}, "item": {"type": "id"}}
PUBLISH = {"collection": "items", "feature": "item"}


def test_a_warm_start_keeps_old_rows_and_starts_new_ones_from_their_id(make_run, small, tmp_path):
    lazy = {"kind": "adam_ar", "moments": "lazy"}  # only then may the learning rate be another one
    first = make_run("first", epochs=1, optimizer={**lazy, "alpha": 0.003, "learning_rate": 0.1})
    assert execute(first, start_ranks) == 0
    parent = latest_valid(first.checkpoints)
    # Other items, some of them known; nothing moves: learning rates 0.
    uri = small.write_rows(tmp_path / "next.parquet", seed=9, num_items=400)
    still = {
        "optimizer": {**lazy, "alpha": "default", "learning_rate": 0.0},
        "dense_optimizer": {"kind": "adam", "learning_rate": 0.0},
    }
    second = make_run("second", uri=uri, epochs=1, init_checkpoint=str(first.checkpoints), **still)
    fresh = make_run("fresh", uri=uri, epochs=1, **still)
    assert execute(second, start_ranks) == 0
    assert execute(fresh, start_ranks) == 0

    child = latest_valid(second.checkpoints)
    assert child.extra["alpha"] == parent.extra["alpha"] == 0.003
    assert child.extra["position"]["first_step"] == parent.step
    assert child.step == parent.step + child.extra["position"]["step"]
    ids = {name: id_maps(checkpoint)["item"].ids.to_pylist() for name, checkpoint in (("old", parent), ("new", child))}
    assert ids["new"][: len(ids["old"])] == ids["old"]
    added = ids["new"][len(ids["old"]) :]
    assert added
    old_weight, old_state = parent.read_rows("item")
    new_weight, new_state = child.read_rows("item")
    known = len(old_weight)
    last = new_state["last_update_step"][:known]
    untouched = last == old_state["last_update_step"]
    assert bool(untouched.any())
    assert bool((new_weight[:known][untouched] == old_weight[untouched]).all())
    assert bool((new_state["m"][:known][untouched] == old_state["m"][untouched]).all())
    # A new id starts from hash(id, seed): the same as in a run that never heard of the old ones.
    alone = latest_valid(fresh.checkpoints)
    row_of = {id_: row + 2 for row, id_ in enumerate(id_maps(alone)["item"].ids.to_pylist())}
    started = alone.read_rows("item")[0]
    references = torch.stack([started[row_of[id_]] for id_ in added])
    # Rows that were touched decayed while they idled; their direction is the initial one.
    torch.testing.assert_close(unit(new_weight[known:]), unit(references))
    assert bool((new_weight[known:] == references).all(dim=1).any())


def test_a_warm_start_decays_by_the_epochs_of_the_tables_first_training(make_run, small, tmp_path):
    by_epoch = {"optimizer": {**ADAM_AR, "decay": "by_epoch"}}
    first = make_run("first", epochs=1, **by_epoch)
    assert execute(first, start_ranks) == 0
    parent = latest_valid(first.checkpoints)
    assert parent.extra["epoch_steps"] == parent.step
    uri = small.write_rows(tmp_path / "next.parquet", seed=9, num_rows=300)
    second = make_run("second", uri=uri, epochs=1, init_checkpoint=str(first.checkpoints), **by_epoch)
    assert execute(second, start_ranks) == 0
    child = latest_valid(second.checkpoints)
    assert child.extra["epoch_steps"] == parent.step != child.step - parent.step


def test_a_refresh_of_what_decays_at_read_decays_by_the_epochs_of_its_own(make_run, small, tmp_path):
    """A collection of before by_epoch was the default, and a job that leaves the decay out."""
    first = make_run("first", epochs=1, optimizer={**ADAM_AR, "decay": "at_read"})
    assert execute(first, start_ranks) == 0
    parent = latest_valid(first.checkpoints)
    assert "epoch_steps" not in parent.extra
    uri = small.write_rows(tmp_path / "next.parquet", seed=9, num_rows=300)
    second = make_run("second", uri=uri, epochs=1, init_checkpoint=str(first.checkpoints), optimizer=ADAM_AR)
    assert execute(second, start_ranks) == 0
    child = latest_valid(second.checkpoints)
    assert child.extra["job"]["optimizer"]["decay"] == "by_epoch"
    assert child.extra["epoch_steps"] == child.step - parent.step
    told = [event["message"] for event in small.events(second.directory, "info")]
    assert any("the row optimizer has other settings (decay, epoch_steps): rows are brought to" in one for one in told)


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows.double(), dim=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"kind": "two_tower", "embedding_dim": 2, "hidden": [8]}}, "model.embedding_dim: .* with 4"),
        ({"model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [4]}}, "model.hidden"),
        ({"model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4}}, "model.kind"),
        (
            {"features": {"user": {"type": "id"}, "item": {"type": "id"}, "day": {"type": "id"}}},
            "features.hour: .*dropped",
        ),
    ],
)
def test_a_warm_start_that_does_not_fit_is_refused(make_run, trained_run, small, tmp_path, changes, message):
    rows = small.write_rows(tmp_path / "rows.parquet")
    table = pq.read_table(rows)
    for name in ("hour", "day"):
        table = table.append_column(name, table["user"])
    pq.write_table(table, rows)
    features = FEATURES | {"hour": {"type": "id"}} if "features" in changes else {}
    first = trained_run("first", epochs=1, **({"features": features, "uri": rows} if features else {}))
    second = make_run("second", epochs=1, init_checkpoint=str(first.checkpoints), **{"uri": rows, **changes})
    # Not worth another try: it would find the same.
    error = fails_with(second, small, "bad_input")
    assert re.search(message, error["message"]), error
    assert "init_from" in error["message"]


def test_a_warm_start_whose_feature_reads_another_column_is_refused_in_one_line(make_run, trained_run, small, capfd):
    first = trained_run("first", epochs=1)
    others = {"user": {"type": "id"}, "item": {"type": "id", "column": "user"}}
    second = make_run("second", epochs=1, features=others, init_checkpoint=str(first.checkpoints))
    capfd.readouterr()
    error = fails_with(second, small, "bad_input")
    assert error["message"].startswith("features.item: the parent read column 'item' (column), the dataset reads 'u")
    said = "".join(capfd.readouterr())
    assert said.count(error["message"]) == 1
    assert "Traceback" not in said
    assert "Traceback" in (second.directory / "traceback.txt").read_text()


def test_a_warm_start_from_nothing_says_so(make_run, small, tmp_path):
    run = make_run(init_checkpoint=str(tmp_path / "gone"))
    assert execute(run, start_ranks) != 0
    assert "no valid checkpoint" in small.events(run.directory, "error")[0]["message"]


def test_a_warm_start_without_the_ids_of_its_rows_is_refused(make_run, trained_run, small):
    first = trained_run("first", epochs=1)
    *older, newest = checkpoints_in(first.checkpoints)
    for path in older:
        shutil.rmtree(path)
    (newest / "ids-item.arrow").write_bytes(b"other ids")
    second = make_run("second", epochs=1, init_checkpoint=str(first.checkpoints))
    with pytest.warns(RuntimeWarning, match=r"ids-item\.arrow holds 9 bytes"):
        assert execute(second, start_ranks) != 0
    assert "no valid checkpoint" in small.events(second.directory, "error")[0]["message"]


def test_a_refresh_is_published_onto_its_parent(make_run, trained_run):
    gate_off = {"epochs": 1, "publish": PUBLISH | {"gate": {"mode": "off"}}}
    first = trained_run("first", **gate_off)
    collection = open_store(first.store_url).collection("items")
    assert collection.current() == "v000001"
    second = make_run("second", **gate_off, init_checkpoint=str(first.checkpoints), parent_version="v000001")
    assert execute(second, start_ranks) == 0
    assert collection.current() == "v000002"
    manifest = collection.manifest("v000002")
    assert manifest["parent"] == "v000001"
    assert manifest["job"] == "second"
    # Attempted once more (a crash after the switch): the same version, not another one.
    again = make_run("second", attempt=2, **gate_off, init_checkpoint=str(first.checkpoints), parent_version="v000001")
    assert execute(again, start_ranks) == 0
    assert collection.current() == "v000002"


def test_a_run_that_was_overtaken_is_held(make_run, trained_run, small):
    gate_off = PUBLISH | {"gate": {"mode": "off"}}
    trained_run("first", epochs=1, publish=gate_off)
    late = make_run("late", publish=gate_off, epochs=1)  # it started when there was no version yet
    assert execute(late, start_ranks) == 0
    (publication,) = small.events(late.directory, "publication")
    assert publication["status"] == "held"
    assert publication["reasons"]
    assert open_store(late.store_url).collection("items").current() == "v000001"


def test_an_attempt_that_was_given_up_publishes_nothing(make_run, small):
    """It wakes up (SIGSTOP, a long pause) when run.json already belongs to the next attempt."""
    run = make_run(publish=PUBLISH, epochs=1)

    def replaced_meanwhile(current):
        start_ranks(current)
        document = json.loads((run.directory / "run.json").read_text())
        (run.directory / "run.json").write_text(json.dumps(document | {"attempt": 2}))

    assert execute(run, replaced_meanwhile) == EXIT_FAILED
    assert small.events(run.directory, "error")[0]["code"] == "given_up"
    assert open_store(run.store_url).collection("items").versions() == []
