"""Messages name fields as text: each field that a problem of a spec names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard, get_args, get_origin

import pytest

from tests.trainer.spec.test_frozen_options import fields
from trainer.spec import DatasetSpec, JobSpec, Spec

ROOT = Path(__file__).parents[3]
ANY = "<any>"


def parts(annotation: Any) -> Iterator[type[Spec]]:
    """The specs that an annotation holds."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    for one in get_args(annotation):
        yield from parts(one)


def is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict or any(is_mapping(one) for one in get_args(annotation))


def has(spec: type[Spec], path: list[str]) -> bool:
    """Whether there is a field at the path; any is left to the one that fills it in."""
    if not path or path[0] == ANY:
        return True
    field = spec.model_fields.get(path[0])
    if field is None:
        return False
    rest = path[2:] if is_mapping(field.annotation) else path[1:]
    return not rest or any(has(part, rest) for part in parts(field.annotation))


def text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(value) or ANY for value in node.values)
    return None


def named() -> Iterator[tuple[str, str]]:
    """Paths of fields that problems of specs are of, or that a text names with its part, each with its place."""
    within = "|".join(name for name, field in JobSpec.model_fields.items() if any(parts(field.annotation)))
    # dataset.html is the template of a page.
    of_part = re.compile(rf"(?<![\w./-])(?:{within})(?:\.(?!html\b)(?:[a-z_0-9]+|{ANY}))+(?![\w(/-])")
    for file in sorted(file for room in ("trainer", "service") for file in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            place = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if "spec" in file.parts and is_problem(node):
                field = text(node.args[0]) or ""
                if re.fullmatch(rf"(?:[a-z_0-9.]|{ANY})+", field):
                    yield field, place
            yield from ((path, place) for path in of_part.findall(text(node) or ""))
    # ``dataset`` of its page is a row of the service, not a part of a job.
    templates = {*(ROOT / "service").rglob("*.html")} - {ROOT / "service/web/templates/dataset.html"}
    for file in sorted({*templates, *(ROOT / "deploy").rglob("*.yml"), *(ROOT / "deploy").rglob("*.yaml")}):
        yield from ((path, str(file.relative_to(ROOT))) for path in of_part.findall(file.read_text("utf-8")))


def is_problem(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "FieldProblem"


@pytest.mark.slow
def test_each_field_that_a_problem_names_is_there() -> None:
    paths = list(named())
    assert len(paths) > 60
    for path, place in paths:
        assert any(has(spec, path.split(".")) for spec in (JobSpec, DatasetSpec)), f"{place}: there is no field {path}"


@pytest.mark.slow
def test_each_field_that_a_remedy_names_without_its_part_is_there() -> None:
    """Such as batch_size of "lower model.embedding_dim or batch_size"."""
    bare = re.compile(r"\b[a-z_]+\.[a-z_]+ or (?:set )?([a-z]+(?:_[a-z]+)+)\b(?![.(])")
    names = {one.partition(".")[2] for spec in (JobSpec, DatasetSpec) for one in fields(spec)}
    found = [
        (name, f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
        for room in ("trainer", "service")
        for file in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        for name in bare.findall(text(node) or "")
    ]
    assert len(found) >= 3
    for name, place in found:
        assert name in names, f"{place}: there is no field {name}"
