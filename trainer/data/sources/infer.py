"""Proposal of a dataset from a file or directory. Torch-free.

The proposal is a starting point for its reader to correct.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from trainer.data.columns import values
from trainer.data.columns.labels import as_numbers_remedy, positive_of, rule_for
from trainer.data.columns.text_lists import REMEDY, in_brackets, split
from trainer.data.errors import DataError
from trainer.data.sources.readers.base import beginnings
from trainer.data.sources.source import Source, local_path
from trainer.data.sources.times import DATE, ZONED, read_days, read_times
from trainer.spec import parse_dataset, parse_job

SAMPLE_ROWS = 1_000_000
SAMPLE_BYTES = 2**25
"""Most bytes, decompressed, that are read of each text file: a small compressed file can hold terabytes."""

ITEMS_OF_16_COLUMNS = 250
"""Fewest items for which vectors of 16 columns are proposed: alignment needs 12 trained items per column."""
ITEMS_OF_64_COLUMNS = 1000
"""Fewest items for which vectors of 64 columns, the default of bpr, are proposed."""

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
    r"^(item|iid|item_?id|product(_?id)?|movie(_?id)?|asin|sku|ad(_?id)?|article(_?id)?|song(_?id)?|video|track|album|book"
    r"|(video|track|album|artist|book|post|news|story|page|doc|document|listing|hotel|recipe|course|game|show|episode"
    r"|podcast|offer|property|restaurant|business|job|app|photo|pin|beer|wine)_?id)$",
    re.I,
)
_NOT_FEATURES = re.compile(
    r"^(is_)?(train|test|valid|validation|split|fold)$|^(probability|weight|index)$|^__index", re.I
)
_MEAN_TEXT_LENGTH = 64
_NUMBER = r"^\s*[-+]?\d[\d.,]*\s*$"
_NUMBER_WITH_COMMA = r"^\s*[-+]?\d[\d.]*(,\d{3})*,\d+(\.\d+)?\s*$"
_CODES = r"^\s*[^\s,;]*\d[^\s,;]*([\s,;]+[^\s,;]*\d[^\s,;]*)+\s*$|^[^,;]+([,;][^,;]+)+$"
"""Pattern of texts that may be one id or a list: codes separated by blanks or commas, or words separated by commas.

Semicolons count as commas.
"""
_TEXT_WORDS, _TEXT_VALUES = 3.0, 100
"""Least mean number of words, and least number of distinct values, of a column of texts; others hold categories."""


@dataclass(frozen=True)
class Proposal:
    """A DatasetSpec document, and notes on columns that were left out or are unclear.

    ``num_items``: number of distinct items in the sample of the rows.
    """

    document: dict[str, Any]
    notes: tuple[str, ...] = ()
    num_items: int = 0


@dataclass(frozen=True)
class _Column:
    """Statistics of a sample of one column."""

    name: str
    type: pa.DataType
    rows: int
    nulls: int
    distinct: int
    low: float | None = None
    high: float | None = None
    whole: bool = False
    mean_length: float = 0.0
    mean_words: float = 0.0
    """Mean number of words of the column's distinct values."""
    dim: int = 0
    """Common length of the column's lists; 0 if their lengths differ or it holds no lists."""
    is_dates: bool = False
    text_lists: str = ""
    """Form of the column's texts: ``lists``, ``numbers`` (with commas), ``unreadable``, ``unclear`` or ""."""
    pair: tuple[str, ...] = ()
    """The column's two values if it is text with exactly two distinct values."""
    example: str = ""
    """First text of the column that has the form ``text_lists``."""
    is_times: bool = False
    """True if the column is text that holds times or dates."""
    has_hours: bool = False
    """True if the column is text that holds times with hours, not plain dates."""
    beyond_ids: bool = False
    """True if the column has whole numbers beyond int64, or floats too large to be exact."""

    @property
    def plain_name(self) -> str:
        """The column's name with underscores for blanks and hyphens: ``user_id`` for `` user id`` and ``user-id``."""
        return re.sub(r"[\s-]+", "_", self.name.strip())

    @property
    def is_binary(self) -> bool:
        return self.whole and self.distinct == 2 and (self.low, self.high) == (0.0, 1.0) and self.nulls == 0


def infer(uri: str | Path, name: str | None = None) -> dict[str, Any]:
    """Return the dataset that :func:`propose` makes of a file or directory, as a dictionary.

    Raises:
        DataError: the file cannot be read, or holds nothing to learn from.
    """
    return propose(uri, name).document


def propose(uri: str | Path, name: str | None = None, items: str | Path | None = None) -> Proposal:
    """Return a DatasetSpec document for a file or directory, from its column names and first million rows.

    The label is a 0/1 column named like a label, or else a rating column, turned into 0/1 by a rule. Without either,
    negatives are drawn if there are a user and an item column, or else any other 0/1 column is the label. Further 0/1
    columns named like labels become no features; the notes propose ``labels`` for all of them. A column that is named
    like a label and has other values becomes no feature either. Columns that cannot be read from every file are left
    out, and the notes give the reasons. Of each text file, at most the first SAMPLE_BYTES are read.

    ``items``: a file with one row per item, whose other columns become the features of the dataset's ``items``.

    Raises:
        DataError: a file cannot be read, or holds nothing to learn from.
    """
    with beginnings(SAMPLE_BYTES):
        return _propose(uri, name, items)


def _propose(uri: str | Path, name: str | None, items: str | Path | None) -> Proposal:
    source = Source(str(uri))
    source.require([])
    problems = source.problems(source.column_names())
    columns = {column.name: column for column in _columns(source, problems)}
    in_digits = _ids_in_digits(source, columns.values())
    for column_name in in_digits:
        columns[column_name] = replace(columns[column_name], beyond_ids=False)
    notes = [f"left out: {error}" for error in problems.values()]
    notes += [f"left out: {source.uri}, column '{c.name}': {why}" for c in columns.values() if (why := _unreadable(c))]
    if source.passed_over:
        shown = ", ".join(source.passed_over[:3]) + (", ..." if len(source.passed_over) > 3 else "")
        notes.append(f"passed over: {len(source.passed_over)} files whose endings belong to no format: {shown}")
    unfit = [column for column in columns.values() if _is_no_label(column)]
    notes += [f"left out: '{column.name}', which is named like a label: {_as_label(column)}" for column in unfit]
    label, label_column = _label(columns)
    others = [c.name for c in _named_labels(columns) if c.name != label_column] if label_column is not None else []
    if others and label is not None and label_column is not None:
        num_items = next((c.distinct for c in columns.values() if _ITEM_NAMES.match(c.plain_name)), 0)
        notes.append(_several_labels(label, label_column, others, _dim_of(num_items), with_items=items is not None))
    ordering = _ordering(columns, label_column)
    if "timestamp" not in ordering:
        timed = [c for c in columns.values() if _TIME_NAMES.match(c.plain_name) and not _unreadable(c)]
        notes += [f"left out: '{c.name}', which is named like a time: {_as_time(c)}" for c in timed]
    partition = next((c.name for c in columns.values() if _DAY_NAMES.match(c.plain_name) and c.is_dates), None)
    used = {label_column, partition, *ordering.values(), *others, *(column.name for column in unfit)}
    features: dict[str, Any] = {}
    for column in columns.values():
        kind = _feature_type(column)
        if column.name in used or kind is None:
            continue
        feature = _feature_name(column, features)
        features[feature] = {"type": kind} if feature == column.name else {"type": kind, "column": column.name}
        if kind == "vector":
            features[feature]["dim"] = column.dim
        if column.text_lists == "unclear" and kind == "id":
            notes.append(
                f"'{feature}' has values such as '{column.example}', each of which is read as one id; {REMEDY}"
            )
        if kind == "text":
            notes.append(f"'{feature}' has about {column.mean_words:.0f} words: a text, read by its hashed n-grams")
        if column.name in in_digits:
            example = in_digits[column.name]
            notes.append(f"'{feature}' is text: not every value is written as an integer is, such as '{example}'")
    notes += [
        f"left out: '{c.name}', whose numbers are no ids; models of clicks may read them: {c.name}: {{type: dense}}"
        for c in columns.values()
        if c.name not in used and _is_number(c)
    ]
    notes += [
        f"left out: '{c.name}', which holds times; to use each text as a category: {c.name}: {{type: id}}"
        for c in columns.values()
        if c.name not in used and pa.types.is_temporal(c.type) and not source.reader.has_types
    ]
    if label is None and "item" in features and "user" in features:
        label = {"negatives": {"per_positive": 1, "of": "item"}}
    if label is None or not features:
        lacking = "no id-like column" if not features else "no 0/1 label, no rating, and no user and item to draw from"
        lacking = _as_item_table(columns) or lacking
        raise DataError(
            "; ".join([f"shows {lacking} (columns: {', '.join(columns)})", *notes]),
            where=str(uri),
            remedy="name the columns, such as features: {user: {type: id, column: U}, item: {type: id, column: I}}, "
            "label: {positive: every_row}; examples/ has whole datasets",
        )
    if items is not None:
        document_items, of_items = _item_table(str(items), features, columns, str(uri))
        notes += of_items
        for feature in document_items["features"]:
            features.pop(feature, None)
    else:
        document_items = None
        notes += _constant_per_item(source, features)
    document = {"name": name or _dataset_name(local_path(str(uri))), "uri": str(uri), "features": features}
    document |= {"label": label, **ordering, **({"partition": partition} if partition else {})}
    document |= {} if document_items is None else {"items": document_items}
    parse_dataset(document)
    item = features.get("item", {}).get("column", "item")
    return Proposal(document, tuple(notes), columns[item].distinct if "item" in features else 0)


def as_yaml(document: dict[str, Any], notes: Sequence[str] = ()) -> str:
    """Return a proposed document as YAML, with the notes as comments above it."""
    lines = ["# Proposed from the file: check features, label and order before use."]
    lines += [f"# {line}" for note in notes for line in note.splitlines()]
    for key, value in document.items():
        if key == "features":
            lines.append("features:")
            lines += [f"  {name}: {_flow(feature)}" for name, feature in value.items()]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def job_of(proposal: Proposal) -> dict[str, Any]:
    """Return a job that publishes the item vectors of a proposed dataset, or learns its label without items."""
    document = proposal.document
    job: dict[str, Any] = {"spec_version": 1, "name": document["name"], "dataset": {"name": document["name"]}}
    features, has_items = document["features"].keys(), "items" in document
    if not {"user", "item"} <= features:
        job["model"] = {"kind": "dcnv2", "embedding_dim": 16}
        return job | {"optimizer": {"learning_rate": 0.01}, "epochs": 5, "batch_size": 256}
    publish: dict[str, Any] = {"collection": f"{document['name'][:57]}-items", "feature": "item"}
    if "negatives" in document["label"] and not has_items:
        few = {"embedding_dim": _dim_of(proposal.num_items)} if proposal.num_items < ITEMS_OF_64_COLUMNS else {}
        return job | {"model": {"kind": "bpr", **few}, "publish": publish}
    job["model"] = {"kind": "two_tower", "embedding_dim": _dim_of(proposal.num_items)} | (
        {} if has_items else {"residual": True}
    )
    # Rows of rare ids, which adam_ar learns anew in each epoch, are all that an item has without features.
    job["optimizer"] = ({} if has_items else {"kind": "adam"}) | {"learning_rate": 0.003}
    job |= {"epochs": 10, "batch_size": 256}
    if has_items and len(features) == 2:
        publish["users"] = {"feature": "user"}
    return job | {"publish": publish}


def job_as_yaml(job: dict[str, Any], dataset: dict[str, Any]) -> str:
    """Return a job as the YAML document that follows its dataset."""
    lines = ["---"]
    if "batch_size" in job:
        lines.append("# learning_rate and batch_size suit some ten thousand rows: millions take .001 and 2048.")
    rows = parse_dataset(dataset)
    inputs = parse_job(job).against(rows).model.inputs_in_words(rows)
    lines += [] if inputs is None else [f"# {inputs[:1].upper()}{inputs[1:]}."]
    if "publish" not in job:
        lines.append(
            "# It publishes nothing without features user and item: name them, such as item: {type: id, column: X}."
        )
    return "\n".join([*lines, *(f"{key}: {_flow(value)}" for key, value in job.items())]) + "\n"


def column_names(uri: str | Path) -> list[str]:
    """Return the names of the columns of a file or directory, including the keys of ``key=value`` folders.

    Opens every file's footer or header.

    Raises:
        DataError: a file is missing, empty, truncated or in no known format.
    """
    source = Source(str(uri))
    source.require([])
    return source.column_names()


# --- items


def _item_table(
    uri: str, features: dict[str, Any], columns: dict[str, _Column], rows: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the proposed field ``items`` of a dataset, and notes."""
    if "item" not in features:
        remedy = "name the column of item ids item, item_id, sku or product_id in the rows"
        raise DataError("has no column of item ids, which an item table needs", where=rows, remedy=remedy)
    on = features["item"].get("column", "item")
    source = Source(uri)
    source.require([on])
    table = {column.name: column for column in _columns(source, source.problems(source.column_names()))}
    if table[on].distinct < table[on].rows:
        more = f"{table[on].rows} rows and {table[on].distinct} values"
        raise DataError(f"has {more}", where=f"{uri}, column '{on}'", remedy="write one row per item")
    proposed: dict[str, Any] = {}
    for column in table.values():
        if column.name == on or _unreadable(column):
            continue
        kind = "dense" if _is_number(column) else _feature_type(column)
        if kind is None:
            continue
        taken = {name: one for name, one in features.items() if one.get("column", name) != column.name}
        name = _identifier(column.plain_name, taken | proposed)
        proposed[name] = {"type": kind} if name == column.name else {"type": kind, "column": column.name}
        if kind == "vector":
            proposed[name]["dim"] = column.dim
        if kind == "dense":
            proposed[name]["transform"] = "standardize"
    if not proposed:
        raise DataError("has no column that a model reads", where=uri, remedy="add a category, a brand or a price")
    repeated = sorted(name for name in proposed if name in features)
    notes = [f"'{name}' is read from the item table, not from the rows" for name in repeated]
    read = {on, *(one.get("column", name) for name, one in proposed.items())}
    left = [name for name in table if name not in read]
    notes += [f"left out of items: {', '.join(left)}"] if left else []
    return {"uri": uri, "on": on, "features": proposed}, notes


def _constant_per_item(source: Source, features: dict[str, Any]) -> list[str]:
    """Return a note on the features of the rows that have one value per item in a sample of the rows."""
    if "item" not in features:
        return []
    item = features["item"].get("column", "item")
    others = {
        name: one.get("column", name)
        for name, one in features.items()
        if name not in ("item", "user") and one["type"] == "id"
    }
    if not others:
        return []
    names = list(dict.fromkeys([item, *others.values()]))
    source.require(names)
    sample = next(iter(source.stream(names)))
    table = pa.table({name: sample.column(name) for name in names})
    num_items = len(table.group_by(item).aggregate([]))
    constant = [
        name
        for name, column in others.items()
        if num_items < len(table) and len(table.group_by([item, column]).aggregate([])) == num_items
    ]
    if not constant:
        return []
    return [
        f"{' and '.join(constant)} {'have' if len(constant) > 1 else 'has'} one value per item: two_tower reads "
        "features of the rows in its user tower. For its item tower write a file with one row per item, and infer "
        "with --items FILE"
    ]


def _as_item_table(columns: dict[str, _Column]) -> str:
    """Return text that names the columns' file as an item table; empty if it is none."""
    ids = [one for one in columns.values() if _ITEM_NAMES.match(one.plain_name) and one.distinct == one.rows > 1]
    has_users = any(_USER_NAMES.match(one.plain_name) for one in columns.values())
    if not ids or has_users:
        return ""
    return f"one row per '{ids[0].name}', so it is an item table: infer the rows of events with --items THIS_FILE"


# --- guesses


def _label(columns: dict[str, _Column]) -> tuple[dict[str, Any] | None, str | None]:
    named = _named_labels(columns)
    ratings = [
        c for c in columns.values() if _RATING_NAMES.match(c.plain_name) and c.low is not None and c.distinct > 1
    ]
    if named:
        return {"column": named[0].name}, named[0].name
    ratings = [c for c in ratings if c.name == c.plain_name]  # what a rule can name
    if ratings and ratings[0].nulls == 0 and ratings[0].high is not None:
        # 4 of 5 stars, 8 of 10: what rating data sets usually count as a like.
        return {"rule": f"{ratings[0].name} >= {ratings[0].high * 0.8:g}"}, ratings[0].name
    names = [column.plain_name for column in columns.values()]
    if all(any(pattern.match(name) for name in names) for pattern in (_USER_NAMES, _ITEM_NAMES)):
        return None, None
    for column in columns.values():
        if column.is_binary and not any(p.match(column.plain_name) for p in (_NOT_FEATURES, _ORDER_NAMES, _TIME_NAMES)):
            return {"column": column.name}, column.name
    return None, None


def _named_labels(columns: dict[str, _Column]) -> list[_Column]:
    """Return the 0/1 columns named like labels: first names such as ``click``, then other actions such as ``liked``."""
    binary = [column for column in columns.values() if column.is_binary]
    usual = [column for column in binary if _LABEL_NAMES.match(column.plain_name)]
    return usual + [column for column in binary if column not in usual and _ACTION_NAMES.search(column.plain_name)]


def _is_no_label(column: _Column) -> bool:
    """Return True if a column is named like a label but is no 0/1 column.

    Such a column is no feature either, because its value is not known at prediction.
    """
    is_partial = column.whole and (column.low, column.high) == (0.0, 1.0) and column.nulls > 0
    is_answer = is_partial or (column.distinct == 2 and (column.whole or positive_of(column.pair) is not None))
    named = _LABEL_NAMES.match(column.plain_name) or (is_answer and _ACTION_NAMES.search(column.plain_name))
    named = named or (column.low is None and _RATING_NAMES.match(column.plain_name))
    return bool(named) and not column.is_binary


def _as_label(column: _Column) -> str:
    """Return the reason why a column is no label yet, with the remedy that makes it a label."""
    if column.low is None and _RATING_NAMES.match(column.plain_name):
        return f"it holds text; if that is always a number, a rule can read it: label: {{rule: '{column.name} >= 4'}}"
    if column.low is None:
        return as_numbers_remedy(column.name, column.pair)
    if column.name != column.plain_name:
        return f"not every value is 0 or 1; rename it to '{column.plain_name}' to use a filter or a rule"
    if column.nulls:
        return f'some rows lack a value, as only one of several labels may; set filter: "{column.name} is not None"'
    assert column.high is not None
    rule = rule_for(column.name, column.low, column.high, column.distinct)
    return f"its values are not 0 and 1; a rule may turn them into a label: {rule}"


def _as_time(column: _Column) -> str:
    """Return the reason why a column cannot order the rows by time, with the remedy."""
    if column.nulls:
        return "some rows lack a value, and a column that orders rows must not; fill it in, or leave those rows out"
    return "it holds no times that can be read; write ISO 8601, with a zone in every value or in none, or numbers"


def _dim_of(num_items: int) -> int:
    """Return the embedding_dim to propose for a number of items."""
    return 16 if num_items >= ITEMS_OF_16_COLUMNS else 8


def _several_labels(
    label: dict[str, Any], label_column: str, others: Sequence[str], dim: int, *, with_items: bool
) -> str:
    labels: dict[str, Any] = {}
    for column in [label_column, *others]:
        labels[_identifier(column, labels)] = label if column == label_column else {"column": column}
    names = " and ".join(f"'{name}'" for name in others)
    left_out = f"{names}: named like a label, and no feature here"
    if with_items:
        return f"{left_out}. A model of several labels reads no item table: infer without --items to train one"
    model = {"kind": "mmoe", "embedding_dim": dim, "init": {"kind": "hash", "std": 0.1}}
    return (
        f"{left_out}. For a model of several labels, in place of label, and of the job's model:\n"
        f"labels: {_flow(labels)}\nmodel: {_flow(model)}"
    )


def _unreadable(column: _Column) -> str:
    """Return the reason why no feature can read a column, if its type or range prevents it."""
    if column.beyond_ids:
        is_float = pa.types.is_floating(column.type)
        what = "integers as floats, too large to be exact" if is_float else "integers of 2^63 and more"
        return f"{what} (write it as text, or as int64)"
    if column.text_lists == "unreadable":
        return f"'{column.example}' is no list of texts or numbers with commas between them ({REMEDY})"
    if column.text_lists == "numbers":
        return f"'{column.example}' is a number with a comma, or a list (write 2.5, 1234, or 2|5)"
    if column.mean_length > _MEAN_TEXT_LENGTH and not _is_text(column) and column.text_lists != "lists":
        return f"strings of about {column.mean_length:.0f} characters without words: neither ids nor texts"
    if values.is_list(column.type) and pa.types.is_floating(column.type.value_type) and not column.dim:
        return "lists of numbers of different lengths, but vectors all have the same length"
    try:
        values.id_kind(values.element_type(column.type), "")
    except DataError as error:
        return "" if pa.types.is_temporal(column.type) or _is_fraction(column.type) else str(error)[2:]
    return ""


def _ordering(columns: dict[str, _Column], label: str | None) -> dict[str, str]:
    """Return ``{"timestamp": column}``, ``{"order": column}`` or {}, for the column that orders the rows.

    Columns with nulls, or with integers beyond int64, cannot order rows.
    """
    able = [one for one in columns.values() if one.nulls == 0 and one.name != label and not one.beyond_ids]
    for column in able:
        is_named = _TIME_NAMES.match(column.plain_name) and (column.low is not None or column.is_times)
        is_time = pa.types.is_timestamp(column.type) or column.has_hours or is_named
        if is_time:
            return {"timestamp": column.name}
    for column in able:
        if _ORDER_NAMES.match(column.plain_name) and column.low is not None:
            return {"order": column.name}
    return {}


def _feature_type(column: _Column) -> str | None:
    """Return ``id``, ``id_list``, ``text`` or ``vector``, or None for a column that no model should read."""
    if any(pattern.match(column.plain_name) for pattern in (_NOT_FEATURES, _TIME_NAMES, _ORDER_NAMES)):
        return None
    if pa.types.is_temporal(column.type) or column.has_hours or _is_fraction(column.type) or _unreadable(column):
        return None
    if values.is_list(column.type) or column.text_lists == "lists":
        return "vector" if _is_vector(column) else "id_list"
    if column.distinct < 2:
        return None
    if _is_text(column):
        return "text"
    return None if _is_number(column) else "id"


def _is_number(column: _Column) -> bool:
    """Return True if a column holds quantities, such as a price, not ids."""
    is_named = any(p.match(column.plain_name) for p in (_NOT_FEATURES, _TIME_NAMES, _ORDER_NAMES))
    is_number = _is_fraction(column.type) or (pa.types.is_floating(column.type) and not column.whole)
    return is_number and column.distinct > 1 and not is_named


def _is_fraction(type_: pa.DataType) -> bool:
    """Return True for a decimal type with digits after the point; decimals without such digits are integers."""
    return bool(pa.types.is_decimal(type_)) and type_.scale != 0


def _is_vector(column: _Column) -> bool:
    return column.dim > 0 and (not values.is_list(column.type) or pa.types.is_floating(column.type.value_type))


def _is_text(column: _Column) -> bool:
    """Return True if a column's strings are sentences or titles: several words each, and either long or many."""
    if column.mean_words < _TEXT_WORDS:
        return False
    return column.mean_length > _MEAN_TEXT_LENGTH or column.distinct >= _TEXT_VALUES


def _feature_name(column: _Column, features: dict[str, Any]) -> str:
    for pattern, name in ((_USER_NAMES, "user"), (_ITEM_NAMES, "item")):
        if pattern.match(column.plain_name) and name not in features:
            return name
    return _identifier(column.plain_name, features)


def _identifier(column: str, taken: dict[str, Any]) -> str:
    """Return a feature name for a column: its name as an identifier, with a number if ``taken`` has that already."""
    name = re.sub(r"\W", "_", column, flags=re.ASCII)[:60]
    name = name if re.match(r"[A-Za-z_]", name) else f"c_{name}"
    candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _dataset_name(path: Path) -> str:
    stem = path.name.partition(".")[0].lower()
    return re.sub(r"[^a-z0-9_-]", "-", stem).strip("-_")[:63] or "dataset"


# --- figures


def _ids_in_digits(source: Source, columns: Iterable[_Column]) -> dict[str, str]:
    """Return an example value, such as 007, for each column of numbers that becomes text if it is read as ids.

    Empty for formats that declare the types of their columns.
    """
    numbers = [column.name for column in columns if column.low is not None]
    if source.reader.has_types or not numbers:
        return {}
    of_ids = Source(source.uri, ids=numbers)
    of_ids.require(numbers)
    return of_ids.reader.number_like


def _columns(source: Source, without: Collection[str]) -> list[_Column]:
    names = [name for name in dict.fromkeys(source.column_names()) if name not in without]
    source.require(names)
    types = {name: source.column_type(name) for name in names}
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
        return _Column(name, type_, rows, nulls, distinct=rows, dim=_common_length(column))
    try:
        distinct = pc.count_distinct(column).as_py()
    except pa.ArrowNotImplementedError:
        # No feature reads a column of such a type.
        return _Column(name, type_, rows, nulls, distinct=rows)
    is_integer = pa.types.is_integer(type_) or pa.types.is_boolean(type_)
    if (is_integer or pa.types.is_floating(type_) or pa.types.is_decimal(type_)) and rows > nulls:
        numbers = pc.cast(column, pa.float64(), safe=False).drop_null().to_numpy()
        finite = numbers[np.isfinite(numbers)]
        nulls += len(numbers) - len(finite)
        if len(finite):
            whole = bool((finite == np.floor(finite)).all())
            bounds = float(finite.min()), float(finite.max())
            beyond = whole and _beyond_ids(type_, column, bounds)
            dates = not beyond and _are_dates(column)
            return _Column(name, type_, rows, nulls, distinct, *bounds, whole, is_dates=dates, beyond_ids=beyond)
    is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    length = pc.mean(pc.utf8_length(column)).as_py() or 0.0 if is_text else 0.0
    words = _mean_words(column) if is_text else 0.0
    found = _Column(
        name, type_, rows, nulls, distinct, mean_length=length, mean_words=words, is_dates=_are_dates(column),
        is_times=is_text and _are_times(column), has_hours=is_text and _are_times(column, with_hours=True),
    )  # fmt: skip
    named = any(pattern.match(found.plain_name) for pattern in (_USER_NAMES, _ITEM_NAMES))
    if not is_text or found.is_times:
        return found
    pair = tuple(pc.unique(column).drop_null().to_pylist()) if distinct == 2 else ()
    return replace(found, pair=pair, **_text_lists(column, named or _is_text(found)))


def _text_lists(column: pa.ChunkedArray, has_pipes: bool) -> dict[str, Any]:
    """Return, for a column of text, the fields ``text_lists``, ``example`` and ``dim`` of :class:`_Column`.

    With ``has_pipes``, a pipe is part of a value and separates no elements.
    """
    texts = pc.unique(column).drop_null()
    texts = texts.filter(pc.not_equal(texts, ""))
    bracketed = in_brackets(texts)
    lists, unreadable = split(texts.filter(bracketed))
    plain = texts.filter(pc.invert(bracketed))
    piped = plain.filter(pc.match_substring_regex(plain, r"\S\|\S"))
    numbers = plain.filter(pc.match_substring_regex(plain, _NUMBER_WITH_COMMA))
    if unreadable.any():
        return {"text_lists": "unreadable", "example": texts.filter(bracketed)[int(np.argmax(unreadable))].as_py()[:60]}
    if len(lists):
        return {
            "text_lists": "lists",
            "example": texts.filter(bracketed)[0].as_py()[:60],
            "dim": _dim(lists, len(plain)),
        }
    if len(piped) and not has_pipes:
        return {"text_lists": "lists", "example": piped[0].as_py()[:60]}
    if len(numbers) and pc.all(pc.match_substring_regex(plain, _NUMBER)).as_py():
        return {"text_lists": "numbers", "example": numbers[0].as_py()}
    unclear = plain.filter(pc.match_substring_regex(plain, _CODES))
    return {"text_lists": "unclear", "example": unclear[0].as_py()[:60]} if len(unclear) and not has_pipes else {}


def _dim(lists: pa.Array, num_others: int) -> int:
    """Return the common length of text lists that are vectors, else 0.

    Lists are vectors if all have the same length and hold numbers, some with a decimal point. ``num_others`` counts the
    column's texts that are no lists; with any, the result is 0.
    """
    dim = _common_length(pa.chunked_array([lists]))
    elements = pc.list_flatten(lists)
    if not dim or num_others or not pc.any(pc.match_substring(elements, ".")).as_py():
        return 0
    try:
        return dim if not pc.cast(elements, pa.float64()).null_count else 0
    except pa.ArrowInvalid:
        return 0


def _beyond_ids(type_: pa.DataType, column: pa.ChunkedArray, bounds: tuple[float, float]) -> bool:
    """Return True if the column, with these least and greatest values, has integers beyond int64 or inexact floats."""
    if pa.types.is_floating(type_):
        return max(map(abs, bounds)) >= values.exact_below(type_)
    if pa.types.is_uint64(type_) or pa.types.is_decimal(type_):
        return any(not -(2**63) <= one < 2**63 for one in pc.min_max(column).as_py().values())
    return False


def _common_length(column: pa.ChunkedArray) -> int:
    """Return the common length of the lists of a column, 0 if lengths differ or there is no list."""
    if not values.is_list(column.type):
        return 0
    bounds = pc.min_max(pc.list_value_length(column)).as_py()
    return int(bounds["max"]) if bounds["max"] is not None and bounds["min"] == bounds["max"] else 0


def _mean_words(column: pa.ChunkedArray) -> float:
    """Return the mean number of words, split at white space, of a column's distinct strings."""
    words = pc.list_value_length(pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pc.unique(column).drop_null())))
    return pc.mean(words).as_py() or 0.0


def _are_dates(column: pa.ChunkedArray) -> bool:
    days, is_day = read_days(column.slice(0, 1000).combine_chunks())
    # Between 1990 and 2100: small integers are no dates.
    return len(days) > 0 and bool((is_day & (days > 7305) & (days < 47482)).all())


def _are_times(column: pa.ChunkedArray, with_hours: bool = False) -> bool:
    forms = read_times(column.slice(0, 1000).drop_null().combine_chunks()).forms
    least = DATE + 1 if with_hours else DATE
    return len(forms) > 0 and bool((forms >= least).all() and len(np.unique(forms == ZONED)) == 1)


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
