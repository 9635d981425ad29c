"""Models on TorchRec's own unsharded embeddings: formulas, gradients, the same initial weights everywhere."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding_bag, logsigmoid
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor

from tests.support.model_specs import table_columns
from tests.support.models import make_model
from trainer.models.item2vec import Item2Vec
from trainer.models.registry import BPR, DNN, MODELS, TwoTower
from trainer.models.sasrec import SASRec
from trainer.spec.models import registry

DIM = 4


class Embeddings(nn.Module):
    """Mean-pooled tables in float64 (TorchRec's own unsharded collection gives float32 alone)."""

    def __init__(self, tables: dict[str, list[str]], dims: dict[str, int]):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tables = tables
        self.weights = nn.ParameterDict(
            {name: torch.randn(6, dims.get(name, DIM), generator=generator, dtype=torch.float64) for name in tables}
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        keys, blocks = [], []
        for table, names in self.tables.items():
            for feature in names:
                jagged = features[feature]
                keys.append(feature)
                blocks.append(embedding_bag(jagged.values(), self.weights[table], jagged.offsets()[:-1], mode="mean"))
        return KeyedTensor(keys, [block.shape[1] for block in blocks], torch.cat(blocks, dim=1))


def collection(tables: dict[str, list[str]], dims: dict[str, int] | None = None) -> Embeddings:
    return Embeddings(tables, dims or {})


def features(**lists: list[list[int]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(lists),
        values=torch.tensor([i for rows in lists.values() for row in rows for i in row]),
        lengths=torch.tensor([len(row) for rows in lists.values() for row in rows], dtype=torch.int32),
    )


def rows(embeddings: Embeddings, table: str) -> torch.Tensor:
    return embeddings.weights[table]


CLICKS = features(user=[[1], [2], [3]], item=[[4], [5], [4]], history=[[1, 2], [], [3]])
LABELS = torch.tensor([1.0, 0.0, 1.0])
CLICK_TABLES = {"user": ["user"], "item": ["item", "history"]}
CLICK_FEATURES, PAIR_FEATURES = ("user", "item", "history"), ("user", "item", "item__negative")
PAIR_TABLES = {"user": ["user"], "item": ["item", "item__negative"]}
PAIRS = features(user=[[1], [2]], item=[[4], [5]], item__negative=[[3], [2]])


def test_registry_names_every_model():
    assert set(MODELS) == set(registry.MODELS)
    assert len(registry.MODEL_SPECS) == len(MODELS)
    older = {"dnn": DNN, "two_tower": TwoTower, "bpr": BPR, "item2vec": Item2Vec, "sasrec": SASRec}
    assert {kind: MODELS[kind] for kind in older} == older
    assert len(set(MODELS.values())) == len(MODELS)


def test_dnn_is_the_tower_over_all_pooled_embeddings():
    embeddings = collection(CLICK_TABLES)
    model = make_model("dnn", embeddings, CLICK_FEATURES, embedding_dim=DIM, hidden=(8, 3), seed=5)
    user, item = rows(embeddings, "user"), rows(embeddings, "item")
    history = torch.stack([(item[1] + item[2]) / 2, torch.zeros(DIM), item[3]])
    inputs = torch.cat([user[[1, 2, 3]], item[[4, 5, 4]], history], dim=1)
    logits = model(CLICKS)
    torch.testing.assert_close(logits, model.tower(inputs)[:, 0])
    batch = SimpleNamespace(features=CLICKS, labels=LABELS, shares=None)
    expected = -(LABELS * logsigmoid(logits) + (1 - LABELS) * logsigmoid(-logits))
    torch.testing.assert_close(model.loss(batch), expected)
    assert model.loss(batch).shape == (3,)


def test_two_tower_scores_by_the_item_row_itself():
    embeddings = collection(CLICK_TABLES)
    model = make_model("two_tower", embeddings, ["item", "user", "history"], embedding_dim=DIM, hidden=(8,), seed=5)
    with torch.no_grad():
        model.bias.fill_(0.25)
    item = rows(embeddings, "item")
    history = torch.stack([(item[1] + item[2]) / 2, torch.zeros(DIM), item[3]])
    user = model.tower(torch.cat([rows(embeddings, "user")[[1, 2, 3]], history], dim=1))
    torch.testing.assert_close(model(CLICKS), (user * item[[4, 5, 4]]).sum(1) + 0.25)


def test_bpr_loss_is_over_the_difference_of_scores():
    embeddings = collection(PAIR_TABLES, {"item": table_columns("bpr", "item", DIM)})
    model = make_model("bpr", embeddings, PAIR_FEATURES, embedding_dim=DIM)
    user, item, bias = (
        rows(embeddings, "user")[[1, 2]],
        rows(embeddings, "item")[:, :DIM],
        rows(embeddings, "item")[:, DIM],
    )
    positive, negative = (user * item[[4, 5]]).sum(1) + bias[[4, 5]], (user * item[[3, 2]]).sum(1) + bias[[3, 2]]
    batch = SimpleNamespace(features=PAIRS, labels=torch.ones(2), shares=None)
    torch.testing.assert_close(model(PAIRS), positive)
    torch.testing.assert_close(model.loss(batch), -logsigmoid(positive - negative))
    rated = features(user=[[1], [2]], item=[[4], [5]], item__negative=[[], []])
    scores, labels = model.evaluate(SimpleNamespace(features=rated, labels=torch.tensor([0.0, 1.0])))
    torch.testing.assert_close(scores, positive)
    assert labels.tolist() == [0, 1]
    assert model.dense_parameters() == []


@pytest.mark.parametrize("kind", ["dnn", "two_tower"])
def test_dense_weights_come_from_the_seed_alone(kind):
    def build(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        torch.rand(torch.randint(1, 50, ()).item())  # whatever the global generator was used for
        model = make_model(
            kind, collection(CLICK_TABLES), CLICK_FEATURES, embedding_dim=DIM, hidden=(8, 3), seed=seed, dtype=dtype
        )
        return {name: p.detach() for name, p in model.dense_parameters()}

    first, again, other, double = (
        build(3, torch.float32),
        build(3, torch.float32),
        build(4, torch.float32),
        build(3, torch.float64),
    )
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight.double(), double[name])
    assert any(not torch.equal(weight, other[name]) for name, weight in first.items())
    assert not any(name.startswith("embeddings") for name in first)


def test_building_a_model_leaves_the_global_generator_alone():
    embeddings = collection(CLICK_TABLES)
    before = torch.random.get_rng_state()
    make_model("dnn", embeddings, CLICK_FEATURES, embedding_dim=DIM, hidden=(8,), seed=9)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("kind", ["dnn", "two_tower", "bpr"])
def test_gradients_equal_finite_differences(kind):
    if kind == "bpr":
        embeddings = collection(PAIR_TABLES, {"item": DIM + 1})
        batch, names = SimpleNamespace(features=PAIRS, labels=torch.ones(2), shares=None), PAIR_FEATURES
    else:
        embeddings = collection(CLICK_TABLES)
        batch, names = SimpleNamespace(features=CLICKS, labels=LABELS, shares=None), CLICK_FEATURES
    model = make_model(kind, embeddings, names, embedding_dim=DIM, hidden=(5,), seed=1)
    model.loss(batch).sum().backward()
    weight = rows(embeddings, "item")
    for row, column in [(4, 0), (5, 3)]:
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[row, column] += step
                values.append(model.loss(batch).sum().item())
                weight[row, column] -= step
        assert weight.grad[row, column].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-9)


def test_missing_features_are_named():
    with pytest.raises(ValueError, match="item__negative"):
        make_model("bpr", collection({"user": ["user"], "item": ["item"]}), ["user", "item"], embedding_dim=DIM)
    with pytest.raises(ValueError, match="item"):
        make_model("two_tower", collection({"user": ["user"]}), ["user"], embedding_dim=DIM, hidden=())


def test_models_run_on_torchrecs_own_collection():
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=6, embedding_dim=table_columns("bpr", name, DIM), feature_names=names
        )
        for name, names in PAIR_TABLES.items()
    ]
    model = make_model("bpr", EmbeddingBagCollection(tables=tables), PAIR_FEATURES, embedding_dim=DIM)
    assert model(PAIRS).shape == (2,)
