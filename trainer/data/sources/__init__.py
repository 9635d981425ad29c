"""Sources of rows: Parquet and CSV files here or in object storage, joins, and a synthetic click log.

Without torch. Read by :mod:`trainer.data.prepare`; ``infer`` and ``locations`` also by the service.
"""
