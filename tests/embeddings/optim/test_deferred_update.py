"""Deferred updates (docs/concepts/deferred_updates.md) against the loop over steps: one untouched row, step by step."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

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
    momentum_terms,
)
from embeddings.optim.deferred_update import DeferredUpdateCoefficients, deferred_update_coefficients
from embeddings.optim.idle_decay import ACROSS_EPOCHS
from embeddings.optim.lr_schedules import Cosine, LinearWarmup, Schedule, StepDecay
from embeddings.optim.momentum_terms import MAX_ERROR

pytestmark = pytest.mark.slow

M, V, THETA = 0.07, 0.004, 1.3


def literal(optimizer: Adam, s: int, completed: int, m=M, v=V):
    """A row with moments m and v that was touched at step s, after ``completed`` steps."""
    return path(optimizer, s, completed, m, v)[-1]


def path(optimizer: Adam, s: int, completed: int, m, v) -> list:
    """Where such a row is after each of the steps from s to ``completed``."""
    found = [THETA + 0.0 * m]
    for t in range(s + 1, completed + 1):
        rate = optimizer.rate(t)
        m, v = optimizer.beta1 * m, optimizer.beta2 * v
        mhat, vhat = m / (1 - optimizer.beta1**t), v / (1 - optimizer.beta2**t)
        root = (vhat + optimizer.eps) ** 0.5 if optimizer.eps_inside_root else vhat**0.5 + optimizer.eps
        found.append(found[-1] * kept(optimizer, s, t) * (1 - rate * optimizer.constant_decay) - rate * mhat / root)
    return found


def kept(optimizer: Adam, s: int, t: int) -> float:
    """What step t leaves of a row that was touched at step s, by the decay of idle rows."""
    if getattr(optimizer, "decay", "at_read") == "at_read":
        return 1 - min(1.0, optimizer.idle_alpha * (t - s - 1))
    assert isinstance(optimizer, AdamAR)
    assert optimizer.epoch_steps is not None
    left = []
    for step in (t - 1, t):
        begun = (step - 1) // optimizer.epoch_steps * optimizer.epoch_steps
        alpha = 0.0 if begun <= 0 else optimizer.alpha * (ACROSS_EPOCHS if s <= begun else 1.0)
        left.append(float(np.prod(1 - np.minimum(1.0, alpha * np.arange(step - s)))))
    return left[1] / left[0] if left[0] else 0.0


def root(coefficients: DeferredUpdateCoefficients, floor: float, v=V):
    return (v + floor) ** 0.5 if coefficients.eps_inside_root else v**0.5 + floor


def stored(coefficients: DeferredUpdateCoefficients, s: int, m=M, v=V):
    """What the update of step ``s`` stores for THETA."""
    coefficients.at(s - 1)
    return THETA - sum(drift * m / root(coefficients, floor, v) for drift, floor in coefficients.lookahead.tolist())


def read(coefficients: DeferredUpdateCoefficients, row, s: int, m=M, v=V):
    decay, movements = coefficients.for_rows(np.array([s]))
    parts = [float(moved[0]) * m / root(coefficients, float(floor[0]), v) for moved, floor in movements]
    return float(decay[0]) * row - sum(parts)


schedules = st.sampled_from(
    [Schedule(), LinearWarmup(30), Cosine(5, 0.1, decay_steps=700, final_factor=0.05), StepDecay(every_steps=90)]
)
betas = st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.95, 0.99)])
steps = {"s": st.integers(1, 1500), "idle": st.integers(0, 800)}


def check(optimizer: Adam, s: int, idle: int) -> None:
    """Dropped: 1e-13 of the first movement; rounding of 1000 products: 1e-13. Few nodes see nothing of eps here."""
    coefficients = DeferredUpdateCoefficients(optimizer)
    row = stored(coefficients, s)
    assert read(coefficients.at(s + idle), row, s) == pytest.approx(literal(optimizer, s, s + idle), rel=0, abs=2e-12)
    # Without the decay since the touch the row is where Adam without a decay would have it.
    plain = Adam(
        optimizer.learning_rate, optimizer.beta1, optimizer.beta2, optimizer.eps, schedule=optimizer.schedule,
        eps_inside_root=optimizer.eps_inside_root,
    )  # fmt: skip
    for moved, floor in coefficients.without_decay(np.array([s])):
        row -= float(moved[0]) * M / root(coefficients, float(floor[0]))
    assert row == pytest.approx(literal(plain, s, s + idle), rel=0, abs=2e-12)


@given(**steps, alpha=st.sampled_from([1e-6, 1e-4, 1e-2, 0.3, 7.0]), betas=betas, schedule=schedules)
def test_adaptive_decay_equals_the_loop(s, idle, alpha, betas, schedule):
    check(AdamAR(0.02, *betas, alpha=alpha, schedule=schedule), s, idle)


@given(
    s=st.integers(1, 400), idle=st.integers(0, 300), alpha=st.sampled_from([1e-8, 1e-6, 1e-4, 0.02]), betas=betas,
    epoch_steps=st.sampled_from([1, 7, 100, 250]), schedule=schedules,
)  # fmt: skip
@example(s=20, idle=200, alpha=0.02, betas=(0.5, 0.9), epoch_steps=250, schedule=Schedule())
@example(s=300, idle=190, alpha=1e-4, betas=(0.5, 0.9), epoch_steps=250, schedule=Schedule())
def test_decay_by_epoch_equals_the_loop(s, idle, alpha, betas, epoch_steps, schedule):
    check(AdamAR(0.02, *betas, alpha=alpha, schedule=schedule, decay="by_epoch", epoch_steps=epoch_steps), s, idle)


@given(**steps, decay=st.sampled_from([0.0, 0.01, 0.5, 4.0]), betas=betas, schedule=schedules)
def test_constant_decay_equals_the_loop(s, idle, decay, betas, schedule):
    assume(decay < 4.0 or betas[0] < 0.95)  # refused: a step takes more from a row than its momentum loses
    check(AdamW(0.02, *betas, weight_decay=decay, schedule=schedule), s, idle)


@given(**steps, alpha=st.sampled_from([1e-4, 1e-2]), schedule=schedules)
def test_eps_inside_the_root_equals_the_loop(s, idle, alpha, schedule):
    check(AdamAR(0.02, alpha=alpha, schedule=schedule, eps_inside_root=True), s, idle)


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamAR(0.02, alpha=1e-5), AdamAR(0.02, alpha=6e-4), AdamAR(0.02, alpha=0.3),
        Adam(0.02, schedule=Cosine(5, 0.1, decay_steps=300)), Adam(0.02, 0.9, 0.98), Adam(0.02, 0.5, 0.9),
        Adam(0.02, 0.95, 0.999), AdamW(0.02, 0.9, 0.9999, weight_decay=1.0),
        AdamAR(0.02, alpha=1e-6, decay="by_epoch", epoch_steps=70),
        AdamAR(0.02, alpha=6e-6, decay="by_epoch", epoch_steps=64),
        AdamAR(0.02, alpha=5e-5, decay="by_epoch", epoch_steps=300),
        AdamAR(0.02, 0.5, 0.9, alpha=1e-4, decay="by_epoch", epoch_steps=23),
    ],
    ids=[
        "usual", "alpha 6e-4", "stored as it is", "cosine", "beta2 .98", "short", "long", "adamw", "by epoch",
        "by epoch, strong", "by epoch, stored as it is", "by epoch, short",
    ],
)  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_any_size_of_moments_moves_as_the_loop_does(optimizer, inside):
    """Within MAX_ERROR of a step for the sum that is stored, and as much for the sum that is read, or a little more."""
    coefficients = DeferredUpdateCoefficients(replace(optimizer, eps_inside_root=inside))
    optimizer = coefficients.optimizer
    # sqrt(v) around eps, or v: m is three of it, as of a row that was touched once.
    roots = 1e-8 * 10.0 ** np.array([-2, -1, -0.5, 0, 0.5, 1, 2, 3, 6])
    roots = np.sqrt(1e-8 * roots) if inside else roots
    m, v = 3.0 * roots, roots**2
    for s in (1, 5, 63, 64, 140, 700):
        row, wanted = stored(coefficients, s, m, v), path(optimizer, s, s + 300, m, v)
        for idle in (1, 4, 15, 60, 300):
            found = read(coefficients.at(s + idle), row, s, m, v)
            np.testing.assert_allclose(found, wanted[idle], rtol=0, atol=2.5 * MAX_ERROR * optimizer.learning_rate)


@pytest.mark.parametrize(
    "optimizer",
    [AdamAR(alpha=1e-5), AdamAR(alpha=6e-7, decay="by_epoch", epoch_steps=3000)],
    ids=["at_read", "by_epoch"],
)
def test_two_nodes_are_enough_but_for_the_first_steps(optimizer):
    """With the usual betas: a lookup reads as many numbers for each age as with one eps for all steps, twice."""
    coefficients = DeferredUpdateCoefficients(optimizer, "float32")
    counts = [coefficients.at(k).movements.shape[1] for k in (1, 63, 128, 256, 5000, 60_000)]
    assert counts == [6, 6, 4, 2, 2, 2]
    assert all(coefficients.at(k).lookahead.shape == coefficients.movements.shape[1:] for k in (5, 200))


# With betas near each other and eps inside the root a case takes 5 to 30 s.
SLOW_BETAS = [(0.85, 0.9)] if os.environ.get("EVENKEEL_TEST_EVERY_POINT") else []


@pytest.mark.long
@pytest.mark.parametrize(("beta1", "beta2"), [(0.1, 0.9), (0.5, 0.9), *SLOW_BETAS, (0.9, 0.95), (0.95, 0.9999)])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("decay", [{}, {"alpha": 1e-3}, {"alpha": 4.5e-6, "decay": "by_epoch", "epoch_steps": 90}])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_later_steps_need_no_more_nodes_at_any_betas(beta1, beta2, inside, decay, dtype):
    """Nor does a number overflow on the way, where momentum hardly dies away beside v."""
    betas = {"beta1": beta1, "beta2": beta2, "eps_inside_root": inside}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coefficients = DeferredUpdateCoefficients(AdamAR(**betas, **decay) if decay else Adam(**betas), dtype)
        counts = [coefficients.at(k).movements.shape[1] for k in (1, 100, 400)]
    assert counts == sorted(counts, reverse=True)
    assert np.isfinite(coefficients.movements).all()


def test_nodes_do_not_grow_where_errors_say_so(monkeypatch):
    """Of the sums after steps 0, 1 and 2 errors ask for 4, 8 and 2."""
    wanted = iter((4, 8, 2))
    of_step = 0

    def error(exact, weights, points, at, inside):
        nonlocal of_step
        if len(points) == momentum_terms.NUM_NODES[0]:
            of_step = next(wanted)
        return float(len(points) < of_step)

    monkeypatch.setattr(momentum_terms, "_largest_error", error)
    counts = momentum_terms._basis_and_counts.__wrapped__(0.9, 0.999, False, True, 0.0, 287)[1]
    assert [(each.first, each.nodes) for each in counts] == [(2, 2), (1, 8), (0, 8)]


@pytest.mark.parametrize("beta1", [0.1, 0.45, 0.49])
def test_pairs_are_finite_where_moments_fade_fast(beta1):
    """In float32 too, whose products of two roots must not overflow: sums of so few terms have idle nodes."""
    coefficients = DeferredUpdateCoefficients(Adam(beta1=beta1, beta2=0.5), "float32")
    for k in (1, 40):
        assert 0.0 < coefficients.at(k).movements[:, :, 1].min() <= coefficients.movements[:, :, 1].max() < 2e15
        assert np.isfinite(coefficients.movements[:, :, 0]).all()


def test_float32_leaves_out_less_than_it_can_hold():
    """0.02 r^133 / (1 - r) = 2e-7 of Adam's step, m / sqrt(v) being about 1."""
    coefficients, exact = (
        DeferredUpdateCoefficients(AdamAR(0.02, alpha=1e-5), dtype) for dtype in ("float32", "float64")
    )
    assert coefficients.horizon < exact.horizon / 2
    row = stored(coefficients, 500)
    for idle in (1, 60, coefficients.horizon, 1000):
        coefficients.at(500 + idle)
        assert read(coefficients, row, 500) == pytest.approx(
            literal(AdamAR(0.02, alpha=1e-5), 500, 500 + idle), abs=4e-7
        )
    # The row is read without its moments.
    assert all(moved[0] == 0.0 for moved, _ in coefficients.for_rows(np.array([500]))[1])


def test_rows_are_stored_ahead_unless_decay_outruns_momentum():
    """A function of the settings, the same for every type of row: a checkpoint is read as it was written."""
    for dtype in ("float32", "float64"):
        ahead = [
            DeferredUpdateCoefficients(o, dtype).ahead
            for o in (Adam(), AdamAR(alpha=5e-4), AdamW(), AdamAR(alpha=5e-3))
        ]
        assert ahead == [True, True, True, False]
    # The farthest that a row is stored from its value, in first movements, beside 9 without a decay.
    assert DeferredUpdateCoefficients(AdamAR(1.0, alpha=7e-4)).at(5000).lookahead[:, 0].sum() < 32 * 10
    assert DeferredUpdateCoefficients(Adam(1.0)).at(50_000).lookahead[:, 0].sum() == pytest.approx(9.04, rel=1e-3)


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamAR(alpha=1e-4), AdamW(schedule=Cosine(decay_steps=2000)),
        AdamAR(alpha=1e-6, decay="by_epoch", epoch_steps=300),
    ],
)  # fmt: skip
def test_a_jump_gives_the_bits_of_walking(optimizer):
    walked, jumped = DeferredUpdateCoefficients(optimizer), DeferredUpdateCoefficients(optimizer)
    for k in range(1, 1200):
        walked.at(k)
    jumped.at(3000).at(1199)
    last = np.arange(1200)
    for one, other in zip(walked.for_rows(last), jumped.for_rows(last), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(walked.lookahead, jumped.lookahead)


def test_a_decay_by_epoch_that_outruns_momentum_over_too_long_an_epoch_is_refused():
    with pytest.raises(ValueError, match="use a smaller alpha"):
        DeferredUpdateCoefficients(AdamAR(alpha=1e-2, decay="by_epoch", epoch_steps=100_000))
    DeferredUpdateCoefficients(AdamAR(alpha=1e-9, decay="by_epoch", epoch_steps=100_000))
    DeferredUpdateCoefficients(AdamAR(alpha=1e-2, moments="lazy", decay="by_epoch", epoch_steps=100_000))


@pytest.mark.parametrize(
    "optimizer", [AdamAR(alpha=0.5), AdagradAR(alpha=0.5), RMSpropAR(alpha=0.5), AdamW(0.1, weight_decay=0.5)]
)
def test_never_touched_rows_owe_nothing(optimizer):
    decay, movements = DeferredUpdateCoefficients(optimizer).at(100).for_rows(np.array([0]))
    assert decay[0] == 1.0
    assert all(moved[0] == 0.0 for moved, _ in movements)


def test_never_touched_rows_decay_from_the_start_if_asked():
    optimizer = AdagradAR(alpha=0.01, first_touch="literal")
    decay, _ = DeferredUpdateCoefficients(optimizer).at(9).for_rows(np.array([0]))
    assert decay[0] == pytest.approx(math.prod(1 - 0.01 * i for i in range(9)))
    decay, _ = (
        DeferredUpdateCoefficients(AdamW(0.1, weight_decay=0.5, first_touch="literal")).at(9).for_rows(np.array([0]))
    )
    assert decay[0] == pytest.approx(0.95**9)


def test_one_idle_step_does_not_decay_yet():
    decay, _ = DeferredUpdateCoefficients(AdagradAR(alpha=0.5)).at(10).for_rows(np.array([10, 9, 8, 7, 6]))
    np.testing.assert_allclose(decay, [1.0, 1.0, 0.5, 0.0, 0.0])


def test_memory_does_not_grow_with_the_number_of_steps():
    for optimizer in (AdamAR(alpha=1e-5), AdamW(0.01, schedule=Cosine(decay_steps=10_000))):
        coefficients = DeferredUpdateCoefficients(optimizer).at(20_000_000)
        sizes = [len(x) for x in (coefficients.movements, coefficients.decay, coefficients.log_sums)]
        assert max(sizes) < 60_000
    decay, movements = DeferredUpdateCoefficients(AdamAR(alpha=1e-5)).at(20_000_000).for_rows(np.array([19_999_990, 3]))
    assert 0.99 < decay[0] < 1.0
    assert decay[1] == 0.0
    assert all(moved[1] == 0.0 for moved, _ in movements)


def test_a_row_from_the_future_is_refused():
    with pytest.raises(ValueError, match="restore completed_steps"):
        DeferredUpdateCoefficients(AdamAR(moments="lazy")).at(5).for_rows(np.array([6]))


@pytest.mark.parametrize(
    "optimizer", [SGD(), Adagrad(), RMSprop(), Adam(moments="lazy"), Adam(beta1=0.0), RowwiseAdam(moments="lazy")]
)
def test_optimizers_that_leave_idle_rows_alone_have_no_coefficients(optimizer: RowOptimizer):
    assert deferred_update_coefficients(optimizer, "float64") is None
