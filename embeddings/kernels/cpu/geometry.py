"""Columns of the feature description given to compiled code, int64 [F, 11].

FIRST is the first row that adds something (1 after a padding row, else 0), LIVE how many do: one unsigned comparison,
``uint64(row - FIRST) < LIVE``, leaves out both padding and ids outside the table. ROW_BITS is
how many bits row numbers have.
"""

TABLE, COLUMN, DIM, MEAN, ROWS, FIRST, LIVE, WEIGHT_BASE, VECTOR_BASE, STEP_BASE, ROW_BITS = range(11)
