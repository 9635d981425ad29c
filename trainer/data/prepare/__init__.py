"""Preparation of a dataset for a job: a folder of coded, memory-mapped columns, all or nothing. Without torch.

``preparation.prepare`` is the way in.
"""
