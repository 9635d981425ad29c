"""Settings of a dynamic table: its capacity, the admission of new ids and the eviction of old ids; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UNKNOWN_ROW, FIRST_ROW = 1, 2
MAX_ADMISSION_THRESHOLD = 255
MAX_CAPACITY = 2**31 - 1024


@dataclass(frozen=True)
class IdMapSettings:
    """Rules by which ids get and lose a row of a dynamic table.

    Attributes:
        capacity: largest number of ids that have a row at the same time. Memory is allocated as ids get rows.
        admission_threshold: number of occurrences after which an id gets a row, at most 255; until then it reads the
            row of unknown ids. A threshold above 1 counts occurrences in a sketch of 32 bytes for each row, which may
            overestimate them. Counts are forgotten after one to two times ``capacity`` occurrences of ids without a
            row.
        ttl_steps: number of steps without an occurrence after which an id loses its row; the search for such ids runs
            every ``ttl_steps`` / 8 steps. None: ids never expire.
        eviction_policy: action when the table is full. ``oldest``: evict the ids that occurred longest ago, 1/64 of
            ``capacity`` at once, but none of the current step. ``refuse``: let new ids read the row of unknown ids
            until others expire.
    """

    capacity: int
    admission_threshold: int = 1
    ttl_steps: int | None = None
    eviction_policy: Literal["oldest", "refuse"] = "oldest"

    def __post_init__(self) -> None:
        if not 1 <= self.capacity <= MAX_CAPACITY:
            raise ValueError(f"capacity must lie in [1, {MAX_CAPACITY}], not {self.capacity}")
        if not 1 <= self.admission_threshold <= MAX_ADMISSION_THRESHOLD:
            raise ValueError(
                f"admission_threshold must lie in [1, {MAX_ADMISSION_THRESHOLD}], not {self.admission_threshold}"
            )
        if self.ttl_steps is not None and self.ttl_steps < 1:
            raise ValueError(f"ttl_steps must be at least 1, not {self.ttl_steps}: leave it out if ids never expire")
        if self.eviction_policy not in ("oldest", "refuse"):
            raise ValueError(f"eviction_policy '{self.eviction_policy}' is unknown: use oldest or refuse")

    @property
    def num_rows(self) -> int:
        """The number of rows of the table: padding, the row of unknown ids, and ``capacity`` others."""
        return FIRST_ROW + self.capacity

    @property
    def expiry_period(self) -> int:
        """Steps from one search for expired ids to the next."""
        return max(1, (self.ttl_steps or 8) // 8)

    @property
    def eviction_count(self) -> int:
        """The number of oldest ids that are evicted together, because finding them takes a pass over all ids."""
        return max(1, self.capacity // 64)

    @property
    def num_blocks(self) -> int:
        """The number of 64-counter blocks in the sketch: a power of two, at least 2, with 16 counters per row."""
        return int(2 ** max(1, (-(-self.capacity // 4) - 1).bit_length()))
