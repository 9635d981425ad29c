"""Backends for remote stores: S3 and Redis, each with a local mirror of the store's documents.

Only :func:`embeddings.store.open_store` opens them.
"""
