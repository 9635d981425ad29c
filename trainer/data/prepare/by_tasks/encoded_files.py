"""Writing of encoded rows as files of a folder. Another host can open the files. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.jagged import Jagged
from trainer.data.columns.vocabulary import Codes
from trainer.data.prepare.arrays import CODE, OFFSET, map_array, open_ids, write_ids
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.plan import DataPlan
from trainer.storage.shared_directory import link_or_copy


def ids_file(folder: Path, domain: int) -> Path:
    """Return the path of the file with a domain's distinct ids; ``domain`` is its number among ``plan.kinds``."""
    return folder / f"ids-{domain}.arrow"


def write_encoded(plan: DataPlan, encoded: Encoded, folder: Path) -> dict[str, str]:
    """Write encoded rows as the files that :func:`open_encoded` reads; return the types of values by column name.

    Arrays that are memory-mapped files already are linked or copied.
    """
    for number, domain in enumerate(plan.kinds):
        write_ids(ids_file(folder, number), encoded.codes[domain].ids)
    for name, array in _arrays(plan, encoded):
        if isinstance(array, np.memmap) and array.filename is not None and array.offset == 0:
            link_or_copy(Path(array.filename), folder / name)
        else:
            array.tofile(folder / name)
    return {name: array.dtype.str for name, array in encoded.values.items()}


def open_encoded(plan: DataPlan, folder: Path, num_rows: int, types: dict[str, str]) -> Encoded:
    """Return encoded rows, memory-mapped.

    Args:
        plan: plan by which the rows were encoded.
        folder: folder that :func:`write_encoded` has written.
        num_rows: number of rows.
        types: result of :func:`write_encoded`.
    """
    columns: dict[Any, Any] = {}
    for number, use in enumerate(plan.uses):
        if use.is_list:
            values = map_array(folder / f"column-{number}.values", CODE)
            columns[use] = Jagged(values, map_array(folder / f"column-{number}.offsets", OFFSET))
        else:
            columns[use] = map_array(folder / f"column-{number}", CODE)
    return Encoded(
        num_rows,
        {domain: Codes(open_ids(ids_file(folder, number))) for number, domain in enumerate(plan.kinds)},
        columns,
        {
            one.name: map_array(folder / plan.value_file(one.name), types[one.name]).reshape(-1, *one.shape)
            for one in plan.values
            if one.name in types
        },
    )


def _arrays(plan: DataPlan, encoded: Encoded) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for number, use in enumerate(plan.uses):
        column = encoded.columns[use]
        if isinstance(column, Jagged):
            yield f"column-{number}.values", column.values
            yield f"column-{number}.offsets", column.offsets
        else:
            yield f"column-{number}", column
    for name, array in encoded.values.items():
        yield plan.value_file(name), array
