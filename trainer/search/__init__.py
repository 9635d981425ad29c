"""Hyperparameter search: trials of a job with other values of its fields, run at once by Ray Tune on this host."""
