"""Executors, which start, watch and end runs on this host or a cluster. All share a protocol and contract tests."""
