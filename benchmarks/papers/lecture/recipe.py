"""``generalization``: the generalization report of a job, of any job or of Adam and AdamAR side by side.

Mądry, Optimization and Generalization Challenges in Deep Learning, lecture 3 of 6.S979, sections 1, 2 and 5 to 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.lecture.sections import BASE, COINS, NEIGHBOURS, findings
from benchmarks.papers.pages import documents
from benchmarks.papers.trials.trial import Claim, Column, Recipe, Table, Trial
from trainer.generalization.label_randomization import at, changed, coins, label_column, permuted
from trainer.spec import DatasetSpec, JobSpec, SpecError, parse_job
from trainer.spec.losses import loss_of
from trainer.spec.problems import FieldProblem

CHANGED, QUICK_CHANGED = (4, 256), (64,)
"""Rows with another label in the neighbours of the data; a share of them is held out and does not count."""
PERMUTED = "permuted"
_KNOWN_IDS = "the report compares rows of known ids: leave capacity out"


def recipe(
    data: Path,
    seeds: int = 3,
    quick: bool = False,
    *,
    rows: Path = Path("rows"),
    of: tuple[DatasetSpec, JobSpec] | None = None,
) -> Recipe:
    """Return the report of the job ``of``, or of a DNN on epinions; ``quick``: on a small click log.

    ``rows``: the folder of data sets with other labels.
    """
    dataset, jobs, claims = _given(*of) if of is not None else _own(data, quick)
    prepare = None
    trials = [
        Trial(BASE, job.model.kind, row, dataset, _with_seed(job, dataset, seed), measured_by="generalization")
        for seed in range(seeds)
        for row, job in jobs.items()
    ]
    why_not = _why_no_labels(dataset, next(iter(jobs.values())))
    if why_not is None:
        others = {"permuted": rows / f"{dataset.name}_permuted.parquet"}
        counts = QUICK_CHANGED if quick else CHANGED
        others |= {str(count): rows / f"{dataset.name}_{count}.parquet" for count in counts}
        classes = all(loss_of(job) == "bce" for job in jobs.values())
        if classes:
            others["coins"] = rows / f"{dataset.name}_coins.parquet"
        prepare = partial(_write, dataset, others)
        for seed in range(seeds):
            for row, job in jobs.items():
                spec, kind = _with_seed(job, dataset, seed), job.model.kind
                trials.append(Trial(PERMUTED, kind, row, at(dataset, others["permuted"]), spec))
                if classes:
                    trials.append(Trial(COINS, kind, row, at(dataset, others["coins"]), spec, measured_by="random_fit"))
                trials += [
                    Trial(
                        NEIGHBOURS,
                        kind,
                        f"{row}, {count}",
                        at(dataset, others[str(count)]),
                        spec,
                        measured_by="outputs",
                    )
                    for count in counts
                ]
    protocol = _PROTOCOL if why_not is None else f"{_PROTOCOL} Without permuted labels and neighbours: {why_not}"
    kinds: dict[str, str] = {job.model.kind: loss_of(job) for job in jobs.values()}
    tables = tuple(_tables(dataset.name, kinds)) if why_not is None else ()
    return Recipe("generalization", _TITLE, _SOURCE, protocol, tuple(trials), tables, tuple(claims), prepare, findings)


def _own(data: Path, quick: bool) -> tuple[DatasetSpec, dict[str, JobSpec], list[Claim]]:
    """Return the jobs of Adam, which overfits in its second epoch, and AdamAR, which does not."""
    if quick:
        of = documents.click_log(data)
        size: dict[str, Any] = {"dim": 8, "hidden": [16, 8], "batch_size": 128, "alpha": 1e-3}
    else:
        of = documents.epinions(data, {"rule": "rating >= 4"})
        size = {"dim": 16, "hidden": [128, 64], "batch_size": 1024, "alpha": 3e-5}
    optimizers: dict[str, dict[str, Any]] = {
        "Adam": {"kind": "adam", "learning_rate": 0.001},
        "AdamAR": {"kind": "adam_ar", "learning_rate": 0.001, "alpha": size["alpha"], "decay": "at_read"},
    }
    jobs = {
        row: documents.job(
            f"generalization {row}",
            of,
            optimizer=optimizer,
            batch_size=size["batch_size"],
            evaluation=documents.RANDOM | {"metrics": ["auc", "logloss"], "training": True},
            **documents.tower(size["dim"], size["hidden"], {"kind": "hash", "std": 0.01}),
        )
        for row, optimizer in optimizers.items()
    }  # fmt: skip
    claims = [
        Claim("AdamAR ends with a smaller gap than Adam", f"{BASE}:gap", "dnn",
              ("AdamAR", "last"), ("Adam", "last"), 0.0),
        Claim("Adam fits permuted labels, AdamAR less: training AUC is .05 apart", PERMUTED, "dnn",
              ("Adam", "last"), ("AdamAR", "last"), 0.05),
    ]  # fmt: skip
    return of, jobs, claims


def _given(dataset: DatasetSpec, job: JobSpec) -> tuple[DatasetSpec, dict[str, JobSpec], list[Claim]]:
    """Return a user's job from initial values, on one rank, unpublished, evaluated on its training rows too."""
    growing = [
        FieldProblem(f"tables.{name}.capacity", _KNOWN_IDS)
        for name, table in job.tables.items()
        if table.capacity is not None
    ]
    if growing:
        raise SpecError(job.name, growing)
    if dataset.labels or dataset.weight is not None:
        why = "the report is of one label whose rows count alike"
        raise SpecError(
            job.name, [FieldProblem("dataset", why, "leave labels and weight out, in a copy of the dataset")]
        )
    document = job.model_dump(mode="json", exclude_unset=True)
    for field in ("publish", "init_from", "resources", "sharding"):
        document.pop(field, None)
    evaluation = {"split": document.get("evaluation", {}).get("split", {})}
    if _why_no_labels(dataset, job) is None:
        evaluation["training"] = True
    spec = parse_job(document | {"evaluation": evaluation}, job.name).against(dataset)
    return dataset, {job.name: spec}, []


def _why_no_labels(dataset: DatasetSpec, job: JobSpec) -> str | None:
    """Return why a job cannot be trained on other labels; None where it can."""
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


def _write(dataset: DatasetSpec, others: Mapping[str, Path]) -> None:
    for name, path in others.items():
        if name == "permuted":
            permuted(dataset, path)
        elif name == "coins":
            coins(dataset, path)
        else:
            changed(dataset, path, int(name))


def _tables(name: str, kinds: Mapping[str, str]) -> Sequence[Table]:
    """Return the tables of the report; ``kinds``: the loss of each model."""
    tables = []
    for kind, loss in kinds.items():
        metric, lost = ("rmse", "rmse") if loss == "mse" else ("auc", "logloss")
        lower = metric == "rmse"
        pair = (Column(f"train {metric}", kind, metric, "train"), Column(f"test {metric}", kind, metric))
        what = "permuted labels (section 5): the same job where labels say nothing of their rows"
        tables += [
            Table(BASE, f"{name}: training and test {metric} after each epoch", pair, "epochs", metric, lower=lower),
            Table(f"{BASE}:gap", f"{name}: the gap, test less training {lost} (section 2)",
                  (Column("gap", kind, lost, "gap"),), "epochs", lost, lower=True),
            Table(PERMUTED, f"{name}, {what}", pair, "epochs", metric, lower=lower),
        ]  # fmt: skip
    return tables


_TITLE = "Generalization report"
_SOURCE = "Mądry, Optimization and Generalization Challenges in Deep Learning (6.S979, lecture 3), sections 1 to 8"
_PROTOCOL = """\
One training of the job; the same job on the same rows with their label column permuted, and with fair coins for labels;
and on rows of which a few have another label. Everything is measured on the model of the last epoch. Rows, splits,
order and draws are those of the job."""
