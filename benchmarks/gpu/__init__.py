"""Tests and benchmarks for a machine with a GPU: kernels and whole steps, timed in turns with their peers.

`python -m benchmarks.gpu` (`make gpu-check`) runs them in stages; each writes its results at once.
"""
