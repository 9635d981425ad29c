"""item2vec, SASRec and GRU4Rec: formulas, gradients, tiny sets, ranks, resumes, ranking, publishing."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from benchmarks.support.gathered import gather_table
from tests.support.model_specs import model_spec, table_columns
from tests.support.models import make_model
from tests.trainer.trainings import differ, snapshot, train_in_parts, train_on_ranks, trainer_of
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build, sse_configs
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.metrics import Ranking, rank_of
from trainer.models.gru4rec import GRU4Rec
from trainer.models.hstu import HSTU
from trainer.models.layers.dropout import keep_mask
from trainer.models.sasrec import SASRec
from trainer.publishing.publish import item_vectors
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

# Whole jobs.
pytestmark = pytest.mark.slow

KEYS = ("item", "item__target", "item__negative")
NUM_ROWS, DIM, LENGTH = 9, 6, 4


class Rows(nn.Module):
    """A table in float64, a row for each id (TorchRec's own unsharded collection gives float32 alone)."""

    def __init__(self, columns: int):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(NUM_ROWS, columns, generator=generator, dtype=torch.float64))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        # Row 0 is padding: zeros that do not learn.
        table = torch.cat([torch.zeros_like(self.weight[:1]), self.weight[1:]])
        return {key: JaggedTensor(table[features[key].values()], lengths=features[key].lengths()) for key in KEYS}


def batch_of(samples, step=0, sample_offset=0):
    lists = [[sample[number] for sample in samples] for number in range(3)]
    features = KeyedJaggedTensor(
        keys=list(KEYS),
        values=torch.tensor([i for one in lists for ids in one for i in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for one in lists for ids in one], dtype=torch.int64),
        stride=len(samples),
    )
    return SimpleNamespace(
        features=features, labels=torch.ones(len(samples)), step=step, sample_offset=sample_offset, seen=None
    )


GRAMS = [([2], [3, 4], [5, 6, 0, 2]), ([7], [], []), ([3], [3], [8, 8])]  # 0: a draw that hit its target
PIECES = [
    ([2, 3, 4, 5], [3, 4, 5, 6], [7, 8, 2, 2, 8, 7, 3, 4]),
    ([6], [2], [8, 8]),
    ([3, 3], [3, 4], [5, 6, 7, 8]),
]


def sigmoid_loss(score: torch.Tensor, target: bool) -> torch.Tensor:
    return -torch.log(torch.sigmoid(score if target else -score))


def assert_same_gradients(parameters, losses, plain) -> None:
    """Of two losses, with weights that tell samples apart."""
    factors = torch.arange(1.0, len(losses) + 1, dtype=torch.float64)
    torch.testing.assert_close(losses, plain, rtol=1e-12, atol=1e-12)
    first = torch.autograd.grad((factors * losses).sum(), parameters, retain_graph=True)
    second = torch.autograd.grad((factors * plain).sum(), parameters)
    assert all(float(gradient.abs().max()) > 0 for gradient in second)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# --- item2vec --------------------------------------------------------------------------------------------------------


def test_item2vec_is_skip_gram_with_negative_sampling():
    embeddings = Rows(table_columns("item2vec", "item", DIM))
    model = make_model("item2vec", embeddings, KEYS, embedding_dim=DIM)
    inputs, outputs = embeddings.weight[:, :DIM], embeddings.weight[:, DIM:]
    plain = []
    for (centre,), targets, negatives in GRAMS:
        total = torch.zeros((), dtype=torch.float64)
        for target in targets:
            total = total + sigmoid_loss(inputs[centre] @ outputs[target], True)
        for negative in negatives:
            if negative:
                total = total + sigmoid_loss(inputs[centre] @ outputs[negative], False)
        plain.append(total)
    losses = model.loss(batch_of(GRAMS))
    assert losses.shape == (3,)
    assert losses[1] == 0
    assert_same_gradients([embeddings.weight], losses, torch.stack(plain))


def test_item2vec_has_two_vectors_for_each_item_and_nothing_else():
    model = make_model("item2vec", Rows(table_columns("item2vec", "item", DIM)), KEYS, embedding_dim=DIM)
    assert sum(p.numel() for p in model.parameters()) == 2 * NUM_ROWS * DIM
    assert model.dense_parameters() == []


def test_item2vec_asks_with_the_mean_of_what_was_read():
    embeddings = Rows(2 * DIM)
    model = make_model("item2vec", embeddings, KEYS, embedding_dim=DIM)
    weight = embeddings.weight
    scores = model(batch_of([([2, 3], [4], []), ([], [5], [])]).features)
    expected = (weight[2, :DIM] + weight[3, :DIM]) / 2 @ weight[4, DIM:]
    torch.testing.assert_close(scores, torch.stack([expected, torch.zeros_like(expected)]))


# --- SASRec ----------------------------------------------------------------------------------------------------------


def sasrec(**settings) -> tuple[SASRec, Rows]:
    return stirred("sasrec", **settings)


def stirred(kind, **settings):
    embeddings = Rows(DIM)
    model = make_model(kind, embeddings, KEYS, embedding_dim=DIM, seed=3, length=LENGTH, **settings)
    with torch.no_grad():
        for parameter in model.parameters():  # also those that begin at 0 or 1
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return model, embeddings


def layer_norm(x, layer):
    return (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + layer.eps) * layer.weight + layer.bias


def plain_states(model: SASRec, weight: torch.Tensor, items: list[int], heads: int) -> list[torch.Tensor]:
    """F_t for each position, by the equations of the paper: one position and one head at a time."""
    x = [math.sqrt(DIM) * weight[item] for item in items]
    x = [state + model.positions[LENGTH - len(items) + t] for t, state in enumerate(x)]
    size = DIM // heads
    for block in model.blocks:
        query, key, value = block.query_key_value.weight.split(DIM)
        normed = [layer_norm(state, block.before_attention) for state in x]
        attended = []
        for t in range(len(x)):
            parts = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                scores = torch.stack([(query @ normed[t])[part] @ (key @ normed[s])[part] for s in range(t + 1)])
                shares = torch.softmax(scores / math.sqrt(size), 0)
                parts.append(sum(shares[s] * (value @ normed[s])[part] for s in range(t + 1)))
            attended.append(x[t] + torch.cat(parts))
        x = []
        for state in attended:
            inner = torch.relu(block.first.weight @ layer_norm(state, block.before_network) + block.first.bias)
            x.append(state + block.second.weight @ inner + block.second.bias)
    return [layer_norm(state, model.last) for state in x]


@pytest.mark.parametrize(("loss", "heads", "blocks"), [("bce", 1, 2), ("sampled_softmax", 2, 1)])
def test_sasrec_is_the_paper_written_out(loss, heads, blocks):
    model, embeddings = sasrec(loss=loss, heads=heads, blocks=blocks)
    weight = embeddings.weight
    plain = []
    for items, targets, negatives in PIECES:
        total = torch.zeros((), dtype=torch.float64)
        states = plain_states(model, weight, items, heads)
        for t, (state, target) in enumerate(zip(states, targets, strict=True)):
            drawn = [state @ weight[row] for row in negatives[2 * t : 2 * t + 2]]
            if loss == "bce":
                total = total + sigmoid_loss(state @ weight[target], True) + sum(sigmoid_loss(s, False) for s in drawn)
            else:
                total = total - torch.log_softmax(torch.stack([state @ weight[target], *drawn]), 0)[0]
        plain.append(total / LENGTH)
    assert_same_gradients(list(model.parameters()), model.loss(batch_of(PIECES)), torch.stack(plain))
    scores = model(batch_of([([2, 3, 4], [7], []), ([6], [2], [])]).features)
    expected = [
        plain_states(model, weight, items, heads)[-1] @ weight[row] for items, row in (([2, 3, 4], 7), ([6], 2))
    ]
    torch.testing.assert_close(scores, torch.stack(expected))


@pytest.mark.parametrize("blocks", [1, 3])
def test_sasrec_has_the_parameters_of_the_paper(blocks):
    model, _ = sasrec(blocks=blocks)
    attention, network, norms = 3 * DIM**2, 2 * (DIM**2 + DIM), 4 * DIM
    expected = NUM_ROWS * DIM + LENGTH * DIM + blocks * (attention + network + norms) + 2 * DIM
    assert sum(p.numel() for p in model.parameters()) == expected
    assert len(model.dense_parameters()) == len(list(model.parameters())) - 1


# --- GRU4Rec ---------------------------------------------------------------------------------------------------------


def plain_gru(model: GRU4Rec, weight: torch.Tensor, items: list[int]) -> list[torch.Tensor]:
    """h_t for each position, by the equations of the docstring. torch.nn.GRU holds those of r, z and g in this order,
    and its z is 1 - z."""
    x = [weight[item] for item in items]
    for layer in model.layers:
        (wr, wz, wg), (ur, uz, ug) = layer.weight_ih_l0.split(DIM), layer.weight_hh_l0.split(DIM)
        (br, bz, bg), (cr, cz, cg) = layer.bias_ih_l0.split(DIM), layer.bias_hh_l0.split(DIM)
        h, states = torch.zeros(DIM, dtype=torch.float64), []
        for one in x:
            z = 1 - torch.sigmoid(wz @ one + bz + uz @ h + cz)
            r = torch.sigmoid(wr @ one + br + ur @ h + cr)
            g = torch.tanh(wg @ one + bg + r * (ug @ h + cg))
            h = (1 - z) * h + z * g
            states.append(h)
        x = states
    return x


def plain_loss(loss: str, positive: torch.Tensor, negatives: list[torch.Tensor]) -> torch.Tensor:
    if loss == "bce":
        return sigmoid_loss(positive, True) + sum(sigmoid_loss(one, False) for one in negatives)
    if loss == "sampled_softmax":
        return -torch.log_softmax(torch.stack([positive, *negatives]), 0)[0]
    if loss == "bpr":
        return sum(-torch.log(torch.sigmoid(positive - one)) for one in negatives) / len(negatives)
    return sum(torch.sigmoid(one - positive) + torch.sigmoid(one**2) for one in negatives) / len(negatives)


@pytest.mark.parametrize(("loss", "layers"), [("top1", 2), ("bpr", 1), ("bce", 1), ("sampled_softmax", 1)])
def test_gru4rec_is_the_paper_written_out(loss, layers):
    model, embeddings = stirred("gru4rec", loss=loss, gru_layers=layers)
    weight, plain = embeddings.weight, []
    for items, targets, negatives in PIECES:
        total = torch.zeros((), dtype=torch.float64)
        for t, (state, target) in enumerate(zip(plain_gru(model, weight, items), targets, strict=True)):
            drawn = [state @ weight[row] for row in negatives[2 * t : 2 * t + 2]]
            total = total + plain_loss(loss, state @ weight[target], drawn)
        plain.append(total / LENGTH)
    assert_same_gradients(list(model.parameters()), model.loss(batch_of(PIECES)), torch.stack(plain))
    scores = model(batch_of([([2, 3, 4], [7], []), ([6], [2], []), ([], [3], [])]).features)
    expected = [plain_gru(model, weight, [2, 3, 4])[-1] @ weight[7], plain_gru(model, weight, [6])[-1] @ weight[2]]
    torch.testing.assert_close(scores, torch.stack([*expected, torch.zeros_like(expected[0])]))


@pytest.mark.parametrize("layers", [1, 3])
def test_gru4rec_has_the_parameters_of_the_paper_and_biases(layers):
    model, _ = stirred("gru4rec", gru_layers=layers)
    matrices, biases = layers * 6 * DIM**2, layers * 6 * DIM
    assert sum(p.numel() for _, p in model.dense_parameters()) == matrices + biases
    size = model_spec("gru4rec", embedding_dim=DIM, length=LENGTH, gru_layers=layers).size(3)
    assert size.parameters == matrices + biases
    assert table_columns("gru4rec", "item", DIM) == DIM


# --- HSTU ------------------------------------------------------------------------------------------------------------


def plain_hstu(model: HSTU, weight: torch.Tensor, items: list[int], heads: int) -> list[torch.Tensor]:
    """F_t for each position, by equations 1 to 3 of the paper: one position and one head at a time."""

    def silu(x):
        return x / (1 + torch.exp(-x))

    def norm(x):
        return (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)

    x = [math.sqrt(DIM) * weight[item] + model.positions[LENGTH - len(items) + t] for t, item in enumerate(items)]
    size = DIM // heads
    for layer in model.layers:
        gate, value, query, key = zip(
            *(silu(layer.first.weight @ norm(state) + layer.first.bias).split(DIM) for state in x), strict=True
        )
        for t, state in enumerate(list(x)):
            mixed = torch.zeros(DIM, dtype=torch.float64)
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                for s in range(t + 1):
                    score = silu(query[t][part] @ key[s][part] + layer.distance_bias[t - s]) / LENGTH
                    mixed = mixed + torch.nn.functional.pad(score * value[s][part], (part.start, DIM - part.stop))
            x[t] = state + layer.second.weight @ (norm(mixed) * gate[t]) + layer.second.bias
    return [layer_norm(state, model.last) for state in x]


@pytest.mark.parametrize(("loss", "heads", "blocks"), [("bce", 1, 2), ("sampled_softmax", 2, 1)])
def test_hstu_is_the_paper_written_out(loss, heads, blocks):
    model, embeddings = stirred("hstu", loss=loss, heads=heads, blocks=blocks)
    weight, plain = embeddings.weight, []
    for items, targets, negatives in PIECES:
        total = torch.zeros((), dtype=torch.float64)
        for t, (state, target) in enumerate(zip(plain_hstu(model, weight, items, heads), targets, strict=True)):
            drawn = [state @ weight[row] for row in negatives[2 * t : 2 * t + 2]]
            total = total + plain_loss(loss, state @ weight[target], drawn)
        plain.append(total / LENGTH)
    assert_same_gradients(list(model.parameters()), model.loss(batch_of(PIECES)), torch.stack(plain))
    scores = model(batch_of([([2, 3, 4], [7], []), ([6], [2], [])]).features)
    expected = [plain_hstu(model, weight, items, heads)[-1] @ weight[row] for items, row in (([2, 3, 4], 7), ([6], 2))]
    torch.testing.assert_close(scores, torch.stack(expected))


@pytest.mark.parametrize("blocks", [1, 3])
def test_hstu_has_the_parameters_that_its_size_says(blocks):
    model, _ = stirred("hstu", blocks=blocks)
    expected = LENGTH * DIM + blocks * (5 * (DIM**2 + DIM) + LENGTH) + 2 * DIM
    assert sum(p.numel() for _, p in model.dense_parameters()) == expected
    assert model_spec("hstu", embedding_dim=DIM, length=LENGTH, blocks=blocks).size(3).parameters == expected


# --- both ------------------------------------------------------------------------------------------------------------


def test_a_rank_without_samples_computes_nothing_that_hurts():
    item2vec = make_model("item2vec", Rows(2 * DIM), KEYS, embedding_dim=DIM)
    for model in (*(stirred(kind, dropout=0.5)[0] for kind in ("sasrec", "gru4rec", "hstu")), item2vec):
        loss = model.loss(batch_of([])).sum()
        loss.backward()
        assert loss == 0


def test_dropout_is_a_function_of_seed_step_sample_and_position():
    """Whole and in parts, at the left and at the right of the tensor, and as often as asked for."""
    where = {"seed": 5, "step": 7, "site": 2}
    positions = torch.arange(40).repeat(60, 1)
    samples = torch.arange(100, 160)
    keep = keep_mask(positions, samples, 10, 0.3, **where)
    assert abs(float(keep.double().mean()) - 0.7) < 4 * math.sqrt(0.3 * 0.7 / keep.numel())
    some = torch.tensor([50, 3, 20])
    part = keep_mask(positions[some, 15:], samples[some], 10, 0.3, **where)
    assert torch.equal(part, keep[some, 15:])
    for change in ({"seed": 6}, {"step": 8}, {"site": 3}):
        assert not torch.equal(keep_mask(positions, samples, 10, 0.3, **{**where, **change}), keep)


@pytest.mark.parametrize("kind", ["sasrec", "gru4rec", "hstu"])
def test_dropout_is_of_training_alone_and_the_mean_stays(kind):
    model, _ = stirred(kind, dropout=0.4)
    plain = model.eval().loss(batch_of(PIECES))
    assert torch.equal(model.loss(batch_of(PIECES, step=9)), plain)
    model.train()
    first, again, other = (model.loss(batch_of(PIECES, step=step)) for step in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, plain)
    # Sample 1 of the batch is sample 0 of a batch that begins with it.
    alone = model.loss(batch_of(PIECES[1:], step=1, sample_offset=1))
    torch.testing.assert_close(alone, first[1:])


def test_what_does_not_fit_is_named():
    for kind in ("item2vec", "sasrec", "gru4rec", "hstu"):
        with pytest.raises(ValueError, match="item__negative"):
            make_model(kind, Rows(DIM), ["item", "item__target"], embedding_dim=DIM)
    with pytest.raises(ValueError, match="4 heads do not divide 6"):
        make_model("sasrec", Rows(DIM), KEYS, embedding_dim=DIM, heads=4)


# --- ranking ---------------------------------------------------------------------------------------------------------


def test_ranks_by_hand():
    others = np.array([[0.1, 0.5, 0.9], [0.5, 0.5, 0.5], [0.0, 0.1, 0.2], [math.nan, 0.0, 0.0]])
    ranks = rank_of(np.array([0.4, 0.5, 0.3, 0.1]), others)
    assert ranks.tolist() == [2, 3, 0, 1]  # ties, and what cannot be compared, against the target
    assert rank_of(np.array([math.nan]), others[:1]).tolist() == [3]
    ranking = Ranking.of_single(ranks)
    assert ranking.hit_rate(2).mean() == 0.5
    assert ranking.ndcg(3).mean() == pytest.approx((1 / math.log2(4) + 0 + 1 + 1 / math.log2(3)) / 4)


@pytest.mark.parametrize("kind", ["item2vec", "sasrec", "gru4rec", "hstu"])
def test_evaluation_ranks_as_a_loop_over_all_items_does(kind):
    columns = table_columns(kind, "item", DIM)
    embeddings = Rows(columns)
    model = make_model(kind, embeddings, KEYS, embedding_dim=DIM).eval()
    samples = [([2, 3], [4], [5, 6, 7]), ([8], [3], [2, 4, 5]), ([5, 6], [4], [7, 8, 8])]
    batch = batch_of(samples)
    before = [[2, 3], [7, 8], [3, 5, 6]]
    batch.seen = torch.tensor([[number, row] for number, rows in enumerate(before) for row in rows])
    data = SimpleNamespace(tables={"item": SimpleNamespace(num_rows=NUM_ROWS)}, keys=[SimpleNamespace(table="item")])
    rank, below, full = (part.tolist() for part in model.evaluate(batch, model.catalogue(data)))
    for number, (read, (target,), negatives) in enumerate(samples):
        scores = [model(batch_of([(read, [row], [])]).features).item() for row in range(NUM_ROWS)]
        others = [row for row in range(2, NUM_ROWS) if row != target and row not in before[number]]
        assert rank[number] == sum(scores[row] >= scores[target] for row in negatives)
        assert below[number] == pytest.approx(sum(scores[row] < scores[target] for row in negatives) / 3)
        assert full[number] == sum(scores[row] >= scores[target] for row in others)
    assert bool(torch.isnan(model.evaluate(batch)[2]).all())


@pytest.mark.parametrize("kind", ["item2vec", "sasrec", "gru4rec", "hstu"])
def test_a_target_that_training_never_had_is_found_by_no_score(kind):
    embeddings = Rows(table_columns(kind, "item", DIM))
    model = make_model(kind, embeddings, KEYS, embedding_dim=DIM).eval()
    batch = batch_of([([5, 6], [1], [7, 8, 8]), ([2], [1], [3, 4, 5])])
    batch.seen = torch.tensor([[0, 5], [0, 6], [1, 2]])
    queries = model.queries(embeddings(batch.features))
    with torch.no_grad():  # the unknown row of the best score by far
        embeddings.weight[1, :DIM] = 1000.0 * queries[0]
    data = SimpleNamespace(tables={"item": SimpleNamespace(num_rows=NUM_ROWS)}, keys=[SimpleNamespace(table="item")])
    rank, below, full = (part.tolist() for part in model.evaluate(batch, model.catalogue(data)))
    assert (rank, below, full) == ([math.inf] * 2, [0.0] * 2, [math.inf] * 2)


# --- training --------------------------------------------------------------------------------------------------------

NUM_ITEMS = 24
MODEL = {
    "item2vec": {"kind": "item2vec", "embedding_dim": 8, "window": 1, "negatives": 2},
    "sasrec": {"kind": "sasrec", "loss": "bce", "embedding_dim": 8, "length": 6, "blocks": 1, "negatives": 2},
    "gru4rec": {"kind": "gru4rec", "loss": "bce", "embedding_dim": 8, "length": 6, "negatives": 2},
    "hstu": {"kind": "hstu", "loss": "bce", "embedding_dim": 8, "length": 6, "heads": 2, "negatives": 2},
}


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """Each user goes round the items, from anywhere: what comes next follows from the last one."""
    path = tmp_path_factory.mktemp("rounds") / "rounds.parquet"
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(60), 14)
    time = np.tile(np.arange(14), 60)
    item = (np.repeat(rng.integers(0, NUM_ITEMS, 60), 14) + time) % NUM_ITEMS
    pq.write_table(pa.table({"user": user, "item": item, "t": time, "liked": np.ones_like(user)}), path)
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    return parse_dataset(
        {"name": "rounds", "uri": str(path), "features": features, "label": {"column": "liked"}, "order": "t"}
    )


def job_of(kind, model=None, **changes):
    document = {
        "name": "rounds-job", "dataset": {"name": "rounds"}, "model": MODEL[kind] | (model or {}), "batch_size": 32,
        "optimizer": {"kind": "adam", "learning_rate": 0.02}, "dense_optimizer": {"learning_rate": 0.01}, "epochs": 2,
        "evaluation": {"split": {"kind": "per_user_last"}},
        "regularizers": {"dropout": 0.0 if kind == "item2vec" else 0.2},
    }  # fmt: skip
    return parse_job(document | changes)


@pytest.mark.parametrize("kind", MODEL)
def test_metrics_that_are_asked_for_are_those_of_the_ranks(rounds, tmp_path, kind):
    metrics = ["auc", "mrr", "precision_5", "recall_20_full", "ndcg_1_full", "mrr_full"]
    evaluation = {"split": {"kind": "per_user_last"}, "metrics": metrics, "intervals": {"replicates": 20}}
    job = job_of(kind, evaluation=evaluation)
    data = prepare(rounds, job, tmp_path / "data")
    with single_rank_group():
        trainer = trainer_of(job, data)
        found = trainer.evaluate("test")
        model, catalogue = trainer.sharded.module, trainer.sharded.module.catalogue(data)
        with torch.no_grad():
            parts = [model.evaluate(batch, catalogue) for batch in data.eval_batches("test", 20)]
    rank, below, full = (torch.cat(part).double().numpy() for part in zip(*parts, strict=True))
    expected = {
        "auc": below.mean(), "mrr": (1 / (rank + 1)).mean(), "precision_5": (rank < 5).mean() / 5,
        "recall_20_full": (full < 20).mean(), "ndcg_1_full": (full < 1).mean(), "mrr_full": (1 / (full + 1)).mean(),
    }  # fmt: skip
    assert {name: found[name] for name in metrics} == pytest.approx(expected, rel=1e-12)
    assert found["mrr_low"] < found["mrr"] < found["mrr_high"]
    assert list(found) == [part for name in metrics for part in (name, f"{name}_low", f"{name}_high")] + ["examples"]


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("item2vec", "bce"),
        ("sasrec", "bce"),
        ("sasrec", "sampled_softmax"),
        ("gru4rec", "bpr"),
        ("hstu", "sampled_softmax"),
    ],
)
def test_a_tiny_set_is_learned_by_heart(rounds, tmp_path, kind, loss):
    """The next item of 24 is found: first among all, or first or second (item2vec sees no direction)."""
    ordered = kind != "item2vec"
    job = job_of(kind, {"loss": loss}, epochs=40 if ordered else 15, regularizers={})
    data = prepare(rounds, job, tmp_path / "data")
    with single_rank_group():
        trainer = trainer_of(job, data)
        trainer.train()
    losses = [metric["loss"] for metric in trainer.history if metric["split"] == "train"]
    test = trainer.history[-1]
    assert losses[-1] < losses[0] / 3
    assert test["split"] == "test"
    assert test["examples"] == 60
    # Of 24 items at most 8 were not seen: any order of them is a hit, but not at the top.
    assert test["ndcg_10_full"] > (0.95 if ordered else 0.6)
    assert test["ndcg_10"] > 0.6


@pytest.mark.parametrize("kind", MODEL)
def test_sse_swaps_what_is_read_or_what_is_predicted(rounds, tmp_path, kind):
    """p_x under ``item``; p_y, targets and their negatives, under ``label``; both at once."""
    both = {"item": {"probability": 0.2}, "label": {"probability": 0.1}}
    data = prepare(rounds, job_of(kind), tmp_path / "data")
    for sse, expected in (
        ({"item": both["item"]}, {"item": 0.2}),
        ({"label": both["label"]}, {"item__target": 0.1, "item__negative": 0.1}),
        (both, {"item": 0.2, "item__target": 0.1, "item__negative": 0.1}),
    ):
        found = sse_configs(job_of(kind, sse=sse), data)
        assert {name: config.probability for name, config in found.items()} == expected


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [("item2vec", "row_wise"), ("sasrec", "row_wise"), ("sasrec", None), ("gru4rec", "row_wise"), ("hstu", "row_wise")],
)
def test_two_ranks_train_and_rank_as_one_does(rounds, ranks, tmp_path, kind, sharding):
    """SSE on both sides, dropout, micro-batches, and the last batch of an epoch, which leaves parts empty."""
    sse = {"item": {"probability": 0.2}, "label": {"probability": 0.1}}
    size = 240 if kind == "item2vec" else 97
    job = job_of(kind, sse=sse, batch_size=size)
    data = prepare(rounds, job, tmp_path / "data")
    steps = data.steps_per_epoch + 2
    with single_rank_group():
        expected, metrics = train_on_ranks(data.directory, job, steps)
    plan = {} if sharding is None else {"sharding": {"item": sharding}}
    split = job_of(kind, sse=sse, batch_size=size, micro_batches=2, **plan)
    (found, ranked), nothing = ranks(2).run(train_on_ranks, data.directory, split, steps)
    assert nothing is None
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # float64 sums in another order, over some steps of Adam.
        assert float((found[name] - value).abs().max()) < 1e-9, name
    assert ranked == metrics


@pytest.mark.parametrize("kind", MODEL)
def test_stopping_and_resuming_changes_no_bit(rounds, tmp_path, kind):
    job = job_of(kind, sse={"item": {"probability": 0.1}})
    data = prepare(rounds, job, tmp_path / "data")
    cuts = [3, data.steps_per_epoch, data.steps_per_epoch + 2]
    with single_rank_group():
        whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
        parts, _ = train_in_parts(job, data, tmp_path / "parts", cuts)
        assert differ(snapshot(parts), snapshot(whole)) == []
    assert parts.history == whole.history


@pytest.mark.parametrize("kind", MODEL)
def test_a_run_publishes_the_vectors_that_it_trained_and_the_next_goes_on(rounds, tmp_path, small, kind):
    publish = {"collection": "rounds", "feature": "item", "gate": {"mode": "off"}}
    job = job_of(kind, publish=publish, evaluation={"split": {"kind": "per_user_last"}, "metrics": ["ndcg_10", "auc"]})
    directory = write_run(tmp_path / "run", run_id="run", job=job, dataset=rounds, store_url=str(tmp_path / "store"))
    run = read_run(directory)
    assert execute(run, start_ranks) == 0
    vectors = item_vectors(run, latest_valid(run.checkpoints))
    with single_rank_group():
        sharded = build(job, PreparedData.open(run.data), alpha=None)
        sharded.load_from(latest_valid(run.checkpoints))
        rows = gather_table(sharded, "item", decay=False).rows
    assert (len(vectors), vectors.dim) == (NUM_ITEMS, 8)
    np.testing.assert_array_equal(vectors.vectors, rows[2:, :8].numpy())
    assert vectors.evidence.all()
    (metric,) = (m for m in small.metrics(run.directory, "test") if m["epoch"] == 2)
    assert metric.keys() >= {"ndcg_10", "auc", "examples"}
    assert not metric.keys() & {"logloss", "hit_rate_10"}
    assert small.events(run.directory, "publication")[-1]["status"] == "published"

    def next_run(name, job):
        folder = write_run(
            tmp_path / name,
            run_id=name,
            job=job,
            dataset=rounds,
            store_url=str(tmp_path / "store"),
            parent_version="v000001",
            init_checkpoint=str(run.checkpoints),
        )
        return read_run(folder)

    # Another seed would start elsewhere; one that starts from the parent stays near.
    warm = next_run("next", job.model_copy(update={"seed": 5, "epochs": 1}))
    assert execute(warm, start_ranks) == 0
    again = item_vectors(warm, latest_valid(warm.checkpoints))
    assert latest_valid(warm.checkpoints).extra["position"]["first_step"] > 0
    cosines = torch.cosine_similarity(torch.from_numpy(vectors.vectors), torch.from_numpy(again.vectors))
    assert float(cosines.mean()) > 0.9
    if kind != "item2vec":
        longer = job.model.model_copy(update={"length": 7})
        assert execute(next_run("longer", job.model_copy(update={"model": longer})), start_ranks) != 0
        error = small.events(tmp_path / "longer", "error")[-1]["message"]
        assert "model.length: the parent was trained with 6, the job asks for 7" in error
