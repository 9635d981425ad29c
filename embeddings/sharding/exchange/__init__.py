"""What ranks tell one another: ids to the ranks of their rows, rows and partial sums back, faults to all.

For :mod:`embeddings.sharding` alone.
"""
