"""What a step is: one batch, however it is computed; clipped by all of its gradients; at the rate of its schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embeddings.sharding.sharded import ModelTables
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build, choose_alpha
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.launch.worker import use_threads
from trainer.runs.directory import read_run
from trainer.spec import JobSpec
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

NUM_EXAMPLES, BATCH_SIZE = 2393, 598
NUM_ROWS = {"user": 62, "item": 122}
MIXED = {"item": "row_wise", "user": "table_wise"}


def trained(directory: str, job: JobSpec, num_steps: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """After so many steps in float64: this rank's rows as of now, with their place, and the dense parameters."""
    use_threads(1)
    data = PreparedData.open(read_run(directory).data)
    alpha = choose_alpha(job, data.steps_per_epoch)
    sharded = build(job, data, alpha=alpha, backend="reference", dtype=torch.float64)
    trainer = Trainer(job, data, sharded, dense_optimizer(job, sharded))
    sharded.train()
    steps = trainer.batches()
    for _ in range(num_steps):
        trainer.train_step(next(steps))
    steps.close()
    rows = [
        (piece.name, piece.row_start, piece.column_start, piece.tables.read(piece.name))
        for piece in ModelTables(sharded.module).local_pieces()
    ]
    return rows, {name: parameter.detach().clone() for name, parameter in sharded.dense_parameters()}


def trained_here(directory: str, job: JobSpec, num_steps: int) -> dict[str, torch.Tensor]:
    with single_rank_group():
        return joined([trained(directory, job, num_steps)])


def joined(of_ranks: list[tuple[list[Any], dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Whole tables and the dense parameters, which must be alike on all ranks, as must be replicated rows."""
    found = dict(of_ranks[0][1])
    for _, dense in of_ranks:
        assert all(torch.equal(found[name], value) for name, value in dense.items())
    for name, row, column, values in (piece for rows, _ in of_ranks for piece in rows):
        table = found.setdefault(name, torch.full((NUM_ROWS[name], 4), torch.nan, dtype=torch.float64))
        place = table[row : row + values.shape[0], column : column + values.shape[1]]
        assert bool(place.isnan().all()) or torch.equal(place, values)
        place.copy_(values)
    assert not any(bool(value.isnan().any()) for value in found.values())
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """float64 sums in another order, over some steps."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < 1e-11, name


def moved(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.fixture
def prepared(make_run):
    """Five steps an epoch, of which the last has one sample."""
    run = make_run(batch_size=BATCH_SIZE)
    assert NUM_EXAMPLES % BATCH_SIZE == 1
    assert prepare(run.dataset, run.job, run.data).num_examples["train"] == NUM_EXAMPLES
    return run


# --- micro-batches ---------------------------------------------------------------------------------------------------


def sse_job(small, **changes) -> JobSpec:
    """Swaps at random among the inputs and the labels: draws of another sample would show."""
    sse = {feature: {"probability": 0.3} for feature in ("item", "user", "label")}
    model = {"kind": "dnn", "embedding_dim": 4, "hidden": [8]}
    return small.job(sse=sse, model=model, batch_size=BATCH_SIZE, **changes)


@pytest.mark.parametrize("micro_batches", [2, 5])
def test_micro_batches_add_up_to_the_batch(prepared, small, micro_batches):
    """SSE, the last batch of an epoch, which leaves parts empty, and the first of the next included."""
    whole = trained_here(str(prepared.directory), sse_job(small), 6)
    parts = trained_here(str(prepared.directory), sse_job(small, micro_batches=micro_batches), 6)
    assert_close(parts, whole)
    assert moved(trained_here(str(prepared.directory), sse_job(small, seed=1), 6), whole) > 0.01


@pytest.mark.parametrize("sharding", [MIXED, {"item": "table_wise", "user": "row_wise"}])
def test_micro_batches_on_two_ranks_draw_what_one_batch_on_one_draws(prepared, small, ranks, sharding):
    whole = trained_here(str(prepared.directory), sse_job(small), 6)
    job = sse_job(small, micro_batches=3, sharding=sharding)
    assert_close(joined(ranks(2).run(trained, str(prepared.directory), job, 6)), whole)


# --- clipping --------------------------------------------------------------------------------------------------------

PLAIN = {
    "optimizer": {"kind": "sgd", "learning_rate": 1.0},
    "dense_optimizer": {"kind": "sgd", "learning_rate": 1.0},
    "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8], "init": {"kind": "normal", "std": 0.5}},
    "sse": {},
    "batch_size": BATCH_SIZE,
}


def clipped(small, clip_norm: float | None, **changes) -> JobSpec:
    return small.job(**PLAIN | {"optimizer": {**PLAIN["optimizer"], "clip_norm": clip_norm}} | changes)


def length(directory: str, job: JobSpec) -> float:
    """Of the first step, over all tables and dense parameters: with learning rates 1, the norm of its gradient."""
    before, after = (trained_here(directory, job, steps) for steps in (0, 1))
    return float(sum((after[name] - before[name]).square().sum() for name in after).sqrt())


def test_the_step_is_clipped_by_the_norm_of_all_gradients(prepared, small):
    directory = str(prepared.directory)
    norm = length(directory, clipped(small, None))
    assert norm > 0.01
    assert length(directory, clipped(small, norm / 3)) == pytest.approx(norm / 3, rel=1e-4)  # torch adds 1e-6 to it
    assert length(directory, clipped(small, norm * 1.01)) == pytest.approx(norm, rel=1e-12)
    both = [trained_here(directory, clipped(small, limit), 1) for limit in (norm / 3, None)]
    start = trained_here(directory, clipped(small, None), 0)
    for name in start:
        # One factor for all.
        short, long = (after[name] - start[name] for after in both)
        torch.testing.assert_close(3 * short, long, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize(
    "sharding", [MIXED, {"item": "column_wise", "user": "data_parallel"}], ids=["mixed", "column_wise_and_replicas"]
)
def test_ranks_clip_by_the_norm_of_the_whole(prepared, small, ranks, sharding):
    """Each element once: those of a replicated table are on both ranks."""
    job = clipped(small, 0.05, micro_batches=2)
    whole = trained_here(str(prepared.directory), job, 6)
    assert moved(whole, trained_here(str(prepared.directory), clipped(small, None), 6)) > 0.01
    split = job.model_copy(update={"sharding": sharding})
    assert_close(joined(ranks(2).run(trained, str(prepared.directory), split, 6)), whole)


def test_a_long_row_gradient_is_clipped_alone(prepared, small):
    directory = str(prepared.directory)
    limit = 0.002
    job = clipped(small, None, optimizer={**PLAIN["optimizer"], "clip_row_norm": limit})
    start, free, bound = (
        trained_here(directory, *arguments) for arguments in ((job, 0), (clipped(small, None), 1), (job, 1))
    )
    long = (free["item"] - start["item"]).norm(dim=1) > limit
    assert 0 < int(long.sum()) < len(long)
    assert float((bound["item"] - start["item"]).norm(dim=1).max()) == pytest.approx(limit, rel=1e-9)
    torch.testing.assert_close(bound["item"][~long], free["item"][~long], rtol=0, atol=1e-15)


# --- schedules -------------------------------------------------------------------------------------------------------

HALF = {"kind": "linear_warmup", "warmup_steps": 4, "start_factor": 0.5}


def test_schedules_scale_each_step_of_tables_and_of_dense_parameters(prepared, small):
    """A quarter more of the way to go at each step: 1/2, 5/8, 3/4, 7/8, 1, of a loss so flat that gradients stay."""
    directory = str(prepared.directory)
    slow = {"kind": "sgd", "learning_rate": 1e-9}
    job = small.job(**PLAIN | {"optimizer": {**slow, "schedule": HALF}, "dense_optimizer": {**slow, "schedule": HALF}})
    constant = small.job(**PLAIN | {"optimizer": slow, "dense_optimizer": slow})
    places = [[trained_here(directory, which, steps) for steps in range(7)] for which in (job, constant)]
    for step, factor in enumerate([0.5, 0.625, 0.75, 0.875, 1.0, 1.0]):
        for name in places[0][0]:
            scheduled, plain = (where[step + 1][name] - where[step][name] for where in places)
            torch.testing.assert_close(scheduled, factor * plain, rtol=1e-3, atol=1e-14)


def test_one_schedule_leaves_the_other_rate_alone(prepared, small):
    still = {"kind": "linear_warmup", "warmup_steps": 100}  # 0 at the first step
    directory = str(prepared.directory)
    start = trained_here(directory, small.job(**PLAIN), 0)
    for scheduled, dense_moves in (("optimizer", True), ("dense_optimizer", False)):
        job = small.job(**PLAIN | {scheduled: {**PLAIN[scheduled], "schedule": still}})
        after = trained_here(directory, job, 1)
        for name in start:
            assert torch.equal(after[name], start[name]) == (dense_moves == (name in ("item", "user"))), name


# --- whole runs ------------------------------------------------------------------------------------------------------

COSINE = {"kind": "cosine", "warmup_steps": 5, "decay_steps": 60, "final_factor": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        {"kind": "adamw", "learning_rate": 0.1, "weight_decay": 0.01, "first_touch": "literal", "schedule": COSINE},
        {"kind": "adamw", "learning_rate": 0.1, "weight_decay": 0.01, "moments": "lazy", "clip_row_norm": 0.1},
        {"kind": "adagradw", "learning_rate": 0.3, "weight_decay": 0.001, "eps_inside_root": True},
        {"kind": "adagrad_ar", "learning_rate": 0.3, "alpha": 0.003, "schedule": COSINE | {"warmup_steps": 0}},
        {"kind": "adagrad_ar", "learning_rate": 0.3, "first_touch": "literal"},
        {"kind": "adam_ar", "learning_rate": 0.1, "alpha": 0.003, "first_touch": "literal", "eps_inside_root": True},
        {"kind": "rowwise_adagrad", "learning_rate": 0.3, "clip_row_norm": 0.1},
        {"kind": "rmsprop", "learning_rate": 0.02, "schedule": COSINE},
        {"kind": "rmsprop_ar", "learning_rate": 0.02, "alpha": 0.003, "eps_inside_root": True},
        {"kind": "rowwise_adam", "learning_rate": 0.1, "moments": "lazy", "clip_row_norm": 0.1},
        {"kind": "rowwise_adam_ar", "learning_rate": 0.1, "alpha": 0.003, "schedule": COSINE},
    ],
    ids=lambda optimizer: "-".join(word for word in optimizer.values() if isinstance(word, str)),
)
def test_every_optimizer_trains_a_job_that_is_published(make_run, small, optimizer):
    run = make_run(
        optimizer={"clip_norm": 5.0, **optimizer},
        dense_optimizer={"kind": "adam", "learning_rate": 0.02, "schedule": {"kind": "step", "every_steps": 30}},
        micro_batches=2,
        publish={"collection": "items", "feature": "item", "gate": {"mode": "report"}},
    )
    assert execute(run, start_ranks) == 0
    assert small.metrics(run.directory, "test")[-1]["auc"] > 0.7
    assert small.events(run.directory, "publication")[0]["status"] == "published"
    extra = latest_valid(run.checkpoints).extra
    assert (extra["alpha"] is not None) == optimizer["kind"].endswith("_ar")
