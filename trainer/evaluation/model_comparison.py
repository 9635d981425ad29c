"""The served version's model beside the job's, on held-out rows that neither was trained on.

The trained model scores the rows, then the served one's rows and dense parts are loaded in its place, whatever plan
wrote them, and the same rows are scored again. Models of labelled rows are compared by the first of the job's metrics
that is one of :data:`trainer.metrics.paired.PAIRED`. Models that rank items for a user are compared by
:data:`MATCHED_AUC`. Both models know all ids of a row: new items, of which the served one knows nothing, do not decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from embeddings.refresh.model_comparison import ALL_ROWS, NEWEST_ROWS, ModelDifference
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.warm_start import (
    id_maps,
    numeric_features,
    rows_of_parent,
    vectors_read,
)
from trainer.data.batches.batches import BatchReader, SplitColumns
from trainer.data.batches.order import rank_slice
from trainer.data.batches.sequence_batches import MAX_BATCH, RankingReader
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, hashes_of
from trainer.data.columns.hashing import Int64s, below, derive_key, random_words
from trainer.data.columns.numeric import open_numeric
from trainer.data.prefetch import Prefetched
from trainer.data.prepare.row_figures import NEWEST
from trainer.data.prepare.split import SPLIT_SEED
from trainer.distributed.inherited import InheritedCheckpoint
from trainer.evaluation.evaluator import Columns, Evaluator
from trainer.evaluation.held_out_by_both import (
    HELD_OUT,
    Chosen,
    Known,
    NotComparableError,
    choose,
    column_of,
    splits_of_both,
)
from trainer.metrics.paired import PAIRED, Paired, interval, paired_mean, standard_error
from trainer.metrics.pointwise import Rows
from trainer.sizing.memory import EVALUATION_BATCH_SIZE
from trainer.spec import DatasetSpec, JobSpec
from trainer.spec.evaluation import is_lower_better
from trainer.spec.label_tasks import metric_names, of_label
from trainer.spec.losses import LOSSES, loss_of

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData
    from trainer.distributed.dynamic_tables import DynamicRows
    from trainer.distributed.sharded_model import ShardedModel

MATCHED_AUC = "matched_auc"
"""Share of the items of other users' held-out positives that a positive of the user is scored above, ties half.

The others are drawn as often as they are positives: ranking by popularity alone has .5.
"""
MIN_ROWS = 200
"""Fewest rows of a comparison, and of a slice."""
MIN_USERS = 50
"""Fewest users whose rows count as one observation each; with fewer, rows count as independent."""
FEW_USERS_ERROR = 2.0
"""Factor on the standard error of a metric of fewer users, which is itself uncertain: Student's t of about 8 users."""
MAX_NEGATIVES = 100
"""Most items that a positive is compared with."""
MAX_DRAWS = 2_000_000
"""Most comparisons of a positive with another item, of all rows."""
REDRAWS = 4
"""How often an item that is the positive itself is drawn anew."""
ROWS_AT_ONCE = 1 << 12
"""Rows whose drawn items are scored at a time."""
SLICE_VALUES = 10
"""Most values of a column of ids that have a slice: the most frequent ones."""
LEVEL = 0.95
"""Level of the interval of all rows, and of all slices together (Bonferroni)."""

Float64s = npt.NDArray[np.float64]


class ServedRows(NamedTuple):
    """Where the served model's rows go.

    ``rows``: by table the checkpoint's row that each row of the model takes, int64 [num_rows], -1 for none, as
    :meth:`ShardedState.load_from` reads it. ``known``: by table, whether both models know the id of each code.
    """

    rows: dict[str, torch.Tensor]
    known: Known


def differences(
    job: JobSpec, dataset: DatasetSpec, data: PreparedData, sharded: ShardedModel, dynamic_rows: DynamicRows,
    evaluator: Evaluator, served: Checkpoint, *, is_start: bool,
) -> tuple[ModelDifference, ...]:  # fmt: skip
    """Return the differences between a trained model and the served one on rank 0, () elsewhere. Collective.

    Args:
        job: the job.
        dataset: its dataset.
        data: its prepared data.
        sharded: the trained model. It is the served one, or undefined, after the call.
        dynamic_rows: its rows of dynamic tables; likewise.
        evaluator: of the job.
        served: the last checkpoint of the served version's job.
        is_start: whether the job went on from this checkpoint, so that the data know its rows.

    Raises:
        NotComparableError: on every rank, where nothing can be said.
    """
    try:
        inherited = InheritedCheckpoint(served, job, dataset, sharded)
    except (ValueError, CheckpointError) as error:
        # What is remedied on a warm start needs no remedy here.
        raise NotComparableError(str(error).partition(": use ")[0]) from None
    where = _rows_by_start(job, data, dynamic_rows, inherited) if is_start else _rows_by_id(job, data, inherited)
    chosen = choose(data, splits_of_both(job, dataset, data, served), where.known)
    scorer = _scorer(job, dataset, data, evaluator, dynamic_rows, chosen)
    sharded.eval()
    candidate = scorer.score()
    # A row that the served model has not is as before any training: it may be younger than the other's last step.
    sharded.reset_tables()
    try:
        sharded.load_from(inherited, verify=False, parent_rows=where.rows)
        dynamic_rows.load(inherited, is_own=False)
        inherited.clear_new_tables(sharded)
    except CheckpointError as error:
        raise NotComparableError(str(error)) from None
    before = scorer.score()
    if candidate is None or before is None:
        return ()
    for name, scores in (("served", before), ("new", candidate)):
        if not np.isfinite(scores).all():
            raise NotComparableError(f"a score of the {name} model is not finite")
    return scorer.differences(before, candidate)


# --- what the served model is ----------------------------------------------------------------------------------------


def _rows_by_start(job: JobSpec, data: PreparedData, dynamic_rows: DynamicRows, served: Checkpoint) -> ServedRows:
    """Map rows of a model that the job went on from, as the data do."""
    rows = rows_of_parent(job, data, served.tables)
    # A table of a feature that the served model does not read hides none of its rows.
    known = {name: (part.numpy() >= 0) | (name not in served.tables) for name, part in rows.items()}
    if dynamic_rows.ids:
        before = id_maps(served)
        for name, ids in dynamic_rows.ids.items():
            if name not in before:
                continue
            keys = data.row_keys(name)
            known[name] = (ids.find(keys.view(np.int64)) >= 0) & np.isin(keys, hashes_of(before[name].ids))
            known[name][:NUM_SPECIAL_ROWS] = True
    return ServedRows(rows, known)


def _rows_by_id(job: JobSpec, data: PreparedData, served: Checkpoint) -> ServedRows:
    """Map rows of any other model by their ids."""
    dynamic = [name for name, table in job.tables.items() if table.id_map is not None]
    if dynamic:
        raise NotComparableError(f"the job did not go on from it, and table {dynamic[0]} has a capacity")
    numeric = () if data.numeric_path is None else open_numeric(data.numeric_path)
    if numeric != numeric_features(served) or data.vectors != vectors_read(served):
        raise NotComparableError("its numeric features or vectors are scaled otherwise than the job's")
    rows = {}
    for name, ids in id_maps(served).items():
        own = data.row_keys(name)[NUM_SPECIAL_ROWS:]
        _, here, there = np.intersect1d(own, hashes_of(ids.ids), assume_unique=True, return_indices=True)
        found = np.append(np.arange(NUM_SPECIAL_ROWS), np.full(len(own), -1))
        found[here + NUM_SPECIAL_ROWS] = there + NUM_SPECIAL_ROWS
        rows[name] = torch.from_numpy(found)
    for name in data.tables.keys() - rows.keys():
        rows[name] = torch.full([data.tables[name].num_rows], -1)
    known = {name: (part.numpy() >= 0) | (name not in served.tables) for name, part in rows.items()}
    return ServedRows(rows, known)


# --- scores ----------------------------------------------------------------------------------------------------------


def _scorer(
    job: JobSpec, dataset: DatasetSpec, data: PreparedData, evaluator: Evaluator, dynamic_rows: DynamicRows,
    chosen: list[Chosen],
) -> _Scorer:  # fmt: skip
    kind: type[_Scorer] = _Labelled
    if job.model.reads_sequences:
        kind = _Sequences
    elif job.model.ranks_all_items and (
        data.is_bpr or data.draws_negatives or dataset.has_positives_alone or job.model.is_softmax_of_batch
    ):
        kind = _Pairs
    return kind(job, dataset, data, evaluator, dynamic_rows, chosen)


class _Scorer:
    """Scores of the chosen rows by whatever model is loaded, and what two of them differ by."""

    batch_size = EVALUATION_BATCH_SIZE

    def __init__(
        self, job: JobSpec, dataset: DatasetSpec, data: PreparedData, evaluator: Evaluator, dynamic_rows: DynamicRows,
        chosen: list[Chosen],
    ):  # fmt: skip
        self.job, self.data, self.evaluator, self.dynamic_rows = job, data, evaluator, dynamic_rows
        self.dataset = dataset
        self.chosen = self._used(chosen)
        self.num_rows = sum(len(one.rows) for one in self.chosen)
        if self.num_rows < MIN_ROWS:
            raise NotComparableError(
                f"both models know the ids of {self.num_rows:,} held-out rows, and {MIN_ROWS} are needed"
            )
        self.prepare()

    def _used(self, chosen: list[Chosen]) -> list[Chosen]:
        return chosen

    def prepare(self) -> None:
        """Compute what both models are scored against."""

    @torch.no_grad()
    def score(self) -> npt.NDArray[np.float32] | None:
        """Score each row by the loaded model: on rank 0 [n, ...], None elsewhere. Collective."""
        parts = [Columns(*(part.astype(kind) for part, kind in zip(one, (np.int64, np.float32, np.int8), strict=True)))
                 for one in self._scored()]  # fmt: skip
        columns = self.evaluator.in_order(Columns.joined(parts))
        return None if columns is None else columns.scores

    def _scored(self) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Yield (places among the chosen rows, what the model says of them, zeros) of this rank's slices."""
        first_place, model, device = 0, self.evaluator.model, self.evaluator.device
        for split, rows in self.chosen:
            batch_of = self.reader(split)
            start_place = first_place

            def make(step: int, rows: Int64s = rows, batch_of: Any = batch_of, start_place: int = start_place) -> Any:
                start = step * self.batch_size
                size = min(self.batch_size, len(rows) - start)
                first, last = rank_slice(size, self.evaluator.rank, self.evaluator.world_size)
                places = start_place + np.arange(start + first, start + last)
                return places, batch_of(rows[start + first : start + last], places, first, size, step)

            for places, batch in Prefetched(make, 0, -(-len(rows) // self.batch_size)):
                output = self.output(model, self.dynamic_rows.known(batch).on(device)).float().cpu().numpy()
                yield places, output, np.zeros(len(places))
            first_place += len(rows)

    def reader(self, split: str) -> Callable[[Int64s, Int64s, int, int, int], Batch]:
        """Return a function from (rows of the split, positions, sample offset, global size, step) to a batch."""
        reader = BatchReader(self.data, SplitColumns.of(self.data, split))
        return lambda rows, places, first, size, step: reader.batch(
            rows, first, size, step, int(places[0]) if len(places) else 0
        )

    def output(self, model: Any, batch: Batch) -> torch.Tensor:
        """Score a batch, [b, ...]."""
        raise NotImplementedError

    def differences(
        self, served: npt.NDArray[np.float32], candidate: npt.NDArray[np.float32]
    ) -> tuple[ModelDifference, ...]:
        """Return the differences of all rows and of the slices, from what :meth:`score` returned of both."""
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
        """Return (the metric, the difference on some rows or None without a value, those of the rows that count)."""
        raise NotImplementedError

    def popularity(self, rows: npt.NDArray[np.bool_]) -> float | None:
        """Return the metric of ranking by popularity alone on some rows."""
        return None

    def users(self) -> Int64s | None:
        """Return a number for the user of each row, a number of its own where there is none; None: there are none."""
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
        """Yield the name and the rows of the newest rows and of each slice of ``evaluation.slices``."""
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
        place = next(number for number, feature in enumerate(features) if feature.name == name)
        numbers = np.concatenate([self.data.numbers(split)[rows, place] for split, rows in self.chosen])
        values = features[place].original(numbers.astype(np.float64))
        edges = np.unique(np.quantile(values, [0.0, 0.25, 0.5, 0.75, 1.0]))
        for number, (low, high) in enumerate(itertools.pairwise(edges)):
            is_last = number == len(edges) - 2
            rows = (values >= low) & ((values <= high) if is_last else (values < high))
            yield f"{name}=[{low:.4g}, {high:.4g}{']' if is_last else ')'}", rows


class _Labelled(_Scorer):
    """Rows with labels: the scores of the first label, and a metric of them."""

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


class _Ranked(_Scorer):
    """Positives of users, each against items of other users' positives: the same draws for both models."""

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
        """Return the share of the drawn items that each row's item is scored above [n]."""
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
    """Rows of a model whose score is <user side, item side>."""

    def _used(self, chosen: list[Chosen]) -> list[Chosen]:
        """Return the positives of known users and items alone."""
        found = []
        for split, rows in chosen:
            one = [Chosen(split, rows)]
            taken = np.asarray(self.data.labels(split))[rows] == 1
            for name in ("user", "item"):
                taken &= column_of(self.data, one, name) >= NUM_SPECIAL_ROWS
            found.append(Chosen(split, rows[taken]))
        return found

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
    """Examples of a model that ranks what comes next."""

    batch_size = MAX_BATCH

    def _used(self, chosen: list[Chosen]) -> list[Chosen]:
        return [
            Chosen(split, rows[column_of(self.data, [Chosen(split, rows)], "item") >= NUM_SPECIAL_ROWS])
            for split, rows in chosen
        ]

    def reader(self, split: str) -> Callable[[Int64s, Int64s, int, int, int], Batch]:
        reader = RankingReader(self.data, split)
        return lambda rows, places, first, size, step: reader.against(
            rows, self.items[self.draws[places]], first, size, step
        )

    def output(self, model: Any, batch: Batch) -> torch.Tensor:
        share: torch.Tensor = model.evaluate(batch)[1]
        return share


def others(users: Int64s, items: Int64s, number: int) -> Int64s:
    """Return for each row [n] so many rows of other users and items, drawn with replacement: int64 [n, number].

    One of a row's own item is drawn anew, as often as REDRAWS; where most rows are of that item, some are left.

    Raises:
        NotComparableError: all rows are of one user.
    """
    order = np.argsort(users, kind="stable")
    ordered = users[order]
    starts = np.searchsorted(ordered, users, side="left")
    own = np.searchsorted(ordered, users, side="right") - starts
    if (own == len(users)).any():
        raise NotComparableError("all held-out rows are of one user")
    found = np.empty(len(users) * number, dtype=np.int64)
    missing = np.arange(len(found))
    for draw in range(1 + REDRAWS):
        row = missing // number
        drawn = below(random_words(derive_key(SPLIT_SEED, len(HELD_OUT), draw), missing), len(users) - own[row])
        found[missing] = order[drawn + np.where(drawn >= starts[row], own[row], 0)]
        missing = missing[items[found[missing]] == items[row]]
    return found.reshape(len(users), number)
