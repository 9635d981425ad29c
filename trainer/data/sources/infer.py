"""Proposal of a dataset manifest from a file, and figures of a described dataset. Torch-free.

The proposal is a starting point for its reader to correct.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from trainer.data.columns import values
from trainer.data.columns.labels import labels_of, row_weights_of, several_labels_of
from trainer.data.columns.numeric import as_floats
from trainer.data.columns.vocabulary import DistinctIds
from trainer.data.errors import DataError
from trainer.data.sources.source import Chunk, Source, local_path, to_days
from trainer.data.sources.types import plain_type
from trainer.spec import DatasetSpec, Label, parse_dataset
from trainer.spec.label_tasks import label_tasks
from trainer.spec.losses import LOSSES

SAMPLE_ROWS = 1_000_000

_LABEL_NAMES = re.compile(
    r"^(is_?)?(label|target|y|click|clicked|clicks|conversion|converted|purchase|purchased)$", re.I
)
_RATING_NAMES = re.compile(r"^(rating|ratings|stars|score)$", re.I)
_ACTION_NAMES = re.compile(
    r"^(is_?|has_?|did_?)?(dis)?(likes?|liked|buy|bought|orders?|ordered|cart|carted|add(ed)?[_-]?to[_-]?cart|shared?|follow(ed)?"
    r"|comment(ed)?|fav|favou?rited?|saved?|bookmark(ed)?|install(ed)?|download(ed)?|subscribed?|forward(ed)?|hate|hated"
    r"|skip(ped)?|watch(ed)?|play(ed)?|finish(ed)?|completed?|view(ed)?|long_?view|effective_?view|read|reply|replied"
    r"|retweet(ed)?|apply|applied|book(ed)?|sign(ed)?_?up|register(ed)?|pay|paid|payment)$"
    r"|_(label|target)$|^(label|target|y)_",
    re.I,
)
_ORDER_NAMES = re.compile(r"^(pos|position|order|rank|seq|sequence|step)$", re.I)
_TIME_NAMES = re.compile(r"^(ts|time|timestamp|datetime|event_?time|created(_at)?|unix_?time)$", re.I)
_DAY_NAMES = re.compile(r"^(date|day|dt|ds)$", re.I)
_USER_NAMES = re.compile(r"^(user|uid|user_?id|member(_?id)?|customer(_?id)?|reviewer(_?id)?)$", re.I)
_ITEM_NAMES = re.compile(
    r"^(item|iid|item_?id|product(_?id)?|movie(_?id)?|asin|sku|ad(_?id)?|article(_?id)?|song(_?id)?)$", re.I
)
_NOT_FEATURES = re.compile(
    r"^(is_)?(train|test|valid|validation|split|fold)$|^(probability|weight|index)$|^__index", re.I
)
_MEAN_TEXT_LENGTH = 64


@dataclass(frozen=True)
class Proposal:
    """A DatasetSpec document, and what its reader should know of what is not in it."""

    document: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Column:
    """What a sample of one column shows."""

    name: str
    type: pa.DataType
    rows: int
    nulls: int
    distinct: int
    low: float | None = None
    high: float | None = None
    whole: bool = False
    mean_length: float = 0.0
    is_dates: bool = False
    beyond_ids: bool = False
    """Integers that are no int64."""

    @property
    def is_binary(self) -> bool:
        return self.whole and self.distinct == 2 and (self.low, self.high) == (0.0, 1.0) and self.nulls == 0


def infer(uri: str | Path, name: str | None = None) -> dict[str, Any]:
    """Return the document of :func:`propose`.

    Raises:
        DataError: the file cannot be read, or holds nothing to learn from.
    """
    return propose(uri, name).document


def propose(uri: str | Path, name: str | None = None) -> Proposal:
    """Return a DatasetSpec document for a file or directory, from its names and first million rows.

    The label: a 0/1 column named like one; else a rating, by rule; else negatives drawn for user and item; else any 0/1
    column. Other 0/1 columns named like labels are no features; the notes have the ``labels`` for all of them. Columns
    that cannot be read from every file are left out, and the notes say why.

    Raises:
        DataError: the file cannot be read, or holds nothing to learn from.
    """
    source = Source(str(uri))
    source.require([])
    problems = source.problems(source.column_names())
    columns = {column.name: column for column in _columns(source, problems)}
    notes = [f"left out: {error}" for error in problems.values()]
    notes += [f"left out: {source.uri}, column '{c.name}': {why}" for c in columns.values() if (why := _unreadable(c))]
    label, label_column = _label(columns)
    others = [c.name for c in _named_labels(columns) if c.name != label_column] if label_column is not None else []
    if others and label is not None and label_column is not None:
        notes.append(_several_labels(label, label_column, others))
    ordering = _ordering(columns, label_column)
    partition = next((c.name for c in columns.values() if _DAY_NAMES.match(c.name) and c.is_dates), None)
    used = {label_column, partition, *ordering.values(), *others}
    features: dict[str, Any] = {}
    for column in columns.values():
        kind = _feature_type(column)
        if column.name in used or kind is None:
            continue
        feature = _feature_name(column.name, features)
        features[feature] = {"type": kind} if feature == column.name else {"type": kind, "column": column.name}
    if label is None and "item" in features and "user" in features:
        label = {"negatives": {"per_positive": 1, "of": "item"}}
    if label is None or not features:
        lacking = "no id-like column" if not features else "no 0/1 label, no rating, and no user and item to draw from"
        raise DataError(
            "; ".join([f"shows {lacking} (columns: {', '.join(columns)})", *notes]),
            where=str(uri),
            remedy="write the manifest by hand; examples/ has some",
        )
    document = {"name": name or _dataset_name(local_path(str(uri))), "uri": str(uri), "features": features}
    document |= {"label": label, **ordering, **({"partition": partition} if partition else {})}
    parse_dataset(document)
    return Proposal(document, tuple(notes))


def as_yaml(document: dict[str, Any], notes: Sequence[str] = ()) -> str:
    """Return the proposal as the text of a manifest."""
    lines = ["# Proposed from the file: check features, label and order before use."]
    lines += [f"# {line}" for note in notes for line in note.splitlines()]
    for key, value in document.items():
        if key == "features":
            lines.append("features:")
            lines += [f"  {name}: {_flow(feature)}" for name, feature in value.items()]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def column_names(uri: str | Path) -> list[str]:
    """Return the columns of a file or directory, those of ``key=value`` folders included.

    Opens every file's footer or header.

    Raises:
        DataError: a file is missing, empty, truncated or in no known format.
    """
    source = Source(str(uri))
    source.require([])
    return source.column_names()


def profile(spec: DatasetSpec) -> dict[str, Any]:
    """Return figures of a dataset; reads every row, in a stream.

    They are the number of rows, the label rate or the range of its values, the range of the order, and nulls and
    distinct ids per feature column. ``label_problem`` says what would keep a job from training, where a label is not
    one.
    """
    source = Source(spec.uri)
    columns_of = {n: f.column or n for n, f in spec.features.items() if f.join is None and f.derive is None}
    numeric = {name: Range() for name in columns_of if spec.features[name].type == "dense"}
    direct = {name: column for name, column in columns_of.items() if name not in numeric}
    labels = _Labels(spec)
    columns = list(dict.fromkeys([*columns_of.values(), *labels.columns, *filter(None, (spec.ordering,))]))
    source.require(columns)
    types = {name: source.column_type(column) for name, column in direct.items()}
    distinct = {
        name: DistinctIds(values.id_kind(values.element_type(type_), f"{spec.uri}, column '{direct[name]}'"))
        for name, type_ in types.items()
    }
    nulls = dict.fromkeys(direct, 0)
    num_rows = 0
    extremes: list[Any] = []
    for chunk in source.stream(columns):
        num_rows += len(chunk)
        for name, column in direct.items():
            array = chunk.column(column)
            nulls[name] += array.null_count
            if spec.features[name].type == "id_list":
                array = values.as_lists(array)[0]
            distinct[name].add(values.as_ids(array, distinct[name].kind, chunk.where(column)))
        for name, range_ in numeric.items():
            range_.add(chunk.column(columns_of[name]))
        labels.add(chunk)
        if spec.ordering is not None:
            bounds = pc.min_max(chunk.column(spec.ordering)).as_py()
            extremes += [value for value in bounds.values() if value is not None]
    shown = {
        name: {"column": direct[name], "nulls": nulls[name], "distinct": len(distinct[name].sorted())}
        for name in direct
    }
    shown |= {name: {"column": columns_of[name], **range_.as_json()} for name, range_ in numeric.items()}
    result: dict[str, Any] = {"name": spec.name, "rows": num_rows, "files": len(source.files), "features": shown}
    result["bytes"] = sum(file.path.stat().st_size for file in source.files)
    result |= labels.as_json()
    if spec.ordering is not None:
        low, high = (min(extremes), max(extremes)) if extremes else (None, None)
        result["order"] = {"column": spec.ordering, "min": _plain(low), "max": _plain(high)}
    return result


class _Labels:
    """What a profile says of a dataset's label, or of each of its labels."""

    def __init__(self, spec: DatasetSpec):
        self._spec, self._problem = spec, ""
        self.columns = tuple(dict.fromkeys(spec.label_columns.values()))
        one = {} if spec.label is None or spec.negatives is not None else {"": spec.label}
        self._labels: dict[str, Label] = {**one, **spec.labels}
        least = {task.name: LOSSES[task.loss].least_label for task in label_tasks(spec)}
        self._least = {name: value for name, value in least.items() if value is not None}
        self._values = {name: Range() for name in self._labels}
        self._positives, self._rows = dict.fromkeys(self._labels, 0), dict.fromkeys(self._labels, 0)

    def add(self, chunk: Chunk) -> None:
        if self._problem or not self._labels:
            return
        try:
            if self._spec.label is not None:
                found = labels_of(chunk, self._spec.label)[:, None].astype(np.float64)
            else:
                found = several_labels_of(chunk, self._spec.labels, self._least).astype(np.float64)
            if self._spec.weight is not None:
                row_weights_of(chunk, self._spec.weight)
        except DataError as error:
            self._problem = str(error)
            return
        for name, column in zip(self._labels, found.T, strict=True):
            there = column[~np.isnan(column)]
            self._rows[name] += len(there)
            self._positives[name] += int((there == 1).sum())
            self._values[name].add(pa.array(there))

    def as_json(self) -> dict[str, Any]:
        if self._problem:
            return {"label_problem": self._problem}
        figures = {name: self._figures(name, label) for name, label in self._labels.items()}
        if self._spec.label is not None:
            return figures.get("", {})
        return {"labels": {name: {"rows": self._rows[name], **one} for name, one in figures.items()}}

    def _figures(self, name: str, label: Label) -> dict[str, Any]:
        if label.value is not None:
            return {"label_values": self._values[name].as_json()}
        return {"label_rate": self._positives[name] / self._rows[name] if self._rows[name] else None}


class Range:
    """The smallest and the largest value of a numeric column, how many are missing and how many are no numbers."""

    def __init__(self) -> None:
        self.nulls, self.bad, self.low, self.high = 0, 0, np.inf, -np.inf

    def add(self, array: pa.Array) -> None:
        numbers, bad = as_floats(array)
        present = numbers[~bad & ~np.isnan(numbers)]
        self.bad += int(bad.sum())
        self.nulls += int((np.isnan(numbers) & ~bad).sum())
        if len(present):
            self.low, self.high = min(self.low, float(present.min())), max(self.high, float(present.max()))

    def as_json(self) -> dict[str, Any]:
        known = self.low <= self.high
        return {
            "nulls": self.nulls, "bad": self.bad, "min": self.low if known else None,
            "max": self.high if known else None,
        }  # fmt: skip


# --- guesses


def _label(columns: dict[str, _Column]) -> tuple[dict[str, Any] | None, str | None]:
    named = _named_labels(columns)
    ratings = [c for c in columns.values() if _RATING_NAMES.match(c.name) and c.low is not None and c.distinct > 1]
    if named:
        return {"column": named[0].name}, named[0].name
    if ratings and ratings[0].nulls == 0 and ratings[0].high is not None and re.match(r"^[A-Za-z_]", ratings[0].name):
        # 4 of 5 stars, 8 of 10: what rating data sets usually count as a like.
        return {"rule": f"{ratings[0].name} >= {ratings[0].high * 0.8:g}"}, ratings[0].name
    if all(any(pattern.match(name) for name in columns) for pattern in (_USER_NAMES, _ITEM_NAMES)):
        return None, None
    for column in columns.values():
        if column.is_binary and not any(p.match(column.name) for p in (_NOT_FEATURES, _ORDER_NAMES, _TIME_NAMES)):
            return {"column": column.name}, column.name
    return None, None


def _named_labels(columns: dict[str, _Column]) -> list[_Column]:
    """Return the 0/1 columns named like labels; what most logs call theirs comes before other actions."""
    binary = [column for column in columns.values() if column.is_binary]
    usual = [column for column in binary if _LABEL_NAMES.match(column.name)]
    return usual + [column for column in binary if column not in usual and _ACTION_NAMES.search(column.name)]


def _several_labels(label: dict[str, Any], label_column: str, others: Sequence[str]) -> str:
    labels: dict[str, Any] = {}
    for column in [label_column, *others]:
        labels[_identifier(column, labels)] = label if column == label_column else {"column": column}
    names = " and ".join(f"'{name}'" for name in others)
    return (
        f"{names} may be labels too, and are no features here. For a model of several labels, in place of label:\n"
        f"labels: {_flow(labels)}"
    )


def _unreadable(column: _Column) -> str:
    """Return why no feature can read a column, where its type or its range says so."""
    if column.beyond_ids:
        return "integers of 2^63 and more (write it as text, or as int64)"
    try:
        values.id_kind(values.element_type(column.type), "")
    except DataError as error:
        return "" if pa.types.is_temporal(column.type) or pa.types.is_decimal(column.type) else str(error)[2:]
    return ""


def _ordering(columns: dict[str, _Column], label: str | None) -> dict[str, str]:
    """Return ``timestamp`` or ``order``; a column with nulls, or of integers that are no int64, orders none."""
    able = [one for one in columns.values() if one.nulls == 0 and one.name != label and not one.beyond_ids]
    for column in able:
        is_time = pa.types.is_timestamp(column.type) or (_TIME_NAMES.match(column.name) and column.low is not None)
        if is_time:
            return {"timestamp": column.name}
    for column in able:
        if _ORDER_NAMES.match(column.name) and column.low is not None:
            return {"order": column.name}
    return {}


def _feature_type(column: _Column) -> str | None:
    """Return ``id``, ``id_list``, or None for what no embedding table should hold."""
    if _NOT_FEATURES.match(column.name) or _TIME_NAMES.match(column.name) or _ORDER_NAMES.match(column.name):
        return None
    if pa.types.is_temporal(column.type) or pa.types.is_decimal(column.type) or _unreadable(column):
        return None
    if values.is_list(column.type):
        return None if pa.types.is_floating(column.type.value_type) else "id_list"
    if column.distinct < 2 or column.mean_length > _MEAN_TEXT_LENGTH:
        return None
    if pa.types.is_floating(column.type) and not column.whole:
        return None
    return "id"


def _feature_name(column: str, features: dict[str, Any]) -> str:
    for pattern, name in ((_USER_NAMES, "user"), (_ITEM_NAMES, "item")):
        if pattern.match(column) and name not in features:
            return name
    return _identifier(column, features)


def _identifier(column: str, taken: dict[str, Any]) -> str:
    """Return a name for what is read from a column, other than those that are taken."""
    name = re.sub(r"\W", "_", column, flags=re.ASCII)[:60]
    name = name if re.match(r"[A-Za-z_]", name) else f"c_{name}"
    candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _dataset_name(path: Path) -> str:
    stem = path.name.partition(".")[0].lower()
    return re.sub(r"[^a-z0-9_-]", "-", stem).strip("-_")[:63] or "dataset"


# --- figures


def _columns(source: Source, without: Collection[str]) -> list[_Column]:
    names = [name for name in dict.fromkeys(source.column_names()) if name not in without]
    source.require(names)
    types = {name: plain_type(source.column_type(name)) for name in names}
    parts: dict[str, list[pa.Array]] = {name: [] for name in names}
    rows = 0
    for chunk in source.stream(names):
        rows += len(chunk)
        for name in names:
            parts[name].append(_cast(chunk.column(name), types[name]))
        if rows >= SAMPLE_ROWS:
            break
    if rows == 0:
        raise DataError("has no rows", where=source.uri, remedy="point at data with rows")
    return [_figures(name, types[name], pa.chunked_array(parts[name], types[name])) for name in names]


def _cast(column: pa.Array, type_: pa.DataType) -> pa.Array:
    return column if column.type == type_ else pc.cast(column, type_, safe=False)


def _figures(name: str, type_: pa.DataType, column: pa.ChunkedArray) -> _Column:
    rows, nulls = len(column), column.null_count
    if pa.types.is_nested(type_):
        return _Column(name, type_, rows, nulls, distinct=rows)
    try:
        distinct = pc.count_distinct(column).as_py()
    except pa.ArrowNotImplementedError:
        # Of a type that no feature reads either.
        return _Column(name, type_, rows, nulls, distinct=rows)
    is_number = pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_boolean(type_)
    if is_number and rows > nulls:
        numbers = pc.cast(column, pa.float64(), safe=False).drop_null().to_numpy()
        finite = numbers[np.isfinite(numbers)]
        nulls += len(numbers) - len(finite)
        if len(finite):
            whole = bool((finite == np.floor(finite)).all())
            bounds = float(finite.min()), float(finite.max())
            beyond = pa.types.is_uint64(type_) and pc.max(column).as_py() >= 2**63
            dates = not beyond and _are_dates(column)
            return _Column(name, type_, rows, nulls, distinct, *bounds, whole, is_dates=dates, beyond_ids=beyond)
    is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    length = pc.mean(pc.utf8_length(column)).as_py() or 0.0 if is_text else 0.0
    return _Column(name, type_, rows, nulls, distinct, mean_length=length, is_dates=_are_dates(column))


def _are_dates(column: pa.ChunkedArray) -> bool:
    try:
        days = to_days(column.slice(0, 1000).combine_chunks(), "")
    except DataError:
        return False
    # Between 1990 and 2100: small integers are no dates.
    return len(days) > 0 and bool((days > 7305).all() and (days < 47482).all())


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value
