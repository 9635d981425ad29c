"""Exchanges between ranks: ids to the ranks that hold their rows, rows and partial sums back, errors to all.

Internal to :mod:`embeddings.sharding`.
"""
