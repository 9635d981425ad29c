"""Executors, which start, watch and end runs on this host or a cluster: one protocol, one contract test suite."""
