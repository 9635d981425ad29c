"""Messages name fields as text: each field that a problem of a spec names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

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
    """Whether there is a field at the path; any is left to whoever fills it in."""
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
    """Paths of fields that problems are of, or that a message or remedy names with its part, each with its place."""
    within = "|".join(name for name, field in JobSpec.model_fields.items() if any(parts(field.annotation)))
    for file in sorted((ROOT / "trainer" / "spec").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "FieldProblem":
                continue
            place = f"{file.relative_to(ROOT)}:{node.lineno}"
            field, *words = [text(argument) or "" for argument in node.args]
            if re.fullmatch(rf"(?:[a-z_0-9.]|{ANY})+", field):
                yield field, place
            for one in words:
                yield from ((path, place) for path in re.findall(rf"\b(?:{within})(?:\.(?:[a-z_0-9]+|{ANY}))+", one))


def test_each_field_that_a_problem_names_is_there() -> None:
    paths = list(named())
    assert len(paths) > 60
    for path, place in paths:
        assert any(has(spec, path.split(".")) for spec in (JobSpec, DatasetSpec)), f"{place}: there is no field {path}"
