"""Columns of the feature description given to compiled code, int64 [F, 9]."""

TABLE, COLUMN, DIM, MEAN, ROWS, PADDING, WEIGHT_BASE, VECTOR_BASE, STEP_BASE = range(9)
