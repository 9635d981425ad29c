"""Checks that the parts of a dataset fit together; each problem comes with its remedy. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.spec.checks.labels import label_problems
from trainer.spec.messages import brokers_and_topic
from trainer.spec.problems import FieldProblem
from trainer.spec.uri_schemes import SCHEMES, TOPICS, is_topic, split

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec


def dataset_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield contradictions within a dataset, and settings that are not available yet."""
    yield from label_problems(spec)
    yield from _dense_problems(spec)
    yield from _reference_problems(spec)
    yield from _text_problems(spec)
    yield from _time_problems(spec)
    yield from _uri_problems(spec)
    yield from _topic_problems(spec)
    yield from _negatives_problems(spec)
    yield from _item_problems(spec)


def _item_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield conflicts between the item table and the features of the rows."""
    items = spec.items
    if items is None:
        return
    item = spec.features.get("item")
    if item is None or item.type != "id" or item.join is not None or item.derive is not None:
        yield FieldProblem("items", "it needs a feature 'item' of type id that reads a column", "define this feature")
        return
    if items.on not in ("item", item.column):
        yield FieldProblem(
            "items.on",
            f"'{items.on}' is not the column of 'item', '{item.column or 'item'}'",
            "name a column that both files have, in `on` of items and in `column` of the feature item",
        )
    for name, feature in items.features.items():
        field = f"items.features.{name}"
        if name in spec.features:
            yield FieldProblem(field, f"the rows have a feature '{name}' too", "give one of them another name")
        for part in ("join", "derive", "weights", "timestamp"):
            if getattr(feature, part) is not None:
                yield FieldProblem(f"{field}.{part}", "an item feature is a column of the items' file", "leave it out")
        if feature.missing == "error" and feature.has_ids:
            yield FieldProblem(f"{field}.missing", "an item without this id has the unknown id", "leave it out")
        target = spec.joined_features.get(feature.shares) if feature.shares is not None else None
        if feature.shares is not None and (target is None or target.shares or not target.has_ids):
            owners = (one for one, other in spec.joined_features.items() if not other.shares and other.has_ids)
            there = ", ".join(sorted(owners))
            yield FieldProblem(
                f"{field}.shares", f"no table '{feature.shares}'", f"name one of {there}, or leave it out"
            )


def _dense_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield a problem for each numeric feature that is named where a feature of ids is needed."""
    dense = {name: feature.type for name, feature in spec.features.items() if not feature.has_ids}
    if len(dense) == len(spec.features):
        kinds = " or ".join(f"{kind}s" if kind == "vector" else kind for kind in dict.fromkeys(dense.values()))
        yield FieldProblem("features", f"all of them are {kinds}", "add a feature with ids, which a model needs")
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
            kind = "dense" if dense[name] == "dense" else "a vector"
            yield FieldProblem(field, f"'{name}' is {kind}, and has no ids", "name a feature of ids")
    for name in sorted(dense.keys() & {"user", "item"}):
        yield FieldProblem(f"features.{name}.type", f"the feature '{name}' must have ids", "use id, or another name")


def _text_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield a problem if a text shares a table with ids of another type, or with a text with other n-grams."""
    features = spec.joined_features
    for name, feature in features.items():
        target = features.get(feature.shares) if feature.shares is not None else None
        if target is None or feature.effective_ngrams == target.effective_ngrams:
            continue
        field = f"features.{name}.shares" if name in spec.features else f"items.features.{name}.shares"
        if feature.effective_ngrams is None or target.effective_ngrams is None:
            text, ids = (name, feature.shares) if target.effective_ngrams is None else (feature.shares, name)
            yield FieldProblem(
                field, f"'{text}' is a text, whose ids are buckets, but '{ids}' has other ids", "leave it out"
            )
        else:
            yield FieldProblem(
                field, f"'{name}' and '{feature.shares}' have different n-grams", "give both the same ngrams"
            )


def _reference_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield a problem for each name of a feature that does not exist, or whose table cannot be shared."""
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
                "it is compared with the time of rows, which have none",
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
        elif scheme in TOPICS and field != "uri":
            yield FieldProblem(field, "a topic is no file", "name a file: only the rows of a dataset come from a topic")


def _topic_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    if not is_topic(spec.uri):
        if spec.messages is not None:
            yield FieldProblem("messages", "it is only for topics", "leave it out, or set uri: kafka://HOST:PORT/TOPIC")
        return
    if brokers_and_topic(spec.uri) is None:
        remedy = "use this form, without user name and password: messages.security names variables with these"
        yield FieldProblem("uri", "it is not kafka://HOST:PORT,HOST:PORT/TOPIC", remedy)
    if spec.messages is None:
        yield FieldProblem("messages", "a topic does not declare its columns", "give messages.columns by type")
        return
    security = spec.messages.security
    is_sasl, is_tls = security.protocol.startswith("sasl"), security.protocol.endswith("ssl")
    fits = {
        "username": is_sasl, "password": is_sasl, "ca": is_tls, "certificate": is_tls, "key": is_tls,
        "key_password": is_tls,
    }  # fmt: skip
    for name in security.variables:
        if not fits[name]:
            yield FieldProblem(
                f"messages.security.{name}", f"{security.protocol} has none", "leave it out, or set another protocol"
            )
    if is_sasl and None in (security.username, security.password):
        yield FieldProblem(
            "messages.security",
            f"{security.protocol} needs a user name and a password",
            "name the variables, such as username: EVENKEEL_KAFKA_USERNAME, password: EVENKEEL_KAFKA_PASSWORD",
        )


def _negatives_problems(spec: DatasetSpec) -> Iterator[FieldProblem]:
    negatives = spec.negatives
    if negatives is None:
        return
    drawn = spec.features.get(negatives.of)
    if drawn is not None and drawn.is_list:
        yield FieldProblem(
            "label.negatives.of", f"'{negatives.of}' is a list, and single ids are drawn", "name a feature of type id"
        )
    if negatives.distribution == "in_batch":
        yield FieldProblem(
            "label.negatives.distribution",
            "these negatives are drawn before there are batches",
            "use uniform or popularity; or label: column or rule, with model.negative_distribution: in_batch or loss: "
            "sampled_softmax of two_tower",
        )
    for name in negatives.item_features or ():
        feature = spec.features.get(name)
        if feature is None:
            there = ", ".join(sorted(spec.features))
            yield FieldProblem("label.negatives.item_features", f"no feature '{name}' (there are {there})")
        elif name == "user" or spec.column_of(name) in (spec.column_of("user"), spec.column_of(negatives.of)):
            yield FieldProblem(
                "label.negatives.item_features", f"'{name}' is the user or the drawn item itself", "leave it out"
            )
    if negatives.distribution != "popularity" and negatives.power != 0.75:
        yield FieldProblem(
            "label.negatives.power", f"{negatives.distribution} has none", "use popularity, or leave it out"
        )
