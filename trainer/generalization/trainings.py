"""Trainings that a generalization report compares: a job, and the same job on rows with other labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint.format import latest_valid
from trainer.generalization.label_randomization import at, changed, coins, label_column, permuted
from trainer.runs.directory import Run
from trainer.spec import DatasetSpec, JobSpec, SpecError, parse_job
from trainer.spec.losses import loss_of
from trainer.spec.problems import FieldProblem

ORIGINAL, PERMUTED, COINS, NEIGHBOURS = "original", "permuted", "coins", "neighbours"
"""Kinds of trainings by their labels: true labels, permuted labels, fair coins, true labels with a few changed."""
CHANGED = (4, 256)
"""Numbers of changed labels in the neighbours of the data; changed rows that are held out have no effect."""
_KNOWN_IDS = "the report compares rows of known ids: leave capacity out"


class Training(NamedTuple):
    """A training of a report.

    ``kind``: one of ORIGINAL, PERMUTED, COINS, NEIGHBOURS. ``label``: the job's name in the report. ``changed``: number
    of rows with another label, of NEIGHBOURS. ``measured_by``: a name of MEASURES, or empty.
    """

    kind: str
    label: str
    dataset: DatasetSpec
    job: JobSpec
    changed: int | None = None
    measured_by: str = ""

    @property
    def row(self) -> str:
        return self.label if self.changed is None else f"{self.label}, {self.changed}"

    @property
    def name(self) -> str:
        """Name of its run directory, in a report of one job."""
        parts = (self.kind, None if self.changed is None else str(self.changed), f"seed-{self.job.seed}")
        return "-".join(filter(None, parts))


class Plan(NamedTuple):
    """The trainings of a report, and the function ``write``, which writes their data files unless these exist."""

    trainings: tuple[Training, ...]
    write: Callable[[], None]


def plan(
    dataset: DatasetSpec, jobs: Mapping[str, JobSpec], seeds: int, rows: Path, counts: Sequence[int] = CHANGED
) -> Plan:
    """Return the trainings that a report compares. Without labels to change, they are only the jobs themselves.

    ``jobs``: jobs by their label in the report. ``seeds``: number of seeds, which count from 0. ``rows``: folder for
    data files with other labels. ``counts``: numbers of changed labels, each for one training of kind NEIGHBOURS.
    """
    seeded = [(label, _with_seed(job, dataset, seed)) for seed in range(seeds) for label, job in jobs.items()]
    trainings = [Training(ORIGINAL, label, dataset, job, measured_by="generalization") for label, job in seeded]
    if why_no_labels(dataset, next(iter(jobs.values()))) is not None:
        return Plan(tuple(trainings), lambda: None)
    has_classes = all(loss_of(job) == "bce" for job in jobs.values())

    def path(name: str | int) -> Path:
        return rows / f"{dataset.name}_{name}.parquet"

    for label, job in seeded:
        trainings.append(Training(PERMUTED, label, at(dataset, path(PERMUTED)), job))
        if has_classes:
            trainings.append(Training(COINS, label, at(dataset, path(COINS)), job, measured_by="random_fit"))
        trainings += [
            Training(NEIGHBOURS, label, at(dataset, path(count)), job, count, measured_by="outputs") for count in counts
        ]

    def write() -> None:
        permuted(dataset, path(PERMUTED))
        if has_classes:
            coins(dataset, path(COINS))
        for count in counts:
            changed(dataset, path(count), count)

    return Plan(tuple(trainings), write)


def comparable(dataset: DatasetSpec, job: JobSpec) -> JobSpec:
    """Return a user's job changed for the report: from initial values, on one rank, unpublished.

    The job is evaluated on its training rows too.

    Raises:
        SpecError: The job's tables grow, or its rows have several labels or weights.
    """
    problems = [
        FieldProblem(f"tables.{name}.capacity", _KNOWN_IDS)
        for name, table in job.tables.items()
        if table.capacity is not None
    ]
    if not problems and (dataset.labels or dataset.weight is not None):
        why = "the report needs a single label and rows of equal weight"
        problems = [FieldProblem("dataset", why, "leave labels and weight out, in a copy of the dataset")]
    if problems:
        raise SpecError(job.name, problems)
    document = job.model_dump(mode="json", exclude_unset=True)
    for field in ("publish", "init_from", "resources", "sharding"):
        document.pop(field, None)
    evaluation = {"split": document.get("evaluation", {}).get("split", {})}
    if why_no_labels(dataset, job) is None:
        evaluation["training"] = True
    return parse_job(document | {"evaluation": evaluation}, job.name).against(dataset)


def why_no_labels(dataset: DatasetSpec, job: JobSpec) -> str | None:
    """Return the reason why a job cannot be trained on other labels; None if it can."""
    if job.model.reads_sequences or loss_of(job) not in ("bce", "mse"):
        return f"{job.model.kind} trained by {loss_of(job)} has no log loss or squared error of a row."
    try:
        label_column(dataset)
    except ValueError as error:
        return f"{error}."
    return None


def _with_seed(job: JobSpec, dataset: DatasetSpec, seed: int) -> JobSpec:
    document = job.model_dump(mode="json", exclude_unset=True) | {"seed": seed}
    return parse_job(document, job.name).against(dataset)


def subject_of(run: Run) -> Any:
    """Return the model of a run's newest checkpoint (:class:`trainer.generalization.subject.Subject`)."""
    from trainer.generalization.subject import Subject

    checkpoint = latest_valid(run.checkpoints)
    assert checkpoint is not None
    return Subject(run, checkpoint)


def _generalization(run: Run, path: Path) -> dict[str, Any]:
    from trainer.generalization.measures import measures
    from trainer.generalization.subject import keep

    keep(path, subject := subject_of(run))
    return measures(subject)


def _random_fit(run: Run, path: Path) -> dict[str, Any]:
    from trainer.generalization.measures import random_fit

    return random_fit(subject_of(run))


def _outputs(run: Run, path: Path) -> dict[str, Any]:
    from trainer.generalization.subject import keep

    keep(path, subject_of(run))
    return {}


Measure = Callable[[Run, Path], dict[str, Any]]
"""``measure(run, file of arrays)``: figures that JSON can hold; arrays go into the file."""
MEASURES: dict[str, Measure] = {"generalization": _generalization, "random_fit": _random_fit, "outputs": _outputs}
"""Measures, keyed by name: the whole report, the fit of random labels, losses and parameters for stability."""
