"""The cases of tests/support/pairwise.py: every pair that may be meets, no other, and there are few."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pairwise import pairwise


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_every_two_values_that_may_meet_do_so_in_a_case(sizes, excluded):
    """``excluded``: values of the first two factors that may not; the first value of either may meet any."""
    factors = {f"f{number}": list(range(size)) for number, size in enumerate(sizes)}
    excluded = {(one, other) for one, other in excluded if one and other}

    def allowed(case):
        return (case.get("f0"), case.get("f1")) not in excluded

    cases = pairwise(factors, allowed)
    assert all(case.keys() == factors.keys() and allowed(case) for case in cases)
    for one, other in itertools.combinations(factors, 2):
        expected = {
            (i, j)
            for i in factors[one]
            for j in factors[other]
            if (one, other) != ("f0", "f1") or (i, j) not in excluded
        }
        assert {(case[one], case[other]) for case in cases} == expected
    assert cases == pairwise(factors, allowed)


@pytest.mark.parametrize(("sizes", "most"), [((9, 5, 2, 2, 2, 2), 45), ((3, 3, 3, 3), 12), ((2,) * 10, 12)])
def test_they_are_few(sizes, most):
    """The product of the two largest factors is the least that there can be."""
    assert len(pairwise({str(number): range(size) for number, size in enumerate(sizes)})) <= most
