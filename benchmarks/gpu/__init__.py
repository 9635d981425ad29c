"""What runs on a machine with a GPU: tests, and kernels and whole steps timed beside their peers.

`python -m benchmarks.gpu` (`make gpu-check`) runs it in stages, each of which writes what it found at once.
"""
