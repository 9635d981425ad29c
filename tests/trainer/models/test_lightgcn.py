"""LightGCN: propagation written out, jobs, what it refuses."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.support.gathered import gather_table
from tests.trainer.trainings import trainer_of
from trainer.data.prepare.preparation import prepare
from trainer.launch.on_host import single_rank_group
from trainer.models.lightgcn import normalized_graph
from trainer.spec import SpecError, parse_dataset, parse_job

CONTRASTIVE = {"loss": "cosine_contrastive", "normalize": True, "margin": 0.0, "negative_weight": 2.0}


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Users of two kinds, each with items of its own."""
    path = tmp_path_factory.mktemp("halves") / "halves.parquet"
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(40), 9)
    item = user % 2 * 20 + np.concatenate([rng.permutation(20)[:9] for _ in range(40)])
    pq.write_table(pa.table({"user": user, "item": item, "liked": np.ones_like(user)}), path)
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    return parse_dataset({"name": "halves", "uri": str(path), "features": features, "label": {"column": "liked"}})


def job_of(**changes):
    document = {
        "name": "halves-job", "dataset": {"name": "halves"}, "batch_size": 64, "epochs": 8,
        "model": {"kind": "lightgcn", "loss": "bpr", "embedding_dim": 8, "layers": 2},
        "optimizer": {"kind": "adam", "learning_rate": 0.02}, "evaluation": {"metrics": ["recall_20_full"]},
    }  # fmt: skip
    return parse_job(document | changes)


def test_the_graph_has_each_pair_once_by_the_degrees_of_both():
    graph = normalized_graph(np.array([0, 0, 1, 0]), np.array([0, 2, 2, 0]), 2, 3).times(torch.eye(5))
    pairs = torch.tensor([[2**-0.5, 0.0, 0.5], [0.0, 0.0, 2**-0.5]])
    expected = torch.zeros(5, 5)
    expected[:2, 2:], expected[2:, :2] = pairs, pairs.T
    torch.testing.assert_close(graph, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [{}, CONTRASTIVE, {"loss": "sampled_softmax"}, {"loss": "sampled_softmax", "normalize": True}]
)
def test_a_job_learns_and_scores_by_propagated_rows(halves, tmp_path, loss):
    job = job_of(model={"kind": "lightgcn", "loss": "bpr", "embedding_dim": 8, "layers": 2} | loss)
    data = prepare(halves, job, tmp_path / "data")
    with single_rank_group():
        trainer = trainer_of(job, data, dtype=torch.float64)
        trainer.train()
        model, batch = trainer.sharded.eval().module, next(iter(data.eval_batches("test", 8)))
        found = model(batch.features)
        tables = [gather_table(trainer.sharded, name).rows.double() for name in ("user", "item")]
        trainer.sharded.train()
        trainer.sharded.set_context(trainer.position.step + 1, 0, 64)
        trained = model.loss(next(iter(data.train_batches(0, 0, 0, 1))))
    num_users = data.tables["user"].num_rows
    rows, biases = torch.cat([table[:, :8] for table in tables]), tables[1][:, 8:].sum(1)
    rows[[0, 1, num_users, num_users + 1]] = 0.0
    graph = model._graph.to(rows).times(torch.eye(len(rows), dtype=rows.dtype))
    vectors = (rows + graph @ rows + graph @ graph @ rows) / 3
    user, item = (batch.features[name].values() + start for name, start in (("user", 0), ("item", num_users)))
    expected = [vectors[user], vectors[item]]
    if loss.get("normalize"):
        expected = [torch.nn.functional.normalize(part, dim=1) for part in expected]
    assert (biases.abs().max() > 0) == (loss == {"loss": "sampled_softmax", "normalize": True})
    scores = (expected[0] * expected[1]).sum(1) + biases[batch.features["item"].values()]
    torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-6)
    # 20 of 40 items are of the other kind; as many shown at random would find half.
    assert trainer.history[-1]["recall_20_full"] > 0.9
    trained.sum().backward()


def test_what_lightgcn_cannot_do_is_named():
    for changes, message in (
        ({"resources": {"num_workers": 2}}, "several ranks would split"),
        ({"sse": {"item": {"probability": 0.1}}}, "lightgcn looks up every row"),
        ({"publish": {"collection": "items", "feature": "item"}}, "use bpr"),
    ):
        with pytest.raises(SpecError, match=message):
            job_of(**changes)
