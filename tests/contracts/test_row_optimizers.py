"""What every row optimizer owes, on every backend: the loop over every row at every step, in float64, written plainly.

The loop knows nothing of the kernels, of when rows are read, or of how they are stored. A new backend joins by adding
its name to BACKENDS; a new optimizer or option by adding a line to OPTIMIZERS, and its rule to ``EveryRow``.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

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
    RowwiseAdagrad,
    RowwiseAdam,
    RowwiseAdamAR,
)
from embeddings.optim.lr_schedules import Cosine, LinearWarmup, StepDecay
from embeddings.tables.config import InitConfig, TableConfig

pytestmark = pytest.mark.slow

COMPILED = ("reference", "cpu")
BACKENDS = (*COMPILED, "triton")
# Triton's interpreter takes some 50 ms for a step: fewer there, and of the optimizers one for each branch of the rules.
NUM_STEPS = {"reference": 120, "cpu": 300, "triton": 30}
COSINE = Cosine(10, 0.1, decay_steps=250, final_factor=0.02)
STEPS = StepDecay(5, every_steps=40, gamma=0.5)
# Momentum that is gone after 22 steps, not 290: rows outlive it.
SHORT = {"beta1": 0.25, "beta2": 0.9}
OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": SGD(0.05),
    "sgd-warmup-clip": SGD(0.05, schedule=LinearWarmup(20), clip_row_norm=1.0),
    "adagrad": Adagrad(0.1),
    "adagrad-inside-clip-steps": Adagrad(0.1, eps=1e-4, eps_inside_root=True, clip_row_norm=1.0, schedule=STEPS),
    "adagradw": Adagrad(0.1, weight_decay=0.05),
    "adagradw-literal-cosine": Adagrad(0.1, weight_decay=0.5, first_touch="literal", schedule=COSINE),
    "adagrad_ar": AdagradAR(0.1, alpha=1e-3),
    "adagrad_ar-literal": AdagradAR(0.1, alpha=2e-4, first_touch="literal", schedule=STEPS),
    "rowwise_adagrad": RowwiseAdagrad(0.1),
    "rowwise_adagrad-clip-steps": RowwiseAdagrad(0.1, eps=1e-4, clip_row_norm=1.0, schedule=STEPS),
    "rmsprop": RMSprop(0.02, 0.9),
    "rmsprop-inside-clip-cosine": RMSprop(0.02, eps=1e-4, eps_inside_root=True, clip_row_norm=1.0, schedule=COSINE),
    "rmsprop-lazy": RMSprop(0.02, 0.9, moments="lazy"),
    "rmsprop_ar": RMSpropAR(0.02, 0.9, alpha=1e-3),
    "rmsprop_ar-literal-steps": RMSpropAR(0.02, alpha=2e-4, first_touch="literal", schedule=STEPS),
    "rmsprop_ar-lazy-inside": RMSpropAR(0.02, alpha=1e-2, moments="lazy", eps_inside_root=True),
    "adam": Adam(0.05),
    "adam-short-cosine": Adam(0.05, **SHORT, schedule=COSINE),
    "adam-inside-clip": Adam(0.05, **SHORT, eps_inside_root=True, clip_row_norm=1.0),
    # Nothing moves an idle row, yet v shrinks.
    "adam-no-momentum": Adam(0.05, beta1=0.0),
    "adam-lazy-steps": Adam(0.05, moments="lazy", schedule=STEPS),
    "adamw": AdamW(0.05, weight_decay=0.1),
    "adamw-literal-cosine": AdamW(0.05, **SHORT, weight_decay=0.5, first_touch="literal", schedule=COSINE),
    "adamw-lazy-inside": AdamW(0.05, moments="lazy", weight_decay=0.5, eps_inside_root=True, schedule=STEPS),
    "adam_ar-1e-5": AdamAR(0.05, alpha=1e-5),
    "adam_ar-6e-4-cosine": AdamAR(0.05, alpha=6e-4, schedule=COSINE),
    "adam_ar-short": AdamAR(0.05, **SHORT, alpha=1e-3, schedule=STEPS),
    # Faster than momentum vanishes: rows are stored as they are.
    "adam_ar-0.02": AdamAR(0.05, alpha=0.02, clip_row_norm=1.0),
    "adam_ar-3": AdamAR(0.05, alpha=3.0),
    "adam_ar-literal-inside": AdamAR(0.05, **SHORT, alpha=1e-4, first_touch="literal", eps_inside_root=True),
    "adam_ar-lazy": AdamAR(0.05, alpha=1e-3, moments="lazy", first_touch="literal", schedule=COSINE),
    "adam_ar-literal-lazy-inside": AdamAR(
        0.05, alpha=1e-4, moments="lazy", first_touch="literal", eps_inside_root=True
    ),
    # Stored ahead, as they are, and ahead with a decay that an epoch's start makes matter while momentum lives.
    "adam_ar-by-epoch-1e-7": AdamAR(0.05, alpha=1e-7, decay="by_epoch", epoch_steps=70, schedule=COSINE),
    "adam_ar-by-epoch-1e-4": AdamAR(0.05, alpha=1e-4, decay="by_epoch", epoch_steps=41, clip_row_norm=1.0),
    "adam_ar-by-epoch-as-they-are": AdamAR(0.05, **SHORT, alpha=1e-3, decay="by_epoch", epoch_steps=140),
    "adam_ar-by-epoch-short": AdamAR(0.05, **SHORT, alpha=1e-5, decay="by_epoch", epoch_steps=23, schedule=STEPS),
    "adam_ar-by-epoch-literal-inside": AdamAR(
        0.05, **SHORT, alpha=1e-5, decay="by_epoch", epoch_steps=23, first_touch="literal", eps_inside_root=True
    ),
    "adam_ar-by-epoch-lazy": AdamAR(0.05, alpha=1e-5, decay="by_epoch", epoch_steps=50, moments="lazy"),
    "adagrad_ar-by-epoch-literal": AdagradAR(0.1, alpha=1e-5, decay="by_epoch", epoch_steps=50, first_touch="literal"),
    "rowwise_adam_ar-by-epoch": RowwiseAdamAR(0.05, **SHORT, alpha=1e-5, decay="by_epoch", epoch_steps=23),
    "rowwise_adam": RowwiseAdam(0.05),
    "rowwise_adam-short-cosine-clip": RowwiseAdam(0.05, **SHORT, schedule=COSINE, clip_row_norm=1.0),
    "rowwise_adam-no-momentum": RowwiseAdam(0.05, beta1=0.0),
    "rowwise_adam-lazy-inside": RowwiseAdam(0.05, moments="lazy", eps_inside_root=True, schedule=STEPS),
    "rowwise_adam_ar-1e-5": RowwiseAdamAR(0.05, alpha=1e-5),
    "rowwise_adam_ar-literal-inside": RowwiseAdamAR(
        0.05, **SHORT, alpha=1e-4, first_touch="literal", eps_inside_root=True
    ),
    "rowwise_adam_ar-0.02": RowwiseAdamAR(0.05, alpha=0.02, schedule=COSINE),
    "rowwise_adam_ar-lazy": RowwiseAdamAR(0.05, alpha=1e-3, moments="lazy", schedule=COSINE),
    "rowwise_adam_ar-no-momentum-literal": RowwiseAdamAR(0.05, beta1=0.0, alpha=1e-4, first_touch="literal"),
}
INTERPRETED = (
    "sgd-warmup-clip", "adagrad-inside-clip-steps", "adagradw-literal-cosine", "adagrad_ar", "adam-short-cosine",
    "adamw-lazy-inside", "adam_ar-short", "adam_ar-0.02", "adam_ar-literal-inside",
    "rowwise_adagrad-clip-steps", "rmsprop-inside-clip-cosine", "rmsprop_ar", "rmsprop_ar-lazy-inside",
    "rowwise_adam-short-cosine-clip", "rowwise_adam-lazy-inside", "rowwise_adam_ar-literal-inside",
    "rowwise_adam_ar-0.02", "adam_ar-by-epoch-short", "adagrad_ar-by-epoch-literal",
)  # fmt: skip
each_case = pytest.mark.parametrize(
    ("backend", "optimizer"),
    [
        pytest.param(backend, optimizer, id=f"{backend}-{name}")
        for backend in BACKENDS
        for name, optimizer in OPTIMIZERS.items()
        if backend != "triton" or name in INTERPRETED
    ],
)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_compiled = pytest.mark.parametrize("backend", COMPILED)


class EveryRow:
    """Each row at each step, touched or not (methods of the papers; for AdamAR Algorithm 1 of Li and Lyu)."""

    def __init__(self, theta: np.ndarray, optimizer: RowOptimizer) -> None:
        self.theta, self.optimizer = theta.copy(), optimizer
        self.first, self.second = np.zeros_like(theta), np.zeros_like(theta)
        self.s = np.zeros(len(theta), dtype=np.int64)

    def step(self, k: int, rows: np.ndarray, grads: np.ndarray) -> None:
        """``grads``: the summed gradient of each of ``rows``."""
        o = self.optimizer
        rate = o.learning_rate * float(o.schedule.factors(np.array([k]))[0])
        grad = np.zeros_like(self.theta)
        grad[rows] = grads
        if o.clip_row_norm is not None:
            norm = np.linalg.norm(grad, axis=1, keepdims=True)
            grad *= np.minimum(1.0, o.clip_row_norm / np.maximum(norm, 1e-300))
        touched = np.zeros((len(self.theta), 1), dtype=bool)
        touched[rows] = True
        literal = getattr(o, "first_touch", "keep") == "literal"
        ever = (self.s[:, None] > 0) | literal
        if getattr(o, "decay", "") == "by_epoch":
            # Of a row that goes on waiting, in what of it is left after this step beside what was left before it.
            for row in np.flatnonzero(ever & ~touched):
                before, now = (left_by_epoch(o, int(self.s[row]), step) for step in (k - 1, k))
                self.theta[row] *= now / before if before else 0.0
            for row in rows:
                left = left_by_epoch(o, int(self.s[row]), k - 1) if ever[row] else 1.0
                self.first[row], self.second[row] = (
                    left * self.first[row],
                    self.second[row] * (1.0 if isinstance(o, AdagradAR) else left**2),
                )
        elif isinstance(o, AdamAR | AdagradAR | RMSpropAR):
            self.theta *= 1 - np.where(ever, np.minimum(1.0, o.alpha * (k - self.s[:, None] - 1)), 0.0)
        elif isinstance(o, AdamW | Adagrad):
            self.theta *= 1 - np.where(ever | touched, rate * o.weight_decay, 0.0)
        square = grad**2
        if isinstance(o, RowwiseAdam | RowwiseAdagrad):
            square[:] = square.mean(axis=1, keepdims=True)
        if isinstance(o, Adam):
            moving = touched | (o.moments == "dense")
            self.first = np.where(moving, o.beta1 * self.first + (1 - o.beta1) * grad, self.first)
            self.second = np.where(moving, o.beta2 * self.second + (1 - o.beta2) * square, self.second)
            step = self.first / (1 - o.beta1**k), self.second / (1 - o.beta2**k)
        elif isinstance(o, RMSprop):
            fading = touched | (o.moments == "dense")
            self.second = np.where(fading, o.beta2 * self.second + (1 - o.beta2) * square, self.second)
            moving, step = touched, (grad, self.second)
        elif isinstance(o, Adagrad | RowwiseAdagrad):
            moving, self.second = touched, self.second + square
            step = grad, self.second
        else:
            moving, step = touched, (grad, np.ones_like(grad))
        eps, inside = getattr(o, "eps", 0.0), getattr(o, "eps_inside_root", False)
        root = np.sqrt(step[1] + eps) if inside else np.sqrt(step[1]) + eps
        moved = np.divide(step[0], root, out=np.zeros_like(root), where=root > 0)
        self.theta -= np.where(moving, rate * moved, 0.0)
        self.s[rows] = k


def left_by_epoch(optimizer: AdamAR, s: int, k: int) -> float:
    """What decay by epoch has left after step k of a row that was touched at step s alone."""
    begun = (k - 1) // optimizer.epoch_steps * optimizer.epoch_steps if k else 0
    if begun == 0:
        return 1.0
    alpha = 100.0 * optimizer.alpha if s <= begun else optimizer.alpha
    return float(np.prod(1.0 - np.minimum(1.0, alpha * np.arange(k - s))))


def of_about_one(generator: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return sizes away from 0, where Adam's first step would amplify rounding."""
    return generator.uniform(0.2, 1.5, size)


def of_all_sizes(generator: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return sizes from far below eps to 1, as likely in each decade: eps is seen in every other element."""
    return 10.0 ** generator.uniform(-8.0, 0.0, size)


def batches(num_rows: int, dim: int, num_steps: int = 300, busy: float = 1.0, sizes=of_about_one):
    """Irregular touches: some rows often, some every few hundred steps, one twice with a long gap, one never.

    Of the steps a share of ``busy``, not evenly spread, touches anything; at the others all rows only grow older, which
    costs the loop over every row nothing and the tables still less.
    """
    generator = np.random.default_rng(3)
    chance = np.array([0.0, 0.9, 0.3, 0.05, 0.01, 0.004, 0.0] + [0.02] * (num_rows - 7))
    for k in range(1, num_steps + 1):
        rows = np.flatnonzero(generator.random(num_rows) < np.minimum(chance / busy, 0.9))
        if generator.random() >= busy:
            rows = rows[:0]
        if k in (2, num_steps - 3):
            rows = np.union1d(rows, [6])
        size = len(rows), dim
        yield k, rows, np.sign(generator.standard_normal(size)) * sizes(generator, size)


def build(optimizer: RowOptimizer, backend: str, num_rows: int = 10, dim: int = 19, **options) -> EmbeddingTables:
    table = TableConfig("t", num_rows, dim, ("f",), init=InitConfig("normal", 1.0), first_live_row=0)
    return EmbeddingTables([table], optimizer, backend=backend, **{"dtype": torch.float64} | options)


def restored(tables: EmbeddingTables, backend: str) -> EmbeddingTables:
    other = build(tables.optimizer, backend)
    state = {name: value.clone() for name, value in tables.state("t").items()}
    other.load("t", tables.weight("t").clone(), state)
    other.completed_steps = tables.completed_steps
    return other


@each_case
def test_equals_the_loop_over_every_row(backend, optimizer):
    """Across reads (a materialized copy) and a resume, which goes on bitwise the same beside the first.

    Tolerance: few nodes see nothing of eps here; 1e-13 of a movement is left out; rounding of 300 steps.
    """
    tables = build(optimizer, backend)
    oracle, resumed = EveryRow(tables.weight("t").numpy(), optimizer), None
    num_steps = NUM_STEPS[backend]
    for k, rows, grad in batches(*oracle.theta.shape, num_steps, busy=0.3):
        ids = torch.from_numpy(rows)
        for each in (tables,) if resumed is None else (tables, resumed):
            if not len(rows) and k % 7:
                each.step(k)
                continue
            pooled = each(ids, torch.arange(len(rows) + 1))
            np.testing.assert_allclose(pooled.detach().numpy(), oracle.theta[rows], rtol=0, atol=1e-9)
            pooled.backward(torch.from_numpy(grad))
            if k % 10:
                each.step(k)
            else:
                # Two backwards are one step, of their sum.
                each(ids, torch.arange(len(rows) + 1)).backward(torch.from_numpy(0.25 * grad))
                each.step(k, 0.8)
        oracle.step(k, rows, grad)
        if k % 20 == 0 or k > num_steps - 5:
            np.testing.assert_allclose(tables.read("t").numpy(), oracle.theta, rtol=0, atol=1e-9)
        if k == num_steps * 4 // 5:
            resumed = restored(tables, backend)
            assert torch.equal(resumed.read("t"), tables.read("t"))
    np.testing.assert_array_equal(tables.state("t")["last_update_step"].numpy(), oracle.s)
    assert torch.equal(resumed.weight("t"), tables.weight("t"))
    assert all(torch.equal(value, tables.state("t")[name]) for name, value in resumed.state("t").items())


@each_case
def test_a_row_whose_gradient_is_zero_moves_as_the_loop_moves_it(backend, optimizer):
    """Its moments stay 0 until a gradient comes, as they are while a model's last layer is still 0."""
    tables = build(optimizer, backend, num_rows=3)
    oracle, rows = EveryRow(tables.weight("t").numpy(), optimizer), np.array([0, 1])
    for k, sizes in enumerate(([0.0, 0.0], [0.0, 1.0], [1.0, 0.0]), 1):
        grad = np.repeat(np.array(sizes)[:, None], oracle.theta.shape[1], axis=1)
        tables(torch.from_numpy(rows), torch.arange(len(rows) + 1)).backward(torch.from_numpy(grad))
        tables.step(k)
        oracle.step(k, rows, grad)
        np.testing.assert_allclose(tables.read("t").numpy(), oracle.theta, rtol=0, atol=1e-9)


# Where momentum moves idle rows, beside eps of every size: each way in which rows are stored and eps stands.
IDLE_MOMENTUM: dict[str, RowOptimizer] = {
    **{name: OPTIMIZERS[name] for name in ("adam", "adamw", "adam_ar-1e-5", "adam_ar-6e-4-cosine", "adam_ar-0.02")},
    **{name: OPTIMIZERS[name] for name in ("adam-inside-clip", "adam_ar-short", "rowwise_adam_ar-literal-inside")},
    "rowwise_adam": OPTIMIZERS["rowwise_adam"],
    "adam-inside": Adam(0.05, eps_inside_root=True, schedule=LinearWarmup(20)),
    "adam-large-eps": Adam(0.05, eps=1e-3),
    # v fades so fast that eps grows tenfold beside it while momentum lives.
    "adam-fast": Adam(0.05, beta2=0.98),
    "adam_ar-fast-inside": AdamAR(0.05, beta2=0.98, eps_inside_root=True, alpha=1e-4),
    "adam-faster-inside": Adam(0.05, beta2=0.95, eps_inside_root=True),
    "adam_ar-faster-inside": AdamAR(0.05, beta2=0.95, eps_inside_root=True, alpha=1e-4),
    "adam_ar-0.02-inside": AdamAR(0.05, alpha=0.02, eps_inside_root=True),
    "rowwise_adam-fast-inside": RowwiseAdam(0.05, beta2=0.98, eps_inside_root=True),
    **{name: optimizer for name, optimizer in OPTIMIZERS.items() if "by-epoch" in name and optimizer.idle_momentum},
    "adam_ar-by-epoch-faster-as-they-are-inside": AdamAR(
        0.05, beta2=0.95, alpha=5e-5, decay="by_epoch", epoch_steps=41, eps_inside_root=True
    ),
    # Stored ahead, at the limit: a decay over an epoch's start that momentum all but waits for.
    "adam_ar-by-epoch-fast-inside": AdamAR(
        0.05, beta2=0.98, alpha=4.5e-6, decay="by_epoch", epoch_steps=41, eps_inside_root=True
    ),
    "adam_ar-by-epoch-inside": AdamAR(
        0.05, alpha=3e-6, decay="by_epoch", epoch_steps=41, eps_inside_root=True, schedule=COSINE
    ),
}


@pytest.mark.parametrize(
    ("backend", "optimizer"),
    [
        pytest.param(backend, optimizer, id=f"{backend}-{name}")
        for backend in BACKENDS
        for name, optimizer in IDLE_MOMENTUM.items()
        if backend == "cpu"
        or name == "adam_ar-1e-5"
        or (backend == "triton" and name in ("adam-inside", "rowwise_adam", "adam_ar-0.02"))
    ],
)
def test_gradients_of_all_sizes_move_idle_rows_as_the_loop_does(backend, optimizer):
    """Every row at every step, whatever its moments are beside eps; to 1e-6 of a step, over all touches."""
    tables = build(optimizer, backend)
    oracle = EveryRow(tables.weight("t").numpy(), optimizer)
    for k, rows, grad in batches(*oracle.theta.shape, 12 if backend == "triton" else 200, sizes=of_all_sizes):
        tables(torch.from_numpy(rows), torch.arange(len(rows) + 1)).backward(torch.from_numpy(grad))
        tables.step(k)
        oracle.step(k, rows, grad)
        np.testing.assert_allclose(tables.read("t").numpy(), oracle.theta, rtol=0, atol=1e-6 * optimizer.learning_rate)


@pytest.mark.parametrize(
    ("optimizer", "dense"),
    [
        (SGD(0.1, schedule=Cosine(decay_steps=80)), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Adagrad(0.1, schedule=Cosine(decay_steps=80)), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (Adam(0.1, **SHORT, eps=1e-13, schedule=Cosine(decay_steps=80)),
         lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.25, 0.9), eps=1e-13)),
        (AdamW(0.1, **SHORT, eps=1e-13, weight_decay=0.3, first_touch="literal", schedule=Cosine(decay_steps=80)),
         lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.25, 0.9), eps=1e-13, weight_decay=0.3)),
        (RMSprop(0.1, 0.9, schedule=Cosine(decay_steps=80)), lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9)),
    ],
    ids=["sgd", "adagrad", "adam", "adamw", "rmsprop"],
)  # fmt: skip
@each_compiled
def test_equals_torch_on_dense_gradients(backend, optimizer, dense):
    """Few rows are touched at a step; torch moves them all, under a scheduler."""
    tables = build(optimizer, backend)
    weight = nn.Parameter(tables.weight("t").clone())
    peer = dense([weight])
    scheduler = CosineAnnealingLR(peer, 80)
    for k, rows, grad in itertools.islice(batches(*weight.shape), 80):
        tables(torch.from_numpy(rows), torch.arange(len(rows) + 1)).backward(torch.from_numpy(grad))
        tables.step(k)
        weight.grad = torch.zeros_like(weight)
        weight.grad[torch.from_numpy(rows)] = torch.from_numpy(grad)
        peer.step()
        scheduler.step()
    torch.testing.assert_close(tables.read("t"), weight.detach(), rtol=0, atol=1e-10)


KINDS = (
    "sgd-warmup-clip", "adagradw", "adagrad_ar", "rowwise_adagrad", "rmsprop_ar", "adam", "adamw", "adam_ar-1e-5",
    "rowwise_adam_ar-1e-5",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_neither_on_the_run_nor_on_threads(kind):
    """With rows that occur hundreds of times, and the norm of the gradient, which clipping to a global norm needs."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 200, (8000,), generator=generator) ** 2 // 20
    grads = torch.randn(8000, 48, generator=generator)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            tables, norms = build(OPTIMIZERS[kind], "cpu", 3000, 48, dtype=torch.float32), []
            for k in range(1, 4):
                tables(ids + k, torch.arange(8001)).backward(grads)
                norms.append(tables.gradient_squared_norm())
                tables.step(k)
            state = (value.clone() for value in tables.state("t").values())
            results.append((norms, tables.weight("t").clone(), tables.read("t"), *state))
    finally:
        torch.set_num_threads(threads)
    for norms, *tensors in results[1:]:
        assert norms == results[0][0]
        assert all(torch.equal(one, other) for one, other in zip(tensors, results[0][1:], strict=True))


@each_compiled
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.1, schedule=LinearWarmup(20), clip_row_norm=5.0), Adagrad(0.5, weight_decay=1e-3),
        AdagradAR(0.5, alpha=1e-4), Adam(0.05), AdamW(0.05, weight_decay=0.01), AdamAR(0.05, alpha=1e-5),
        RowwiseAdagrad(0.5), RMSprop(0.05, schedule=Cosine(decay_steps=200)),
        RMSpropAR(0.05, alpha=1e-5, schedule=Cosine(decay_steps=200)), RowwiseAdam(0.05),
        RowwiseAdamAR(0.05, alpha=1e-5),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)  # fmt: skip
def test_lowers_a_convex_loss(backend, optimizer):
    """A quadratic with its minimum at 1 in each element, half of the rows at each step; a decay pulls it off a bit."""
    tables = build(optimizer, backend)
    losses = []
    for k in range(1, 121):
        loss = (tables(torch.arange(k % 2, 10, 2), torch.arange(6)) - 1.0).square().sum()
        loss.backward()
        tables.step(k)
        losses.append(loss.item())
    assert max(losses[-2:]) < 0.02 * losses[0]


@each_backend
def test_clipping_to_a_global_norm(backend):
    """gradient_squared_norm is that of torch's gradient, and ``scale`` multiplies it."""
    config = [
        TableConfig("a", 12, 5, ("x", "y"), ("sum", "mean"), init=InitConfig("normal", 1.0)),
        TableConfig("b", 6, 33, ("z",), init=InitConfig("normal", 1.0)),
    ]
    tables, halved = (EmbeddingTables(config, SGD(0.1), backend=backend, dtype=torch.float64) for _ in range(2))
    ids = torch.tensor([2, 3, 2, 0, 5, 11, 5, 2, 1, 3])
    offsets = torch.tensor([0, 2, 3, 5, 7, 8, 10])
    weights = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 1.0, 1.0, 1.5, 1.0, 1.0], dtype=torch.float64)
    assert tables.gradient_squared_norm() == 0.0
    before = {name: tables.weight(name).clone() for name in "ab"}
    for each in (tables, halved):
        for factor in (1.0, 0.5):
            each(ids, offsets, weights).square().mul(factor).sum().backward()
    norm = tables.gradient_squared_norm()
    tables.step(1)
    halved.step(1, 0.5)
    moved = {name: tables.weight(name) - before[name] for name in "ab"}
    assert norm == pytest.approx(sum(float(each.square().sum()) for each in moved.values()) / 0.01, rel=1e-12)
    for name in "ab":
        torch.testing.assert_close(halved.weight(name) - before[name], moved[name] / 2, rtol=1e-12, atol=1e-14)


@each_backend
@pytest.mark.parametrize(
    "kind", ["adam", "adamw-literal-cosine", "adam_ar-0.02", "adagrad_ar", "rmsprop_ar", "rowwise_adam"]
)
def test_reading_changes_nothing(backend, kind):
    tables = build(OPTIMIZERS[kind], backend)
    for k, rows, grad in itertools.islice(batches(10, 19, busy=0.3), 20 if backend == "triton" else 80):
        if len(rows):
            tables(torch.from_numpy(rows), torch.arange(len(rows) + 1)).backward(torch.from_numpy(grad))
        tables.step(k)
    stored = [getattr(tables.layout, name) for name in ("weights", "vectors", "row_values", "last_steps")]
    before = [each.clone() for each in stored]
    once = tables.read("t"), tables.read("t", decay=False)
    tables.eval()
    pooled = tables(torch.arange(10), torch.arange(11)).detach()
    torch.testing.assert_close(pooled, once[0], rtol=0, atol=0)
    assert torch.equal(once[0], tables.read("t"))
    assert torch.equal(once[1], tables.read("t", decay=False))
    assert all(torch.equal(one, other) for one, other in zip(before, stored, strict=True))


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *itertools.product(COMPILED, ("sgd", "adagrad", "adam_ar-1e-5", "rowwise_adam_ar-1e-5")),
        *(("triton", kind) for kind in ("sgd", "adam_ar-1e-5")),
    ],
)
def test_a_step_that_raises_changes_nothing_and_can_be_tried_again(backend, kind, monkeypatch):
    """Two tables of two dims, and memory that cannot be had at one place after the other on the way."""
    config = [
        TableConfig("a", 12, 5, ("x", "y"), ("sum", "mean"), init=InitConfig("normal", 1.0), first_live_row=0),
        TableConfig("b", 6, 33, ("z",), init=InitConfig("normal", 1.0), first_live_row=0),
    ]
    offsets = torch.tensor([0, 2, 3, 5, 7, 8, 10])

    def recorded() -> EmbeddingTables:
        tables = EmbeddingTables(config, OPTIMIZERS[kind], backend=backend, dtype=torch.float64)
        for ids in ([2, 3, 2, 0, 5, 11, 5, 2, 1, 3], [5, 3, 7, 0, 5, 10, 5, 2, 1, 4]):
            tables(torch.tensor(ids), offsets).square().sum().backward()
        return tables

    wanted = recorded()
    wanted.step(1)
    for place in itertools.count(1):
        tables = recorded()
        stored = [getattr(tables.layout, name) for name in ("weights", "vectors", "row_values", "last_steps")]
        before = [each.clone() for each in stored]
        with monkeypatch.context() as patch:
            _no_memory(patch, place)
            try:
                tables.step(1)
                break
            except MemoryError:
                pass
        assert all(torch.equal(one, other) for one, other in zip(stored, before, strict=True))
        assert (tables.completed_steps, tables.num_records) == (0, 2)
        tables.step(1)
        assert (tables.completed_steps, tables.num_records) == (1, 0)
        for name in "ab":
            assert torch.equal(tables.weight(name), wanted.weight(name))
            assert all(torch.equal(value, wanted.state(name)[key]) for key, value in tables.state(name).items())
    assert place > 1


def _no_memory(patch, place: int) -> None:
    """Makes the ``place``-th taking of memory from now on a MemoryError."""
    calls = itertools.count(1)

    def failing(function):
        def call(*arguments, **keywords):
            if next(calls) == place:
                raise MemoryError("no memory")
            return function(*arguments, **keywords)

        return call

    for library in (torch, np):
        for name in ("empty", "zeros"):
            patch.setattr(library, name, failing(getattr(library, name)))
