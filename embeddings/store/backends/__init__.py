"""Where a store that is not a local folder lies: S3 and Redis behind a mirror of its documents.

Opened by :func:`embeddings.store.open_store` alone.
"""
