"""Grids of jobs: trials, how each is run, and what is measured after training."""
