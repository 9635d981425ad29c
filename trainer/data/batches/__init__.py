"""Batches of tensors for each rank, from prepared columns, in one global order.

Start reading at ``prepared.PreparedData``.
"""
