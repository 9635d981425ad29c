"""Grids of jobs: points, how each is run, and what is measured after training."""
