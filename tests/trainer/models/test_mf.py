"""MF: its equation, its constant, gradients, parameters, a tiny set."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.model_specs import table_columns
from tests.support.models import make_model


def mf(lab, loss="bce"):
    model = lab.model("mf")
    model.loss_kind = loss
    return model


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_ratings_are_constant_biases_and_product(lab, loss):
    model, batch = mf(lab, loss), lab.batch()
    model.mu.fill_(0.7)
    users, items = model.embeddings.weights["user"], model.embeddings.weights["item"]
    expected = []
    for (user,), (item,) in zip(lab.lists["user"], lab.lists["item"], strict=True):
        p, q = users[user], items[item]
        product = sum(p[k] * q[k] for k in range(lab.dim))
        expected.append(0.7 + p[lab.dim] + q[lab.dim] + product)
    expected = torch.stack(expected)
    torch.testing.assert_close(model(batch.features), expected)
    y = lab.labels
    p = torch.sigmoid(expected)
    losses = (expected - y) ** 2 if loss == "mse" else -(y * p.log() + (1 - y) * (1 - p).log())
    torch.testing.assert_close(model.loss(batch), losses)


def test_without_biases_ratings_are_products_alone(lab):
    model, batch = lab.model("mf", biases=False), lab.batch()
    model.loss_kind = "mse"
    model.begin(SimpleNamespace(is_weighted=False, labels=lambda split: np.array([4.0, 5.0])))
    users, items = model.embeddings.weights["user"], model.embeddings.weights["item"]
    pairs = zip(lab.lists["user"], lab.lists["item"], strict=True)
    expected = torch.stack([users[user][: lab.dim] @ items[item][: lab.dim] for (user,), (item,) in pairs])
    torch.testing.assert_close(model(batch.features), expected)
    torch.testing.assert_close((model.user_side(batch.features) * model.item_side(batch.features)).sum(1), expected)
    model.loss(batch).sum().backward()
    assert not users.grad[:, lab.dim].any()
    assert users.grad[:, : lab.dim].any()


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_gradients_are_the_finite_differences(lab, loss):
    model, batch = mf(lab, loss), lab.batch()
    users, items = model.embeddings.weights["user"], model.embeddings.weights["item"]
    model.loss(batch).sum().backward()
    for weight, row in ((users, 3), (items, 5)):
        for column in (0, lab.dim):
            values = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    weight[row, column] += step
                    values.append(model.loss(batch).sum().item())
                    weight[row, column] -= step
            expected = (values[0] - values[1]) / 2e-6
            assert abs(expected) > 1e-3
            assert weight.grad[row, column].item() == pytest.approx(expected, rel=1e-6)


def test_there_is_a_bias_for_each_id_and_nothing_dense(lab):
    model = lab.model("mf")
    assert [table_columns("mf", name, 16) for name in ("user", "item")] == [17, 17]
    assert model.dense_parameters() == []
    assert [name for name, _ in model.named_buffers()] == ["mu"]


def test_the_constant_is_the_mean_label_or_its_log_odds(lab):
    def started(labels, loss):
        model = mf(lab, loss)
        model.begin(
            SimpleNamespace(is_weighted=False, labels=lambda split: {"train": np.array(labels, np.uint8)}[split])
        )
        return model.mu.item()

    assert started([1, 0, 0, 0], "mse") == 0.25
    assert started([1, 0, 0, 0], "bce") == pytest.approx(math.log(1 / 3))
    # One class alone: as if half an example were of the other.
    assert started([1, 1, 1, 1], "bce") == pytest.approx(math.log(7))
    assert started([], "bce") == 0


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_a_tiny_set_is_learned_by_heart(lab, loss):
    model, batch = mf(lab, loss), lab.batch()
    optimizer = torch.optim.Adam([model.embeddings.weights[name] for name in ("user", "item")], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        found = model.loss(batch).mean()
        if found.item() < 0.02:
            return
        found.backward()
        optimizer.step()
    pytest.fail(f"a loss of {found.item():.3f} after 150 steps")


def test_missing_features_are_named(lab):
    with pytest.raises(ValueError, match=r"needs the features user and item: \['user'\] missing"):
        make_model("mf", lab.tables(5, pooled=True, zero=False), ["item"], embedding_dim=4)
