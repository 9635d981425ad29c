"""Scores of held-out rows by two models, and the differences in metrics between these models.

Models of labelled rows are compared by the first of the job's metrics that is one of
:data:`trainer.metrics.paired.PAIRED`. Models that rank items for a user are compared by :data:`MATCHED_AUC`, and by
:data:`NDCG` where all items can be ranked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from embeddings.refresh.model_comparison import ALL_ROWS, NEWEST_ROWS, ModelDifference
from trainer.data.batches.batches import BatchReader, SplitColumns
from trainer.data.batches.order import rank_slice
from trainer.data.batches.sequence_batches import MAX_BATCH, RankingReader
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.hashing import Int64s, below, derive_key, random_words
from trainer.data.columns.numeric import open_numeric
from trainer.data.prefetch import Prefetched
from trainer.data.prepare.row_figures import NEWEST
from trainer.data.prepare.split import SPLIT_SEED
from trainer.evaluation.evaluator import Columns, Evaluator, Rankings
from trainer.evaluation.full_ranking import HeldOut, ranks_by_popularity, ranks_of_held_out
from trainer.evaluation.held_out_by_both import HELD_OUT, Chosen, Known, NotComparableError, column_of
from trainer.metrics.classification import mean
from trainer.metrics.paired import PAIRED, Paired, interval, paired_mean, standard_error
from trainer.metrics.pointwise import Rows
from trainer.metrics.ranking import Ranking
from trainer.sizing.memory import EVALUATION_BATCH_SIZE
from trainer.spec import DatasetSpec, JobSpec
from trainer.spec.evaluation import is_lower_better
from trainer.spec.label_tasks import metric_names, of_label
from trainer.spec.losses import LOSSES, loss_of

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData
    from trainer.distributed.dynamic_tables import DynamicRows

MATCHED_AUC = "matched_auc"
"""Name of the metric: share of the drawn items that score below a user's positive; ties count half.

The items are drawn from other users' held-out positives, in proportion to how often they are positives, so a ranking
only by popularity has .5.
"""
TOP = 20
NDCG = f"ndcg_{TOP}_full"
"""Name of the metric: NDCG of each user among all items that both models know, except the user's training items."""
MAX_RANKED_SCORES = 1 << 30
"""Most scores to compute for a ranking of all items; if there are more, an evenly spaced part of the users is ranked.
"""
MIN_ROWS = 200
"""Fewest rows of a comparison, and of a slice."""
MIN_USERS = 50
"""Fewest users whose rows count as one observation each; with fewer, rows count as independent."""
FEW_USERS_ERROR = 2.0
"""Factor on the standard error for fewer users than MIN_USERS, since it is uncertain: Student's t of about 8 users."""
MAX_NEGATIVES = 100
"""Most drawn items that a positive is compared with."""
MAX_DRAWS = 2_000_000
"""Most comparisons of positives with drawn items, over all rows."""
REDRAWS = 4
"""Most times that a drawn item is drawn again because it is the positive itself."""
ROWS_AT_ONCE = 1 << 12
"""Rows whose drawn items are scored at a time."""
SLICE_VALUES = 10
"""Most slices by a column of ids: each of its most frequent values has a slice."""
LEVEL = 0.95
"""Level of confidence intervals: for all rows, and for all slices jointly (Bonferroni)."""

Float64s = npt.NDArray[np.float64]


class Ndcg(NamedTuple):
    """NDCG of each user in each split, or of each example.

    ``users`` and ``values``: [n]. ``popularity``: mean NDCG of a ranking by the items' numbers of training rows.
    """

    users: Int64s
    values: Float64s
    popularity: float

    def difference_from(self, served: Ndcg) -> ModelDifference:
        """Return the difference from the served model's values for the same users, with a paired interval."""
        paired = paired_mean(served.values, self.values)
        users, rows = np.unique(self.users, return_inverse=True)[1], len(self.values)
        low, high = interval(paired, users, LEVEL)
        errors = (standard_error(one, users) for one in paired.influences)
        means = paired.first, paired.second
        return ModelDifference(NDCG, ALL_ROWS, rows, *means, low, high, self.popularity, False, *errors)


def scorer_of(
    job: JobSpec, dataset: DatasetSpec, data: PreparedData, evaluator: Evaluator, dynamic_rows: DynamicRows,
    chosen: list[Chosen], known: Known,
) -> Scorer:  # fmt: skip
    kind: type[Scorer] = _Labelled
    if job.model.reads_sequences:
        kind = _Sequences
    elif job.model.ranks_all_items and (
        data.is_bpr or data.draws_negatives or dataset.has_positives_alone or job.model.is_softmax_of_batch
    ):
        kind = _Pairs
    return kind(job, dataset, data, evaluator, dynamic_rows, chosen, known)


class Scorer:
    """Base of scorers: they score the chosen rows by the loaded model, and compare the scores of two models."""

    batch_size = EVALUATION_BATCH_SIZE

    def __init__(
        self, job: JobSpec, dataset: DatasetSpec, data: PreparedData, evaluator: Evaluator, dynamic_rows: DynamicRows,
        chosen: list[Chosen], known: Known,
    ):  # fmt: skip
        self.job, self.data, self.evaluator, self.dynamic_rows = job, data, evaluator, dynamic_rows
        self.dataset, self.known = dataset, known
        self.chosen = self._used(chosen)
        self.num_rows = sum(len(one.rows) for one in self.chosen)
        if self.num_rows < MIN_ROWS:
            raise NotComparableError(
                f"both models know the ids of {self.num_rows:,} held-out rows, and {MIN_ROWS} are needed"
            )
        self.prepare()

    def _used(self, chosen: list[Chosen]) -> list[Chosen]:
        return chosen

    def ndcg(self) -> Ndcg | None:
        """Return on rank 0 the NDCG of rankings of all items by the loaded model. Collective.

        None on other ranks, and if all items cannot be ranked. :meth:`score` must have been called before.
        """
        return None

    def prepare(self) -> None:
        """Compute the labels, or draw the items, with which both models' scores are compared."""

    @torch.no_grad()
    def score(self) -> npt.NDArray[np.float32] | None:
        """Return on rank 0 the loaded model's scores of the chosen rows [n, ...]; None on other ranks. Collective."""
        parts = [Columns(*(part.astype(kind) for part, kind in zip(one, (np.int64, np.float32, np.int8), strict=True)))
                 for one in self._scored()]  # fmt: skip
        columns = self.evaluator.in_order(Columns.joined(parts))
        return None if columns is None else columns.scores

    def _scored(self) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Yield for each batch (positions among the chosen rows, outputs of the model, zeros) of this rank's slice."""
        first_position, model, device = 0, self.evaluator.model, self.evaluator.device
        for split, rows in self.chosen:
            batch_of = self.reader(split)
            start_position = first_position

            def make(
                step: int, rows: Int64s = rows, batch_of: Any = batch_of, start_position: int = start_position
            ) -> Any:
                start = step * self.batch_size
                size = min(self.batch_size, len(rows) - start)
                first, last = rank_slice(size, self.evaluator.rank, self.evaluator.world_size)
                positions = start_position + np.arange(start + first, start + last)
                return positions, batch_of(rows[start + first : start + last], positions, first, size, step)

            for positions, batch in Prefetched(make, 0, -(-len(rows) // self.batch_size)):
                output = self.output(model, self.dynamic_rows.known(batch).on(device)).float().cpu().numpy()
                yield positions, output, np.zeros(len(positions))
            first_position += len(rows)

    def reader(self, split: str) -> Callable[[Int64s, Int64s, int, int, int], Batch]:
        """Return a function from (rows of the split, positions, sample offset, global size, step) to a batch."""
        reader = BatchReader(self.data, SplitColumns.of(self.data, split))
        return lambda rows, positions, first, size, step: reader.batch(
            rows, first, size, step, int(positions[0]) if len(positions) else 0
        )

    def output(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return the outputs of ``model`` for a batch, [b, ...]."""
        raise NotImplementedError

    def differences(
        self, served: npt.NDArray[np.float32], candidate: npt.NDArray[np.float32]
    ) -> tuple[ModelDifference, ...]:
        """Return the differences over all rows and over each slice, from both models' results of :meth:`score`."""
        users = self.users()
        slices = list(self.slices())
        found = [self._difference(ALL_ROWS, np.ones(self.num_rows, bool), served, candidate, users, LEVEL)]
        level = 1.0 - (1.0 - LEVEL) / max(1, len(slices))
        found += [self._difference(name, rows, served, candidate, users, level) for name, rows in slices]
        if found[0] is None:
            raise NotComparableError("held-out rows that both models know have no value of the metric")
        return tuple(one for one in found if one is not None)

    def _difference(
        self, name: str, rows: npt.NDArray[np.bool_], served: npt.NDArray[np.float32],
        candidate: npt.NDArray[np.float32], users: Int64s | None, level: float,
    ) -> ModelDifference | None:  # fmt: skip
        metric, paired, used = self.paired(served, candidate, rows)
        if paired is None or len(paired.influence) < MIN_ROWS:
            return None
        units, by_user = None, None
        if users is not None:
            known, by_user = np.unique(users[used], return_inverse=True)
            units = None if len(known) < MIN_USERS else by_user
        low, high = interval(paired, units, level)
        errors = [standard_error(one, units) for one in paired.influences]
        if by_user is not None and units is None:
            by_users = (FEW_USERS_ERROR * standard_error(one, by_user) for one in paired.influences)
            errors = [max(both) for both in zip(errors, by_users, strict=True)]
        return ModelDifference(
            metric, name, len(paired.influence), paired.first, paired.second, low, high, self.popularity(used),
            is_lower_better(metric), *errors,
        )  # fmt: skip

    def paired(
        self, served: npt.NDArray[np.float32], candidate: npt.NDArray[np.float32], rows: npt.NDArray[np.bool_]
    ) -> tuple[str, Paired | None, npt.NDArray[np.bool_]]:
        """Return (name of the metric, difference on the rows flagged in ``rows``, flags of the rows that it includes).

        The difference is None if the metric has no value on these rows.
        """
        raise NotImplementedError

    def popularity(self, rows: npt.NDArray[np.bool_]) -> float | None:
        """Return the metric's value, on the rows flagged in ``rows``, of a ranking by popularity; None: not known."""
        return None

    def users(self) -> Int64s | None:
        """Return a number for the user of each row [n]; None if rows have no users.

        Rows without a known user all have different numbers.
        """
        names = [key.name for key in self.data.keys if not key.is_list]
        if self.data.sequence is None and "user" not in names:
            return None
        users = column_of(self.data, self.chosen, "user")
        if self.data.sequence is None:
            unknown = users < NUM_SPECIAL_ROWS
            users[unknown] = users.max() + 1 + np.arange(int(unknown.sum()))
        return users

    # --- slices

    def slices(self) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
        """Yield (name, flags of its rows) of the slice of newest rows, and of each slice of ``evaluation.slices``."""
        if self.job.dataset.window is not None and self.data.sequence is None:
            # Rows lie in the order of their days.
            counts = self.data.num_examples
            yield NEWEST_ROWS, np.concatenate([rows >= (1.0 - NEWEST) * counts[split] for split, rows in self.chosen])
        for name in self.job.evaluation.slices:
            if self.dataset.features[name].type == "dense":
                yield from self._slices_of_number(name)
            else:
                yield from self._slices_of_ids(name)

    def _slices_of_ids(self, name: str) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
        codes = column_of(self.data, self.chosen, name)
        table = next(key.table for key in self.data.keys if key.name == name)
        values, counts = np.unique(codes, return_counts=True)
        enough = (values >= NUM_SPECIAL_ROWS) & (counts >= MIN_ROWS)
        values, counts = values[enough], counts[enough]
        for value in values[np.argsort(-counts, kind="stable")][:SLICE_VALUES]:
            yield f"{name}={self.data.vocabulary(table)[int(value) - NUM_SPECIAL_ROWS].as_py()}", codes == value

    def _slices_of_number(self, name: str) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
        assert self.data.numeric_path is not None
        features = open_numeric(self.data.numeric_path)
        position = next(number for number, feature in enumerate(features) if feature.name == name)
        numbers = np.concatenate([self.data.numbers(split)[rows, position] for split, rows in self.chosen])
        values = features[position].original(numbers.astype(np.float64))
        edges = np.unique(np.quantile(values, [0.0, 0.25, 0.5, 0.75, 1.0]))
        for number, (low, high) in enumerate(itertools.pairwise(edges)):
            is_last = number == len(edges) - 2
            rows = (values >= low) & ((values <= high) if is_last else (values < high))
            yield f"{name}=[{low:.4g}, {high:.4g}{']' if is_last else ')'}", rows


class _Labelled(Scorer):
    """Scorer of rows with labels: it compares the scores of the first label by a metric."""

    def prepare(self) -> None:
        data = self.data
        labels = np.concatenate([np.asarray(data.labels(split))[rows] for split, rows in self.chosen])
        self._labels = (labels[:, 0] if data.tasks else labels).astype(np.float32)
        task = data.tasks[0] if data.tasks else None
        self._loss = LOSSES[loss_of(self.job) if task is None else task.loss]
        is_value = data.label_dtype.kind == "f" if task is None else task.is_value
        asked = metric_names(self.job, is_value) if task is None else task.measured(self.job.evaluation.metrics)
        self._metric = next((name for name in asked if name in PAIRED), "rmse" if is_value else "auc")
        self._name = of_label(self._metric, "" if task is None else task.name)

    def output(self, model: Any, batch: Batch) -> torch.Tensor:
        scores: torch.Tensor = model.evaluate(batch)[0]
        return scores[:, 0] if scores.ndim > 1 else scores

    def paired(
        self, served: npt.NDArray[np.float32], candidate: npt.NDArray[np.float32], rows: npt.NDArray[np.bool_]
    ) -> tuple[str, Paired | None, npt.NDArray[np.bool_]]:
        rows = rows & ~np.isnan(self._labels)
        labels = self._labels[rows]
        if not len(labels) or (self._metric == "auc" and labels.min() == labels.max()):
            return self._name, None, rows
        both = (
            Rows(scores[rows], labels, is_logit=self._loss.is_logit, is_log=self._loss.is_log)
            for scores in (served, candidate)
        )
        return self._name, PAIRED[self._metric](*both), rows


class _Ranked(Scorer):
    """Base of scorers that rank a user's positives against items drawn from other users', alike for both models."""

    def prepare(self) -> None:
        users = self.users()
        assert users is not None
        number = max(1, min(MAX_NEGATIVES, MAX_DRAWS // self.num_rows))
        self.items = column_of(self.data, self.chosen, "item")
        self.draws = others(users, self.items, number)

    def popularity(self, rows: npt.NDArray[np.bool_]) -> float | None:
        table = next(key.table for key in self.data.keys if key.name == "item")
        counts = self.data.row_counts(table)[self.items]
        own, drawn = counts[rows][:, None], counts[self.draws[rows]]
        return float(((drawn < own) + 0.5 * (drawn == own)).mean())

    def shares(self, scored: npt.NDArray[np.float32]) -> Float64s:
        """Return for each row the share of the drawn items that score below its item, float64 [n]."""
        return scored.astype(np.float64)

    def differences(
        self, served: npt.NDArray[np.float32], candidate: npt.NDArray[np.float32]
    ) -> tuple[ModelDifference, ...]:
        return super().differences(*(self.shares(one).astype(np.float32) for one in (served, candidate)))

    def paired(
        self, served: npt.NDArray[np.float32], candidate: npt.NDArray[np.float32], rows: npt.NDArray[np.bool_]
    ) -> tuple[str, Paired | None, npt.NDArray[np.bool_]]:
        if not rows.any():
            return MATCHED_AUC, None, rows
        values = (scores[rows].astype(np.float64) for scores in (served, candidate))
        return MATCHED_AUC, paired_mean(*values), rows


class _Pairs(_Ranked):
    """Scorer for models whose score is <user side, item side>."""

    def _used(self, chosen: list[Chosen]) -> list[Chosen]:
        """Return the chosen rows that are positives with a known user and a known item."""
        found = []
        for split, rows in chosen:
            one = [Chosen(split, rows)]
            taken = np.asarray(self.data.labels(split))[rows] == 1
            for name in ("user", "item"):
                taken &= column_of(self.data, one, name) >= NUM_SPECIAL_ROWS
            found.append(Chosen(split, rows[taken]))
        return found

    def prepare(self) -> None:
        super().prepare()
        self._held: list[tuple[str, HeldOut]] = []
        if self.data.keeps_seen_items and not self.dynamic_rows.ids:
            ranks = self.evaluator.rank, self.evaluator.world_size
            most = max(1, MAX_RANKED_SCORES // len(self.data.seen_items[1]))
            for split, _ in self.chosen:
                held = HeldOut(self.data, split, *ranks, known=self.known, max_users=most)
                self._held.append((split, held))

    def ndcg(self) -> Ndcg | None:
        found: list[tuple[Rankings, Rankings]] = []
        for split, held in self._held:
            ranks = ranks_of_held_out(
                self.evaluator.model, self.data, split, held, largest_k=TOP, device=self.evaluator.device
            )
            if ranks is None:
                return None
            popular = ranks_by_popularity(self.data, split, held, largest_k=TOP)
            own, others = self.evaluator.rankings(ranks), self.evaluator.rankings(popular)
            if own is not None and others is not None:
                found.append((own, others))
        if not found:
            return None
        values, popularity = (np.concatenate([one[kind].full.ndcg(TOP) for one in found]) for kind in (0, 1))
        return Ndcg(np.concatenate([one[0].users for one in found]), values, mean(popularity))

    def output(self, model: Any, batch: Batch) -> torch.Tensor:
        return torch.cat(model.both_sides(batch), dim=1)

    def shares(self, scored: npt.NDArray[np.float32]) -> Float64s:
        users, items = np.split(scored, 2, axis=1)
        found = np.empty(len(scored))
        for start in range(0, len(scored), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            own = np.einsum("nd,nd->n", users[part], items[part])[:, None]
            drawn = np.einsum("nd,nkd->nk", users[part], items[self.draws[part]])
            found[part] = ((drawn < own) + 0.5 * (drawn == own)).mean(axis=1)
        return found


class _Sequences(_Ranked):
    """Scorer for sequence models, which rank a user's next item."""

    batch_size = MAX_BATCH

    def _used(self, chosen: list[Chosen]) -> list[Chosen]:
        return [
            Chosen(split, rows[column_of(self.data, [Chosen(split, rows)], "item") >= NUM_SPECIAL_ROWS])
            for split, rows in chosen
        ]

    def reader(self, split: str) -> Callable[[Int64s, Int64s, int, int, int], Batch]:
        reader = RankingReader(self.data, split)
        return lambda rows, positions, first, size, step: reader.against(
            rows, self.items[self.draws[positions]], first, size, step
        )

    def prepare(self) -> None:
        super().prepare()
        self._not_known = torch.from_numpy(np.flatnonzero(~self.known[self.data.keys[0].table]))
        self._not_known = self._not_known.to(self.evaluator.device)

    def score(self) -> npt.NDArray[np.float32] | None:
        """Return on rank 0 the score of each row [n]; ranks among all items are kept for :meth:`ndcg`. Collective."""
        model, device = self.evaluator.model, self.evaluator.device
        self._catalogue = None if self.dynamic_rows.ids else model.catalogue(self.data, device)
        scored = super().score()
        self._ranks = None if scored is None else scored[:, 1].astype(np.float64)
        return None if scored is None else scored[:, 0]

    def output(self, model: Any, batch: Batch) -> torch.Tensor:
        _, share, rank = model.evaluate(batch, self._catalogue, self._not_known)
        return torch.stack([share, rank], dim=1)

    def ndcg(self) -> Ndcg | None:
        if self._ranks is None or self._catalogue is None:
            return None
        users = self.users()
        assert users is not None
        found, popular = (Ranking.of_single(ranks).ndcg(TOP) for ranks in (self._ranks, self._popular_ranks()))
        return Ndcg(users, found, mean(popular))

    def _popular_ranks(self) -> Float64s:
        """Return the rank of each example's item by numbers of training rows, counted like the model's ranks [n]."""
        table = self.data.keys[0].table
        counts = np.where(self.known[table], self.data.row_counts(table), -1)
        counts[:NUM_SPECIAL_ROWS] = -1
        above = len(counts) - np.searchsorted(np.sort(counts), counts[self.items]) - 1
        first = 0
        for split, rows in self.chosen:
            own = slice(first, first + len(rows))
            history = self.data.sequences.history(split, np.asarray(self.data.sequences.held[split])[rows])[0]
            pairs = np.unique(np.repeat(np.arange(len(rows)), history.lengths) * len(counts) + history.values)
            example, item = np.divmod(pairs, len(counts))
            target = self.items[own][example]
            hidden = (counts[item] >= counts[target]) & (item != target)
            above[own] -= np.bincount(example[hidden], minlength=len(rows))
            first += len(rows)
        return above.astype(np.float64)


def others(users: Int64s, items: Int64s, number: int) -> Int64s:
    """Return for each row ``number`` rows of other users and items, drawn with replacement: int64 [n, number].

    ``users``, ``items``: of the rows, int64 [n]. A drawn row with the row's own item is drawn again, up to REDRAWS
    times; if most rows have that item, some may remain.

    Raises:
        NotComparableError: all rows belong to one user.
    """
    order = np.argsort(users, kind="stable")
    ordered = users[order]
    starts = np.searchsorted(ordered, users, side="left")
    own = np.searchsorted(ordered, users, side="right") - starts
    if (own == len(users)).any():
        raise NotComparableError("all held-out rows belong to one user")
    found = np.empty(len(users) * number, dtype=np.int64)
    missing = np.arange(len(found))
    for draw in range(1 + REDRAWS):
        row = missing // number
        drawn = below(random_words(derive_key(SPLIT_SEED, len(HELD_OUT), draw), missing), len(users) - own[row])
        found[missing] = order[drawn + np.where(drawn >= starts[row], own[row], 0)]
        missing = missing[items[found[missing]] == items[row]]
    return found.reshape(len(users), number)
