"""Formats of files of rows, a class in a file for each, and the registry of them.

Without torch. :mod:`trainer.data.sources.source` uses them; other packages can register formats of their own.
"""
