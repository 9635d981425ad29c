"""Grids of jobs: trials, how each is run, and the measurements after training."""
