"""The field ``filter`` of a dataset: a condition on columns that its rows meet. Torch-free.

The grammar is that of comparisons in Python, read by :mod:`ast`; nothing is evaluated. trainer.data.sources.row_mask
applies the condition to batches of rows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Constant = bool | int | float | str
Comparison = Literal["==", "!=", "<", "<=", ">", ">="]
EXAMPLE = "such as \"rating >= 4 and country in ('US', 'CA')\""
MAX_CONDITIONS = 100

_COMPARISONS: dict[type[ast.cmpop], Comparison] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


@dataclass(frozen=True)
class Column:
    """A column's name; ``a.b`` is the field b of the struct column a."""

    name: str


@dataclass(frozen=True)
class Compare:
    """``left`` compared with ``right``; at least one of them is a column."""

    left: Column | Constant
    comparison: Comparison
    right: Column | Constant


@dataclass(frozen=True)
class IsIn:
    """``in``: true if the column has one of the values."""

    column: Column
    values: tuple[Constant, ...]


@dataclass(frozen=True)
class IsNull:
    """``is None``: true if the column has no value."""

    column: Column


@dataclass(frozen=True)
class Not:
    condition: Condition


@dataclass(frozen=True)
class AllOf:
    """``and``: every condition."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class AnyOf:
    """``or``: at least one condition."""

    conditions: tuple[Condition, ...]


Condition = Compare | IsIn | IsNull | Not | AllOf | AnyOf


def parse_filter(text: str) -> Condition:
    """Parse a filter: comparisons of columns with numbers and quoted text, ``in``, ``is None``, and, or, not.

    Raises:
        ValueError: it is not a filter; the message names the position and the mistake.
    """
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f" at position {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        raise ValueError(f"filter '{text}' cannot be read{where}: write a condition, {EXAMPLE}") from None
    if sum(isinstance(node, ast.Compare) for node in ast.walk(parsed)) > MAX_CONDITIONS:
        raise ValueError(f"filter has more than {MAX_CONDITIONS} comparisons: use in (...), or write a column for it")
    return _Reader(text).condition(parsed)


def filter_columns(text: str) -> tuple[str, ...]:
    """Return the columns that a filter reads, each once."""
    return tuple(dict.fromkeys(_columns(parse_filter(text))))


def _columns(condition: Condition) -> Iterator[str]:
    if isinstance(condition, Compare):
        yield from (side.name for side in (condition.left, condition.right) if isinstance(side, Column))
    elif isinstance(condition, IsIn | IsNull):
        yield condition.column.name
    elif isinstance(condition, Not):
        yield from _columns(condition.condition)
    else:
        for one in condition.conditions:
            yield from _columns(one)


class _Reader:
    """Converter from Python's syntax tree of a filter to conditions."""

    def __init__(self, text: str):
        self._text = text

    def condition(self, node: ast.expr) -> Condition:
        if isinstance(node, ast.BoolOp):
            conditions = tuple(self.condition(one) for one in node.values)
            return AllOf(conditions) if isinstance(node.op, ast.And) else AnyOf(conditions)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return Not(self.condition(node.operand))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            found = [
                self._compared(left, one, right) for left, one, right in zip(sides, node.ops, sides[1:], strict=False)
            ]
            return found[0] if len(found) == 1 else AllOf(tuple(found))
        raise self._error(node, "is no comparison")

    def _compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Condition:
        if isinstance(operator, ast.In | ast.NotIn):
            if not isinstance(right, ast.Tuple | ast.List | ast.Set) or not right.elts:
                raise self._error(right, "is no list of values, such as ('US', 'CA')")
            among = IsIn(self._column(left), tuple(self._constant(one) for one in right.elts))
            return among if isinstance(operator, ast.In) else Not(among)
        is_none = isinstance(right, ast.Constant) and right.value is None
        if isinstance(operator, ast.Is | ast.IsNot) or is_none:
            if not is_none or not isinstance(operator, ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
                raise self._error(right, "'is' can only be followed by None: 'column is None', 'column is not None'")
            null = IsNull(self._column(left))
            return null if isinstance(operator, ast.Is | ast.Eq) else Not(null)
        sides = self._side(left), self._side(right)
        if not any(isinstance(side, Column) for side in sides):
            raise self._error(left, "is compared with a value, and neither is a column")
        return Compare(sides[0], _COMPARISONS[type(operator)], sides[1])

    def _side(self, node: ast.expr) -> Column | Constant:
        return self._column(node) if isinstance(node, ast.Name | ast.Attribute | ast.Call) else self._constant(node)

    def _column(self, node: ast.expr) -> Column:
        """Return the column of ``name``, ``struct.field`` or ``column("any name")``."""
        if isinstance(node, ast.Name):
            return Column(node.id)
        if isinstance(node, ast.Attribute):
            return Column(f"{self._column(node.value).name}.{node.attr}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "column":
            (argument,) = node.args if len(node.args) == 1 and not node.keywords else (None,)
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                return Column(argument.value)
        raise self._error(node, "is no column: write its name, or column('a name with blanks')")

    def _constant(self, node: ast.expr) -> Constant:
        value = self._value(node)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise self._error(node, "is no 64-bit integer: write one of -2^63 to 2^63 - 1, or a decimal such as 1e20")
        return value

    def _value(self, node: ast.expr) -> Constant:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand)
            if not isinstance(value, bool | str):
                return -value
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
            return node.value
        raise self._error(node, "is no value: write a number, quoted text, True or False")

    def _error(self, node: ast.expr, what: str) -> ValueError:
        part = ast.get_source_segment(self._text.strip(), node) or self._text
        return ValueError(f"filter: '{part}' {what}; {EXAMPLE}")
