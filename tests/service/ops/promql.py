"""What an expression of PromQL asks for, and the series that it may find."""

from __future__ import annotations

import re
from typing import Any

import promql_parser

Series = dict[str, list[dict[str, str]]]
"""Labels of each series that the service shows, by the series' name."""
PROMETHEUS_OWN = {"up", "ALERTS"}


def selectors(expression: Any) -> list[Any]:
    """Every selector of series within an expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        return [expression]
    parts = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")]
    parts += list(getattr(expression, "args", None) or [])
    return [found for part in parts if part is not None for found in selectors(part)]


def unfounded(expression: str, shown: Series) -> list[str]:
    """What ``expression`` asks for and the service does not show: series, labels, values of labels."""
    missing = []
    for selector in selectors(promql_parser.parse(expression)):
        if selector.name in PROMETHEUS_OWN:
            continue
        if selector.name not in shown:
            missing.append(f"no series {selector.name}")
            continue
        for matcher in selector.matchers.matchers:
            values = {labels.get(matcher.name) for labels in shown[selector.name]}
            equal = matcher.op == promql_parser.MatchOp.Equal
            if values == {None} or (equal and matcher.value not in values):
                missing.append(f"{selector.name} has {matcher.name} {values}")
    return missing


def grouped_by(expression: str) -> set[str]:
    """The labels that the aggregations of ``expression`` name."""
    lists = re.findall(r"\bby \(([^)]*)\)", expression)
    return {label.strip() for labels in lists for label in labels.split(",")}
