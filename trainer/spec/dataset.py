"""DatasetSpec: the location of a dataset's rows and the meaning of their columns. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator, model_validator

from trainer.spec.base import Column, Name, Positive, Spec, later
from trainer.spec.checks.dataset import dataset_problems
from trainer.spec.evaluation import Metric
from trainer.spec.losses import LABEL_LOSSES, LossSettings
from trainer.spec.messages import Messages
from trainer.spec.ngrams import NGrams
from trainer.spec.problems import FieldProblem, raise_if_invalid
from trainer.spec.row_filter import parse_filter
from trainer.spec.zones import Zone

if TYPE_CHECKING:
    LabelLoss = str
else:
    LabelLoss = Literal[LABEL_LOSSES]
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")]


class _Keyed(Spec):
    """Base of parts with a field ``on``; the key ``True``, which YAML makes of an unquoted ``on``, is read as it."""

    @model_validator(mode="before")
    @classmethod
    def _with_quoted_on(cls, document: object) -> object:
        if isinstance(document, dict) and True in document and "on" not in document:
            return {"on" if key is True else key: value for key, value in document.items()}
        return document


class Join(_Keyed):
    """A column looked up in a second file: ``column`` of the row whose ``on`` equals this row's ``on``.

    ``take``: which elements of a list-valued column are taken: the last, the first, or all of them (an id_list).
    ``timestamp`` names a column of the second file: the time at which its row was known (see :class:`Feature`).
    """

    uri: str = Field(min_length=1)
    on: Column
    column: Column
    take: Literal["last", "first", "all"] = "last"
    timestamp: Column | None = later(None)


class PreviousItems(Spec):
    """History of a row: the last ``length`` values of ``previous`` in earlier rows with the same value of ``by``.

    ``order`` names the column that tells which rows are earlier. Rows with fewer than ``min_length`` previous values
    are left out of every split (SASRec's convention is 1).
    """

    previous: Column
    by: Column
    order: Column
    length: int = Field(ge=1, le=1000)
    min_length: int = Field(default=0, ge=0, le=1000)

    @model_validator(mode="after")
    def _can_be_long_enough(self) -> PreviousItems:
        if self.min_length > self.length:
            raise ValueError(
                f"min_length {self.min_length} leaves every row out, since a history has at most {self.length} values: "
                "raise length, or lower min_length"
            )
        return self


class Feature(Spec):
    """One model input. ``id``: one categorical value per row; ``id_list``: a list per row, pooled; ``dense``: a number.

    ``calendar`` turns a column of times into ids: the ``hour``, 0 to 23, or the ``weekday``, 0 (Monday) to 6, in UTC.

    ``text``: a string per row, read as the id_list of its hashed ``ngrams`` (trainer.data.columns.ngrams). ``vector``:
    a list of ``dim`` numbers per row, which are not trained. With ``mode: projected`` the model reads a learned
    projection of it, like an id's embedding; with ``as_given`` each number is an input of its own
    (trainer.data.columns.vectors).

    Without ``join`` or ``derive`` the feature reads ``column`` (default: the feature's own name). ``shares`` names the
    feature whose embedding table this one uses. ``weights`` of an id_list names a column of lists with one weight, at
    least 0, for each id. Pooling multiplies an id's embedding by its weight; ``mean`` divides by the sum of weights.

    ``timestamp`` names the column with the time at which the value was known. If rows are split by ``time`` or
    ``per_user_last``, a value that was known only after its row is refused (trainer.data.columns.point_in_time).

    ``transform`` of a dense feature (trainer.data.columns.numeric) takes its statistics from the training rows.
    ``missing`` sets the replacement of null and NaN. Ids become ``unknown`` (the default), dense features the ``mean``
    (the default) or a number, vectors zeros; with ``error`` the row is bad (``max_bad_rows``). ``transform: normalize``
    scales vectors to length 1.
    """

    type: Literal["id", "id_list", "dense", "text", "vector"] = "id"
    column: Column | None = None
    join: Join | None = None
    derive: PreviousItems | None = None
    shares: str | None = None
    pooling: Literal["sum", "mean"] = "mean"
    weights: Column | None = later(None)
    timestamp: Column | None = later(None)
    transform: Literal["none", "log1p", "standardize", "quantile", "normalize"] = later("none")
    missing: Literal["unknown", "mean", "error"] | Annotated[float, Field(allow_inf_nan=False)] | None = later(None)
    ngrams: NGrams | None = later(None)
    dim: int | None = later(None, ge=1, le=65536)
    mode: Literal["projected", "as_given"] = later("projected")
    calendar: Literal["hour", "weekday"] | None = later(None)

    @property
    def has_ids(self) -> bool:
        """True if the feature has ids, with rows in an embedding table."""
        return self.type not in ("dense", "vector")

    @property
    def gives_numbers(self) -> bool:
        """True if the model reads each of its numbers as a numeric input."""
        return self.type == "dense" or (self.type == "vector" and self.mode == "as_given")

    @property
    def is_list(self) -> bool:
        """True if an example has a list of ids, whose embedding rows are pooled."""
        return self.type in ("id_list", "text")

    @property
    def effective_ngrams(self) -> NGrams | None:
        """The n-grams of a text; None for other types."""
        return (self.ngrams or NGrams()) if self.type == "text" else None

    @property
    def made_of(self) -> dict[str, object]:
        """Settings by which the column's values become ids, name -> value; a setting that is not used is None."""
        return {"ngrams": self.effective_ngrams, "calendar": self.calendar}

    @model_validator(mode="after")
    def _of_its_type(self) -> Feature:
        if self.ngrams is not None and self.type != "text":
            raise ValueError("ngrams is for texts: leave it out, or set type: text")
        if self.calendar is not None and (self.type != "id" or (self.join is not None and self.join.take == "all")):
            raise ValueError("calendar makes one id of a time: leave it out, or set type: id")
        if self.type != "vector" and (self.dim is not None or self.mode != "projected"):
            raise ValueError("dim and mode are for vectors: leave them out, or set type: vector")
        if not self.has_ids:
            self._of_numbers()
            return self
        if self.transform != "none":
            raise ValueError("transform is for dense features: leave it out, or set type: dense")
        if self.missing not in (None, "unknown", "error"):
            raise ValueError(f"missing: {self.missing} is for dense features: use unknown or error")
        if self.missing == "error" and (self.type != "id" or self.join is not None):
            raise ValueError("missing: error is for single ids and numbers in columns of the rows: leave it out")
        if self.weights is not None and (self.type != "id_list" or self.join is not None or self.derive is not None):
            raise ValueError("weights are for an id_list that reads a column of the rows")
        return self

    def _of_numbers(self) -> None:
        """Raise ValueError for settings that a feature of type dense or vector does not have."""
        for name in ("join", "derive", "shares", "weights"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is for ids: a {self.type} feature reads a column of the rows")
        if self.type == "vector":
            if self.dim is None:
                raise ValueError("a vector needs dim, the length of its lists: `evenkeel datasets infer` reads it")
            if self.transform not in ("none", "normalize"):
                raise ValueError(f"transform: {self.transform} is for single numbers: use none or normalize")
            if self.missing not in (None, "error"):
                raise ValueError(f"missing: {self.missing} is for single numbers: leave it out for zeros, or use error")
            return
        if self.transform == "normalize":
            raise ValueError("transform: normalize is for vectors: use log1p, standardize or quantile")
        if self.missing == "unknown":
            raise ValueError("missing: unknown is for ids: use mean, error or a number")

    @model_validator(mode="after")
    def _one_source(self) -> Feature:
        if sum(source is not None for source in (self.column, self.join, self.derive)) > 1:
            raise ValueError("give at most one of column, join and derive")
        if self.timestamp is not None and (self.join is not None or self.derive is not None):
            raise ValueError(
                "timestamp is for columns of the rows: a join has its own, and a history is always earlier"
            )
        if self.derive is not None and self.type != "id_list":
            raise ValueError("a derived history is a list: set type: id_list")
        if self.join is not None and self.join.take == "all" and not self.is_list:
            raise ValueError("join with take: all gives a list: set type: id_list")
        return self


class ItemTable(_Keyed):
    """Table of item features: a file with one row per item, including items that no row of the dataset has.

    ``on`` names the column of item ids, as in :class:`Join`. ``features`` read columns of the file. Each feature is of
    type ``id``, ``id_list``, ``text``, ``dense`` or ``vector``.
    """

    uri: str = Field(min_length=1)
    on: Column = "item"
    features: dict[Identifier, Feature] = Field(min_length=1)

    @property
    def id_columns(self) -> frozenset[str]:
        """Columns of the file that ids are read from."""
        features = self.features.items()
        of_features = (one.column or name for name, one in features if one.has_ids and one.calendar is None)
        return frozenset([self.on, *of_features])

    def join(self, name: str) -> Join:
        """Return the :class:`Join` on the item's id that reads the feature ``name``, which must have ids."""
        feature = self.features[name]
        take: Literal["last", "all"] = "all" if feature.is_list else "last"
        return Join(uri=self.uri, on=self.on, column=feature.column or name, take=take)


class Negatives(Spec):
    """Label by drawn negatives: each row is a positive, for which ``per_positive`` other ids are drawn once.

    ``of`` names the feature whose ids are drawn, such as the item. For a training row, items that its user had in
    training are excluded; if rows are split by time, only those up to the time of the row. For a held-out row, items
    that its user had in any split are excluded; the drawn items occur in training if and only if the row's own item
    does.

    ``distribution``: ``uniform``, or ``popularity``: in proportion to the item's number of training rows to the
    ``power``. ``in_batch`` is a setting of models: use ``model.negative_distribution``, or ``loss: sampled_softmax`` of
    two_tower.

    ``item_features`` names the features of the rows that describe the item, such as a brand. A negative takes these
    features from rows of the drawn item, and all other features from its positive's row. Default: the features that
    have one value per item in all rows.
    """

    per_positive: int = Field(default=1, ge=1, le=100)
    of: str
    distribution: Literal["uniform", "popularity", "in_batch"] = "uniform"
    power: float = later(0.75, ge=0.0, le=4.0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**32)
    item_features: tuple[Identifier, ...] | None = later(None)


class Label(Spec):
    """Source of the target: exactly one of the fields is set.

    ``column``: a column of 0 and 1; ``rule``: a condition such as ``rating >= 4``; ``negatives``: drawn negatives;
    ``value``: a column of numbers, for a loss in trainer.spec.losses.VALUE_LOSSES;
    ``positive: every_row``: every row is a positive, for models that draw negatives themselves.
    """

    column: Column | None = None
    rule: str | None = None
    negatives: Negatives | None = None
    value: Column | None = later(None)
    positive: Literal["every_row"] | None = later(None)

    @field_validator("rule")
    @classmethod
    def _parsable(cls, rule: str | None) -> str | None:
        if rule is not None:
            parse_rule(rule)
        return rule

    @model_validator(mode="after")
    def _exactly_one(self) -> Label:
        sources = (self.column, self.rule, self.negatives, self.value, self.positive)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("give exactly one of column, rule, negatives, value and positive")
        return self

    @property
    def source_column(self) -> str | None:
        """The column that the label is read from; None if negatives are drawn, or every row is a positive."""
        return parse_rule(self.rule)[0] if self.rule is not None else self.column or self.value


class OneOfSeveral(Label, LossSettings):
    """One of a dataset's ``labels``: its source, with the fields of a :class:`Label`, its loss and its metrics.

    A row lacks the label if the source column is null, or the column ``mask`` is 0. ``loss``: by default ``bce``, or
    ``mse`` if the source is ``value``. ``weight``: factor of its loss in the sum over labels. ``metrics``: by default
    the metrics in ``evaluation.metrics`` that suit its loss.
    """

    loss: LabelLoss | None = None
    weight: Positive = 1.0
    mask: Column | None = None
    metrics: tuple[Metric, ...] | None = Field(default=None, min_length=1)

    @property
    def effective_loss(self) -> str:
        """The loss that the dataset names, else the default for the label's kind."""
        return self.loss or ("bce" if self.value is None else "mse")


class Graph(Spec):
    """Graph over the ids of feature ``of``, for SSE-Graph and the Laplacian regularizer.

    Each row of the file ``uri`` is an edge between the ids in its columns ``source`` and ``target``.
    """

    uri: str = Field(min_length=1)
    source: Column
    target: Column
    of: str


class Partition(Spec):
    """The column with the day of a row, and the time zone, such as ``Europe/Berlin``, in which days begin.

    A time without a zone is in UTC. A plain date is that day in every zone.
    """

    column: Column
    timezone: Zone


def _form_of_partition(given: object) -> str:
    return "zoned" if isinstance(given, dict | Partition) else "plain"


# With the discriminator, an error names only the form that was written, not both.
ColumnOfDays = Annotated[
    Annotated[Column, Tag("plain")] | Annotated[Partition, Tag("zoned")], Discriminator(_form_of_partition)
]


class DatasetSpec(Spec):
    """A registered dataset: the location of its rows and the meaning of their columns.

    ``uri`` is a file or a directory in a format of trainer.data.sources.readers; a relative path is resolved against
    the working directory of the process that reads it. Or it is a topic, whose ``messages`` hold the rows. A ``join``
    or ``graph`` uri without a directory is looked up in the directory of ``uri``.

    ``partition`` names the column of days by which a job's window selects rows; default: ``timestamp``. Days are in
    UTC, unless a time zone is given together with the column.

    Each row has one ``label``, or several named ``labels`` for models with several labels. ``weight`` names
    a column of numbers that are at least 0: in training a row of weight 2 counts as two rows.

    ``filter`` is a condition on columns of the rows (trainer.spec.row_filter): rows that do not pass are ignored.

    ``items`` is a file with features of each item, for models that read it; it may have items that no row has.

    ``max_bad_rows`` is the share of rows that may be bad (trainer.data.prepare.bad_rows): they are left out, counted,
    and written to the run directory; with more of them the job fails. Without it, the job fails at the first bad row.

    ``max_unmatched`` is the share of rows whose key may be missing in a joined file or the item table, and of a graph's
    edges that may name ids without a row. A larger share gives a warning. A job with (nearly) no matches is refused,
    unless ``max_unmatched`` is 1.
    """

    name: Name
    uri: str = Field(min_length=1)
    messages: Messages | None = later(None)
    features: dict[Identifier, Feature] = Field(min_length=1)
    items: ItemTable | None = later(None)
    label: Label | None = later(None)
    labels: dict[Identifier, OneOfSeveral] = later({}, max_length=64)
    weight: Column | None = later(None)
    order: Column | None = None
    timestamp: Column | None = None
    partition: ColumnOfDays | None = None
    filter: str | None = later(None, min_length=1, max_length=4096)
    graphs: dict[Name, Graph] = {}
    max_bad_rows: float | None = later(None, ge=0.0, le=1.0)
    max_unmatched: float = later(0.5, ge=0.0, le=1.0)

    @field_validator("filter")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        if text is not None:
            parse_filter(text)
        return text

    @model_validator(mode="after")
    def _consistent(self) -> DatasetSpec:
        raise_if_invalid([*dataset_problems(self), *self._calendar_problems()])
        return self

    def _calendar_problems(self) -> Iterator[FieldProblem]:
        """Yield a problem for each field that must name a column of ids, but names a calendar feature."""
        made = {name for name, feature in self.features.items() if feature.calendar is not None}
        named = {f"features.{name}.calendar": name for name in made & {"user", "item"}}
        for name, feature in self.features.items():
            if feature.derive is not None:
                named |= {
                    f"features.{name}.derive.{part}": getattr(feature.derive, part) for part in ("previous", "by")
                }
            if feature.join is not None:
                named[f"features.{name}.join.on"] = feature.join.on
        named |= {f"graphs.{name}.of": graph.of for name, graph in self.graphs.items()}
        if self.negatives is not None:
            named["label.negatives.of"] = self.negatives.of
        for field, name in named.items():
            if name in made:
                yield FieldProblem(
                    field, f"'{name}' is a feature of the calendar", "name a column, or a feature of other ids"
                )

    @property
    def ordering(self) -> str | None:
        """The column that orders rows in time, if any."""
        return self.order or self.timestamp

    @property
    def partition_column(self) -> str | None:
        """The column of days: the partition column, else the column of times, if any."""
        if self.partition is None:
            return self.timestamp
        return self.partition.column if isinstance(self.partition, Partition) else self.partition

    @property
    def partition_zone(self) -> str:
        """The time zone in which days begin."""
        return self.partition.timezone if isinstance(self.partition, Partition) else "UTC"

    @property
    def joined_features(self) -> dict[str, Feature]:
        """The dataset's features, followed by the item table's features that have ids, each as a join on the item."""
        if self.items is None:
            return self.features
        of_items = {
            name: feature.model_copy(update={"column": None, "join": self.items.join(name)})
            for name, feature in self.items.features.items()
            if feature.has_ids
        }
        return {**self.features, **of_items}

    @property
    def num_item_numbers(self) -> int:
        """Number of numeric features (``dense``) of the item table."""
        return 0 if self.items is None else sum(one.type == "dense" for one in self.items.features.values())

    def column_of(self, name: str) -> str:
        """Return the column that ``name`` stands for: that which the feature ``name`` reads, else ``name`` itself."""
        feature = self.features.get(name)
        reads = feature is not None and feature.join is None and feature.derive is None
        return (feature.column or name) if feature is not None and reads else name

    @property
    def id_columns(self) -> frozenset[str]:
        """Columns of the rows that ids are read from, including keys of joins and of histories."""
        columns = {"item"} if self.items is not None else set()
        for name, feature in self.features.items():
            if feature.join is not None:
                columns.add(feature.join.on)
            elif feature.derive is not None:
                columns |= {feature.derive.by, feature.derive.previous, name}
            elif feature.has_ids and feature.calendar is None:
                columns.add(name)
        return frozenset(map(self.column_of, columns))

    @property
    def has_positives_alone(self) -> bool:
        """True if every row is a positive, including held-out rows."""
        return self.label is not None and self.label.positive is not None

    @property
    def negatives(self) -> Negatives | None:
        """The drawn negatives of its label, if any."""
        return None if self.label is None else self.label.negatives

    @property
    def label_columns(self) -> dict[str, str]:
        """Columns of the labels, their masks and the rows' weights, by field of the spec, such as ``label.column``."""
        columns: dict[str, str | None] = {}
        if self.label is not None:
            columns[f"label.{_source_field(self.label)}"] = self.label.source_column
        for name, label in self.labels.items():
            columns |= {f"labels.{name}.{_source_field(label)}": label.source_column, f"labels.{name}.mask": label.mask}
        columns["weight"] = self.weight
        return {field: column for field, column in columns.items() if column is not None}


_RULE = re.compile(r"^\s*([A-Za-z_][\w.-]*)\s*(>=|<=|==|!=|>|<)\s*(-?\d+(?:\.\d+)?)\s*$")


def parse_rule(rule: str) -> tuple[str, str, float]:
    """Parse a rule: ``"rating >= 4"`` -> ("rating", ">=", 4.0).

    The grammar is column, comparison, number: nothing is evaluated.
    """
    match = _RULE.match(rule)
    if match is None:
        raise ValueError(f"rule '{rule}' is not COLUMN COMPARISON NUMBER, such as 'rating >= 4'")
    return match[1], match[2], float(match[3])


def _source_field(label: Label) -> str:
    return next(
        name for name in ("column", "rule", "negatives", "value", "positive") if getattr(label, name) is not None
    )
