"""The types of stored rows and of optimizer state, as used by jobs, kernels and memory estimates; without torch."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE_TYPE = "float32"
"""Type in which jobs sum and update rows."""


@dataclass(frozen=True, kw_only=True)
class ElementType:
    """A type of stored elements.

    Args:
        name: torch's name of the type, as jobs write it.
        num_bytes: bytes of an element.
        compute: name of the type in which rows of this type are summed, updated and returned.
        in_jobs: True if a job may ask for it.
        in_rows: True if rows may have this type, for which each kernel needs its own rounding; else only state may.
        holds_mean_squares: True if it can hold running means of squares. Values below its smallest number become 0, and
            then steps of m / eps or g / eps move the rows.
    """

    name: str
    num_bytes: int
    compute: str = COMPUTE_TYPE
    in_jobs: bool = True
    in_rows: bool = True
    holds_mean_squares: bool = True


ELEMENT_TYPES: dict[str, ElementType] = {
    one.name: one
    for one in (
        ElementType(name="float64", num_bytes=8, compute="float64", in_jobs=False),
        ElementType(name="float32", num_bytes=4),
        ElementType(name="float16", num_bytes=2, holds_mean_squares=False),
        ElementType(name="bfloat16", num_bytes=2),
    )
}
"""Types, keyed by name, in the order in which error messages list them."""

JOB_TYPES = tuple(name for name, one in ELEMENT_TYPES.items() if one.in_jobs)
JOB_ROW_TYPES = tuple(name for name in JOB_TYPES if ELEMENT_TYPES[name].in_rows)
