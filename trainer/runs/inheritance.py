"""Matching of a warm start's features and tables with its parent's, by name; incompatible changes are refused.

``evenkeel validate``, a submission and the run itself compare a job and its dataset with the parent's in the same way.
This module does not import torch.
The result is an :class:`Inheritance`, by which trainer.distributed.inherited moves rows and weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.data.batches.keys import read_features
from trainer.data.sources.source import Source, beside
from trainer.spec import DatasetSpec, Feature, JobSpec, Table
from trainer.spec.base import May
from trainer.spec.label_tasks import label_tasks
from trainer.spec.models.base import ModelSpec
from trainer.spec.models.registry import parse_model
from trainer.spec.problems import FieldProblem, InvalidFieldsError, raise_if_invalid
from trainer.spec.stored_specs import read

_NUMBER = re.compile(r"[\d._-]+")
"""Pattern of dates and numbers in file names, which differ from day to day."""


@dataclass(frozen=True)
class Inheritance:
    """Features and tables that a job continues from its parent.

    Attributes:
        features: the parent's feature that each feature of the job's model continues, without added features.
        tables: the parent's table that each table of ids continues.
        added: features that the parent did not read.
        dropped: features of the parent that the job does not read.
        silent: added features whose vectors are zero before the first step, so that weights on them have no effect.
        keeps_scores: True if weights on added features begin so that scores stay the parent's (``added: zero``).
        embedding_dim: dimension of the parent's vectors, and of the job's.
        drawn: a table and a part of its rows (0 or 1 for item2vec's [v | u]) whose new columns begin with random
            values. All other new columns begin at zero; products in which all factors are zero would never learn. None:
            all at zero.
        notes: messages for the owner of the job.
    """

    features: Mapping[str, str]
    tables: Mapping[str, str]
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    silent: frozenset[str] = frozenset()
    keeps_scores: bool = True
    embedding_dim: tuple[int, int] = (0, 0)
    drawn: tuple[str, int] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_changed(self) -> bool:
        """True if features were added, dropped or renamed."""
        return bool(self.added or self.dropped) or any(new != old for new, old in self.features.items())

    @property
    def is_wider(self) -> bool:
        """True if vectors have more columns than the parent's."""
        return len(set(self.embedding_dim)) > 1

    def parent_of(self, table: str) -> str:
        """Return the parent's name of a table; a new table's own name."""
        return self.tables.get(table, table)


def inherit(
    job: JobSpec, dataset: DatasetSpec, parent_job: Mapping[str, Any], parent_dataset: DatasetSpec | None
) -> Inheritance:
    """Match a job with its parent by name.

    ``parent_job`` is the parent's spec, perhaps stored by an older version. ``parent_dataset`` is None if that version
    did not record it; the job's dataset is then used.

    Raises:
        InvalidFieldsError: some fields do not fit the parent; the error names each, with the remedy.
    """
    parent_dataset = parent_dataset or dataset
    parent_model = parse_model(read(parent_job, JobSpec, "model"), stored=True)
    raise_if_invalid(_model_problems(job.model, parent_model))
    matching = _Matching(job, dataset, parent_dataset, parent_model.embedding_dim)
    raise_if_invalid([*matching.problems(), *_label_problems(dataset, parent_dataset)])
    found = matching.inheritance()
    raise_if_invalid(_table_problems(job, found, read(parent_job, JobSpec, "tables")))
    if job.publish is not None and (found.is_changed or found.is_wider):
        more = "features, and the job has others" if found.is_changed else "columns, and the job's vectors have more"
        for name in ("anchor", "frozen_context"):
            if getattr(job.publish, name) is not None:
                why = f"keeps items close to what the parent learned from its {more}"
                raise_if_invalid([FieldProblem(f"publish.{name}", why, "leave it out for this run, or the change")])
    return found


def _read_by(job: JobSpec, dataset: DatasetSpec) -> dict[str, Feature]:
    """Return the features that the job's model reads, keyed by name: features of ids, then numbers and vectors."""
    found = read_features(dataset, job)
    model = job.model
    if model.reads_pairs or model.reads_sequences:
        return found
    others = {**dataset.features, **({} if dataset.items is None else dataset.items.features)}
    return found | {name: feature for name, feature in others.items() if not feature.has_ids}


def _model_problems(model: ModelSpec, parent: ModelSpec) -> Iterator[FieldProblem]:
    free = model.fields_that(May.DIFFER_ON_WARM_START)
    growing = model.fields_that(May.GROW_ON_WARM_START)
    for name in type(model).model_fields if model.kind == parent.kind else ("kind",):
        here, there = getattr(model, name), getattr(parent, name)
        if name in free or here == there:
            continue
        remedy = "use the same, or leave init_from out"
        if name in growing or name == "embedding_dim":
            way = _remedy_of_columns(model, there) if name == "embedding_dim" else _remedy_of_layers(model, name, there)
            if way is None:
                continue
            remedy = f"{way}, or leave init_from out"
        yield FieldProblem(f"model.{name}", f"the parent was trained with {there}, the job asks for {here}", remedy)


def _remedy_of_layers(model: ModelSpec, name: str, there: tuple[int, ...]) -> str | None:
    """Return the remedy if hidden layers cannot continue from a parent's, None if they can.

    An added layer begins as the identity: its own ReLU changes nothing in the output of a previous ReLU.
    """
    here = getattr(model, name)
    deeper, may_be = len(here) > len(there), name in model.fields_that(May.DEEPEN_ON_WARM_START)
    if len(here) < len(there) or any(new < old for new, old in zip(here, there, strict=False)):
        return f"use the parent's number of layers, of these sizes or larger ones{', or more' if may_be else ''}"
    if getattr(model, "residual", False):
        return "keep the sizes, since a shortcut adds units to units (residual)"
    if not deeper:
        return None
    if not may_be:
        return "use the parent's number of layers: only after a ReLU can one be added without a change of scores"
    if not there:
        return "keep it without layers: a first layer would change the scores"
    if getattr(model, "batch_norm", False):
        return "use the parent's number of layers: an added one would normalise its inputs (batch_norm)"
    if min(here[len(there) :]) < there[-1]:
        return f"give each layer after the parent's at least as many units as its last, {there[-1]}"
    return None


def _remedy_of_columns(model: ModelSpec, there: int) -> str | None:
    """Return the remedy if vectors cannot continue from a parent's, None if they can, padded with zeros."""
    if model.embedding_dim < there:
        return f"use {there} or more"
    if model.wider_vectors_problem is not None:
        return f"use {there}, since {model.kind} cannot take up columns of zeros ({model.wider_vectors_problem})"
    return None


def _label_problems(dataset: DatasetSpec, parent: DatasetSpec) -> Iterator[FieldProblem]:
    learned, asked = ([task.name for task in label_tasks(one)] for one in (parent, dataset))
    if learned != asked:
        yield FieldProblem(
            "labels",
            f"the parent learned {', '.join(learned) or 'one label'}, in this order, the dataset has "
            f"{', '.join(asked) or 'one label'}",
            "use the same, or leave init_from out",
        )


def _table_problems(job: JobSpec, found: Inheritance, stored: Mapping[str, Any]) -> Iterator[FieldProblem]:
    for name, former in found.tables.items():
        there, here = Table.model_validate(stored.get(former, {})), job.table(name)
        for field_name in Table.model_fields:
            was, asked = getattr(there, field_name), getattr(here, field_name)
            if was != asked:
                why = f"the parent's table has {field_name} {was}, the job asks for {asked}"
                yield FieldProblem(f"tables.{name}.{field_name}", why, "use the same, or leave init_from out")


class _Matching:
    """Matching of a job's features with the parent's features of the same name, or of the name before renaming."""

    def __init__(self, job: JobSpec, dataset: DatasetSpec, parent: DatasetSpec, parent_dim: int) -> None:
        here, there = _read_by(job, dataset), _read_by(job, parent)
        self._job, self._dataset, self._parent, self._here, self._there = job, dataset, parent, here, there
        self._dims = parent_dim, job.model.embedding_dim
        start = job.init_from
        self._dropped = () if start is None else start.dropped
        # Entries for an earlier refresh have no effect: the parent already has the new name.
        renamed = {} if start is None else {old: new for old, new in start.renamed.items() if old in there}
        self._renamed = renamed
        self._former = {new: old for old, new in renamed.items()}
        self._features = {name: former for name in here if (former := self._former.get(name, name)) in there}
        self._fresh = start is not None and start.added == "fresh"

    @property
    def _added(self) -> tuple[str, ...]:
        return tuple(name for name in self._here if name not in self._features)

    @property
    def _gone(self) -> tuple[str, ...]:
        return tuple(name for name in self._there if name not in self._features.values())

    def _own_rows(self, name: str) -> bool:
        """Return True if an added feature begins with untrained rows, or an untrained projection."""
        feature = self._here[name]
        if feature.type == "vector":
            return feature.mode == "projected"
        return feature.has_ids and (feature.shares or name) not in self._tables()

    def _tables(self) -> dict[str, str]:
        return {
            self._here[name].shares or name: self._there[former].shares or former
            for name, former in self._features.items()
            if self._here[name].has_ids and self._there[former].has_ids
        }

    def problems(self) -> Iterator[FieldProblem]:
        for old, new in self._renamed.items():
            if new not in self._here:
                yield FieldProblem(f"init_from.renamed.{old}", f"the dataset has no '{new}'", "name a feature of it")
            elif new in self._there:
                yield FieldProblem(
                    f"init_from.renamed.{old}", f"the parent read '{new}' too", "leave it out: names are matched"
                )
            elif old in self._here:
                yield FieldProblem(
                    f"init_from.renamed.{old}", f"the dataset still has '{old}'", "leave one of the two out"
                )
        for name in self._dropped:
            if name in self._here:
                yield FieldProblem("init_from.dropped", f"the dataset has '{name}'", "leave it out of one of them")
        for name in self._gone:
            if name not in self._dropped and name not in self._renamed:
                alike = [one for one in self._added if self._here[one].type == self._there[name].type]
                renamed = f" {{renamed: {{{name}: {alike[0]}}}}} if that is its new name," if alike else ""
                yield FieldProblem(
                    f"features.{name}",
                    f"the parent read it, and the dataset has no '{name}'",
                    f"put it back, or set init_from:{renamed} {{dropped: [{name}]}} if it is gone for good",
                )
        for name, former in self._features.items():
            yield from self._changes_of(name, former)
        yield from self._order_changes()
        yield from self._table_changes()
        yield from self._item_side_changes()
        if self._pads_all_in_vain() and self._drawn() is None:
            yield FieldProblem(
                "model.embedding_dim",
                f"the parent was trained with {self._dims[0]}, the job asks for {self._dims[1]}, and products of "
                "columns that all begin at zero never learn",
                f"use {self._dims[0]}, use a feature of ids that shares its table with no other feature, with init of "
                "kind hash or normal, or leave init_from out",
            )
        if not self._fresh:
            yield from self._unsilent()

    def _changes_of(self, name: str, former: str) -> Iterator[FieldProblem]:
        here = _in_words(name, self._here[name], self._dataset, self._job)
        there = _in_words(former, self._there[former], self._parent, self._job)
        for aspect, was in there.items():
            if here.get(aspect) != was:
                yield FieldProblem(
                    f"features.{name}",
                    f"the parent read '{former}' with {aspect} {was}, the dataset has {aspect} {here.get(aspect)}",
                    "use the same, give the feature another name, or leave init_from out",
                )
                return

    def _order_changes(self) -> Iterator[FieldProblem]:
        """Yield a problem if the order of features changed and the model depends on it."""
        here, there = (
            [name for name, one in features.items() if not one.gives_numbers] for features in (self._here, self._there)
        )
        number = len(here) + any(one.gives_numbers for one in self._here.values())
        if self._job.model.reads_in_order(number) and [self._features.get(name) for name in here] != there:
            yield FieldProblem(
                "features",
                f"{self._job.model.kind} adds {number} vectors to {number} outputs in their order, the parent read "
                f"{', '.join(there)}, the dataset has {', '.join(here)}",
                "use the parent's, or leave init_from out",
            )

    def _table_changes(self) -> Iterator[FieldProblem]:
        """Yield a problem for each feature that shares a table with other features than in the parent."""
        former_tables: dict[str, str] = {}
        for name, former in self._features.items():
            if not self._here[name].has_ids:
                continue
            table, before = self._here[name].shares or name, self._there[former].shares or former
            if former_tables.setdefault(table, before) != before or self._tables().get(table) != before:
                yield self._shared(name, before, table)
        by_parent: dict[str, str] = {}
        for table, before in former_tables.items():
            if by_parent.setdefault(before, table) != table:
                yield self._shared(table, before, table)

    def _shared(self, name: str, before: str, table: str) -> FieldProblem:
        return FieldProblem(
            f"features.{name}.shares",
            f"features share tables differently: the parent read it from table '{before}', the dataset has table "
            f"'{table}'",
            "share tables as the parent did, give the feature another name, or leave init_from out",
        )

    def _item_side_changes(self) -> Iterator[FieldProblem]:
        if not self._job.model.reads_items:
            return
        here, there = (one.items is not None and bool(one.items.features) for one in (self._dataset, self._parent))
        if here != there:
            kinds = {True: "computed by a tower over features of items", False: "rows of a table"}
            yield FieldProblem(
                "items",
                f"the parent's vectors of items are {kinds[there]}, the job's are {kinds[here]}",
                f"{'leave the item table out' if here else 'keep the item table'}, or leave init_from out and publish "
                "to a new collection",
            )

    def _pads_all_in_vain(self) -> bool:
        """Return True if new columns that are all zero would stay zero."""
        has_numbers = any(one.gives_numbers for one in self._here.values())
        return self._dims[0] != self._dims[1] and not self._job.model.learns_from_padding(has_numbers)

    def _drawn(self) -> tuple[str, int] | None:
        """Return :attr:`Inheritance.drawn`: in each product of vectors, one factor's new columns must not be zero."""
        if self._job.model.effective_init.kind == "zero":
            return None
        if self._job.model.has_both_sides_in_rows:
            return self._here["item"].shares or "item", 1
        read = [one.shares or name for name, one in self._here.items() if one.has_ids]
        alone = [table for table in self._tables() if read.count(table) == 1]
        # Prefer another table to that of items, whose vectors are published and should begin as they were.
        return min(((table, 0) for table in alone), key=lambda one: one[0] == "item", default=None)

    def _unsilent(self) -> Iterator[FieldProblem]:
        """Yield a problem for each added feature that would change the parent's scores before the first step."""
        takes, kind = self._job.model.adds_features, self._job.model.kind
        for name in self._added:
            why = None
            if takes == "none":
                why = f"{kind} normalises all features together, so every added feature changes the scores"
            elif takes == "own_rows" and self._here[name].has_ids and not self._own_rows(name):
                why = f"{kind} adds rows to its scores without a weight, and the rows of '{name}' are already trained"
            if why is not None:
                remedy = "set init_from: {added: fresh} to accept other scores at the start, or leave the feature out"
                yield FieldProblem(f"features.{name}", why, remedy)

    def inheritance(self) -> Inheritance:
        notes = []
        if self._added:
            how = "as in a new model" if self._fresh else "at zero, so that scores are the parent's"
            notes.append(f"init_from: {_listed(self._added)} added to the parent's features, and begins {how}")
        if self._gone:
            notes.append(f"init_from: {_listed(self._gone)} of the parent dropped")
        notes += [
            f"init_from: '{name}' continues with what the parent learned of '{former}'"
            for name, former in self._features.items()
            if name != former
        ]
        before, after = self._dims
        if before != after:
            notes.append(f"init_from: vectors have {after} columns, of which the first {before} are the parent's")
            if self._job.publish is not None:
                notes.append(
                    f"publish: no rotation maps {before} coordinates to {after}: if the served version of "
                    f"'{self._job.publish.collection}' has {before}, the gate holds the new version, which "
                    "begins a new anchor generation; to change nothing for consumers, publish to another collection"
                )
        return Inheritance(
            self._features,
            self._tables(),
            self._added,
            self._gone,
            frozenset(name for name in self._added if self._own_rows(name)),
            not self._fresh,
            self._dims,
            self._drawn() if self._pads_all_in_vain() else None,
            tuple(notes),
        )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _in_words(name: str, feature: Feature, dataset: DatasetSpec, job: JobSpec) -> dict[str, Any]:
    """Return the settings of a feature that change what a model learns from it, keyed by name."""
    found: dict[str, Any] = {"type": feature.type, "part of": "items" if name not in dataset.features else "the rows"}
    if feature.is_list and not job.model.reads_sequences:
        found["pooling"] = feature.pooling
    if feature.has_ids:
        found |= {"weights": "yes" if feature.weights is not None else "no", **feature.made_of}
    elif feature.type == "dense":
        found |= {"transform": feature.transform, "missing": "mean" if feature.missing is None else feature.missing}
    else:
        found |= {"dim": feature.dim, "transform": feature.transform, "mode": feature.mode}
    return found


def check_columns(
    job: JobSpec,
    dataset: DatasetSpec,
    parent_dataset: DatasetSpec,
    found: Inheritance,
    parent_columns: Collection[str] = (),
) -> list[str]:
    """Check that features read the parent's columns, and return messages about renamed columns and joined files.

    A feature may read another column only if the column was renamed: today's file lacks the former column, and the
    parent's rows had no column of the new name. ``parent_columns``: the columns of the parent's rows, as far as known.

    Raises:
        InvalidFieldsError: a feature reads another column than in the parent, which is not just a new name.
    """
    there = _columns_read(parent_dataset, job)
    notes = []
    for (name, part), (uri, column) in _columns_read(dataset, job).items():
        former_uri, former = there.get((found.features.get(name, name), part), (uri, column))
        file, former_file = (_NUMBER.sub("", one.rstrip("/").rpartition("/")[2]) for one in (uri, former_uri))
        if part == "join" and file != former_file:
            notes.append(f"'{name}' is joined from {uri}, the parent's from {former_uri}: check that it is the same")
        if column == former:
            continue
        is_of_rows = uri == dataset.uri
        here = dataset.messages.columns if is_of_rows and dataset.messages is not None else Source(uri).column_names()
        if former in here or (is_of_rows and column in parent_columns):
            problem = FieldProblem(
                f"features.{name}",
                f"the parent read column '{former}' ({part}), the dataset reads '{column}'",
                f"read '{former}' again, or give the feature that reads '{column}' a name of its own; a renamed column "
                f"is accepted if the file has no '{former}' any more and the parent's rows had no '{column}'",
            )
            raise InvalidFieldsError([problem])
        notes.append(f"'{name}' reads column '{column}', which takes the place of the parent's '{former}'")
    return notes


def _columns_read(dataset: DatasetSpec, job: JobSpec) -> dict[tuple[str, str], tuple[str, str]]:
    """Return (file, column) by (feature, part), such as ("item", "column"), for the features that the model reads."""
    model = job.model
    names = ("item",) if model.reads_sequences else ("user", "item") if model.reads_pairs else tuple(dataset.features)
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for name in names:
        feature = dataset.features[name]
        columns = {"weights": feature.weights}
        if feature.join is not None:
            columns["join.on"] = dataset.column_of(feature.join.on)
            found[name, "join"] = beside(feature.join.uri, dataset.uri), feature.join.column
        elif feature.derive is not None:
            columns |= {f"derive.{one}": dataset.column_of(getattr(feature.derive, one)) for one in ("previous", "by")}
            columns["derive.order"] = feature.derive.order
        else:
            columns["column"] = feature.column or name
        found |= {(name, part): (dataset.uri, column) for part, column in columns.items() if column is not None}
    if dataset.items is not None:
        uri = beside(dataset.items.uri, dataset.uri)
        found |= {(name, "join"): (uri, one.column or name) for name, one in dataset.items.features.items()}
    return found
