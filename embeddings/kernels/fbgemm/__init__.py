"""FBGEMM behind the kernel interface: its CPU kernels on our storage, its own module on GPUs, its cache of tables.

Made by :mod:`embeddings.embedding_tables` and the sharding layer alone.
"""
