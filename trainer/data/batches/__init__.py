"""From prepared columns to a rank's batches of tensors, in one global order.

``prepared.PreparedData`` is the way in.
"""
