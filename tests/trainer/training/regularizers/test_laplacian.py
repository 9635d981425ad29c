"""The graph Laplacian by sampled neighbours: its expectation, its draws on any ranks, and what it does to rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embeddings.sharding.sharded import ModelTables
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import use_threads
from trainer.spec import DatasetSpec, JobSpec, SpecError, parse_dataset
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

STRENGTH = 0.3
MF = {"kind": "mf", "embedding_dim": 4, "loss": "mse", "init": {"kind": "normal", "std": 0.5}}


@pytest.fixture(scope="module")
def dataset(rows, tmp_path_factory) -> DatasetSpec:
    """The small click log with a star: users 1 to 9 are friends of user 0, 10 of 11, and the others of nobody."""
    path = tmp_path_factory.mktemp("star") / "friends.parquet"
    pq.write_table(pa.table({"a": [0] * 9 + [10], "b": [*range(1, 10), 11]}), path)
    return parse_dataset(
        {
            "name": "clicks", "uri": str(rows), "label": {"column": "click"},
            "features": {"user": {"type": "id"}, "item": {"type": "id"}},
            "graphs": {"friends": {"uri": str(path), "source": "a", "target": "b", "of": "user"}},
        }
    )  # fmt: skip


def job_of(small, laplacian: bool = True, **changes: Any) -> JobSpec:
    regularizers = {"laplacian": {"feature": "user", "graph": "friends", "strength": STRENGTH}} if laplacian else {}
    sgd = {"kind": "sgd", "learning_rate": 1.0}
    return small.job(
        **{"model": MF, "optimizer": sgd, "sse": {}, "batch_size": 600, "regularizers": regularizers} | changes
    )


@pytest.fixture(scope="module")
def prepared(dataset, small, tmp_path_factory) -> PreparedData:
    return prepare(dataset, job_of(small), tmp_path_factory.mktemp("data") / "prepared")


def trainer_of(job: JobSpec, data: PreparedData) -> Trainer:
    use_threads(1)
    sharded = build(job, data, alpha=None, backend="reference", dtype=torch.float64)
    sharded.module.begin(data)
    trainer = Trainer(job, data, sharded, dense_optimizer(job, sharded))
    sharded.train()
    return trainer


def trained(directory: str, job: JobSpec, number: int) -> list[tuple[str, int, torch.Tensor]]:
    trainer = trainer_of(job, PreparedData.open(directory))
    batches = trainer.batches()
    for _ in range(number):
        trainer.train_step(next(batches))
    batches.close()
    return [(p.name, p.row_start, p.tables.read(p.name)) for p in ModelTables(trainer.sharded.module).local_pieces()]


def joined(of_ranks: list[Any]) -> dict[str, torch.Tensor]:
    tables: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, start, rows in (piece for pieces in of_ranks for piece in pieces):
        tables.setdefault(name, []).append((start, rows))
    return {name: torch.cat([rows for _, rows in sorted(p, key=lambda part: part[0])]) for name, p in tables.items()}


def test_a_sample_pays_for_a_neighbour_of_its_own(prepared, small):
    """The penalty of each sample is strength |e_j - e_k|^2 of one of its neighbours, as often of each; of the vectors
    alone, not of biases; nothing for who has none; and its mean is that of the expectation."""
    with single_rank_group():
        trainer = trainer_of(job_of(small), prepared)
        graph, batches = prepared.graph("friends"), trainer.batches()
        (batch,) = next(batches)
        batches.close()
        users = batch.features["user"].values().numpy()
        (table,) = (
            p.tables.read("user") for p in ModelTables(trainer.sharded.module).local_pieces() if p.name == "user"
        )
        vectors = table[:, :4]
        center = int(np.argmax(graph.degrees))
        seen = set()
        for step in range(1, 40):
            # The loss is of the same rows; the draws are of another step.
            trainer.sharded.set_context(1, 0, 600)
            found = trainer.objective(batch, step)
            penalties = (found.value - found.loss).detach()
            for at, user in enumerate(users):
                neighbours = graph.neighbours[graph.offsets[user] : graph.offsets[user + 1]]
                if not len(neighbours):
                    assert float(penalties[at]) == 0.0
                    continue
                possible = STRENGTH * (vectors[user] - vectors[neighbours]).square().sum(1)
                match = (possible - penalties[at]).abs() < 1e-12
                assert int(match.sum()) == 1
                if user == center:
                    seen.add((int(match.nonzero()[0]), at))
            trainer.sharded.discard()
        picks = np.bincount([pick for pick, _ in seen], minlength=9)
        assert picks.min() > 0  # every neighbour of the centre is drawn


def test_both_ends_move_together(prepared, small):
    """One SGD step differs by the gradient of the drawn penalties, at rows that no sample has, too."""
    directory = str(prepared.directory)
    with single_rank_group():
        start = joined([trained(directory, job_of(small), 0)])
        plain = joined([trained(directory, job_of(small, laplacian=False), 1)])
        drawn = joined([trained(directory, job_of(small), 1)])
        trainer = trainer_of(job_of(small), prepared)
        batches = trainer.batches()
        (batch,) = next(batches)
        batches.close()
        rows = start["user"].clone().requires_grad_()
        trainer.sharded.set_context(1, 0, 600)
        found = trainer.objective(batch, 1)
        penalties = (found.value - found.loss).detach()
        users, graph = batch.features["user"].values(), prepared.graph("friends")
        total = torch.zeros((), dtype=torch.float64)
        for at, user in enumerate(users.tolist()):
            neighbours = graph.neighbours[graph.offsets[user] : graph.offsets[user + 1]].tolist()
            for k in neighbours:
                term = STRENGTH * (rows[user, :4] - rows[k, :4]).square().sum()
                if abs(float(term.detach()) - float(penalties[at])) < 1e-12:
                    total = total + term
        (total / 600).backward()
        torch.testing.assert_close(drawn["user"] - plain["user"], -rows.grad, rtol=1e-9, atol=1e-13)
        assert torch.equal(drawn["item"], plain["item"])
        assert float(rows.grad[:, 4].abs().max()) == 0.0


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_two_ranks_draw_the_neighbours_that_one_draws(prepared, small, ranks, sharding):
    directory = str(prepared.directory)
    with single_rank_group():
        whole = joined([trained(directory, job_of(small), 5)])
        plain = joined([trained(directory, job_of(small, laplacian=False), 5)])
    split = job_of(
        small, sharding={"user": sharding, "item": "row_wise"}, micro_batches=2, resources={"num_workers": 2}
    )
    of_ranks = ranks(2).run(trained, directory, split, 5)
    if sharding == "data_parallel":
        of_ranks = [of_ranks[0], [piece for piece in of_ranks[1] if piece[0] != "user"]]
    found = joined(of_ranks)
    for name, value in whole.items():
        # float64 sums in another order.
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-11)
    assert float((whole["user"] - plain["user"]).abs().max()) > 1e-4


def test_what_has_no_meaning_is_refused(dataset, small):
    with pytest.raises(SpecError, match="distances between rows of dnn"):
        job_of(small, model={"kind": "dnn"})
    with pytest.raises(SpecError, match="swap the neighbours"):
        job_of(small, sse={"user": {"probability": 0.1}})
    for laplacian, told in (
        ({"feature": "nobody", "graph": "friends"}, "no such feature 'nobody'"),
        ({"feature": "user", "graph": "foes"}, "has no 'foes'"),
        ({"feature": "item", "graph": "friends"}, "belongs to table 'user', the feature reads table 'item'"),
    ):
        with pytest.raises(ValueError, match=told):
            job_of(small, regularizers={"laplacian": laplacian}).against(dataset)
