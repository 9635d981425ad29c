"""Embedding tables: their configuration, their first rows, and lookup, backward and step over any kernel.

``config`` and ``philox`` need no torch. Outsiders take ``EmbeddingTables`` and ``TableConfig`` from ``embeddings``.
"""
