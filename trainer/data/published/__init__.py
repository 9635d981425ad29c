"""Public data sets that examples and recipes read: where their publishers have them, and how they become Parquet files.

Without torch. No data is part of this repository: each set keeps the terms of its publisher.
"""
