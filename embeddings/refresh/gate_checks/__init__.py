"""What the gate measures of a candidate, and by which limits: a file for each check, entered in ``registry``.

Without torch. ``embeddings.refresh.gate`` and ``gate_metrics`` read the registry; a check reads the ``Comparison``.
"""
