"""Registered datasets and the files that they may name."""
