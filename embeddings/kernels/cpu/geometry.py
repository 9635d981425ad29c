"""Columns of the feature description given to compiled code, int64 [F, 10].

FIRST is the first row that adds something (1 after a padding row, else 0), LIVE how many do: one unsigned comparison,
``uint64(row - FIRST) < LIVE``, leaves out both padding and ids outside the table.
"""

TABLE, COLUMN, DIM, MEAN, ROWS, FIRST, LIVE, WEIGHT_BASE, VECTOR_BASE, STEP_BASE = range(10)
