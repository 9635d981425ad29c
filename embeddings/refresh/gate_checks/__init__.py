"""Checks of the publication gate: a file for each measurement of a candidate and its limits, listed in ``registry``.

Torch-free. ``embeddings.refresh.gate`` and ``gate_metrics`` read the registry; a check reads the ``Comparison``.
"""
