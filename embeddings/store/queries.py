"""A version's query tower in onnxruntime: from the features or histories in requests to vectors of users."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from embeddings.store.files import StoreError
from embeddings.vectors.item_vectors import Array
from embeddings.vectors.query_tower import LENGTHS, OUTPUTS

_MISSING: dict[str, Any] = {"int64": -(2**63), "string": "\x1a"}
"""Ids that no table has, for features that a query leaves out."""
_AT_ONCE = 1024


class NoTower(StoreError):
    """The version has no query tower, or not one of this kind of query."""


class RuntimeMissing(StoreError):
    """The package onnxruntime is not installed."""


class QueryError(ValueError):
    """A query that the version's tower cannot read; ``field``: its path in the request."""

    def __init__(self, field: str, message: str, remedy: str):
        super().__init__(f"{field}: {message}: {remedy}")
        self.field, self.message, self.remedy = field, message, remedy


class Queries(NamedTuple):
    """Answers of a tower: vectors float32 [n, d], offsets float32 [n], and a mask of the queries with a known id."""

    vectors: Array
    offsets: Array
    known: Array


class QuerySession:
    """The tower of a version, loaded; thread-safe.

    ``entry`` is the manifest's entry ``users``, ``model`` the bytes of the tower's file, or None without a tower.

    Raises:
        NoTower: the version has no tower.
        RuntimeMissing: onnxruntime is not installed.
    """

    def __init__(self, version: str, entry: Mapping[str, Any], model: Any):
        if model is None:
            raise NoTower(
                f"version {version} has no query tower: ask for ids of users, or publish by a job of two_tower, "
                "sasrec, gru4rec or hstu, whose log has the reason if it made none"
            )
        try:
            import onnxruntime
        except ImportError:
            raise RuntimeMissing(
                "features and histories are read by onnxruntime, which is not installed: pip install onnxruntime"
            ) from None
        self._version, self._tower = version, entry["tower"]
        options = onnxruntime.SessionOptions()
        # Requests are answered side by side; threads of one would take the cores of others.
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(bytes(model), options, providers=["CPUExecutionProvider"])
        shapes = {one.name: one.shape for one in self._session.get_inputs()}
        self._lengths = {name: shape[1] for name, shape in shapes.items() if len(shape) > 1}
        self._lock = threading.Lock()

    def of_features(self, queries: Sequence[Mapping[str, Any]]) -> Queries:
        """Return the answers to ``queries``, mappings from features to an id or a list of ids.

        A feature that is left out or None counts as unknown, a list as empty.

        Raises:
            NoTower: the tower reads histories.
            QueryError: a feature that the tower does not read, or ids of another type.
        """
        self._require("features")
        inputs: Mapping[str, Any] = self._tower["inputs"]
        for number, query in enumerate(queries):
            for name in query.keys() - inputs.keys():
                names = ", ".join(inputs)
                raise QueryError(
                    f"features.{number}.{name}", f"version {self._version} reads no such feature", f"it reads {names}"
                )
        columns = {name: [query.get(name) for query in queries] for name in inputs}
        return self._answers({name: self._column(name, column, "features") for name, column in columns.items()})

    def of_histories(self, histories: Sequence[Sequence[Any]]) -> Queries:
        """Return the answers to ``histories``, lists of item ids, oldest first; the last items of each are read.

        Raises:
            NoTower: the tower reads features.
            QueryError: ids of another type.
        """
        self._require("histories")
        (name,) = self._tower["inputs"]
        return self._answers({name: self._column(name, list(histories), "histories")})

    def _require(self, kind: str) -> None:
        if self._tower["of"] != kind:
            raise NoTower(f"version {self._version} reads {self._tower['of']}, not {kind}: ask for {self._tower['of']}")

    def _column(self, name: str, column: list[Any], field: str) -> list[Any]:
        """Return a feature's ids with a stand-in for missing ids, after a check of their type."""
        kind, is_list = self._tower["inputs"][name]["ids"], self._tower["inputs"][name]["list"]
        for number, value in enumerate(column):
            where = f"{field}.{number}" if field == "histories" else f"{field}.{number}.{name}"
            if is_list and not isinstance(value, list | tuple | type(None)):
                raise QueryError(where, "is one id, and a list is expected", "write [ID, ...]")
            for identifier in (value or ()) if is_list else () if value is None else (value,):
                if not is_id(identifier, kind):
                    raise QueryError(where, f"{identifier!r} is no {kind}", f"ids of '{name}' are {kind}")
        return (
            [value or () for value in column] if is_list else [_MISSING[kind] if one is None else one for one in column]
        )

    def _answers(self, columns: Mapping[str, list[Any]]) -> Queries:
        num_queries = len(next(iter(columns.values())))
        parts = [
            self._run({name: column[start : start + _AT_ONCE] for name, column in columns.items()})
            for start in range(0, max(num_queries, 1), _AT_ONCE)
        ]
        return Queries(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _run(self, columns: Mapping[str, list[Any]]) -> list[Array]:
        given: dict[str, Array] = {}
        for name, column in columns.items():
            kind = self._tower["inputs"][name]["ids"]
            dtype: Any = np.int64 if kind == "int64" else object
            if name not in self._lengths:
                given[name] = np.array(column, dtype=dtype)
                continue
            # A history has a fixed length; other lists are as long as the longest.
            most = self._lengths[name]
            if not isinstance(most, int):
                most = max(1, max(map(len, column), default=1))
            cut = [list(ids[-most:]) for ids in column]
            padded = np.full((len(cut), most), _MISSING[kind], dtype=dtype)
            for row, ids in zip(padded, cut, strict=True):
                row[: len(ids)] = ids
            given[name] = padded
            given[name + LENGTHS] = np.array(list(map(len, cut)), dtype=np.int64)
        return list(self._session.run(list(OUTPUTS), given))


def is_id(value: Any, kind: str) -> bool:
    """Return True if a value is an id of a kind, int64 or string."""
    if kind == "string":
        return isinstance(value, str)
    return type(value) is int and -(2**63) <= value < 2**63
