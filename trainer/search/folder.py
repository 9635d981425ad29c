"""The folder of a search: its spec, a run directory for each trial, and results read from the runs' events.

search.json          the search, its job and its dataset
trials/ID/           the run directory of a trial, with its values in trial.json
ray/                 Ray Tune's state, from which a stopped search continues
store/               the feature store of the trials, which publish nothing
best.yaml            the dataset and the job of the best trial
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from embeddings.durable_files import write_json
from trainer.search.runs import exit_of, figures_of
from trainer.search.spec import SearchSpec, metric_of, parse_search, with_values
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job
from trainer.spec.evaluation import is_lower_better
from trainer.spec.problems import FieldProblem, SpecError
from trainer.spec.stored_specs import to_run

SEARCH_FILE, TRIAL_FILE, BEST_FILE = "search.json", "trial.json", "best.yaml"
TRIALS, RAY, STORE = "trials", "ray", "store"


class TrialResult(NamedTuple):
    """A trial: id, values by field, state, best validation value, its epoch, and the number of validated epochs.

    ``best`` and ``epoch`` are None if no epoch has a value.
    """

    trial_id: str
    values: dict[str, Any]
    state: str
    best: float | None
    epoch: int | None
    epochs: int
    error: str | None = None


class SearchFolder:
    """A search on disk, in a folder that is made with the first use; trials change fields of ``job``."""

    def __init__(self, path: Path, search: SearchSpec, job: JobSpec, dataset: DatasetSpec):
        self.path, self.search, self.job, self.dataset = path, search, job, dataset
        self.metric = metric_of(search, job, dataset)
        self.mode = "min" if is_lower_better(self.metric) else "max"

    @classmethod
    def begin(cls, path: Path, search: SearchSpec, job: JobSpec, dataset: DatasetSpec) -> SearchFolder:
        """Return a new search, or that in the folder, which must be the same search.

        Raises:
            SpecError: The folder holds another search.
        """
        folder = cls(path.resolve(), search, job, dataset)
        file, document = folder.path / SEARCH_FILE, folder._document()
        if file.exists():
            # Versions whose default was at_read did not record it.
            there = {"decay": "at_read", **json.loads(file.read_text("utf-8"))}
            there["job"] = to_run(there.get("job"))
            changed = [name for name in document if there.get(name) != document[name]]
            if changed:
                raise SpecError(
                    str(folder.path),
                    [FieldProblem("", f"holds a search with another {' and '.join(changed)}", "name another folder")],
                )
        else:
            folder.path.mkdir(parents=True, exist_ok=True)
            write_json(file, document)
        return folder

    @classmethod
    def open(cls, path: Path) -> SearchFolder:
        """Return the search that a folder holds."""
        document = json.loads((path / SEARCH_FILE).read_text("utf-8"))
        job = parse_job(to_run(document["job"]))
        return cls(path, parse_search(document["search"]), job, parse_dataset(document["dataset"]))

    def _document(self) -> dict[str, Any]:
        return {
            "search": self.search.model_dump(mode="json", exclude_unset=True),
            "job": self.job.model_dump(mode="json", exclude_unset=True),
            "dataset": self.dataset.model_dump(mode="json", exclude_unset=True),
            "decay": self.job.optimizer.decay,
        }

    def job_with(self, values: dict[str, Any]) -> JobSpec:
        """Return the job of a trial: the search's job with these values, without publishing and trackers.

        Raises:
            InvalidFieldsError: The values do not go together.
        """
        document = with_values(self.job, values)
        for name in ("publish", "tracking"):
            document.pop(name, None)
        return parse_job(document).against(self.dataset)

    def run_of(self, trial_id: str) -> Path:
        """Return the run directory of a trial."""
        return self.path / TRIALS / trial_id

    def results(self) -> list[TrialResult]:
        """Return the trials, the best first."""
        found = [self._result(path.parent) for path in (self.path / TRIALS).glob(f"*/{TRIAL_FILE}")]
        return sorted(found, key=lambda one: (-self._goodness(one.best), one.trial_id))

    def _goodness(self, value: float | None) -> float:
        return -math.inf if value is None else -value if self.mode == "min" else value

    def _result(self, run: Path) -> TrialResult:
        trial = json.loads((run / TRIAL_FILE).read_text("utf-8"))
        figures = dict(figures_of(run, self.metric))
        measured = {epoch: value for epoch, value in figures.items() if value is not None}
        epoch = max(measured, key=lambda one: (self._goodness(measured[one]), -one), default=None)
        ended = exit_of(run)
        # A trial that ASHA ended was asked to stop, so its run has ended as cancelled.
        state = {"succeeded": "done", "cancelled": "stopped", None: "not ended"}.get(ended.get("state"), "failed")
        error = ended.get("error", {}).get("message") if state == "failed" else trial.get("error")
        return TrialResult(
            run.name, trial["values"], "failed" if error else state,
            None if epoch is None else measured[epoch], epoch, len(figures), error,
        )  # fmt: skip

    def write_best(self, result: TrialResult) -> Path:
        """Write dataset and job of a trial as a file that `evenkeel submit` and `train` take; return its path."""
        job = with_values(self.job, result.values)
        dataset = self.dataset.model_dump(mode="json", exclude_unset=True)
        text = yaml.safe_dump_all([dataset, job], sort_keys=False, allow_unicode=True)
        first = f"# {self.metric} {result.best} of validation rows after epoch {result.epoch} (trial {result.trial_id})"
        path = self.path / BEST_FILE
        path.write_text(f"{first}\n{text}", "utf-8")
        return path
