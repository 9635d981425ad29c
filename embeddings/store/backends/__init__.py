"""Backends of a store that is not a local folder: S3 and Redis behind a mirror of its documents.

Only :func:`embeddings.store.open_store` opens them.
"""
