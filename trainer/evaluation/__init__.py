"""A job's metrics of a held-out split, over any number of ranks."""
