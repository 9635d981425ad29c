"""Fields of datasets and jobs, from the models that validate them."""

from __future__ import annotations

import json
import re
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel, StringConstraints
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deploy.site.reference.text import bullets, docstring, page, paragraph
from trainer.spec import DatasetSpec, JobSpec

KIND = ", kind "
"""Text of a heading between the path of a field and the name of a kind."""
MAX_PATTERN = 80
"""Longest regular expression, in characters, that is shown."""
_PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null", Any: "anything"}
_BOUNDS = {
    annotated_types.Ge: ("at least", "ge"),
    annotated_types.Gt: ("above", "gt"),
    annotated_types.Le: ("at most", "le"),
    annotated_types.Lt: ("below", "lt"),
    annotated_types.MultipleOf: ("a multiple of", "multiple_of"),
    annotated_types.MinLen: ("at least", "min_length"),
    annotated_types.MaxLen: ("at most", "max_length"),
}


def dataset_page() -> str:
    """Return the page of a dataset's fields."""
    return _page(
        DatasetSpec,
        "Fields of a dataset",
        "A field that is left out has its default. With examples: [datasets](spec.md#dataset).",
    )


def job_page() -> str:
    """Return the page of a job's fields."""
    intro = (
        "A field that is left out has its default. With examples: [jobs](spec.md#job). About models, optimizers and "
        "losses: "
        "[models](models.md), [row optimizers](row_optimizers.md), [losses and metrics](losses_and_metrics.md)."
    )
    return _page(JobSpec, "Fields of a job", paragraph(intro))


def _page(root: type[BaseModel], title: str, intro: str) -> str:
    headings = _reachable(root)
    lines = {model: dict(_lines(model, headings)) for model in headings}
    parts = [intro]
    shared: dict[str, dict[str, str]] = {}
    for model, heading in headings.items():
        group = _group(heading)
        if group and group not in shared:
            kinds = {kind: other for kind, other in headings.items() if _group(other) == group}
            shared[group] = _shared([lines[kind] for kind in kinds])
            links = ", ".join(f"[{other.removeprefix(group + KIND)}]({_anchor(other)})" for other in kinds.values())
            parts += [f"## {group}", paragraph(f"Kinds: {links}. Fields that several of them have:")]
            parts.append(bullets(shared[group].values()))
        common = {name: line for name, line in lines[model].items() if shared.get(group, {}).get(name) == line}
        names = ", ".join(f"`{name}`" for name in common)
        own = [line for name, line in lines[model].items() if name not in common and not (group and name == "kind")]
        parts += [f"## {heading}", docstring(model)]
        parts.append(bullets([*own, f"as described in [{group}]({_anchor(group)}): {names}"] if common else own))
    return page(title, "`trainer/spec`", *parts)


def _group(heading: str) -> str:
    """Return the path of the field if a heading names one of the field's kinds, else an empty string."""
    return heading.partition(KIND)[0] if KIND in heading else ""


def _shared(kinds: list[dict[str, str]]) -> dict[str, str]:
    """Map each field to its most frequent description, if at least two of the variants in ``kinds`` share it."""
    counts: dict[str, Counter[str]] = {}
    for lines in kinds:
        for name, line in lines.items():
            counts.setdefault(name, Counter())[line] += 1
    most = {name: lines.most_common(1)[0] for name, lines in counts.items()}
    return {name: line for name, (line, count) in most.items() if count > 1}


def _anchor(heading: str) -> str:
    return "#" + re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-")


def _reachable(root: type[BaseModel]) -> dict[type[BaseModel], str]:
    """Return the model and all models nested in its fields, each with the first path of fields that leads to it."""
    found: dict[type[BaseModel], str] = {}
    waiting: list[tuple[type[BaseModel], str]] = [(root, "")]
    while waiting:
        model, path = waiting.pop(0)
        if model in found:
            continue
        kind = model.model_fields.get("kind")
        alone = kind is not None and len(typing.get_args(kind.annotation)) == 1
        found[model] = f"{path}{KIND}{typing.get_args(kind.annotation)[0]}" if kind and alone else path or "Top level"
        for name, field in model.model_fields.items():
            below = f"{path}.{name}" if path else name
            waiting += [(part, below) for part in _models(field.annotation)]
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def _lines(model: type[BaseModel], headings: Mapping[type[BaseModel], str]) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        bounds = "".join(f", {bound}" for bound in _bounds(field.annotation, field.metadata))
        yield name, f"`{name}`: {_type(field.annotation, headings)}{bounds}; {_default(field)}"


def _type(annotation: Any, headings: Mapping[type[BaseModel], str]) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        heading = _group(headings[annotation]) or headings[annotation]
        return f"[{heading}]({_anchor(heading)})"
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Literal:
        return " | ".join(f"`{value}`" for value in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(part, headings) for part in parts))
    if origin is typing.Annotated:
        return _type(parts[0], headings) + "".join(f" ({bound})" for bound in _bounds(None, parts[1:]))
    if origin is dict:
        return f"mapping of {_type(parts[0], headings)} to {_type(parts[1], headings)}"
    if origin is tuple and parts[1:] == (...,):
        return f"list of {_type(parts[0], headings)}"
    if origin is tuple:
        return f"[{', '.join(_type(part, headings) for part in parts)}]"
    raise TypeError(f"{annotation}: deploy/site/reference/fields.py has no words for this type: add them to _type")


def _bounds(annotation: Any, metadata: Any) -> Iterator[str]:
    for bound in metadata:
        if isinstance(bound, StringConstraints):
            pattern = str(getattr(bound.pattern, "pattern", bound.pattern or ""))
            if pattern:
                yield (
                    f"matching `{pattern}`"
                    if len(pattern) < MAX_PATTERN
                    else "of a form that the error message explains"
                )
            if bound.max_length:
                yield f"at most {bound.max_length} characters"
        elif isinstance(bound, FieldInfo):
            yield from _bounds(None, bound.metadata)
        elif type(bound) in _BOUNDS:
            word, attribute = _BOUNDS[type(bound)]
            unit = "" if not attribute.endswith("_length") else " characters" if annotation is str else " entries"
            yield f"{word} {getattr(bound, attribute)}{unit}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if isinstance(value, BaseModel):
        changed = value.model_dump(mode="json", exclude_defaults=True)
        return f"default `{changed}`" if changed else "default: its own defaults"
    shown = list(value) if isinstance(value, tuple) else value
    return f"default `{shown if isinstance(shown, str) else json.dumps(shown)}`"
