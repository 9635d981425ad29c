"""Jobs of sequence models whose targets share items, or are compared with all: draws, ranks, resumes, problems."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import normalize

from tests.trainer.trainings import differ, snapshot, train_in_parts, train_on_ranks, trainer_of
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import sse_configs
from trainer.launch.on_host import single_rank_group
from trainer.models.retrieval_losses import RETRIEVAL
from trainer.spec import SpecError, parse_dataset, parse_job

# Whole jobs.
pytestmark = pytest.mark.slow

NUM_ITEMS = 24
SHARED = {"loss": "sampled_softmax", "negatives": 12, "share_negatives": True}
LOSSES = {
    "softmax": {"loss": "softmax", "normalize": True, "temperature": 0.2},
    "uniform": SHARED,
    "popularity": SHARED | {"negative_distribution": "popularity", "negative_power": 0.5},
    "in_batch": SHARED | {"negative_distribution": "in_batch"},
    "gbce": {"loss": "gbce", "negatives": 12, "calibration": 0.5},
    "cosine_contrastive": {"loss": "cosine_contrastive", "negatives": 12, "normalize": True},
}
OF_ALL = {"split": {"kind": "per_user_last"}, "metrics": ["ndcg_10_full"]}


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """Each user goes round the items, from anywhere, some for longer than others."""
    path = tmp_path_factory.mktemp("rounds") / "rounds.parquet"
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 16, 60)
    user, time = np.repeat(np.arange(60), lengths), np.concatenate([np.arange(length) for length in lengths])
    item = (np.repeat(rng.integers(0, NUM_ITEMS, 60), lengths) + time) % NUM_ITEMS
    pq.write_table(pa.table({"user": user, "item": item, "t": time, "liked": np.ones_like(user)}), path)
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    return parse_dataset(
        {"name": "rounds", "uri": str(path), "features": features, "label": {"column": "liked"}, "order": "t"}
    )


def job_of(loss, kind="sasrec", **changes):
    model = {"kind": kind, "embedding_dim": 8, "length": 6} | LOSSES[loss]
    document = {
        "name": "rounds-job", "dataset": {"name": "rounds"}, "model": model, "batch_size": 32,
        "optimizer": {"kind": "adam", "learning_rate": 0.02}, "dense_optimizer": {"learning_rate": 0.01}, "epochs": 2,
        "evaluation": {"split": {"kind": "per_user_last"}}, "regularizers": {"dropout": 0.2},
    }  # fmt: skip
    return parse_job(document | changes)


@pytest.mark.parametrize(
    ("loss", "kind"), [(loss, "sasrec") for loss in LOSSES] + [("softmax", "hstu"), ("uniform", "gru4rec")]
)
def test_what_comes_next_is_learned_by_heart(rounds, tmp_path, kind, loss):
    """Of 24 items; by any order NDCG@10 would be about .2. Losses of one item at a time learn more slowly."""
    job = job_of(loss, kind, epochs=25, regularizers={}, evaluation={**OF_ALL, "sample_users": 100})
    data = prepare(rounds, job, tmp_path / "data")
    with single_rank_group():
        trainer = trainer_of(job, data)
        trainer.train()
    assert trainer.history[-1]["ndcg_10_full"] > (0.5 if loss in ("gbce", "cosine_contrastive") else 0.8)


@pytest.mark.parametrize("loss", LOSSES)
def test_two_ranks_train_and_rank_as_one_does(rounds, ranks, tmp_path, loss):
    """SSE on both sides, dropout, micro-batches, and the last batch of an epoch, which leaves parts empty."""
    changes = {"sse": {"item": {"probability": 0.2}, "label": {"probability": 0.1}}, "batch_size": 59}
    job = job_of(loss, **changes)
    data = prepare(rounds, job, tmp_path / "data")
    steps = data.steps_per_epoch + 2
    with single_rank_group():
        expected, metrics = train_on_ranks(data.directory, job, steps)
    split = job_of(loss, **changes, micro_batches=2, sharding={"item": "row_wise"})
    (found, ranked), _ = ranks(2).run(train_on_ranks, data.directory, split, steps)
    for name, value in expected.items():
        # float64 sums in another order, over some steps of Adam.
        assert float((found[name] - value).abs().max()) < 1e-9, name
    assert ranked == metrics


@pytest.mark.parametrize("loss", ["softmax", "in_batch"])
def test_stopping_and_resuming_changes_no_bit(rounds, tmp_path, loss):
    job = job_of(loss)
    data = prepare(rounds, job, tmp_path / "data")
    with single_rank_group():
        whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
        parts, _ = train_in_parts(job, data, tmp_path / "parts", [1, data.steps_per_epoch + 1])
        assert differ(snapshot(parts), snapshot(whole)) == []


BPR = {
    "bpr": {"loss": "bpr", "share_negatives": True},
    "sampled_softmax": {"loss": "sampled_softmax", "negative_distribution": "in_batch", "temperature": 0.5},
    "gbce": {"loss": "gbce"},
    "normalized": {"loss": "sampled_softmax", "normalize": True, "temperature": 0.3},
    "cosine_contrastive": {"loss": "cosine_contrastive", "normalize": True, "margin": 0.2, "negative_weight": 5.0},
}


def bpr_job(loss, **changes):
    model = {"kind": "bpr", "loss": "bpr", "embedding_dim": 8} | BPR[loss]
    document = {
        "name": "rounds-job", "dataset": {"name": "rounds"}, "model": model, "batch_size": 59, "epochs": 2,
        "optimizer": {"kind": "adam", "learning_rate": 0.02}, "evaluation": OF_ALL,
    }  # fmt: skip
    return parse_job(document | changes)


@pytest.mark.parametrize("loss", BPR)
def test_bpr_with_the_drawn_items_of_the_batch_is_its_formula(rounds, tmp_path, loss):
    """All scores at once, by plain operations: user times item, and times what was drawn for any example."""
    job = bpr_job(loss)
    data = prepare(rounds, job, tmp_path / "data")
    with single_rank_group():
        trainer = trainer_of(job, data, dtype=torch.float64)
        model, batch = trainer.sharded.module, next(iter(data.train_batches(0, 0, 0, 1)))
        found = model.loss(batch)
        blocks = model.embeddings(batch.features).to_dict()
    user, item, drawn = (blocks[name].detach() for name in ("user", "item", "item__negative"))
    biases = [rows[:, 8] * (loss != "cosine_contrastive") for rows in (item, drawn)]
    user, item, drawn = (
        normalize(rows[:, :8], dim=1) if job.model.normalize else rows[:, :8] for rows in (user, item, drawn)
    )
    target, scores = (user * item).sum(1) + biases[0], user @ drawn.T + biases[1]
    target, scores = target / job.model.temperature, scores / job.model.temperature
    ids, negatives = batch.features["item"].values(), batch.features["item__negative"].values()
    if job.model.negative_distribution == "in_batch":
        counts = torch.as_tensor(np.array(data.example_counts("item")), dtype=torch.float64)
        log_q = (counts / counts.sum()).log()
        target, scores = target - log_q[ids], scores - log_q[negatives]
    scores = scores.masked_fill(ids[:, None] == negatives, -torch.inf)
    terms = RETRIEVAL[job.model.loss](trainer.sharded.module.loss_settings, NUM_ITEMS).terms(target, scores)
    torch.testing.assert_close(found, terms.losses, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", BPR)
def test_two_ranks_train_bpr_as_one_does(rounds, ranks, tmp_path, loss):
    data = prepare(rounds, bpr_job(loss), tmp_path / "data")
    steps = data.steps_per_epoch + 2
    with single_rank_group():
        expected, metrics = train_on_ranks(data.directory, bpr_job(loss), steps)
    split = bpr_job(loss, sharding={"item": "row_wise", "user": "row_wise"})
    (found, ranked), _ = ranks(2).run(train_on_ranks, data.directory, split, steps)
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < 1e-9, name
    assert ranked == metrics


def negatives_of(data, epoch):
    """Return the negatives and the targets of each batch."""
    return [
        (batch.features["item__negative"], batch.features["item__target"].values().numpy())
        for batch in data.train_batches(epoch, 0, 0, 1)
    ]


@pytest.mark.parametrize("loss", ["uniform", "popularity", "in_batch", "softmax"])
def test_all_targets_of_a_batch_have_the_same_items(rounds, tmp_path, loss):
    job = job_of(loss, batch_size=8)
    data = prepare(rounds, job, tmp_path / "data")
    batches = [batch for epoch in range(200) for batch in negatives_of(data, epoch)]
    for negatives, targets in batches:
        items = negatives.values().numpy()
        if loss == "softmax":
            assert sorted(items) == list(range(2, NUM_ITEMS + 2))
        else:
            assert len(items) == 12
        assert negatives.lengths().tolist()[1:] == [0] * (len(negatives.lengths()) - 1)
        if loss == "in_batch":
            assert set(items) <= set(targets)
    drawn = np.concatenate([negatives.values().numpy() for negatives, _ in batches])
    counts = np.asarray(data.row_counts("item"))[2:].astype(float)
    expected = {"popularity": counts**0.5, "in_batch": None}.get(loss, np.ones(NUM_ITEMS))
    if expected is not None:
        share = np.bincount(drawn, minlength=NUM_ITEMS + 2)[2:] / len(drawn)
        # Of some 19,000 draws over 24 items.
        np.testing.assert_allclose(share, expected / expected.sum(), atol=0.006)


def test_sse_swaps_no_shared_item(rounds, tmp_path):
    job = job_of("uniform", sse={"label": {"probability": 0.1}})
    assert sse_configs(job, prepare(rounds, job, tmp_path / "data")).keys() == {"item__target"}


def test_a_sample_of_users_is_ranked_after_each_epoch_and_all_at_the_end(rounds, tmp_path, monkeypatch):
    metrics = ["hit_rate_10_full", "ndcg_10_full"]
    whole = {"split": {"kind": "per_user_last"}, "metrics": metrics}
    stopping = {"early_stopping": {"metric": "ndcg_10_full", "patience": 5}}
    data = prepare(rounds, job_of("softmax", evaluation=whole), tmp_path / "data")
    job = job_of("softmax", evaluation=whole | {"sample_users": 100}, regularizers=stopping, epochs=3)
    with single_rank_group():
        trainer = trainer_of(job, data)
        monkeypatch.setattr(trainer.evaluator, "evaluate", sampled_by_six(trainer.evaluator.evaluate))
        trainer.train()
        found = [(figures["epoch"], figures["split"], figures.get("examples")) for figures in trainer.history]
        plain = trainer_of(job_of("softmax", evaluation=whole, regularizers={}, epochs=3), data)
        plain.train()
    of_epochs = [(epoch, *rest) for epoch in (1, 2, 3) for rest in (("train", None), ("validation", 10))]
    assert found == [*of_epochs, (3, "validation", 60), (3, "test", 60)]
    assert trainer.history[-1] == plain.history[-1]


def sampled_by_six(evaluate):
    """The evaluator of a job with more users: a sample is a sixth of them."""
    return lambda split, sample_users=None: evaluate(split, sample_users and 10)


def refused(of, message, **model):
    with pytest.raises(SpecError, match=message):
        job_of(of, model={"kind": "sasrec", "loss": "bce", "embedding_dim": 8, "length": 6} | LOSSES[of] | model)


def test_settings_that_a_loss_has_no_use_for_are_named():
    refused("softmax", "softmax scores all items for each target", negatives=5)
    refused("softmax", "softmax has none", calibration=0.1)
    refused("softmax", "softmax scores all items for each target", negative_distribution="uniform")
    refused("uniform", "share_negatives: true", negatives=101, share_negatives=False)
    refused("gbce", "gbce assumes uniform draws", negative_distribution="popularity")
    refused("cosine_contrastive", "normalize: true", normalize=False)
    refused("gbce", "top1", loss="top1")
    refused("uniform", "4096", negatives=5000)
