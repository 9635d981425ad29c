"""Spec of a hyperparameter search: the space of a job's fields, the metric, the number of trials. No torch, no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.launch.in_process import set_field
from trainer.spec import DatasetSpec, JobSpec, parse_job
from trainer.spec.base import Spec
from trainer.spec.checks.regularizers import has_validation
from trainer.spec.label_tasks import measured_numbers, watched_metric
from trainer.spec.problems import FieldProblem, InvalidFieldsError, SpecError, raise_if_invalid
from trainer.spec.reading import documents_of, parse

NOT_SEARCHED = {
    "spec_version": "it says how the job is read",
    "name": "it changes nothing",
    "labels": "they change nothing",
    "dataset": "trials compare on the same rows",
    "evaluation": "trials compare on the same rows by the same metrics",
    "init_from": "it names the model from which a job continues",
    "publish": "trials publish nothing",
    "tracking": "it changes nothing",
    "checkpoint": "it changes nothing",
    "retries": "it changes nothing",
    "priority": "it changes nothing",
    "resources": "they change nothing but the time",
    "epochs": "the scheduler compares trials epoch by epoch",
}
"""Fields of a job that are no hyperparameters, with the reason."""
_NO_NUMBER = FieldProblem(
    "metric", "the job's only metrics are tables, not numbers", "name a number in evaluation.metrics"
)

# The golden section: its point between whole ends is no whole number.
_NOT_WHOLE = (3 - 5**0.5) / 2

Ends = Annotated[tuple[float, float], Field(min_length=2, max_length=2)]


class Distribution(Spec):
    """Distribution of a field's values: ``choice``, ``uniform`` or ``loguniform``."""

    choice: tuple[Any, ...] | None = Field(default=None, min_length=1)
    uniform: Ends | None = None
    loguniform: Ends | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Distribution:
        if len(self.model_fields_set) != 1 or not self.examples:
            raise ValueError("give one of choice: [A, B], uniform: [LOW, HIGH] and loguniform: [LOW, HIGH]")
        ends = self.uniform or self.loguniform
        if ends is not None and not ends[0] < ends[1]:
            raise ValueError(f"{ends[0]:g} is not below {ends[1]:g}: give the lower end first")
        if self.loguniform is not None and self.loguniform[0] <= 0.0:
            raise ValueError("loguniform needs numbers above 0: raise the lower end, or use uniform")
        return self

    @property
    def examples(self) -> tuple[Any, ...]:
        """Values that a job is checked with: every choice, or both ends."""
        return self.choice or self.uniform or self.loguniform or ()

    @property
    def between(self) -> float | None:
        """A value between the ends that is not a whole number; None for ``choice``."""
        ends = self.uniform or self.loguniform
        return None if ends is None else ends[0] + (ends[1] - ends[0]) * _NOT_WHOLE


class SearchSpec(Spec):
    """A search over fields of a job.

    ``metric``: metric of the validation rows that trials compare by; None: that which ``watched_metric`` returns.
    ``parallelism``: number of trials at once. ``scheduler``: ``asha`` compares trials after ``grace_epochs``, then
    after ``reduction_factor`` times as many, and so on. The scheduler ends a trial that is not among the best 1 /
    ``reduction_factor`` of the trials that got so far (Li et al., A System for Massively Parallel Hyperparameter
    Tuning, MLSys 2020). ``none`` trains every trial to its end.
    """

    space: dict[str, Distribution] = Field(min_length=1)
    metric: str | None = None
    num_trials: int = Field(default=16, ge=1, le=10_000)
    parallelism: int = Field(default=1, ge=1, le=256)
    scheduler: Literal["asha", "none"] = "asha"
    grace_epochs: int = Field(default=1, ge=1, le=1000)
    reduction_factor: int = Field(default=3, ge=2, le=64)
    seed: int = Field(default=0, ge=0, lt=2**32)


def parse_search(document: Any, where: str = "search") -> SearchSpec:
    """Return the search that a mapping of its fields describes.

    Raises:
        SpecError: A field is unknown, missing, or outside its bounds.
    """
    return parse(SearchSpec, document, where)


def load_search(path: Path) -> SearchSpec:
    """Return the search that a YAML file holds.

    Raises:
        SpecError: The file cannot be read, is not YAML, or holds no search.
    """
    documents = documents_of(path)
    if len(documents) != 1:
        raise SpecError(str(path), [FieldProblem("", f"holds {len(documents)} documents: a search is one mapping")])
    return parse_search(documents[0], str(path))


def with_values(job: JobSpec, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a job with other values at their paths, not checked."""
    document: dict[str, Any] = job.model_dump(mode="json", exclude_unset=True)
    for path, value in values.items():
        set_field(document, path, value)
    return document


def metric_of(search: SearchSpec, job: JobSpec, dataset: DatasetSpec) -> str:
    """Return the metric of validation rows by which trials are compared.

    Raises:
        InvalidFieldsError: There is no such metric.
    """
    metric = search.metric or watched_metric(job, dataset)
    if metric is None:
        raise InvalidFieldsError([_NO_NUMBER])
    return metric


def check_search(search: SearchSpec, job: JobSpec, dataset: DatasetSpec) -> None:
    """Check a search against the job that it changes, with one changed field at a time.

    Values to check are every choice, and for a range both ends and a value between them.

    Raises:
        InvalidFieldsError: The job has no such field, it is no hyperparameter, or a value does not fit it.
    """
    raise_if_invalid(_problems(search, job, dataset))


def _problems(search: SearchSpec, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    if not has_validation(job) or job.dataset.one_pass:
        yield FieldProblem(
            "metric", "trials compare on validation rows after each epoch, and the job has none", "set "
            "evaluation.split.validation, without dataset.one_pass",
        )  # fmt: skip
    if job.init_from is not None:
        yield FieldProblem("init_from", "trials begin from initial values", "leave it out of the job")
    yield from _metric_problems(search, job, dataset)
    for path, distribution in search.space.items():
        reason = NOT_SEARCHED.get(path.partition(".")[0])
        if reason is not None:
            yield FieldProblem(f"space.{path}", f"it is no hyperparameter: {reason}", "leave it out of the space")
            continue
        found = [one for value in distribution.examples for one in _problems_with(job, dataset, path, value)]
        between = distribution.between
        if not found and between is not None:
            found = [
                one._replace(remedy=one.remedy or "give the values as choice: [A, B]")
                for one in _problems_with(job, dataset, path, between)
            ]
        yield from found


def _metric_problems(search: SearchSpec, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield the reasons why trials cannot be compared by the metric that a search names."""
    there = measured_numbers(job, dataset)
    if not there:
        yield _NO_NUMBER
    elif search.metric is not None and search.metric not in there:
        yield FieldProblem(
            "metric", f"the job does not measure {search.metric}", f"use one of {', '.join(there)}, or name it in "
            "evaluation.metrics",
        )  # fmt: skip


def _problems_with(job: JobSpec, dataset: DatasetSpec, path: str, value: Any) -> list[FieldProblem]:
    """Return a job's problems with the value of a field."""
    said = f"with {value:g}" if isinstance(value, float) else f"with {value}"
    return [
        FieldProblem(f"space.{path}", f"{said}: {problem.field}: {problem.message}", problem.remedy)
        for problem in _problems_of(job, dataset, path, value)
    ]


def _problems_of(job: JobSpec, dataset: DatasetSpec, path: str, value: Any) -> tuple[FieldProblem, ...]:
    try:
        parse_job(with_values(job, {path: value})).against(dataset)
    except InvalidFieldsError as error:
        return error.problems
    except ValueError as error:
        return (FieldProblem(path, str(error)),)
    return ()
