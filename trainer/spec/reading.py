"""Conversion of YAML files and mappings to specs, and of pydantic's errors to messages for users."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trainer.spec import yaml_documents
from trainer.spec.base import STORED, Spec
from trainer.spec.dataset import DatasetSpec
from trainer.spec.evaluation import METRIC_PATTERN, POINTWISE_METRICS, RANKING_METRICS
from trainer.spec.job import JobSpec
from trainer.spec.models.registry import BROKEN_MODELS, MODELS
from trainer.spec.problems import FieldProblem, InvalidFieldsError, SpecError
from trainer.spec.stored_specs import with_former_defaults


def problems_of(errors: Iterable[Mapping[str, Any]]) -> Iterator[FieldProblem]:
    """Yield the user's messages for pydantic's errors (``ValidationError.errors()``).

    An error that a spec's own checks raised is one problem for each field that they name.
    """
    for item in errors:
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, InvalidFieldsError):
            for problem in cause.problems:
                where = [*_path_of(item), *([problem.field] if problem.field else [])]
                yield problem._replace(field=".".join(where))
        else:
            yield _problem_of(item)


def _path_of(error: Mapping[str, Any]) -> list[str]:
    """Return the path of the field as users write it, without the model kind that pydantic adds to a path."""
    where = [str(part) for part in error["loc"]]
    for index, part in enumerate(where[:-1]):
        if part == "model" and where[index + 1] in MODELS:
            del where[index + 1]
            break
    if where[:1] == ["partition"]:
        del where[1:2]
    return where


def _meant(path: Sequence[str]) -> str:
    """Return the remedy for an unknown field: the most similar name of the part of a spec that it is in."""
    parts: set[type[Spec]] = {JobSpec, DatasetSpec}
    for name in path[:-1]:
        inner = {spec for part in parts if name in part.model_fields for spec in _specs_in(part.model_fields[name])}
        parts = inner or parts
    names = sorted({name for part in parts for name in part.model_fields})
    similar = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.75)
    return f"did you mean {similar[0]}?" if similar else "check the spelling"


def _specs_in(annotation: Any) -> Iterator[type[Spec]]:
    """Yield the parts of specs that a field's type consists of."""
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    for inner in get_args(annotation):
        yield from _specs_in(inner)


def _problem_of(error: Mapping[str, Any]) -> FieldProblem:
    where, message, remedy = _path_of(error), str(error["msg"]).removeprefix("Value error, "), ""
    if error["type"] == "extra_forbidden":
        message, remedy = "no such field", _meant(where)
    elif error["type"] == "string_pattern_mismatch" and error["ctx"]["pattern"] == METRIC_PATTERN:
        message, names = "no such metric", ", ".join(POINTWISE_METRICS + RANKING_METRICS)
        remedy = f"use one of {names} (K: 1 to 999; _full: of all)"
    elif error["type"] == "union_tag_not_found":
        where, message = [*where, "kind"], "Field required"
    elif error["type"] == "union_tag_invalid" and "tracking" in where:
        where, message = [*where, "kind"], "no such tracker"
        remedy = f"use one of {error['ctx']['expected_tags'].replace(chr(39), '')}"
    elif error["type"] == "union_tag_invalid":
        where, broken = [*where, "kind"], BROKEN_MODELS.get(str(error["ctx"]["tag"]))
        message, remedy = (broken, "") if broken else ("no such model", f"use one of {', '.join(MODELS)}")
    return FieldProblem(".".join(where), message, remedy)


def parse_dataset(document: Any, where: str = "dataset") -> DatasetSpec:
    """Return the dataset that a mapping of its fields describes.

    Args:
        document: The fields, as a YAML file has them.
        where: Name of the document in error messages.

    Raises:
        SpecError: A field is unknown, missing, or outside its bounds.

    Example:
        >>> from trainer.spec import parse_dataset
        >>> features = {"user": {"type": "id"}, "item": {"type": "id"}}
        >>> label = {"column": "click"}
        >>> log = parse_dataset({"name": "log", "uri": "log.parquet", "features": features, "label": label})
        >>> list(log.features)
        ['user', 'item']
    """
    return parse(DatasetSpec, document, where)


def parse_job(document: Any, where: str = "job", *, stored: bool = False) -> JobSpec:
    """Return the job that a mapping of its fields describes.

    Args:
        document: The fields, as a YAML file or the REST interface has them.
        where: Name of the document in error messages.
        stored: True for the spec of a trained job, which is only read: removed settings are dropped, not refused.

    Raises:
        SpecError: A field is unknown, missing, or outside its bounds.

    Example:
        >>> from trainer.spec import parse_job
        >>> fields = {"name": "ctr", "dataset": {"name": "log"}, "model": {"kind": "dcnv2", "embedding_dim": 8}}
        >>> job = parse_job(fields)
        >>> job.model.kind, job.epochs
        ('dcnv2', 1)
        >>> parse_job(fields | {"epochs": 0})
        Traceback (most recent call last):
        ...
        trainer.spec.problems.SpecError: job: epochs: Input should be greater than or equal to 1
    """
    return parse(JobSpec, with_former_defaults(document) if stored else document, where, stored)


def load_documents(path: Path | str) -> tuple[DatasetSpec | None, JobSpec | None]:
    """Return the dataset and the job that a YAML file holds; either may be absent.

    Raises:
        SpecError: A document is not a valid spec, or the file is not valid YAML.

    Example:
        >>> from trainer.spec import load_documents
        >>> dataset, job = load_documents("examples/clicklog.yaml")
        >>> dataset.name, job.model.kind
        ('clicklog', 'dnn')
    """
    where = str(path)
    dataset: DatasetSpec | None = None
    job: JobSpec | None = None
    for document in documents_of(Path(path)):
        if not isinstance(document, dict):
            raise SpecError(where, [FieldProblem("", "a spec is a mapping of fields; see examples/")])
        if "model" in document or "spec_version" in document:
            if job is not None:
                raise SpecError(where, [FieldProblem("", "holds two jobs: one per file")])
            job = parse_job(document, where)
        else:
            if dataset is not None:
                raise SpecError(where, [FieldProblem("", "holds two datasets: one per file")])
            dataset = parse_dataset(document, where)
    if dataset is None and job is None:
        raise SpecError(where, [FieldProblem("", "is empty")])
    return dataset, job


def documents_of(path: Path) -> list[Any]:
    """Return the documents of a YAML file that are not empty.

    Raises:
        SpecError: The file cannot be read, or is not YAML.
    """
    try:
        return [one for one in yaml_documents.load_all(path.read_text("utf-8")) if one is not None]
    except OSError as error:
        raise SpecError(str(path), [FieldProblem("", f"cannot be read: {error.strerror or error}")]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(str(path), [FieldProblem("", f"is not YAML: {error}")]) from None


SpecType = TypeVar("SpecType", bound=Spec)


def parse(kind: type[SpecType], document: Any, where: str, stored: bool = False) -> SpecType:
    """Return the spec that ``document`` describes; SpecError names ``where`` and each field that is wrong."""
    try:
        return kind.model_validate(document, context={STORED: stored})
    except ValidationError as error:
        raise SpecError(where, problems_of(error.errors(include_url=False))) from None
