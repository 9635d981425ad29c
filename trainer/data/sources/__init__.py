"""Sources of rows: files here or in object storage, of the formats in ``readers``, joins, and a synthetic click log.

Without torch. Read by :mod:`trainer.data.prepare`; ``infer`` and ``locations`` also by the service.
"""
