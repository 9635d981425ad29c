"""Base class of table formats such as Delta Lake. Torch-free."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from trainer.data.errors import DataError
from trainer.data.sources.locations import FilePath
from trainer.data.sources.readers.base import Reader
from trainer.spec.uri_schemes import is_object

Parts = tuple[str, ...]


@dataclass(frozen=True)
class TableFile:
    """One file with rows: its path below the table's folder, and the log's partition values of its rows."""

    parts: Parts
    partitions: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A version of a table: its files, their reader, and the types of the partition columns."""

    version: str
    files: tuple[TableFile, ...]
    reader: Callable[[Sequence[FilePath]], Reader]
    partition_types: Mapping[str, pa.DataType] = field(default_factory=dict)


class TableFormat(ABC):
    """A format of folders whose log says which files belong to the table."""

    name: ClassVar[str]
    """Name of the format, as error messages write it."""
    extra: ClassVar[str]
    """The extra of this package that installs its library."""
    module: ClassVar[str]
    """Name of the module of the library that reads the format."""

    @abstractmethod
    def root_of(self, parts: Parts) -> Parts | None:
        """Return the folder of the table whose log contains the file at these parts; None if no log does."""

    def is_log(self, parts: Parts) -> bool:
        """Return True if the file at these parts may be part of a table's log."""
        return self.root_of(parts) is not None

    @abstractmethod
    def open(self, uri: str, files: Mapping[Parts, FilePath]) -> Snapshot:
        """Return the latest version of the table at ``uri``, a local folder that holds ``files``."""

    def snapshot(self, uri: str, root: Parts, files: Mapping[Parts, FilePath]) -> Snapshot:
        """Return the result of :meth:`open` for a folder in which a log of this format was found, in ``root`` below it.

        Raises:
            DataError: the table cannot be read.
        """
        if root:
            raise DataError(
                f"holds a table of {self.name} in {'/'.join(root)}",
                where=uri,
                remedy="name the folder of the table itself: its log says which of its files hold rows",
            )
        if is_object(uri):
            raise self.refused(uri, "a table of {name} can only be read from a folder of this machine", "copy it here")
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            what = "is a table of {name}, whose log says which of its files hold rows, and " + str(error)
            raise self.refused(uri, what, f"pip install 'evenkeel[{self.extra}]'") from None
        try:
            found = self.open(uri, files)
        except DataError:
            raise
        except Exception as error:  # Libraries raise errors of their own, many without a common base class.
            what = f"cannot be read as a table of {{name}}: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise self.refused(uri, what, "check that the table is complete") from error
        if not found.files:
            raise DataError(f"is a table of {self.name} without rows", where=uri, remedy="point at data with rows")
        return found

    def refused(self, where: str, what: str, remedy: str) -> DataError:
        """Return the error for a table that cannot be read, with a remedy that always applies."""
        return DataError(
            what.replace("{name}", self.name), where=where, remedy=f"{remedy}, or write its rows as plain Parquet files"
        )

    def outside(self, uri: str, path: str) -> DataError:
        """Return the error for a file that the log names and the folder does not have."""
        return self.refused(
            uri, f"its log names {path}, which is not in the folder", "check that the table is complete"
        )
