"""From a dataset and a job to a folder of coded, memory-mapped columns, all or nothing. Without torch.

``preparation.prepare`` is the way in.
"""
