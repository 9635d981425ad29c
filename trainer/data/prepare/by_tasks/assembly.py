"""Work of the host that leads a preparation by tasks: it creates the tasks and assembles their results. Torch-free."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.dynamic_ids import GrownTable, IdMap
from trainer.data.columns.labels import label_dtype
from trainer.data.columns.numeric import Numeric, numeric_of
from trainer.data.columns.orders import order_name
from trainer.data.columns.point_in_time import PointInTime
from trainer.data.columns.vocabulary import Codes
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import CODE, LABELS, OFFSET, map_array, open_ids
from trainer.data.prepare.bad_rows import BadRows
from trainer.data.prepare.by_tasks import stages
from trainer.data.prepare.by_tasks.tasks import PARTS, Desk, Hosts, Setting, Task, TaskRunner
from trainer.data.prepare.encode import SPAN_ROWS, Encoded, Span, check_order, check_rows, cut_spans
from trainer.data.prepare.examples import AllRows, limits_by_time
from trainer.data.prepare.fingerprint import WarmStart, files_of
from trainer.data.prepare.join_matches import JoinMatches
from trainer.data.prepare.label_figures import LabelFigures
from trainer.data.prepare.numbers import inherited_numeric
from trainer.data.prepare.part_cache import VERSION
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.progress import Progress
from trainer.data.prepare.split import SPLIT_NAMES, TimeLimits
from trainer.data.prepare.table_rows import tell_unknown
from trainer.data.prepare.workers import Workers
from trainer.data.prepare.writing import FinishedSplits, check_training_split, code_files
from trainer.storage.base import NotWholeError, RunStorage

_COPY_BYTES = 1 << 20


@contextlib.contextmanager
def assembled(
    plan: DataPlan, fingerprint: str, hosts: Hosts | None, work: Path, base: WarmStart, log: Callable[[str], Any]
) -> Iterator[Assembly | None]:
    """Yield an assembly that prepares by tasks on ``hosts``; None if this process shall prepare everything.

    This process prepares everything if there are no other hosts, if the rows fit in one span, or if an example depends
    on rows other than its own (:attr:`DataPlan.needs_all_rows`).
    """
    spans: list[Span] = []
    if hosts is not None and plan.needs_all_rows is not None:
        log(f"prepares on this host: {plan.needs_all_rows} need all rows")
    elif hosts is not None:
        spans = cut_spans(plan.source, SPAN_ROWS)
    if hosts is None or len(spans) < 2:
        yield None
        return
    specs = plan.dataset.model_dump_json(), plan.job.model_dump_json()
    prefix = f"{PARTS}/{fingerprint[:32]}-{SPAN_ROWS}-{VERSION}"
    of_text = tuple(domain for domain, kind in plan.kinds.items() if kind == "string")
    setting = Setting(*specs, json.dumps(files_of(plan)), hosts.storage, prefix, hosts.threads, of_text)
    with hosts.runner(setting, log) as runner:
        if runner is None:
            yield None
            return
        with contextlib.closing(Assembly(plan, setting, spans, runner, work, base)) as assembly:
            yield assembly


def forget_parts(storage: RunStorage) -> None:
    """Remove all results of tasks from a run's storage.

    Raises:
        StorageError: the storage does not answer.
    """
    storage.delete([one.name for one in storage.list(f"{PARTS}/")])


class Assembly:
    """A preparation by tasks, on the host that leads it.

    ``spans`` together hold all rows. Fetched results lie in a folder of ``work`` until :meth:`close`.
    """

    def __init__(
        self, plan: DataPlan, setting: Setting, spans: Sequence[Span], runner: TaskRunner, work: Path, base: WarmStart
    ):
        self._plan, self._spans, self._runner, self._work = plan, spans, runner, work
        self._base = base
        self._folders = setting.folders()
        self._fetched = work / ".fetched"
        self._known: set[str] = set()

    def prepare(self, bad_rows: BadRows | None, workers: Workers, progress: Progress) -> FinishedSplits:
        """Write the splits, and return them with their tables and figures.

        Raises:
            DataError: rows cannot be trained on; the first span with such rows decides the message.
            StorageError: the storage does not answer.
        """
        plan = self._plan
        self._fetched.mkdir()
        desk = Desk(plan, self._folders, self._fetched, workers)
        self._take_up()
        counted = self._read(desk, progress)
        first_rows = np.cumsum([0, *(one["num_rows"] for one in counted)]).tolist()
        num_rows = first_rows[-1]
        warnings = self._check_rows(desk, counted, bad_rows, num_rows)
        spans = [number for number, one in enumerate(counted) if one["num_rows"]]
        all_rows = self._all_rows(desk, counted, spans)
        progress.start_writing(num_rows)
        asked = {
            "num_rows": num_rows,
            "time_limits": None if all_rows.time_limits is None else list(all_rows.time_limits),
            "names_validation": all_rows.names_validation,
        }
        self._run(
            [Task("split", number, asked | {"first_row": first_rows[number]}) for number in spans],
            lambda task: progress.add(counted[task.number]["num_rows"]),
        )
        made = {number: desk.state(f"split-{number:05d}") for number in spans}
        train = self._check_training_split(list(made.values()))
        numeric = self._merge(desk, spans)
        self._run([Task("rows", number, [one.as_json() for one in numeric]) for number in spans])
        num_examples = {side: sum(one["num_examples"][side] for one in made.values()) for side in SPLIT_NAMES}
        positives = {
            side: sum(one["labels"][side][0]["num_positives"] for one in made.values()) for side in SPLIT_NAMES
        }
        shares = self._put_together(desk, spans)
        tell_unknown(shares, progress.log)
        self._sum_labels(train, [one["pieces"] for one in made.values()])
        grown, row_counts = self._tables(desk)
        encoded = replace(self._seen_from_here(desk, spans, num_rows), warnings=warnings)
        return FinishedSplits(
            encoded, grown, row_counts, numeric, train, num_examples, positives, shares, all_rows.time_limits
        )

    def close(self) -> None:
        """Remove the fetched results from this host."""
        shutil.rmtree(self._fetched, ignore_errors=True)

    # --- tasks

    def _take_up(self) -> None:
        """Keep the complete results of an earlier attempt at the same preparation; remove all other results."""
        storage, prefix = self._folders.storage, f"{self._folders.prefix}/"
        storage.delete([one.name for one in storage.list(f"{PARTS}/") if not one.name.startswith(prefix)])
        self._folders.sweep()
        for name in self._folders.names():
            try:
                self._folders.read(name)
            except NotWholeError:
                self._folders.remove(name)
            else:
                self._known.add(name)

    def _run(self, tasks: Sequence[Task], done: Callable[[Task], None] = lambda task: None) -> None:
        """Run the tasks without a result so far; call ``done`` with each task once its result exists."""
        left = []
        for task in tasks:
            if task.name in self._known:
                done(task)
            else:
                left.append(task)
        if left:
            self._runner.run(left, done)

    def _read(self, desk: Desk, progress: Progress) -> list[dict[str, Any]]:
        counted: dict[int, dict[str, Any]] = {}
        progress.start_reading(self._plan.source, SPAN_ROWS)

        def note(task: Task) -> None:
            counted[task.number] = desk.state(task.name)
            progress.add(counted[task.number]["num_read"])

        self._run([Task("read", number, [span.start, span.stop]) for number, span in enumerate(self._spans)], note)
        progress.end_reading()
        return [counted[number] for number in range(len(self._spans))]

    def _merge(self, desk: Desk, spans: list[int]) -> tuple[Numeric, ...]:
        """Assign table rows to the ids, and return the numeric features with their statistics."""
        plan = self._plan
        tasks = [
            Task("table", number, {"spans": spans, "base": stages.as_arguments(self._base.vocabulary.get(domain))})
            for number, domain in enumerate(plan.kinds)
        ]
        known = inherited_numeric(plan, self._base.numeric or ())
        names = [one.name for one in plan.all_numeric]
        tasks += [Task("number", number, spans) for number, name in enumerate(names) if name not in known]
        self._run(tasks)
        return tuple(
            known.get(name) or numeric_of(desk.state(f"number-{number:05d}")) for number, name in enumerate(names)
        )

    # --- stages that need all rows

    def _check_rows(
        self, desk: Desk, counted: Sequence[dict[str, Any]], bad_rows: BadRows | None, num_rows: int
    ) -> tuple[str, ...]:
        times, matches = PointInTime(self._plan), JoinMatches(self._plan)
        for number, one in enumerate(counted):
            times.take_over(one["times"])
            matches.take_over(one["matches"])
            if bad_rows is not None:
                names = [f"{stages.BAD_ROWS}-{file}" for file in range(one["bad_rows"]["num_files"])]
                folder = desk.fetch(f"read-{number:05d}", names)
                bad_rows.take_over(one["bad_rows"], [folder / name for name in names])
        if bad_rows is not None:
            bad_rows.close()
            bad_rows.check()
        return check_rows(self._plan, num_rows, times, matches)

    def _all_rows(self, desk: Desk, counted: Sequence[dict[str, Any]], spans: Sequence[int]) -> AllRows:
        plan, split = self._plan, self._plan.job.evaluation.split
        types = {
            column: {counted[number]["types"][order_name(column)] for number in spans} for column in plan.order_columns
        }
        for column, found in types.items():
            if len(found) > 1:
                raise DataError(
                    f"is {' and '.join(sorted(np.dtype(one).name for one in found))} in different files",
                    where=f"{plan.source.uri}, column '{column}'",
                    remedy="write the column with one type in every file",
                )
        names_validation = any(counted[number]["names_validation"] for number in spans)
        if split.kind != "time":
            return AllRows(names_validation=names_validation)
        assert plan.dataset.ordering is not None
        (dtype,) = types[plan.dataset.ordering]
        name = plan.value_file(order_name(plan.dataset.ordering))
        orders = [map_array(desk.fetch(f"read-{number:05d}", [name]) / name, dtype) for number in spans]
        order = np.concatenate(orders)
        check_order(plan, plan.dataset.ordering, order)
        limits = limits_by_time(plan, order)
        return AllRows(time_limits=TimeLimits(*(None if one is None else one.item() for one in limits)))

    def _check_training_split(self, made: Sequence[dict[str, Any]]) -> tuple[LabelFigures, ...]:
        plan = self._plan
        train = tuple(LabelFigures(task.name) for task in plan.tasks) or (LabelFigures(),)
        for one in made:
            for figures, state in zip(train, one["labels"]["train"], strict=True):
                figures.take_over(state)
        num_examples = sum(one["num_examples"]["train"] for one in made)
        check_training_split(plan, num_examples, sum(one["weight"] for one in made), train)
        return train

    def _sum_labels(self, train: tuple[LabelFigures, ...], pieces: Sequence[list[list[int]]]) -> None:
        """Set the sum of each float label over the training split, added up in the pieces and order that one host uses.

        The order changes the rounding of a sum, and hosts must not change the result.
        """
        labels = map_array(self._work / "train" / LABELS, label_dtype(self._plan.dataset)).reshape(-1, len(train))
        if labels.dtype.kind != "f":
            return
        counts: dict[int, int] = {}
        for piece, count in (one for of_span in pieces for one in of_span):
            counts[piece] = counts.get(piece, 0) + count
        for number, figures in enumerate(train):
            summed, start = LabelFigures(), 0
            for _, count in sorted(counts.items()):
                summed.add(labels[start : start + count, number])
                start += count
            figures.sum = summed.sum

    # --- results in one place

    def _put_together(self, desk: Desk, spans: Sequence[int]) -> dict[str, dict[str, float]]:
        """Append the examples of each span to the splits; return the share of unknown ids by feature and split."""
        plan = self._plan
        unknown = {one.name: dict.fromkeys(SPLIT_NAMES, 0) for one in plan.trained}
        values = {one.name: dict.fromkeys(SPLIT_NAMES, 0) for one in plan.trained}
        for number in spans:
            name = f"rows-{number:05d}"
            folder = desk.fetch(name)
            for feature, by_side in desk.state(name)["unknown"].items():
                for side, count in by_side.items():
                    unknown[feature][side] += count
            for side in SPLIT_NAMES:
                (self._work / side).mkdir(exist_ok=True)
                for path in sorted((folder / side).iterdir()):
                    _append(path, self._work / side / path.name)
            shutil.rmtree(folder)
        for side in SPLIT_NAMES:
            for name, path in code_files(plan, self._work / side).items():
                values[name][side] = path.stat().st_size // CODE.itemsize
        return {
            name: {side: unknown[name][side] / count if count else 0.0 for side, count in by_side.items()}
            for name, by_side in values.items()
        }

    def _tables(self, desk: Desk) -> tuple[dict[str, GrownTable], dict[str, npt.NDArray[np.int64]]]:
        grown, counts = {}, {}
        files = [stages.TABLE, stages.ROWS_OF_CODES, stages.COUNTS, stages.PARENT]
        numbers = {domain: number for number, domain in enumerate(self._plan.kinds)}
        for domain in self._plan.trained_tables:
            folder = desk.fetch(f"table-{numbers[domain]:05d}", files)
            ids, rows = IdMap.read(folder / stages.TABLE), map_array(folder / stages.ROWS_OF_CODES, CODE)
            grown[domain] = GrownTable(ids, rows, np.array(map_array(folder / stages.PARENT, OFFSET)))
            counts[domain] = map_array(folder / stages.COUNTS, OFFSET)
        return grown, counts

    def _seen_from_here(self, desk: Desk, spans: Sequence[int], num_rows: int) -> Encoded:
        """Return the distinct ids of all rows and samples of their numbers and vectors, without the rows' codes."""
        plan = self._plan
        codes = {
            domain: Codes(open_ids(desk.fetch(f"table-{number:05d}", [stages.IDS]) / stages.IDS))
            for number, domain in enumerate(plan.kinds)
        }
        samples = {}
        for one in (*plan.numeric, *plan.row_vectors):
            file = stages.sample_file(one.name)
            found = [map_array(desk.fetch(f"split-{span:05d}", [file]) / file, one.dtype) for span in spans]
            samples[one.name] = np.concatenate(found).reshape(-1, *one.shape)
        return Encoded(num_rows, codes, {}, samples)


def _append(source: Path, target: Path) -> None:
    """Append the contents of a file to another; offsets of lists are shifted by the last offset of the other file."""
    if target.exists() and source.name.endswith(".offsets.bin"):
        offsets = map_array(source, OFFSET)
        with open(target, "r+b") as file:
            file.seek(-OFFSET.itemsize, 2)
            last = np.frombuffer(file.read(), OFFSET)[0]
            file.write((offsets[1:] + last).data)
        return
    with open(source, "rb") as values, open(target, "ab") as whole:
        shutil.copyfileobj(values, whole, _COPY_BYTES)
