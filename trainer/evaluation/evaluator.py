"""Metrics of a held-out split for a job: every rank scores its part of the rows, and rank 0 has the figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from embeddings.sharding.exchange.collectives import all_reduce
from trainer.data.batches.order import rank_slice
from trainer.data.batches.sequence_batches import MAX_BATCH, NUM_EVALUATION_NEGATIVES, ranking_batches
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.distributed.dynamic_tables import DynamicRows
from trainer.evaluation.full_ranking import Ranks, catalogue_ranks, single_bags
from trainer.evaluation.output_calibration import OutputCalibration, Sample
from trainer.evaluation.pointwise import GATHER_ROWS, gathered, intervals, streamed
from trainer.metrics.classification import mean
from trainer.metrics.frequency import NUM_BUCKETS, bucket_rows, frequency_buckets
from trainer.metrics.intervals import bootstrap
from trainer.metrics.pointwise import Rows
from trainer.metrics.ranking import Ranking
from trainer.metrics.streaming import RankGroup
from trainer.sizing.memory import EVALUATION_BATCH_SIZE as BATCH_SIZE
from trainer.spec import JobSpec
from trainer.spec.checks.evaluation import ranks_catalogue
from trainer.spec.evaluation import is_table, metrics_of_items, ranking_parts
from trainer.spec.label_tasks import metric_names, needs_users, of_label
from trainer.spec.losses import LOSSES, Loss, loss_of

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData
    from trainer.models.base import RankingModel

NORM_ROWS_AT_ONCE = 1 << 16


class _Measured(NamedTuple):
    """A label to evaluate: its number among the labels, its name ("" for a single label), its metrics and its loss."""

    number: int
    name: str
    metrics: tuple[str, ...]
    loss: Loss


class Rankings(NamedTuple):
    """Users as rows of their table, ascending [u], and rankings of their relevant items.

    ``full``: ranked among all items. ``sampled``: ranked among sampled items; None if no metric needs it.
    """

    users: npt.NDArray[np.int64]
    full: Ranking
    sampled: Ranking | None


class Columns(NamedTuple):
    """Held-out rows: positions in the split [n]; scores, labels [n] or [n, labels]; users, buckets [n] or None."""

    positions: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    users: npt.NDArray[np.int32] | None = None
    buckets: npt.NDArray[np.int8] | None = None

    @staticmethod
    def joined(parts: Sequence[Columns]) -> Columns:
        """Return the rows of all parts."""
        return Columns(*_concatenated(parts))

    def rows_of(self, task: _Measured) -> Rows:
        """Return the rows that have the label ``task``, with the scores of this label."""
        settings = {"is_logit": task.loss.is_logit, "is_log": task.loss.is_log}
        if not task.name:
            return Rows(self.scores, self.labels, self.users, self.buckets, **settings)
        labels = np.ascontiguousarray(self.labels[:, task.number])
        scores = np.ascontiguousarray(self.scores[:, task.number])
        return Rows(scores, labels, self.users, self.buckets, **settings).where(~np.isnan(labels))


class Evaluator:
    """Evaluation of a model on the rows of one prepared data set. Every method is collective.

    ``gather_rows``: a split of more rows is counted in pieces, not gathered. ``dynamic_rows``: rows of the dynamic
    tables.
    """

    def __init__(
        self, job: JobSpec, data: PreparedData, model: RankingModel, device: torch.device | None = None, *,
        gather_rows: int = GATHER_ROWS, dynamic_rows: DynamicRows | None = None,
    ):  # fmt: skip
        self.job, self.data, self.model, self._dynamic_rows = job, data, model, dynamic_rows
        self.device = device or torch.device("cpu")
        initialized = dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if initialized else (0, 1)
        self._group = dist.distributed_c10d._get_default_group() if self.world_size > 1 else None
        self._gather_rows = gather_rows
        self.metrics = () if data.tasks else metric_names(job, data.label_dtype.kind == "f")
        self._tasks = tuple(
            _Measured(number, one.name, one.measured(job.evaluation.metrics), LOSSES[one.loss])
            for number, one in enumerate(data.tasks)
        ) or (_Measured(0, "", tuple(n for n in self.metrics if ranking_parts(n) is None), LOSSES[loss_of(job)]),)
        self._sequence = job.model.reads_sequences
        self.calibration = OutputCalibration(job.output_calibration)
        self._batch_size = min(BATCH_SIZE, MAX_BATCH) if self._sequence else BATCH_SIZE

    @torch.no_grad()
    def evaluate(self, split: str, sample_users: int | None = None) -> dict[str, Any]:
        """Return the job's figures of the whole split on rank 0, {} on other ranks; a figure without a value is None.

        If the job calibrates its outputs, figures of calibrated probabilities are included: validation rows must then
        be evaluated before test rows. ``sample_users``: number of users to rank, approximately; None: all users.
        """
        rows = None if self._sequence else self._rows(split)
        measured = (
            self._next_items(split, sample_users)
            if rows is None
            else self._measured(rows, self.data.num_examples[split])
        )
        if ranks_catalogue(self.job):
            measured |= self._ranked(split, sample_users)
        shown = self._shown(measured)
        return shown if rows is None or not self.calibration.is_of(split) else shown | self._calibrated(split, rows)

    def _calibrated(self, split: str, rows: Columns) -> dict[str, Any]:
        """Return on rank 0 the split's figures of calibrated outputs, fitted on validation rows; {} on other ranks.

        If the split is too large to be gathered, every second, third, ... row is used.
        """
        taken = rows.positions % max(1, -(-self.data.num_examples[split] // self._gather_rows)) == 0
        columns = self.in_order(Columns(rows.positions[taken], rows.scores[taken], rows.labels[taken]))
        if columns is None:
            return {}
        weights = self.data.row_weights(split)[columns.positions] if self.data.is_weighted else None
        figures: dict[str, Any] = {}
        for task in self._tasks:
            if task.loss.is_logit:
                scores, labels = (part[:, task.number] if task.name else part for part in columns[1:3])
                own = self.calibration.measured(
                    split, task.name, Sample(scores, labels, weights).where(~np.isnan(labels))
                )
                figures |= {of_label(name, task.name): _finite(value) for name, value in own.items()}
        return figures

    def _shown(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Return on rank 0 the figures of ``measured`` that the job names, in its order; {} on other ranks."""
        if self.rank != 0:
            return {}
        order = [(metric, "") for metric in self.metrics]
        order += [(metric, task.name) for task in self._tasks if task.name for metric in task.metrics]
        ends = ("", "_low", "_high")
        names = [of_label(metric + end, label) for metric, label in order for end in ends]
        figures = {name: measured[name] for name in names if name in measured}
        shown = {name: value if is_table(name) else _finite(value) for name, value in figures.items()}
        counts = ["examples", "users", *(of_label("examples", task.name) for task in self._tasks)]
        return {**shown, **{name: measured[name] for name in counts if name in measured}}

    # --- rows with a score -------------------------------------------------------------------------------------------

    def scored(self, batch: Batch, num_before: int) -> Columns:
        """Return this rank's part of a batch with its scores; ``num_before``: rows before the batch."""
        scores, labels = self._outputs(batch, self.model.catalogue(self.data, self.device))
        positions = num_before + batch.sample_offset + np.arange(len(batch))
        return Columns(positions, scores.astype(np.float32), labels.astype(np.float32))

    def figures(self, columns: Columns) -> dict[str, Any]:
        """Return on rank 0 the job's figures of all ranks' scored rows, {} on other ranks; ``columns``: this rank's."""
        return self._shown(self._measured(columns, self.total(len(columns.positions))))

    def no_rows(self) -> Columns:
        """Return columns of no rows, to which :meth:`scored` rows can be joined."""
        shape = (0, len(self.data.tasks)) if self.data.tasks else (0,)
        return Columns(np.empty(0, np.int64), np.empty(shape, np.float32), np.empty(shape, np.float32))

    def total(self, number: int) -> int:
        """Return the sum of ``number`` over all ranks. Collective."""
        return int(RankGroup(self._group).total([number])[0])

    def _measured(self, columns: Columns, num_rows: int) -> dict[str, Any]:
        whole = columns if num_rows > self._gather_rows else self.in_order(columns)
        norms = self._norms() if any("frequency_buckets" in task.metrics for task in self._tasks) else None
        figures: dict[str, Any] = {"examples": num_rows}
        for task in self._tasks:
            of_task = self._of_task(task, whole, is_whole=num_rows <= self._gather_rows)
            if norms is not None and "frequency_buckets" in of_task:
                of_task["frequency_buckets"] = bucket_rows(*norms, *of_task["frequency_buckets"])
            figures |= {of_label(name, task.name): value for name, value in of_task.items()}
        return figures

    def _of_task(self, task: _Measured, columns: Columns | None, *, is_whole: bool) -> dict[str, Any]:
        """Return the figures of one label, from the rows that have this label; {} without columns.

        ``is_whole``: True if ``columns`` has all ranks' rows, False if it has this rank's.
        """
        if columns is None:
            return {}
        rows, asked = columns.rows_of(task), self.job.evaluation.intervals
        count = [len(rows)] if is_whole else RankGroup(self._group).total([len(rows)])
        figures: dict[str, Any] = {"examples": int(count[0])} if task.name else {}
        if not is_whole:
            return figures | streamed(task.metrics, rows, self._group)
        figures |= gathered(task.metrics, rows)
        return figures if asked is None else figures | _ends(intervals(task.metrics, rows, asked, self.job.seed))

    def _rows(self, split: str) -> Columns:
        """Return this rank's scored rows of a split."""
        users = self.data.user_codes(split) if needs_users(self.job, self.data.tasks) else None
        of_items = metrics_of_items(name for task in self._tasks for name in task.metrics)
        buckets = frequency_buckets(self._counts()) if of_items else None
        parts = []
        for positions, batch, (scores, labels) in self._evaluated(split):
            of_users = None if users is None else np.asarray(users[positions])
            of_buckets = None if buckets is None else buckets[batch.features["item"].values().cpu().numpy()]
            parts.append(Columns(positions, scores.astype(np.float32), labels.astype(np.float32), of_users, of_buckets))
        return Columns.joined(parts)

    def in_order(self, rows: Columns) -> Columns | None:
        """Return on rank 0 all ranks' rows in the order of the split, None on other ranks; ``rows``: this rank's."""
        columns = self._gathered(list(rows))
        if columns is None:
            return None
        order = np.argsort(columns[0])
        in_order: list[Any] = [None if column is None else column[order] for column in columns]
        return Columns(*in_order)

    def _gathered(self, columns: list[Any]) -> list[Any] | None:
        """Return on rank 0 each column (array or None) concatenated over all ranks; None on other ranks."""
        if self._group is None:
            return columns
        everyone: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(columns, everyone)
        return None if everyone is None else _concatenated(everyone)

    def _evaluated(
        self, split: str, sample_users: int | None = None
    ) -> Iterator[tuple[npt.NDArray[np.int64], Batch, tuple[npt.NDArray[Any], ...]]]:
        """Yield (positions in the split, batch, outputs of the model) for this rank's slice of each batch."""
        catalogue = self.model.catalogue(self.data, self.device)
        for batch in self._batches(split, sample_users):
            start = batch.step * self._batch_size + batch.sample_offset
            yield start + np.arange(len(batch)), batch, self._outputs(batch, catalogue)

    def _batches(self, split: str, sample_users: int | None) -> Iterable[Batch]:
        if not self._sequence:
            return self.data.eval_batches(split, BATCH_SIZE, self.rank, self.world_size)
        among_drawn = any((parts := ranking_parts(name)) is None or not parts[2] for name in self.metrics)
        return ranking_batches(
            self.data, split, BATCH_SIZE, self.rank, self.world_size,
            sample=sample_users, num_negatives=NUM_EVALUATION_NEGATIVES if among_drawn else 0,
        )  # fmt: skip

    def _outputs(self, batch: Batch, catalogue: Any) -> tuple[npt.NDArray[Any], ...]:
        known = batch if self._dynamic_rows is None else self._dynamic_rows.known(batch)
        return tuple(part.cpu().numpy() for part in self.model.evaluate(known.on(self.device), catalogue))

    # --- examples ranked alone ---------------------------------------------------------------------------------------

    def _next_items(self, split: str, sample_users: int | None) -> dict[str, Any]:
        parts = [(positions, *outputs) for positions, _, outputs in self._evaluated(split, sample_users)]
        columns = self._gathered([np.concatenate(part) for part in zip(*parts, strict=True)])
        if columns is None:
            return {}
        order = np.argsort(columns[0])
        rank, below, full = (column[order].astype(np.float64) for column in columns[1:])
        units = self._by_unit(Ranking.of_single(rank), Ranking.of_single(full))
        if "auc" in self.metrics:
            units["auc"] = below
        return {**self._means(units), "examples": len(rank)}

    # --- all items ranked for each user ------------------------------------------------------------------------------

    def _ranked(self, split: str, sample_users: int | None) -> dict[str, Any]:
        parts = [parts for name in self.metrics if (parts := ranking_parts(name)) is not None]
        ranks = catalogue_ranks(
            self.model, self.data, split,
            largest_k=max((k for _, k, full in parts if full and k is not None), default=1),
            sampled=any(not full for _, _, full in parts),
            rank=self.rank, world_size=self.world_size, device=self.device, max_users=sample_users,
        )  # fmt: skip
        names = [name for name in self.metrics if ranking_parts(name) is not None]
        if ranks is None:
            return dict.fromkeys(names, math.nan)
        rankings = self.rankings(ranks)
        if rankings is None:
            return {}
        return {**self._means(self._by_unit(rankings.sampled, rankings.full)), "users": len(rankings.users)}

    def rankings(self, ranks: Ranks) -> Rankings | None:
        """Return on rank 0 the rankings of all ranks' users, None on other ranks. Collective."""
        columns = self._gathered(list(ranks))
        if columns is None:
            return None
        all_ranks = Ranks(*columns)
        # Users ascend on every rank, and ranks hold consecutive ranges of users.
        users = np.searchsorted(all_ranks.relevant_users, all_ranks.users)
        alone = None if all_ranks.sampled is None else Ranking.of_single(all_ranks.sampled)
        return Rankings(all_ranks.relevant_users, Ranking(all_ranks.ranks, users, all_ranks.num_relevant), alone)

    def _by_unit(self, sampled: Ranking | None, full: Ranking) -> dict[str, npt.NDArray[np.float64]]:
        """Return {name: values} of the job's ranking metrics: a value for each user or example, float64 [n]."""
        by_name = {}
        for name in self.metrics:
            parts = ranking_parts(name)
            ranking = full if parts is not None and parts[2] else sampled
            if parts is not None and ranking is not None:
                by_name[name] = ranking.values(*parts[:2])
        return by_name

    def _means(self, units: Mapping[str, npt.NDArray[np.float64]]) -> dict[str, Any]:
        figures: dict[str, Any] = {name: mean(values) for name, values in units.items()}
        asked = self.job.evaluation.intervals
        if asked is not None:
            settings: dict[str, Any] = {"replicates": asked.replicates, "seed": self.job.seed, "level": asked.level}
            for name, values in units.items():
                figures |= _ends(bootstrap(partial(_mean_of, name, values), len(values), **settings))
        return figures

    # --- frequency buckets -------------------------------------------------------------------------------------------

    def _counts(self) -> npt.NDArray[np.int64]:
        """Return, for each row in the item table, the number of training occurrences; 0 for special rows."""
        counts = np.array(self.data.row_counts(next(key.table for key in self.data.keys if key.name == "item")))
        counts[:NUM_SPECIAL_ROWS] = 0
        return counts

    def _norms(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8], npt.NDArray[np.float64]]:
        """Return (occurrences and bucket of each row in the item table; sum of the vectors' norms by bucket).

        The vectors are as the model reads them. Each rank reads its share of the rows.
        """
        counts = self._counts()
        buckets = frequency_buckets(counts)
        seen = np.flatnonzero(counts)
        first, last = rank_slice(len(seen), self.rank, self.world_size)
        local, sums = seen[first:last], np.zeros(NUM_BUCKETS + 1)
        names = [key.name for key in self.data.keys]
        for start in range(0, -(-len(seen) // self.world_size), NORM_ROWS_AT_ONCE):
            rows = local[start : start + NORM_ROWS_AT_ONCE]
            looked_up = self.model.embeddings(single_bags(names, "item", rows).to(self.device))
            vectors = looked_up["item"].values() if self.model.is_sequence else looked_up.to_dict()["item"]
            norms = vectors[:, : self.job.model.embedding_dim].double().norm(dim=1).cpu().numpy()
            sums += np.bincount(buckets[rows], norms, NUM_BUCKETS + 1)
        if self._group is not None:
            sums = all_reduce("norms by frequency", torch.from_numpy(sums), self._group).numpy()
        return counts, buckets, sums


def _concatenated(parts: Sequence[Sequence[Any]]) -> list[Any]:
    return [None if part[0] is None else np.concatenate(part) for part in zip(*parts, strict=True)]


def _ends(bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    return {
        f"{name}_{end}": both[number] for name, both in bounds.items() for number, end in enumerate(("low", "high"))
    }


def _mean_of(name: str, values: npt.NDArray[np.float64], times: npt.NDArray[np.int64]) -> dict[str, float]:
    return {name: mean(values, times)}


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
