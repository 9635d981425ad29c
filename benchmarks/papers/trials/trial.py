"""Parts of a recipe: trials (a dataset, a job, and where its figures stand), tables and claims."""

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
"""Which test figures of a run a cell holds: those of every epoch, of the epoch that is best on validation, of the
last."""


class Named:
    """What every trial is named by."""

    table: str
    column: str
    row: str
    tried: str

    @property
    def seed(self) -> int:
        raise NotImplementedError

    @property
    def name(self) -> str:
        """``TABLE/COLUMN/ROW[/TRIED]/seed-N``, of one recipe each once."""
        parts = [self.table, self.column, self.row, self.tried, f"seed-{self.seed}"]
        return "/".join(part for part in parts if part)

    def matches(self, pattern: str) -> bool:
        """Return True if one of the globs of ``pattern`` is this name or a folder above it.

        Commas separate them; one before a space is of a name, as in ``MF, no biases``.
        """
        return any(fnmatch.fnmatchcase(self.name, one) or fnmatch.fnmatchcase(self.name, f"{one}/*")
                   for one in re.split(r",(?! )", pattern))  # fmt: skip


@dataclass(frozen=True)
class Trial(Named):
    """One training by a job, a trial of a recipe.

    ``table``, ``column`` and ``row`` say where its figures stand; the runs of one place that differ in ``tried`` are
    candidates, of which the validation split takes one. ``measured_by``: the name of what is measured of the trained
    model before it goes (benchmarks.papers.trials.post_training_metrics); empty for nothing.
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

        They are of the specs, of the names and sizes of the files, of what is measured afterwards, and of the packages
        that decide figures. Not of where the files are.
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
    """One training of a torch module on texts, without a job: an experiment of benchmarks.papers.trials.experiments.

    ``settings`` are the experiment's, ``data`` the folder of its files, ``files`` their names. It has no checkpoints:
    one that was killed begins again.
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
        """16 hex digits, of the settings, names and sizes of the files and the packages that decide figures."""
        sizes = {name: _bytes_of(self.data / name) for name in self.files}
        return _hash_of([self.experiment, dict(self.settings), self.seed, sizes, deciding_packages()])


AnyTrial = Trial | TextTrial


@dataclass(frozen=True)
class Column:
    """A column of a table: the ``metric`` of the trials of ``column``, on a ``split``."""

    label: str
    column: str
    metric: str
    split: str = "test"


@dataclass(frozen=True)
class Table:
    """One table of a report, in the paper's layout: a row for each method.

    ``published``: by (row, column label) as many figures as a cell holds. ``published_is``: what they were measured on.
    ``comparable``: whether a difference to them means anything. ``chosen_by``: the metric of the validation split that
    candidates and best epochs are chosen by; smaller is better where ``lower`` says so.
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
        """The name that its trials give as their table: what stands before a colon."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Claim:
    """A claim that ``left`` is better than ``right`` by ``at_least`` in a column of a table.

    Each side is (row, which of its epochs). Best and last are taken of the means over seeds. With ``when`` best of a
    table, every epoch is its one figure.
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
"""``findings(recipe, records by key, folder of results)``: what a report shows beyond tables of test figures."""


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    ``protocol``: how data is split and models are trained, and what differs from the paper, for the reader.

    ``prepare`` writes the files that its data sets name and nobody has, before any trial runs or is reported; where
    they are, it does nothing. ``findings``: what its report shows beyond tables.
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
        """Its trials that are jobs."""
        return tuple(trial for trial in self.trials if isinstance(trial, Trial))

    def part(self, pattern: str | None) -> tuple[AnyTrial, ...]:
        """Return the trials that a filter names.

        Raises:
            ValueError: there are none.
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
    """Return the sizes of the files, by name; None where there are none yet."""
    if rows.is_dir():
        return {str(path.relative_to(rows)): path.stat().st_size for path in sorted(rows.rglob("*.parquet"))}
    return rows.stat().st_size if rows.exists() else None
