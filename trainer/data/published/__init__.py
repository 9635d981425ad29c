"""Public data sets that examples and recipes read: their publishers' addresses, and the conversion to Parquet files.

Without torch. No data is part of this repository: each set keeps the terms of its publisher.
"""
