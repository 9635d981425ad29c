"""Where rows come from: Parquet and CSV files here or in object storage, joins, the project's own click log.

Without torch. Read by :mod:`trainer.data.prepare`; ``infer`` and ``locations`` also by the service.
"""
