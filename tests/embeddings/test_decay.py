"""Idle coefficients against the recurrences of methods section 1, taken literally."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.decay import IdleCoefficients


def literal(s: int, idle: int, alpha: float, beta1: float, beta2: float) -> tuple[float, float, float]:
    """P, C and E of a row touched at step s that has been idle for ``idle`` steps, one step after another."""
    p, c, c2 = 1.0, 0.0, 0.0
    for j in range(1, idle + 1):
        keep = 1.0 - min(1.0, alpha * (j - 1))
        root = math.sqrt(1.0 - beta2 ** (s + j))
        term = (beta1 / math.sqrt(beta2)) ** j * root / (1.0 - beta1 ** (s + j))
        p *= keep
        c = keep * c + term
        c2 = keep * c2 + term * root * beta2 ** (-j / 2)
    return p, c, c2 / c if c else 1.0


@given(
    s=st.integers(1, 3000),
    idle=st.integers(0, 1500),
    alpha=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 0.3, 1.0, 7.0]),
    betas=st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.95, 0.99)]),
)
def test_equals_the_literal_recurrence(s, idle, alpha, betas):
    coefficients = IdleCoefficients(alpha=alpha, momentum=True, beta1=betas[0], beta2=betas[1]).at(s + idle)
    p, c, e = (float(x[0]) for x in coefficients.for_rows(np.array([s])))
    expected_p, expected_c, expected_e = literal(s, idle, alpha, *betas)
    # Terms that are dropped are below 1e-18; the rest is rounding of some 1000 products.
    assert p == pytest.approx(expected_p, rel=1e-11, abs=1e-300)
    assert c == pytest.approx(expected_c, rel=1e-11, abs=1e-17)
    if expected_c > 1e-12:
        assert e == pytest.approx(expected_e, rel=1e-10)


def test_step_by_step_equals_a_jump():
    walked = IdleCoefficients(alpha=1e-3, momentum=True)
    for k in range(1, 1200):
        walked.at(k)
    jumped = IdleCoefficients(alpha=1e-3, momentum=True).at(1199)
    last = np.arange(1200)
    for one, other in zip(walked.for_rows(last), jumped.for_rows(last), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-25)


def test_a_jump_back_is_exact_too():
    coefficients = IdleCoefficients(alpha=1e-3, momentum=True).at(900)
    before = coefficients.for_rows(np.arange(1, 400))
    coefficients.at(5000)
    for one, other in zip(before, coefficients.at(900).for_rows(np.arange(1, 400)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-25)


def test_never_touched_rows_owe_nothing():
    p, c, _ = IdleCoefficients(alpha=0.5, momentum=True).at(100).for_rows(np.array([0]))
    assert p[0] == 1.0
    assert c[0] == 0.0


def test_one_idle_step_does_not_decay_yet():
    p, _, _ = IdleCoefficients(alpha=0.5, momentum=False).at(10).for_rows(np.array([10, 9, 8, 7, 6]))
    np.testing.assert_allclose(p, [1.0, 1.0, 0.5, 0.0, 0.0])


def test_memory_does_not_grow_with_the_number_of_steps():
    coefficients = IdleCoefficients(alpha=1e-5, momentum=True).at(20_000_000)
    sizes = [len(x) for x in (coefficients.near_c, coefficients.far_c, coefficients.decay, coefficients.late_decay)]
    assert max(sizes) < 60_000
    p, c, _ = coefficients.for_rows(np.array([19_999_990, 3]))
    assert 0.99 < p[0] < 1.0
    assert (p[1], c[1]) == (0.0, 0.0)


def test_momentum_that_does_not_die_is_refused():
    with pytest.raises(ValueError, match="beta1 < beta2"):
        IdleCoefficients(alpha=0.0, momentum=True, beta1=0.9, beta2=0.9)
    with pytest.raises(ValueError, match="use moments 'lazy'"):
        IdleCoefficients(alpha=0.0, momentum=True, beta1=0.99999, beta2=0.999999)


def test_a_row_from_the_future_is_refused():
    with pytest.raises(ValueError, match="restore completed_steps"):
        IdleCoefficients(alpha=1e-3, momentum=False).at(5).for_rows(np.array([6]))
