"""Row optimizers against torch.optim, and settings that are refused. Against loops: tests/contracts/."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import (
    SGD,
    Adagrad,
    AdagradAR,
    Adam,
    AdamAR,
    AdamW,
    RMSprop,
    RMSpropAR,
    RowOptimizer,
    RowwiseAdam,
    RowwiseAdamAR,
)
from embeddings.tables.config import InitConfig, TableConfig

BACKENDS = ("reference", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("optimizer", "dense"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (Adam(0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
        (RMSprop(0.1), lambda p: torch.optim.RMSprop(p, lr=0.1)),
    ],
)
def test_equals_torch_when_every_row_is_touched(backend, optimizer, dense):
    tables = EmbeddingTables(
        [TableConfig("t", 6, 3, ("f",), init=InitConfig("normal", 1.0), first_live_row=0)],
        optimizer, backend=backend, dtype=torch.float64,
    )  # fmt: skip
    weight = nn.Parameter(tables.weight("t").clone())
    peer = dense([weight])
    generator = torch.Generator().manual_seed(0)
    for k in range(1, 30):
        grad = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        tables(torch.arange(6), torch.arange(7)).backward(grad)
        tables.step(k)
        weight.grad = grad
        peer.step()
    torch.testing.assert_close(tables.read("t"), weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazy_adam_is_sparse_adam(backend):
    """SparseAdam divides by sqrt(v) + eps before the bias correction of v; with a tiny eps the two are one."""
    tables = EmbeddingTables(
        [TableConfig("t", 20, 4, ("f",), init=InitConfig("normal", 1.0), first_live_row=0)],
        Adam(0.1, eps=1e-14, moments="lazy"), backend=backend, dtype=torch.float64,
    )  # fmt: skip
    peer = nn.Embedding(20, 4, sparse=True, dtype=torch.float64)
    peer.weight.data.copy_(tables.weight("t"))
    optimizer = torch.optim.SparseAdam(peer.parameters(), lr=0.1, eps=1e-14)
    generator = torch.Generator().manual_seed(0)
    for k in range(1, 100):
        ids = torch.randint(0, 20, (4,), generator=generator)
        grad = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        tables(ids, torch.arange(5)).backward(grad)
        tables.step(k)
        optimizer.zero_grad()
        peer(ids).backward(grad)
        optimizer.step()
    torch.testing.assert_close(tables.weight("t"), peer.weight.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazy_rowwise_adam_is_fbgemms_partial_rowwise_adam(backend):
    """Its rule as FBGEMM writes it, row by row; its operator for CPUs is deprecated and raises, so it is not asked."""
    rate, beta1, beta2, eps, dim = 0.1, 0.9, 0.999, 1e-8, 7
    tables = EmbeddingTables(
        [TableConfig("t", 20, dim, ("f",), init=InitConfig("normal", 1.0), first_live_row=0)],
        RowwiseAdam(rate, beta1, beta2, eps, moments="lazy"), backend=backend, dtype=torch.float64,
    )  # fmt: skip
    weight = tables.weight("t").clone()
    momentum1, momentum2 = torch.zeros_like(weight), torch.zeros(20, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for iteration in range(1, 100):
        ids = torch.randperm(20, generator=generator)[:4]
        grad = torch.randn(4, dim, generator=generator, dtype=torch.float64)
        tables(ids, torch.arange(5)).backward(grad)
        tables.step(iteration)
        for row, g in zip(ids.tolist(), grad, strict=True):
            g_avg_square = float(g @ g) / dim
            momentum2[row] = beta2 * momentum2[row] + (1.0 - beta2) * g_avg_square
            v_hat_t = momentum2[row] / (1.0 - beta2**iteration)
            momentum1[row] = beta1 * momentum1[row] + (1.0 - beta1) * g
            weight[row] -= rate * (momentum1[row] / (1.0 - beta1**iteration) / (v_hat_t.sqrt() + eps))
    torch.testing.assert_close(tables.weight("t"), weight, rtol=1e-11, atol=1e-11)
    assert tables.state("t")["v"].shape == (20,)
    torch.testing.assert_close(tables.state("t")["v"], momentum2, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rowwise_adam_is_adam_where_all_elements_have_one_square(backend):
    """Dense moments: the same closed form for what idle rows owe."""
    pair = [
        EmbeddingTables(
            [TableConfig("t", 8, 5, ("f",), init=InitConfig("normal", 1.0), first_live_row=0)],
            optimizer, backend=backend, dtype=torch.float64,
        )
        for optimizer in (AdamAR(0.1, alpha=1e-3), RowwiseAdamAR(0.1, alpha=1e-3))
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for k in range(1, 60):
        ids = torch.randperm(8, generator=generator)[: 1 + k % 3]
        signs = torch.randn(len(ids), 5, generator=generator, dtype=torch.float64).sign()
        grad = signs * torch.rand(len(ids), 1, generator=generator, dtype=torch.float64)
        for tables in pair:
            tables(ids, torch.arange(len(ids) + 1)).backward(grad)
            tables.step(k)
    torch.testing.assert_close(pair[1].read("t"), pair[0].read("t"), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pair[1].state("t")["v"], pair[0].state("t")["v"][:, 0], rtol=1e-12, atol=0)


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def clicks(num_steps: int = 200, batch: int = 128, rows: int = 2000) -> tuple[Batches, int]:
    """Zipf ids of three features and clicks that depend on them; and the number of rows of each table."""
    generator = np.random.default_rng(11)
    taste = generator.standard_normal((3, rows))
    batches = []
    for _ in range(num_steps):
        ids = np.minimum(generator.zipf(1.2, (3, batch)), rows - 1)
        logit = sum(taste[f, ids[f]] for f in range(3))
        label = generator.random(batch) < 1 / (1 + np.exp(-logit))
        batches.append((torch.from_numpy(ids), torch.from_numpy(label).double()))
    return batches, rows


def amazon_sports(folder: Path, num_steps: int = 200, batch: int = 512) -> tuple[Batches, int]:
    """Users and items of the file's interactions in random order, half of them with a random item instead, label 0."""
    table = pq.read_table(folder / "amazon_sports.parquet", columns=["user", "item"])
    generator = np.random.default_rng(0)
    chosen = generator.choice(table.num_rows, num_steps * batch, replace=False)
    user, item = (np.unique(table[name].to_numpy(), return_inverse=True)[1][chosen] for name in ("user", "item"))
    label = generator.random(len(chosen)) < 0.5
    item = np.where(label, item, generator.integers(0, item.max() + 1, len(chosen)))
    ids = torch.from_numpy(np.stack([user, item]).reshape(2, num_steps, batch).transpose(1, 0, 2).copy())
    labels = torch.from_numpy(label.reshape(num_steps, batch)).double()
    return list(zip(ids, labels, strict=True)), int(max(user.max(), item.max())) + 1


def tower(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1)).double()


def train_ours(data: tuple[Batches, int], optimizer: RowOptimizer, backend: str) -> torch.Tensor:
    batches, rows = data
    features = [f"f{i}" for i in range(len(batches[0][0]))]
    tables = EmbeddingTables(
        [TableConfig(name, rows, 8, (name,), first_live_row=0) for name in features],
        optimizer,
        backend=backend,
        dtype=torch.float64,
    )
    mlp = tower(8 * len(features))
    dense = torch.optim.Adam(mlp.parameters(), lr=0.01)
    for k, (ids, label) in enumerate(batches, start=1):
        pooled = tables(ids.reshape(-1), torch.arange(ids.numel() + 1))
        loss = nn.functional.binary_cross_entropy_with_logits(mlp(pooled)[:, 0], label)
        dense.zero_grad()
        loss.backward()
        dense.step()
        tables.step(k)
    return torch.cat([tables.read(name) for name in features])


def train_torch(data: tuple[Batches, int], eps: float, disturbance: float = 0.0) -> torch.Tensor:
    batches, rows = data
    tables = [nn.Embedding(rows, 8, dtype=torch.float64) for _ in batches[0][0]]
    generator = torch.Generator().manual_seed(1)
    for table in tables:
        table.weight.data.copy_(disturbance * torch.randn(rows, 8, generator=generator, dtype=torch.float64))
    mlp = tower(8 * len(tables))
    rows_optimizer = torch.optim.Adam([table.weight for table in tables], lr=0.01, eps=eps)
    dense = torch.optim.Adam(mlp.parameters(), lr=0.01)
    for ids, label in batches:
        pooled = torch.cat([table(ids[f]) for f, table in enumerate(tables)], dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(mlp(pooled)[:, 0], label)
        dense.zero_grad()
        rows_optimizer.zero_grad()
        loss.backward()
        dense.step()
        rows_optimizer.step()
    return torch.cat([table.weight.detach() for table in tables])


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module", params=["synthetic", pytest.param("amazon_sports", marks=pytest.mark.data)])
def training(request) -> tuple[Batches, int]:
    """200 steps of batches of a click model with zero init."""
    if request.param == "synthetic":
        return clicks()
    return amazon_sports(request.getfixturevalue("real_data"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_hundred_steps_of_training_equal_dense_adam(backend, training):
    difference = relative(train_ours(training, Adam(0.01, eps=1e-13), backend), train_torch(training, eps=1e-13))
    assert difference < 1e-5


@pytest.mark.slow
def test_at_the_usual_eps_closer_than_a_tiny_perturbation(training):
    """Training from zero is chaotic: the yardstick is what 1e-9 on the initial table does to torch's own result."""
    theirs = train_torch(training, eps=1e-8)
    yardstick = relative(train_torch(training, eps=1e-8, disturbance=1e-9), theirs)
    assert relative(train_ours(training, Adam(0.01), "cpu"), theirs) < yardstick


def test_lazy_moments_are_not_dense_adam():
    """The comparison above can fail: what lazy moments drop is far larger than its tolerance."""
    theirs = train_torch(clicks(), eps=1e-13)
    assert relative(train_ours(clicks(), Adam(0.01, eps=1e-13, moments="lazy"), "cpu"), theirs) > 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-1.0), "learning_rate"),
        (lambda: Adagrad(0.1, eps=0.0), "eps"),
        (lambda: Adam(beta1=1.0), "beta1"),
        (lambda: Adam(beta1=0.99, beta2=0.9), "beta1 < beta2"),
        (lambda: Adam(moments="sparse"), "dense or lazy"),
        (lambda: Adam(beta1=0.9986, beta2=0.999, eps_inside_root=True), r"beta2\^1\.5"),
        (lambda: Adam(beta1=0.99999, beta2=0.999999), "momentum lives for .* idle steps, more than 65536; use moments"),
        (lambda: SGD(clip_row_norm=0.0), "clip_row_norm"),
        (lambda: AdamW(weight_decay=-0.1), "weight_decay"),
        (lambda: AdamW(1.0, weight_decay=1.0), "must stay below 1"),
        (lambda: AdamW(1.0, weight_decay=0.2), "moments 'lazy'"),
        (lambda: Adagrad(weight_decay=math.inf), "weight_decay"),
        (lambda: AdamW(first_touch="never"), "keep or literal"),
        (lambda: AdamAR(first_touch="never"), "keep or literal"),
        (lambda: AdamAR(decay="by_epoch"), "needs the number of steps"),
        (lambda: AdamAR(epoch_steps=9), "at_read has none"),
        (lambda: AdamAR(decay="by_epoch", epoch_steps=0), "at least 1, not 0"),
        (lambda: AdagradAR(first_touch="never"), "keep or literal"),
        (lambda: AdagradAR(alpha=0.0), "use Adagrad"),
        (lambda: AdagradAR(weight_decay=0.1), "Adagrad's decay or AdagradAR's"),
        (lambda: AdamAR(alpha=0.0), "use Adam"),
        (lambda: RMSprop(beta2=1.0), "beta2"),
        (lambda: RMSprop(eps=0.0), "eps"),
        (lambda: RMSprop(moments="sparse"), "dense or lazy"),
        (lambda: RMSpropAR(alpha=0.0), "use RMSprop"),
        (lambda: RMSpropAR(first_touch="never"), "keep or literal"),
        (lambda: RowwiseAdam(beta1=0.99, beta2=0.9), "beta1 < beta2"),
        (lambda: RowwiseAdamAR(alpha=-1.0), "alpha"),
        (lambda: AdamAR(alpha=math.nan), "alpha"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
