"""Parts of a recipe: trials (a dataset, a job, and the table cell of its figures), tables and claims."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.report_pages.section import Findings
from trainer.search.records import deciding_packages
from trainer.spec import DatasetSpec, JobSpec

When = Literal["epochs", "best", "last"]
"""Epochs whose test figures a cell shows: every epoch, the epoch that is best on validation, or the last epoch."""


class Named:
    """The name of a trial."""

    table: str
    column: str
    row: str
    tried: str

    @property
    def seed(self) -> int:
        raise NotImplementedError

    @property
    def name(self) -> str:
        """``TABLE/COLUMN/ROW[/TRIED]/seed-N``, unique within a recipe."""
        parts = [self.table, self.column, self.row, self.tried, f"seed-{self.seed}"]
        return "/".join(part for part in parts if part)

    def matches(self, pattern: str) -> bool:
        """Return True if one of the globs of ``pattern`` matches this name or a prefix of its parts.

        Commas separate the globs; a comma before a space is part of a name, as in ``MF, no biases``.
        """
        return any(fnmatch.fnmatchcase(self.name, one) or fnmatch.fnmatchcase(self.name, f"{one}/*")
                   for one in re.split(r",(?! )", pattern))  # fmt: skip


@dataclass(frozen=True)
class Trial(Named):
    """A trial that is one training by a job.

    ``table``, ``column`` and ``row`` name the cell of its figures. Runs of one cell that differ in ``tried`` are
    candidates, of which the validation split chooses the best. ``measured_by``: the name of a measurement of the
    trained model (benchmarks.papers.trials.post_training_metrics); empty for none.
    """

    table: str
    column: str
    row: str
    dataset: DatasetSpec
    job: JobSpec
    tried: str = ""
    measured_by: str = ""

    @property
    def seed(self) -> int:
        return self.job.seed

    @property
    def key(self) -> str:
        """16 hex digits that identify the trial by its content.

        The keys hash the specs, the names and sizes of the files, the measurement, and the versions of the packages
        that decide figures. The location of the files does not count.
        """
        rows = Path(self.dataset.uri)
        dataset = self.dataset.model_dump(mode="json") | {"uri": rows.name}
        for graph in dataset.get("graphs", {}).values():
            graph["uri"] = Path(graph["uri"]).name
        document = [dataset, _bytes_of(rows), self.job.model_dump(mode="json"), deciding_packages()]
        document += [self.measured_by] if self.measured_by else []
        return _hash_of(document)


@dataclass(frozen=True)
class TextTrial(Named):
    """A trial that trains a torch module on texts, without a job: one of benchmarks.papers.trials.experiments.

    ``settings`` are the experiment's, ``data`` the folder of its files, ``files`` their names. There are no
    checkpoints: a killed training starts again.
    """

    table: str
    column: str
    row: str
    experiment: str
    data: Path
    files: tuple[str, ...]
    settings: Mapping[str, Any]
    seed_of_run: int
    tried: str = ""

    @property
    def seed(self) -> int:
        return self.seed_of_run

    @property
    def key(self) -> str:
        """16 hex digits that hash the settings, names and sizes of the files and packages that decide figures."""
        sizes = {name: _bytes_of(self.data / name) for name in self.files}
        return _hash_of([self.experiment, dict(self.settings), self.seed, sizes, deciding_packages()])


AnyTrial = Trial | TextTrial


@dataclass(frozen=True)
class Column:
    """A column of a table: the ``metric`` of the trials with this ``column``, on a ``split``."""

    label: str
    column: str
    metric: str
    split: str = "test"


@dataclass(frozen=True)
class Table:
    """One table of a report, in the paper's layout: a row for each method.

    ``published``: the published figures of each cell, by (row, column label). ``published_is``: what they were measured
    on. ``comparable``: True if differences from them mean anything. ``chosen_by``: the validation metric that chooses
    candidates and best epochs. ``lower``: smaller is better.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    when: When
    chosen_by: str
    lower: bool = False
    published: Mapping[tuple[str, str], Sequence[float]] = field(default_factory=dict)
    published_is: str = ""
    comparable: bool = True
    digits: int = 4

    @property
    def trials_of(self) -> str:
        """The name that its trials have as ``table``: the part before a colon."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Claim:
    """A claim that ``left`` is better than ``right`` by at least ``at_least`` in a column of a table.

    Each side of the claim is (row, which epoch). Best and last are chosen on the means over seeds. In a table with
    ``when`` "best" each cell has a single figure, which is used for any epoch.
    """

    text: str
    table: str
    column: str
    left: tuple[str, Literal["first", "best", "last"]]
    right: tuple[str, Literal["first", "best", "last"]]
    at_least: float

    def decided_by(self, trial: AnyTrial) -> bool:
        rows = (self.left[0], self.right[0])
        return trial.table == self.table.partition(":")[0] and trial.column == self.column and trial.row in rows


FindingsOf = Callable[["Recipe", Mapping[str, dict[str, Any]], Path], Findings]
"""``findings(recipe, records by key, folder of results)`` returns what a report shows besides tables of figures."""


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    ``protocol``: text for the reader on how data is split and models are trained, and how this differs from the paper.

    ``prepare`` is called before trials run or are reported, and writes those files of its data sets that do not exist.
    ``findings``: what its report shows besides tables.
    """

    name: str
    title: str
    source: str
    protocol: str
    trials: tuple[AnyTrial, ...]
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    prepare: Callable[[], None] | None = None
    findings: FindingsOf | None = None

    @property
    def jobs(self) -> tuple[Trial, ...]:
        """The trials that are jobs."""
        return tuple(trial for trial in self.trials if isinstance(trial, Trial))

    def part(self, pattern: str | None) -> tuple[AnyTrial, ...]:
        """Return the trials that match a filter.

        Raises:
            ValueError: no trial matches.
        """
        if pattern is None:
            return self.trials
        matching = tuple(trial for trial in self.trials if trial.matches(pattern))
        if not matching:
            raise ValueError(
                f"--part {pattern}: {self.name} has no such trial; --list names them, such as {self.trials[0].name}"
            )
        return matching


def _hash_of(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def _bytes_of(rows: Path) -> Any:
    """Return the files' sizes in bytes, keyed by name, or None if there are no files yet."""
    if rows.is_dir():
        return {str(path.relative_to(rows)): path.stat().st_size for path in sorted(rows.rglob("*.parquet"))}
    return rows.stat().st_size if rows.exists() else None
