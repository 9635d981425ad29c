"""Filters of a dataset's rows: what is read, and what is told of what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.spec import SpecError, parse_dataset
from trainer.spec.row_filter import AllOf, AnyOf, Column, Compare, IsIn, IsNull, Not, filter_columns, parse_filter

DATASET: dict[str, Any] = {
    "name": "shop",
    "uri": "shop.parquet",
    "features": {"user": {"type": "id"}, "item": {"type": "id"}},
    "label": {"column": "click"},
}


def test_conditions_are_read_as_they_stand() -> None:
    assert parse_filter("rating >= 4") == Compare(Column("rating"), ">=", 4)
    assert parse_filter(f"x >= {-(2**63)}") == Compare(Column("x"), ">=", -(2**63))
    assert parse_filter("-1.5 < score") == Compare(-1.5, "<", Column("score"))
    assert parse_filter(" country == 'US' ") == Compare(Column("country"), "==", "US")
    assert parse_filter("a < b") == Compare(Column("a"), "<", Column("b"))
    assert parse_filter("0 < x <= 3") == AllOf((Compare(0, "<", Column("x")), Compare(Column("x"), "<=", 3)))
    assert parse_filter("c in ('US', 'CA')") == IsIn(Column("c"), ("US", "CA"))
    assert parse_filter("c not in [1]") == Not(IsIn(Column("c"), (1,)))
    assert parse_filter("c is None") == parse_filter("c == None") == IsNull(Column("c"))
    assert parse_filter("c is not None") == parse_filter("c != None") == Not(IsNull(Column("c")))
    assert parse_filter("item.price > 1") == Compare(Column("item.price"), ">", 1)
    assert parse_filter("column('unit price') > 1") == Compare(Column("unit price"), ">", 1)
    x, y, z = (Compare(Column(name), "==", True) for name in "xyz")
    assert parse_filter("x == True or y == True and not z == True") == AnyOf((x, AllOf((y, Not(z)))))
    assert filter_columns("b > 1 and (a in (1, 2) or b < c and d is None)") == ("b", "a", "c", "d")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rating >=", "cannot be read"),
        ("rating = 4", "cannot be read"),
        ("rating", "'rating' is no comparison"),
        ("rating + 1 > 2", "'rating + 1' is no value"),
        ("4 > 3", "neither is a column"),
        ("country in 'US'", "is no list of values"),
        ("country in ()", "is no list of values"),
        ("4 in (4, 5)", "'4' is no column"),
        ("country is 'US'", "'is' can only be followed by None"),
        ("open('x') == 1", "is no column"),
        ("column(name) == 1", "is no column"),
        ("__import__('os').system('x') == 1", "is no column"),
        ("(lambda: 1)() == x", "is no column"),
        ("price > 1j", "is no value"),
        ("item != 18446744073709551616", "'18446744073709551616' is no 64-bit integer"),
        ("item in (1, -9223372036854775809)", "'-9223372036854775809' is no 64-bit integer"),
        (" and ".join(["x > 1"] * 101), "more than 100 comparisons"),
        ("(" * 300 + "x > 1" + ")" * 300, "cannot be read"),
    ],
)
def test_what_is_no_filter_is_told_where_and_what(text: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_dataset(DATASET | {"filter": text})
    (problem,) = refused.value.problems
    assert problem.field == "filter"
    assert said in str(problem)
    assert "such as" in str(problem) or "use in" in str(problem)


def test_a_dataset_without_one_is_as_before() -> None:
    assert "filter" not in parse_dataset(DATASET).model_dump(mode="json")
    assert parse_dataset(DATASET | {"filter": "a > 1"}).model_dump(mode="json")["filter"] == "a > 1"
