"""Benchmarks: each figure in the documents comes from one file here, measured side by side with a peer.

A module's defaults take at most three minutes; ``--full`` has what the reports have, where that takes longer.
"""
