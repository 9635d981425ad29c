"""Cases for tests of what several choices have in common: every two values of different factors meet in some case.

Most faults are of one value or of two together. All combinations are as many as the product of all factors; these are
about as many as the product of the two largest.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def cases(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """:func:`pairwise`; where the hypothesis profile is not that of CI (`make test-long`), every combination."""
    if os.environ.get("HYPOTHESIS_PROFILE", "ci") == "ci":
        return pairwise(factors, allowed)
    every = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in every if allowed(case)]


def pairwise(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Few cases, each with a value of every factor, the same at each call; every two values that may meet do so in one.

    ``allowed`` is asked of cases of which some factors are not chosen yet, and says no where those that are exclude it;
    to what it lets through there must be a choice of each factor that is left.
    """
    # Values by their number: they need not be hashable.
    numbers = {factor: range(len(values)) for factor, values in factors.items()}

    def may_be(chosen: Mapping[str, int]) -> bool:
        return allowed({factor: factors[factor][number] for factor, number in chosen.items()})

    missing = {
        ((one, i), (other, j)): None
        for one, other in itertools.combinations(factors, 2)
        for i, j in itertools.product(numbers[one], numbers[other])
        if may_be({one: i, other: j})
    }
    found = []
    while missing:
        chosen = dict(next(iter(missing)))
        for factor in [factor for factor in factors if factor not in chosen]:
            options = [number for number in numbers[factor] if may_be(chosen | {factor: number})]
            chosen[factor] = max(options, key=lambda number: len(_met(missing, chosen | {factor: number})))
        for pair in _met(missing, chosen):
            del missing[pair]
        found.append({factor: factors[factor][chosen[factor]] for factor in factors})
    return found


def _met(pairs: Mapping[Any, None], chosen: Mapping[str, int]) -> list[Any]:
    return [pair for pair in pairs if all(chosen.get(factor) == number for factor, number in pair)]
