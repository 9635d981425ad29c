"""Checks of which parts of a dataset go together, with the remedy where they do not. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.spec.checks.labels import label_problems
from trainer.spec.problems import FieldProblem
from trainer.spec.uri_schemes import SCHEMES, split

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec


def dataset_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield what of a dataset contradicts itself, or is not available yet."""
    yield from label_problems(spec)
    yield from _dense_problems(spec)
    yield from _reference_problems(spec)
    yield from _time_problems(spec)
    yield from _uri_problems(spec)
    yield from _negatives_problems(spec)
    yield from _item_problems(spec)


def _item_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield what of the item table does not fit the features of the rows."""
    items = spec.items
    if items is None:
        return
    item = spec.features.get("item")
    if item is None or item.type != "id" or item.join is not None or item.derive is not None:
        yield FieldProblem("items", "it is of the feature 'item', of type id, that reads a column", "describe item so")
        return
    if items.on not in ("item", item.column):
        yield FieldProblem(
            "items.on", f"'{items.on}' is no column of the item", f"name it '{item.column or 'item'}' in both files"
        )
    for name, feature in items.features.items():
        field = f"items.features.{name}"
        if name in spec.features:
            yield FieldProblem(field, f"there is a feature '{name}' of the rows", "give one of them another name")
        for part in ("join", "derive", "weights", "timestamp"):
            if getattr(feature, part) is not None:
                yield FieldProblem(f"{field}.{part}", "a feature of items reads a column of their file", "leave it out")
        if feature.missing == "error" and feature.type != "dense":
            yield FieldProblem(f"{field}.missing", "an item without the id is unknown of it", "leave it out")
        target = spec.joined_features.get(feature.shares) if feature.shares is not None else None
        if feature.shares is not None and (target is None or target.shares or target.type == "dense"):
            owners = (one for one, other in spec.joined_features.items() if not other.shares and other.type != "dense")
            there = ", ".join(sorted(owners))
            yield FieldProblem(
                f"{field}.shares", f"no table '{feature.shares}'", f"name one of {there}, or leave it out"
            )


def _dense_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield where ids are meant and a feature is numeric."""
    dense = {name for name, feature in spec.features.items() if feature.type == "dense"}
    if len(dense) == len(spec.features):
        yield FieldProblem("features", "all of them are dense", "a model needs at least one of ids")
        return
    named = {f"features.{name}.shares": feature.shares for name, feature in spec.features.items()}
    named |= {
        f"features.{name}.derive.{part}": getattr(feature.derive, part)
        for name, feature in spec.features.items()
        if feature.derive is not None
        for part in ("previous", "by")
    }
    named |= {f"graphs.{name}.of": graph.of for name, graph in spec.graphs.items()}
    if spec.negatives is not None:
        named["label.negatives.of"] = spec.negatives.of
    for field, name in named.items():
        if name in dense:
            yield FieldProblem(field, f"'{name}' is dense, and has no ids", "name a feature of ids")
    for name in sorted(dense & {"user", "item"}):
        yield FieldProblem(f"features.{name}.type", f"what is named {name} has ids", "use id, or another name")


def _reference_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield names of features that there are none of, or whose table cannot be shared."""
    there = f"there are {', '.join(sorted(spec.features))}"
    for name, feature in spec.features.items():
        target = None if feature.shares is None else spec.features.get(feature.shares)
        field = f"features.{name}.shares"
        if feature.shares is not None and target is None:
            yield FieldProblem(field, f"no feature '{feature.shares}' ({there})")
        elif target is not None and target.shares is not None:
            yield FieldProblem(field, f"'{feature.shares}' itself shares a table; name that one instead")
        if feature.derive is not None and feature.shares is None and feature.derive.previous in spec.features:
            previous = feature.derive.previous
            yield FieldProblem(f"features.{name}", f"a history of '{previous}' needs shares: {previous}")
    negatives = spec.negatives
    if negatives is not None and negatives.of not in spec.features:
        yield FieldProblem("label.negatives.of", f"no feature '{negatives.of}' ({there})")
    for name, graph in spec.graphs.items():
        if graph.of not in spec.features:
            yield FieldProblem(f"graphs.{name}.of", f"no feature '{graph.of}' ({there})")


def _time_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    if spec.order is not None and spec.timestamp is not None:
        yield FieldProblem("", "give order or timestamp, not both")
    for name, feature in spec.features.items():
        joined = feature.join is not None and feature.join.timestamp is not None
        if (joined or feature.timestamp is not None) and spec.ordering is None:
            yield FieldProblem(
                f"features.{name}.timestamp",
                "it is compared with the time of rows",
                "give order or timestamp of the dataset, or leave it out",
            )


def _uri_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    joins = {f"features.{name}.join.uri": feature.join.uri for name, feature in spec.features.items() if feature.join}
    graphs = {f"graphs.{name}.uri": graph.uri for name, graph in spec.graphs.items()}
    items = {} if spec.items is None else {"items.uri": spec.items.uri}
    *others, last = (f"{scheme}://" for scheme in SCHEMES)
    for field, uri in {"uri": spec.uri, **items, **joins, **graphs}.items():
        scheme, _ = split(uri)
        if scheme not in SCHEMES:
            remedy = f"use a local path, {', '.join(others)} or {last}"
            yield FieldProblem(field, f"{scheme}:// is not available yet", remedy)


def _negatives_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    negatives = spec.negatives
    if negatives is None:
        return
    if negatives.distribution == "in_batch":
        yield FieldProblem(
            "label.negatives.distribution",
            "examples are drawn before there are batches",
            "use uniform or popularity, or with label: column or rule model.negative_distribution: in_batch, or loss: "
            "sampled_softmax of two_tower",
        )
    if negatives.distribution != "popularity" and negatives.power != 0.75:
        yield FieldProblem(
            "label.negatives.power", f"{negatives.distribution} has none", "use popularity, or leave it out"
        )
