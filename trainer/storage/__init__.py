"""Run storage: a place for files of runs that all hosts can reach, and the cache of a host.

The package does not import torch. Other packages put files into the storage and fetch them; it knows nothing of
checkpoints or data columns.
"""
