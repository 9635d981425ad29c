"""Registered datasets, and checks of the files that a dataset may name."""
