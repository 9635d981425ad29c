"""The types of stored rows and of their optimizer's state: what jobs, kernels and estimates read. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElementType:
    """A type of stored elements.

    Args:
        name: torch's, as jobs write it.
        num_bytes: of an element.
        compute: the name of the type in which rows of it are summed, moved and returned.
        cpu_number: its ``ElementType`` in embeddings/kernels/cpu/src/interface.h; None: that kernel has none.
        in_jobs: whether a job may ask for it.
        in_rows: whether rows may have it, which every kernel rounds in a way of its own; else the state alone.
        holds_mean_squares: whether running means of squares fit: below its smallest number they become 0, and rows are
            then moved by m or g / eps.
    """

    name: str
    num_bytes: int
    compute: str = "float32"
    cpu_number: int | None = None
    in_jobs: bool = True
    in_rows: bool = True
    holds_mean_squares: bool = True


ELEMENT_TYPES: dict[str, ElementType] = {
    one.name: one
    for one in (
        ElementType(name="float64", num_bytes=8, compute="float64", cpu_number=0, in_jobs=False),
        ElementType(name="float32", num_bytes=4, cpu_number=1),
        ElementType(name="float16", num_bytes=2, cpu_number=2, holds_mean_squares=False),
        ElementType(name="bfloat16", num_bytes=2, cpu_number=3),
    )
}
"""Types by name, in the order of error messages."""

JOB_TYPES = tuple(name for name, one in ELEMENT_TYPES.items() if one.in_jobs)
JOB_ROW_TYPES = tuple(name for name in JOB_TYPES if ELEMENT_TYPES[name].in_rows)
DEFAULT_TYPE = "float32"
