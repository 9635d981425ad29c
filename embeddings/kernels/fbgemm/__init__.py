"""FBGEMM behind the kernel interface: its CPU kernels, its own module on GPUs, its cache of tables.

The CPU kernels run on the storage of :mod:`embeddings.kernels.layout`. Only :mod:`embeddings.kernels.backends` creates
these kernels.
"""
