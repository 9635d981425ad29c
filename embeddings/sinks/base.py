"""The interface of a sink, and the rows that it loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from embeddings.vectors.item_vectors import Array


class SinkError(ValueError):
    """A sink that cannot be opened or loaded; the message says where, why, and the remedy."""


class SinkBusy(SinkError):
    """Another process is loading the table."""


class Batch(NamedTuple):
    """Consecutive rows of a version, ascending by id.

    ``keys``: int64 or bytes [n] (see embeddings.vectors.item_vectors). ``statuses``: uint8 [n]. ``norms``: float32 [n].
    ``vectors``: float32 [n, dim].
    """

    keys: Array
    statuses: Array
    norms: Array
    vectors: Array


@dataclass(frozen=True)
class Content:
    """The items of a version that have a vector, for one load.

    Attributes:
        table: name that readers use.
        identity: identity of the rows: two contents of the same identity are equal.
        id_type: int64 or string.
        batches: function that yields the rows; it raises an error if the rows must not be shown any more.
    """

    table: str
    version: str
    identity: str
    id_type: str
    dim: int
    num_rows: int
    batches: Callable[[], Iterator[Batch]]


class Sink(Protocol):
    """Tables of vectors in a database that is not Evenkeel's. Readers always see one whole version of a table.

    Methods block, and are called from several processes. If a process is killed, readers see what they saw before, and
    the next ``load`` removes what is left over.
    """

    def holds(self, table: str) -> str | None:
        """Return the identity of the content that readers of a table see; None if there is no content."""
        ...

    def load(self, content: Content) -> None:
        """Load a new content while readers see the old content, then switch all readers in one step.

        If readers see that content already, nothing changes.

        Raises:
            SinkBusy: another process is loading the table.
        """
        ...

    def purge(self, table: str) -> None:
        """Remove all rows, whatever their version, that readers of the table's present version do not see."""
        ...

    def drop(self, table: str) -> None:
        """Remove the table with all its rows; do nothing if there is none."""
        ...
