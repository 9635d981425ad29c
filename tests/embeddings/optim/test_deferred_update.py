"""Deferred updates against the loop over steps (docs/methods.md): one untouched row, one step after another."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
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
)
from embeddings.optim.deferred_update import DeferredUpdateCoefficients, deferred_update_coefficients
from embeddings.optim.lr_schedules import Cosine, LinearWarmup, Schedule, StepDecay

M, V, THETA = 0.07, 0.004, 1.3


def literal(optimizer: Adam, s: int, completed: int) -> float:
    """A row with moments M and V that was touched at step s, after ``completed`` steps."""
    theta, m, v = THETA, M, V
    for t in range(s + 1, completed + 1):
        rate = optimizer.rate(t)
        theta *= (1 - min(1.0, optimizer.idle_alpha * (t - s - 1))) * (1 - rate * optimizer.constant_decay)
        m, v = optimizer.beta1 * m, optimizer.beta2 * v
        mhat, vhat = m / (1 - optimizer.beta1**t), v / (1 - optimizer.beta2**t)
        root = math.sqrt(vhat + optimizer.eps) if optimizer.eps_inside_root else math.sqrt(vhat) + optimizer.eps
        theta -= rate * mhat / root
    return theta


def root(coefficients: DeferredUpdateCoefficients, floor: float) -> float:
    return math.sqrt(V + floor) if coefficients.eps_inside_root else math.sqrt(V) + floor


def stored(coefficients: DeferredUpdateCoefficients, s: int) -> float:
    """What the update of step ``s`` stores for THETA."""
    coefficients.at(s - 1)
    return THETA - coefficients.lookahead * M / root(coefficients, coefficients.lookahead_eps)


def read(coefficients: DeferredUpdateCoefficients, row: float, s: int) -> float:
    decay, movements = coefficients.for_rows(np.array([s]))
    parts = [float(moved[0]) * M / root(coefficients, float(floor[0])) for moved, floor in movements]
    return float(decay[0]) * row - sum(parts)


schedules = st.sampled_from(
    [Schedule(), LinearWarmup(30), Cosine(5, 0.1, decay_steps=700, final_factor=0.05), StepDecay(every_steps=90)]
)
betas = st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.95, 0.99)])
steps = {"s": st.integers(1, 1500), "idle": st.integers(0, 800)}


def check(optimizer: Adam, s: int, idle: int) -> None:
    """Dropped: 1e-13 of the first movement; eps to first order: (1e-8 / .06)^2. Rounding of 1000 products: 1e-13."""
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


@given(**steps, decay=st.sampled_from([0.0, 0.01, 0.5, 4.0]), betas=betas, schedule=schedules)
def test_constant_decay_equals_the_loop(s, idle, decay, betas, schedule):
    assume(decay < 4.0 or betas[0] < 0.95)  # refused: a step takes more from a row than its momentum loses
    check(AdamW(0.02, *betas, weight_decay=decay, schedule=schedule), s, idle)


@given(**steps, alpha=st.sampled_from([1e-4, 1e-2]), schedule=schedules)
def test_eps_inside_the_root_equals_the_loop(s, idle, alpha, schedule):
    """eps to first order there is (1e-8 / 4e-3)^2 of the movement."""
    check(AdamAR(0.02, alpha=alpha, schedule=schedule, eps_inside_root=True), s, idle)


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
    assert [moved[0] for moved, _ in coefficients.for_rows(np.array([500]))[1]] == [0.0, 0.0]


def test_rows_are_stored_ahead_unless_decay_outruns_momentum():
    """A function of the settings, the same for every type of row: a checkpoint is read as it was written."""
    for dtype in ("float32", "float64"):
        ahead = [
            DeferredUpdateCoefficients(o, dtype).ahead
            for o in (Adam(), AdamAR(alpha=5e-4), AdamW(), AdamAR(alpha=5e-3))
        ]
        assert ahead == [True, True, True, False]
    # The farthest that a row is stored from its value, in first movements, beside 9 without a decay.
    assert DeferredUpdateCoefficients(AdamAR(1.0, alpha=7e-4)).at(5000).lookahead < 32 * 10
    assert DeferredUpdateCoefficients(Adam(1.0)).at(50_000).lookahead == pytest.approx(9.04, rel=1e-3)


@pytest.mark.parametrize("optimizer", [AdamAR(alpha=1e-4), AdamW(schedule=Cosine(decay_steps=2000))])
def test_a_jump_gives_the_bits_of_walking(optimizer):
    walked, jumped = DeferredUpdateCoefficients(optimizer), DeferredUpdateCoefficients(optimizer)
    for k in range(1, 1200):
        walked.at(k)
    jumped.at(3000).at(1199)
    last = np.arange(1200)
    for one, other in zip(walked.for_rows(last), jumped.for_rows(last), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (walked.lookahead, walked.lookahead_eps) == (jumped.lookahead, jumped.lookahead_eps)


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
        sizes = [
            len(x)
            for x in (coefficients.momentum_drift, coefficients.eps_term, coefficients.decay, coefficients.log_sums)
        ]
        assert max(sizes) < 60_000
    decay, movements = DeferredUpdateCoefficients(AdamAR(alpha=1e-5)).at(20_000_000).for_rows(np.array([19_999_990, 3]))
    assert 0.99 < decay[0] < 1.0
    assert (decay[1], *(moved[1] for moved, _ in movements)) == (0.0, 0.0, 0.0)


def test_momentum_that_lives_too_long_is_refused():
    with pytest.raises(ValueError, match="use moments 'lazy'"):
        DeferredUpdateCoefficients(Adam(beta1=0.99999, beta2=0.999999))


def test_a_row_from_the_future_is_refused():
    with pytest.raises(ValueError, match="restore completed_steps"):
        DeferredUpdateCoefficients(AdamAR(moments="lazy")).at(5).for_rows(np.array([6]))


@pytest.mark.parametrize(
    "optimizer", [SGD(), Adagrad(), RMSprop(), Adam(moments="lazy"), Adam(beta1=0.0), RowwiseAdam(moments="lazy")]
)
def test_optimizers_that_leave_idle_rows_alone_have_no_coefficients(optimizer: RowOptimizer):
    assert deferred_update_coefficients(optimizer, "float64") is None
