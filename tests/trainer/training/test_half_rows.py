"""Tables whose rows are halves: a job names their type, trains, resumes with the same bits, and publishes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from embeddings.sharding import TableSettings
from trainer.checkpoint.format import latest_valid
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.launch.worker import use_threads
from trainer.runs.directory import read_run, write_run
from trainer.runs.protocol import EXIT_FAILED, EXIT_SUCCEEDED
from trainer.sizing.memory import rank_memory, row_bytes
from trainer.sizing.memory_limit import arithmetic
from trainer.spec import JobSpec, SpecError, Table, parse_job

TABLES = {"item": {"dtype": "bfloat16"}, "user": {"dtype": "float16", "state_dtype": "bfloat16"}}
PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}


@pytest.fixture(autouse=True)
def one_thread():
    use_threads(1)


def stored(run):
    """Every tensor of the tables in the last checkpoint."""
    checkpoint, found = latest_valid(run.checkpoints), {}
    for table in checkpoint.tables:
        weight, state = checkpoint.read_rows(table)
        found |= {f"{table}.weight": weight, **{f"{table}.{name}": value for name, value in state.items()}}
    return found


def went_on(run, epochs):
    """The same run, asked for so many epochs."""
    more = dataclasses.replace(run, job=run.job.model_copy(update={"epochs": epochs}))
    write_run(run.directory, run_id=run.run_id, job=more.job, dataset=run.dataset, store_url=run.store_url)
    return read_run(run.directory)


@pytest.mark.slow
def test_a_job_trains_half_rows_and_a_resume_changes_no_bit(make_run, small):
    whole = make_run("whole", tables=TABLES, publish=PUBLISH)
    assert execute(whole, start_ranks) == EXIT_SUCCEEDED
    cut = make_run("cut", tables=TABLES, epochs=1)
    assert execute(cut, start_ranks) == EXIT_SUCCEEDED
    assert execute(went_on(cut, 2), start_ranks) == EXIT_SUCCEEDED
    tensors, again = stored(whole), stored(cut)
    assert {name: value.dtype for name, value in tensors.items()} == {
        "item.weight": torch.bfloat16, "item.m": torch.float32, "item.v": torch.float32,
        "item.last_update_step": torch.int32,
        "user.weight": torch.float16, "user.m": torch.bfloat16, "user.v": torch.bfloat16,
        "user.last_update_step": torch.int32,
    }  # fmt: skip
    assert [name for name in tensors if not torch.equal(tensors[name], again[name])] == []
    # There is a pattern to learn, and halves learn it.
    assert small.metrics(whole.directory, "test")[-1]["auc"] > 0.75
    # A child of whole rows would read halves for what they are not.
    child = make_run("child", init_checkpoint=str(whole.checkpoints))
    assert execute(child, start_ranks) == EXIT_FAILED
    assert "the parent's table has dtype float16" in small.events(child.directory, "error")[-1]["message"]
    child = make_run("same", init_checkpoint=str(whole.checkpoints), tables=TABLES)
    assert execute(child, start_ranks) == EXIT_SUCCEEDED


def test_what_a_table_cannot_be_is_refused():
    def parse(**fields):
        return parse_job({"name": "j", "dataset": {"name": "d"}, "model": {"kind": "dnn"}} | fields)

    with pytest.raises(SpecError, match=r"tables\.item\.state_dtype: float16 cannot hold the squares"):
        parse(tables={"item": {"state_dtype": "float16"}})
    with pytest.raises(SpecError, match=r"tables\.item: FBGEMM trains float32 rows"):
        parse(tables=TABLES, kernel="fbgemm", optimizer={"kind": "adagrad"})
    with pytest.raises(SpecError, match=r"tables\.item\.dtype"):
        parse(tables={"item": {"dtype": "float64"}})
    with pytest.raises(ValueError, match=r"table 'item': rows of torch\.float16 are computed in torch\.float32"):
        TableSettings({}, None, {}, dtype=torch.float64, dtypes={"item": torch.float16})


def test_tables_that_a_job_does_not_name_have_the_default_types(make_run, monkeypatch):
    run = make_run(tables={"item": {}}, optimizer={"kind": "adagrad"})
    data = prepare(run.dataset, run.job, run.data)
    monkeypatch.setattr(JobSpec, "table", lambda job, name: job.tables.get(name, Table(state_dtype="bfloat16")))
    with single_rank_group():
        shards, _ = build(run.job, data, alpha=None).state_for_checkpoint(None)
        types = {shard.name: shard.state["sum"].dtype for shard in shards}
    assert types == {"item": torch.float32, "user": torch.bfloat16}
    memory = rank_memory(run.job, {"item": 1000, "user": 10}, {"item": 1.0, "user": 1.0})
    dim = run.job.model.embedding_dim
    assert memory.by_table["item"].total == 1000 * (dim * 8 + 4)
    assert memory.by_table["user"].total == 10 * (dim * 6 + 4)
    assert any(f"10 rows x (dim {dim} x (4 for the weight + 1 x 2" in line for line in arithmetic(run.job, memory))


def test_halves_are_counted_as_such():
    assert row_bytes("adam", 16, Table(dtype="bfloat16")) == 16 * (2 + 8) + 4
    assert row_bytes("adagrad", 16, Table(dtype="float16", state_dtype="bfloat16")) == 16 * (2 + 2) + 4
    assert row_bytes("sgd", 16, Table()) == 16 * 4 + 4
    fields = {"name": "j", "dataset": {"name": "d"}, "model": {"kind": "dnn"}, "optimizer": {"kind": "adagrad"}}
    job = parse_job(fields | {"tables": {"item": {"dtype": "float16"}}})
    memory = rank_memory(job, {"item": 1000, "user": 10}, {"item": 1.0, "user": 1.0})
    assert memory.by_table["item"].total == 1000 * (16 * 6 + 4)
    assert memory.by_table["user"].total == 10 * (16 * 8 + 4)
