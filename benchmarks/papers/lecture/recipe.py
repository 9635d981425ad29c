"""``generalization``: the generalization report of Adam and AdamAR side by side (trainer.generalization).

Mądry, Optimization and Generalization Challenges in Deep Learning, lecture 3 of 6.S979, sections 1, 2 and 5 to 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.papers.data import documents
from benchmarks.papers.trials.run_trial import kept_path
from benchmarks.papers.trials.trial import Claim, Column, Recipe, Table, Trial
from trainer.generalization.command import PROTOCOL, SOURCE, TITLE
from trainer.generalization.sections import Ended
from trainer.generalization.sections import findings as findings_of
from trainer.generalization.trainings import CHANGED, ORIGINAL, PERMUTED, plan
from trainer.report_pages.section import Findings
from trainer.spec import DatasetSpec, JobSpec

QUICK_CHANGED = (64,)


def recipe(data: Path, seeds: int = 3, quick: bool = False, *, rows: Path = Path("rows")) -> Recipe:
    """Return the report of a DNN on epinions, or on a small click log with ``quick``.

    ``rows``: the folder for the data sets with permuted labels.
    """
    dataset, jobs = _jobs(data, quick)
    trainings, write = plan(dataset, jobs, seeds, rows, QUICK_CHANGED if quick else CHANGED)
    trials = tuple(
        Trial(one.kind, "dnn", one.row, one.dataset, one.job, measured_by=one.measured_by) for one in trainings
    )

    def findings(of: Recipe, records: Mapping[str, dict[str, Any]], out: Path) -> Findings:
        ended = [
            Ended(one, records[trial.key], kept_path(trial, out))
            for trial, one in zip(trials, trainings, strict=True)
            if records.get(trial.key, {}).get("state") == "done"
        ]
        return findings_of(ended)

    tables = _tables(dataset.name)
    return Recipe("generalization", TITLE, SOURCE, PROTOCOL, trials, tables, CLAIMS, write, findings)


def _jobs(data: Path, quick: bool) -> tuple[DatasetSpec, dict[str, JobSpec]]:
    """Return the jobs of Adam, which overfits in its second epoch, and of AdamAR, which does not overfit."""
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
    return of, {
        row: documents.job(
            f"generalization {row}", of, optimizer=optimizer, batch_size=size["batch_size"],
            evaluation=documents.RANDOM | {"metrics": ["auc", "logloss"], "training": True},
            **documents.tower(size["dim"], size["hidden"], {"kind": "hash", "std": 0.01}),
        )
        for row, optimizer in optimizers.items()
    }  # fmt: skip


def _tables(name: str) -> tuple[Table, ...]:
    pair = (Column("train auc", "dnn", "auc", "train"), Column("test auc", "dnn", "auc"))
    gap = (Column("gap", "dnn", "logloss", "gap"),)
    what = "permuted labels (section 5): the same job where labels say nothing of their rows"
    return (
        Table(ORIGINAL, f"{name}: training and test auc after each epoch", pair, "epochs", "auc"),
        Table(f"{ORIGINAL}:gap", f"{name}: the gap, test less training logloss (section 2)", gap, "epochs", "logloss",
              lower=True),
        Table(PERMUTED, f"{name}, {what}", pair, "epochs", "auc"),
    )  # fmt: skip


CLAIMS = (
    Claim("After the last epoch the gap of AdamAR is smaller than Adam's", f"{ORIGINAL}:gap", "dnn",
          ("AdamAR", "last"), ("Adam", "last"), 0.0),
    Claim("Adam fits permuted labels, AdamAR less: training AUC is .05 apart", PERMUTED, "dnn",
          ("Adam", "last"), ("AdamAR", "last"), 0.05),
)  # fmt: skip
