"""Embedding tables: their configuration, their initial rows, and the generator that draws them.

``config`` and ``philox`` need no torch. Other packages import ``EmbeddingTables`` and ``TableConfig`` from
``embeddings``.
"""
