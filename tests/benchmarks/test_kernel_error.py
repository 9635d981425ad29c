"""The figures of views: more frequencies err less, and orthogonal ones less than independent ones."""

from __future__ import annotations

import numpy as np

from benchmarks import kernel_error


def test_errors_fall_with_the_root_of_m_and_orthogonal_ones_are_smaller() -> None:
    (few, *_, independent), spread = kernel_error.rms_errors(16, 32, 1.0, 3, 100)
    (many, *_), same = kernel_error.rms_errors(16, 512, 1.0, 3, 100)
    assert many < few / 2
    assert few < independent
    assert spread == same > 0.05


def test_a_dim_is_found_that_is_below_the_bound() -> None:
    vectors = np.random.default_rng(0).standard_normal((300, 32))
    ((sigma, epsilon, orthogonal, gaussian, bound, *_),) = kernel_error.dims(vectors, [(0.4, 0.05)])
    numbers = [int(one.replace(",", "")) for one in (orthogonal, gaussian, bound)]
    assert (sigma, epsilon) == ("0.4", "0.05")
    assert numbers == sorted(numbers)
