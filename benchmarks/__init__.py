"""Benchmarks: each figure in the documents comes from one file here, measured side by side with a peer.

A module's defaults take at most three minutes; ``--full`` measures what the reports show, if that takes longer.
"""
