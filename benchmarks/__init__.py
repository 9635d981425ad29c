"""Benchmarks: each figure in the documents comes from one file here, measured side by side with a peer."""
