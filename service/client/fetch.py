"""Calls of the client that fetch vectors, snapshots and layers. Only httpx is imported until vectors are requested."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from .http import Json, Session, Unreachable, part

if TYPE_CHECKING:
    import pyarrow as pa

    from .vectors import As, Vectors

ARROW_STREAM = "application/vnd.apache.arrow.stream"
MAX_IDS = 10_000
"""Most ids in one request."""
MAX_USERS, MAX_RECOMMENDED = 1000, 100_000
"""Most users in one request, and most items that it may ask for."""
MAX_QUERY_VALUES = 3500
"""Most values of features or histories in one request, beside ``exclude``."""


class VectorCalls(Session):
    """The methods of :class:`service.client.Client` that fetch vectors, snapshots, layers and neighbours."""

    def snapshot(self, collection: str, path: Path | str, version: str = "current") -> Path:
        """Download all vectors of a version as Parquet; the file appears complete or not at all.

        Raises:
            Unreachable: The download broke off.
        """
        return self._download(f"/collections/{part(collection)}/versions/{part(version)}/snapshot", Path(path))

    def tower(self, collection: str, path: Path | str, version: str = "current") -> Path:
        """Download the query tower of a version as ONNX; the file appears complete or not at all.

        The tower's inputs, ids of features or of items, are named in ``users.tower`` of the version's manifest; its
        outputs are ``vector`` [b, d], ``offset`` [b] and ``known`` [b] (guide: items for a user).

        Raises:
            Unreachable: The download broke off.
        """
        return self._download(f"/collections/{part(collection)}/versions/{part(version)}/tower", Path(path))

    def _download(self, path_of: str, path: Path) -> Path:
        unfinished = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex}.tmp")
        answer = self.request("GET", path_of, stream=True, headers={"Accept": "*/*"})
        try:
            with open(unfinished, "wb") as file:
                for chunk in self._bytes(answer):
                    file.write(chunk)
            os.replace(unfinished, path)
        except httpx.TransportError as error:
            name = path_of.rpartition("/")[2]
            raise Unreachable(f"the {name} broke off: {error or type(error).__name__}", "try again") from None
        finally:
            self._end(answer)
            unfinished.unlink(missing_ok=True)
        return path

    def layer(
        self, name: str, version: str = "current", *, format: str = "safetensors", takes: str = "published"
    ) -> bytes:
        """Return the file of a view's layer for models, with the view in its metadata.

        Args:
            name: The view.
            version: The version that the layer belongs to.
            format: ``safetensors`` (tensor ``frequencies`` U [m, d], for
                ``embeddings.rff.torch_module.RandomFourierLayer.load``) or ``onnx`` (``h`` [batch, d] to ``phi``).
            takes: The input of the layer: ``published`` for published vectors, ``model`` for raw vectors of the
                version's model. With ``model``, U includes the version's alignment.

        Raises:
            ValueError: ``format`` is neither of these.
        """
        accept = {"safetensors": "application/octet-stream", "onnx": "application/onnx"}
        if format not in accept:
            raise ValueError(f"format '{format}' is not one of {', '.join(accept)}")
        params, headers = {"version": version, "takes": takes}, {"Accept": accept[format]}
        return self.request("GET", f"/views/{part(name)}/layer", params=params, headers=headers).content

    def neighbors(
        self, collection: str, *, id: Any = None, vector: Any = None, k: int = 10, version: str = "current"
    ) -> Json:
        """Return the ``k`` nearest items by cosine, to an id or to a vector of the collection's dim.

        Args:
            collection: The collection to search.
            id: Id of the item whose neighbours are sought; the item itself is not returned.
            vector: Numbers [dim], used if no ``id`` is given.
            k: Number of items to return.
            version: Name of a version, or ``current``.

        Returns:
            A mapping with ``version``, ``exact`` and ``items``, a list of mappings with ``id`` and ``cosine``.
            ``exact`` is false if an index chose the candidates.

        Raises:
            ValueError: Neither an id nor a vector is given.
        """
        if id is None and vector is None:
            raise ValueError("neighbors() needs id=, or vector= with the collection's dim")
        query = {"id": _scalar(id)} if id is not None else {"vector": [float(x) for x in vector]}
        body = query | {"k": k, "version": version}
        return self.json("POST", f"/collections/{part(collection)}/neighbors", json=body)

    def recommend(
        self,
        collection: str,
        users: Any = None,
        k: int = 10,
        *,
        features: Any = None,
        histories: Any = None,
        exclude: Any = (),
        exclude_seen: bool = False,
        filter: Mapping[str, Any] | None = None,
        version: str = "current",
    ) -> Json:
        """Return the ``k`` items of highest score for each user, by the model of the version.

        Many users are sent in several requests, all for the version that answered the first request.

        Args:
            collection: A collection whose job publishes users.
            users: Ids of users: a list, or any kind of array, tensor or series.
            k: Largest number of items for each user, at most 1,000.
            features: Instead of ``users``: a list of mappings from features to an id or a list of ids.
            histories: Instead of ``users``: a list of lists of ids of items, oldest first.
            exclude: Ids of items that no user gets.
            exclude_seen: True to leave out the items that the user had in training, or that are in the history.
            filter: Columns of the item table -> values: items have one of the values in each of the columns.
            version: Name of a version, or ``current``.

        Returns:
            A mapping with ``version``, ``exact`` (False if an index chose the items that were compared) and ``users``,
            in the order of the request: mappings with ``id`` (None without ids of users), ``found`` and ``items``, a
            list of mappings with ``id`` and ``score``, best first.

        Raises:
            TypeError: ``users`` is a single id instead of a list.
            ValueError: Not one of users, features and histories is given.
        """
        ways = (("users", users), ("features", features), ("histories", histories))
        given = [(name, queries) for name, queries in ways if queries is not None]
        if len(given) != 1:
            raise ValueError("recommend() needs one of users, features= and histories=")
        ((name, queries),) = given
        asked = _queries(name, queries)
        left_out, found, exact = ids_of(exclude), [], True
        values = {column: ids_of(one) for column, one in (filter or {}).items()}
        at_once = max(1, min(MAX_USERS, MAX_RECOMMENDED // max(k, 1)))
        for block in _blocks(asked, at_once, MAX_QUERY_VALUES):
            body = {
                name: block, "k": k, "exclude": left_out, "exclude_seen": exclude_seen, "filter": values,
                "version": version,
            }  # fmt: skip
            answer = self.json("POST", f"/collections/{part(collection)}/recommend", json=body)
            version = answer["version"]
            exact &= answer["exact"]
            found += answer["users"]
        return {"version": version, "exact": exact, "users": found}

    def vectors_table(
        self,
        collection: str | None = None,
        ids: Any = (),
        *,
        view: str | None = None,
        version: str = "current",
        dtype: str = "float32",
    ) -> pa.Table:
        """Return vectors as a pyarrow Table with columns ``id, status, vector`` (null where missing).

        The parameters have the same meaning as in :meth:`vectors`.
        """
        table, _ = self._fetched(collection, ids, view, version, dtype, None)
        assert table is not None  # only a request with If-None-Match can get a 304
        return table

    def vectors(
        self,
        collection: str | None = None,
        ids: Any = (),
        *,
        view: str | None = None,
        version: str = "current",
        dtype: str = "float32",
        as_: As = "numpy",
        previous: Vectors | None = None,
    ) -> Any:
        """Return vectors in the order requested, duplicates included.

        More than 10,000 ids are fetched in several requests, all from the version that answered the first request.

        Args:
            collection: The collection whose default view (random Fourier features) is fetched; give this or ``view``.
            ids: A list, or any kind of array, tensor or series.
            view: The name of a view to fetch from instead of a collection. ``VIEW@gN`` is a view in anchor generation
                N, ``COLLECTION@gN`` has the vectors of that generation.
            version: Name of a version, or ``current``.
            dtype: ``float32`` or ``float16``.
            as_: ``numpy`` (:class:`service.client.vectors.Vectors`: ``vectors`` [n, dim] is NaN where an id is
                missing), ``torch`` (the same with tensors) or ``polars`` (a DataFrame, null where missing).
            previous: Result of an earlier call with the same arguments, with numpy or torch. If it is still current, it
                is returned and no vectors are sent. The result of a call with other arguments has no effect.

        Raises:
            ValueError: Neither or both of ``collection`` and ``view`` are given, or ``as_`` is none of the three.
            TypeError: ``ids`` is a single id instead of a list.
            ImportError: The library that ``as_`` names is not installed.
        """
        from .vectors import decoded

        ids = ids_of(ids)
        etag_before = previous.etag if previous is not None and _same_but_for_the_first(previous, ids) else None
        table, etag = self._fetched(collection, ids, view, version, dtype, etag_before)
        return previous if table is None else decoded(table, as_, etag)

    def _fetched(
        self, collection: str | None, ids: Any, view: str | None, version: str, dtype: str, etag: str | None
    ) -> tuple[pa.Table | None, str]:
        """Return (table, ETag of the first response); the table is None if ``etag`` is still valid."""
        import pyarrow as pa

        from .vectors import table_of

        if (collection is None) == (view is None):
            raise ValueError("give a collection (its default view is served) or view=NAME, not both")
        path = f"/views/{part(view)}/vectors" if view is not None else f"/collections/{part(str(collection))}/vectors"
        requested = ids_of(ids)
        tables: list[pa.Table] = []
        headers = {"Accept": ARROW_STREAM} | ({"If-None-Match": etag} if etag else {})
        for start in range(0, max(len(requested), 1), MAX_IDS):
            body = {"ids": requested[start : start + MAX_IDS], "version": version, "dtype": dtype}
            answer = self.request("POST", path, json=body, headers=headers)
            if not tables:
                if answer.status_code == 304:
                    return None, str(etag)
                etag, version = answer.headers.get("ETag", ""), answer.headers["Evenkeel-Version"]
                headers = {"Accept": ARROW_STREAM}
            tables.append(table_of(answer.content))
        return (tables[0] if len(tables) == 1 else pa.concat_tables(tables)), etag or ""


def _queries(name: str, queries: Any) -> list[Any]:
    """Return ids of users, features or histories as JSON values."""
    if name == "users":
        return ids_of(queries)
    if name == "histories":
        return [ids_of(one) for one in queries]
    return [
        {feature: ids_of(value) if _is_many(value) else _scalar(value) for feature, value in one.items()}
        for one in queries
    ]


def _is_many(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and bool(getattr(value, "shape", True))


def _blocks(queries: list[Any], most: int, most_values: int) -> Iterator[list[Any]]:
    """Yield blocks of 1 to ``most`` queries, with at most ``most_values`` values in a block of several."""
    block: list[Any] = []
    values = 0
    for query in queries:
        size = _size(query)
        if block and (len(block) == most or values + size > most_values):
            yield block
            block, values = [], 0
        block.append(query)
        values += size
    yield block


def _size(query: Any) -> int:
    """Return the number of values of a query, as the service counts them."""
    if isinstance(query, dict):
        return 2 + sum(map(_size, query.values()))
    return 2 + len(query) if isinstance(query, list) else 1


def _same_but_for_the_first(previous: Vectors, ids: list[Any]) -> bool:
    """Return True if ``previous`` has the same ids beyond those of the first request, which the ETag covers."""
    if len(previous) != len(ids):
        return False
    # Integer ids may be requested as decimal strings.
    return list(map(str, previous.ids[MAX_IDS:])) == list(map(str, ids[MAX_IDS:]))


def ids_of(values: Any) -> list[Any]:
    """Return ids as JSON values, from a list or any kind of array, tensor or series.

    Raises:
        TypeError: ``values`` is a single id (each character of a string would count as an id).
    """
    for method in ("to_pylist", "tolist", "to_list"):
        if hasattr(values, method):
            values = getattr(values, method)()
            break
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"ids must be a list, array, tensor or series: for a single id write [{values!r}]")
    return [_scalar(identifier) for identifier in values]


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
