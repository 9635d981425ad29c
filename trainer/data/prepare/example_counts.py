"""Number of training examples that have each table row in one feature. Torch-free.

A table's row counts differ: they cover all features of the table, and drawn negatives count.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.columns.jagged import Jagged
from trainer.data.prepare.arrays import CODE, LABEL, LABELS, map_array, map_jagged

_PIECE_EXAMPLES = 1 << 22


def example_counts(
    split: Path, feature: str, num_rows: int, *, is_list: bool = False, drawn_negatives: bool = False
) -> npt.NDArray[np.int64]:
    """Return, for each table row, the number of a split's examples whose feature has that row.

    In a feature of lists every element counts.

    ``split`` is the folder of the split, ``num_rows`` the number of rows of the feature's table. With
    ``drawn_negatives``, examples with label 0 are drawn negatives, which do not count.

    Returns:
        Counts, int64 [num_rows].
    """
    column = map_jagged(split / feature, CODE) if is_list else map_array(split / f"{feature}.bin", CODE)
    num_examples = len(column.offsets) - 1 if isinstance(column, Jagged) else len(column)
    counts = np.zeros(num_rows, dtype=np.int64)
    for start in range(0, num_examples, _PIECE_EXAMPLES):
        stop = min(start + _PIECE_EXAMPLES, num_examples)
        own = np.ones(stop - start, dtype=bool)
        if drawn_negatives:
            own = np.asarray(map_array(split / LABELS, LABEL)[start:stop]) > 0
        if isinstance(column, Jagged):
            ends = column.offsets[start : stop + 1]
            values, own = column.values[int(ends[0]) : int(ends[-1])], np.repeat(own, np.diff(ends))
        else:
            values = column[start:stop]
        counts += np.bincount(np.asarray(values)[own], minlength=num_rows)
    return counts
