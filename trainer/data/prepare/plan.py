"""Plan of the columns to read for a dataset and a job, with the table and encoding of each. Torch-free."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa

from trainer.data.columns import values
from trainer.data.columns.base import Column
from trainer.data.columns.ids import IdColumn, id_column
from trainer.data.columns.labels import RowLabels, RowWeights
from trainer.data.columns.numeric import Numeric
from trainer.data.columns.numeric import planned as planned_numeric
from trainer.data.columns.orders import Order, RowOrder, order_name, order_of
from trainer.data.columns.values import Kind
from trainer.data.columns.vectors import Vector, require_lists, vectors_of
from trainer.data.columns.weights import ListWeights, weights_name
from trainer.data.errors import DataError
from trainer.data.prepare.graphs import EdgeFile, edge_files
from trainer.data.prepare.split import Sides
from trainer.data.sources.followed_folder import first_file
from trainer.data.sources.item_table import ITEM_TABLE, ItemFile, item_file
from trainer.data.sources.join import Joined, JoinTable, join_name
from trainer.data.sources.locations import located
from trainer.data.sources.readers.registry import READERS
from trainer.data.sources.source import Source, Window, beside, file_below
from trainer.data.sources.topics.topic_source import TopicSource
from trainer.spec import FIRING_DATE, DatasetSpec, JobSpec, Join, PreviousItems
from trainer.spec.checks.evaluation import ranks_catalogue
from trainer.spec.label_tasks import LabelTask, label_tasks, least_labels, needs_users

NEGATIVE_SUFFIX = "__negative"


@dataclass(frozen=True)
class FeaturePlan:
    """One feature of ids: its table, and its source, which is exactly one of ``use``, ``join`` and ``derive``.

    Attributes:
        table: name of the table with the feature's ids, its own or a shared one.
        is_list: True if an example has a list of ids.
        use: column of the rows with the ids.
        join: joined file with the ids, looked up by the column ``join_on`` of the rows.
        derive: settings of a history: the ids that earlier rows with the same ``by`` have in ``previous``.
    """

    name: str
    table: str
    is_list: bool
    pooling: str
    use: IdColumn | None = None
    join: Join | None = None
    join_on: str = ""
    derive: PreviousItems | None = None
    previous: IdColumn | None = None
    by: IdColumn | None = None


@dataclass(frozen=True)
class DataPlan:
    dataset: DatasetSpec
    job: JobSpec
    source: Source
    features: tuple[FeaturePlan, ...]
    joins: dict[str, JoinTable]  # by feature, and the item table's own
    kinds: dict[str, Kind]  # by domain
    uses: tuple[IdColumn, ...]
    order_columns: tuple[str, ...]
    graphs: dict[str, EdgeFile]  # those that the job uses
    orders: Mapping[str, Order]  # by order_columns and feature_times
    numeric: tuple[Numeric, ...] = ()  # without statistics yet
    item_numeric: tuple[Numeric, ...] = ()  # those of the item table
    items: ItemFile | None = None
    vectors: tuple[Vector, ...] = ()  # of the rows, then of the item table
    text_tables: tuple[str, ...] = ()  # of text, though their own column has integers
    notes: tuple[str, ...] = ()  # messages for the user about ids that are read as text

    def with_text(self, tables: Collection[str]) -> DataPlan:
        """Return the plan with text as the ids of these tables; integers in the files become text.

        Tables without integer ids, or with computed ids (such as n-grams), stay as they are.
        """
        features = self.dataset.joined_features.items()
        made = {one.shares or name for name, one in features if id_column(one, "", "").makes_ids}
        changed = sorted(table for table in {*tables} - made if self.kinds.get(table) == "int")
        notes = (f"ids of {table}: integers are read as text, like those of the job in init_from" for table in changed)
        return replace(
            self, kinds=self.kinds | dict.fromkeys(changed, "string"), text_tables=(*self.text_tables, *changed),
            notes=(*self.notes, *notes),
        )  # fmt: skip

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of all files that are read: first the rows, then joined files, then edges of graphs."""
        joined = (join.source for join in self.joins.values())
        return (self.source, *joined, *(file.source for file in self.graphs.values()))

    @property
    def needs_all_rows(self) -> str | None:
        """Name of the first setting that makes an example depend on other rows; None if there is no such setting.

        Without such a setting, spans of rows can be prepared independently.
        """
        needs = {
            "histories": any(feature.derive is not None for feature in self.features),
            "drawn negatives": self.dataset.negatives is not None,
            "sequences": self.is_sequence,
            "what users had in training": self.keeps_seen,
            "evaluation.split.kind: per_user_last": self.job.evaluation.split.kind == "per_user_last",
            f"the types of {self.source.reader.name}": not self.source.reader.has_types,
        }
        return next((what for what, is_needed in needs.items() if is_needed), None)

    @property
    def is_bpr(self) -> bool:
        return self.job.model.draws_partner

    @property
    def is_sequence(self) -> bool:
        """True if the model is trained on each user's sequence of items, and reads no other features."""
        return self.job.model.reads_sequences

    @property
    def positives_only(self) -> bool:
        """True if the model is trained only on positive rows."""
        return self.is_bpr or self.is_sequence

    @property
    def keeps_users(self) -> bool:
        """True if evaluation needs the user of each held-out example, even if that user has no training row."""
        return needs_users(self.job, self.tasks)

    @property
    def keeps_seen(self) -> bool:
        """True if each user's items in training are kept, to exclude them from negatives, rankings, recommendations."""
        return self.is_bpr or ranks_catalogue(self.job) or (self.publishes_users and not self.is_sequence)

    @property
    def publishes_users(self) -> bool:
        """True if users are published with the items, so that a sequence model's job keeps their ids too."""
        return self.job.publish is not None and self.job.publish.users is not None

    @property
    def trained(self) -> tuple[FeaturePlan, ...]:
        """The features that the model reads."""
        return tuple(f for f in self.features if f.name == "item" or not self.is_sequence)

    @property
    def trained_tables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(feature.table for feature in self.trained))

    @property
    def raw_table(self) -> str | None:
        """Name of the table whose id strings a one-pass job keeps, to publish vectors; None if there is none."""
        publish, job = self.job.publish, self.job
        feature = None if publish is None or not job.dataset.one_pass else self.feature(publish.feature)
        return None if feature is None or self.kinds[feature.table] == "int" else feature.table

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of labels, their masks and the rows' weights."""
        return tuple(dict.fromkeys(self.dataset.label_columns.values()))

    @property
    def tasks(self) -> tuple[LabelTask, ...]:
        """The dataset's labels, if it has several; empty for one label."""
        return label_tasks(self.dataset)

    @property
    def least_labels(self) -> dict[str, float]:
        """Smallest valid value by label name, for the labels whose loss has such a limit."""
        return least_labels(self.job, self.dataset)

    @property
    def all_numeric(self) -> tuple[Numeric, ...]:
        """Numeric features of the rows, then those of the item table: the order of a batch's numbers."""
        return self.numeric + self.item_numeric

    @property
    def row_vectors(self) -> tuple[Vector, ...]:
        """Vectors in columns of the rows, not of the item table."""
        return tuple(one for one in self.vectors if not one.of_item)

    @cached_property
    def labels(self) -> RowLabels | None:
        """The column of the rows' labels; None if the dataset draws negatives, because all its rows are positive."""
        return None if self.dataset.negatives is not None else RowLabels(self.dataset, self.least_labels)

    @cached_property
    def row_weights(self) -> RowWeights | None:
        return None if self.dataset.weight is None else RowWeights(self.dataset.weight)

    @cached_property
    def sides(self) -> Sides | None:
        """The column that assigns rows to splits, if the dataset has one."""
        column = self.job.evaluation.split.column
        return None if column is None else Sides(column)

    @cached_property
    def values(self) -> tuple[Column, ...]:
        """All columns of the rows that have values, not ids, in the order in which they are read."""
        found: list[Column | None] = [*self.numeric, *self.row_vectors]
        found += [ListWeights(weights_name(use), use) for use in self.uses if use.weights is not None]
        found += [Joined(join_name(name), join, self.join_on(name)) for name, join in self.joins.items()]
        found += [self.labels, self.row_weights, self.sides]
        found += [RowOrder(order_name(column), column, self.orders[column]) for column in self.order_columns]
        return tuple(one for one in found if one is not None)

    def value_file(self, name: str) -> str:
        """Return the name of the file with the values of ``name``, a column that :attr:`values` lists."""
        return f"value-{[one.name for one in self.values].index(name)}"

    @property
    def required(self) -> tuple[str, ...]:
        """Names of id columns in which a missing id makes a row bad (``missing: error``)."""
        features = self.dataset.features.items()
        columns = (spec.column or name for name, spec in features if spec.type == "id" and spec.missing == "error")
        return tuple(dict.fromkeys(columns))

    @property
    def splits_by_time(self) -> bool:
        return self.job.evaluation.split.kind in ("time", "per_user_last")

    @property
    def feature_times(self) -> dict[str, str]:
        """Feature -> column with the time at which its value became known; empty if splits ignore time."""
        features = self.dataset.features.items() if self.splits_by_time else ()
        return {name: feature.timestamp for name, feature in features if feature.timestamp is not None}

    @property
    def join_times(self) -> dict[str, str]:
        """Joined feature -> its file's column of times at which values became known; empty if splits ignore time."""
        joins = {one.name: one.join.timestamp for one in self.features if one.join is not None}
        return {name: column for name, column in joins.items() if column is not None and self.splits_by_time}

    @property
    def bad_window(self) -> Window | None:
        """The window of days, if a row without a valid day counts as a bad row; else None."""
        window = self.source.window
        return window if window is not None and window.keeps_undated else None

    def join_on(self, join: str) -> str:
        """Return the column of the rows whose values are the keys of the join ``join``, a key of :attr:`joins`."""
        feature = self.feature(join)
        return self.dataset.column_of("item") if feature is None else feature.join_on

    def columns(self) -> list[str]:
        """Return the names of all columns of the rows that are read."""
        columns = [use.column for use in self.uses]
        columns += [feature.join_on for feature in self.features if feature.join is not None]
        columns += self.order_columns
        columns += [use.weights for use in self.uses if use.weights is not None]
        columns += [feature.column for feature in self.numeric]
        columns += [vector.column for vector in self.row_vectors]
        columns += self.feature_times.values()
        columns += [] if self.bad_window is None else [self.bad_window.column]
        return list(dict.fromkeys([*columns, *self.label_columns, *filter(None, (self.job.evaluation.split.column,))]))

    def table_of(self, join: str) -> str:
        """Return the table of the ids in the joined file of ``join``, a key of :attr:`joins`."""
        name = "item" if join == ITEM_TABLE else join
        return next(feature.table for feature in self.features if feature.name == name)

    @property
    def ids_as_written(self) -> list[str]:
        """Columns and tables whose number-like ids are read as text, as entries for the fingerprint.

        In these columns and tables, 7 and 007 are different ids.
        """
        sources = enumerate(self.sources)
        found = [f"{number} {name}" for number, one in sources for name in sorted(one.reader.number_like)]
        found += [f"table {table}" for table in sorted(self.text_tables)]
        for use in self.uses:
            is_text = values.is_text(values.element_type(self.source.column_type(use.column)))
            if is_text and not use.makes_ids and self.kinds[use.domain] == "int":
                found.append(f"column {use.column}")
        for name, join in self.joins.items():
            is_text = values.is_text(self.source.column_type(self.join_on(name)))
            if join.kind == "string" and self.kinds[self.table_of(name)] == "int":
                found.append(f"values of {name}")
            if is_text and not join.has_text_keys:
                found.append(f"keys of {name}")
        for name, edges in self.graphs.items():
            are_text = any(values.is_text(edges.source.column_type(column)) for column in edges.columns)
            found += [f"graph {name}"] if are_text and self.kinds[edges.table] == "int" else []
        return found

    def feature(self, name: str) -> FeaturePlan | None:
        return next((feature for feature in self.features if feature.name == name), None)

    def direct(self, name: str) -> IdColumn | None:
        """Return the column of an id feature that reads single ids; None for lists, joins, histories, unknown names."""
        feature = self.feature(name)
        return None if feature is None or feature.is_list else feature.use

    def single(self, name: str) -> IdColumn:
        """Return :meth:`direct` of a feature that was checked to read single ids."""
        use = self.direct(name)
        assert use is not None
        return use


def window_of(dataset: DatasetSpec, job: JobSpec) -> Window | None:
    """Return the window of days whose rows a job reads; None if the job has no window.

    Raises:
        DataError: the window's start is a template that a schedule must fill in, or no column has days or times.
    """
    window = job.dataset.window
    if window is None:
        return None
    if window.start == FIRING_DATE:
        raise DataError(
            f"window.start is {FIRING_DATE}, which a schedule fills in",
            where=f"job '{job.name}', dataset.window",
            remedy="submit it through a schedule, or give a date (YYYY-MM-DD)",
        )
    if dataset.partition_column is None:
        what = "has neither partition nor timestamp"
        raise DataError(what, where=f"dataset '{dataset.name}'", remedy="set one, or leave window out")
    last = datetime.date.fromisoformat(window.start)
    first, keeps_undated = last - datetime.timedelta(days=window.days - 1), dataset.max_bad_rows is not None
    return Window(dataset.partition_column, first, last, dataset.partition_zone, keeps_undated)


def make_plan(dataset: DatasetSpec, job: JobSpec, source: Source | None = None) -> DataPlan:
    """Check the dataset's spec against its files' columns, and return the plan.

    ``source``: source of the rows; None: the dataset's files, or the first file of a followed folder.

    Raises:
        DataError: the files do not fit the spec.
        ValueError: the job does not fit the dataset.
    """
    job.against(dataset)
    source = source or _source_of(dataset, job)
    if job.dataset.one_pass and not source.reader.has_types:
        typed = " or ".join(reader.name for reader in READERS if reader.has_types)
        raise DataError(
            f"is {source.reader.name}, whose column types are known only once all rows are read",
            where=dataset.uri,
            remedy=f"write {typed}, or leave dataset.one_pass of the job out",
        )
    features: list[FeaturePlan] = []
    uses: list[IdColumn] = []
    for name, spec in dataset.joined_features.items():
        if not spec.has_ids:
            continue
        table = spec.shares or name
        planned = FeaturePlan(name, table, spec.is_list, spec.pooling)
        if spec.join is not None:
            planned = replace(planned, join=spec.join, join_on=dataset.column_of(spec.join.on))
        elif spec.derive is not None:
            previous = IdColumn(dataset.column_of(spec.derive.previous), table)
            column = dataset.column_of(spec.derive.by)
            by = IdColumn(column, f"by:{column}")
            for other, feature in dataset.features.items():
                reads = feature.type == "id" and feature.join is None and feature.derive is None
                if reads and dataset.column_of(other) == column and not id_column(feature, column, "").makes_ids:
                    by = IdColumn(column, feature.shares or other)
            planned = replace(planned, derive=spec.derive, previous=previous, by=by)
            uses += [previous, by]
        else:
            uses.append(id_column(spec, dataset.column_of(name), table))
            planned = replace(planned, use=uses[-1])
        features.append(planned)
    orders = [feature.derive.order for feature in features if feature.derive is not None]
    numeric = tuple(planned_numeric(dataset.features)) if job.model.reads_numbers else ()
    item_numeric = () if dataset.items is None else tuple(planned_numeric(dataset.items.features))
    vectors = vectors_of(dataset) if job.model.reads_vectors else ()
    by_order = job.evaluation.split.kind in ("time", "per_user_last") or job.model.reads_sequences
    if by_order and dataset.ordering is not None:
        orders.append(dataset.ordering)
    plan = DataPlan(
        dataset, job, source, tuple(features), {}, {}, tuple(dict.fromkeys(uses)), tuple(dict.fromkeys(orders)), {},
        {}, numeric, item_numeric, vectors=vectors,
    )  # fmt: skip
    _check_roles(plan)
    source.require(plan.columns())
    for vector in plan.row_vectors:
        require_lists(source.column_type(vector.column), vector, f"{source.uri}, column '{vector.column}'")
    specs = dataset.joined_features
    joins = {
        f.name: JoinTable(f.join, beside(f.join.uri, dataset.uri), id_column(specs[f.name], f.join.column, f.table))
        for f in features
        if f.join is not None
    }
    items = item_file(dataset, item_numeric, [one for one in vectors if one.of_item])
    if items is not None:
        joins[ITEM_TABLE] = items.lookup
    kinds = _kinds(plan, joins)
    of_text = _domains_of_text(plan, joins, kinds)
    kinds.update(dict.fromkeys(of_text, "string"))
    if items is not None:
        # Ids of a type that cannot be converted to the rows' type would match no row.
        values.as_ids(items.ids, kinds[dataset.features["item"].shares or "item"], f"{items.source.uri}, its ids")
    graphs = edge_files(dataset, job)
    timed = dict.fromkeys([*plan.order_columns, *plan.feature_times.values()])
    kinds_of_orders = {column: order_of(source, column) for column in timed}
    plan = replace(
        plan, joins=joins, kinds=kinds, orders=kinds_of_orders, graphs=graphs, items=items, text_tables=tuple(of_text)
    )
    notes = [f"{one.uri}, {note}" for one in plan.sources for note in one.reader.notes]
    notes += [
        f"ids of {domain} are text, since one of its columns has values that are no integers" for domain in of_text
    ]
    return replace(plan, notes=tuple(dict.fromkeys(notes)))


def _source_of(dataset: DatasetSpec, job: JobSpec) -> Source:
    follow = job.dataset.follow
    if dataset.messages is not None:
        return TopicSource(dataset)
    if follow is None:
        return Source(dataset.uri, window_of(dataset, job), dataset.filter, ids=dataset.id_columns)
    first = first_file(dataset.uri, follow)
    if first is None:
        remedy = "put a first file there: its columns declare the types of the ids"
        raise DataError("holds no file yet that can be opened", where=dataset.uri, remedy=remedy)
    only = [file_below(first, located(dataset.uri, first))]
    return Source(dataset.uri, None, dataset.filter, only=only, ids=dataset.id_columns)


def _check_roles(plan: DataPlan) -> None:
    """Check that the features user and item read a column of single ids, if a setting of dataset or job needs that."""
    needs: list[tuple[str, tuple[str, ...]]] = []
    if plan.dataset.negatives is not None:
        needs.append(("label.negatives", (plan.dataset.negatives.of, "user")))
    if plan.job.evaluation.split.kind == "per_user_last":
        needs.append(("evaluation.split.kind: per_user_last", ("user",)))
    if plan.dataset.items is not None:
        needs.append(("items", ("item",)))
    if plan.is_bpr:
        needs.append(("model.kind: bpr", ("user", "item")))
    if plan.is_sequence:
        needs.append((f"model.kind: {plan.job.model.kind}", ("user", "item")))
    for field, roles in needs:
        for role in roles:
            if plan.direct(role) is None:
                raise DataError(
                    f"{field} needs '{role}' as a feature of type id that reads a column",
                    where=f"dataset '{plan.dataset.name}', features.{role}",
                    remedy=f"make '{role}' such a feature, without join or derive, or change {field.partition(':')[0]}",
                )


def _kinds(plan: DataPlan, joins: dict[str, JoinTable]) -> dict[str, Kind]:
    """Return the kind of ids, integers or strings, of each domain (a set of ids that columns share)."""
    # The domain's first column decides; the ids of its other columns are converted.
    kinds: dict[str, Kind] = {}
    owners_first = sorted(plan.features, key=lambda feature: feature.table != feature.name)
    for feature in owners_first:
        if feature.table in kinds:
            continue
        if feature.join is not None:
            kinds[feature.table] = joins[feature.name].kind
        else:
            use = feature.use or feature.previous
            assert use is not None
            kinds[feature.table] = _column_kind(plan.source, use)
    for use in plan.uses:
        kinds.setdefault(use.domain, _column_kind(plan.source, use))
    return kinds


def _domains_of_text(plan: DataPlan, joins: dict[str, JoinTable], kinds: dict[str, Kind]) -> list[str]:
    """Return the domains whose kind is integers although one of their columns has text that is no integer."""
    of_rows = () if plan.source.reader.has_types else (use for use in plan.uses if not use.is_list)
    found = [use.domain for use in of_rows if _column_kind(plan.source, use) == "string"]
    found += [plan.table_of(name) for name, join in joins.items() if join.has_text]
    return [domain for domain in dict.fromkeys(found) if kinds[domain] == "int"]


def _column_kind(source: Source, use: IdColumn) -> Kind:
    where = f"{source.uri}, column '{use.column}'"
    type_: pa.DataType = source.column_type(use.column)
    if values.is_list(type_) and not use.is_list:
        raise DataError("holds lists", where=where, remedy="set type: id_list")
    return use.kind(type_, where)
