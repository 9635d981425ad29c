"""Preparation of a dataset for a job as a folder of coded, memory-mapped columns. Without torch.

Start reading at ``preparation.prepare``.
"""
