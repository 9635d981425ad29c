"""The error for the user's data: what is wrong, where, and the remedy. Torch-free."""

from __future__ import annotations

import functools
from typing import Any


class DataError(ValueError):
    """Rows that cannot be trained on as the spec asks.

    ``where`` names file, column and row (counted from 0, as pandas and pyarrow do); ``remedy`` says what to do.
    """

    code = "bad_data"

    def __init__(self, what: str, *, where: str, remedy: str):
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(f"{where}: {what} ({remedy})")

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), where=self.where, remedy=self.remedy), (self.what,)


class DataAwayError(DataError):
    """The storage of the rows does not answer; nothing is known of the rows, and a later attempt may find them."""

    code = "data_away"


class Stopped(Exception):
    """Reading was stopped because the rows are no longer needed."""


class DataMemoryError(DataError):
    """Rows could not be read for lack of memory; the rows themselves may be valid."""

    code = "out_of_memory"
